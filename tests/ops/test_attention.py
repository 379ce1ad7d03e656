"""paged_attention on the CPU: right within PyTorch's own error, and the same bits in every surrounding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedllm.ops.attention import AttentionShape, CpuAttentionBackend, paged_attention
from pagedllm.ops.library import load_kernels
from tests.ops.attention_cases import Case, attend, exact, make_case, operands, share_prefixes

NAMESPACE = load_kernels().namespace
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)


def torchs_own_error(case: Case, window: int = 0) -> float:
    """Largest error of torch's SDPA against float64 on this case."""
    group = case.shape.num_q_heads // case.shape.num_kv_heads
    expected, worst, token = exact(case, window=window), 0.0, 0
    for k, v, num_new in zip(case.keys, case.values, case.q_lens, strict=True):
        positions = torch.arange(len(k) - num_new, len(k))[:, None]
        visible = torch.arange(len(k)) <= positions
        if window:
            visible &= torch.arange(len(k)) > positions - window
        q = case.q[token : token + num_new].transpose(0, 1)
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)[0]
        worst = max(worst, float((out.transpose(0, 1).double() - expected[token : token + num_new]).abs().max()))
        token += num_new
    return worst


def error_of(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 100])
def test_error_is_at_most_twice_torchs_own(dtype: torch.dtype, window: int) -> None:
    for head_dim in (32, 64, 128, 256):
        case = make_case([1, 130, 7], [700, 150, 520], head_dim=head_dim, dtype=dtype, seed=head_dim)
        ours = error_of(attend(case, NAMESPACE, window=window), exact(case, window=window))
        assert ours <= 2 * torchs_own_error(case, window)


def random_case(seed: int) -> tuple[Case, dict[str, object]]:
    rng = np.random.default_rng(seed)
    num_kv_heads = int(rng.integers(1, 4))
    num_q_heads = num_kv_heads * int(rng.choice([1, 2, 3, 4, 7, 8, 16]))
    q_lens = [int(n) for n in rng.choice([0, 1, 1, 1, 2, 5, 17, 60, 130], rng.integers(1, 6))]
    q_lens[0] = max(q_lens[0], 1)
    seq_lens = [n + int(rng.choice([0, 1, 3, 64, 100, 500, 700, 1100])) for n in q_lens]
    case = make_case(
        q_lens, [max(n, 1) for n in seq_lens], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads,
        head_dim=int(rng.choice(CpuAttentionBackend.supported_head_dims)), block_size=int(rng.choice(BLOCK_SIZES)),
        dtype=DTYPES[rng.integers(2)], seed=seed,
    )  # fmt: skip
    options: dict[str, object] = {
        "sinks": torch.from_numpy(rng.normal(size=num_q_heads).astype(np.float32)) if rng.random() < 0.3 else None,
        "softcap": float(rng.choice([0, 0, 5.0])),
        "window": int(rng.choice([0, 0, 1, 7, 64, 100, 600])),
    }
    return case, options


def check_random_case(seed: int) -> None:
    case, options = random_case(seed)
    expected = exact(case, **options)
    tolerance = 2**-7 * float(expected.abs().max()) if case.q.dtype == torch.bfloat16 else 4e-6
    assert error_of(attend(case, NAMESPACE, seed=seed, **options), expected) <= tolerance, (seed, options)


def test_random_batches_equal_float64() -> None:
    for seed in range(40):
        check_random_case(seed)


@pytest.mark.slow
def test_many_random_batches_equal_float64() -> None:
    for seed in range(1000, 1400):
        check_random_case(seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_and_every_number_of_heads_is_right(dtype: torch.dtype) -> None:
    for head_dim in CpuAttentionBackend.supported_head_dims:
        for group in (1, 5):
            case = make_case([1, 3], [70, 21], num_q_heads=2 * group, head_dim=head_dim, dtype=dtype)
            expected = attend(case, "pagedllm_reference")
            torch.testing.assert_close(attend(case, NAMESPACE), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_and_sinks_equal_the_twins(dtype: torch.dtype) -> None:
    case = make_case([40, 1], [600, 33], dtype=dtype)
    sinks = torch.tensor([0.0, 3.0, -torch.inf, 50.0, -50.0, 1.0])
    for options in ({"softcap": 2.0}, {"sinks": sinks}, {"softcap": 30.0, "sinks": sinks, "window": 20}):
        ours, twin = attend(case, NAMESPACE, **options), attend(case, "pagedllm_reference", **options)
        torch.testing.assert_close(ours, twin, rtol=2e-2 if dtype == torch.bfloat16 else 2e-5, atol=1e-2)


def test_the_twin_equals_float64() -> None:
    for seed in range(3):
        case, options = random_case(seed)
        case = replace(
            case, q=case.q.float(), keys=[k.float() for k in case.keys], values=[v.float() for v in case.values]
        )
        assert error_of(attend(case, "pagedllm_reference", **options), exact(case, **options)) <= 4e-6


# ---- the same bits in every surrounding (exactness rule b)

# new tokens and length: decodes in the first tile and split, at their edges and past them; chunks and whole prompts
SEQUENCES = [
    (1, 1),
    (1, 63),
    (1, 64),
    (1, 65),
    (1, 511),
    (1, 512),
    (1, 513),
    (1, 1300),
    (45, 45),
    (50, 530),
    (200, 1150),
]
OPTIONS = [{}, {"window": 90}, {"window": 7, "softcap": 20.0}, {"sinks": torch.linspace(-1, 4, 6)}]


def subset(case: Case, chosen: list[int]) -> Case:
    begins = np.cumsum([0, *case.q_lens])
    q = torch.cat([case.q[begins[i] : begins[i + 1]] for i in chosen])
    return replace(
        case, q=q, keys=[case.keys[i] for i in chosen], values=[case.values[i] for i in chosen],
        q_lens=[case.q_lens[i] for i in chosen],
    )  # fmt: skip


def split_by_sequence(case: Case, out: Tensor) -> list[Tensor]:
    return list(out.split(case.q_lens))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.fixture(params=DTYPES, ids=["bfloat16", "float32"])
def sequences(request: pytest.FixtureRequest) -> Case:
    q_lens, seq_lens = zip(*SEQUENCES, strict=True)
    return make_case(q_lens, seq_lens, dtype=request.param)


@pytest.mark.parametrize("options", OPTIONS)
def test_alone_reversed_and_in_a_batch_the_bits_are_equal(sequences: Case, options: dict[str, object]) -> None:
    batch = split_by_sequence(sequences, attend(sequences, NAMESPACE, **options))
    backwards = list(range(len(SEQUENCES)))[::-1]
    reversed_case = subset(sequences, backwards)
    reversed_outs = split_by_sequence(reversed_case, attend(reversed_case, NAMESPACE, seed=5, **options))
    for i, expected in enumerate(batch):
        assert torch.equal(bits(attend(subset(sequences, [i]), NAMESPACE, **options)), bits(expected))
        assert torch.equal(bits(reversed_outs[backwards.index(i)]), bits(expected))


@pytest.mark.parametrize("options", OPTIONS)
def test_every_block_size_gives_the_same_bits(sequences: Case, options: dict[str, object]) -> None:
    outs = [attend(replace(sequences, block_size=size), NAMESPACE, **options) for size in BLOCK_SIZES]
    for a, b in pairwise(outs):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("options", OPTIONS)
def test_every_chunking_gives_the_same_bits(sequences: Case, options: dict[str, object]) -> None:
    whole_prompts = subset(sequences, [8, 9, 10])
    expected = split_by_sequence(whole_prompts, attend(whole_prompts, NAMESPACE, **options))
    for i, chunk in ((0, 1), (1, 1), (1, 7), (2, 1), (2, 31), (2, 64), (2, 199)):
        one = subset(whole_prompts, [i])
        num_old = len(one.keys[0]) - one.q_lens[0]
        for begin in range(0, one.q_lens[0], chunk):
            end = min(begin + chunk, one.q_lens[0])
            part = replace(
                one, q=one.q[begin:end], q_lens=[end - begin],
                keys=[one.keys[0][: num_old + end]], values=[one.values[0][: num_old + end]],
            )  # fmt: skip
            assert torch.equal(bits(attend(part, NAMESPACE, **options)), bits(expected[i][begin:end]))


def test_any_number_of_threads_gives_the_same_bits(sequences: Case) -> None:
    expected = attend(sequences, NAMESPACE)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for _ in range(3):
                assert torch.equal(bits(attend(sequences, NAMESPACE)), bits(expected))
    finally:
        torch.set_num_threads(num_threads)


def test_the_work_list_does_not_change_the_bits(sequences: Case) -> None:
    """Row tiles of any size; keys of short runs split, or all of them in one item."""
    expected = attend(sequences, NAMESPACE)
    for rows_per_item, tiles_not_split in ((1, 10**9), (5, 1), (32, 1), (64, 10**9)):
        backend = CpuAttentionBackend("pagedllm")
        backend.rows_per_item, backend.tiles_not_split = rows_per_item, tiles_not_split
        assert torch.equal(bits(attend(replace(sequences, backend=backend), NAMESPACE)), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_of_which_a_row_sees_nothing_change_no_bits(dtype: torch.dtype) -> None:
    """With a window, a late row has one split with keys and others without; its bits are those of a cache that begins
    with that split's first key, 512 positions or any multiple later."""
    case = make_case([1], [1700], dtype=dtype)
    expected = attend(case, NAMESPACE, window=150)
    late = replace(case, keys=[case.keys[0][1536:]], values=[case.values[0][1536:]])
    assert torch.equal(bits(attend(late, NAMESPACE, window=150)), bits(expected))


def test_an_item_that_lies_outside_the_windows_of_its_rows_is_not_nan() -> None:
    case = make_case([1, 40], [2000, 1600])
    for window in (1, 2, 63, 64, 65, 511, 512, 513):
        assert error_of(attend(case, NAMESPACE, window=window), exact(case, window=window)) < 2e-2


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = make_case([1, 30], [1200, 90], dtype=torch.float32)
    case.q.mul_(100)
    assert error_of(attend(case, NAMESPACE), exact(case)) < 2e-4


@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_nan_of_a_token_reaches_the_rows_that_see_it_and_no_others(what: str, group: int) -> None:
    case = make_case([100, 1], [100, 200], num_q_heads=2 * group)
    getattr(case, what)[0][70] = torch.nan
    for window in (0, 5):
        is_nan = attend(case, NAMESPACE, window=window).isnan()
        last = 70 + window if window else 100
        expected = [token for token in range(101) if 70 <= token < last]
        assert is_nan.all(-1).all(-1).nonzero().flatten().tolist() == expected
        assert int(is_nan.sum()) == len(expected) * is_nan[0].numel()


@pytest.mark.parametrize("namespace", [NAMESPACE, "pagedllm_reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_a_window_has_left_behind_may_hold_anything(namespace: str, dtype: torch.dtype) -> None:
    for block_size, window in ((8, 24), (16, 24), (64, 100), (128, 513), (8, 1)):
        case = make_case([1, 30, 1], [700, 131, 90], block_size=block_size, dtype=dtype)
        expected = attend(case, namespace, window=window)
        for num_new, keys, values in zip(case.q_lens, case.keys, case.values, strict=True):
            num_left = max(0, len(keys) - num_new + 1 - window) // block_size * block_size
            keys[:num_left] = values[:num_left] = torch.nan
        assert torch.equal(bits(attend(case, namespace, window=window)), bits(expected))


# ---- keys that sequences have in common


def shared_case(seed: int) -> tuple[Case, dict[str, object]]:
    """Mostly decodes, most of which begin as another one does."""
    rng = np.random.default_rng(seed)
    num_kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 7, 16]))
    q_lens = [int(n) for n in rng.choice([1, 1, 1, 1, 1, 1, 1, 0, 3, 60], rng.integers(2, 28))]
    seq_lens = [n + int(rng.choice([1, 63, 64, 65, 130, 500, 512, 513, 700, 1100])) for n in q_lens]
    case = make_case(
        q_lens, seq_lens, num_q_heads=num_kv_heads * group, num_kv_heads=num_kv_heads,
        head_dim=int(rng.choice([32, 64, 80, 128])), block_size=int(rng.choice(BLOCK_SIZES)),
        dtype=DTYPES[rng.integers(2)], seed=seed,
    )  # fmt: skip
    share_prefixes(case, rng)
    options: dict[str, object] = {
        "sinks": torch.from_numpy(rng.normal(size=num_kv_heads * group).astype(np.float32)) if seed % 3 == 0 else None,
        "softcap": float(rng.choice([0, 0, 5.0])),
        "window": int(rng.choice([0, 0, 1, 100, 600])),
    }
    return case, options


def most_together(case: Case) -> int:
    return int(operands(case, together=True)[7][1:, 6].max())


def check_shared_case(seed: int) -> None:
    case, options = shared_case(seed)
    together = attend(case, NAMESPACE, seed=seed, together=True, **options)
    assert torch.equal(bits(together), bits(attend(case, NAMESPACE, seed=seed, **options))), (seed, options)


def test_keys_in_common_give_the_bits_of_keys_apart() -> None:
    for seed in range(40):
        check_shared_case(seed)
    assert sum(most_together(shared_case(seed)[0]) > 1 for seed in range(40)) > 20


@pytest.mark.slow
def test_keys_in_common_give_the_bits_of_keys_apart_in_many_cases() -> None:
    for seed in range(1000, 1500):
        check_shared_case(seed)


def test_keys_in_common_give_the_same_bits_with_any_number_of_threads() -> None:
    case = make_case([1] * 40, [530 + 3 * i for i in range(40)])
    for seq in range(1, 40):
        case.shared[seq] = 0, 31
        for rows in (case.keys, case.values):
            rows[seq][:496] = rows[0][:496]
    assert most_together(case) == 40
    expected = attend(case, NAMESPACE)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(bits(attend(case, NAMESPACE, together=True)), bits(expected))
    finally:
        torch.set_num_threads(num_threads)


# ---- the plan


def test_the_plan_covers_every_row_and_key_once() -> None:
    backend = CpuAttentionBackend("pagedllm")
    q_lens, seq_lens = np.array([1, 0, 40, 400], np.int32), np.array([1100, 9, 600, 1500], np.int32)
    plan = backend.plan(q_lens, seq_lens, AttentionShape(6, 2, 64))
    assert plan.work[0].tolist() == [len(plan.work) - 1, 0, 0, 0, 0, 0, 0, 0]
    items = plan.work[1:].tolist()
    # one decode over three splits; 40 tokens are 120 rows in three tiles of two splits each
    assert items[:3] == [
        [0, 0, 3, 0, 512, 0, 1, 0], [0, 0, 3, 512, 1024, 0, 1, 512], [0, 0, 3, 1024, 1100, 0, 1, 1024],
    ]  # fmt: skip
    assert items[3:5] == [[2, 0, 48, 0, 512, 1, 1, 0], [2, 0, 48, 512, 576, 1, 1, 512]]
    assert items[7:9] == [[2, 96, 24, 0, 512, 3, 1, 0], [2, 96, 24, 512, 600, 3, 1, 512]]
    # 400 tokens are 25 tiles of 16, each with all its keys
    assert items[9:] == [[3, 48 * i, 48, 0, 1100 + 16 * (i + 1), -1, 1, 0] for i in range(25)]
    assert plan.merge.tolist() == [[4, 0, 0, 0], [0, 0, 0, 3], [2, 0, 9, 2], [2, 48, 105, 2], [2, 96, 201, 2]]
    assert plan.workspace_size == 249 * 2 * 66


# ---- refusals, registration


def test_wrong_arguments_are_refused_by_name() -> None:
    tensors = operands(make_case([1, 20], [600, 40]))
    rest = (None, 0.125, 0.0, 0)
    names = ("out", "q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seq_lens", "work", "merge", "workspace")

    def refused(name: str, value: Tensor, message: str) -> None:
        arguments = [value if n == name else t for n, t in zip(names, tensors, strict=True)]
        with pytest.raises(RuntimeError, match=f"paged_attention: {message}"):
            paged_attention(NAMESPACE, *arguments, *rest)

    q, k_cache, work, seq_lens = tensors[1], tensors[2], tensors[7], tensors[6]
    refused("q", q.float(), "k_cache must be float32, got bfloat16")
    refused("q", q.half(), "q must be bfloat16 or float32, got float16")
    refused("out", tensors[0].float(), "out must be bfloat16, got float32")
    refused("k_cache", k_cache[..., :1], "k_cache must be contiguous")
    refused("v_cache", tensors[3].transpose(2, 3).contiguous(), "v_cache must have shape")
    refused("seq_lens", seq_lens.long(), "seq_lens must be int32, got int64")
    refused("block_table", tensors[4][:1], "block_table must have 2 rows")
    refused("work", work[:0], r"work must have shape \[1 \+ n, 8\]")
    refused("work", work[:-1], "work must count its rows in its first element")
    refused("seq_lens", seq_lens - 1, "work item 1 does not fit")
    refused("workspace", tensors[9][:-1], "work item 0 does not fit")
    refused("merge", torch.zeros(1, 4, dtype=torch.int32), "work item 0 does not fit")
    with pytest.raises(RuntimeError, match="paged_attention: window must be >= 0, got -1"):
        paged_attention(NAMESPACE, *tensors, None, 0.125, 0.0, -1)


def test_the_cache_spec_refuses_by_name_what_the_kernels_cannot_do() -> None:
    backend = CpuAttentionBackend("pagedllm")
    with pytest.raises(ValueError, match=r"block_size must be one of \(8, 16, 32, 64, 128\), got 24"):
        backend.kv_cache_spec(1, 24, 1, 64, torch.bfloat16)
    with pytest.raises(ValueError, match=r"head_dim must be one of .*, got 40"):
        backend.kv_cache_spec(1, 16, 1, 40, torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got torch.float16"):
        backend.kv_cache_spec(1, 16, 1, 64, torch.float16)


def test_opcheck() -> None:
    tensors = operands(make_case([2], [20]))
    op = getattr(torch.ops, NAMESPACE).paged_attention.default
    torch.library.opcheck(op, (*tensors, None, 0.125, 0.0, 0), test_utils=("test_schema", "test_faketensor"))
