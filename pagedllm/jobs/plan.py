"""JobPlan: what a job is about to do, told before it does it; and a short calibration for how long that takes.

Everything is counted from the rows as they were scanned (planned.py); only the time is measured, on a few prompts of
the job cut short, in the engine that will run it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagedllm.assembly import Assembly
from pagedllm.driver import drive
from pagedllm.engine.run_log import Work
from pagedllm.request import Request
from pagedllm.request_builder import EncodedPrompt
from pagedllm.sampling_params import SamplingParams

EXPECTED_SHARE = 0.5  # of its limit that an output is expected to take, as OutputOutlook begins
NUM_OUTPUT_TOKENS = 16  # of a calibrating request; it is aborted before
NUM_DECODE_STEPS = 8
PROMPT_STEPS = 2  # steps full of prompt tokens: the first is slow, memory is touched for the first time
WORTH_MEASURING = 20  # times the calibration's tokens that a job must have
LOGGED_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, of num_running requests together."""

    input_rate: float
    output_rate: float
    num_running: int


@dataclass(frozen=True, slots=True)
class JobPlan:
    engine: Mapping[str, Any]  # as LLM.info tells
    num_rows: int
    is_whole: bool  # False: only the first window of a job with more rows
    num_done: int  # of these rows, by an earlier run
    num_refused: int
    num_equal: int  # answered by an equal row's result
    num_to_run: int
    num_prompt_tokens: int  # of the rows to run
    num_equal_tokens: int  # prompt tokens of rows that are equal to one
    num_shared_tokens: int  # prompt tokens that stand in another prompt before, so that the prefix cache can have them
    num_samples: int  # of these rows: more where a row asks for several outputs that differ
    max_output_tokens: int  # of all of them together
    num_blocks_wanted: int  # by all rows at once, each shared block once, with outputs as long as expected
    num_blocks: int
    bytes_per_block: int
    first_prompt: str  # as the model sees it; "" where no row can run
    speed: Speed | None = None

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens that must be computed, if the cache keeps all that is shared."""
        return self.num_prompt_tokens - self.num_shared_tokens

    @property
    def work(self) -> Work:
        return Work(self.num_samples, self.num_new_tokens, self.max_output_tokens)

    def seconds(self, output_share: float) -> float | None:
        """How long it takes if outputs take this share of their limits; None where nothing was measured."""
        if self.speed is None:
            return None
        num_output_tokens = output_share * self.max_output_tokens
        return self.num_new_tokens / self.speed.input_rate + num_output_tokens / self.speed.output_rate

    @property
    def num_at_once(self) -> int:
        """About how many rows run together."""
        mean = max(1.0, self.num_blocks_wanted / max(1, self.num_to_run))
        return max(1, min(int(self.engine["max_num_seqs"]), self.num_to_run, int(self.num_blocks / mean)))

    def text(self, max_prompt_characters: int = 2000) -> str:
        """Lines for people."""
        engine = self.engine
        lines = [
            f"model        {engine['model']}",
            f"engine       {engine['device']}, {engine['dtype']}, {engine['kernels']} kernels, "
            f"{engine['num_threads']} threads, max_num_seqs {engine['max_num_seqs']}, "
            f"max_num_batched_tokens {engine['max_num_batched_tokens']}",
            f"rows         {self.num_rows:,}{'' if self.is_whole else ' in the first window, more follow'}: "
            f"{self.num_done:,} done before, {self.num_refused:,} refused, {self.num_equal:,} equal to another, "
            f"{self.num_to_run:,} to run",
            f"tokens       in {self.num_prompt_tokens:,}, out at most {self.max_output_tokens:,}",
            f"saved        {self.num_equal_tokens:,} input tokens of equal rows; "
            f"{self.num_shared_tokens:,} in shared prefixes "
            f"({100 * self.num_shared_tokens / max(1, self.num_prompt_tokens):.0f} % of the input)",
            f"KV cache     {self.num_blocks:,} blocks of {engine['block_size']} tokens "
            f"({_gib(self.num_blocks * self.bytes_per_block)}); all rows at once would take "
            f"{self.num_blocks_wanted:,}: about {self.num_at_once:,} run at a time",
            f"time         {self._time()}",
        ]
        if self.first_prompt:
            lines.append(f"first prompt {_quoted(self.first_prompt, max_prompt_characters)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For a report: numbers only, not the prompt."""
        values = {
            name: getattr(self, name) for name in self.__slots__ if name not in ("engine", "first_prompt", "speed")
        }
        values["expected_seconds"], values["most_seconds"] = self.seconds(EXPECTED_SHARE), self.seconds(1.0)
        return values

    def _time(self) -> str:
        if self.speed is None:
            return "not measured for so few tokens" if self.num_to_run else "nothing to run"
        expected, most = self.seconds(EXPECTED_SHARE), self.seconds(1.0)
        assert expected is not None
        assert most is not None
        return (
            f"about {duration(expected)} if outputs take half of their max_tokens, {duration(most)} if all "
            f"(measured: in {self.speed.input_rate:,.0f} tokens/s, out {self.speed.output_rate:,.0f} tokens/s "
            f"with {self.speed.num_running} rows at a time)"
        )


def measure_speed(assembly: Assembly, prompts: Sequence[Sequence[int]]) -> Speed | None:
    """Runs the beginnings of these prompts for some steps, in about a second; None where they tell nothing.

    The requests have block hashes of their own, so neither they nor the job hit each other's blocks.
    """
    builder, scheduler = assembly.builder, assembly.engine.scheduler
    num_seqs = max(1, min(len(prompts), assembly.max_num_seqs))
    room = max(1, builder.max_model_len - NUM_OUTPUT_TOKENS)
    length = max(1, min(PROMPT_STEPS * scheduler.max_num_batched_tokens // num_seqs, room))
    blocks_each = -(-(length + NUM_OUTPUT_TOKENS) // assembly.block_size)
    num_seqs = max(1, min(num_seqs, assembly.num_blocks // blocks_each))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS, detokenize=False)
    requests: list[Request] = []
    for index, prompt in enumerate(prompts[:num_seqs]):
        cut = EncodedPrompt(None, list(prompt[:length]))
        request = builder.build(f"calibration-{index}", index, cut, params, seed=index)
        request.extra_keys = (*request.extra_keys, "calibration", index)
        requests.append(request)
    steps = _timed_steps(assembly, requests)
    output_seconds = sorted(step.seconds / step.num_decoding for step in steps if not step.num_prompt_tokens)
    fullest = max(reversed(steps), key=lambda step: step.num_prompt_tokens, default=None)
    if not output_seconds or fullest is None:
        return None
    each = output_seconds[len(output_seconds) // 2]
    input_seconds = max(fullest.seconds - fullest.num_decoding * each, fullest.seconds / 4)
    return Speed(fullest.num_prompt_tokens / input_seconds, 1 / each, steps[-1].num_decoding)


class _Step(NamedTuple):
    seconds: float
    num_prompt_tokens: int
    num_decoding: int  # requests that compute an output token


def _timed_steps(assembly: Assembly, requests: Sequence[Request]) -> list[_Step]:
    to_add: Sequence[Request] | None = requests

    def source(num_in_flight: int) -> Sequence[Request] | None:
        nonlocal to_add
        added, to_add = to_add, None
        return added

    stats, timed = assembly.engine.stats, []
    num_decode_steps = 0
    with contextlib.closing(drive(assembly.engine, source)) as steps:
        while num_decode_steps < NUM_DECODE_STEPS:
            num_decoding = sum(request.num_output_tokens > 0 for request in requests)
            num_computed, begin = stats.num_computed_tokens, time.perf_counter()
            ended = next(steps, None)
            if ended is None or ended:  # a request that ends, or fails, would blur what a step is
                break
            seconds = time.perf_counter() - begin
            timed.append(_Step(seconds, stats.num_computed_tokens - num_computed - num_decoding, num_decoding))
            num_decode_steps += timed[-1].num_prompt_tokens == 0
    return timed


def is_worth_measuring(assembly: Assembly, num_tokens: int) -> bool:
    """Whether a job of so many tokens takes much longer than `measure_speed`."""
    budget = assembly.engine.scheduler.max_num_batched_tokens
    return num_tokens >= WORTH_MEASURING * (PROMPT_STEPS * budget + NUM_DECODE_STEPS * assembly.max_num_seqs)


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _quoted(text: str, max_characters: int) -> str:
    """On one line, with what is cut off counted."""
    rest = len(text) - max_characters
    quoted = json.dumps(text[:max_characters], ensure_ascii=False)
    return f"{quoted} and {rest:,} more characters" if rest > 0 else quoted


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"
