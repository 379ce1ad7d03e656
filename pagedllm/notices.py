"""Notices: what a user should know, as WARNING records of the logger "pagedllm", each text once per LLM.

The library adds no handler and sets no level; Python's own last resort writes warnings to stderr.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("pagedllm")


class Notices:
    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, text: str, level: int = logging.WARNING) -> None:
        if text not in self._told:
            self._told.add(text)
            LOGGER.log(level, "%s", text)
