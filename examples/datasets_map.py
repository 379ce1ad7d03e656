"""A column of a Hugging Face dataset, batch by batch: python examples/datasets_map.py [MODEL]. Needs datasets."""

import sys

from datasets import Dataset

from pagedllm import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo-output/SmolLM2-135M-Instruct.gguf"
PARAMS = SamplingParams(temperature=0, max_tokens=3)

dataset = Dataset.from_dict({"city": ["Rome", "Paris", "Tokyo", "Madrid"]})
with LLM(MODEL, max_model_len=512) as llm:

    def add_country(batch: dict[str, list[str]]) -> dict[str, list[str | None]]:
        prompts = [f"The city of {city} lies in the country of" for city in batch["city"]]
        return {"country": llm.generate(prompts, PARAMS, use_tqdm=False).texts}

    # A batch is one call: large batches keep the engine busy. An LLM cannot be pickled, which is how `map` would know
    # the function again, so it is told what the result depends on.
    dataset = dataset.map(
        add_country, batched=True, batch_size=1000, new_fingerprint=llm.fingerprint, load_from_cache_file=False
    )
for row in dataset:
    print(row)
