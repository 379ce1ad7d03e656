"""One operator between the qkv product and attention: q/k norm, rotation, and K and V into their blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedllm.ops._library import operator
from pagedllm.ops.kv_layout import CpuLayout, KVLayout


def rotate(x: Tensor, cos_sin: Tensor, is_interleaved: bool) -> Tensor:
    """Rotates the first rotary_dim features of x [num_tokens, num_heads, head_dim] float32.

    cos_sin [num_tokens, rotary_dim]: cosines, then sines. Features i and i + rotary_dim/2 form a pair, or 2i and
    2i + 1 where interleaved. Su et al., RoFormer, 2021.
    """
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[:, None].float().chunk(2, -1)
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if is_interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, rest), -1)


def rope_norm_write_kv_with(
    layout: KVLayout,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    rope_table: Tensor | None,
    rope_rows: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_q_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> None:
    """The twin for any layout; arguments as in `rope_norm_write_kv`."""
    head_dim = qkv.shape[1] // (num_q_heads + 2 * num_kv_heads)
    heads_in_order = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads_in_order.tensor_split((num_q_heads, num_q_heads + num_kv_heads), dim=1)
    heads = {"q": q.float(), "k": k.float()}
    for name, weight in (("q", q_norm), ("k", k_norm)):
        if weight is not None:
            x = heads[name]
            heads[name] = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    if rope_table is not None and rope_rows is not None:
        cos_sin = rope_table[rope_rows.long()]
        heads = {name: rotate(x, cos_sin, is_interleaved) for name, x in heads.items()}
    q.copy_(heads["q"])
    is_real = slot_mapping >= 0
    layout.write_slots(k_cache, v_cache, slot_mapping[is_real], heads["k"].to(k_cache.dtype)[is_real], v[is_real])


@operator(
    "rope_norm_write_kv(Tensor(a!) qkv, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, "
    "Tensor? rope_table, Tensor? rope_rows, Tensor? q_norm, Tensor? k_norm, float eps, "
    "int num_q_heads, int num_kv_heads, bool is_interleaved) -> ()"
)
def rope_norm_write_kv(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    rope_table: Tensor | None,
    rope_rows: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_q_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> None:
    """q = rotate(norm(q)) in place; k_cache, v_cache [slot] = rotate(norm(k)), v. Computed in float32, rounded once.

    qkv:          [num_tokens, (num_q_heads + 2 num_kv_heads) * head_dim], the product's rows: q, k, v heads in turn;
                  only the q part is written
    slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 writes nothing (a padded token)
    rope_table:   [num_rows, rotary_dim] float32, cosines then sines, or None for a layer without rotation
    rope_rows:    [num_tokens] int32, row of the table: position + offset of the request's rope variant
    q_norm, k_norm: [head_dim] float32 or None: RMSNorm of each head before rotation (Qwen 3, Gemma 3)
    """
    rope_norm_write_kv_with(
        CpuLayout(), qkv, k_cache, v_cache, slot_mapping, rope_table, rope_rows, q_norm, k_norm, eps,
        num_q_heads, num_kv_heads, is_interleaved,
    )  # fmt: skip


@operator("copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor pairs) -> ()")
def copy_blocks(k_cache: Tensor, v_cache: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks of one layer: pairs [num_pairs, 2] int32 of (from, to); no block is both."""
    source, target = pairs.long().unbind(1)
    k_cache[target] = k_cache[source]
    v_cache[target] = v_cache[source]
