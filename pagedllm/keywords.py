"""Names of parameters: what a wrong one is told.

A keyword that exists nowhere is a TypeError that names the nearest one; a name that another library uses for one of
ours says which. Used for LLM, SamplingParams and the `sampling_params` of rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from pagedllm.errors import NotSupportedError
from pagedllm.vllm_keywords import Foreign

T = TypeVar("T")

# What people type who come from transformers, from an OpenAI client or from an older vLLM.
RENAMED_SAMPLING_PARAMS = {
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "max_length": "use max_tokens, which counts new tokens only",
    "min_new_tokens": "use min_tokens",
    "min_length": "use min_tokens, which counts new tokens only",
    "num_return_sequences": "use n",
    "best_of": "use n",
    "do_sample": "use temperature=0 for greedy decoding",
    "greedy": "use temperature=0",
    "stop_sequences": "use stop",
    "stop_strings": "use stop",
    "eos_token_id": "use stop_token_ids",
    "top_logprobs": "use logprobs",
    "early_stopping": "use llm.beam_search(prompts, BeamSearchParams(...))",
    "length_penalty": "use llm.beam_search(prompts, BeamSearchParams(...))",
    "num_beams": "use llm.beam_search(prompts, BeamSearchParams(...))",
    "use_beam_search": "use llm.beam_search(prompts, BeamSearchParams(...))",
    "guided_decoding": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "response_format": "use structured_outputs",
}
RENAMED_LLM_KEYWORDS = {
    "torch_dtype": "use dtype",
    "max_seq_len": "use max_model_len",
    "max_length": "use max_model_len",
    "n_ctx": "use max_model_len",
    "n_threads": "use num_threads",
    "max_num_tokens": "use max_num_batched_tokens",
    "device_map": "use device",
}


def unknown_name(owner: str, name: str, accepted: Collection[str], renamed: Mapping[str, str]) -> str:
    """The sentence for a name that `owner` does not have."""
    text = f"{owner} has no parameter {name!r}"
    if name in renamed:
        return f"{text}: {renamed[name]}"
    nearest = nearest_name(name, accepted)
    return f"{text}: {nearest}" if nearest else f"{text}; it has {', '.join(accepted)}"


def nearest_name(name: str, accepted: Collection[str]) -> str:
    """ "did you mean 'x'?", or "" where nothing is like it."""
    import difflib  # 5 ms, needed for mistakes only

    nearest = difflib.get_close_matches(name, accepted, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else ""


def checks_keywords(renamed: Mapping[str, str], foreign: Mapping[str, Foreign]) -> Callable[[type[T]], type[T]]:
    """Class decorator for keywords that the constructor lacks; its signature stays.

    A foreign one is left out with a notice, or a NotSupportedError; others raise TypeError by `unknown_name`.
    """

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__
        code = init.__code__
        accepted = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

        @functools.wraps(init)
        def checked(self: T, *args: Any, **kwargs: Any) -> None:
            known = {}
            for name, value in kwargs.items():
                if name in accepted:
                    known[name] = value
                elif name in foreign:
                    _leave_out(cls.__name__, name, value, foreign[name])
                else:
                    raise TypeError(unknown_name(cls.__name__, name, accepted, renamed))
            init(self, *args, **known)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate


def _leave_out(owner: str, name: str, value: Any, foreign: Foreign) -> None:
    """A notice for a harmless value, nothing for None where that is one, NotSupportedError for the others."""
    if not foreign.is_harmless(value):
        raise NotSupportedError(f"{owner}: {name}={value!r} is not supported: {foreign.way_out}")
    if foreign.reason:
        logging.getLogger("pagedllm").warning("%s=%r has no effect: %s", name, value, foreign.reason)
