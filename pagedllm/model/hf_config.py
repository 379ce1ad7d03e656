"""The strict reader of a Hugging Face config.json: what a family does not consume must be known to be harmless.

A setting that nobody understands is refused by name and value, since it may change every answer. Families take
settings through typed methods; `finish` then looks at what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from pagedllm.errors import ModelError
from pagedllm.ops.linear import Activation

# They describe training, files, or defaults of generation: no influence on a forward pass.
HARMLESS = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_model_name_or_path",
    "_name_or_path", "architectures", "attention_dropout", "attention_probs_dropout_prob",
    "attn_implementation", "attn_pdrop", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation", "classifier_dropout",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop",
    "encoder_no_repeat_ngram_size", "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "hidden_dropout", "hidden_dropout_prob", "id2label", "initializer_range", "is_llama_config", "label2id",
    "length_penalty",
    "max_length", "min_length", "model_type", "name_or_path", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "router_aux_loss_coef",
    "router_jitter_noise", "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_cache",
))  # fmt: skip
# They may stand there, but only with the value that means nothing.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "exponential_decay_length_penalty": (None,),
    "is_decoder": (False, True),  # every model here is one
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False,),  # of Qwen's models that see
    "tie_encoder_decoder": (False,),
}
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

LARGEST_SIZE = 2**31 - 1  # ids and positions are int32

T = TypeVar("T")


class Required:
    """Stands where a default would, for settings that have none."""


REQUIRED = Required()


class ConfigReader:
    """One object of settings; `place` says in messages where it stands."""

    def __init__(self, settings: Mapping[str, Any], path: Path, place: str = "") -> None:
        self.path = path
        self._settings = settings
        self._place = place
        self._left = set(settings)

    def error(self, key: str, message: str) -> ModelError:
        return ModelError(f"{self.path / 'config.json'}: {self._place}{shown(key)} {message}")

    def has(self, key: str) -> bool:
        """Whether a setting stands there and is not null."""
        return self._settings.get(key) is not None

    def is_given(self, key: str) -> bool:
        """Whether a setting stands there, null or not: some families' defaults differ from null."""
        return key in self._settings

    def peek(self, key: str) -> Any:
        """The setting, not taken; None where it is absent."""
        return self._settings.get(key)

    def take(self, key: str, default: T | Required = REQUIRED) -> T | Any:
        """The setting, or the default where it is absent or null."""
        self._left.discard(key)
        value = self._settings.get(key)
        if value is not None:
            return value
        if isinstance(default, Required):
            raise self.error(key, "is null" if key in self._settings else "is missing")
        return default

    def integer(
        self, key: str, default: T | Required = REQUIRED, minimum: int = 1, maximum: int = LARGEST_SIZE
    ) -> int | T:
        value = self.take(key, default)
        if not self.has(key):
            return cast(T, value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"must be an integer >= {minimum}, got {_brief(value)}")
        if value > maximum:
            raise self.error(key, f"must be at most {maximum}, got {_brief(value)}")
        return value

    def number(self, key: str, default: T | Required = REQUIRED, minimum: float = 0.0) -> float | T:
        """A finite number above `minimum`."""
        value = self.take(key, default)
        if not self.has(key):
            return cast(T, value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum < value < math.inf:
            raise self.error(key, f"must be a number above {minimum:g}, got {_brief(value)}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {_brief(value)}")
        return value

    def text(self, key: str, default: T | Required = REQUIRED) -> str | T:
        value = self.take(key, default)
        if self.has(key) and not isinstance(value, str):
            raise self.error(key, f"must be a string, got {_brief(value)}")
        return cast("str | T", value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """`length` finite numbers above zero."""
        value = self.take(key)
        is_right = isinstance(value, list) and all(
            isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf for x in value
        )
        if not is_right or len(value) != length:
            raise self.error(key, f"must be a list of {length} numbers above 0, got {_brief(value)}")
        return tuple(map(float, value))

    def texts(self, key: str, length: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """`length` strings out of `allowed`, or None where the setting is absent."""
        value = self.take(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(x not in allowed for x in value):
            raise self.error(key, f"must be a list of {length} out of {allowed}, got {_brief(value)}")
        return tuple(value)

    def nested(self, key: str) -> ConfigReader | None:
        """The reader of an object, or None where it is absent or null."""
        value = self.take(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {_brief(value)}")
        return ConfigReader(value, self.path, f"{self._place}{key}.")

    def activation(self, key: str, default: str | Required = REQUIRED) -> Activation:
        name = self.text(key, default)
        if name not in ACTIVATIONS:
            raise self.error(key, f"must be one of {sorted(ACTIVATIONS)}, got {name!r}")
        return ACTIVATIONS[name]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or null."""
        value = self.take(key, ())
        ids = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(key, f"must be a token id or a list of them, got {_brief(value)}")
        return tuple(ids)

    def finish(self) -> None:
        """Refuses what nobody took and is not known to be harmless."""
        for key in sorted(self._left - HARMLESS):
            value = self._settings[key]
            if key == "quantization_config":
                raise self.error(key, f"is {_brief(value)}: quantized weights of this kind are not supported yet")
            if key in NEUTRAL_VALUES:
                if value not in NEUTRAL_VALUES[key]:
                    raise self.error(key, f"is {_brief(value)}, which is not supported")
                continue
            raise self.error(key, f"is {_brief(value)}, a setting that pagedllm does not know")

    def finish_nested(self) -> None:
        """Refuses whatever nobody took: nothing is harmless in here."""
        for key in sorted(self._left):
            if self._settings[key] is not None:
                raise self.error(key, f"is {_brief(self._settings[key])}, a setting that pagedllm does not know here")


def shown(name: str) -> str:
    """A name out of an untrusted file, for a message of one line."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
