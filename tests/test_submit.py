"""LLM.submit over the real engine and a runner without a model."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from pagedllm import LLM, RequestError, SamplingParams
from tests.fake_assembly import runner_of

pytestmark = pytest.mark.usefixtures("no_model")

GREEDY = SamplingParams(temperature=0, max_tokens=5)
WAIT = 10


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("fake") as llm:
        yield llm
    for thread in submit_threads():  # it ends soon after `close`
        thread.join(WAIT)


def submit_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pagedllm-submit"]


def test_a_future_gives_what_generate_gives(llm):
    expected = llm.generate("ab", GREEDY)[0]
    output = llm.submit("ab", GREEDY).result(WAIT)
    assert (output.text, output.index, output.prompt_token_ids) == (expected.text, 0, expected.prompt_token_ids)
    chat = llm.submit({"messages": [{"role": "user", "content": "hi"}], "metadata": 7}, GREEDY).result(WAIT)
    assert (chat.prompt, chat.metadata) == ("[user]hi[assistant]", 7)
    assert llm.submit("ab").result(WAIT).outputs[0].finish_reason == "length"


def test_handlers_batch_together_in_one_thread(llm):
    entered, release = threading.Event(), threading.Event()
    batches = []

    def hold(step, plan):
        batches.append(len(plan.scheduled))
        entered.set()
        assert release.wait(WAIT)

    runner_of(llm).script = hold
    futures = [llm.submit("first", GREEDY)]
    assert entered.wait(WAIT)
    futures += [llm.submit(f"p{i}", GREEDY) for i in range(6)]
    assert len(submit_threads()) == 1
    release.set()
    assert all(future.result(WAIT).finished for future in futures)
    assert batches[:2] == [1, 7]


def test_a_bad_prompt_fails_alone(llm):
    with pytest.raises(RequestError, match=r"prompt is None \(NoneType\)"):
        llm.submit(None, GREEDY)
    with pytest.raises(TypeError, match="params must be a SamplingParams, got dict"):
        llm.submit("a", {})
    good, bad = llm.submit("a", GREEDY), llm.submit([999], GREEDY)
    with pytest.raises(RequestError, match=r"^token id 999 at position 0 is not in"):
        bad.result(WAIT)
    assert good.result(WAIT).finished


def test_a_failing_step_fails_what_was_in_it_and_the_thread_goes_on(llm):
    runner_of(llm).script = lambda step, plan: 1 // 0
    with pytest.raises(ZeroDivisionError):
        llm.submit("a", GREEDY).result(WAIT)
    runner_of(llm).script = lambda step, plan: None
    assert llm.submit("a", GREEDY).result(WAIT).finished
    assert not llm._assembly.engine.has_unfinished_requests()


def test_calls_and_futures_take_turns(llm):
    expected = llm.generate(["a", "b"], GREEDY).texts
    futures = [llm.submit("a", SamplingParams(temperature=0, max_tokens=50)) for _ in range(4)]
    assert llm.generate(["a", "b"], GREEDY).texts == expected
    assert [output.text for output in llm.generate_iter(["a", "b"], GREEDY, ordered=True)] == expected
    assert len({future.result(WAIT).text for future in futures}) == 1


def test_it_can_be_awaited_under_a_running_event_loop(llm):
    async def handler(prompt: str) -> str | None:
        return (await asyncio.wrap_future(llm.submit(prompt, GREEDY))).text

    async def serve() -> list[str | None]:
        return await asyncio.gather(*(handler(prompt) for prompt in "abc"))

    assert asyncio.run(serve()) == llm.generate(["a", "b", "c"], GREEDY).texts


def test_generate_works_under_a_running_event_loop(llm):
    async def main() -> list[str | None]:
        return llm.generate(["a"], GREEDY).texts

    assert asyncio.run(main()) == llm.generate(["a"], GREEDY).texts


def test_no_thread_before_the_first_use_and_none_after_close(llm):
    assert submit_threads() == []
    llm.submit("a", GREEDY).result(WAIT)
    (thread,) = submit_threads()
    assert thread.daemon
    llm.close()
    thread.join(WAIT)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.submit("a", GREEDY)


def test_close_fails_what_is_waiting(llm):
    entered, release = threading.Event(), threading.Event()

    def hold(step, plan):
        entered.set()
        assert release.wait(WAIT)

    runner_of(llm).script = hold
    future = llm.submit("a", GREEDY)
    assert entered.wait(WAIT)
    closing = threading.Thread(target=llm.close)
    closing.start()
    while not llm._lock._queue:
        pass
    release.set()
    closing.join(WAIT)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        future.result(WAIT)


def test_a_dropped_llm_is_freed_and_its_thread_ends():
    llm = LLM("fake")
    llm.submit("a", GREEDY).result(WAIT)
    (thread,) = submit_threads()
    engine = weakref.ref(llm._assembly.engine)
    del llm
    for _ in range(100):
        gc.collect()
        if engine() is None:
            break
        thread.join(0.05)
    thread.join(WAIT)
    assert (engine(), thread.is_alive()) == (None, False)


def test_a_fork_is_refused(llm, monkeypatch):
    monkeypatch.setattr("pagedllm.call_lock.os.getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="cannot be used in its fork 1"):
        llm.submit("a", GREEDY)
    monkeypatch.undo()
