"""StructuredOutputsParams: what an output must look like. vLLM's name and fields; only `choice` is here yet.

Plain data; SamplingParams holds one and checks it again on use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedllm.errors import NotSupportedError, RequestError
from pagedllm.keywords import checks_keywords, unknown_name

FIELD = "structured_outputs"
LATER = ("json", "regex", "grammar", "json_object", "structural_tag")


@checks_keywords({}, {})
@dataclass
class StructuredOutputsParams:
    """choice: the output is one of these texts, all of it and nothing else.

    A choice may be the beginning of another. Equal ones count once. A leading space is a part of a choice.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None

    def __post_init__(self) -> None:
        self.verify()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """From a row's {"choice": [...]}; RequestError for a key that there is not."""
        for name in values:
            if name not in cls.__dataclass_fields__:
                text = unknown_name(FIELD, name, list(cls.__dataclass_fields__), {})
                raise RequestError("invalid_parameter", text, field=FIELD)
        return cls(**values)

    def verify(self) -> None:
        """Raises RequestError naming the value, or NotSupportedError for what comes later."""
        for name in LATER:
            if getattr(self, name) not in (None, False):
                raise NotSupportedError(f"{FIELD}.{name} is not supported yet: choice=[...] is")
        choice = self.choice
        if not isinstance(choice, (list, tuple)) or not choice or not all(isinstance(c, str) and c for c in choice):
            text = f"{FIELD}.choice must be a non-empty list of texts, none of them empty, got {choice!r}"
            raise RequestError("invalid_parameter", text, field=FIELD)
