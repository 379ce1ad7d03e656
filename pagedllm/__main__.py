"""`python -m pagedllm` is the command line."""

import sys

from pagedllm.cli import main

sys.exit(main())
