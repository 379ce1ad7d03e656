"""EngineCore: what add_request, step and abort give back, and what is left behind."""

from __future__ import annotations

import pytest

from pagedllm.engine.scheduler_output import SchedulerOutput
from tests.engine.fakes import VOCAB_SIZE, assert_idle, make_engine, make_request, reference_tokens, run_all


def test_a_step_without_requests_computes_nothing() -> None:
    engine, runner = make_engine()
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    assert runner.plans == []


def test_step_returns_each_request_once_when_it_ends() -> None:
    engine, _ = make_engine()
    requests = [make_request(str(i), [i], 1 + i) for i in range(3)]
    for request in requests:
        engine.add_request(request)
    assert [engine.step() for _ in range(3)] == [[request] for request in requests]
    assert engine.step() == []
    assert_idle(engine)


def test_a_request_that_can_never_run_comes_back_in_the_next_step_and_the_others_run() -> None:
    engine, _ = make_engine(num_blocks=4, max_model_len=100)
    good = make_request("good", [1], 1)
    for request in (make_request("long", range(101)), good, make_request("big", range(17))):
        engine.add_request(request)
    ended = engine.step()
    assert [(r.request_id, r.error and r.error.code, r.text is None) for r in ended] == [
        ("long", "prompt_too_long", True),
        ("big", "never_fits", True),
        ("good", None, False),
    ]
    assert_idle(engine)


def test_no_token_wanted_means_an_empty_text_and_no_computing() -> None:
    engine, runner = make_engine()
    engine.add_request(make_request("a", [1, 2], 0))
    assert engine.has_unfinished_requests()
    (request,) = engine.step()
    assert (request.text, request.finish_reason, request.output_token_ids) == ("", "length", [])
    assert [plan.num_tokens for plan in runner.plans] == [0]


def test_abort_returns_what_there_is_and_the_engine_forgets_it() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    running, waiting = make_request("running", [1], 50), make_request("waiting", [2], 50)
    engine.add_request(running)
    engine.add_request(waiting)
    for _ in range(3):
        engine.step()
    assert engine.abort(["running", "unknown", "waiting", "running"]) == [running, waiting]
    assert running.finish_reason == waiting.finish_reason == "abort"
    fresh = make_request("fresh", [1], 50)
    assert running.output_token_ids == reference_tokens(fresh)[:3]
    assert running.text is not None
    assert len(running.text) >= 3
    assert waiting.text == ""
    assert engine.abort(["running", "waiting"]) == []
    assert_idle(engine)
    assert engine.stats.num_aborted_requests == 2


def test_abort_also_returns_what_ended_and_was_not_returned() -> None:
    engine, _ = make_engine(max_model_len=5)
    engine.add_request(make_request("long", range(9)))
    engine.add_request(make_request("other", range(9)))
    (request,) = engine.abort(["long"])
    assert request.error is not None
    assert [r.request_id for r in engine.step()] == ["other"]


def test_a_preempted_request_can_be_aborted() -> None:
    engine, _ = make_engine(num_blocks=4, enable_prefix_caching=False)
    a, b = make_request("a", range(3), 12), make_request("b", range(10, 13), 12)
    engine.add_request(a)
    engine.add_request(b)
    while not b.num_preemptions:
        engine.step()
    assert engine.abort(["b"]) == [b]
    assert b.num_output_tokens > 0
    while engine.has_unfinished_requests():
        engine.step()
    assert a.output_token_ids == reference_tokens(make_request("a", range(3), 12))
    assert_idle(engine)


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine, _ = make_engine()
    engine.add_request(make_request("a", [1], 2))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        engine.add_request(make_request("a", [1], 2))
    engine.abort(["a"])
    (request,) = run_all(engine, [make_request("a", [1], 2)])
    assert request.output_token_ids == reference_tokens(make_request("a", [1], 2))


def test_a_request_that_ran_is_refused() -> None:
    engine, _ = make_engine()
    (request,) = run_all(engine, [make_request("a", [1], 2)])
    with pytest.raises(ValueError, match="request 'a' is not new"):
        engine.add_request(request)


def test_a_failing_request_costs_no_other_its_answer() -> None:
    engine, runner = make_engine()
    requests = [make_request(str(i), range(9), 5, seed=i % 2) for i in range(4)]
    runner.non_finite = {"0", "2"}
    run_all(engine, requests)
    assert [r.error and r.error.code for r in requests] == ["non_finite_logits", None, "non_finite_logits", None]
    assert requests[0].text is None
    for i in (1, 3):
        assert requests[i].output_token_ids == reference_tokens(make_request("r", range(9), 5, seed=1))
    assert_idle(engine)
    assert engine.stats.num_failed_requests == 2


def test_blocks_of_failed_logits_are_not_given_to_others() -> None:
    engine, runner = make_engine()
    runner.non_finite = {"bad"}
    run_all(engine, [make_request("bad", range(9), 5)])
    (good,) = run_all(engine, [make_request("good", range(9), 5)])
    assert good.num_cached_tokens == 0


def test_resetting_the_prefix_cache_changes_work_and_no_token() -> None:
    engine, _ = make_engine()
    outputs = []
    for is_reset, num_cached_tokens in ((False, 0), (False, 8), (True, 0)):
        if is_reset:
            engine.reset_prefix_cache()
        (request,) = run_all(engine, [make_request("a", range(9), 5)])
        assert request.num_cached_tokens == num_cached_tokens
        outputs.append(request.output_token_ids)
    assert outputs[0] == outputs[1] == outputs[2]


def test_two_engines_stepped_in_turn_do_not_meet() -> None:
    engines = [make_engine()[0] for _ in range(2)]
    requests = [[make_request(str(i), [i, e], 6) for i in range(3)] for e in range(2)]
    for engine, own in zip(engines, requests, strict=True):
        for request in own:
            engine.add_request(request)
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine in engines:
            engine.step()
    for e, own in enumerate(requests):
        assert [r.output_token_ids for r in own] == [reference_tokens(make_request("r", [i, e], 6)) for i in range(3)]


def test_stats_add_up() -> None:
    engine, _ = make_engine(num_blocks=10, block_size=4)
    run_all(engine, [make_request(str(i), range(6), 3) for i in range(2)])
    stats = engine.stats
    assert (stats.num_steps, stats.num_finished_requests, stats.num_output_tokens) == (3, 2, 6)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (12, 4)
    assert stats.num_computed_tokens == 6 + 2 + 2 + 2
    assert (stats.num_running, stats.num_waiting, stats.peak_running) == (0, 0, 2)
    # Steps hold 6, 7 and 8 slots each in two blocks, the first of which is shared: 3 blocks.
    assert (stats.peak_num_blocks, stats.sum_allocated_slots) == (3, 3 * 12)
    assert stats.sum_wasted_slots == 2 * 2 + 2 * 1
    assert stats.kv_waste == 6 / 36
    assert stats.kv_use == 36 / (3 * 40)
    assert min(stats.schedule_seconds, stats.execute_seconds, stats.update_seconds) > 0
    copy = stats.copy()
    run_all(engine, [make_request("x", [1], 1)])
    assert (copy.num_steps, engine.stats.num_steps) == (3, 4)


def test_the_fake_model_depends_on_every_token_before() -> None:
    """Else the other tests would prove little."""
    outputs = {tuple(reference_tokens(make_request("r", [first, 5, 5], 8))) for first in range(20)}
    assert len(outputs) == 20
    assert all(0 <= token_id < VOCAB_SIZE for output in outputs for token_id in output)


def test_plans_are_told_to_the_runner_in_order() -> None:
    engine, runner = make_engine()
    run_all(engine, [make_request("a", [1, 2, 3], 2)])
    assert [plan.num_tokens for plan in runner.plans] == [3, 1]
    assert all(isinstance(plan, SchedulerOutput) for plan in runner.plans)
