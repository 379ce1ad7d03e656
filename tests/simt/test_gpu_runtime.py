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
from pagedllm.config import EngineConfig
from pagedllm.errors import LibraryError, NotEnoughMemoryError
from pagedllm.model.decoder import Decoder
from pagedllm.ops.cuda_attention import CudaAttentionBackend
from pagedllm.outputs import RequestOutput
from pagedllm.runtime.compute_device import load_kernels_of
from pagedllm.runtime.cuda_graph import DecodeGraphs, graph_sizes
from pagedllm.runtime.footprint import look_at
from pagedllm.runtime.model_runner import ModelRunner
from pagedllm.runtime.probe import _products
from tests.fake_gpu import FakeGpu
from tests.model.family_models import CASES, build_case
from tests.simt.emulator import Emulator
from tests.simt.test_end_to_end import BYTES_PER_TOKEN, PARAMS, PROMPTS, SIZES
from tests.simt.test_experts import HEADS
from tests.tiny import VOCAB_SIZE, save_tiny_model, save_tokenizer

MAX_MODEL_LEN = 128
MIB, GIB = 1 << 20, 1 << 30


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
        assert eager_gpu.num_captured == 0
    with open_llm(folder, monkeypatch, gpu) as llm:
        assert graphs_of(llm).sizes == [1, 2, 4, 6]
        assert answers(llm.generate(PROMPTS, params, use_tqdm=False)) == eager
        pointers = [graph.pointers() for graph in gpu.graphs]
        assert answers(llm.generate(PROMPTS, params, use_tqdm=False)) == eager
        assert [graph.pointers() for graph in gpu.graphs] == pointers
        assert len(pointers) == 4
    assert gpu.num_replays >= 14
    assert gpu.graphs == []


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe, some layers dense"])
def test_captured_steps_of_experts_give_the_tokens_of_eager_ones(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Routing is read on the device: the graph of a size serves whatever experts tokens choose."""
    build_case(CASES[name], **HEADS, vocab_size=VOCAB_SIZE).bfloat16().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    params = [dataclasses.replace(p, max_tokens=6 + 2 * n) for n, p in enumerate(PARAMS)]
    found = {}
    for enforce_eager in (True, False):
        gpu = FakeGpu()
        settings = {"enforce_eager": enforce_eager, "kv_cache_memory_bytes": MIB, "max_num_seqs": 4}
        with open_llm(tmp_path, monkeypatch, gpu, **settings) as llm:
            found[enforce_eager] = answers(llm.generate(PROMPTS, params, use_tqdm=False))
            decoder = runner_of(llm).decoder
            assert isinstance(decoder, Decoder)
            probed = {linear.shape.out_features for linear, _, _ in _products(decoder)}
    assert found[True] == found[False]
    assert gpu.num_replays > 8
    assert probed >= ({5} if name == "gpt_oss" else {6, 1})  # routers, and the shared expert's gate


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


@pytest.mark.parametrize(("sizes", "figure"), [((12, 4, 3, 3), "22.00"), ((12, 4, 5, 5), "26.00")])
def test_graphs_are_tried_before_the_pool_is_sized_and_measured_after(
    emulator: Emulator,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sizes: tuple[int, ...],
    figure: str,
) -> None:
    """Of 6, 4, 2 and 1 sequences, in GiB: the trial of the first two lets expect 12 + 3 * 4."""
    used = (640 - 16 - 24) * GIB - 4 * MIB
    gpu = FakeGpu(640 * GIB, used, step_bytes=16 * GIB, graph_bytes=lambda index: sizes[index] * GIB)
    settings = {**SHARE, "max_num_seqs": 6, "enforce_eager": False, "max_model_len": 512}
    with caplog.at_level(logging.INFO, "pagedllm"), open_llm(folder, monkeypatch, gpu, **settings) as llm:
        free = 4 * MIB - gpu.memories[0]._bytes.nbytes
        block_bytes = 16 * BYTES_PER_TOKEN
        assert llm.info()["kv_cache_bytes"] == free // 2 // block_bytes * block_bytes
        assert gpu.num_captured == 2 + 4
        caches = {tensor.data_ptr() for layer in runner_of(llm).kv_cache.layers for tensor in layer}
        assert len(gpu.graphs) == 4
        assert all(caches <= graph.pointers() for graph in gpu.graphs)  # the pool's, not the trial's
    (line,) = (r.getMessage() for r in caplog.records if "GiB in all" in r.getMessage())
    assert f"{used / GIB:.2f} GiB used by others" in line
    assert f"4 graphs {figure} GiB (24.00 planned)" in line
    warnings = [r.getMessage() for r in caplog.records if "captured decode steps took" in r.getMessage()]
    assert [text.partition(":")[0] for text in warnings] == (
        ["captured decode steps took 26.00 GiB, 2.00 more than a trial of two sizes let expect"] * (figure == "26.00")
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


@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [
        (
            "the launch failed: no kernel image is available for execution on the device",
            LibraryError,
            r"^the kernels \S+simt\.so do not run on Fake GPU \(the launch failed: no kernel image is available for "
            r"execution on the device\): they were built for other GPUs, or by a newer CUDA than the driver has; build",
        ),
        ("CUDA error: out of memory", NotEnoughMemoryError, r"^Fake GPU is out of memory \(CUDA error: out of mem"),
    ],
)
def test_kernels_that_cannot_start_are_found_when_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, emulator: Emulator, reason: str, error: type[Exception], message: str
) -> None:
    assert load_kernels_of(FakeGpu(), "simt").name == "simt"

    def fail(*args: object) -> None:
        raise RuntimeError(f"{reason}\nException raised from check at device_call.cpp")

    monkeypatch.setattr("pagedllm.runtime.compute_device.gather_rows", fail)
    with pytest.raises(error, match=message):
        load_kernels_of(FakeGpu(), "simt")


def test_a_model_that_does_not_fit_the_gpu_is_refused_before_a_tensor_is_read(
    emulator: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """doctor -m tells the same."""
    gpu = FakeGpu(total=MIB, used_by_others=MIB - 4096)
    monkeypatch.setattr("pagedllm.runtime.footprint.open_device", lambda device: gpu)
    _, footprint = look_at(EngineConfig(model=str(folder), kernels="simt"))
    assert (footprint.available, footprint.fits) == (4096, False)
    with pytest.raises(NotEnoughMemoryError) as caught:
        open_llm(folder, monkeypatch, gpu)
    assert str(caught.value).endswith("available 0.0 MiB: does not fit")
    assert gpu.memories == []


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
