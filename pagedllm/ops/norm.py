"""RMSNorm, alone and fused with the addition to the residual stream, and LayerNorm.

Sums stay within the row, or within a head of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedllm.ops._library import operator


@operator("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()")
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once.

    out, x: [num_rows, hidden_size], bfloat16 or float32, rows may be strided; weight: [hidden_size] float32
    (Gemma's 1 + w is folded in when it is loaded).
    """
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight)


@operator("add_rms_norm(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, float eps) -> ()")
def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x, rounded to its type; out = rms_norm(residual). Shapes and types as in rms_norm."""
    residual.copy_(residual.float() + x.float())
    rms_norm.reference(out, residual, weight, eps)


@operator("layer_norm(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, float eps) -> ()")
def layer_norm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, computed in float32 and rounded once.

    Shapes and types as in rms_norm; bias [hidden_size] float32 or None; `out` may be `x`.
    """
    centered = x.float() - x.float().mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight
    out.copy_(normed if bias is None else normed + bias)


@operator("layer_norm_heads(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()", is_torch_on_gpu=True)
def layer_norm_heads(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """`layer_norm` of each head by itself, with a weight of its own and no bias.

    out, x: [num_rows, num_heads * head_dim], types and strides as in rms_norm; weight: [num_heads, head_dim] float32;
    `out` may be `x`.
    """
    heads = x.float().unflatten(1, weight.shape)
    centered = heads - heads.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight
    out.copy_(normed.flatten(1))
