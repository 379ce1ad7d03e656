"""Detokenizer: what the engine must be able to ask of a tokenizer. `pagedllm.tokenizer.Tokenizer` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pagedllm.request import Request


class TextStream(Protocol):
    """The text of a growing output; the pieces joined are what `decode` gives for all its tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens: never half a character, never taken back."""
        ...

    def finish(self) -> str:
        """The rest, when no token follows."""
        ...


class Detokenizer(Protocol):
    def decode(self, request: Request) -> str:
        """The text of `request.text_token_ids`, as it reads after the prompt, by its sampling_params."""
        ...

    def stream(self, request: Request) -> TextStream:
        """A stream that stands behind the prompt, and behind no output token yet."""
        ...
