"""OutputOutlook: how long outputs are expected to be, by those that ended. The Scheduler leaves room accordingly."""

from __future__ import annotations

from pagedllm.kv_groups import KVGroups
from pagedllm.request import Request


class OutputOutlook:
    """The share of their limit that outputs before took, half of it at first."""

    def __init__(self) -> None:
        self._num_tokens, self._num_allowed = 512, 1024

    def learn(self, request: Request) -> None:
        self._num_tokens += request.num_output_tokens
        self._num_allowed += request.max_output_tokens

    def num_output_tokens(self, request: Request) -> int:
        """More than the request has, no more than it may have."""
        expected = request.max_output_tokens * self._num_tokens // self._num_allowed
        return min(request.max_output_tokens, max(expected, request.num_output_tokens + 1))

    def num_blocks_ahead(self, request: Request, groups: KVGroups) -> int:
        """That the request is expected to take yet, besides those of its present tokens; at least one a group."""
        num_to_come = self.num_output_tokens(request) - request.num_output_tokens
        return groups.num_blocks_ahead(len(request.token_ids), num_to_come)
