"""Several outputs of one prompt: n samples, and beams. Whatever the settings, as a plain loop gives them, one by one.

CASES A15 and A17 at the level of the engine, and the same for beams, against a beam search that is written down anew
here, without blocks, steps or arrays.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.beam_search_params import BeamSearchParams
from pagedllm.engine.core import EngineCore
from pagedllm.engine.policy import FCFSPolicy, OfflinePolicy, Policy, PriorityPolicy
from pagedllm.request import Request
from tests.engine.fakes import (
    VOCAB_SIZE,
    assert_idle,
    logprob_of,
    make_engine,
    make_request,
    next_logprobs,
    reference_tokens,
    run_all,
)
from tests.engine.test_interrupts import interrupt_at

POLICIES: list[Policy] = [FCFSPolicy(), PriorityPolicy(), OfflinePolicy()]


def make_sampled(request_id: str, prompt: list[int], n: int, max_output_tokens: int = 8, **fields: object) -> Request:
    return make_request(request_id, prompt, max_output_tokens, n=n, **fields)  # type: ignore[arg-type]


def make_beams(
    request_id: str,
    prompt: list[int],
    width: int,
    max_output_tokens: int = 8,
    *,
    early_stopping: bool | str = False,
    length_penalty: float = 1.0,
    **fields: object,
) -> Request:
    request = make_request(request_id, prompt, max_output_tokens, temperature=0, **fields)  # type: ignore[arg-type]
    request.beam_search = BeamSearchParams(
        width,
        max_output_tokens,
        length_penalty,
        early_stopping,  # type: ignore[arg-type]
    )
    return request


def expected_samples(request: Request) -> list[list[int]]:
    outputs = []
    for index in range(request.sampling_params.n):
        twin = make_request("twin", request.token_ids[: request.num_prompt_tokens], request.max_output_tokens,
                            seed=request.seed, eos_token_ids=request.eos_token_ids)  # fmt: skip
        twin.sampling_params, twin.sample_index = request.sampling_params, index
        outputs.append(reference_tokens(twin))
    return outputs


def expected_beams(request: Request) -> list[tuple[list[int], float, float, str]]:
    """(output, cumulative logprob, score, finish reason), best first."""
    params = request.beam_search
    assert params is not None
    prompt = request.token_ids[: request.num_prompt_tokens]
    eos = set(request.eos_token_ids)
    running: list[tuple[list[int], float]] = [([], 0.0)]
    complete: list[tuple[list[int], float, float, str]] = []
    for length in range(1, request.max_output_tokens + 1):
        options = [
            (-(total + float(logprob)), beam, token_id)
            for beam, (output, total) in enumerate(running)
            for token_id, logprob in enumerate(next_logprobs(prompt + output))
        ]
        options.sort()
        goes_on = []
        for place, (loss, beam, token_id) in enumerate(options[: max(2, 1 + len(eos)) * params.beam_width]):
            output = [*running[beam][0], token_id]
            score = -loss / length**params.length_penalty
            if token_id in eos or length == request.max_output_tokens:
                if place < params.beam_width:
                    complete.append((output, -loss, score, "stop" if token_id in eos else "length"))
            elif len(goes_on) < params.beam_width:
                goes_on.append((output, -loss))
        complete.sort(key=lambda item: -item[2])
        del complete[params.beam_width :]
        running = goes_on
        if len(complete) == params.beam_width and running:
            reach = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                reach = request.max_output_tokens
            best_possible = running[0][1] / reach**params.length_penalty
            if params.early_stopping is True or best_possible <= complete[-1][2]:
                break
    return complete


def beams_of(request: Request) -> list[tuple[list[int], float, float, str]]:
    return [(r.output_token_ids, r.cumulative_logprob, r.score, r.finish_reason) for r in request.samples]  # type: ignore[misc]


def outputs_of(request: Request) -> list[list[int]]:
    return [sample.output_token_ids for sample in request.samples]


def make_mixed(seed: int, number: int, max_n: int = 6, max_width: int = 4) -> list[Request]:
    """Single requests, samples and beams, most of which share a prefix with some other."""
    rng = random.Random(seed)
    requests: list[Request] = []
    for i in range(number):
        prompt = [rng.randrange(2)] * rng.randrange(12) + [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
        eos = tuple(rng.sample(range(VOCAB_SIZE), rng.randrange(0, 12)))
        max_output = rng.randrange(1, 14)
        fields = {"eos_token_ids": eos, "seed": rng.randrange(2), "priority": rng.randrange(3)}
        if rng.random() < 0.4:
            early_stopping = rng.choice([False, True, "never"])
            request = make_beams(str(i), prompt, rng.randrange(1, max_width + 1), max_output,
                                 early_stopping=early_stopping, length_penalty=rng.choice([0.0, 1.0, -0.5, 2.0]),
                                 **fields)  # fmt: skip
        else:
            request = make_sampled(str(i), prompt, rng.randrange(1, max_n + 1), max_output, **fields)
        request.rank = i * 7 % number
        requests.append(request)
    return requests


def assert_as_expected(requests: list[Request], fresh: list[Request]) -> None:
    for request, twin in zip(requests, fresh, strict=True):
        assert request.error is None
        if request.beam_search is not None:
            assert beams_of(request) == expected_beams(twin)
        else:
            assert outputs_of(request) == expected_samples(twin)
            for sample in request.samples:
                is_stop = sample.output_token_ids[-1] in twin.eos_token_ids
                assert sample.finish_reason == ("stop" if is_stop else "length")
                assert sample.text is not None
                seen = [sample.token_ids[: twin.num_prompt_tokens + i] for i in range(sample.num_output_tokens)]
                assert [float(entry.logprobs[0]) for entry in sample.logprobs] == list(map(logprob_of, seen))


ROOMY, STARVED = 1000, 24


@pytest.mark.parametrize("num_blocks", [ROOMY, STARVED])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 4096])
def test_settings_change_neither_samples_nor_beams(num_blocks: int, chunk: int) -> None:
    for is_cached, policy, is_reversed in product((False, True), POLICIES, (False, True)):
        requests = make_mixed(seed=1, number=14)
        engine, _ = make_engine(
            num_blocks, 4, max_num_batched_tokens=chunk, enable_prefix_caching=is_cached, policy=policy
        )
        ended = run_all(engine, requests[::-1] if is_reversed else requests)
        assert sorted(r.request_id for r in ended) == sorted(r.request_id for r in requests)
        assert_as_expected(requests, make_mixed(seed=1, number=14))
        assert_idle(engine)
        if num_blocks == STARVED and chunk == 4096 and policy is POLICIES[0]:
            assert engine.stats.num_preemptions > 0


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 2, 4, 8)),
    num_slots=st.integers(100, 250),
    max_num_seqs=st.integers(4, 12),
    chunk=st.integers(1, 40),
    is_cached=st.booleans(),
    policy=st.sampled_from(POLICIES),
    data=st.data(),
)
def test_random_settings_arrivals_and_aborts_change_nothing_for_the_others(
    seed: int,
    block_size: int,
    num_slots: int,
    max_num_seqs: int,
    chunk: int,
    is_cached: bool,
    policy: Policy,
    data: st.DataObject,
) -> None:
    engine, _ = make_engine(
        -(-num_slots // block_size),
        block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=is_cached,
        policy=policy,
    )
    requests = make_mixed(seed, 8)
    arriving, returned, aborted = list(requests), [], set()
    while arriving or engine.has_unfinished_requests():
        for _ in range(data.draw(st.integers(0 if engine.has_unfinished_requests() else 1, 4))):
            if arriving:
                engine.add_request(arriving.pop())
        if data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(requests))
            ended = engine.abort([victim.request_id])
            returned += ended
            aborted |= {r.request_id for r in ended if any(s.finish_reason == "abort" for s in r.samples)}
        returned += engine.step()
    assert sorted(r.request_id for r in returned) == sorted(r.request_id for r in requests)
    assert_idle(engine)
    for request, twin in zip(requests, make_mixed(seed, 8), strict=True):
        if request.error is not None:
            assert request.error.code == "never_fits"
        elif request.request_id not in aborted:
            assert_as_expected([request], [twin])
        elif request.beam_search is None:
            for output, whole in zip(outputs_of(request), expected_samples(twin), strict=True):
                assert output == whole[: len(output)]


def test_one_seq_runs_one_sample_after_the_other() -> None:
    engine, runner = make_engine(1000, 4, max_num_seqs=1)
    request = make_sampled("r", [1, 2, 3], 4, 6)
    run_all(engine, [request])
    assert outputs_of(request) == expected_samples(make_sampled("r", [1, 2, 3], 4, 6))
    assert {len(plan.scheduled) for plan in runner.plans} == {1}
    assert_idle(engine)


@pytest.mark.parametrize("n", [1, 2, 4, 5, 20])
@pytest.mark.parametrize("is_cached", [False, True])
def test_any_n_against_four_seqs_gives_n_outputs_in_order_and_computes_the_prompt_once(n: int, is_cached: bool) -> None:
    engine, runner = make_engine(
        1000, 4, max_num_seqs=4, max_num_batched_tokens=4096, enable_prefix_caching=is_cached, policy=OfflinePolicy()
    )
    request = make_sampled("r", list(range(41)), n, 6)
    assert run_all(engine, [request]) == [request]
    assert [sample.sample_index for sample in request.samples] == list(range(n))
    assert outputs_of(request) == expected_samples(make_sampled("r", list(range(41)), n, 6))
    assert len({tuple(output) for output in outputs_of(request)}) == n
    num_late = -(-max(0, n - 4) // 4)  # each next four begin with one that computes the prompt's last token again
    assert engine.stats.num_computed_tokens == 41 + 5 * n + num_late
    assert engine.stats.num_prompt_tokens == 41
    assert max(len(plan.scheduled) for plan in runner.plans) == min(n, 4)
    assert_idle(engine)


def test_samples_hold_their_prompt_once() -> None:
    engine, _ = make_engine(1000, 4, max_num_batched_tokens=4096)
    request = make_sampled("r", list(range(42)), 8, 6)
    engine.add_request(request)
    engine.step()
    assert engine.scheduler.kv_cache.pool.num_used == 10 + 8  # ten full blocks shared, the eleventh one each
    engine.step()
    assert engine.scheduler.kv_cache.pool.num_used == 10 + 8
    while engine.has_unfinished_requests():
        engine.step()
    assert_idle(engine)


def test_samples_that_end_with_their_first_token_take_no_block_and_no_row() -> None:
    engine, runner = make_engine(11, 4, max_num_seqs=2, max_num_batched_tokens=4096)
    request = make_sampled("r", list(range(41)), 9, 1)
    engine.add_request(request)
    while engine.has_unfinished_requests():
        engine.step()
    assert [len(plan.scheduled) for plan in runner.plans] == [1] * 5  # two are drawn at once
    assert outputs_of(request) == expected_samples(make_sampled("r", list(range(41)), 9, 1))


def test_a_sample_that_stops_at_once_leaves_the_others_running() -> None:
    plain = expected_samples(make_sampled("r", [1, 2, 3], 3, 6))
    request = make_sampled("r", [1, 2, 3], 3, 6, eos_token_ids=(plain[1][0],))
    engine, _ = make_engine()
    run_all(engine, [request])
    assert outputs_of(request) == [plain[0], plain[1][:1], plain[2]]
    assert [sample.finish_reason for sample in request.samples] == ["length", "stop", "length"]


def test_a_greedy_request_is_run_once_whatever_its_n() -> None:
    request = make_request("r", [1, 2, 3], 6, n=5, temperature=0)
    engine, _ = make_engine()
    run_all(engine, [request])
    assert request.samples == (request,)
    assert engine.stats.num_computed_tokens == 3 + 5


def test_single_samples_are_preempted_and_keep_their_tokens() -> None:
    """Eleven blocks of four: a prompt of eight and four samples that grow to 20 tokens each."""
    engine, _ = make_engine(11, 4, enable_prefix_caching=False)
    request = make_sampled("r", list(range(8)), 4, 12)
    run_all(engine, [request])
    assert outputs_of(request) == expected_samples(make_sampled("r", list(range(8)), 4, 12))
    preempted = [sample.num_preemptions for sample in request.samples]
    assert preempted[0] == 0
    assert sum(preempted) > 0
    assert_idle(engine)


def test_a_failing_sample_is_its_requests_error_and_nobody_elses() -> None:
    engine, runner = make_engine()
    request, other = make_sampled("r", [1, 2, 3, 4, 5], 3), make_sampled("other", [1, 2, 3, 4, 6], 2)
    for added in (request, other):
        engine.add_request(added)
    engine.step()
    runner.non_finite = {"r#1"}
    ended = []
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert {r.request_id for r in ended} == {"r", "other"}
    assert request.error is not None
    assert request.error.code == "non_finite_logits"
    assert outputs_of(other) == expected_samples(make_sampled("other", [1, 2, 3, 4, 6], 2))
    assert_idle(engine)


def test_an_abort_gives_back_one_request_with_all_its_samples() -> None:
    engine, _ = make_engine(max_num_seqs=2)
    request = make_sampled("r", [1, 2, 3], 5, 9)
    engine.add_request(request)
    for _ in range(3):
        engine.step()
    assert engine.abort(["r"]) == [request]
    assert [sample.finish_reason for sample in request.samples] == ["abort"] * 5
    assert [sample.num_output_tokens for sample in request.samples] == [3, 3, 0, 0, 0]
    assert_idle(engine)


def test_beams_that_can_never_fit_are_refused_at_once_by_blocks_and_by_seqs() -> None:
    engine, _ = make_engine(17, 4, max_num_seqs=8)
    wide = make_beams("wide", [1], 9)
    long = make_beams("long", list(range(8)), 4, 17)  # two blocks shared, four each
    just = make_beams("just", list(range(8)), 4, 13)
    run_all(engine, [wide, long, just])
    assert wide.error is not None
    assert str(wide.error) == "beam_width=9 never fits: max_num_seqs is 8"
    assert long.error is not None
    assert str(long.error) == "4 beams of 8 + 17 tokens never fit: they take 18 blocks of 4, the KV cache holds 17"
    assert {wide.error.code, long.error.code} == {"never_fits"}
    assert just.error is None
    assert_as_expected([just], [make_beams("just", list(range(8)), 4, 13)])


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_beams_fill_a_pool_that_just_holds_them_beside_others(block_size: int) -> None:
    """The pool is as large as the widest needs alone, so it can only run by preempting everybody else."""
    for width, length in ((2, 9), (5, 14)):
        num_shared = 10 // block_size
        num_blocks = num_shared + width * (-(-(10 + length - 1) // block_size) - num_shared)
        for policy in POLICIES:
            engine, _ = make_engine(num_blocks, block_size, max_num_seqs=width + 1, policy=policy)
            requests, twins = (
                [
                    make_sampled("a", [7] * 3, 2, 5),
                    make_beams("b", [5] * 10, width, length),
                    make_beams("c", [5] * 9 + [6], width, length),
                    make_sampled("d", [7] * 4, 3, 5),
                ]
                for _ in range(2)
            )
            run_all(engine, requests)
            assert_as_expected(requests, twins)
            assert_idle(engine)


def test_a_step_computes_one_token_of_every_beam_of_every_prompt() -> None:
    engine, runner = make_engine(1000, 4)
    requests = [make_beams(str(i), [i, i, i], 4, 6) for i in range(3)]
    run_all(engine, requests)
    assert [plan.num_tokens for plan in runner.plans] == [9] + [12] * 5
    assert sum(len(plan.blocks_to_copy) for plan in runner.plans) > 0


def test_beams_take_up_a_preempted_group_where_it_was() -> None:
    """The second group is preempted while it runs, and does not begin again from its prompt."""
    engine, runner = make_engine(15, 4, max_num_seqs=16)
    first, second = make_beams("first", [1] * 6, 3, 14), make_beams("second", [2] * 6, 3, 14)
    run_all(engine, [first, second])
    assert_as_expected([first, second], [make_beams("first", [1] * 6, 3, 14), make_beams("second", [2] * 6, 3, 14)])
    assert second.num_preemptions > 0
    resumed = [
        item.num_new_tokens
        for plan in runner.plans
        for item in plan.scheduled
        if item.is_new and item.request_id.startswith("second#") and item.num_computed_tokens >= 6
    ]
    assert max(resumed) > 1  # several tokens of a beam at once: no search begins with that
    assert_idle(engine)


def test_an_aborted_beam_search_gives_back_what_its_beams_have() -> None:
    engine, _ = make_engine()
    request = make_beams("r", [1, 2, 3], 3, 20)
    engine.add_request(request)
    for _ in range(4):
        engine.step()
    assert engine.abort(["r"]) == [request]
    assert [(r.finish_reason, r.num_output_tokens) for r in request.samples] == [("abort", 4)] * 3
    assert_idle(engine)


def test_a_failing_beam_is_its_requests_error() -> None:
    engine, runner = make_engine()
    request, other = make_beams("r", [1, 2, 3, 4, 5], 3), make_beams("other", [1, 2, 3, 4, 6], 2)
    for added in (request, other):
        engine.add_request(added)
    engine.step()
    engine.step()
    runner.non_finite = {engine.scheduler.running[1].request_id}
    ended = []
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert request.error is not None
    assert request.error.code == "non_finite_logits"
    assert request.other_samples == []
    assert_as_expected([other], [make_beams("other", [1, 2, 3, 4, 6], 2)])
    assert_idle(engine)


def test_a_name_in_use_is_refused_until_all_samples_are_back() -> None:
    engine, _ = make_engine()
    request = make_sampled("r", [1, 2, 3], 2, 6)
    outputs = expected_samples(request)
    request.eos_token_ids = (outputs[0][0],)
    engine.add_request(request)
    engine.step()
    assert request.finish_reason == "stop"
    with pytest.raises(ValueError, match="request_id 'r' is in use"):
        engine.add_request(make_request("r", [1]))


def test_tokens_of_an_earlier_run_are_refused_where_several_outputs_are_wanted() -> None:
    engine, _ = make_engine()
    for request in (make_sampled("s", [1, 2, 3], 2), make_beams("b", [1, 2, 3], 2)):
        request.token_ids.append(4)
        with pytest.raises(ValueError, match="asks for several outputs and brings tokens of one"):
            engine.add_request(request)


def make_interrupted() -> list[Request]:
    """Samples that fork, wait and are preempted, beams that branch and are preempted, and one who shares a prefix."""
    return [
        make_sampled("s", [1] * 9, 5, 6, stop=["ab", "c"]),
        make_beams("b", [1] * 9, 2, 7, eos_token_ids=(3, 4, 5)),
        make_sampled("t", [1] * 8, 1, 6),
    ]


def interrupted_engine() -> EngineCore:
    return make_engine(8, 4, max_num_seqs=3, max_num_batched_tokens=16)[0]


def run_interrupted(point: int | None) -> int:
    """Returns how many points there are. What is given back is whole or a beginning, and the next call is exact."""
    engine, requests, returned = interrupted_engine(), make_interrupted(), list[Request]()

    def run() -> None:
        for request in requests:
            engine.add_request(request)
        while engine.has_unfinished_requests():
            returned.extend(engine.step())

    num_points, came = interrupt_at(point, run)
    assert came == (point is not None)
    given_back = engine.abort(["s", "b", "t"])
    assert not {id(r) for r in given_back} & {id(r) for r in returned}
    assert_idle(engine)
    for request in requests:
        if request.finish_reason is None:  # never reached the engine
            assert request.output_token_ids == []
            continue
        assert all(sample.is_finished and sample.text is not None for sample in request.samples)
        if request.beam_search is None:
            expected = expected_samples(request)
            assert len(request.samples) == len(expected) or request.num_output_tokens == 0  # before they were made
            for sample, whole in zip(request.samples, expected, strict=False):
                assert sample.output_token_ids == whole[: sample.num_output_tokens]
        elif request.finish_reason != "abort":
            assert beams_of(request) == expected_beams(request)
    again, twins = make_interrupted(), make_interrupted()
    run_all(engine, again)
    assert beams_of(again[1]) == expected_beams(twins[1])
    assert outputs_of(again[2]) == expected_samples(twins[2])
    assert [len(request.samples) for request in again] == [5, 2, 1]
    assert_idle(engine)
    return num_points


def test_an_interrupt_at_any_of_forty_points_leaves_nothing_behind() -> None:
    num_points = run_interrupted(None)
    for point in range(0, num_points, num_points // 40):
        run_interrupted(point)


@pytest.mark.slow
def test_an_interrupt_at_any_of_a_thousand_random_points_leaves_nothing_behind() -> None:
    num_points, seed = run_interrupted(None), random.randrange(2**32)
    print(f"seed {seed}")
    for point in random.Random(seed).sample(range(num_points), 1000):
        run_interrupted(point)


def torn_engine(engine: EngineCore) -> list[Request]:
    """An interrupt in the middle of a step, then what the engine gives back."""
    engine._state.is_open = True
    return engine.abort(["s", "b"])


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_an_interrupt_gives_back_samples_and_beams_as_far_as_they_came(num_steps: int) -> None:
    engine, _ = make_engine(max_num_seqs=6)
    samples, beams = make_sampled("s", [1, 2, 3], 4, 9), make_beams("b", [1, 2, 4], 2, 9)
    for request in (samples, beams):
        engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
    assert {r.request_id for r in torn_engine(engine)} == {"s", "b"}
    assert [r.num_output_tokens for r in samples.samples] == [num_steps] * 4
    assert [r.num_output_tokens for r in beams.samples] == [num_steps] * 2
    assert {r.finish_reason for r in (*samples.samples, *beams.samples)} == {"abort"}
    assert_idle(engine)
    again = make_sampled("s", [1, 2, 3], 4, 9)
    run_all(engine, [again])
    assert outputs_of(again) == expected_samples(make_sampled("s", [1, 2, 3], 4, 9))
