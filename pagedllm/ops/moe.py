"""Mixtures of experts: routing, the experts' products, and the sum of their results.

On a GPU torch routes and adds, by operations that a captured graph may hold: nothing is read by the host.

Each token's rows stand once for each expert it chose, ordered by expert and then by token:

    places  0        1        2        3        4        5            bounds = [0, 2, 2, 6]
            | expert 0        | (no rows of expert 1)  | expert 2 ...
    tokens  t0       t2       t0       t1       t1 ...

`bounds[e]` is the first row of expert e, `tokens[place]` whose row it is, `places[token]` where a token's rows stand,
by ascending expert. What a row becomes depends on that row alone (exactness rule a): a product with its expert's
weight, and a sum in the order of the experts.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from pagedllm.ops._library import operator
from pagedllm.ops.linear import apply_gated, packed_linear

MAX_CHOSEN_EXPERTS = 64


@operator(
    "route_tokens(Tensor(a!) weights, Tensor(b!) places, Tensor(c!) tokens, Tensor(d!) bounds, Tensor logits, "
    "bool is_normalized) -> ()",
    is_torch_on_gpu=True,
)
def route_tokens(
    weights: Tensor, places: Tensor, tokens: Tensor, bounds: Tensor, logits: Tensor, is_normalized: bool
) -> None:
    """Each token's experts are those of its largest logits, of equal ones the first.

    logits:  [T, E] float32, rows may be strided
    weights: [T, k] float32, their shares of the softmax over E; of the chosen ones alone if is_normalized
    places:  [T, k] int32; tokens: [T * k] int32; bounds: [E + 1] int32; see the module. k is at most 64.
    """
    num_experts, num_chosen = logits.shape[1], places.shape[1]
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen].sort(-1).values
    shares = logits.softmax(-1).gather(-1, chosen)
    weights.copy_(shares / shares.sum(-1, keepdim=True) if is_normalized else shares)
    experts, order = chosen.flatten().sort(stable=True)
    tokens.copy_(order // num_chosen)
    places.view(-1)[order] = torch.arange(len(order), dtype=torch.int32, device=places.device)
    bounds.copy_(torch.searchsorted(experts, torch.arange(num_experts + 1, device=experts.device)))


@operator(
    "grouped_linear(Tensor(a!) out, Tensor x, Tensor weights, Tensor? biases, Tensor bounds, int activation) -> ()"
)
def grouped_linear(
    out: Tensor, x: Tensor, weights: Tensor, biases: Tensor | None, bounds: Tensor, activation: int
) -> None:
    """`packed_linear` without residual, of each run of rows with its expert's weight.

    x: [num_rows, K]; out: [num_rows, num_columns], one type, rows may be strided
    weights: [E, *packed]; biases: [E, N padded] float32 or None; bounds: [E + 1] int32, from 0 to num_rows
    """
    limits = bounds.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(limits)):
        if begin < end:
            bias = None if biases is None else biases[expert]
            packed_linear.reference(out[begin:end], x[begin:end], weights[expert], bias, None, activation)


@operator(
    "grouped_dense(Tensor(a!) out, Tensor x, Tensor weights, Tensor? biases, Tensor bounds, int activation) -> ()"
)
def grouped_dense(
    out: Tensor, x: Tensor, weights: Tensor, biases: Tensor | None, bounds: Tensor, activation: int
) -> None:
    """`grouped_linear` with weights in plain rows, on a GPU. All of one 16-bit type; sums are float32, rounded once.

    x: [num_rows, K]; out: [num_rows, N]; rows may be strided
    weights: [E, N, K], or where there is an activation [E, 2 N, K]: gate, then up; biases: [E, N or 2 N] or None
    bounds: [E + 1] int32, from 0 to num_rows, read on the device
    """
    limits = bounds.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(limits)):
        product = x[begin:end].float() @ weights[expert].float().T
        if biases is not None:
            product += biases[expert].float()
        if activation:
            gate, up = product.chunk(2, 1)
            product = apply_gated(gate, up, activation)
        out[begin:end] = product


@operator(
    "combine_experts(Tensor(a!) out, Tensor rows, Tensor places, Tensor weights, Tensor? shared, "
    "Tensor? shared_gates, Tensor? residual) -> ()",
    is_torch_on_gpu=True,
)
def combine_experts(
    out: Tensor,
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    shared_gates: Tensor | None,
    residual: Tensor | None,
) -> None:
    """out = the weighted sum of each token's rows (+ sigmoid(shared_gates) * shared) (+ residual), rounded once.

    out, shared, residual: [T, H]; rows: [T * k, H], one type, rows may be strided; `out` may be `residual`
    places: [T, k] int32; weights: [T, k] float32; shared_gates: [T, 1] float32
    """
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for choice in range(places.shape[1]):
        total += rows[places[:, choice].long()].float() * weights[:, choice : choice + 1]
    if shared is not None and shared_gates is not None:
        total += shared_gates.sigmoid() * shared.float()
    out.copy_(total if residual is None else total + residual.float())
