"""Scheduler: what can never run, what is let go, and what a step may cost."""

from __future__ import annotations

import pytest

from pagedllm.engine.policy import FCFSPolicy, OfflinePolicy, PriorityPolicy, make_policy
from pagedllm.engine.scheduler_output import NewRequestData
from pagedllm.request import Request
from pagedllm.sampling_params import SamplingParams
from tests.engine.fakes import make_request
from tests.engine.scheduling import make_scheduler, step


@pytest.mark.parametrize(
    ("num_tokens", "max_output_tokens", "code"),
    [(0, 1, "empty_prompt"), (11, 1, "prompt_too_long"), (10, 1, "prompt_too_long"), (10, 0, None), (9, 1, None)],
)
def test_prompts_that_max_model_len_refuses(num_tokens: int, max_output_tokens: int, code: str | None) -> None:
    scheduler = make_scheduler(max_model_len=10)
    request = make_request("a", range(num_tokens), max_output_tokens)
    scheduler.add(request)
    assert (request.error and request.error.code) == code


def test_a_prompt_beyond_max_model_len_is_told_with_numbers() -> None:
    scheduler = make_scheduler(max_model_len=4096)
    request = make_request("a", [1] * 5210)
    scheduler.add(request)
    assert str(request.error) == "5,210 tokens exceed max_model_len 4,096 by 1,114"


@pytest.mark.parametrize(("num_tokens", "fits"), [(16, True), (17, False), (40, False)])
def test_a_prompt_larger_than_the_pool_fails_at_once_and_the_others_run(num_tokens: int, fits: bool) -> None:
    for place in range(3):
        scheduler = make_scheduler(num_blocks=4)
        requests = [make_request(f"r{i}", range(3), 2) for i in range(2)]
        big = make_request("big", range(num_tokens), 5)
        requests.insert(place, big)
        for request in requests:
            scheduler.add(request)
        while scheduler.has_unfinished_requests:
            step(scheduler)
        assert [r.finish_reason for r in requests if r is not big] == ["length"] * 2
        if fits:  # one token comes of a full pool, then there is no room for more
            assert (big.finish_reason, big.num_output_tokens) == ("length", 1)
        else:
            assert big.error is not None
            assert big.error.code == "never_fits"
            assert "17 tokens" in str(big.error) or "40 tokens" in str(big.error)


def test_an_output_ends_where_the_pool_does() -> None:
    scheduler = make_scheduler(num_blocks=4)
    request = make_request("a", range(5), 100)
    scheduler.add(request)
    while scheduler.has_unfinished_requests:
        step(scheduler)
    assert (request.finish_reason, len(request.token_ids)) == ("length", 17)
    assert request.num_preemptions == 0


def test_without_progress_it_raises_and_tells_the_state() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("stuck", range(9)))
    scheduler.kv_cache.pool.allocate(2)  # a leak
    with pytest.raises(
        RuntimeError, match=r"no request can advance: 0 running, 1 waiting, 2 of 4 blocks free(.|\n)*stuck"
    ):
        scheduler.schedule()


def test_a_lonely_request_without_a_block_raises_and_tells_the_state() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("stuck", range(4)))
    step(scheduler)
    scheduler.kv_cache.pool.allocate(3)
    with pytest.raises(RuntimeError, match="one request alone finds no free block: 1 running"):
        scheduler.schedule()


def test_aborted_waiting_requests_are_let_go() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    requests = [make_request(str(i), [1, 2], 3) for i in range(100)]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    for request in requests[:97]:
        scheduler.abort(request)
    assert len(scheduler._waiting) <= 6
    while scheduler.has_unfinished_requests:
        step(scheduler)
    assert [r.finish_reason for r in requests] == ["abort"] * 97 + ["length"] * 3


def test_aborts_leave_the_order_of_the_waiting_as_it_was() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy=PriorityPolicy())
    requests = [make_request(str(i), [1, 2], 1, priority=i * 37 % 101) for i in range(101)]
    for request in requests:
        scheduler.add(request)
    for request in requests[:60]:
        scheduler.abort(request)
    order: list[str] = []
    while scheduler.requests:
        order += [s.request_id for s in step(scheduler)[0].scheduled]
    assert order == [r.request_id for r in sorted(requests[60:], key=lambda r: r.priority)]


def test_the_cost_of_a_step_does_not_grow_with_the_queue() -> None:
    """Counted, not timed: admission keys and lookups of one step."""
    calls: list[str] = []

    class Counting(FCFSPolicy):
        def admission_key(self, request: Request) -> tuple[int, ...]:
            calls.append(request.request_id)
            return super().admission_key(request)

    scheduler = make_scheduler(max_num_seqs=2, policy=Counting())
    for i in range(1000):
        scheduler.add(make_request(str(i), [1, 2], 3))
    step(scheduler)
    calls.clear()
    step(scheduler)
    assert calls == []
    assert all(not request.block_hashes for request in list(scheduler.requests.values())[2:])


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make_scheduler(**{name: 0})  # type: ignore[arg-type]


def test_policies_by_name() -> None:
    assert isinstance(make_policy("fcfs"), FCFSPolicy)
    assert isinstance(make_policy("priority"), PriorityPolicy)
    assert isinstance(make_policy("offline"), OfflinePolicy)
    with pytest.raises(ValueError, match=r"scheduling_policy must be .* got 'lifo'"):
        make_policy("lifo")  # type: ignore[arg-type]


def test_the_first_plan_after_a_rebuild_releases_every_row_the_runner_may_hold() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, range(3), 2 if name == "a" else 9))
    step(scheduler)
    step(scheduler)
    scheduler.schedule()  # tells of a's end and brings c in; its execution fails
    rebuilt = scheduler.emptied()
    assert rebuilt.stats is scheduler.stats
    rebuilt.add(make_request("d", range(3)))
    assert sorted(rebuilt.schedule().released_request_ids) == ["a", "b", "c"]


def test_params_reach_the_runner_as_they_are() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(temperature=0.5, logprobs=3)
    request = make_request("a", [1])
    request.sampling_params = params
    request.rope_variant = 2
    scheduler.add(request)
    new = scheduler.schedule().scheduled[0].new_request
    assert new == NewRequestData(1, params, 0, (), 2)
