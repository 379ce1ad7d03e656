"""How likely texts are: (prompt, continuation) pairs -> token ids with their seam, and what was computed -> scores.

The seam is that of evaluation harnesses: whitespace at a prompt's end moves to the continuation, both are encoded
together, and what lies behind the first len(encode(prompt)) tokens is the continuation. Ids stand as they are. Knows
the tokenizer through RequestBuilder; LLM and `jobs` run the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from pagedllm.errors import RequestError
from pagedllm.outputs import Classification, Loglikelihood
from pagedllm.prompts import Prompt, brief
from pagedllm.request import LogprobRows, Request
from pagedllm.request_builder import ChatOptions, EncodedPrompt, RequestBuilder, check_encodable
from pagedllm.sampling_params import SamplingParams, is_int

Continuation = str | list[int]
SCORING = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, detokenize=False)


def parse_continuations(continuations: Any, num_prompts: int) -> tuple[list[list[Continuation]], bool]:
    """The candidates of each prompt, and whether they were given as lists. TypeError or ValueError where they are not
    one, or one list, per prompt."""
    if isinstance(continuations, str) or _is_ids(continuations):
        continuations = [continuations]
    if isinstance(continuations, Mapping) or not isinstance(continuations, Iterable):
        raise TypeError(f"continuations must be texts, token ids, or lists of those; got {brief(continuations)}")
    items = list(continuations)
    if len(items) != num_prompts:
        raise ValueError(
            f"{len(items)} continuations for {num_prompts} prompts: pass one per prompt, or one list of candidates per "
            "prompt: [[' yes', ' no']]"
        )
    nested = [index for index, item in enumerate(items) if not isinstance(item, str) and not _is_ids(item)]
    if nested and len(nested) < len(items):
        raise TypeError(f"continuations[{nested[0]}] is a list of candidates, others are not: make all of them lists")
    if not nested:
        return [[_continuation(item, f"continuations[{index}]")] for index, item in enumerate(items)], False
    found = []
    for index, item in enumerate(items):
        if isinstance(item, Mapping) or not isinstance(item, Iterable):
            raise TypeError(f"continuations[{index}] must be a text, token ids, or a list of those; got {brief(item)}")
        found.append([_continuation(one, f"continuations[{index}][{place}]") for place, one in enumerate(item)])
    return found, True


def encode_pairs(
    builder: RequestBuilder,
    prompts: Sequence[Prompt],
    candidates: Sequence[Sequence[Continuation]],
    is_nested: bool,
    chat: ChatOptions | None = None,
) -> list[EncodedPrompt]:
    """In order, the candidates of a prompt one after the other. Raises RequestError for the first bad one."""
    stripped = [_without_end(prompt) for prompt in prompts]
    contexts = builder.encode([prompt for prompt, _ in stripped], chat or ChatOptions())
    joined = iter(_encode_joined(builder, prompts, contexts, [end for _, end in stripped], candidates))
    pairs = []
    for index, (context, items) in enumerate(zip(contexts, candidates, strict=True)):
        for place, item in enumerate(items):
            name = f"continuations[{index}][{place}]" if is_nested else f"continuations[{index}]"
            ids = item if isinstance(item, list) else next(joined)
            pairs.append(_pair(builder, context, ids, index, name))
    return pairs


def rolling_windows(builder: RequestBuilder, text: Prompt, place: str) -> tuple[list[int], list[EncodedPrompt]]:
    """The text's own ids, and windows of max_model_len tokens at most that score each of them once.

    The first begins at the model's BOS (EOS where it has none). Later ones begin with the token before them; the last
    one reaches back as far as a window goes.
    """
    if text.error is not None or text.messages is not None:
        reason = text.error.message if text.error is not None else f"{place} must be a text or a list of token ids"
        raise RequestError("invalid_parameter", reason, field="texts")
    if text.text is None:
        ids = list(text.token_ids or ())
    else:
        check_encodable(text.text, place)
        ids = builder.tokenizer.encode(text.text, add_special_tokens=False)
    size = max(1, builder.max_model_len - 1)  # scored by one window
    source = [first_token(builder), *ids]
    windows = []
    for begin in range(0, len(ids), size):  # of the scored ids; in `source` each stands one further
        end = min(begin + size, len(ids))
        start = max(0, end - size)
        windows.append(EncodedPrompt(None, source[start : end + 1], num_context_tokens=begin + 1 - start))
    return ids, windows


def first_token(builder: RequestBuilder) -> int:
    """What a text without a prompt is conditioned on."""
    tokenizer = builder.tokenizer
    ids = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else list(builder.eos_token_ids)
    if not ids:
        raise RequestError("empty_prompt", "the model names no BOS or EOS token, which a text without a prompt needs")
    return ids[0]


def score_of(requests: Sequence[Request], token_ids: Sequence[int]) -> Loglikelihood:
    """Of tokens that these finished requests scored, in order."""
    rows = LogprobRows.joined([part for request in requests for part in request.prompt_logprobs])
    values = rows.logprobs[:, 0]
    assert len(values) == len(token_ids)
    total = float(values.sum(dtype=np.float64))
    return Loglikelihood(total, values, list(token_ids), len(token_ids), bool(rows.is_greedy.all()))


def classification(choices: Sequence[str], scores: Sequence[Loglikelihood]) -> Classification:
    """The likeliest choice, the first of equals, and the probabilities of all as if nothing else were possible."""
    best = max(range(len(choices)), key=lambda i: (scores[i].logprob, -i))
    highest = scores[best].logprob
    weights = [math.exp(score.logprob - highest) if highest > -math.inf else 1.0 for score in scores]
    total = sum(weights)
    return Classification(choices[best], {c: w / total for c, w in zip(choices, weights, strict=True)})


def parse_choices(choices: Any, num_prompts: int) -> list[list[str]]:
    """Those of each prompt. TypeError or ValueError unless they are different texts, none of them empty."""
    if isinstance(choices, (str, bytes, Mapping)) or not isinstance(choices, Iterable):
        raise TypeError(f"choices must be a list of texts, got {brief(choices)}")
    items = list(choices)
    if not items or isinstance(items[0], str):
        return [_check_choices(items, "choices")] * num_prompts
    if len(items) != num_prompts:
        raise ValueError(f"{len(items)} lists of choices for {num_prompts} prompts: pass one per prompt, or one list")
    return [_check_choices(item, f"choices[{index}]") for index, item in enumerate(items)]


def nested(scores: Iterable[Loglikelihood], candidates: Sequence[Sequence[object]]) -> list[list[Loglikelihood]]:
    """The scores of all candidates in order, as lists of each prompt's."""
    source = iter(scores)
    return [list(islice(source, len(items))) for items in candidates]


def _check_choices(choices: Any, place: str) -> list[str]:
    if isinstance(choices, (str, bytes, Mapping)) or not isinstance(choices, Iterable):
        raise TypeError(f"{place} must be a list of texts, got {brief(choices)}")
    found = list(choices)
    for choice in found:
        if not isinstance(choice, str) or not choice:
            raise ValueError(f"{place} must be texts that are not empty, got {brief(choice)}")
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"{place} must be different texts, at least one, got {brief(found)}")
    return found


def _is_ids(value: Any) -> bool:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return isinstance(value, (list, tuple)) and bool(value) and is_int(value[0])


def _continuation(value: Any, place: str) -> Continuation:
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{place} must be a text or a list of token ids, got {brief(value)}")
    for token_id in value:
        if not is_int(token_id):
            raise TypeError(f"{place} must be a text or a list of token ids, but holds {brief(token_id)}")
    return [int(token_id) for token_id in value]


def _without_end(prompt: Prompt) -> tuple[Prompt, str]:
    """A text without the whitespace at its end, and that; a template's text keeps it."""
    if prompt.text is None:
        return prompt, ""
    text = prompt.text.rstrip()
    return Prompt(text=text, metadata=prompt.metadata, error=prompt.error), prompt.text[len(text) :]


def _encode_joined(
    builder: RequestBuilder,
    prompts: Sequence[Prompt],
    contexts: Sequence[EncodedPrompt],
    ends: Sequence[str],
    candidates: Sequence[Sequence[Continuation]],
) -> list[list[int]]:
    """The tokens of each continuation that is a text, in order."""
    texts: dict[bool, list[str]] = {False: [], True: []}  # by whether the tokenizer adds its special tokens
    seams: list[tuple[bool, list[int]]] = []
    for index, (prompt, context, end, items) in enumerate(zip(prompts, contexts, ends, candidates, strict=True)):
        for item in items:
            if isinstance(item, str):
                check_encodable(item, f"continuations[{index}]")
                is_special = prompt.text is not None and bool(context.token_ids)
                texts[is_special].append((context.text or "") + end + item)
                seams.append((is_special, context.token_ids if context.text is not None else []))
    encoded = {key: iter(builder.tokenizer.encode_batch(group, key) if group else ()) for key, group in texts.items()}
    continuations, num_merged = [], 0
    for is_special, before in seams:
        ids = next(encoded[is_special])
        num_merged += ids[: len(before)] != before
        continuations.append(ids[len(before) :])
    if num_merged:
        builder.notices.tell(
            f"{num_merged:,} of {len(seams):,} continuations share a token with the end of their prompt, and are cut "
            "there as evaluation harnesses do: begin them with a space, or pass token ids"
        )
    return continuations


def _pair(
    builder: RequestBuilder, context: EncodedPrompt, continuation: list[int], index: int, place: str
) -> EncodedPrompt:
    if context.error is not None:
        error = context.error
        text = error.message if error.index is not None else f"prompts[{index}]: {error.message}"
        raise RequestError(error.code, text, index=index, field="prompts")
    before = context.token_ids
    if not before:
        first = first_token(builder)
        before = [first]
        continuation = continuation[continuation[:1] == before :]
    if not continuation:
        text = f"{place} adds no token to its prompt: pass both as token ids"
        raise RequestError("invalid_parameter", text, index=index, field="continuations")
    encoded = EncodedPrompt(context.text, [*before, *continuation], num_context_tokens=len(before))
    try:
        builder.check_prompt(encoded, SCORING)
    except RequestError as error:
        text = f"{place} with its prompt: {error.message}"
        raise RequestError(error.code, text, index=index, field="continuations") from None
    return encoded
