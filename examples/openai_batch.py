"""An OpenAI batch file answered on this machine: python examples/openai_batch.py [MODEL] [IN] [OUT].

The same on the command line: pagedllm run -m MODEL -i examples/openai_batch.jsonl -o demo-output/openai-answers.jsonl
"""

import json
import sys

from pagedllm import LLM

MODEL, REQUESTS, ANSWERS, *_ = [
    *sys.argv[1:],
    *("demo-output/SmolLM2-135M-Instruct.gguf", "examples/openai_batch.jsonl", "demo-output/openai-answers.jsonl")[
        len(sys.argv) - 1 :
    ],
]

with LLM(MODEL, max_model_len=1024) as llm:
    llm.run_file(REQUESTS, ANSWERS)

with open(ANSWERS) as file:
    for answer in map(json.loads, file):
        body = answer["response"]["body"]
        if answer["response"]["status_code"] == 200:
            print(answer["custom_id"], "|", body["choices"][0]["message"]["content"])
        else:  # a request that asks for what is not there is refused by name; the others are answered
            print(answer["custom_id"], "|", body["error"]["message"])
