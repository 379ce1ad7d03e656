"""What stands in the place of a transformers model's attention: the paged cache, or a probe that notes what is asked.

transformers' models look their attention function up by name and hand it the module that asks. Not all of them hand on
keyword arguments, so each module of a model holds that model's `Hook`, which knows the step under way. The function
can do what our kernels can; anything else that a model asks for is refused by name.

Letters: T tokens of the step, Q query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedllm.errors import NotSupportedError
from pagedllm.model.config import ModelConfig
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionShape

IMPLEMENTATION = "pagedllm"  # its name among transformers' attention functions
HOOK = "_pagedllm_hook"  # attribute of every module of a model
# They ask for nothing: outputs that nobody takes, and what the paged cache knows better.
IGNORED = frozenset((
    "cache", "cache_position", "dropout", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asks of attention."""

    shape: AttentionShape
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False


class Attending(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, call: LayerCall, sinks: Tensor | None) -> Tensor:
        """q [T, Q, D], k and v [T, K, D] of one layer -> [T, Q, D]."""
        ...


class Hook:
    """Of one model: who attends in the step under way."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.step: Attending
        for module in model.modules():
            object.__setattr__(module, HOOK, self)

    @contextmanager
    def attending(self, step: Attending) -> Iterator[None]:
        self.step = step
        try:
            yield
        finally:
            del self.step


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, Q, T, D], key and value [1, K, T, D] -> [1, T, Q, D]."""
    if attention_mask is not None:
        raise NotSupportedError("makes an attention mask of its own")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotSupportedError("has attention that is not causal")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise NotSupportedError(f"has keys of size {key.shape[-1]} and values of size {value.shape[-1]}")
    _refuse_unknown(others)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    call = LayerCall(
        AttentionShape(q.shape[1], k.shape[1], q.shape[2]),
        q.shape[2] ** -0.5 if scaling is None else float(scaling),
        sliding_window or 0,
        softcap or 0.0,
        s_aux is not None,
    )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise NotSupportedError("does not number its layers")
    hook: Hook = vars(module)[HOOK]
    return hook.step.attend(layer, q, k, v, call, s_aux)[None], None


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name, option in options.items():
        if name not in IGNORED and option is not None and option is not False:
            raise NotSupportedError(f"passes {name!r} to its attention, which the kernels do not know")


class AttentionProbe:
    """Notes what each layer asks for; attends to nothing."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, call: LayerCall, sinks: Tensor | None) -> Tensor:
        if layer in self.calls:
            raise NotSupportedError(f"attends more than once in layer {layer}")
        self.calls[layer] = call
        return torch.zeros_like(q)


class PagedStep:
    """One step over the paged cache: K and V of the new tokens are written, then attention reads through the blocks."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        metadata: AttentionMetadata,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        qkv: Tensor,
        out: Tensor,
    ) -> None:
        """qkv [T, (Q + 2 K) * D] and out [T, Q, D] are overwritten by every layer."""
        self.config = config
        self.backend = backend
        self.metadata = metadata
        self.kv_caches = kv_caches
        self.qkv = qkv
        self.out = out

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, call: LayerCall, sinks: Tensor | None) -> Tensor:
        kind = self.config.layers[layer].attention
        assert (call.window, call.softcap, call.has_sinks) == (kind.window, kind.softcap, kind.has_sinks)
        num_q_heads, num_kv_heads, head_dim = call.shape.num_q_heads, call.shape.num_kv_heads, call.shape.head_dim
        heads = self.qkv.unflatten(1, (num_q_heads + 2 * num_kv_heads, head_dim))
        for part, states in zip(heads.split((num_q_heads, num_kv_heads, num_kv_heads), 1), (q, k, v), strict=True):
            part.copy_(states)
        slots = self.metadata.slot_mappings[kind.kv_group]
        kv_cache = self.kv_caches[layer]
        self.backend.write_kv(self.qkv, kv_cache, slots, None, None, None, None, 0.0, call.shape, False)
        self.backend.attend(
            self.out,
            heads[:, :num_q_heads],
            kv_cache,
            self.metadata,
            kind.kv_group,
            None if sinks is None else sinks.float(),
            call.scale,
            call.softcap,
            call.window,
        )
        return self.out
