"""An exception or Ctrl-C at any point leaves nothing behind: CASES C6 and C7, and DESIGN §4's last paragraph.

Points are bytecode instructions of the engine, the cache, the fake runner and contextlib: KeyboardInterrupt between two
pointer writes is among them. After each: requests that ended are whole, the others hold a prefix of their output; the
same engine then serves another call exactly.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pagedllm
from pagedllm.engine.core import EngineCore
from pagedllm.request import Request, TokenLogprobs
from tests.engine import fakes
from tests.engine.fakes import FakeRunner, LetterDetokenizer, assert_idle, make_engine, make_request, reference_tokens

PACKAGE = Path(pagedllm.__file__).parent
WATCHED = (str(PACKAGE / "engine"), str(PACKAGE / "cache"), fakes.__file__, contextlib.__file__)

NUM_STEPS = 9  # of the call below, at least


class Interrupter:
    """A trace function that raises KeyboardInterrupt at the `point`-th instruction it sees."""

    def __init__(self, point: int | None) -> None:
        self.point = point
        self.num_points = 0
        self.is_armed = True

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Interrupter | None:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self.is_armed:
            self.num_points += 1
            if self.num_points - 1 == self.point:
                self.is_armed = False
                raise KeyboardInterrupt
        return self


def make_call(engine_number: int) -> list[Request]:
    """Requests that share blocks within the step, are preempted, stop by string and id, and keep logprobs."""
    first = engine_number * 10
    return [
        make_request("0", [first] * 9, 12, logprobs=0),
        make_request("1", [first] * 9, 12, seed=1, logprobs=0),
        make_request("2", [first + 1] * 3, 8, stop=["ab", "c"]),
        make_request("3", [first] * 8, 8, seed=2, stop_token_ids=list(range(0, 97, 5))),
        make_request("4", [], 1),
        make_request("5", [first + 2], 6, stop="never"),
    ]


def make_small_engine() -> tuple[EngineCore, FakeRunner]:
    return make_engine(7, 4, max_num_seqs=3, max_num_batched_tokens=20)


def run_until_done(engine: EngineCore, requests: list[Request], returned: list[Request]) -> None:
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        if engine.stats.num_steps == 3:
            returned += engine.abort(["3"])
        returned += engine.step()


def assert_given_back(engine: EngineCore, requests: list[Request], returned: list[Request]) -> None:
    """Every request of the interrupted call ended, whole or with what it had; the engine is empty."""
    given_back = engine.abort([request.request_id for request in requests])
    assert not {id(r) for r in given_back} & {id(r) for r in returned}
    assert_idle(engine)
    complete = make_call(0)
    for request, fresh in zip(requests, complete, strict=True):
        if request.finish_reason is None:  # never reached the engine
            assert request.output_token_ids == []
            continue
        assert request.is_finished
        if request.error is not None:
            assert request.finish_reason == "error"
            continue
        output, whole = request.output_token_ids, reference_tokens(fresh)
        assert output == whole[: len(output)]
        if request.finish_reason == "length":
            assert output == whole
        if request.sampling_params.logprobs is not None:
            assert len(request.logprobs) == len(output)
            assert request.cumulative_logprob == sum(float(entry.logprobs[0]) for entry in request.logprobs)
        assert request.text is not None
        assert "".join(map(LetterDetokenizer().piece, request.text_token_ids)).startswith(request.text)


def assert_next_call_is_exact(engine: EngineCore) -> None:
    """The same ids again, so that any row or block left behind is met."""
    requests, returned = make_call(0), list[Request]()
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        returned += engine.step()
    assert sorted(r.request_id for r in returned) == ["0", "1", "2", "3", "4", "5"]
    for request, fresh in zip(requests, make_call(0), strict=True):
        if fresh.token_ids and request.request_id != "2":
            assert request.output_token_ids == reference_tokens(fresh)
    assert requests[2].finish_reason in ("stop", "length")
    assert_idle(engine)


def interrupt_at(point: int | None, run: Callable[[], None]) -> tuple[int, bool]:
    """Runs with an interrupt at that point; returns how many points were seen, and whether it came.

    In a thread of its own: raised between an except clause and its first instruction, it leaves the exception of that
    clause behind as the one that is being handled, for as long as the thread lives.
    """
    interrupter = Interrupter(point)

    def run_traced() -> bool:
        sys.settrace(interrupter)
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    with ThreadPoolExecutor(1) as thread:
        came = thread.submit(run_traced).result()
    return interrupter.num_points, came


def check_interrupt(point: int) -> None:
    engine, _ = make_small_engine()
    requests, returned = make_call(0), list[Request]()
    _, came = interrupt_at(point, lambda: run_until_done(engine, requests, returned))
    assert came
    assert_given_back(engine, requests, returned)
    assert_next_call_is_exact(engine)


def count_points() -> int:
    engine, _ = make_small_engine()
    requests, returned = make_call(0), list[Request]()
    num_points, came = interrupt_at(None, lambda: run_until_done(engine, requests, returned))
    assert not came
    assert len(returned) == len(requests)
    assert {request.finish_reason for request in requests} == {"stop", "length", "abort", "error"}
    assert engine.stats.num_steps >= NUM_STEPS
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 0
    return num_points


def test_an_interrupt_anywhere_leaves_the_engine_exact() -> None:
    num_points = count_points()
    assert num_points > 5000
    for point in range(0, num_points, num_points // 150):
        check_interrupt(point)


@pytest.mark.slow
def test_an_interrupt_at_every_tenth_instruction_leaves_the_engine_exact() -> None:
    offset = random.randrange(10)
    for point in range(offset, count_points(), 10):
        check_interrupt(point)


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_a_second_interrupt_during_the_rebuild_does_no_harm(step: int) -> None:
    def run(point: int | None) -> int:
        engine, runner = make_small_engine()
        requests, returned = make_call(0), list[Request]()
        execute, interrupter = engine._execute, Interrupter(point)

        def interrupted(plan: Any) -> Any:
            if len(runner.plans) == step:
                sys.settrace(interrupter)
                raise KeyboardInterrupt
            return execute(plan)

        engine._execute = interrupted
        previous = sys.gettrace()
        try:
            with pytest.raises(KeyboardInterrupt):
                run_until_done(engine, requests, returned)
        finally:
            sys.settrace(previous)
        engine._execute = execute
        assert interrupter.is_armed == (point is None)
        assert_given_back(engine, requests, returned)
        assert_next_call_is_exact(engine)
        return interrupter.num_points

    num_points = run(None)
    assert num_points > 100
    for point in range(step, num_points, num_points // 12):
        run(point)


@pytest.mark.parametrize("error", [RuntimeError("kernel"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_failing_step_ends_the_call_and_only_the_call(error: BaseException, is_late: bool) -> None:
    for step in range(NUM_STEPS):
        engine, runner = make_small_engine()
        execute = engine._execute

        def failing(plan: Any, step: int = step, runner: FakeRunner = runner, execute: Any = execute) -> Any:
            if len(runner.plans) < step:
                return execute(plan)
            if is_late:  # the runner has taken the rows, and written into the cache
                execute(plan)
            raise error

        engine._execute = failing
        requests, returned = make_call(0), list[Request]()
        with pytest.raises(type(error)):
            run_until_done(engine, requests, returned)
        assert not engine.has_unfinished_requests()
        assert all(request.is_finished for request in requests)
        engine._execute = execute
        assert_given_back(engine, requests, returned)
        assert_next_call_is_exact(engine)


@pytest.mark.parametrize("method", ["decode", "stream", "push", "finish"])
def test_a_failing_detokenizer_ends_the_call_and_only_the_call(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = LetterDetokenizer if method in ("decode", "stream") else fakes.LetterStream
    original = getattr(owner, method)
    num_failures = 0
    for number in range(4):
        calls = 0

        def failing(self: Any, *args: Any, number: int = number) -> Any:
            nonlocal calls
            calls += 1
            if calls - 1 == number:
                raise RuntimeError("detokenizer")
            return original(self, *args)

        engine, _ = make_small_engine()
        requests, returned = make_call(0), list[Request]()
        monkeypatch.setattr(owner, method, failing)
        try:
            run_until_done(engine, requests, returned)
        except RuntimeError:
            num_failures += 1
        monkeypatch.setattr(owner, method, original)
        assert_given_back(engine, requests, returned)
        assert_next_call_is_exact(engine)
    assert num_failures > 0


def test_logprobs_of_a_token_that_was_not_taken_are_dropped() -> None:
    engine, _ = make_engine()
    request = make_request("a", [1], 9, logprobs=0)
    engine.add_request(request)
    engine.step()
    execute = engine._execute

    def failing(plan: Any) -> Any:
        result = execute(plan)
        broken = TokenLogprobs(np.array([0], np.int32), np.array([], np.float32), 1)
        return replace(result, logprobs=[(broken,)])

    engine._execute = failing
    with pytest.raises(IndexError):
        engine.step()
    assert engine.abort(["a"]) == [request]
    assert (request.num_output_tokens, len(request.logprobs)) == (1, 1)
    assert request.cumulative_logprob == float(request.logprobs[0].logprobs[0])


def test_finished_requests_stay_whole_and_others_hold_what_they_had() -> None:
    engine, _ = make_engine()
    short, long = make_request("short", [1], 2), make_request("long", [2], 50)
    requests = [short, long]
    for request in requests:
        engine.add_request(request)
    execute, calls = engine._execute, []

    def failing(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return execute(plan)

    engine._execute = failing
    ended = engine.step() + engine.step() + engine.step()
    assert ended == [short]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.abort(["short", "long"]) == [long]
    assert (short.finish_reason, short.num_output_tokens) == ("length", 2)
    assert (long.finish_reason, long.num_output_tokens) == ("abort", 3)
    assert long.text == "".join(map(LetterDetokenizer().piece, long.output_token_ids))
    assert engine.stats.num_aborted_requests == 1
