"""Reasoning: what a thinking model writes between its think tags, apart from its answer.

The tags are those of the vocabulary. A text opens the thought with its first word, or the prompt's last word opened it;
tags anywhere else are text. What is cut before the closing tag is all thought. Plain text functions.
"""

from __future__ import annotations

from dataclasses import dataclass

TAGS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Of one request to a thinking model: whether its prompt ends inside a thought."""

    is_open: bool

    def split(self, text: str) -> tuple[str, str]:
        """(reasoning, answer); newlines beside the tags belong to neither."""
        opening, closing = TAGS
        if not self.is_open:
            if not text.lstrip().startswith(opening):
                return "", text
            text = text.lstrip().removeprefix(opening)
        thought, _, answer = text.partition(closing)
        return thought.strip("\n"), answer.lstrip("\n")


def opens_thought(prompt: str) -> bool:
    return prompt.rstrip().endswith(TAGS[0])
