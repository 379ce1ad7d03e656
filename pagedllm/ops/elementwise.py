"""Operators on each element of rows: what models do to their logits, and additions and limits without a norm.

They are few numbers a step, but a step of torch's between two kernels could not be recorded (`pagedllm.ops.tape`), and
torch's own threads wait for each other. On a GPU torch computes them.
"""

from __future__ import annotations

from torch import Tensor

from pagedllm.ops._library import operator


@operator("finish_logits(Tensor(a!) logits, float scale, float softcap) -> ()", is_torch_on_gpu=True)
def finish_logits(logits: Tensor, scale: float, softcap: float) -> None:
    """logits = softcap * tanh(scale * logits / softcap), or scale * logits where softcap is 0.

    logits: [num_rows, vocab_size] float32, in place, rows may be strided.
    """
    logits.mul_(scale)
    if softcap > 0:
        logits.div_(softcap).tanh_().mul_(softcap)


@operator("add_rows(Tensor(a!) x, Tensor y) -> ()", is_torch_on_gpu=True)
def add_rows(x: Tensor, y: Tensor) -> None:
    """x += y, rounded once. Both [num_rows, width], one type, rows may be strided."""
    x.add_(y)


@operator("clamp_rows(Tensor(a!) x, float limit) -> ()", is_torch_on_gpu=True)
def clamp_rows(x: Tensor, limit: float) -> None:
    """x within -limit .. limit, both rounded to x's type; NaN stays. [num_rows, width], rows may be strided."""
    x.clamp_(-limit, limit)
