"""PromptForm: how the fields of a plain row become its prompt, beyond sending `prompt` as it is.

A template replaces `{column}` for columns that exist and leaves every other brace alone; `chat` makes the prompt one
user message, behind a system message where there is one. What a row says itself comes first: its own messages stay,
and its own system message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagedllm.errors import RequestError
from pagedllm.prompts import Prompt, brief, check_conversation

NAME = r"[A-Za-z_]\w*"
NUM_LISTED = 4  # columns that an error names


@dataclass(frozen=True, slots=True)
class PromptForm:
    """pieces: of the template, text and column in turn; set by `bind`."""

    template: str | None = None
    is_chat: bool = False
    system: str | None = None
    pieces: tuple[str, ...] = ()

    def bind(self, columns: Collection[str]) -> PromptForm:
        """For an input of these columns. Raises ValueError for a `{word}` of the template that is none of them."""
        if self.template is None:
            return self
        names = [re.escape(name) for name in sorted(columns, key=len, reverse=True)]
        pieces = tuple(re.split(rf"\{{({'|'.join([*names, NAME])})\}}", self.template))
        for word in pieces[1::2]:
            if word not in columns:
                raise ValueError(f"the template's {{{word}}} is no column: the columns are {', '.join(columns)}")
        return replace(self, pieces=pieces)

    def settings(self) -> dict[str, Any]:
        """What decides which prompts the rows give."""
        return {"template": self.template, "chat": self.is_chat, "system": self.system}

    def prompt(self, values: Mapping[str, Any]) -> Prompt:
        """Raises RequestError for a row that has none, or one that is wrong."""
        text, messages = values.get("prompt"), values.get("messages")
        if self.template is not None:
            text, messages = _filled(self.pieces, values), None
        if text is not None and messages is not None:
            raise RequestError("invalid_parameter", "the row has both 'prompt' and 'messages'", field="prompt")
        if messages is not None:
            return Prompt(messages=self._with_system(check_conversation(messages, "messages")))
        if text is None:
            raise RequestError(
                "invalid_parameter", f"the row has neither 'prompt' nor 'messages'{_had(values)}", field="prompt"
            )
        if not isinstance(text, str):
            raise RequestError("invalid_parameter", f"prompt must be a string, got {brief(text)}", field="prompt")
        if self.is_chat:
            return Prompt(messages=self._with_system([{"role": "user", "content": text}]))
        return Prompt(text=text)

    def _with_system(self, messages: list[Any]) -> list[Any]:
        first = messages[0] if messages else None
        has_own = isinstance(first, Mapping) and first.get("role") in ("system", "developer")
        if self.system is None or not messages or has_own:
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def _had(values: Mapping[str, Any]) -> str:
    """What a row without a prompt has instead, in a few words."""
    names = [repr(name)[:40] for name in values if name not in ("prompt", "messages", "sampling_params")]
    if not names:
        return ""
    listed = ", ".join(names[:NUM_LISTED]) + (", ..." if len(names) > NUM_LISTED else "")
    return f", but {listed}: --template makes prompts of columns"


def _filled(pieces: Sequence[str], values: Mapping[str, Any]) -> str:
    """Values are never searched for columns themselves. Numbers and lists stand as JSON."""
    parts = list(pieces)
    for index in range(1, len(parts), 2):
        name = parts[index]
        value = values.get(name)
        if value is None:
            what = "is null" if name in values else "is not in the row"
            raise RequestError("invalid_parameter", f"the template's column {name!r} {what}", field=name)
        parts[index] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(parts)
