"""A peer for tests: speaks the drivers' protocol and answers with zeros.

Usage: fake_peer.py [MISBEHAVIOUR [LOG]]; each call's sampling is a line of LOG.
"""

import json
import sys

misbehaviour = sys.argv[1] if len(sys.argv) > 1 else ""
if misbehaviour == "no start":
    sys.exit(3)
print(json.dumps({"engine": "Fake 1.0"}), flush=True)
for line in sys.stdin:
    if misbehaviour == "dies":
        sys.exit(4)
    request = json.loads(line)
    if len(sys.argv) == 3:
        with open(sys.argv[2], "a") as log:
            print(json.dumps(request["sampling"]), file=log)
    output_token_ids = [[0] * count for count in request["num_output_tokens"]]
    if misbehaviour == "short":
        output_token_ids[-1].pop()
    if misbehaviour == "loses one":
        output_token_ids.pop()
    print(json.dumps({"seconds": 0.5, "output_token_ids": output_token_ids}), flush=True)
