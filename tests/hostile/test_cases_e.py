"""CASES (e): memory. E6 is in test_cases_scores.py."""

from __future__ import annotations

import contextlib
import gc
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, SamplingParams
from pagedllm.model import decoder
from pagedllm.runtime import device, profile, startup
from tests.hostile.harness import BYTES_PER_TOKEN, GREEDY, MAX_MODEL_LEN, answers, errors, open_llm
from tests.tiny import SIZES, save_tokenizer

MIB = 1 << 20
POOL_BYTES = 24 * MIB


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights, 38 MB, can be seen in the process's memory."""
    import transformers

    folder = tmp_path_factory.mktemp("wide")
    config = transformers.LlamaConfig(**{**SIZES, "intermediate_size": 16384}, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def open_wide(folder: Path) -> LLM:
    return open_llm(folder, kv_cache_memory_bytes=POOL_BYTES, max_num_seqs=128)


def fill_cache(llm: LLM) -> None:
    assert llm._assembly is not None
    for layer in llm._assembly.runtime.runner.kv_cache.layers:  # type: ignore[attr-defined]
        for tensor in layer:
            tensor.fill_(1.0)


def fail_in_the_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """An exception out of a kernel call, with every frame of the engine and the model in its traceback."""

    def broken(*args: Any, **options: Any) -> None:
        raise MemoryError("a kernel")

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "gather_rows", broken)
        with pytest.raises(MemoryError) as caught:
            llm.generate("one two", GREEDY)
    return caught.value


ENDS: dict[str, Callable[[LLM], None]] = {
    "close": LLM.close,
    "with": lambda llm: llm.__exit__(None, None, None),
}


@pytest.mark.parametrize("end", ENDS)
def test_e1_memory_comes_back_at_once_though_a_traceback_and_outputs_are_held(
    wide_folder: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    open_wide(wide_folder).close()  # what libraries keep for good is there now
    held: list[Any] = []
    gc.collect()
    start = resident_bytes()
    for _ in range(3):
        llm = open_wide(wide_folder)
        held.append(llm.generate(["one two", "three"], SamplingParams(max_tokens=4, logprobs=2)))
        fill_cache(llm)
        held.append(fail_in_the_model(llm, monkeypatch))
        assert resident_bytes() - start > 50 * MIB
        ENDS[end](llm)
        assert resident_bytes() - start < 12 * MIB
        with pytest.raises(RuntimeError, match="this LLM is closed: make a new one"):
            llm.generate("one")
        llm.close()
        llm.close()
    frames = []
    traceback = held[1].__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert {"generate", "step", "execute"} <= set(frames)  # the traceback does hold the engine
    assert all(output.text is not None for output in held[0])
    pickle.loads(pickle.dumps(held[0]))


def test_e1_del_gives_memory_back_where_nothing_is_held(wide_folder: Path) -> None:
    open_wide(wide_folder).close()
    gc.collect()
    start = resident_bytes()
    for _ in range(2):
        llm = open_wide(wide_folder)
        outputs = llm.generate("one two", GREEDY)
        fill_cache(llm)
        del llm
        gc.collect()
        assert resident_bytes() - start < 12 * MIB
    assert outputs[0].text


def test_e1_errors_of_requests_hold_no_engine(llm: LLM) -> None:
    def failing(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    outputs = llm.generate("one", SamplingParams(logits_processors=[failing]), on_error="return")
    error = errors(outputs)[0]
    assert error is not None
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
    assert str(pickle.loads(pickle.dumps(outputs))[0].error) == "logits_processors[0] (failing) raised ValueError: no"


# E2, E5: sizes


@contextlib.contextmanager
def container(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, limit: int, used: int, cpus: float = 2.0
) -> Iterator[None]:
    """A container as its cgroup files say, version 2; the machine's own files are the real ones."""
    folder.mkdir(exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used}\ninactive_file 0\n")
    (folder / "cpu.max").write_text(f"{int(cpus * 100_000)} 100000\n")
    with monkeypatch.context() as patch:
        patch.setattr(device.MemoryLimits, "free", property(lambda self: self.available))
        patch.setattr(profile, "read_memory_limits", partial(device.read_memory_limits, folder))
        patch.setattr(startup, "read_thread_limits", partial(device.read_thread_limits, folder))
        yield


def test_e5_the_pool_is_sized_from_the_containers_limit_and_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 4 * MIB
    with container(monkeypatch, tmp_path / "cgroup", limit=2 << 30, used=(2 << 30) - free, cpus=1.0):
        caplog.set_level("INFO", "pagedllm")
        with LLM(folder, dtype="float32", max_model_len=MAX_MODEL_LEN) as llm:
            info = llm.info()
            expected = int(free * 0.9) // (16 * BYTES_PER_TOKEN)
            assert info["num_blocks"] == expected
            assert info["kv_cache_bytes"] == expected * 16 * BYTES_PER_TOKEN <= 0.9 * free
            assert info["num_threads"] == 1
            assert llm.generate("one two", GREEDY)[0].text
    assert f"{expected:,} blocks of 16 tokens" in caplog.text


def test_e5_with_room_the_pool_is_what_max_num_seqs_requests_can_fill(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        container(monkeypatch, tmp_path / "cgroup", limit=2 << 30, used=1 << 30),
        LLM(folder, dtype="float32", max_model_len=MAX_MODEL_LEN) as llm,
    ):
        assert llm.info()["num_blocks"] == 128 * MAX_MODEL_LEN // 16


def test_e5_a_container_with_no_room_is_an_error_with_the_numbers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        container(monkeypatch, tmp_path / "cgroup", limit=2 << 30, used=2 << 30),
        pytest.raises(
            ValueError, match=r"^a step of max_num_batched_tokens=512 takes at least .* MiB, and 0\.0 MiB are free"
        ),
    ):
        LLM(folder, dtype="float32")


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_e2_the_share_is_of_what_is_free_now(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    with (
        container(monkeypatch, tmp_path / "cgroup", limit=2 << 30, used=(2 << 30) - 8 * MIB),
        LLM(
            folder, dtype="float32", max_model_len=MAX_MODEL_LEN, gpu_memory_utilization=share, max_num_seqs=128
        ) as llm,
    ):
        assert llm.info()["num_blocks"] == min(1024, int(8 * MIB * share) // (16 * BYTES_PER_TOKEN))


def test_e2_a_second_engine_does_not_count_the_firsts_pool_twice(folder: Path) -> None:
    """A pool that is mapped but not touched is no free memory of the second engine; what is touched is counted once."""
    pool = 64 * MIB
    before = device.read_memory_limits().reserved
    with open_llm(folder, kv_cache_memory_bytes=pool, max_num_seqs=128, max_model_len=512) as llm:
        assert llm.info()["kv_cache_bytes"] > 0.99 * pool
        assert abs(device.read_memory_limits().reserved - before - pool) < 16 * MIB
        fill_cache(llm)  # now the system counts it as used, and we no longer do
        assert abs(device.read_memory_limits().reserved - before) < 16 * MIB


def test_e2_two_engines_in_one_process_both_work(folder: Path) -> None:
    with open_llm(folder) as first, open_llm(folder, block_size=8, seed=7) as second:
        for prompt in ("one", "two three", "one"):
            assert answers(first.generate(prompt, GREEDY)) == answers(second.generate(prompt, GREEDY))
        first.close()
        assert second.generate("one", GREEDY)[0].text
