"""What a checkpoint's generation_config.json says about sampling, and when it counts.

`sampling_params=None` takes its sampling values; a given SamplingParams takes only the eos ids, which are the union of
what the model's config, the generation config and the tokenizer name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedllm.errors import ModelError, NotSupportedError, RequestError
from pagedllm.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams, is_int

SOURCE = "generation_config.json"
SAMPLING_KEYS = {  # its key -> our field
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# Keys that would change the text and that we do not apply, with the value that means nothing.
UNAPPLIED_KEYS: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "bad_words_ids": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_eos_token_id": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """values: SamplingParams fields, only those that the checkpoint sets. unapplied: what it also says, as text."""

    values: Mapping[str, Any]
    unapplied: tuple[str, ...]

    @classmethod
    def from_config(cls, generation_config: Mapping[str, Any]) -> GenerationDefaults:
        values: dict[str, Any] = {}
        for key, name in SAMPLING_KEYS.items():
            if generation_config.get(key) is not None:
                values[name] = generation_config[key]
        if generation_config.get("do_sample") is False:
            values["temperature"] = 0.0
        unapplied = tuple(
            f"{key}={generation_config[key]!r}"
            for key, neutral in UNAPPLIED_KEYS.items()
            if generation_config.get(key) is not None and generation_config[key] not in neutral
        )
        return cls(values, unapplied)

    def params(self) -> SamplingParams:
        """Raises ModelError where the checkpoint asks for something that SamplingParams refuses."""
        try:
            return SamplingParams(**self.values)
        except (RequestError, NotSupportedError) as error:
            raise ModelError(f"{SOURCE}: {error}; pass sampling_params, or generation_config='none'") from None

    def describe_given(self) -> str:
        """Of a call with SamplingParams of its own."""
        return f"sampling_params as given; {SOURCE} is not applied: {_listed(self.values)}"

    def describe(self, given: Mapping[str, Any] | None = None) -> str:
        """What is in force where prompts bring nothing of their own, with its source; given: fields that come first."""
        given = given or {}
        kept = {name: value for name, value in self.values.items() if name not in given}
        parts = [f"{_listed(given)} (given)"] if given else []
        parts += [f"{_listed(kept)} ({SOURCE})"] if kept else []
        if "temperature" not in kept and "temperature" not in given:
            parts.append("temperature=1.0 (the default)")
        if "max_tokens" not in kept and "max_tokens" not in given:
            parts.append(f"max_tokens={DEFAULT_MAX_TOKENS} (the default)")
        text = f"sampling by {', '.join(parts)}"
        return f"{text}; not applied: {', '.join(self.unapplied)}" if self.unapplied else text


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def eos_token_ids(*sources: object) -> tuple[int, ...]:
    """The union, in order, of eos ids given as None, an int or a list of ints."""
    found: dict[int, None] = {}
    for source in sources:
        ids: Iterable[object] = source if isinstance(source, (list, tuple)) else (source,)
        for token_id in ids:
            if is_int(token_id):
                found[int(token_id)] = None  # type: ignore[call-overload]
            elif token_id is not None:
                raise ModelError(f"eos_token_id must be an int or a list of ints, got {token_id!r}")
    return tuple(found)
