"""Manners: what an LLM neither takes from its caller's process nor changes in it. The others are in test_llm.py
(locks, calls from inside a call), test_submit.py (event loops, threads) and hostile/test_cases_b.py (a real fork)."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedllm import LLM, BatchError, RequestError, SamplingParams
from pagedllm.engine.core import EngineCore
from tests.tiny import save_tiny_model

PROMPTS = ["the quick brown fox", "one two three"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
SMALL = {"max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("manners") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SMALL) as llm:  # type: ignore[arg-type]
        yield llm


def answer(llm: LLM) -> list[tuple[object, ...]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(o.text, o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


def test_no_setting_of_torch_in_the_callers_thread_changes_us_or_is_changed(folder: Path, llm: LLM) -> None:
    expected = answer(llm)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    torch.set_flush_denormal(False)
    try:
        with (
            torch.device("meta"),
            torch.enable_grad(),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.inference_mode(False),
            LLM(folder, **SMALL) as inner,  # type: ignore[arg-type]
        ):
            assert answer(inner) == answer(llm) == expected
            assert torch.get_default_device() == torch.device("meta")
            assert torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
        with torch.inference_mode(), torch.no_grad():
            assert answer(llm) == expected
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_num_threads() == 3
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


def test_random_states_are_neither_read_nor_moved(llm: LLM) -> None:
    sampled = SamplingParams(max_tokens=8, seed=1)
    expected = llm.generate(PROMPTS, sampled, use_tqdm=False).texts
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        assert llm.generate(PROMPTS, sampled, use_tqdm=False).texts == expected
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert (np.random.get_state()[1] == before[2]).all()


def test_no_signal_handler_is_installed_and_the_environment_stays(folder: Path) -> None:
    def state() -> tuple[object, ...]:
        return [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)], dict(os.environ)

    before = state()
    with LLM(folder, **SMALL) as llm:  # type: ignore[arg-type]
        answer(llm)
        assert state() == before
        assert llm.submit("one", GREEDY).result().text
    assert state() == before


def test_nothing_spins_once_a_call_has_ended(folder: Path) -> None:
    """Kernel threads wait without a core; processor time counts whatever else the machine does."""
    with LLM(folder, **{**SMALL, "num_threads": 3}) as llm:  # type: ignore[arg-type]
        answer(llm)
        time.sleep(0.05)  # torch's own threads, where a call used them, spin for some milliseconds
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.05


def test_it_works_in_a_thread_and_under_a_running_event_loop(llm: LLM) -> None:
    expected = answer(llm)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(answer(llm)))
    thread.start()
    thread.join()

    async def main() -> object:
        return answer(llm), await asyncio.to_thread(answer, llm)

    assert asyncio.run(main()) == (expected, expected)
    assert found == [expected]


GIL = """
import sys, threading, time
from pagedllm import LLM, SamplingParams
with LLM(sys.argv[1], max_model_len=512, kv_cache_memory_bytes=64 << 20, num_threads=1) as llm:
    prompt = [[5] * 480] * 16
    params = SamplingParams(temperature=0, max_tokens=1)
    is_done, gaps = threading.Event(), []
    def tick():
        last = time.perf_counter()
        while not is_done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    llm.generate(prompt, params, use_tqdm=False)
    took = time.perf_counter() - begin
    is_done.set()
    thread.join()
    print(len(gaps), took)
"""


def test_the_interpreter_lock_is_released_in_kernels(tmp_path: Path) -> None:
    """Steps that take tens of milliseconds each in kernels; the other thread runs a few times in each of them."""
    wide = save_tiny_model(tmp_path / "wide", intermediate_size=8192)
    done = subprocess.run([sys.executable, "-c", GIL, str(wide)], capture_output=True, text=True, check=True)
    num_ticks, took = done.stdout.split()
    assert int(num_ticks) > 5 + 60 * float(took)


def test_outputs_params_and_errors_pickle_small_and_hold_no_engine(llm: LLM) -> None:
    outputs = llm.generate([*PROMPTS, "x" * 500], GREEDY, use_tqdm=False, on_error="return")
    for value in (outputs, outputs[0], GREEDY, outputs[2].error, BatchError("text", outputs)):
        data = pickle.dumps(value)
        assert len(data) < 30_000
        again = pickle.loads(data)
        assert type(again) is type(value)
    again = pickle.loads(pickle.dumps(outputs))
    assert [o.text for o in again] == outputs.texts
    assert [list(o.outputs[0].logprobs) for o in again[:2]] == [list(o.outputs[0].logprobs) for o in outputs[:2]]
    assert isinstance(again[2].error, RequestError)
    assert (again[2].error.code, again[2].error.index) == ("prompt_too_long", 2)
    with pytest.raises(TypeError, match="an LLM cannot be pickled"):
        pickle.dumps(llm)


def test_the_engines_own_door_is_public_and_stable() -> None:
    methods = {name: inspect.signature(getattr(EngineCore, name)) for name in ("add_request", "step", "abort")}
    assert {name: list(signature.parameters) for name, signature in methods.items()} == {
        "add_request": ["self", "request"],
        "step": ["self"],
        "abort": ["self", "request_ids"],
    }
    assert list(inspect.signature(EngineCore.has_unfinished_requests).parameters) == ["self"]


OFFLINE = """
import sys
from pathlib import Path
seen = []
sys.addaudithook(lambda name, args: seen.append((name, args)) if name in CALLS else None)
CALLS = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"}
from pagedllm import LLM, SamplingParams
folder, gguf, out = sys.argv[1:]
for model in (folder, gguf):
    with LLM(model, max_model_len=128, kv_cache_memory_bytes=16 << 20, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        llm.generate("one two", params, use_tqdm=False)
        template = "{{ messages[0].content }}"
        llm.chat([{"role": "user", "content": "one"}], params, use_tqdm=False, chat_template=template)
        llm.get_tokenizer()
        llm.fingerprint
        Path(out + ".in").write_text('{"prompt": "one"}\\n')
        llm.run_file(out + ".in", out, if_exists="overwrite")
assert seen == [], seen
print("no connection")
"""


def test_no_connection_where_files_are_local(folder: Path, demo_gguf: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(folder), str(demo_gguf), str(tmp_path / "out.jsonl")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "no connection\n", done.stderr
