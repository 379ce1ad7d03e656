"""Packed matrix products and the lookups that share their weights.

A packed weight is a row of panels of 64 output columns. Within a panel K runs slowest, so that one pass over a panel
reads memory in order, and (bfloat16) pairs along K lie together, as `vdpbf16ps` wants them:

    float32   [N/64][K][64]            panel p:   k=0: w[64p+0,0] w[64p+1,0] ... w[64p+63,0]
                                                  k=1: ...
    bfloat16  [N/64][ceil(K/2)][64][2] panel p:   k=0,1: w[64p+0,0] w[64p+0,1]  w[64p+1,0] w[64p+1,1] ...

N is padded to 64 and K to 2 with zeros. A gated pair (gate, up) is one weight whose panels hold 32 columns of the
gate and then the same 32 of up, so that act(gate) * up is an epilogue within the panel.
A row of the product depends on that row alone: not on the number of rows, nor on its place (exactness rule a).
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from pagedllm.ops._library import operator
from pagedllm.ops.elementwise import finish_logits
from pagedllm.ops.sampling import likeliest

PANEL = 64  # columns of a panel
GATED_HALF = PANEL // 2


class Activation(enum.IntEnum):
    """Of an MLP. As the epilogue of a gated product: out = act(gate) * up."""

    NONE = 0  # not gated
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    CLAMPED_SWISH = 4  # gpt-oss; of a gated product only: `apply_gated` says what it is


def apply_activation(x: Tensor, activation: int) -> Tensor:
    if activation == Activation.SILU:
        return torch.nn.functional.silu(x)
    if activation == Activation.GELU_TANH:
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == Activation.GELU:
        return torch.nn.functional.gelu(x)
    raise ValueError(f"activation must be one of {[a.name for a in Activation]}, got {activation}")


def apply_gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    if activation == Activation.CLAMPED_SWISH:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return apply_activation(gate, activation) * up


def packed_shape(num_columns: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of the packed weight of [num_columns, k]; num_columns counts gate and up columns with their padding."""
    num_panels = -(-num_columns // PANEL)
    if dtype == torch.float32:
        return (num_panels, k, PANEL)
    return (num_panels, -(-k // 2), PANEL, 2)


def unpack(weight: Tensor) -> Tensor:
    """The packed weight as [N padded, K padded], a copy. For twins and tests."""
    if weight.dtype == torch.float32:  # [panels, K, 64]
        return weight.transpose(1, 2).reshape(-1, weight.shape[1])
    return weight.permute(0, 2, 1, 3).reshape(-1, weight.shape[1] * 2)  # [panels, K/2, 64, 2]


@operator(
    "packed_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation) -> ()"
)
def packed_linear(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int
) -> None:
    """out = epilogue(x @ weight.T): + bias, then act(gate) * up if gated, then + residual; rounded once to out's type.

    x:        [M, K], the weight's type, unit column stride, rows may be strided
    weight:   packed, see the module
    bias:     [N padded] float32 in packed column order, or None
    residual: [M, num_columns] of x's type, may be `out` itself, or None
    out:      [M, num_columns] of x's type or float32; num_columns is N (N / 2 if gated) without the padding
    activation: an Activation
    Sums are float32 and run over K in order, in chunks that depend on K alone.
    """
    k = x.shape[1]
    product = x.float() @ unpack(weight)[:, :k].float().T  # [M, N padded]
    if bias is not None:
        product += bias
    if activation != Activation.NONE:
        panels = product.reshape(product.shape[0], -1, 2, GATED_HALF)
        product = apply_gated(panels[:, :, 0], panels[:, :, 1], activation).reshape(product.shape[0], -1)
    product = product[:, : out.shape[1]]
    if residual is not None:
        product = product + residual.float()
    out.copy_(product)


@operator(
    "packed_argmax(Tensor(a!) token_ids, Tensor x, Tensor weight, int num_columns, float scale, float softcap) -> ()"
)
def packed_argmax(token_ids: Tensor, x: Tensor, weight: Tensor, num_columns: int, scale: float, softcap: float) -> None:
    """The column of each row's largest logit, the lowest of equal ones, without a tensor of the logits.

    token_ids: [M] int32, written; -1 where the row holds NaN or +inf, or nothing above -inf: as `sample` at
               temperature 0 of what packed_linear (in float32) and finish_logits give
    x, weight: as of packed_linear; num_columns: N without the padding
    """
    logits = x.new_empty((x.shape[0], num_columns), dtype=torch.float32)
    packed_linear.reference(logits, x, weight, None, None, Activation.NONE)
    finish_logits.reference(logits, scale, softcap)
    token_ids.copy_(likeliest(logits))


@operator("embedding(Tensor(a!) out, Tensor token_ids, Tensor weight, float scale) -> ()")
def embedding(out: Tensor, token_ids: Tensor, weight: Tensor, scale: float) -> None:
    """out[i] = weight row token_ids[i] * scale, read out of a packed weight (tied heads are stored once).

    out: [num_tokens, hidden_size] of the weight's type; token_ids: [num_tokens] int32; weight: packed [vocab, hidden].
    """
    ids = token_ids.long()
    panels, columns = ids // PANEL, ids % PANEL
    if weight.dtype == torch.float32:
        rows = weight[panels, :, columns]
    else:
        rows = weight[panels, :, columns].reshape(len(ids), -1)[:, : out.shape[1]]
    out.copy_(rows.float() * scale)


@operator("gather_rows(Tensor(a!) out, Tensor x, Tensor indices) -> ()")
def gather_rows(out: Tensor, x: Tensor, indices: Tensor) -> None:
    """out[i] = x[indices[i]]. out: [num_rows, width], x: [num_tokens, width], same type; indices: [num_rows] int32."""
    out.copy_(x[indices.long()])


@operator("gated_activation(Tensor(a!) out, Tensor gate, Tensor up, int activation) -> ()")
def gated_activation(out: Tensor, gate: Tensor, up: Tensor, activation: int) -> None:
    """out = act(gate) * up in float32, rounded once. All [num_tokens, width], one type, rows may be strided.

    For products that are not packed by us (a library's GEMM on CUDA); the packed product has it as an epilogue.
    """
    out.copy_(apply_gated(gate.float(), up.float(), activation))


@operator("ungated_activation(Tensor(a!) out, Tensor x, int activation) -> ()")
def ungated_activation(out: Tensor, x: Tensor, activation: int) -> None:
    """out = act(x) in float32, rounded once: of MLPs without a gate. Both [num_rows, width]; `out` may be `x`."""
    out.copy_(apply_activation(x.float(), activation))
