"""SamplingParams: how one request's tokens are chosen and where they end. vLLM's names and meanings.

Plain data, assignable; `verify` runs at construction and again on use, and is the only place that knows the ranges.
Errors are RequestError("invalid_parameter") that name field and value; what comes later is a NotSupportedError.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pagedllm.errors import RequestError
from pagedllm.keywords import RENAMED_SAMPLING_PARAMS, checks_keywords, unknown_name
from pagedllm.structured_outputs import StructuredOutputsParams
from pagedllm.vllm_keywords import FOREIGN_SAMPLING_PARAMS

GREEDY_EPSILON = 1e-5  # temperatures below are greedy
DEFAULT_MAX_TOKENS = 256
MAX_LOGIT_BIAS = 100.0
BOOLS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@checks_keywords(RENAMED_SAMPLING_PARAMS, FOREIGN_SAMPLING_PARAMS)
@dataclass
class SamplingParams:
    """What a request asks of the sampler; the defaults are neutral.

    n: outputs per prompt, each drawn from a stream of its own; the first is that of n=1. Greedy ones are all equal.
    temperature: 0..2; under 1e-5 greedy. top_p: (0, 1]. top_k: 0 or -1 = off. min_p: [0, 1].
    presence_penalty, frequency_penalty: [-2, 2], over the output. repetition_penalty: > 0, over prompt and output.
    seed: an int makes the request repeat itself; None or -1 draws from the LLM's seed.
    max_tokens: None = up to max_model_len. min_tokens holds back every way of ending.
    stop: the text is cut before the earliest match. stop_token_ids: end the output like an eos id.
    ignore_eos: only stop, stop_token_ids and lengths end the output.
    logprobs: None, or how many besides the sampled token's; -1 = the whole vocabulary. prompt_logprobs: the same for
        the prompt's tokens, from the model's own logits; with max_tokens=0 nothing else is computed.
    logit_bias: {id: number}, clamped to +-100. allowed_token_ids: nothing else is ever sampled.
    structured_outputs: StructuredOutputsParams(choice=[...]): the output is one of these texts.
    bad_words: never in the output, in the tokens that the tokenizer writes each with, with and without a leading space.
    logits_processors: callables f(token_ids, logits) -> logits, applied in order, after masks and bias and before
        penalties. token_ids: the output so far; logits: a [vocab_size] float32 tensor that may be edited in place.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = ()

    def __post_init__(self) -> None:
        self.verify()

    @classmethod
    def from_json(cls, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """From a row's `sampling_params`, over `defaults`. Keys of logit_bias may be digits, as JSON has them."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                text = unknown_name("sampling_params", name, names, RENAMED_SAMPLING_PARAMS)
                raise RequestError("invalid_parameter", text, field=name)
        merged = {**(defaults or {}), **values}
        bias = merged.get("logit_bias")
        if isinstance(bias, Mapping):
            merged["logit_bias"] = {_id_of_digits(key): value for key, value in bias.items()}
        if isinstance(merged.get("structured_outputs"), Mapping):
            merged["structured_outputs"] = StructuredOutputsParams.from_json(merged["structured_outputs"])
        return cls(**merged)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def num_samples(self) -> int:
        """That run for a prompt: greedy ones are all equal."""
        return 1 if self.is_greedy else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def clone(self) -> SamplingParams:
        """An independent copy; callables are shared."""
        twin = copy.copy(self)
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors", "logit_bias"):
            value = getattr(self, name)
            if isinstance(value, (list, dict)):
                setattr(twin, name, copy.copy(value))
        if self.structured_outputs is not None:
            twin.structured_outputs = copy.copy(self.structured_outputs)
        return twin

    def verify(self) -> None:
        """Raises RequestError naming the field and its value, or NotSupportedError for what comes later."""
        self._verify_numbers()
        self._verify_ends()
        self._verify_tokens()
        for name in BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, "a bool", getattr(self, name))
        structured = self.structured_outputs
        if structured is not None:
            if not isinstance(structured, StructuredOutputsParams):
                raise _invalid("structured_outputs", "None or StructuredOutputsParams(choice=[...])", structured)
            structured.verify()

    def _verify_numbers(self) -> None:
        def check(name: str, wanted: str, is_valid: Callable[[Any], bool]) -> None:
            value = getattr(self, name)
            if not is_real(value) or not _is_finite(value) or not is_valid(value):
                raise _invalid(name, wanted, value)

        check("temperature", "a finite number in [0, 2]", lambda v: 0 <= v <= 2)
        check("top_p", "in (0, 1]", lambda v: 0 < v <= 1)
        check("min_p", "in [0, 1]", lambda v: 0 <= v <= 1)
        check("presence_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2)
        check("frequency_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2)
        check("repetition_penalty", "a finite number > 0 (1e-30 to 1e30)", lambda v: 1e-30 <= v <= 1e30)
        for name, minimum in (("n", 1), ("min_tokens", 0)):
            if not is_int(getattr(self, name)) or getattr(self, name) < minimum:
                raise _invalid(name, f"an int >= {minimum}", getattr(self, name))
        if not is_int(self.top_k) or self.top_k < -1:
            raise _invalid("top_k", "0 or -1 (off) or an int >= 1", self.top_k)
        if self.max_tokens is not None and (not is_int(self.max_tokens) or self.max_tokens < 0):
            raise _invalid("max_tokens", "None or an int >= 0", self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < -1):
                raise _invalid(name, "None, an int >= 0, or -1 (the whole vocabulary)", value)
        if self.seed is not None and not is_int(self.seed):
            raise _invalid("seed", "None or an int", self.seed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)

    def _verify_ends(self) -> None:
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise _invalid("stop", "a str or a list of str", self.stop)
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise _invalid("stop", "a str or a list of str, none of them empty", self.stop)
        if self.stops and self.detokenize is False:
            raise _invalid("detokenize", "True where stop strings are given", self.detokenize)
        words = self.bad_words
        if words is not None and not (
            isinstance(words, (list, tuple)) and all(isinstance(w, str) and w for w in words)
        ):
            raise _invalid("bad_words", "None or a list of str, none of them empty", words)
        functions = self.logits_processors
        if functions is not None and not (isinstance(functions, (list, tuple)) and all(map(callable, functions))):
            raise _invalid("logits_processors", "None or a list of callables f(token_ids, logits)", functions)

    def _verify_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (list, tuple)) and all(map(is_int, value))):
                raise _invalid(name, "None or a list of ints", value)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _invalid("allowed_token_ids", "None or a non-empty list of ints", self.allowed_token_ids)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _invalid("logit_bias", "None or a dict of id to number", self.logit_bias)
            for token_id, bias in self.logit_bias.items():
                if not is_int(token_id) or not is_real(bias) or bias != bias:  # NaN
                    raise _invalid("logit_bias", "a dict of int id to number", {token_id: bias})

    def verify_for_model(self, vocab_size: int, max_logprobs: int) -> None:
        """The checks that need the model: ids within the vocabulary, logprobs within the engine's limit."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise _invalid(name, f"ids in [0, {vocab_size})", token_id)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise _invalid(name, f"at most max_logprobs ({max_logprobs}), or -1", value)


def is_int(value: object) -> bool:
    """True for ints, numpy's too; never for a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """True for ints and floats, numpy's too, NaN and infinity included; never for a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False


def _id_of_digits(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key


def _invalid(field: str, wanted: str, value: object) -> RequestError:
    return RequestError("invalid_parameter", f"{field} must be {wanted}, got {value!r}", field=field)
