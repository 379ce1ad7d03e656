"""Real models: SmolLM2-135M-Instruct in both of its forms, against transformers, and Gemma 3 270M (slow)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time there was a small dragon who",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "To bake bread you need",
    "In 1969 the first human",
    "SELECT name, age FROM",
    "Die Hauptstadt von Deutschland ist",
    "The opposite of hot is",
    "A list of fruits: apple, banana,",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 5, 8, 13,",
    "The largest planet of the solar system is",
    "Roses are red, violets are",
    "She opened the door and saw",
    "The derivative of x^2 is",
    "Breaking news:",
    "import numpy as np\n\n",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PARITY_TOKENS = 16


def greedy_texts(llm: LLM, num_tokens: int) -> list[str]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    return outputs.texts


def test_gguf_and_safetensors_give_equal_ids(demo_gguf: Path, demo_safetensors: Path) -> None:
    with LLM(str(demo_gguf), kv_cache_memory_bytes=1 << 28) as llm:
        from_gguf = llm.generate(PROMPTS, GREEDY)
    with LLM(str(demo_safetensors), kv_cache_memory_bytes=1 << 28) as llm:
        from_safetensors = llm.generate(PROMPTS, GREEDY)
    assert [o.prompt_token_ids for o in from_gguf] == [o.prompt_token_ids for o in from_safetensors]
    assert [o.outputs[0].token_ids for o in from_gguf] == [o.outputs[0].token_ids for o in from_safetensors]
    assert from_gguf[0].text.startswith(" Paris")


def test_greedy_text_in_float32_is_that_of_transformers(demo_safetensors: Path) -> None:
    import torch
    import transformers

    with LLM(str(demo_safetensors), dtype="float32", kv_cache_memory_bytes=1 << 28) as llm:
        ours = greedy_texts(llm, PARITY_TOKENS)
        tokenizer = llm._open().builder.tokenizer
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_safetensors, dtype=torch.float32)
    for prompt, text in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=PARITY_TOKENS,
            min_new_tokens=PARITY_TOKENS,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert text == tokenizer.decode(output[0, ids.shape[1] :].tolist()), prompt


def test_a_batch_gives_what_each_prompt_gives_alone(demo_safetensors: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    with LLM(str(demo_safetensors), kv_cache_memory_bytes=1 << 28) as llm:
        together = llm.generate(PROMPTS, params)
        llm.reset_prefix_cache()
        for prompt, output in zip(PROMPTS[:8], together, strict=False):
            (alone,) = llm.generate([prompt], params)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].logprobs == output.outputs[0].logprobs


@pytest.mark.slow
def test_gemma_3_goes_on_sensibly(gemma3_gguf: Path) -> None:
    """A base model, without a chat template: it continues texts."""
    params = SamplingParams(temperature=0, max_tokens=8)
    capitals = "Germany: Berlin\nItaly: Rome\nSpain: Madrid\nFrance:"
    with LLM(str(gemma3_gguf), kv_cache_memory_bytes=1 << 28) as llm:
        capital, numbers = llm.generate([capitals, "1, 2, 3, 4, 5,"], params).texts
    assert capital.startswith(" Paris\n")
    assert numbers.startswith(" 6, 7, 8")
