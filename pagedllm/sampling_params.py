"""SamplingParams: how one request's tokens are chosen and where they end. vLLM's names and meanings.

Plain data, assignable; `verify` runs at construction and again on use, and is the only place that knows the ranges.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedllm.errors import NotSupportedError, RequestError

GREEDY_EPSILON = 1e-5  # temperatures below are greedy
DEFAULT_MAX_TOKENS = 256
MAX_LOGIT_BIAS = 100.0


@dataclass
class SamplingParams:
    """See docs and `pagedllm.sampling_params.verify` for the ranges. Errors are RequestError("invalid_parameter")."""

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
    structured_outputs: Any = None
    logits_processors: Sequence[Callable[..., Any]] = ()

    def __post_init__(self) -> None:
        self.verify()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def clone(self) -> SamplingParams:
        """An independent copy; callables are shared."""
        twin = copy.copy(self)
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"):
            value = getattr(self, name)
            if isinstance(value, (list, dict)):
                setattr(twin, name, copy.copy(value))
        return twin

    def verify(self) -> None:
        """Raises RequestError naming the field and its value, or NotSupportedError for what comes later."""
        self._verify_numbers()
        self._verify_ends()
        self._verify_tokens()
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens",
                     "spaces_between_special_tokens"):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, "a bool", getattr(self, name))
        if self.n != 1:
            raise NotSupportedError(f"n={self.n} is not supported yet: pass the prompt {self.n} times, with seeds")
        if self.prompt_logprobs is not None:
            raise NotSupportedError("prompt_logprobs is not supported yet: leave it None")
        if self.structured_outputs is not None:
            raise NotSupportedError("structured_outputs is not supported yet: leave it None")
        for name in ("bad_words", "logits_processors"):
            if getattr(self, name):
                raise NotSupportedError(f"{name} is not supported yet: leave it empty")

    def _verify_numbers(self) -> None:
        def is_real(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        def check(name: str, wanted: str, is_valid: Callable[[Any], bool]) -> None:
            value = getattr(self, name)
            if not is_real(value) or not is_valid(value):
                raise _invalid(name, wanted, value)

        check("temperature", "a finite number in [0, 2]", lambda v: 0 <= v <= 2)
        check("top_p", "in (0, 1]", lambda v: 0 < v <= 1)
        check("min_p", "in [0, 1]", lambda v: 0 <= v <= 1)
        check("presence_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2)
        check("frequency_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2)
        check("repetition_penalty", "a finite number > 0", lambda v: v > 0)
        for name, minimum in (("n", 1), ("top_k", -1), ("min_tokens", 0)):
            if not _is_int(getattr(self, name)) or getattr(self, name) < minimum:
                raise _invalid(name, f"an int >= {minimum}", getattr(self, name))
        for name, minimum in (("max_tokens", 0), ("logprobs", -1), ("prompt_logprobs", -1)):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < minimum):
                raise _invalid(name, f"None or an int >= {minimum}", value)
        if self.seed is not None and not _is_int(self.seed):
            raise _invalid("seed", "None or an int", self.seed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)

    def _verify_ends(self) -> None:
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise _invalid("stop", "a str or a list of str", self.stop)
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise _invalid("stop", "free of empty strings and of anything but str", self.stop)
        if self.stops and not self.detokenize:
            raise _invalid("detokenize", "True where stop strings are given", self.detokenize)

    def _verify_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (list, tuple)) and all(_is_int(i) for i in value)):
                raise _invalid(name, "a list of ints", value)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _invalid("allowed_token_ids", "None or a non-empty list of ints", self.allowed_token_ids)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _invalid("logit_bias", "None or a dict of id to number", self.logit_bias)
            for token_id, bias in self.logit_bias.items():
                is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and math.isfinite(bias)
                if not _is_int(token_id) or not is_number:
                    raise _invalid("logit_bias", "a dict of int id to finite number", {token_id: bias})

    def verify_for_model(self, vocab_size: int, max_logprobs: int) -> None:
        """The checks that need the model: ids within the vocabulary, logprobs within the engine's limit."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise _invalid(name, f"ids in [0, {vocab_size})", token_id)
        if self.logprobs is not None and self.logprobs > max_logprobs:
            raise _invalid("logprobs", f"at most max_logprobs ({max_logprobs}) or -1", self.logprobs)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(field: str, wanted: str, value: object) -> RequestError:
    return RequestError("invalid_parameter", f"{field} must be {wanted}, got {value!r}", field=field)
