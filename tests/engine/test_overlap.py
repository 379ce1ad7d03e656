"""Steps planned ahead: the same outputs as without, when it is done and when not, and what is thrown away.

The fake runner computes in the order of the launches, like a device, and a result is not looked at before the engine
asks for it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.beam_search_params import BeamSearchParams
from pagedllm.engine.core import EngineCore
from pagedllm.engine.policy import FCFSPolicy, OfflinePolicy
from pagedllm.engine.scheduler_output import SchedulerOutput
from pagedllm.request import Request
from tests.engine.fakes import (
    FakeRunner,
    assert_idle,
    assert_manager_conserved,
    make_engine,
    make_request,
    reference_tokens,
    run_all,
)
from tests.engine.scheduling import append, make_scheduler, results, shares
from tests.engine.test_differential import POLICIES, WINDOWS, answers, make_requests
from tests.engine.test_interrupts import (
    NUM_STEPS,
    assert_given_back,
    assert_next_call_is_exact,
    interrupt_at,
    make_call,
    run_until_done,
)


def launches_and_results(runner: FakeRunner) -> str:
    """Like "L0 L1 R0": what was launched and taken, in order."""
    return " ".join(f"{kind[0].upper()}{number}" for kind, number in runner.events)


def steps_ahead(runner: FakeRunner) -> int:
    """How many plans had been launched when the results of the one before were taken."""
    events = runner.events
    return sum(kind == "result" and ("launch", number + 1) in events[:i] for i, (kind, number) in enumerate(events))


# ---- when


def test_a_plan_is_made_and_launched_before_the_results_of_the_one_before_are_taken() -> None:
    engine, runner = make_engine(is_overlapped=True)
    request = make_request("a", [1, 2, 3], 4)
    run_all(engine, [request])
    assert launches_and_results(runner) == "L0 L1 R0 L2 R1 L3 R2 R3"
    assert [shares(plan) for plan in runner.plans] == [[("a", 0, 3)], [("a", 3, 1)], [("a", 4, 1)], [("a", 5, 1)]]
    assert request.output_token_ids == reference_tokens(make_request("r", [1, 2, 3], 4))
    assert_idle(engine)


def test_between_two_steps_one_is_under_way() -> None:
    engine, runner = make_engine(is_overlapped=True)
    request = make_request("a", [1], 9)
    engine.add_request(request)
    for number in range(3):
        engine.step()
        assert (len(runner.plans), request.num_output_tokens, engine.stats.num_steps) == (
            number + 2,
            number + 1,
            number + 1,
        )


def test_who_is_known_to_end_by_length_is_not_planned_further() -> None:
    engine, runner = make_engine(is_overlapped=True)
    run_all(engine, [make_request("a", [1], 2), make_request("b", [2], 4), make_request("c", [3], 1)])
    ids = [[scheduled.request_id for scheduled in plan.scheduled] for plan in runner.plans]
    assert ids == [["a", "b", "c"], ["a", "b"], ["b"], ["b"]]


def test_chunks_of_a_prompt_are_planned_ahead() -> None:
    engine, runner = make_engine(max_num_batched_tokens=4, is_overlapped=True)
    run_all(engine, [make_request("a", range(10), 2)])
    assert launches_and_results(runner) == "L0 L1 R0 L2 R1 L3 R2 R3"
    assert [shares(plan)[0][1:] for plan in runner.plans] == [(0, 4), (4, 4), (8, 2), (10, 1)]


HELD_BACK: list[dict[str, Any]] = [
    {"allowed_token_ids": list(range(97))}, {"min_tokens": 1}, {"logits_processors": [lambda ids, logits: logits]},
    {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("params", HELD_BACK, ids=lambda params: next(iter(params)))
def test_no_plan_is_made_ahead_while_a_request_follows_its_output(params: dict[str, Any]) -> None:
    engine, runner = make_engine(is_overlapped=True)
    run_all(engine, [make_request("free", [1], 6), make_request("following", [2], 3, **params)])
    assert launches_and_results(runner) == "L0 R0 L1 R1 L2 R2 L3 L4 R3 L5 R4 R5"


@pytest.mark.parametrize(("field", "value"), [("bad_word_ids", ((3,),)), ("choices", object())])
def test_bad_words_and_choices_follow_the_output_too(field: str, value: object) -> None:
    engine, _ = make_engine()
    request = make_request("a", [1], 3)
    setattr(request, field, value)
    engine.add_request(request)
    assert request.follows_output


def test_no_plan_is_made_ahead_of_samples_that_fork() -> None:
    engine, runner = make_engine(is_overlapped=True)
    request = make_request("a", [1, 2], 4, n=3)
    run_all(engine, [request])
    assert launches_and_results(runner) == "L0 R0 L1 L2 R1 L3 R2 R3"
    for sample in request.samples:
        fresh = make_request("r", [1, 2], 4)
        fresh.sample_index = sample.sample_index
        assert sample.output_token_ids == reference_tokens(fresh)


def test_no_plan_is_made_ahead_of_beams() -> None:
    engine, runner = make_engine(is_overlapped=True)
    request = make_request("a", [1, 2], 4, logprobs=4)
    request.beam_search = BeamSearchParams(2, 4)
    run_all(engine, [request])
    assert launches_and_results(runner) == "L0 R0 L1 R1 L2 R2 L3 R3"


def test_no_plan_is_made_ahead_while_a_prompt_is_scored() -> None:
    engine, runner = make_engine(max_num_batched_tokens=4, is_overlapped=True)
    request = make_request("a", range(6), 3, prompt_logprobs=0)
    request.num_unscored_tokens = 5
    run_all(engine, [request])
    assert launches_and_results(runner) == "L0 R0 L1 R1 L2 L3 R2 R3"


def test_no_plan_is_made_ahead_where_somebody_would_be_preempted() -> None:
    """Two that take three blocks each, in a pool of five."""
    engine, runner = make_engine(5, 4, enable_prefix_caching=False, is_overlapped=True)
    run_all(engine, [make_request("a", range(3), 8), make_request("b", range(10, 13), 8)])
    assert engine.stats.num_preemptions == 1
    preempting = next(i for i, plan in enumerate(runner.plans) if "b" in plan.released_request_ids)
    assert f"R{preempting - 1} L{preempting}" in launches_and_results(runner)
    assert steps_ahead(runner) > 5


def test_a_new_request_is_admitted_while_a_step_is_under_way() -> None:
    engine, runner = make_engine(is_overlapped=True)
    engine.add_request(make_request("a", [1], 6))
    engine.step()
    request = make_request("b", [2], 2)
    engine.add_request(request)
    engine.step()
    assert [scheduled.request_id for scheduled in runner.plans[2].scheduled] == ["a", "b"]
    assert launches_and_results(runner) == "L0 L1 R0 L2 R1"
    run_all(engine, [])
    assert request.num_steps == 2


# ---- what is thrown away


def test_a_token_of_a_request_that_had_ended_is_thrown_away_and_its_blocks_are_free_at_once() -> None:
    """It ends by a stop token in step 1, while step 2 computes it."""
    stop = reference_tokens(make_request("r", [1], 9))[1]
    engine, runner = make_engine(is_overlapped=True)
    ended, going_on = make_request("ended", [1], 9, stop_token_ids=[stop]), make_request("going on", [2], 9)
    engine.add_request(ended)
    engine.add_request(going_on)
    engine.step()
    assert engine.step() == [ended]
    assert [scheduled.request_id for scheduled in runner.plans[2].scheduled] == ["ended", "going on"]
    assert (ended.num_output_tokens, ended.finish_reason) == (2, "stop")
    assert engine.scheduler.kv_cache.request_ids == ("going on",)
    run_all(engine, [])
    assert going_on.output_token_ids == reference_tokens(make_request("r", [2], 9))
    assert engine.stats.num_output_tokens == 2 + 9
    assert engine.stats.num_computed_tokens == 3 + 9
    assert_idle(engine)


def test_nothing_is_under_way_once_nobody_is_left() -> None:
    stop = reference_tokens(make_request("r", [1], 9))[1]
    engine, runner = make_engine(is_overlapped=True)
    engine.add_request(make_request("a", [1], 9, stop_token_ids=[stop]))
    engine.step()
    engine.step()
    assert launches_and_results(runner) == "L0 L1 R0 L2 R1 R2"
    assert_idle(engine)


def test_a_name_that_is_used_again_gets_nothing_of_the_step_that_is_under_way() -> None:
    stop = reference_tokens(make_request("r", [1], 9))[1]
    engine, _ = make_engine(is_overlapped=True)
    engine.add_request(make_request("a", [1], 9, stop_token_ids=[stop]))
    engine.add_request(make_request("other", [2], 12))
    engine.step()
    assert [request.request_id for request in engine.step()] == ["a"]
    again = make_request("a", [3, 4], 5)
    run_all(engine, [again])
    assert again.output_token_ids == reference_tokens(make_request("r", [3, 4], 5))
    assert_idle(engine)


def test_who_hit_a_block_of_a_step_that_fails_for_its_owner_computes_again() -> None:
    """The other is planned while the step that fills the block is under way."""
    engine, runner = make_engine(is_overlapped=True, max_num_batched_tokens=9)
    runner.non_finite = {"bad"}
    bad, good = make_request("bad", range(9), 5), make_request("good", range(9), 5, seed=1)
    run_all(engine, [bad, good])
    assert [scheduled.request_id for scheduled in runner.plans[1].scheduled] == ["bad", "good"]
    assert runner.plans[1].scheduled[1].num_computed_tokens == 8
    assert bad.error is not None
    assert good.output_token_ids == reference_tokens(make_request("r", range(9), 5, seed=1))
    assert good.num_preemptions == 1
    assert_idle(engine)


def test_a_block_is_published_by_its_own_step_only() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", range(9), 3))
    plans = [scheduler.schedule()]
    plans.append(ahead(scheduler.schedule_ahead(plans[0])))
    blocks = scheduler.kv_cache.pool.blocks
    assert [block.is_pending for block in blocks[:2]] == [True, True]
    scheduler.update(plans[0], results(plans[0]), append)
    assert [block.is_pending for block in blocks[:2]] == [False, True]
    plans.append(ahead(scheduler.schedule_ahead(plans[1])))
    scheduler.update(plans[1], results(plans[1]), append)
    assert [block.is_pending for block in blocks[:2]] == [False, False]


def test_who_fails_takes_back_what_the_plan_after_made_pending_too() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", range(17), 3))
    plan = scheduler.schedule()
    next_plan = ahead(scheduler.schedule_ahead(plan))
    pool = scheduler.kv_cache.pool
    assert (pool.num_used, pool.num_cached) == (4, 4)
    scheduler.update(plan, results(plan, failed=("a",)), append)
    assert (pool.num_used, pool.num_cached) == (0, 0)
    scheduler.update(next_plan, results(next_plan), append)
    assert_manager_conserved(scheduler.kv_cache)


def test_a_block_that_an_unknown_token_fills_has_no_name_until_it_is_known() -> None:
    """Prompt of 3, blocks of 4: the first drawn token, computed in plan 1, fills block 0."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(3), 9))
    plans = [scheduler.schedule()]
    for number in range(3):
        plans.append(ahead(scheduler.schedule_ahead(plans[-1])))
        name = scheduler.kv_cache.pool.blocks[0].block_hash
        assert (name is None) == (number < 1)
        scheduler.update(plans[-2], results(plans[-2]), append)
        assert_manager_conserved(scheduler.kv_cache)


def ahead(plan: SchedulerOutput | None) -> SchedulerOutput:
    assert plan is not None
    return plan


# ---- the same outputs


def make_mixed(seed: int, number: int) -> list[Request]:
    """As make_requests, where few follow their output, and some stop by a string."""
    rng = random.Random(seed)
    requests = make_requests(seed, number, max_prompt=24, max_output=20)
    for request in requests:
        params = request.sampling_params
        params.min_tokens = 1 if rng.random() < 0.05 else 0
        if rng.random() < 0.2:
            params.stop = ["ab", "hc"]
    return requests


def run(is_overlapped: bool, requests: list[Request], **options: Any) -> tuple[list[tuple[object, ...]], FakeRunner]:
    engine, runner = make_engine(is_overlapped=is_overlapped, **options)
    run_all(engine, requests)
    assert_idle(engine)
    return answers(requests), runner


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("num_blocks", [400, 22])
def test_outputs_are_the_same_with_and_without(num_blocks: int, windows: tuple[int, ...]) -> None:
    num_ahead = 0
    for seed, chunk, policy in ((1, 3, FCFSPolicy()), (2, 12, OfflinePolicy()), (3, 64, FCFSPolicy())):
        options: dict[str, Any] = {
            "num_blocks": num_blocks * len(windows), "max_num_batched_tokens": chunk, "policy": policy,
            "windows": windows,
        }  # fmt: skip
        expected, _ = run(False, make_mixed(seed, 16), **options)
        found, runner = run(True, make_mixed(seed, 16), **options)
        assert found == expected
        num_ahead += steps_ahead(runner)
    assert num_ahead > 50


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 2, 4, 8)),
    num_slots=st.integers(30, 200),
    max_num_seqs=st.integers(1, 12),
    chunk=st.integers(1, 40),
    is_cached=st.booleans(),
    policy=st.sampled_from(POLICIES),
    windows=st.sampled_from(WINDOWS),
    data=st.data(),
)
def test_random_settings_arrivals_aborts_and_failures_change_nothing_for_the_others(
    seed: int, block_size: int, num_slots: int, max_num_seqs: int, chunk: int, is_cached: bool, policy: Any,
    windows: tuple[int, ...], data: st.DataObject,
) -> None:  # fmt: skip
    engine, runner = make_engine(
        -(-num_slots // block_size) * len(windows),
        block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=is_cached,
        policy=policy,
        windows=windows,
        is_overlapped=True,
    )
    requests = make_mixed(seed, 15)
    alone = {request.request_id: run(False, [request], num_blocks=999)[0][0] for request in make_mixed(seed, 15)}
    arriving, returned = list(requests), list[Request]()
    runner.non_finite = {str(data.draw(st.integers(0, 30)))}
    while arriving or engine.has_unfinished_requests():
        for _ in range(data.draw(st.integers(0 if engine.has_unfinished_requests() else 1, 4))):
            if arriving:
                engine.add_request(arriving.pop())
        if data.draw(st.integers(0, 9)) == 0:
            returned += engine.abort([data.draw(st.sampled_from(requests)).request_id])
        returned += engine.step()
        assert_manager_conserved(engine.scheduler.kv_cache)
    assert sorted(r.request_id for r in returned) == sorted(r.request_id for r in requests)
    assert_idle(engine)
    for request, found in zip(requests, answers(requests), strict=True):
        if request.error is not None:
            assert request.error.code == (
                "non_finite_logits" if request.request_id in runner.non_finite else "never_fits"
            )
        elif request.finish_reason == "abort":
            whole = alone[request.request_id][1]
            assert isinstance(whole, list)
            assert request.output_token_ids == whole[: request.num_output_tokens]
        elif request.max_output_tokens == request.sampling_params.max_tokens:  # else the pool holds no more of it
            assert found == alone[request.request_id]


def test_steps_and_tokens_are_counted_as_without() -> None:
    """Blocks are not: who ended by its length holds them while the next plan is made."""
    counts = []
    for is_overlapped in (False, True):
        engine, _ = make_engine(num_blocks=20, is_overlapped=is_overlapped)
        requests = [make_request(str(i), range(6 + i), 3 + i) for i in range(3)]
        run_all(engine, requests)
        stats = engine.stats
        assert min(stats.schedule_seconds, stats.execute_seconds, stats.update_seconds) > 0
        names = ("steps", "finished_requests", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens")
        counted = [getattr(stats, f"num_{name}") for name in (*names, "running", "waiting")]
        counts.append((counted, [request.num_steps for request in requests], stats.peak_running))
    assert counts[0] == counts[1]
    assert counts[0][0][:2] == [5, 3]


# ---- aborts, failures, interrupts


def test_an_abort_takes_the_results_of_the_step_under_way_first() -> None:
    engine, runner = make_engine(is_overlapped=True)
    a, b = make_request("a", [1], 50), make_request("b", [2], 50)
    engine.add_request(a)
    engine.add_request(b)
    engine.step()
    assert engine.abort(["a"]) == [a]
    assert launches_and_results(runner) == "L0 L1 R0 R1"
    assert a.output_token_ids == reference_tokens(make_request("r", [1], 50))[:2]
    run_all(engine, [])
    assert b.output_token_ids == reference_tokens(make_request("r", [2], 50))
    assert_idle(engine)


def test_the_prefix_cache_is_reset_behind_the_step_under_way() -> None:
    engine, runner = make_engine(max_num_batched_tokens=4, is_overlapped=True)
    engine.add_request(make_request("a", range(12), 2))
    engine.step()
    engine.reset_prefix_cache()
    assert launches_and_results(runner) == "L0 L1 R0 R1"
    other = make_request("b", range(12), 2)
    run_all(engine, [other])
    assert other.num_cached_tokens == 0
    assert_idle(engine)


def small_engine() -> tuple[EngineCore, FakeRunner]:
    return make_engine(7, 4, max_num_seqs=3, max_num_batched_tokens=20, is_overlapped=True)


@pytest.mark.parametrize("error", [RuntimeError("kernel"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("place", ["before the launch", "after the launch", "in the results"])
def test_a_failing_step_ends_the_call_and_only_the_call(error: BaseException, place: str) -> None:
    for step in range(NUM_STEPS):
        engine, runner = small_engine()
        launch = runner.launch

        def failing(plan: Any, step: int = step, runner: FakeRunner = runner, launch: Any = launch) -> Any:
            if len(runner.plans) != step:
                return launch(plan)
            if place != "before the launch":
                launch(plan)
            if place == "in the results":
                return failing_results
            raise error

        def failing_results() -> Any:
            raise error

        engine._launch = failing
        requests, returned = make_call(0), list[Request]()
        with pytest.raises(type(error)):
            run_until_done(engine, requests, returned)
        assert not engine.has_unfinished_requests()
        engine._launch = launch
        assert_given_back(engine, requests, returned)
        assert_next_call_is_exact(engine)


def run_interrupted(point: int | None) -> int:
    engine, _ = small_engine()
    requests, returned = make_call(0), list[Request]()
    num_points, came = interrupt_at(point, lambda: run_until_done(engine, requests, returned))
    assert came == (point is not None)
    if came:
        assert_given_back(engine, requests, returned)
        assert_next_call_is_exact(engine)
    return num_points


def test_an_interrupt_anywhere_leaves_the_engine_exact() -> None:
    num_points = run_interrupted(None)
    assert num_points > 5000
    for point in range(0, num_points, num_points // 80):
        run_interrupted(point)


@pytest.mark.slow
def test_an_interrupt_at_every_twentieth_instruction_leaves_the_engine_exact() -> None:
    for point in range(random.randrange(20), run_interrupted(None), 20):
        run_interrupted(point)
