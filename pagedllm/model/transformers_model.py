"""A model without a family here, run by transformers, with its attention over our paged cache.

The weights and every product are torch's: right, slower than ours, and not the same bits in every batch. What a layer
asks of attention is found by a pass over a few tokens, not read from the config: it becomes the ModelConfig, so that
the cache, its groups and the scheduler need not know who computes. Imported only when such a model is loaded.

Letters: T tokens of the step, R rows whose logits are wanted, H hidden_size, V vocab_size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedllm.errors import ModelError, NotSupportedError
from pagedllm.model.checkpoint import Checkpoint, SafetensorsCheckpoint
from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig
from pagedllm.model.decoder import DecoderInput
from pagedllm.model.layer_groups import group_layers
from pagedllm.model.paged_attention_hook import IMPLEMENTATION, AttentionProbe, Hook, LayerCall, PagedStep, attention
from pagedllm.model.rope import RopeTables
from pagedllm.ops.attention import AttentionBackend, AttentionMetadata
from pagedllm.ops.linear import Activation

LAYER_KINDS = ("full_attention", "sliding_attention")
STRETCHING_ROPES = ("dynamic", "longrope")  # transformers changes them with the longest text of a batch
PROBE_LENGTH = 4
NO_LENGTH = "does not say how long a text may be (max_position_embeddings)"


@dataclass(frozen=True, slots=True)
class TransformersBuffers:
    qkv: Tensor  # [T, (Q + 2 K) * D]
    attention: Tensor  # [T, Q, D]

    @property
    def num_bytes(self) -> int:
        return self.qkv.nbytes + self.attention.nbytes


class TransformersDecoder:
    """Does what `Decoder` does for the runner."""

    finds_likeliest = False
    is_batch_invariant = False

    def __init__(
        self, model: Any, config: ModelConfig, dtype: torch.dtype, backend: AttentionBackend, namespace: str
    ) -> None:
        self.model = model
        self.hook = Hook(model)
        self.config = config
        self.dtype = dtype
        self.backend = backend
        self.namespace = namespace
        self.num_weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    def set_rope_tables(self, tables: RopeTables) -> None:
        """The model has its own."""

    def allocate_buffers(self, max_num_tokens: int, max_num_logits: int) -> TransformersBuffers:
        config = self.config
        num_heads = config.num_q_heads + 2 * config.num_kv_heads
        return TransformersBuffers(
            torch.empty(max_num_tokens, num_heads * config.head_dim, dtype=self.dtype, device="cpu"),
            torch.empty(max_num_tokens, config.num_q_heads, config.head_dim, dtype=self.dtype, device="cpu"),
        )

    def forward(
        self,
        inputs: DecoderInput,
        metadata: AttentionMetadata,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        buffers: TransformersBuffers,
        wants_likeliest: bool = False,
    ) -> Tensor:
        """[R, V] float32; kv_caches: K and V of each layer, written in place."""
        assert not wants_likeliest
        num_tokens = len(inputs.token_ids)
        step = PagedStep(
            self.config, self.backend, metadata, kv_caches, buffers.qkv[:num_tokens], buffers.attention[:num_tokens]
        )
        with self.hook.attending(step):
            output = self.model(
                input_ids=inputs.token_ids.long()[None],
                position_ids=inputs.positions.long()[None],
                use_cache=False,
                logits_to_keep=inputs.logits_indices.long(),
            )
        logits: Tensor = output.logits[0].float()
        return logits

    def eager_logits(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V] float32 by the model's own attention, as transformers would run it."""
        self.model.set_attn_implementation("eager")
        try:
            output = self.model(input_ids=torch.tensor([list(token_ids)], device="cpu"), use_cache=False)
        finally:
            self.model.set_attn_implementation(IMPLEMENTATION)
        logits: Tensor = output.logits[0].float()
        return logits

    @contextmanager
    def calling_after_modules(self, call: Callable[[], None]) -> Iterator[None]:
        """Within the block `call` is called whenever a part of the model has computed."""
        handles = [module.register_forward_hook(lambda *_: call()) for module in self.model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self) -> None:
        del self.model


def knows(config: Mapping[str, Any]) -> bool:
    """Whether transformers has the architecture that a config.json names."""
    architectures = config.get("architectures")
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in names


def load_transformers_model(
    checkpoint: Checkpoint, dtype: torch.dtype, backend: AttentionBackend, namespace: str, max_model_len: int
) -> TransformersDecoder:
    """Loads and probes the model. Raises ModelError or NotSupportedError, by name, for what cannot be done right."""
    path = checkpoint.path
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise NotSupportedError(f"{path}: model_impl='transformers' reads safetensors only")
    check_settings(checkpoint.config, path)
    model = _load(path, dtype)
    try:
        config = _probe(model, path)
    except NotSupportedError as error:
        raise _refusal(path, _name(model), str(error)) from None
    except Exception as error:  # whatever its code raises
        text = f"transformers {transformers.__version__} fails on {_name(model)}: {error}"
        raise ModelError(f"{path}: {text}") from error
    if config.head_dim not in backend.supported_head_dims:
        raise ModelError(f"{path}: head_dim {config.head_dim} is not supported by the kernels")
    config = group_layers(config, min(max_model_len, config.max_position))
    return TransformersDecoder(model, config, dtype, backend, namespace)


def check_settings(settings: Mapping[str, Any], path: Path) -> None:
    """What config.json alone says cannot be done right."""
    name = "/".join(map(str, settings.get("architectures") or ("the model",)))
    if settings.get("is_encoder_decoder"):
        raise _refusal(path, name, "has an encoder")
    if settings.get("auto_map") is not None and not knows(settings):
        raise _refusal(path, name, "needs code from its folder, which is never run")
    if settings.get("quantization_config") is not None:
        raise _refusal(path, name, "has quantized weights (quantization_config)")
    kinds = set(settings.get("layer_types") or ()) - set(LAYER_KINDS)
    if kinds:
        raise _refusal(path, name, f"has layers of kind {', '.join(map(repr, sorted(kinds)))}")
    for rope in _ropes(settings):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in STRETCHING_ROPES:
            raise _refusal(path, name, f"has a rope of kind {kind!r}, which changes with the longest text of a batch")


def _ropes(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every set of rope parameters, in both spellings, per kind of layer or not."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = settings.get(key)
        if isinstance(rope, Mapping):
            yield rope
            yield from (value for value in rope.values() if isinstance(value, Mapping))


def estimate_memory(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of the weights, KV bytes of a token if every layer keeps it, the longest text; nothing is loaded."""
    check_settings(checkpoint.config, checkpoint.path)
    config = _read_config(checkpoint.path)
    _find_class(config, checkpoint.path)
    settings = config.get_text_config()
    max_position = getattr(settings, "max_position_embeddings", None)
    if not isinstance(max_position, int):
        raise _refusal(checkpoint.path, "/".join(config.architectures or ()), NO_LENGTH)
    num_weights = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    num_heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    bytes_per_token = 2 * settings.num_hidden_layers * num_heads * head_dim * dtype.itemsize
    return num_weights * dtype.itemsize, bytes_per_token, max_position


def _read_config(path: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        raise ModelError(f"{path}: transformers {transformers.__version__} cannot read config.json: {error}") from error


def _find_class(config: Any, path: Path) -> Any:
    """The model's class, refused where it alone says that it cannot be run."""
    name = "/".join(config.architectures or ())
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or model_class.__name__ != name:
        raise _refusal(path, name, "is not a causal language model of transformers " + transformers.__version__)
    if getattr(model_class, "_is_stateful", False):
        raise _refusal(path, name, "has recurrent layers")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refusal(path, name, "has attention that cannot be replaced")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise _refusal(path, name, "computes the logits of all tokens or of none")
    return model_class


def _load(path: Path, dtype: torch.dtype) -> Any:
    transformers.AttentionInterface.register(IMPLEMENTATION, attention)
    config = _read_config(path)
    model_class = _find_class(config, path)
    model, loading = model_class.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if loading.get(what):
            raise ModelError(f"{path}: transformers reports {what}: {', '.join(map(str, sorted(loading[what])[:3]))}")
    return model.eval()


def _probe(model: Any, path: Path) -> ModelConfig:
    """A pass over a few tokens says what each layer asks for. Raises NotSupportedError without the model's name."""
    probe = AttentionProbe()
    token_ids = torch.arange(PROBE_LENGTH, device="cpu")[None]
    with torch.inference_mode(), Hook(model).attending(probe):
        logits = model(input_ids=token_ids, position_ids=token_ids, use_cache=False).logits
    settings = model.config.get_text_config()
    num_layers = settings.num_hidden_layers
    if sorted(probe.calls) != list(range(num_layers)):
        raise NotSupportedError(f"attends in {len(probe.calls)} of its {num_layers} layers, the others are different")
    if len({(call.shape, call.scale) for call in probe.calls.values()}) > 1:
        raise NotSupportedError("has layers with other heads or scales than the others'")
    _check_windows(settings, probe.calls)
    max_position = getattr(settings, "max_position_embeddings", None)
    if not isinstance(max_position, int):
        raise NotSupportedError(NO_LENGTH)
    call = probe.calls[0]
    eos = settings.eos_token_id
    return ModelConfig(
        architecture=_name(model),
        hidden_size=settings.hidden_size,
        intermediate_size=0,  # this and what follows up to the layers is the model's own business
        num_q_heads=call.shape.num_q_heads,
        num_kv_heads=call.shape.num_kv_heads,
        head_dim=call.shape.head_dim,
        vocab_size=logits.shape[-1],
        max_position=max_position,
        norm_eps=0.0,
        activation=Activation.SILU,
        layers=tuple(_layer(probe.calls[index]) for index in range(num_layers)),
        attention_scale=call.scale,
        is_tied=bool(settings.tie_word_embeddings),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_token_id=settings.bos_token_id,
    )


def _layer(call: LayerCall) -> LayerConfig:
    return LayerConfig(AttentionKind(window=call.window, softcap=call.softcap, has_sinks=call.has_sinks))


def _check_windows(settings: Any, calls: Mapping[int, LayerCall]) -> None:
    for index, kind in enumerate(getattr(settings, "layer_types", None) or ()):
        if (kind == "sliding_attention") != (calls[index].window > 0):
            raise NotSupportedError(f"says {kind!r} of layer {index} and passes window {calls[index].window}")


def _name(model: Any) -> str:
    return type(model).__name__


def _refusal(path: Path, name: str, reason: str) -> NotSupportedError:
    return NotSupportedError(f"{path}: {name} cannot be run by transformers over the paged cache: it {reason}")
