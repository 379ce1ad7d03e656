"""JobReport: what became of a job, so far or at its end. Counts only; nothing in it is a row's text but one error."""

from __future__ import annotations

from dataclasses import dataclass

from pagedllm.outputs import RequestOutput


@dataclass(slots=True)
class JobReport:
    """Rows of earlier runs count as rows, failures and cuts; tokens, hits and seconds are this run's."""

    num_rows: int = 0
    num_resumed: int = 0  # of those, done by an earlier run
    num_equal: int = 0  # of those, answered by an equal row's result
    num_failed: int = 0
    num_cut: int = 0  # ended by a length
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0
    peak_num_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    bytes_per_block: int = 0
    first_error: str = ""

    def count(self, output: RequestOutput, num_rows: int = 1) -> None:
        """num_rows: how many rows of the input have this result."""
        self.num_rows += num_rows
        self.num_equal += num_rows - 1
        if output.error is not None:
            self.num_failed += num_rows
            self.first_error = self.first_error or f"row {output.index}: {output.error.code}: {output.error.message}"
            return
        self.num_cut += num_rows if any(one.finish_reason == "length" for one in output.outputs) else 0
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_completion_tokens += sum(len(one.token_ids) for one in output.outputs)
        self.num_cached_tokens += output.num_cached_tokens
        self.num_preemptions += output.metrics.num_preemptions if output.metrics else 0

    def count_resumed(self, num_rows: int, num_failed: int, num_cut: int) -> None:
        self.num_rows += num_rows
        self.num_resumed += num_rows
        self.num_failed += num_failed
        self.num_cut += num_cut
