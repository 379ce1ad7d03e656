"""Workloads: the same ids for everyone, of the promised lengths."""

from dataclasses import replace

import pytest

from pagedllm.bench.workloads import SAMPLED, WORKLOADS, is_workload, make_workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_arguments_give_equal_requests_and_another_seed_gives_others(name: str) -> None:
    requests = make_workload(name, 5, 1000, seed=3)
    assert make_workload(name, 5, 1000, seed=3) == requests
    assert make_workload(name, 5, 1000, seed=4) != requests


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_id_is_in_the_vocabulary(name: str) -> None:
    assert {i for request in make_workload(name, 40, 7, seed=0) for i in request.prompt_token_ids} == set(range(7))


def test_mixed_has_prompts_of_16_to_256_and_outputs_of_16_to_192() -> None:
    requests = make_workload("mixed", 2000, 1000, seed=0)
    prompts = {len(request.prompt_token_ids) for request in requests}
    outputs = {request.num_output_tokens for request in requests}
    assert (min(prompts), max(prompts)) == (16, 256)
    assert (min(outputs), max(outputs)) == (16, 192)


def test_decode_has_prompts_of_32_and_outputs_of_128() -> None:
    requests = make_workload("decode", 3, 1000, seed=0)
    assert [(len(request.prompt_token_ids), request.num_output_tokens) for request in requests] == [(32, 128)] * 3


def test_prefix_shares_480_tokens_and_adds_16_to_64_different_ones() -> None:
    requests = make_workload("prefix", 500, 1000, seed=0)
    assert len({tuple(request.prompt_token_ids[:480]) for request in requests}) == 1
    assert len({tuple(request.prompt_token_ids[480:]) for request in requests}) == 500
    own = {len(request.prompt_token_ids) - 480 for request in requests}
    assert (min(own), max(own)) == (16, 64)
    assert {request.num_output_tokens for request in requests} == {32}


def test_sampled_is_decode_drawn_at_0_8_0_95_50() -> None:
    decode = make_workload("decode", 3, 1000, seed=0)
    assert make_workload("sampled", 3, 1000, seed=0) == [replace(request, sampling=SAMPLED) for request in decode]
    assert (SAMPLED.temperature, SAMPLED.top_p, SAMPLED.top_k) == (0.8, 0.95, 50)


def test_two_numbers_are_the_lengths_of_every_prompt_and_output() -> None:
    requests = make_workload("7,12", 3, 1000, seed=0)
    assert [(len(request.prompt_token_ids), request.num_output_tokens) for request in requests] == [(7, 12)] * 3
    assert make_workload("7,12", 3, 1000, seed=0) == requests != make_workload("7,12", 3, 1000, seed=1)


@pytest.mark.parametrize("name", ["7", "0,1", "1,0", "1,2,3", "1, 2", "-1,2", "decoded", ""])
def test_anything_else_is_no_workload(name: str) -> None:
    assert not is_workload(name)


def test_the_mixed_workload_of_seed_0_never_changes() -> None:
    assert [
        (len(request.prompt_token_ids), request.prompt_token_ids[:3], request.num_output_tokens)
        for request in make_workload("mixed", 2, 49152, seed=0)
    ] == [(232, [25247, 27562, 2653], 190), (120, [37297, 33331, 20410], 50)]
