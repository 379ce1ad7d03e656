"""OpenAI batch lines: requests for /v1/chat/completions or /v1/completions in, responses in their form out.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}
    out  {"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": ...}, "error": null}

A refused request has status_code 400 and `body.error`; a line that is no request has no response, but an `error`.
Fields that would change the text and that we do not have are refused; those that cannot are ignored, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagedllm.errors import RequestError
from pagedllm.jobs.formats import JobRefused, LineError, Row, parse_object
from pagedllm.jobs.keys import EqualRows, hashed
from pagedllm.jobs.openai_answers import CHAT, COMPLETIONS, answer_line, recovered
from pagedllm.jobs.result_form import ResultForm, refuse_prompt_logprobs
from pagedllm.outputs import RequestOutput
from pagedllm.prompts import Prompt, brief, check_conversation
from pagedllm.sampling_params import SamplingParams, is_int

RENAMED = {"max_completion_tokens": "max_tokens"}
IGNORED = frozenset(
    [
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "stream_options",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    ]
)
NEUTRAL: dict[str, tuple[object, ...]] = {  # fields that we do not have, with the values that mean nothing
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}


class OpenAILines:
    """The format of one job; it must see the lines in their order."""

    def __init__(self) -> None:
        self.created = 0  # the start of the job, in seconds
        self.model: str | None = None  # the name that the lines ask for
        self.ignored: dict[str, None] = {}  # names of fields
        self._url: str | None = None
        self._custom_ids = EqualRows()

    def parse(self, line: bytes | None, index: int, fault: str = "") -> Row:
        """Raises JobRefused; whatever else is wrong with a line is its row's error."""
        raw: str | None = None
        try:
            values = parse_object(line, fault)
            raw = (line or b"").decode()
            custom_id, url, body = self._check_envelope(values)
            content = json.dumps(body, sort_keys=True).encode()
            prompt, params = self._read_body(url, body)
            return Row(index, prompt, params, raw, identity=hashed(custom_id.encode(errors="surrogatepass"), content))
        except LineError as error:
            return Row(index, Prompt(error=RequestError("invalid_json_line", str(error))), raw=raw)
        except RequestError as error:
            return Row(index, Prompt(error=error), raw=raw)

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError for what the answer could not hold."""
        refuse_prompt_logprobs(params)

    def values(self, output: RequestOutput) -> dict[str, Any]:
        """The columns of a result: lists where the line asked for several outputs, logprobs where it asked for them."""
        has_logprobs = bool(output.outputs) and output.outputs[0].logprobs is not None
        return ResultForm(max(1, len(output.outputs)), 0 if has_logprobs else None).values(output)

    def render(self, raw: str | None, columns: Mapping[str, Any], name: str) -> bytes:
        """The line of a result. name: hex digits that the row is known by."""
        return answer_line(raw, columns, name, self.created)

    def recovered(self, line: bytes, row: int) -> tuple[bytes, int, dict[str, Any]]:
        """A line of results as the journal has it: (id, row, columns), the answer as it is among them."""
        return recovered(line, row)

    def _check_envelope(self, values: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
        custom_id, url, body = values.get("custom_id"), values.get("url"), values.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise LineError(f"custom_id must be a string that is not empty, got {brief(custom_id)}")
        if values.get("method") != "POST":
            raise LineError(f"method must be 'POST', got {brief(values.get('method'))}")
        if url not in (CHAT, COMPLETIONS):
            raise LineError(f"url must be {CHAT} or {COMPLETIONS}, got {brief(url)}")
        if not isinstance(body, dict):
            raise LineError(f"body must be an object, got {brief(body)}")
        if self._custom_ids.number(hashed(custom_id.encode(errors="surrogatepass"))):
            raise RequestError("duplicate_custom_id", f"the custom_id {brief(custom_id)} stands on an earlier line")
        self._url = self._url or url
        if url != self._url:
            raise RequestError("url_mismatch", f"url is {url}, that of earlier lines is {self._url}")
        return custom_id, url, body

    def _read_body(self, url: str, body: Mapping[str, Any]) -> tuple[Prompt, dict[str, Any]]:
        self._note_model(body.get("model"))
        params: dict[str, Any] = {}
        for name, value in body.items():
            if name in ("messages", "prompt") or value is None:
                continue
            if name in ("logprobs", "top_logprobs"):
                params["logprobs"] = _num_logprobs(url, body)
            elif name in IGNORED:
                if name != "model":
                    self.ignored[name] = None
            elif name in NEUTRAL:
                if not any(value is neutral or value == neutral for neutral in NEUTRAL[name]):
                    raise RequestError("unsupported", f"{name}={brief(value)} is not supported", field=name)
            else:
                params[RENAMED.get(name, name)] = value
        if url == CHAT:
            if body.get("messages") is None:
                raise RequestError("invalid_parameter", "the body has no 'messages'", field="messages")
            return Prompt(messages=check_conversation(body["messages"], "messages")), params
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(is_int(item) for item in prompt):
            return Prompt(token_ids=prompt), params
        if not isinstance(prompt, str):
            text = f"prompt must be a string or a list of token ids, got {brief(prompt)}"
            raise RequestError("invalid_parameter", text, field="prompt")
        return Prompt(text=prompt), params

    def _note_model(self, model: object) -> None:
        if not isinstance(model, str) or not model:
            raise RequestError("invalid_parameter", f"model must be a name, got {brief(model)}", field="model")
        self.model = self.model or model
        if model != self.model:
            raise JobRefused(
                f"the lines ask for two models, {self.model!r} and {model!r}: one job runs one, split the file"
            )


def _num_logprobs(url: str, body: Mapping[str, Any]) -> object:
    """SamplingParams.logprobs: of a chat top_logprobs where logprobs is true, of a completion logprobs itself."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if url == COMPLETIONS:
        if top is not None:
            raise RequestError("invalid_parameter", "top_logprobs is for chat: use logprobs", field="top_logprobs")
        return wanted
    if not isinstance(wanted, (bool, type(None))):
        raise RequestError("invalid_parameter", f"logprobs must be a bool, got {brief(wanted)}", field="logprobs")
    if not wanted and top:
        raise RequestError("invalid_parameter", "top_logprobs needs logprobs=true", field="top_logprobs")
    return (top or 0) if wanted else None


def is_openai_line(line: bytes | None) -> bool:
    """Whether a first line makes its file a batch of OpenAI requests."""
    try:
        values = parse_object(line)
    except LineError:
        return False
    return "custom_id" in values and "body" in values and "prompt" not in values and "messages" not in values
