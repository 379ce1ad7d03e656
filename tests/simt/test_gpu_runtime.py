"""The runtime of a GPU, on one that is none: sizing, one copy a step, captured decode steps, memory given back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedllm import LLM, SamplingParams
from pagedllm.errors import NotEnoughMemoryError
from pagedllm.ops.cuda_attention import CudaAttentionBackend
from pagedllm.outputs import RequestOutput
from pagedllm.runtime.cuda_graph import DecodeGraphs, graph_sizes
from pagedllm.runtime.model_runner import ModelRunner
from tests.fake_gpu import FakeGpu
from tests.simt.emulator import Emulator
from tests.simt.test_end_to_end import BYTES_PER_TOKEN, PARAMS, PROMPTS, SIZES
from tests.tiny import save_tiny_model

MAX_MODEL_LEN = 128
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", dtype=torch.bfloat16, **SIZES)


def open_llm(folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, **settings: Any) -> LLM:
    monkeypatch.setattr("pagedllm.runtime.startup.open_device", lambda device: gpu)
    fields = {
        "kernels": "simt", "max_num_batched_tokens": 64, "max_num_seqs": 6, "max_model_len": MAX_MODEL_LEN,
        "num_threads": 1, "kv_cache_memory_bytes": 6 * MAX_MODEL_LEN * BYTES_PER_TOKEN,
    }  # fmt: skip
    return LLM(str(folder), **{**fields, **settings})


def runner_of(llm: LLM) -> ModelRunner:
    return llm._assembly.runtime.runner  # type: ignore[attr-defined, no-any-return]


def graphs_of(llm: LLM) -> DecodeGraphs:
    graphs = runner_of(llm).decode_graphs
    assert graphs is not None
    return graphs


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(o.outputs[0].token_ids), repr(list(o.outputs[0].logprobs or ()))) for o in outputs]


# ---- graphs


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (30, [1, 2, 4, 8, 16, 24, 30]), (4096, [1, 2, 4, *range(8, 257, 8)])],
)
def test_graphs_have_a_few_sizes_up_to_the_largest_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_captured_steps_give_the_tokens_of_eager_ones(
    emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five requests of several lengths, so that sizes 1, 2, 4 and 6 are used, the last with a padded sequence."""
    params = [dataclasses.replace(p, max_tokens=8 + 2 * n) for n, p in enumerate(PARAMS)]
    eager_gpu, gpu = FakeGpu(), FakeGpu()
    with open_llm(folder, monkeypatch, eager_gpu, enforce_eager=True) as llm:
        eager = answers(llm.generate(PROMPTS, params, use_tqdm=False))
        assert eager_gpu.graphs == []
    with open_llm(folder, monkeypatch, gpu) as llm:
        assert graphs_of(llm).sizes == [1, 2, 4, 6]
        assert answers(llm.generate(PROMPTS, params, use_tqdm=False)) == eager
        pointers = [graph.pointers() for graph in gpu.graphs]
        assert answers(llm.generate(PROMPTS, params, use_tqdm=False)) == eager
        assert [graph.pointers() for graph in gpu.graphs] == pointers
    assert sum(graph.num_replays for graph in gpu.graphs) >= 14


def test_captured_steps_share_prefixes(emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [{"prompt_token_ids": [*range(5, 75), *[90 + n] * (1 + n % 3)]} for n in range(6)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for launch_bytes in (1 << 60, 0):  # never, always
        monkeypatch.setattr(CudaAttentionBackend, "shared_launch_bytes", launch_bytes)
        with open_llm(folder, monkeypatch, FakeGpu()) as llm:
            found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_step_is_one_copy_to_the_gpu(
    emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    gpu = FakeGpu()
    with open_llm(folder, monkeypatch, gpu, enforce_eager=enforce_eager) as llm:
        before = gpu.num_copies
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert gpu.num_copies - before == llm.stats.num_steps > 4


def test_callables_masks_and_penalties_work_beside_graphs(
    emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prefer_8(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits.index_fill(0, torch.tensor([8]), 50.0) if len(token_ids) == 2 else logits

    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, allowed_token_ids=[7, 8, 9], presence_penalty=1.5,
        logits_processors=[prefer_8],
    )  # fmt: skip
    with open_llm(folder, monkeypatch, FakeGpu()) as llm:
        (output,) = llm.generate(["one"], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert tokens[2] == 8
    assert set(tokens) <= {7, 8, 9}


# ---- memory


SHARE = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5, "max_num_seqs": 512, "enforce_eager": True}


def test_the_pool_takes_its_share_of_what_weights_and_a_step_leave(
    emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGpu(total=64 * MIB, used_by_others=8 * MIB, step_bytes=16 * MIB)
    with caplog.at_level(logging.INFO, "pagedllm"), open_llm(folder, monkeypatch, gpu, **SHARE) as llm:
        free = 56 * MIB - gpu.memories[0]._bytes.nbytes - 16 * MIB
        block_bytes = 16 * BYTES_PER_TOKEN
        assert llm.info()["kv_cache_bytes"] == free // 2 // block_bytes * block_bytes
        assert llm.info()["device"] == "Fake GPU"
    (line,) = (r.getMessage() for r in caplog.records if "GiB in all" in r.getMessage())
    assert line.startswith(
        "Fake GPU: 0.06 GiB in all, 0.01 GiB used by others, weights 0.00 GiB, a full step's peak 0.02"
    )


def test_a_second_engine_is_sized_by_what_the_first_left(
    emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(total=64 * MIB, used_by_others=0, step_bytes=8 * MIB)
    with open_llm(folder, monkeypatch, gpu, **SHARE) as first, open_llm(folder, monkeypatch, gpu, **SHARE) as second:
        pools = [llm.info()["kv_cache_bytes"] for llm in (first, second)]
        assert 0.3 * pools[0] < pools[1] < 0.6 * pools[0]
        assert gpu.allocated < 64 * MIB
    assert gpu.allocated == 0


def test_close_gives_the_memory_back_also_after_an_exception(
    emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    llm = open_llm(folder, monkeypatch, gpu)
    held = runner_of(llm).kv_cache.layers[0][0]
    assert gpu.allocated > 0
    monkeypatch.setattr(DecodeGraphs, "forward", broken)
    with pytest.raises(RuntimeError, match="a broken kernel"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.close()
    assert gpu.allocated == 0
    assert held.untyped_storage().nbytes() == 0
    with pytest.raises(ValueError, match="no memory for a KV cache"):
        open_llm(folder, monkeypatch, gpu, kv_cache_memory_bytes=16)
    assert gpu.allocated == 0


def broken(*args: object) -> None:
    raise RuntimeError("a broken kernel")


def test_out_of_memory_is_said_in_one_line(emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"^Fake GPU is out of memory \(CUDA out of memory\): take"):
        open_llm(folder, monkeypatch, FakeGpu(total=MIB, used_by_others=MIB - 4096))

    def refuse(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    with open_llm(folder, monkeypatch, FakeGpu()) as llm:
        monkeypatch.setattr(DecodeGraphs, "forward", refuse)
        with pytest.raises(NotEnoughMemoryError, match="Fake GPU is out of memory"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)


# ---- determinism


@pytest.mark.parametrize("varies", [False, True])
def test_determinism_is_what_the_probe_of_products_says(
    emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, varies: bool
) -> None:
    def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:  # a library that chooses its sum by the number of rows
        return out.copy_(a.double() @ b.double() * (1 + 0.01 * (varies and len(a) > 4)))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        return multiply(x, weight.T, torch.empty(len(x), len(weight), dtype=x.dtype))

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    with open_llm(folder, monkeypatch, FakeGpu(), deterministic=True) as llm:
        assert llm.info()["deterministic"] is not varies
    told = [r.getMessage() for r in caplog.records if "depends on the size of its batch" in r.getMessage()]
    assert len(told) == varies
    with open_llm(folder, monkeypatch, FakeGpu()) as llm:
        assert llm.info()["deterministic"] is False  # nobody asked
