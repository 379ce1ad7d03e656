"""Prints some of the rows that `pagedllm run` wrote: python examples/show_answers.py OUT.jsonl [COUNT]."""

import json
import sys
from pathlib import Path

rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
count = int(sys.argv[2]) if len(sys.argv) > 2 else 5
for row in rows[:: max(1, len(rows) // count)][:count]:
    question = row["prompt"] if "prompt" in row else row["messages"][-1]["content"]
    answer = row["error"] or row["output"]
    print(f"\n--- row {row['row']}, {row['completion_tokens']} tokens, {row['finish_reason']}\n{question.strip()}")
    print("  > " + answer.strip().replace("\n", "\n  > "))
