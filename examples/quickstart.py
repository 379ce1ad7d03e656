"""Some prompts at once: python examples/quickstart.py [MODEL]."""

import sys

from pagedllm import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo-output/SmolLM2-135M-Instruct.gguf"

with LLM(MODEL, max_model_len=1024) as llm:
    prompts = ["The capital of Italy is", "1, 2, 3, 4,", "The opposite of cold is"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)):
        print(repr(output.prompt), "->", repr(output.text), output.outputs[0].finish_reason)
