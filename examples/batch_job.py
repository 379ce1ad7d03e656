"""A file of prompts through a model, told before, during and after: python examples/batch_job.py [MODEL] [FOLDER].

Stop it at any moment and run it again: it continues. Another second run finds nothing to do.
"""

import json
import sys
from pathlib import Path

from pagedllm import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo-output/SmolLM2-135M-Instruct.gguf"
FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else "demo-output")

# Rows: `prompt` or `messages`, perhaps `sampling_params`; every other field comes back as it is.
reviews = ["A lovely film, I laughed a lot.", "Two hours that I will never get back.", "Not bad, but far too long."]
rules = "Answer with one word, positive or negative: what does the writer of this review feel?\n\nReview: "
rows = [
    {"id": f"review-{number}", "prompt": f"{rules}{review}\nAnswer:", "sampling_params": {"max_tokens": 4}}
    for number, review in enumerate(reviews)
]
rows.append({"id": "too-long", "prompt": "long " * 5000})  # a row that cannot run costs itself only
requests, answers, report = FOLDER / "reviews.jsonl", FOLDER / "reviews-answered.jsonl", FOLDER / "reviews-report.html"
requests.write_text("".join(json.dumps(row) + "\n" for row in rows))

with LLM(MODEL, max_model_len=1024) as llm:
    result = llm.run_file(requests, answers, sampling_params={"temperature": 0}, report=report)

for line in answers.read_text().splitlines():
    row = json.loads(line)
    print(row["id"], "|", row["error"] or row["output"].strip())
print(
    f"{result.num_rows} rows, {result.num_failed} failed, {result.num_cached_tokens} input tokens came from the cache"
)
print(f"limited by {result.limits()[0]}" if result.limits() else "nothing was left to do")
print("how it went:", report)
