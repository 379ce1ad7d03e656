"""Layers with a window keep what it shows and no more: right tokens, whatever left-behind blocks hold, less memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, SamplingParams
from pagedllm.cache.block_hash import extend_block_hashes
from pagedllm.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.hostile.harness import make_request
from tests.tiny import VOCAB_SIZE, save_tiny_model

WINDOWED = ("gemma3", "mistral")
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_tiny_model(root / kind, kind) for kind in WINDOWED}


def random_prompts(seed: int, lengths: list[int], num_shared: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(num_shared)]
    return [shared + [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def open_llm(folder: Path, **fields: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 2 << 20, **fields})


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("kind", WINDOWED)
def test_texts_many_windows_long_equal_transformers(folders: dict[str, Path], kind: str) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    prompts = random_prompts(1, [5, 150, 333])
    with open_llm(folders[kind], max_num_batched_tokens=100) as llm:
        found = tokens(llm, prompts)
    for prompt, output in zip(prompts, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=100, min_new_tokens=100, pad_token_id=0
        )
        assert output == expected[0, len(prompt) :].tolist()


class Poisoner:
    """Before each step fills every block that nobody holds with NaN."""

    def __init__(self, llm: LLM) -> None:
        assert llm._assembly is not None
        self.engine, self.runner = llm._assembly.engine, llm._assembly.runtime.runner  # type: ignore[attr-defined]
        self.execute, self.engine._execute = self.engine._execute, self
        self.num_left_behind = 0

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        manager = self.engine._state.scheduler.kv_cache
        free = [block.block_id for block in manager.pool.blocks if block.ref_count == 0]
        for k, v in self.runner.kv_cache.tensors:
            k[free] = torch.nan
            v[free] = torch.nan
        for table in manager._tables.values():
            self.num_left_behind += sum(table.num_blocks - len(blocks) for blocks in table.blocks)
        return self.execute(plan)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", WINDOWED)
def test_nobody_reads_what_was_left_behind(folders: dict[str, Path], kind: str, dtype: str, kernels: str) -> None:
    prompts = random_prompts(2, [3, 60, 160])
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    found = []
    for block_size in (8, 16, 64):
        fields = {"dtype": dtype, "kernels": kernels, "block_size": block_size, "enable_prefix_caching": False}
        with open_llm(folders[kind], max_model_len=240, max_num_batched_tokens=70, **fields) as llm:
            expected = tokens(llm, prompts, params)
            poisoner = Poisoner(llm)
            found.append(tokens(llm, prompts, params))
            assert found[-1] == expected
            assert poisoner.num_left_behind > 0
    if kernels == "auto":
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_hit_needs_no_more_than_the_windows_show(folders: dict[str, Path], kind: str) -> None:
    prompts = random_prompts(3, [20, 21, 22], num_shared=160)
    with open_llm(folders[kind], enable_prefix_caching=False) as llm:
        expected = tokens(llm, prompts)
    with open_llm(folders[kind], max_num_batched_tokens=64) as llm:
        assert tokens(llm, prompts[:1]) == expected[:1]
        request = make_request(llm, "names", prompts[0], GREEDY)
        extend_block_hashes(request, 16)
        shown = request.block_hashes[8:10]  # token 160 sees 137 .. 160
        assert llm._assembly is not None
        pool = llm._assembly.engine.scheduler.kv_cache.pool
        windows = llm.info()["kv_windows"]
        for block in pool.blocks:
            if windows[block.group] and block.block_hash not in shown:
                pool.forget(block)
        outputs = llm.generate(prompts[1:], GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected[1:]
        assert [output.num_cached_tokens for output in outputs] == [160, 160]


@pytest.fixture(scope="module")
def long_gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Gemma 3 1B's 26 layers, every sixth without a window, at a fraction of its width."""
    folder = save_tiny_model(
        tmp_path_factory.mktemp("gemma"),
        "gemma3",
        num_hidden_layers=26,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)],
        sliding_window=512,
        max_position_embeddings=8192,
        num_key_value_heads=1,
        num_attention_heads=1,
    )
    with open_llm(folder, dtype="bfloat16", kv_cache_memory_bytes=256 << 20, max_num_seqs=2) as llm:
        yield llm


def test_a_gemma_3_at_8k_takes_less_than_two_fifths_of_the_memory(long_gemma: LLM) -> None:
    info = long_gemma.info()
    assert info["kv_windows"] == [512] * 6 + [0]
    assert info["kv_bytes_without_windows"] == 8192 * 26 * 2 * 32 * 2
    assert info["kv_bytes_of_longest_text"] <= 0.4 * info["kv_bytes_without_windows"]
    assert long_gemma._assembly is not None
    (prompt,) = random_prompts(4, [8150])
    tokens(long_gemma, [prompt], SamplingParams(temperature=0, max_tokens=42, ignore_eos=True))
    used = long_gemma.stats.peak_num_blocks * long_gemma._assembly.bytes_per_block
    assert used <= info["kv_bytes_of_longest_text"]
    assert used >= 0.9 * info["kv_bytes_of_longest_text"]
