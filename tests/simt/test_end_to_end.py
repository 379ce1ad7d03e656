"""Models generate through the emulated CUDA kernels: embedding to sampler, as a GPU would run them.

Products are torch's, which promise no equal bits for a row in batches of other sizes. Where this CPU's torch gives
them, all that is left is ours, and settings must change nothing; else that test is skipped.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedllm import LLM, SamplingParams
from pagedllm.errors import ModelError, NotSupportedError
from pagedllm.model.dense_format import DenseFormat
from pagedllm.model.loader import load_model, open_checkpoint
from pagedllm.ops.attention import AttentionPlan
from pagedllm.ops.cuda_attention import SHARED as SHARED_ITEM
from pagedllm.ops.cuda_attention import CudaAttentionBackend
from tests.model.harness import Sequences, load
from tests.simt.emulator import Emulator
from tests.tiny import VOCAB_SIZE, save_tiny_model

SIMT = "pagedllm_simt"
SIZES = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
BYTES_PER_TOKEN = 3 * 2 * 64 * 2  # layers, K and V, head size, bytes
MAX_MODEL_LEN = 128
SHARED = "the quick brown fox jumps over the lazy dog. "
PROMPTS = [SHARED * 2, SHARED * 2 + "one two three", "a", "seven eight nine ten " * 3, SHARED * 2 + "zyx"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=1, min_tokens=8, max_tokens=8),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=2, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=1.2, min_p=0.02, seed=3, max_tokens=8, ignore_eos=True, logit_bias={5: 2.0}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        kind: save_tiny_model(root / kind, kind, dtype=torch.bfloat16, **SIZES) for kind in ("llama", "qwen3", "gemma3")
    }


def open_llm(folder: Path, num_full_requests: int = 8, max_model_len: int = MAX_MODEL_LEN, **settings: Any) -> LLM:
    fields = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": max_model_len, "num_threads": 1}
    kv_bytes = num_full_requests * max_model_len * BYTES_PER_TOKEN
    return LLM(str(folder), kernels="simt", kv_cache_memory_bytes=kv_bytes, **{**fields, **settings})


def simt_logits(folder: Path, token_ids: list[int], dtype: torch.dtype, chunk: int) -> Tensor:
    backend = CudaAttentionBackend(SIMT)
    decoder = load_model(open_checkpoint(str(folder)), dtype, backend, SIMT, DenseFormat(dtype))
    sequences = Sequences(decoder, backend=backend, max_model_len=MAX_MODEL_LEN)
    return sequences.logits(token_ids, chunk=chunk, num_total_tokens=MAX_MODEL_LEN)


def twin_logits(folder: Path, token_ids: list[int], dtype: torch.dtype) -> Tensor:
    sequences = Sequences(load(folder, dtype), max_model_len=MAX_MODEL_LEN)
    return sequences.logits(token_ids, num_total_tokens=MAX_MODEL_LEN)


def root_mean_square(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_logits_are_as_exact_as_the_twins_in_16_bits(emulator: Emulator, folders: dict[str, Path], kind: str) -> None:
    token_ids = torch.randint(VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = twin_logits(folders[kind], token_ids, torch.float32)
    twin_error = root_mean_square(twin_logits(folders[kind], token_ids, torch.bfloat16) - exact)
    found = {dtype: simt_logits(folders[kind], token_ids, dtype, 40) for dtype in (torch.bfloat16, torch.float16)}
    assert twin_error < 0.05 * root_mean_square(exact)
    assert root_mean_square(found[torch.bfloat16] - exact) < 1.5 * twin_error
    assert root_mean_square(found[torch.float16] - exact) < 0.25 * twin_error  # three bits more


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_greedy_tokens_are_the_twins_wherever_the_choice_is_clear(
    emulator: Emulator, folders: dict[str, Path], kind: str
) -> None:
    num_launches = emulator.counters()["launches"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with open_llm(folders[kind]) as llm:
        (output,) = llm.generate(["the quick brown fox"], params, use_tqdm=False)
    assert emulator.counters()["launches"] > num_launches
    prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    exact = twin_logits(folders[kind], prompt + tokens, torch.float32)[len(prompt) - 1 : -1]
    found = simt_logits(folders[kind], prompt + tokens, torch.bfloat16, MAX_MODEL_LEN)[len(prompt) - 1 : -1]
    error = (found - exact).abs().amax(1)
    assert float(error.max()) < 1
    best, second = exact.topk(2).values.unbind(1)
    is_clear = best - second > 2 * error
    assert int(is_clear.sum()) >= 10
    assert torch.equal(exact.argmax(1)[is_clear], torch.tensor(tokens)[is_clear])


# ---- settings change nothing


SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {},
    "chunks": {"max_num_batched_tokens": 13, "block_size": 8, "enable_prefix_caching": False},
    "large chunks": {"max_num_batched_tokens": 31, "block_size": 64},
}


def answers(llm: LLM, is_batch: bool) -> list[tuple[tuple[int, ...], str]]:
    """Tokens and logprobs."""
    outputs = (
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        if is_batch
        else [llm.generate([p], s, use_tqdm=False)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    )
    return [(tuple(o.outputs[0].token_ids), repr(list(o.outputs[0].logprobs or ()))) for o in outputs]


def test_settings_change_nothing(emulator: Emulator, row_invariant_products: None, folders: dict[str, Path]) -> None:
    with open_llm(folders["gemma3"], enable_prefix_caching=False) as llm:
        alone = answers(llm, is_batch=False)
    assert len({tokens for tokens, _ in alone}) == len(alone)
    for name, settings in SETTINGS.items():
        with open_llm(folders["gemma3"], **settings) as llm:
            assert answers(llm, is_batch=True) == alone, name
            if name == "batch":  # every full block of the prompts is in the cache now
                assert answers(llm, is_batch=True) == alone, "prefix hits"
                assert llm.stats.num_cached_tokens > 0


def test_preemption_changes_nothing(emulator: Emulator, row_invariant_products: None, folders: dict[str, Path]) -> None:
    prompts = ["a", "zyx", "one"]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=16, ignore_eos=True) for t in (0, 1, 0.7)]
    with open_llm(folders["llama"]) as llm:
        alone = [llm.generate([p], s, use_tqdm=False)[0].outputs[0] for p, s in zip(prompts, params, strict=True)]
    crowded = {"num_full_requests": 1, "max_model_len": 32, "block_size": 8, "scheduling_policy": "fcfs"}
    with open_llm(folders["llama"], **crowded) as llm:
        starved = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats.num_preemptions > 0
    assert [o.outputs[0].token_ids for o in starved] == [o.token_ids for o in alone]


# ---- what is refused


def test_what_the_kernels_cannot_do_is_refused_by_name(
    emulator: Emulator, folders: dict[str, Path], tmp_path: Path
) -> None:
    num_launches = emulator.counters()["launches"]
    with pytest.raises(NotSupportedError, match="dtype='float32' is not supported by kernels='simt': pass dtype='bfl"):
        open_llm(folders["llama"], dtype="float32")
    with pytest.raises(ModelError, match=r"head_dim 32 is not supported; the kernels have 64, 80, 96, 112, 128, 256"):
        open_llm(save_tiny_model(tmp_path / "heads"))
    with pytest.raises(
        NotSupportedError, match=r"64 by 100 is not supported.*intermediate_size must be multiples of 8"
    ):
        open_llm(save_tiny_model(tmp_path / "odd", **SIZES, intermediate_size=100))
    assert emulator.counters()["launches"] == num_launches


def test_float16_generates(emulator: Emulator, folders: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = {}
    for dtype in ("half", "bfloat16"):
        with open_llm(folders["qwen3"], dtype=dtype) as llm:
            tokens[dtype] = llm.generate(["one two three"], params, use_tqdm=False)[0].outputs[0].token_ids
    assert tokens["half"] == tokens["bfloat16"]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_attending_prefixes_together_changes_nothing(
    emulator: Emulator,
    row_invariant_products: None,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Twelve requests with 66 tokens in common. Layers with a window and those without are planned each for itself."""
    prefix = list(range(5, 71))
    prompts = [{"prompt_token_ids": prefix + [100 + n] * (1 + n % 3)} for n in range(12)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    num_shared: Counter[int] = Counter()  # items, by window
    plan = CudaAttentionBackend.plan

    def watched(*args: Any) -> AttentionPlan:
        result = plan(*args)
        num_shared[args[-1]] += int((result.work[1:, 7] == SHARED_ITEM).sum())
        return result

    monkeypatch.setattr(CudaAttentionBackend, "plan", watched)
    found = {}
    for launch_bytes in (1 << 60, 0):  # never, always
        monkeypatch.setattr(CudaAttentionBackend, "shared_launch_bytes", launch_bytes)
        num_shared.clear()
        with open_llm(folders[kind], num_full_requests=18, max_num_seqs=12, max_num_batched_tokens=128) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            windows = llm.info()["kv_windows"]
        found[launch_bytes] = [(o.outputs[0].token_ids, repr(list(o.outputs[0].logprobs or ()))) for o in outputs]
        assert set(num_shared) == set(windows)
        assert all((count > 4) == (launch_bytes == 0) for count in num_shared.values())
    assert found[0] == found[1 << 60]
