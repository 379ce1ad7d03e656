"""The runner's persistent rows: one per request in the batch, with its token ids and its block tables.

A plan tells only what is new, so a step's cost does not grow with the length of the requests. Arrays are numpy;
untouched parts of them cost address space only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class RequestRows:
    """Rows 0 .. max_num_seqs - 1, handed out and taken back by request id."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_kv_groups: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_tables = tuple(np.zeros((max_num_seqs, max_blocks), np.int32) for _ in range(num_kv_groups))
        self.num_tokens = np.zeros(max_num_seqs, np.int32)  # ids known, prompt and output
        self.num_blocks = np.zeros((num_kv_groups, max_num_seqs), np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.rope_variant = np.zeros(max_num_seqs, np.int32)
        self._row_of: dict[str, int] = {}  # the only record of who holds what: an interrupt cannot split it

    def __len__(self) -> int:
        return len(self._row_of)

    def row_of(self, request_id: str) -> int:
        return self._row_of[request_id]

    def acquire(self, request_id: str, num_prompt_tokens: int, rope_variant: int) -> int:
        assert request_id not in self._row_of
        held = set(self._row_of.values())
        row = self._row_of[request_id] = next(row for row in range(len(self.num_tokens)) if row not in held)
        self.num_tokens[row] = 0
        self.num_blocks[:, row] = 0
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.rope_variant[row] = rope_variant
        return row

    def release(self, request_id: str) -> int | None:
        """The row that became free; None if the request never reached the runner."""
        return self._row_of.pop(request_id, None)

    def append_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        begin = int(self.num_tokens[row])
        self.token_ids[row, begin : begin + len(token_ids)] = token_ids
        self.num_tokens[row] = begin + len(token_ids)

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """block_ids: per KV group."""
        for group, ids in enumerate(block_ids):
            if ids:
                begin = int(self.num_blocks[group, row])
                self.block_tables[group][row, begin : begin + len(ids)] = ids
                self.num_blocks[group, row] = begin + len(ids)

    def block_table(self, group: int, rows: NDArray[np.intp]) -> NDArray[np.int32]:
        """[len(rows), longest table among them], a copy."""
        width = max(1, int(self.num_blocks[group, rows].max(initial=1)))
        return self.block_tables[group][rows, :width]
