"""From logits to a token: edits of the logits, the draw, and logprobs.

The draw works on fixed point, so that sums do not depend on their order and every device draws the same token:

    w_i = round(2^32 * exp2((z_i - max z) * (log2(e) / temperature)))   as uint64, by `exp2_weight` below
    S   = sum of the w_i that min_p, top_k and top_p keep             < 2^50 for a million tokens
    the token is the first id whose inclusive sum exceeds floor(r * S / 2^64), r 64 random bits

r is counter-based (Philox 4x32-10, Salmon et al., 2011): key = the request's seed, counter = (output position,
sample index). It depends on nothing else, so batches, preemption and resuming cannot change it.
Where an order among tokens is needed it is (logit descending, id ascending).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedllm.ops._library import operator

LOG2E = 1.4426950408889634
# 2^f = 1 + f * P(f) on [0, 1), relative error 9e-8. Plain float32 multiplications and additions, never fused.
EXP2_COEFFICIENTS = (
    0.6931471824645996,
    0.24022722244262695,
    0.055495936423540115,
    0.009652440436184406,
    0.0012689352734014392,
    0.00020829190907534212,
)


def philox_4x32(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox 4x32: 64-bit key, 128-bit counter, 128 random bits."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(seed: int, sample_index: int, output_position: int) -> int:
    """The 64 random bits of a draw."""
    c0, c1, _, _ = philox_4x32(seed, (output_position, sample_index, 0, 0))
    return c1 << 32 | c0


def exp2_weight(logits: Tensor, temperature: float) -> Tensor:
    """w of the module's docstring: [V] float32 -> [V] int64 in 0 .. 2^32; the largest logit gets exactly 2^32."""
    largest = float(np.finfo(np.float32).max)
    scale = np.float32(min(float(LOG2E / np.float64(np.float32(temperature))), largest))  # rounded once
    x = (logits - logits.max()) * torch.tensor(scale)
    x = torch.where(x >= -33, x, -34.0)
    exponent = x.floor()
    f = x - exponent
    p = torch.full_like(f, EXP2_COEFFICIENTS[-1])
    for c in EXP2_COEFFICIENTS[-2::-1]:
        p = p * f + c
    mantissa = ((p * f + 1.0) * 2.0**23).long()  # exact: p is in [1, 2] and has 23 fraction bits
    shift = -exponent.long()
    weight = ((mantissa << 9) + torch.where(shift > 0, 1 << (shift - 1).clamp_min(0), 0)) >> shift
    return torch.where(x >= -33, weight, 0)


def kept_weight(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The w of a row, [V] float32 -> [V] int64; 0 for what min_p, top_k and top_p drop, as `sample` tells."""
    weight = exp2_weight(logits, temperature)
    weight[weight.double() < min_p * 2.0**32] = 0
    order = torch.sort(logits, descending=True, stable=True).indices
    if top_k > 0:
        weight[order[top_k:]] = 0
    if top_p < 1:
        target = max(1, int(np.ceil(np.float64(top_p) * float(weight.sum()))))
        before = weight[order].cumsum(0) - weight[order]
        weight[order[before >= target]] = 0
    return weight


def likeliest(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest of equal ones; -1 where there is NaN or +inf, or only -inf.

    logits: [num_rows, vocab_size] float32; returns [num_rows] int32
    """
    largest = logits.amax(1, keepdim=True)  # NaN if there is one
    ids = (logits == largest).int().argmax(1)
    return torch.where(largest[:, 0].isfinite(), ids, -1).int()


@operator(
    "process_logits(Tensor(a!) logits, Tensor? bitmask, Tensor? bias_offsets, Tensor? bias_ids, Tensor? bias_values, "
    "Tensor? penalties, Tensor? penalty_offsets, Tensor? penalty_ids, Tensor? penalty_counts) -> ()"
)
def process_logits(
    logits: Tensor,
    bitmask: Tensor | None,
    bias_offsets: Tensor | None,
    bias_ids: Tensor | None,
    bias_values: Tensor | None,
    penalties: Tensor | None,
    penalty_offsets: Tensor | None,
    penalty_ids: Tensor | None,
    penalty_counts: Tensor | None,
) -> None:
    """Edits each row in place: mask, bias, penalties, in this order; what is None is left out.

    logits:  [num_rows, vocab_size] float32
    bitmask: [num_rows, ceil(vocab_size / 32)] int32, bit i of word j allows token 32 j + i; others become -inf
    bias:    row r adds bias_values [n] float32 to bias_ids [n] int32, for n in bias_offsets[r] .. bias_offsets[r + 1]
    penalties: [num_rows, 3] float32: repetition, presence, frequency
    penalty_ids, penalty_counts [n] int32 under penalty_offsets [num_rows + 1] int32: the distinct tokens of prompt and
             output, and how often each stands in the output (0: in the prompt only). repetition divides positive and
             multiplies negative logits once; presence is subtracted if the count > 0, frequency count times.
    """
    num_rows, vocab_size = logits.shape
    if bitmask is not None:
        bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
        logits.masked_fill_(bits.flatten(1)[:, :vocab_size] == 0, -torch.inf)
    for row in range(num_rows):
        if bias_offsets is not None and bias_ids is not None and bias_values is not None:
            begin, end = bias_offsets[row : row + 2].tolist()
            logits[row].index_add_(0, bias_ids[begin:end].long(), bias_values[begin:end])
        if penalties is not None and penalty_offsets is not None:
            assert penalty_ids is not None
            assert penalty_counts is not None
            begin, end = penalty_offsets[row : row + 2].tolist()
            ids, counts = penalty_ids[begin:end].long(), penalty_counts[begin:end]
            repetition, presence, frequency = penalties[row]
            z = logits[row, ids]
            z = torch.where(z > 0, z / repetition, z * repetition)
            logits[row, ids] = z - frequency * counts - presence * (counts > 0)


@operator(
    "sample(Tensor(a!) token_ids, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seed, Tensor counter) -> ()"
)
def sample(
    token_ids: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    counter: Tensor,
) -> None:
    """Draws one token a row; rows are independent.

    token_ids:   [num_rows] int32, written; -1 where the row holds NaN or +inf, or nothing above -inf
    logits:      [num_rows, vocab_size] float32, processed, unchanged
    temperature: [num_rows] float32; 0 = the largest logit, lowest id on ties
    top_k:       [num_rows] int32, 0 = off: keeps the first k in order
    top_p, min_p: [num_rows] float32: top_p keeps the shortest run in order whose weight reaches
                 ceil(top_p * S'), S' the weight that min_p and top_k left (1 = off); min_p keeps w >= min_p * 2^32
    seed:        [num_rows] int64, any 64 bits;  counter: [num_rows, 2] int32: sample index, output position
    Order of application: min_p, top_k, top_p.
    """
    token_ids.copy_(likeliest(logits))
    for row in range(logits.shape[0]):
        z, t = logits[row], float(temperature[row])
        if t == 0 or token_ids[row] < 0:
            continue
        inclusive = kept_weight(z, t, int(top_k[row]), float(top_p[row]), float(min_p[row])).cumsum(0)
        sample_index, position = counter[row].tolist()
        bits = random_bits(int(seed[row]) & (2**64 - 1), sample_index, position)
        threshold = bits * int(inclusive[-1]) >> 64
        token_ids[row] = int((inclusive > threshold).nonzero()[0])


@operator(
    "top_logprobs(Tensor(a!) top_ids, Tensor(b!) top_values, Tensor(c!) token_values, Tensor(d!) token_ranks, "
    "Tensor logits, Tensor token_ids) -> ()"
)
def top_logprobs(
    top_ids: Tensor, top_values: Tensor, token_values: Tensor, token_ranks: Tensor, logits: Tensor, token_ids: Tensor
) -> None:
    """Log-softmax of each row at its k largest logits and at a given token.

    top_ids [num_rows, k] int32, top_values [num_rows, k] float32: in order (logit descending, id ascending); k >= 0
    token_values [num_rows] float32, token_ranks [num_rows] int32: of token_ids [num_rows] int32; rank is 1 + the number
    of strictly greater logits; a token id of -1 gives NaN and 0
    logits [num_rows, vocab_size] float32, unchanged
    """
    k = top_ids.shape[1]
    logprobs = logits.log_softmax(-1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    top_ids.copy_(order)
    top_values.copy_(logprobs.gather(1, order))
    is_token = token_ids >= 0
    chosen = token_ids.long().clamp_min(0)[:, None]
    token_values.copy_(torch.where(is_token, logprobs.gather(1, chosen)[:, 0], torch.nan))
    token_ranks.copy_(torch.where(is_token, 1 + (logits > logits.gather(1, chosen)).sum(-1), 0))
