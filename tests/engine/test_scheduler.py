"""Scheduler: exact plans, turns, preemption, failures."""

from __future__ import annotations

import pytest

from pagedllm.engine.policy import FCFSPolicy, PriorityPolicy
from pagedllm.engine.scheduler_output import ModelRunnerOutput, NewRequestData, ScheduledRequest, SchedulerOutput
from pagedllm.errors import RequestError
from pagedllm.request import Request, RequestStatus
from tests.engine.fakes import make_request
from tests.engine.scheduling import append, make_scheduler, shares, step, update


def test_a_new_request_tells_all_and_a_running_one_only_news() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [5, 6, 7], 4, seed=9, eos_token_ids=(2,))
    scheduler.add(request)
    plan, _ = step(scheduler, 8)
    new = NewRequestData(3, request.sampling_params, 9, (2,))
    assert plan == SchedulerOutput(
        scheduled=(ScheduledRequest("a", 0, 3, (5, 6, 7), (), ((0,),), 2, new_request=new),), num_tokens=3
    )
    assert request.token_ids == [5, 6, 7, 8]
    plan, _ = step(scheduler, 9)
    assert plan == SchedulerOutput(scheduled=(ScheduledRequest("a", 3, 1, (), (), ((),), 3),), num_tokens=1)
    plan, _ = step(scheduler, 10)
    assert plan.scheduled == (ScheduledRequest("a", 4, 1, (), (), ((1,),), 4),)
    plan, ended = step(scheduler, 11)
    assert ended == [request]
    assert request.output_token_ids == [8, 9, 10, 11]
    scheduler.add(make_request("b", [1]))
    assert scheduler.schedule().released_request_ids == ("a",)


def test_chunks_and_decodes_share_a_step_and_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", range(3), 9))
    scheduler.add(make_request("b", range(100, 112), 9))
    scheduler.add(make_request("c", range(200, 203), 9))
    assert shares(step(scheduler)[0]) == [("a", 0, 3), ("b", 0, 5)]
    assert shares(step(scheduler)[0]) == [("a", 3, 1), ("b", 5, 7)]
    assert shares(step(scheduler)[0]) == [("a", 4, 1), ("b", 12, 1), ("c", 0, 3)]


def test_a_chunk_samples_nothing_until_the_last_token_is_computed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    request = make_request("a", range(5), 2)
    scheduler.add(request)
    for num_computed_tokens, num_output_tokens in ((2, 0), (4, 0), (5, 1)):
        plan, _ = step(scheduler)
        assert plan.scheduled[0].first_logits_index == 4
        assert (request.num_computed_tokens, request.num_output_tokens) == (num_computed_tokens, num_output_tokens)


def test_max_num_seqs_bounds_who_runs_and_the_waiting_hold_no_block() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(name, range(100 * i, 100 * i + 3), 2) for i, name in enumerate("abcd")]
    for request in requests:
        scheduler.add(request)
    assert shares(step(scheduler)[0]) == [("a", 0, 3), ("b", 0, 3)]
    assert scheduler.kv_cache.request_ids == ("a", "b")
    assert scheduler.stats.num_waiting == 2
    plan, ended = step(scheduler)
    assert ended == requests[:2]
    plan, _ = step(scheduler)
    assert shares(plan) == [("c", 0, 3), ("d", 0, 3)]
    assert plan.released_request_ids == ("a", "b")


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, range(9), 3))
    plan, _ = step(scheduler)
    assert shares(plan) == [("a", 0, 9), ("b", 8, 1), ("c", 8, 1)]
    assert [s.new_block_ids for s in plan.scheduled] == [((0, 1, 2),), ((0, 1, 3),), ((0, 1, 4),)]
    assert (scheduler.stats.num_prompt_tokens, scheduler.stats.num_cached_tokens) == (27, 16)


@pytest.mark.parametrize(("length", "num_cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_a_full_hit_leaves_at_least_the_last_token_to_compute(length: int, num_cached: int) -> None:
    scheduler = make_scheduler()
    first, second, third = (make_request(name, range(length), 1) for name in ("first", "second", "third"))
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.add(third)
    plan, _ = step(scheduler)
    assert shares(plan) == [("third", num_cached, length - num_cached)]
    assert [r.num_cached_tokens for r in (first, second, third)] == [0, num_cached, num_cached]
    assert [r.output_token_ids for r in (first, second, third)] == [[7]] * 3


def test_admission_leaves_a_block_for_each_running_request() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    for name in "abc":
        scheduler.add(make_request(name, range(4), 4))
    plan, _ = step(scheduler)
    assert shares(plan) == [("a", 0, 4), ("b", 0, 4)]  # c would leave one block for two


def test_the_latest_is_preempted_and_comes_back_with_its_whole_table() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    a, b = make_request("a", range(3), 12), make_request("b", range(10, 13), 12)
    scheduler.add(a)
    scheduler.add(b)
    for _ in range(5):
        plan, _ = step(scheduler)
    assert shares(plan) == [("a", 6, 1), ("b", 6, 1)]
    plan, _ = step(scheduler)
    plan, _ = step(scheduler)  # a asks for a third block, and only b has one to give
    assert shares(plan) == [("a", 8, 1)]
    assert plan.released_request_ids == ("b",)
    assert plan.scheduled[0].new_block_ids == ((1,),)
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert scheduler.kv_cache.request_ids == ("a",)
    assert scheduler.stats.num_preemptions == 1
    while not a.is_finished:
        plan, _ = step(scheduler)
        assert [s.request_id for s in plan.scheduled] == ["a"]
    plan, _ = step(scheduler)
    (resumed,) = plan.scheduled
    assert (resumed.num_computed_tokens, resumed.num_new_tokens, resumed.first_logits_index) == (0, 9, 8)
    assert resumed.new_token_ids == (10, 11, 12, 7, 7, 7, 7, 7, 7, 7)[:9]
    assert len(resumed.new_block_ids[0]) == 3
    assert resumed.new_request is not None
    assert resumed.new_request.num_prompt_tokens == 3


def test_a_preempted_request_starts_again_from_what_the_cache_still_holds() -> None:
    scheduler = make_scheduler(num_blocks=4)
    a, b = make_request("a", range(3), 8), make_request("b", range(10, 13), 12)
    scheduler.add(a)
    scheduler.add(b)
    while not b.num_preemptions:
        step(scheduler)
    while not a.is_finished:
        step(scheduler)
    plan, _ = step(scheduler)
    assert plan.scheduled[0].request_id == "b"
    assert plan.scheduled[0].num_computed_tokens == 4
    assert b.num_cached_tokens == 0  # of its prompt, at its first admission


class EarliestFirst(FCFSPolicy):
    """Preempts those who came first, who are in the plan already."""

    def victim_key(self, request: Request) -> tuple[int, ...]:
        return (-request.arrival,)


def test_a_victim_that_is_in_the_plan_already_leaves_it_and_gives_its_tokens_back() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=9, policy=EarliestFirst())
    for i, name in enumerate("abc"):
        scheduler.add(make_request(name, range(10 * i, 10 * i + 3), 20))
    for _ in range(2):
        step(scheduler)
    for _ in range(3):
        plan, _ = step(scheduler)
    assert shares(plan) == [("a", 6, 1), ("b", 6, 1), ("c", 6, 1)]
    step(scheduler)
    # Three hold six blocks. a asks for a third: the first is safe, b comes before c, and its two blocks serve both.
    plan, _ = step(scheduler)
    assert shares(plan) == [("a", 8, 1), ("c", 8, 1)]
    assert plan.released_request_ids == ("b",)
    assert plan.num_tokens == 2


def test_the_plan_loses_what_a_scheduled_victim_had_offered_to_the_cache() -> None:
    """b completes a block in the plan, then c asks for a block and the policy takes b's."""
    scheduler = make_scheduler(num_blocks=5, policy=EarliestFirst())
    for name, prompt in (("a", range(2)), ("b", range(10, 13)), ("c", range(20, 24))):
        scheduler.add(make_request(name, prompt, 20))
    step(scheduler)
    scheduler.kv_cache.pool.allocate(2)  # nothing is free now
    b_tokens = [*range(10, 13), 7, 0]
    plan = scheduler.schedule()
    assert shares(plan) == [("a", 2, 1), ("c", 4, 1)]
    assert plan.scheduled[1].new_block_ids == ((1,),)
    assert scheduler.kv_cache.get_computed_blocks(make_request("b again", b_tokens), 4).num_blocks == 0


def test_priority_serves_lower_numbers_first_and_preempts_the_least_urgent() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2, policy=PriorityPolicy(), enable_prefix_caching=False)
    for name, priority in (("late", 5), ("soon", 1), ("now", 0), ("soon too", 1)):
        scheduler.add(make_request(name, range(3), 20, priority=priority))
    plan, _ = step(scheduler)
    assert [s.request_id for s in plan.scheduled] == ["now", "soon"]
    while not scheduler.stats.num_preemptions:
        plan, _ = step(scheduler)
    assert plan.released_request_ids == ("soon",)
    while "soon" in scheduler.requests and scheduler.requests["soon"].status is not RequestStatus.RUNNING:
        plan, _ = step(scheduler)
    assert plan.scheduled[0].request_id == "soon"  # before "soon too": it came first


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=8, policy=PriorityPolicy(), enable_prefix_caching=False)
    a, c = make_request("a", range(3), 20, priority=1), make_request("c", range(10, 27), 20, priority=2)
    scheduler.add(a)
    scheduler.add(c)
    while scheduler.kv_cache.pool.num_free or len(a.token_ids) % 4 != 1:
        step(scheduler)
    scheduler.add(make_request("urgent", [1], 20, priority=0))
    plan, _ = step(scheduler)
    assert plan.released_request_ids == ("c",)
    assert scheduler.kv_cache.pool.num_free == 5
    assert [s.request_id for s in plan.scheduled] == ["a"]
    plan, _ = step(scheduler)
    assert [s.request_id for s in plan.scheduled] == ["a", "urgent"]


def test_blocks_of_failed_logits_are_forgotten_though_earlier_steps_published_them() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("bad", range(9)))
    step(scheduler)
    step(scheduler, failed=("bad",))
    scheduler.add(make_request("good", range(9)))
    plan, _ = step(scheduler)
    assert shares(plan) == [("good", 0, 9)]


def test_failed_logits_cost_their_own_request_and_send_back_who_shared_its_new_blocks() -> None:
    scheduler = make_scheduler()
    owner, user, other = (
        make_request("owner", range(9)),
        make_request("user", range(12)),
        make_request("other", range(50, 55)),
    )
    for request in (owner, user, other):
        scheduler.add(request)
    plan, ended = step(scheduler, failed=("owner", "user"))
    assert shares(plan) == [("owner", 0, 9), ("user", 8, 4), ("other", 0, 5)]
    assert ended == [owner]
    assert owner.finish_reason == "error"
    assert owner.error is not None
    assert owner.error.code == "non_finite_logits"
    assert (user.status, user.output_token_ids) == (RequestStatus.PREEMPTED, [])
    assert other.output_token_ids == [7]
    plan, _ = step(scheduler)
    assert shares(plan) == [("other", 5, 1), ("user", 0, 12)]
    assert plan.released_request_ids == ("user", "owner")
    assert user.output_token_ids == [7]


def test_two_failing_owners_of_one_plan_send_a_shared_user_back_once() -> None:
    scheduler = make_scheduler()
    first, second, user = (
        make_request("first", range(4)),
        make_request("second", range(8)),
        make_request("user", range(9)),
    )
    for request in (first, second, user):
        scheduler.add(request)
    plan, ended = step(scheduler, failed=("first", "second"))
    assert shares(plan) == [("first", 0, 4), ("second", 4, 4), ("user", 8, 1)]
    assert ended == [first]
    assert (second.num_preemptions, user.num_preemptions) == (1, 1)
    plan, _ = step(scheduler)
    assert shares(plan) == [("second", 0, 8), ("user", 8, 1)]


def test_an_error_of_one_request_ends_it_with_that_error() -> None:
    scheduler = make_scheduler()
    a, b = make_request("a", range(3)), make_request("b", range(3))
    scheduler.add(a)
    scheduler.add(b)
    plan = scheduler.schedule()
    error = RequestError("invalid_parameter", "its callable raised")
    ended = update(scheduler, plan, ModelRunnerOutput([(), (7,)], [True, True], errors={"a": error}))
    assert ended == [a]
    assert (a.error, a.finish_reason) == (error, "error")
    assert b.output_token_ids == [7]


def test_an_update_takes_any_number_of_tokens_and_rolls_back_rejected_drafts() -> None:
    scheduler = make_scheduler()
    request = make_request("a", range(3), 6)
    scheduler.add(request)
    step(scheduler)
    plan = scheduler.schedule()
    scheduler.update(plan, ModelRunnerOutput([(8, 9, 10)], [True]), append)
    assert (request.output_token_ids, request.num_computed_tokens) == ([7, 8, 9, 10], 6)
    plan = scheduler.schedule()
    assert shares(plan) == [("a", 6, 1)]
    ended = update(scheduler, plan, ModelRunnerOutput([(11, 12, 13, 14)], [True]))
    assert ended == [request]
    assert request.output_token_ids == [7, 8, 9, 10, 11, 12]
