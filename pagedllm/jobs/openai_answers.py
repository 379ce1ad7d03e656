"""Result columns -> the line of an OpenAI batch's results, and such a line back to columns.

A rejected request has status_code 400 and `body.error`; a line that is no request has no response, but an `error`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from pagedllm.jobs.formats import LINE_BREAKS
from pagedllm.jobs.journal import UNKNOWN_TOKENS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LINE_ERRORS = ("invalid_json_line", "duplicate_custom_id", "url_mismatch")
NEVER = -9999.0  # the logprob of a token that cannot come
ID_PREFIX = "batch_req_"


def answer_line(raw: str | None, columns: Mapping[str, Any], name: str, created: int) -> bytes:
    """raw: the request's line; name: hex digits for the ids; created: seconds."""
    request: dict[str, Any] = json.loads(raw) if raw is not None else {}
    custom_id = request.get("custom_id")
    if "answer" in columns:
        response, line_error = columns["answer"]["response"], columns["answer"]["error"]
    else:
        response, line_error = _answer(request, columns, name, created)
    result = {
        "id": ID_PREFIX + name,
        "custom_id": custom_id if isinstance(custom_id, str) else None,
        "response": response,
        "error": line_error,
    }
    try:
        return (json.dumps(result, ensure_ascii=False).translate(LINE_BREAKS) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair in custom_id, say
        return (json.dumps(result) + "\n").encode()


def recovered(line: bytes, row: int) -> tuple[bytes, int, dict[str, Any]]:
    """(id, row, columns) of a result's line; the answer stands among the columns as it is."""
    values = json.loads(line)
    response, error = values["response"], values["error"]
    columns = {"output": "", "finish_reason": "error", "stop_reason": "", "prompt_tokens": 0, "completion_tokens": 0}
    if response is not None and response["status_code"] == 200:
        choices, usage = response["body"]["choices"], response["body"]["usage"]
        reasons = [choice["finish_reason"] for choice in choices]
        columns["finish_reason"] = "length" if "length" in reasons else "stop"
        columns["prompt_tokens"] = usage["prompt_tokens"]
        columns["completion_tokens"] = usage["completion_tokens"] if len(choices) == 1 else UNKNOWN_TOKENS
        columns["error"] = ""
    else:
        what = error or response["body"]["error"]
        columns["error"] = f"{what['code']}: {what['message']}"
    name = bytes.fromhex(values["id"].removeprefix(ID_PREFIX))
    return name, row, {**columns, "answer": {"response": response, "error": error}}


def _answer(
    request: Mapping[str, Any], columns: Mapping[str, Any], name: str, created: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The response, or the error of the line."""
    code, _, message = str(columns["error"]).partition(": ")
    if code in LINE_ERRORS:
        return None, {"code": code, "message": message}
    request_id = f"req-{name}"
    if code:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        return {"status_code": 400, "request_id": request_id, "body": {"error": error}}, None
    is_chat = request["url"] == CHAT
    num_in, num_out = columns["prompt_tokens"], columns["completion_tokens"]
    num_top = request["body"].get("top_logprobs") or 0
    choices = [_choice(is_chat, index, one, num_top) for index, one in enumerate(_each(columns))]
    num_out = sum(num_out) if isinstance(num_out, list) else num_out
    body = {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + name,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": request["body"]["model"],
        "choices": choices,
        "usage": {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out},
    }
    return {"status_code": 200, "request_id": request_id, "body": body}, None


def _each(columns: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The columns of each output."""
    if not isinstance(columns["output"], list):
        return [columns]
    names = [name for name, value in columns.items() if isinstance(value, list)]
    return [{name: columns[name][i] for name in names} for i in range(len(columns["output"]))]


def _choice(is_chat: bool, index: int, columns: Mapping[str, Any], num_top: int) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": columns["output"], "refusal": None}
    else:
        choice["text"] = columns["output"]
    logprobs = None
    if "token_ids" in columns:
        logprobs = _chat_logprobs(columns, num_top) if is_chat else _completion_logprobs(columns)
    return choice | {"logprobs": logprobs, "finish_reason": columns["finish_reason"]}


def _chat_logprobs(columns: Mapping[str, Any], num_top: int) -> dict[str, Any]:
    content = []
    for token_id, top in zip(columns["token_ids"], columns["top_logprobs"], strict=True):
        own = next(one for one in top if one["token_id"] == token_id)
        content.append({**_entry(own), "top_logprobs": [_entry(one) for one in top[:num_top]]})
    return {"content": content, "refusal": None}


def _entry(one: Mapping[str, Any]) -> dict[str, Any]:
    """bytes: None for a part of a character, whose bytes the text does not show."""
    token = one["token"]
    return {
        "token": token,
        "logprob": _finite(one["logprob"]),
        "bytes": None if "\ufffd" in token else list(token.encode()),
    }


def _completion_logprobs(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The sampled token is always among the top ones, so there may be one more of them."""
    tops = columns["top_logprobs"]
    tokens = [
        next(one["token"] for one in top if one["token_id"] == token_id)
        for token_id, top in zip(columns["token_ids"], tops, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(value) for value in columns["token_logprobs"]],
        "top_logprobs": [{one["token"]: _finite(one["logprob"]) for one in top} for top in tops],
        "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
    }


def _finite(value: float | None) -> float:
    return NEVER if value is None else value
