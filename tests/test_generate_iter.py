"""LLM.generate_iter over the real engine and a runner without a model."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest

from pagedllm import LLM, RequestError, RequestOutput, SamplingParams
from tests.fake_assembly import runner_of

pytestmark = pytest.mark.usefixtures("no_model")

GREEDY = SamplingParams(temperature=0, max_tokens=5)
SAMPLED = SamplingParams(max_tokens=5)


def assert_nothing_left(llm: LLM) -> None:
    engine = llm._assembly.engine
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.kv_cache.pool.num_free == llm._assembly.num_blocks
    assert engine.take(list(map(str, range(100)))) == []


def test_outputs_are_those_of_generate(llm):
    prompts = [f"prompt {i}" for i in range(40)]
    expected = LLM("fake").generate(prompts, SAMPLED).texts
    assert [output.text for output in llm.generate_iter(prompts, SAMPLED, ordered=True)] == expected
    assert_nothing_left(llm)


def test_unordered_outputs_come_as_they_finish_and_know_their_place(llm):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5)]
    outputs = list(llm.generate_iter(["a", "b", "c"], iter(params)))
    assert [output.index for output in outputs] == [1, 2, 0]
    assert [output.index for output in llm.generate_iter("abc", iter(params[:1]))] == [0]
    ordered = llm.generate_iter(["a", "b", "c"], params, ordered=True)
    assert [output.index for output in ordered] == [0, 1, 2]


def test_prompts_are_read_as_there_is_room_and_input_may_be_endless(llm):
    num_read = 0

    def prompts():
        nonlocal num_read
        for num_read in itertools.count(1):
            yield f"p{num_read}"

    iterator = llm.generate_iter(prompts(), GREEDY, max_in_flight=3)
    assert num_read == 0
    for num_given in range(1, 20):
        next(iterator)
        assert num_read <= num_given + 3
    iterator.close()
    assert list(iterator) == []
    assert_nothing_left(llm)


def test_ordered_reads_no_further_than_max_in_flight_ahead_of_a_long_one(llm):
    num_read = 0

    def prompts():
        nonlocal num_read
        for num_read in range(1, 30):
            yield f"p{num_read}"

    params = [SamplingParams(temperature=0, max_tokens=60 if i == 0 else 1) for i in range(29)]
    iterator = llm.generate_iter(prompts(), params, ordered=True, max_in_flight=4)
    assert next(iterator).index == 0
    assert num_read == 4


def test_a_suspended_iterator_holds_no_lock_and_other_calls_advance_it(llm):
    expected = llm.generate(["a", "b", "c"], GREEDY).texts
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5, 5)]
    iterator = llm.generate_iter(["a", "b", "c"], params, ordered=True)
    next(iterator)
    thread = threading.Thread(target=llm.generate, args=("other", SamplingParams(temperature=0, max_tokens=20)))
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    num_steps = runner_of(llm).num_steps
    assert [output.text for output in iterator] == expected[1:]
    assert runner_of(llm).num_steps == num_steps
    assert_nothing_left(llm)


def test_two_iterators_in_turns(llm):
    expected = llm.generate(["a", "b", "c", "d"], GREEDY).texts
    one = llm.generate_iter(["a", "b"], GREEDY, ordered=True)
    two = llm.generate_iter(["c", "d"], GREEDY, ordered=True)
    texts = [next(iterator).text for iterator in (one, two, one, two)]
    assert texts == [expected[0], expected[2], expected[1], expected[3]]
    assert (list(one), list(two)) == ([], [])
    assert_nothing_left(llm)


def test_dropping_aborts_its_requests(llm):
    iterator = llm.generate_iter(["a"] * 5, [SamplingParams(max_tokens=n) for n in (1, 9, 9, 9, 9)])
    next(iterator)
    del iterator
    gc.collect()
    assert_nothing_left(llm)


def test_dropping_during_another_call_aborts_before_the_next(llm):
    iterators = [llm.generate_iter(["a", "b"], [SamplingParams(max_tokens=n) for n in (1, 99)])]
    next(iterators[0])

    def prompts():
        iterators.clear()
        yield "x"

    assert len(llm.generate(prompts(), GREEDY)) == 1
    llm.generate("y", GREEDY)
    assert_nothing_left(llm)


def test_a_bad_prompt_is_an_output_or_ends_the_iterator(llm):
    outputs = list(llm.generate_iter(["a", None, "b"], GREEDY, ordered=True))
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].error.index == 1
    iterator = llm.generate_iter(["a", [999]], GREEDY, on_error="raise", ordered=True)
    assert next(iterator).error is None
    with pytest.raises(RequestError, match=r"prompts\[1\]: token id 999 at position 0"):
        next(iterator)
    assert list(iterator) == []
    assert_nothing_left(llm)


def test_a_failing_source_or_step_leaves_nothing(llm):
    def prompts():
        yield "a"
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(llm.generate_iter(prompts(), GREEDY, max_in_flight=1))
    iterator = llm.generate_iter(["a", "b"], GREEDY)
    runner_of(llm).script = lambda step, plan: 1 // 0
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    runner_of(llm).script = lambda step, plan: None
    assert_nothing_left(llm)
    assert len(list(llm.generate_iter(["a", "b"], GREEDY))) == 2


def test_a_failing_step_of_another_call_ends_it_as_aborted(llm):
    iterator = llm.generate_iter(["a", "b"], [SamplingParams(temperature=0, max_tokens=n) for n in (1, 9)])
    next(iterator)
    runner_of(llm).script = lambda step, plan: 1 // 0
    with pytest.raises(ZeroDivisionError):
        llm.generate("x", GREEDY)
    runner_of(llm).script = lambda step, plan: None
    output = next(iterator)
    assert (output.index, output.finished, output.outputs[0].finish_reason) == (1, False, "abort")
    assert_nothing_left(llm)


def test_no_call_from_its_prompts_and_none_after_close(llm):
    with pytest.raises(RuntimeError, match="no call from inside a call"):
        list(llm.generate_iter((llm.generate(p, GREEDY)[0].text for p in "ab"), GREEDY))
    iterator = llm.generate_iter(["a", "b"], GREEDY)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        next(iterator)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_in_flight": 0}, "max_in_flight must be None or an int >= 1, got 0"),
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'return', got 'ignore'"),
    ],
)
def test_wrong_options_are_refused_at_once(llm, options, text):
    with pytest.raises(ValueError, match=text):
        llm.generate_iter(["a"], GREEDY, **options)


def test_too_few_params_are_an_error(llm):
    with pytest.raises(ValueError, match="1 sampling_params for more prompts"):
        list(llm.generate_iter(["a", "b"], [GREEDY]))
    with pytest.raises(TypeError, match=r"sampling_params\[0\] must be a SamplingParams, got int"):
        list(llm.generate_iter(["a", "b"], [5]))


@pytest.mark.parametrize("step", [0, 3, 6])
def test_an_interrupt_has_what_was_not_given_out_finished_ones_whole_and_others_partial(llm, step):
    expected = LLM("fake").generate(["a", "b", "c"], GREEDY)

    def interrupt(number, plan):
        if number == step:
            raise KeyboardInterrupt

    runner_of(llm).script = interrupt
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (5, 2, 90)]
    given: list[RequestOutput] = []
    with pytest.raises(KeyboardInterrupt) as caught:
        given.extend(llm.generate_iter(["a", "b", "c"], params, ordered=True))
    outputs = caught.value.outputs
    assert sorted([o.index for o in outputs] + [o.index for o in given]) == [0, 1, 2]
    num_whole = sum(o.finished for o in outputs)
    assert str(caught.value).startswith(f"{num_whole} of {len(outputs)} outputs are finished: reach them by")
    assert {o.index: o.finished for o in outputs} == {
        i: i == 1 and step == 3 for i in range(3) if not (step == 6 and i < 2)
    }
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == ("length" if output.finished else "abort")
        assert tokens[:5] == expected[output.index].outputs[0].token_ids[: len(tokens[:5])]
        assert output.finished or len(tokens) == step
    runner_of(llm).script = lambda number, plan: None
    assert_nothing_left(llm)
    assert llm.generate(["a", "b", "c"], GREEDY).texts == expected.texts
