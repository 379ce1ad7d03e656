"""The plan of a job: depth first by prefixes, the longest first, equal ones once; and what it saves."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.engine import offline_plan
from pagedllm.engine.offline_plan import find_duplicates, plan_order
from pagedllm.engine.policy import FCFSPolicy, OfflinePolicy
from tests.engine.fakes import assert_idle, make_engine, make_request, run_all


def plan(prompts: list[bytes], expected: list[int], block_bytes: int) -> tuple[list[int], int]:
    num_bytes = np.array([len(prompt) for prompt in prompts], np.int32)
    order, num_shared = plan_order(prompts.__getitem__, num_bytes, np.array(expected, np.int32), block_bytes)
    return order.tolist(), num_shared


def order_of(*prompts: str, expected: list[int] | None = None) -> list[str]:
    """Letters are tokens, two of them a block."""
    order, _ = plan([prompt.encode() for prompt in prompts], expected or [1] * len(prompts), 2)
    return [prompts[i] for i in order]


def test_who_shares_a_block_follows_each_other() -> None:
    assert order_of("aabb", "ccdd", "aacc", "ccee", "aabbcc") == ["aabb", "aabbcc", "aacc", "ccdd", "ccee"]


def test_the_longest_output_goes_first_among_branches_and_within_one() -> None:
    assert order_of("aabb", "ccdd", "aacc", "ccee", expected=[1, 2, 5, 9]) == ["ccee", "ccdd", "aacc", "aabb"]
    assert order_of("aabbcc", "aabbdd", "aaxx", "aabb", expected=[2, 9, 5, 1]) == ["aabbdd", "aabbcc", "aabb", "aaxx"]
    assert order_of("p", "q", "r", expected=[1, 3, 2]) == ["q", "r", "p"]


def test_less_than_a_block_is_not_shared() -> None:
    assert order_of("ab", "ac", "ad", expected=[1, 2, 3]) == ["ad", "ac", "ab"]
    assert order_of() == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text("ab", max_size=12), st.integers(1, 3)), max_size=30))
def test_every_prefix_of_blocks_is_one_run_of_the_order(rows: list[tuple[str, int]]) -> None:
    prompts = [prompt.encode() for prompt, _ in rows]
    order, _ = plan(prompts, [expected for _, expected in rows], 2)
    assert sorted(order) == list(range(len(rows)))
    for length in range(2, 13, 2):
        names = [prompts[i][:length] if len(prompts[i]) >= length else i for i in order]
        runs = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
        assert len(runs) == len(set(runs))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("\x00\x01a", max_size=40), max_size=30), st.sampled_from([1, 100, 10_000]))
def test_a_sort_in_parts_gives_the_same_runs(texts: list[str], sort_bytes: int) -> None:
    """Also where a prompt ends in zeros, or goes on with them where another ends."""
    prompts = [text.encode() for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_plan, "SORT_BYTES", sort_bytes)
        order, num_shared = plan(prompts, [1] * len(prompts), 2)
    assert sorted(order) == list(range(len(prompts)))
    seen: set[bytes] = set()
    num_hits = 0
    for prompt in sorted(prompts, key=lambda prompt: prompt + b"\x01"):
        num_hits += sum(prompt[:end] in seen for end in range(2, len(prompt), 2))  # but for the block with the end
        seen |= {prompt[:end] for end in range(2, len(prompt) + 1, 2)}
    assert num_shared == num_hits
    for length in range(2, 41, 2):
        names = [prompts[i][:length] if len(prompts[i]) >= length else i for i in order]
        runs = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
        assert len(runs) == len(set(runs))


def test_only_the_chosen_are_ordered() -> None:
    prompts, indices = [b"aa", b"bb", b"aa", b"cc"], np.array([0, 2, 3], np.int32)
    lengths, expected = np.full(4, 2, np.int32), np.array([1, 9, 1, 5], np.int32)
    order, num_shared = plan_order(prompts.__getitem__, lengths, expected, 2, indices)
    assert (order.tolist(), num_shared) == ([3, 0, 2], 0)


def test_duplicates_name_the_first() -> None:
    assert find_duplicates(["a", "b", "a", None, None, "b", "a"]) == [None, None, 0, None, None, 1, 0]


def computed_tokens(is_offline: bool, num_blocks: int) -> int:
    """64 prefixes of 100 tokens x 16 rows of 5 more, shuffled; blocks of 4."""
    rows = [[p + 100] * 4 + [p, 7] * 48 + [p, i, i, p, i] for p in range(64) for i in range(16)]
    random.Random(0).shuffle(rows)
    requests = [make_request(str(i), row, 3) for i, row in enumerate(rows)]
    if is_offline:
        order, _ = plan([array("i", row).tobytes() for row in rows], [3] * len(rows), 16)
        for rank, i in enumerate(order):
            requests[i].rank = rank
    policy = OfflinePolicy() if is_offline else FCFSPolicy()
    engine, _ = make_engine(num_blocks, 4, policy=policy, max_num_batched_tokens=256)
    run_all(engine, requests)
    assert_idle(engine)
    assert engine.stats.num_preemptions == 0
    return engine.stats.num_computed_tokens


def test_a_pool_of_eight_prefixes_computes_each_prefix_once() -> None:
    tails = 64 * 16 * (5 + 2)  # own tokens, and outputs but the last
    offline = computed_tokens(True, 8 * 25 + 30)
    assert tails + 64 * 100 <= offline <= tails + 64 * 100 + 64 * 16  # some own tokens fall into a shared block
    assert computed_tokens(False, 8 * 25 + 30) > 4 * offline


@pytest.mark.parametrize("num_blocks", [60, 150, 5000])
def test_the_plan_never_computes_more_than_first_come_first_served(num_blocks: int) -> None:
    assert computed_tokens(True, num_blocks) <= computed_tokens(False, num_blocks)
