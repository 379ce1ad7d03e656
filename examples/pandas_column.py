"""A column of a DataFrame in, a new column out: python examples/pandas_column.py [MODEL]. Needs pandas."""

import sys

import pandas as pd

from pagedllm import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo-output/SmolLM2-135M-Instruct.gguf"

df = pd.DataFrame({"city": ["Rome", "Paris", "Tokyo"]})
with LLM(MODEL, max_model_len=512) as llm:
    prompts = df["city"].map("The city of {} lies in the country of".format)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3))
df["country"] = outputs.texts  # outputs are in the order of the prompts
print(df)
print(outputs.to_pandas()[["prompt", "output", "completion_tokens"]])
