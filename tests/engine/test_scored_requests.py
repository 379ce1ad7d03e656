"""Prompts that are scored: what is planned, and the same scores whatever the pool, the cache and the neighbours."""

from __future__ import annotations

import random

import numpy as np

from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.engine.policy import FCFSPolicy, OfflinePolicy
from pagedllm.request import Request
from tests.engine.fakes import (
    assert_idle,
    hashed_token,
    logprob_of,
    make_engine,
    make_request,
    reference_tokens,
    run_all,
)

PROMPT = tuple(range(10, 20))


def scored_request(name: str, prompt: tuple[int, ...], num_scored: int, max_output_tokens: int = 0) -> Request:
    request = make_request(name, prompt, max_output_tokens, prompt_logprobs=0, detokenize=False)
    request.num_unscored_tokens = num_scored
    return request


def check_scores(request: Request, num_scored: int) -> None:
    assert request.num_unscored_tokens == 0
    rows = request.scored_rows()
    places = range(request.num_prompt_tokens - num_scored, request.num_prompt_tokens)
    assert rows.token_ids.tolist() == [[request.token_ids[place]] for place in places]
    assert rows.logprobs[:, 0].tolist() == [logprob_of(request.token_ids[: place + 1]) for place in places]
    assert rows.is_greedy.tolist() == [
        hashed_token(request.token_ids[:place], request.seed) == request.token_ids[place] for place in places
    ]


def test_a_scored_prompt_stops_before_its_last_token_and_gives_no_output() -> None:
    engine, runner = make_engine(block_size=4)
    (request,) = run_all(engine, [scored_request("a", PROMPT, 3)])
    (plan,) = (plan for plan in runner.plans if plan.scheduled)
    (scheduled,) = plan.scheduled
    assert (scheduled.num_computed_tokens, scheduled.num_new_tokens, scheduled.first_logits_index) == (0, 9, 6)
    assert (request.finish_reason, request.output_token_ids) == ("length", [])
    check_scores(request, 3)
    assert_idle(engine)


def test_the_cache_serves_up_to_the_first_wanted_logits_and_a_generating_prompt_is_computed_whole() -> None:
    engine, runner = make_engine(block_size=4)
    run_all(engine, [make_request("first", PROMPT, 1)])
    runner.plans.clear()
    for name, num_scored, max_output_tokens, cached in (("a", 1, 0, 8), ("b", 2, 0, 4), ("c", 5, 0, 4), ("d", 9, 1, 0)):
        (request,) = run_all(engine, [scored_request(name, PROMPT, num_scored, max_output_tokens)])
        (plan,) = (plan for plan in runner.plans if plan.scheduled)
        (scheduled,) = plan.scheduled
        assert (scheduled.num_computed_tokens, request.num_cached_tokens) == (cached, cached)
        assert scheduled.first_logits_index == len(PROMPT) - 1 - num_scored
        assert scheduled.num_new_tokens == len(PROMPT) - cached - (max_output_tokens == 0)
        check_scores(request, num_scored)
        runner.plans.clear()


def test_scores_arrive_in_chunks_and_in_order() -> None:
    engine, _ = make_engine(block_size=4, max_num_batched_tokens=2)
    (request,) = run_all(engine, [scored_request("a", PROMPT, 7, 2)])
    assert [len(part.ranks) for part in request.prompt_logprobs] == [2, 2, 2, 1]
    check_scores(request, 7)
    assert request.output_token_ids == reference_tokens(request)


def test_nothing_to_score_is_nothing_to_compute() -> None:
    engine, runner = make_engine()
    (request,) = run_all(engine, [scored_request("a", (5,), 0)])
    assert request.finish_reason == "length"
    assert request.scored_rows().logprobs.shape == (0, 1)
    assert [plan.num_tokens for plan in runner.plans] == [0]


def test_an_aborted_prompt_keeps_what_is_missing_on_record() -> None:
    engine, _ = make_engine(block_size=4, max_num_batched_tokens=4)
    engine.add_request(scored_request("a", PROMPT, 9))
    engine.step()
    (request,) = engine.abort(["a"])
    assert (request.finish_reason, request.num_unscored_tokens, len(request.prompt_logprobs)) == ("abort", 5, 1)
    assert_idle(engine)


def test_a_prompt_whose_logits_are_not_finite_fails_alone() -> None:
    engine, runner = make_engine()
    runner.non_finite.add("a")
    ended = run_all(engine, [scored_request("a", PROMPT, 3), scored_request("b", PROMPT[:8], 3)])
    assert {request.request_id: request.error and request.error.code for request in ended} == {
        "a": "non_finite_logits",
        "b": None,
    }
    check_scores(next(request for request in ended if request.request_id == "b"), 3)


def mixed_requests(rng: random.Random) -> tuple[list[Request], list[int]]:
    shared = tuple(rng.randrange(97) for _ in range(rng.randrange(1, 14)))
    requests, nums = [], []
    for i in range(12):
        prompt = shared[: rng.randrange(1, len(shared) + 1)] + tuple(
            rng.randrange(97) for _ in range(rng.randrange(1, 9))
        )
        num_scored = rng.randrange(len(prompt))
        max_output_tokens = rng.choice((0, 3, 14))
        request = scored_request(str(i), prompt, num_scored, max_output_tokens)
        request.rank = i
        requests.append(request)
        nums.append(num_scored)
    return requests, nums


def test_no_pool_cache_chunk_or_policy_changes_a_score() -> None:
    num_preemptions = 0
    for seed in range(120):
        rng = random.Random(seed)
        requests, nums = mixed_requests(rng)
        engine, _ = make_engine(
            num_blocks=rng.choice((9, 10, 64)),
            block_size=4,
            max_num_seqs=rng.choice((2, 5, 16)),
            max_num_batched_tokens=rng.choice((1, 3, 8, 64)),
            enable_prefix_caching=rng.random() < 0.7,
            policy=(FCFSPolicy(), OfflinePolicy())[seed % 2],
        )
        run_all(engine, requests)
        for request, num_scored in zip(requests, nums, strict=True):
            check_scores(request, num_scored)
            assert request.output_token_ids == reference_tokens(request)
        num_preemptions += engine.stats.num_preemptions
        assert_idle(engine)
    assert num_preemptions > 10


def test_blocks_are_kept_for_what_a_scored_prompt_will_really_take() -> None:
    manager = KVCacheManager(16, 4)
    request = scored_request("a", PROMPT, 4)
    manager.expect(request)
    assert len(manager._expected["a"][0]) == 1  # first wanted logits: position 5
    manager.stop_expecting(request)


def test_rows_of_no_prompt_join_to_nothing() -> None:
    rows = make_request("a", PROMPT, 1).scored_rows()
    assert (rows.token_ids.dtype, rows.is_greedy.dtype, len(rows.ranks)) == (np.int32, np.bool_, 0)
