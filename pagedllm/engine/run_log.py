"""RunLog: how a run went over time, in bounded memory; and from that, what limited it and how long the rest takes.

Fed after each step with the engine's counters (EngineStats); knows no requests and no texts. Times are those between
two steps as the caller sees them, so what is written to disk in between counts too.
"""

from __future__ import annotations

import math
import time
from array import array
from dataclasses import dataclass, fields

from pagedllm.engine.stats import EngineStats

MAX_SPANS = 256
FIRST_SPAN_SECONDS = 0.1
LIMITS = ("tokens", "seqs", "blocks")
MIN_SHARE = 0.05  # of the time that makes a limit worth a word


@dataclass(frozen=True, slots=True)
class Work:
    """All that a run has to do."""

    num_requests: int = 0
    num_input_tokens: int = 0  # of prompts, but for those that the prefix cache should have
    max_output_tokens: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.num_requests + other.num_requests,
            self.num_input_tokens + other.num_input_tokens,
            self.max_output_tokens + other.max_output_tokens,
        )


@dataclass(slots=True)
class Ended:
    """The requests that ran to their end so far, all together."""

    num_requests: int = 0
    num_stopped: int = 0  # before their limit
    num_allowed_tokens: int = 0  # their limits
    num_output_tokens: int = 0

    def add(self, num_output_tokens: int, max_output_tokens: int, finish_reason: str | None) -> None:
        self.num_requests += 1
        self.num_stopped += finish_reason == "stop"
        self.num_allowed_tokens += max_output_tokens
        self.num_output_tokens += num_output_tokens


@dataclass(slots=True)
class Span:
    """A stretch of time; sums over its steps."""

    seconds: float = 0.0
    num_steps: int = 0
    num_input_tokens: int = 0  # computed, of prompts
    num_output_tokens: int = 0
    num_admitted_tokens: int = 0  # of prompts that began
    num_cached_tokens: int = 0  # of those, from the prefix cache
    sum_running: int = 0
    sum_waiting: int = 0
    sum_used_blocks: int = 0

    def add(self, other: Span) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class RunLog:
    def __init__(self, stats: EngineStats) -> None:
        self._before = stats.copy()
        self._last = stats.copy()
        self._start = self._last_time = time.perf_counter()
        self._step_times = array("d", (0.0,))  # seconds from the start, at the end of each step
        self._span_seconds = FIRST_SPAN_SECONDS
        self._num_decoding = 0  # requests that decode in the next step
        self._fit = _Fit()
        self.spans: list[Span] = []
        self.total = Span()
        self.limited_seconds = dict.fromkeys(LIMITS, 0.0)
        self.peak_num_blocks = 0
        self.num_preemptions = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def restart_step(self, stats: EngineStats) -> None:
        """What the engine did since the last step is not the job's: a calibration, say."""
        self._last, self._last_time = stats.copy(), time.perf_counter()

    def note_step(self, stats: EngineStats) -> None:
        now, last = time.perf_counter(), self._last
        seconds = now - self._last_time
        num_computed = stats.num_computed_tokens - last.num_computed_tokens
        num_output = stats.num_output_tokens - last.num_output_tokens
        num_decoded = min(self._num_decoding, num_computed)
        num_ended = stats.num_finished_requests - last.num_finished_requests
        self._num_decoding = max(0, num_output - num_ended)  # who got a token and goes on
        span = Span(
            seconds,
            1,
            num_computed - num_decoded,
            num_output,
            stats.num_prompt_tokens - last.num_prompt_tokens,
            stats.num_cached_tokens - last.num_cached_tokens,
            stats.num_running,
            stats.num_waiting,
            stats.num_used_blocks,
        )
        self._fit.add(seconds, span.num_input_tokens, num_decoded)
        for name in LIMITS:
            counter = f"num_steps_limited_by_{name}"
            if getattr(stats, counter) > getattr(last, counter):
                self.limited_seconds[name] += seconds
        self.peak_num_blocks = max(self.peak_num_blocks, stats.num_used_blocks)
        self.num_preemptions += stats.num_preemptions - last.num_preemptions
        self._step_times.append(now - self._start)
        self._last, self._last_time = stats.copy(), now
        self.total.add(span)
        self._keep(span)

    def seconds_since(self, num_steps: int) -> float:
        """For a request that ended in the step not noted yet, after so many steps: how long it took."""
        if not num_steps:  # it had all its tokens already
            return 0.0
        return self.seconds - self._step_times[max(0, len(self._step_times) - num_steps)]

    def seconds_left(self, work: Work, ended: Ended) -> float | None:
        """By the tokens that are still to be computed, and what they cost so far; None before there is any."""
        if not self.total.num_output_tokens:
            return None
        num_running = self._last.num_running
        num_left = max(0, work.num_requests - ended.num_requests - num_running)
        limit = max(0, work.max_output_tokens - ended.num_allowed_tokens) / max(1, num_left + num_running)
        has = (self.total.num_output_tokens - ended.num_output_tokens) / max(1, num_running)
        rate = ended.num_stopped / self.total.num_output_tokens  # of ends per token, of outputs under way too
        num_output = num_left * _expected_tokens(limit, rate)
        num_output += num_running * _expected_tokens(max(0.0, limit - has), rate)
        num_input = max(0, work.num_input_tokens - self.total.num_input_tokens)
        per_input, per_output = self._fit.seconds_per_token()
        return num_input * per_input + num_output * per_output

    def limits(self, max_num_batched_tokens: int, max_num_seqs: int, num_blocks: int) -> list[str]:
        """What limited the run, the most important first, each with what it means."""
        if not self.total.num_input_tokens + self.total.num_output_tokens:  # rows that are refused or done need no step
            return []
        whole = max(self.total.seconds, 1e-9)
        shares = {name: seconds / whole for name, seconds in self.limited_seconds.items()}
        shares["rows"] = 1 - sum(shares.values())
        meaning = {
            "tokens": f"new tokens per step (max_num_batched_tokens {max_num_batched_tokens:,}): prompts fill them",
            "seqs": f"requests per step (max_num_seqs {max_num_seqs:,}): a larger max_num_seqs runs more at once",
            "blocks": f"KV cache ({num_blocks:,} blocks): a larger kv_cache_memory_bytes runs more at once",
            "rows": "nobody waited: the last ones ran with few beside them",
        }
        by_share = sorted(shares, key=lambda name: -shares[name])
        return [f"{100 * shares[name]:.0f} % {meaning[name]}" for name in by_share if shares[name] >= MIN_SHARE]

    def _keep(self, span: Span) -> None:
        if self.spans and self.spans[-1].seconds < self._span_seconds:
            self.spans[-1].add(span)
            return
        if len(self.spans) == MAX_SPANS:
            for first, second in zip(self.spans[::2], self.spans[1::2], strict=True):
                first.add(second)
            self.spans = self.spans[::2]
            self._span_seconds *= 2
        self.spans.append(span)


class _Fit:
    """Least squares of seconds = a x prompt tokens + b x decoded tokens; drawn to a = b where all steps are alike.

    The n-th step weighs n: long rows come first, and what is left is more like what was done lately.
    """

    def __init__(self) -> None:
        self._pp = self._pd = self._dd = self._tp = self._td = self._t = self._tokens = 0.0
        self._num_steps = 0

    def add(self, seconds: float, num_prompt: int, num_decoded: int) -> None:
        self._num_steps += 1
        weight = self._num_steps
        self._pp += weight * num_prompt * num_prompt
        self._pd += weight * num_prompt * num_decoded
        self._dd += weight * num_decoded * num_decoded
        self._tp += weight * seconds * num_prompt
        self._td += weight * seconds * num_decoded
        self._t += weight * seconds
        self._tokens += weight * (num_prompt + num_decoded)

    def seconds_per_token(self) -> tuple[float, float]:
        """Of prompts and of outputs; both together explain the whole time."""
        mean = self._t / max(1.0, self._tokens)
        pull = 1e-3 * (self._pp + self._dd) + 1e-9
        pp, dd = self._pp + pull, self._dd + pull
        tp, td = self._tp + pull * mean, self._td + pull * mean
        determinant = pp * dd - self._pd * self._pd
        a, b = (tp * dd - td * self._pd) / determinant, (td * pp - tp * self._pd) / determinant
        if a <= 0 or b <= 0:
            return mean, mean
        return a, b


def _expected_tokens(limit: float, rate: float) -> float:
    """Of an output that ends with this rate after each token, and at its limit."""
    if rate <= 0:
        return limit
    if rate >= 1:
        return min(limit, 1.0)
    return -math.expm1(limit * math.log1p(-rate)) / rate
