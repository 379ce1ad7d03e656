"""BeamSearchParams: what `LLM.beam_search` looks for, by the rules of transformers' `generate(num_beams=...)`.

Plain data, assignable; `verify` runs at construction and again on use. Errors name field and value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagedllm.errors import RequestError
from pagedllm.keywords import checks_keywords
from pagedllm.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams, is_int, is_real
from pagedllm.vllm_keywords import FOREIGN_BEAM_SEARCH_PARAMS

MAX_LENGTH_PENALTY = 20.0  # keeps length ** length_penalty far from the ends of the floats
RENAMED_BEAM_SEARCH_PARAMS = {
    "num_beams": "use beam_width",
    "n": "use beam_width: all of them are returned, the best first",
    "num_return_sequences": "all beam_width outputs are returned, the best first",
    "max_new_tokens": "use max_tokens",
    "max_length": "use max_tokens, which counts new tokens only",
    "eos_token_id": "use stop_token_ids",
}


@checks_keywords(RENAMED_BEAM_SEARCH_PARAMS, FOREIGN_BEAM_SEARCH_PARAMS)
@dataclass
class BeamSearchParams:
    """beam_width: hypotheses kept at every step, and outputs given back, the best score first.

    max_tokens: None = up to max_model_len. score = cumulative_logprob / length ** length_penalty, the length with the
        token that ended it: above 0 favours long outputs, below 0 short ones.
    early_stopping: True ends once beam_width hypotheses are complete; False once no running one seems able to beat
        them, judged by its present length; "never" judged by the length that favours it most, which is exact.
    ignore_eos: only stop_token_ids and max_tokens end an output. skip_special_tokens: as in SamplingParams.
    """

    beam_width: int
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Raises RequestError("invalid_parameter") naming the field and its value."""
        if not is_int(self.beam_width) or self.beam_width < 1:
            raise _invalid("beam_width", "an int >= 1", self.beam_width)
        if self.max_tokens is not None and (not is_int(self.max_tokens) or self.max_tokens < 1):
            raise _invalid("max_tokens", "None or an int >= 1", self.max_tokens)
        penalty = self.length_penalty
        if not is_real(penalty) or not math.isfinite(penalty) or abs(penalty) > MAX_LENGTH_PENALTY:
            wanted = f"a finite number in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
            raise _invalid("length_penalty", wanted, penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _invalid("early_stopping", "True, False or 'never'", self.early_stopping)
        self.sampling_params()

    def verify_for_model(self, vocab_size: int, num_end_tokens: int) -> None:
        """num_end_tokens: how many ids end an output, of which no beam can go on."""
        widest = vocab_size - num_end_tokens
        if self.beam_width > widest:
            raise _invalid("beam_width", f"at most {widest:,}, the tokens that a beam can go on with", self.beam_width)

    def sampling_params(self) -> SamplingParams:
        """What concerns single tokens and the text, as a request has it."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids if self.stop_token_ids is None else list(self.stop_token_ids),
            skip_special_tokens=self.skip_special_tokens,
        )


def _invalid(field: str, wanted: str, value: Any) -> RequestError:
    return RequestError("invalid_parameter", f"{field} must be {wanted}, got {value!r}", field=field)
