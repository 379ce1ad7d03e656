"""The task loglikelihood: rows of a prompt and a `continuation`, which is scored instead of made up.

A row's `continuation` is a text; everything else of a row is as under the task generate, but that no sampling parameter
means anything. A result has the columns of every result (`output` is "", `completion_tokens` counts the continuation)
and four more: `logprob`, `is_greedy`, `token_ids`, `token_logprobs`. Rows that share a prompt share its computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedllm.errors import RequestError
from pagedllm.outputs import RequestOutput
from pagedllm.prompts import Prompt, brief
from pagedllm.request import Request
from pagedllm.request_builder import ChatOptions, EncodedPrompt, RequestBuilder
from pagedllm.scoring import encode_pairs

LOGLIKELIHOOD = "loglikelihood"
TASKS = ("generate", LOGLIKELIHOOD)
COLUMN = "continuation"
SCORE_COLUMNS = ("logprob", "is_greedy", "token_ids", "token_logprobs")
PARAMS: Mapping[str, Any] = {"temperature": 0, "max_tokens": 0, "prompt_logprobs": 0, "detokenize": False}
NO_PARAMS = "sampling parameters mean nothing to the task loglikelihood: leave them out"


def continuation_of(values: Mapping[str, Any]) -> str:
    """Of a row's fields; RequestError where it has none."""
    text = values.get(COLUMN)
    if not isinstance(text, str) or not text:
        what = f"got {brief(text)}" if COLUMN in values else "the row has none"
        raise RequestError("invalid_parameter", f"{COLUMN} must be a text that is not empty: {what}", field=COLUMN)
    return text


def paired(builder: RequestBuilder, prompt: Prompt, continuation: str, chat: ChatOptions) -> EncodedPrompt:
    """Prompt and continuation as one, with their seam; RequestError where they cannot be scored."""
    try:
        (pair,) = encode_pairs(builder, [prompt], [[continuation]], False, chat)
    except RequestError as error:
        text = error.message.removeprefix("prompts[0]: ").replace("continuations[0]", COLUMN, 1)
        raise RequestError(error.code, text, field=error.field) from None
    return pair


def tell_end(request: Request) -> None:
    """A continuation that was scored is whole: no length cut it. Nothing is done to other requests."""
    if request.sampling_params.prompt_logprobs is not None and request.finish_reason == "length":
        request.finish_reason = "stop"


def score_columns(output: RequestOutput) -> dict[str, Any]:
    """The columns of a row that was scored, those that differ from other rows'."""
    scores = output.prompt_logprobs
    assert scores is not None
    values, token_ids = scores.rows.logprobs[:, 0], scores.rows.token_ids[:, 0].tolist()
    return {
        "prompt_tokens": len(output.prompt_token_ids) - len(token_ids),
        "completion_tokens": len(token_ids),
        "logprob": float(values.sum(dtype=float)),
        "is_greedy": bool(scores.rows.is_greedy.all()),
        "token_ids": token_ids,
        "token_logprobs": values.tolist(),
    }


def no_score() -> dict[str, Any]:
    """Of a row that failed."""
    return {"logprob": None, "is_greedy": None, "token_ids": [], "token_logprobs": []}
