"""What a large job costs beyond the model: memory, and the host's time for each row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 150_000
SCRIPT = """
import resource, sys, time
import pagedllm.llm
from pagedllm import LLM
from tests.fake_assembly import FakeRunner, fake_assemble

FakeRunner.next_token = lambda self, *rest: 100
pagedllm.llm.assemble = lambda config: fake_assemble(config, num_blocks=4096)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

params = {"temperature": 0, "max_tokens": 1}
with LLM("fake", max_num_seqs=256, max_num_batched_tokens=8192) as llm:
    llm.run_file(sys.argv[1] + "/small", sys.argv[1] + "/small.out", sampling_params=params)
    before, begin = peak(), time.process_time()
    llm.run_file(sys.argv[1] + "/large", sys.argv[1] + "/large.out", sampling_params=params)
    print(peak() - before, time.process_time() - begin)
"""


@pytest.mark.slow
def test_a_million_rows_would_take_less_than_300_mb_and_150_us_each(tmp_path):
    """A file of a part of that: both grow with the rows, besides a few windows' worth."""
    for name, num_rows in (("small", 1000), ("large", NUM_ROWS)):
        (tmp_path / name).write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(num_rows)))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    mebibytes, seconds = map(float, done.stdout.split())
    assert mebibytes / NUM_ROWS * 1_000_000 < 300 * 1.1  # what does not grow counts here
    assert seconds / NUM_ROWS < 150e-6
