"""EngineStats: what an engine did since it was made. Counters only grow; a caller subtracts two copies.

Filled by the Scheduler (counts) and EngineCore (seconds); a rebuilt scheduler goes on with the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import ParamSpec, TypeVar

from pagedllm.request import FinishReason

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class EngineStats:
    num_blocks: int  # of the whole KV pool
    block_size: int

    num_steps: int = 0
    num_finished_requests: int = 0  # with "stop" or "length"
    num_failed_requests: int = 0
    num_aborted_requests: int = 0
    num_prompt_tokens: int = 0  # of admitted requests, each counted once
    num_cached_tokens: int = 0  # of those, taken from the prefix cache
    num_computed_tokens: int = 0  # that went through the model, recomputed ones again
    num_output_tokens: int = 0
    num_preemptions: int = 0

    num_running: int = 0  # after the latest step
    num_waiting: int = 0
    num_used_blocks: int = 0  # in the latest step
    peak_running: int = 0
    peak_num_blocks: int = 0  # allocated at once
    # Steps in which somebody waited that there was no room for, by what was full.
    num_steps_limited_by_seqs: int = 0
    num_steps_limited_by_tokens: int = 0
    num_steps_limited_by_blocks: int = 0
    # Summed over steps, so that ratios weigh each step alike.
    sum_allocated_slots: int = 0
    sum_wasted_slots: int = 0  # allocated to a request, no token in it

    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0  # on a GPU: to launch steps and to wait for them, not what ran beside the host
    update_seconds: float = 0.0

    def count_end(self, reason: FinishReason | None) -> None:
        if reason == "abort":
            self.num_aborted_requests += 1
        elif reason == "error":
            self.num_failed_requests += 1
        else:
            self.num_finished_requests += 1

    @property
    def kv_waste(self) -> float:
        """Share of the allocated slots that held no token, over all steps."""
        return self.sum_wasted_slots / max(1, self.sum_allocated_slots)

    @property
    def kv_use(self) -> float:
        """Share of the pool that was allocated, over all steps."""
        return self.sum_allocated_slots / max(1, self.num_steps * self.num_blocks * self.block_size)

    def copy(self) -> EngineStats:
        return replace(self)

    def timed(self, phase: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the function and adds its time to `<phase>_seconds`; nothing is added if it raises."""
        start = perf_counter()
        result = function(*args, **kwargs)
        name = f"{phase}_seconds"
        setattr(self, name, getattr(self, name) + perf_counter() - start)
        return result
