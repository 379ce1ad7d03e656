"""Memory is told from headers, before a tensor is read or a GGUF file is converted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pagedllm import LLM
from pagedllm.config import EngineConfig
from pagedllm.errors import NotEnoughMemoryError, PagedLLMError
from pagedllm.model.checkpoint import SafetensorsCheckpoint, Stored
from pagedllm.model.host_memory import HostMemory
from pagedllm.runtime import footprint
from pagedllm.runtime.device import MemoryLimits
from pagedllm.runtime.footprint import Footprint, measure
from tests.tiny import save_tiny_model

GIB = 1 << 30
TEXT = re.compile(
    r"\d+\.\d [GM]B on disk \(4-bit\), \d+\.\d GiB in memory as bfloat16, "
    r"\+ \d+\.\d [GM]iB KV for one 2,048-token request; available \d+\.\d GiB: (fits|does not fit)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("footprint") / "model")


def have(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(footprint, "read_memory_limits", lambda: MemoryLimits(num_bytes, num_bytes, 0))


def test_memory_is_told_in_these_words() -> None:
    told = Footprint(Stored(2_500_000_000, "4-bit"), int(7.5 * GIB), "bfloat16", int(0.3 * GIB), 2048, int(5.9 * GIB))
    assert not told.fits
    assert str(told) == (
        "2.5 GB on disk (4-bit), 7.5 GiB in memory as bfloat16, + 0.3 GiB KV for one 2,048-token request; "
        "available 5.9 GiB: does not fit"
    )
    small = Footprint(Stored(1_500_000, "float32"), 3 << 20, "float32", 96 << 10, 512, 50 << 20)
    assert str(small) == (
        "1.5 MB on disk (float32), 3.0 MiB in memory as float32, + 0.1 MiB KV for one 512-token request; "
        "available 50.0 MiB: fits"
    )


def test_what_is_told_is_what_is_taken(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    told = measure(EngineConfig(model=str(folder)), torch.float32, checkpoint, checkpoint.stored)
    with LLM(folder, dtype="float32", max_model_len=512, max_num_seqs=1, num_threads=1) as llm:
        runtime = llm._open().runtime
        assert told.weight_bytes == runtime.runner.decoder.memory.num_taken  # type: ignore[attr-defined]
        assert (told.num_tokens, told.kv_bytes) == (512, llm.info()["kv_cache_bytes"])
    assert told.stored == Stored((folder / "model.safetensors").stat().st_size, "float32")


def test_a_model_that_does_not_fit_is_refused_before_a_tensor_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, 1000)
    monkeypatch.setattr(SafetensorsCheckpoint, "read", lambda self, name: pytest.fail("a tensor was read"))
    with pytest.raises(NotEnoughMemoryError, match=r"/model: 0\.\d MB on disk \(float32\), .* not fit$") as caught:
        LLM(folder)
    assert isinstance(caught.value, (PagedLLMError, MemoryError))
    assert isinstance(caught.value, ValueError)


def test_a_gguf_file_that_does_not_fit_is_refused_before_it_is_converted(
    demo_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDLLM_CACHE", str(tmp_path))
    have(monkeypatch, 200 << 20)
    with pytest.raises(NotEnoughMemoryError) as caught:
        LLM(demo_gguf)
    told = str(caught.value).partition(".gguf: ")[2]
    assert TEXT.fullmatch(told), told
    assert " on disk (4-bit), 0.3 GiB in memory as bfloat16, + 45.0 MiB KV" in told
    assert list(tmp_path.rglob("*")) == []


def test_a_model_that_fits_is_told_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagedllm")
    with LLM(folder, max_model_len=64, kv_cache_memory_bytes=8 << 20, num_threads=1):
        assert [r.message for r in caplog.records if r.message.endswith(": fits")]


def test_an_llm_that_is_still_open_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, max_model_len=64, kv_cache_memory_bytes=8 << 20, num_threads=1):
        have(monkeypatch, 1000)
        with pytest.raises(MemoryError, match=r"fit; an LLM of .*/model is open in this process: close\(\) it"):
            LLM(folder)
    with pytest.raises(MemoryError, match=r"does not fit$"):
        LLM(folder)


@pytest.mark.parametrize("num_tokens", [10**8, 10**15])
def test_a_step_that_cannot_fit_is_refused_by_name_before_memory_is_taken(folder: Path, num_tokens: int) -> None:
    with pytest.raises(NotEnoughMemoryError, match=rf"max_num_batched_tokens={num_tokens:,} takes at least .* GiB are"):
        LLM(folder, max_num_batched_tokens=num_tokens, num_threads=1)


def test_a_mapping_that_cannot_be_had_is_told_in_bytes() -> None:
    with pytest.raises(NotEnoughMemoryError, match="1,152,921,504,606,846,976 bytes of memory cannot be had"):
        HostMemory(1 << 60)
