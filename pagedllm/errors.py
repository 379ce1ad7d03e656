"""The exceptions that pagedllm raises.

Knows nothing of the rest of the package. A RequestError belongs to one prompt and never costs another prompt its
answer; everything else means that the call, the model or the installation is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pagedllm.outputs import RequestOutput

ErrorCode = Literal[
    "prompt_too_long",
    "empty_prompt",
    "token_out_of_range",
    "invalid_parameter",
    "unsupported",
    "non_finite_logits",
    "never_fits",
    "template_error",
    "invalid_json_line",
    "duplicate_custom_id",
    "url_mismatch",
]


class PagedLLMError(Exception):
    """Base of every exception that pagedllm defines."""


class RequestError(PagedLLMError, ValueError):
    """One request cannot be served.

    Attributes:
        code: the machine-readable reason, the same in Python, in result rows and in reports.
        message: the sentence for people; also `str(error)`.
        index: place of the prompt in the call, or None where there is no list.
        field: the parameter at fault, or None.
    """

    def __init__(self, code: ErrorCode, message: str, index: int | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.index = index
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.index, self.field)


class BatchError(PagedLLMError):
    """Some requests failed while running; the others finished. `outputs` holds all of them, in input order."""

    def __init__(self, message: str, outputs: Sequence[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.outputs)


class NotSupportedError(PagedLLMError, NotImplementedError):
    """A known feature that this version does not have; the message names the way out."""


class ModelError(PagedLLMError, ValueError):
    """A model folder or file cannot be used; the message says which file, what is wrong and how to mend it."""


class NotEnoughMemoryError(PagedLLMError, ValueError, MemoryError):
    """The model, or a KV cache for it, does not fit; the message has the numbers. Another setting may mend it."""


class LibraryError(PagedLLMError, ImportError):
    """The compiled kernels are missing or do not fit; the message names the file, the cause and the build command."""
