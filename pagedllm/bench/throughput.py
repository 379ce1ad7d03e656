"""Throughput: output tokens per second of whole calls, loading excluded, engines alternating on the same token ids.

Each repetition draws new ids, so that no engine's prefix cache holds an earlier repetition; ratios are taken within a
repetition, because a machine's speed drifts between them. Knows an engine as a name and `run`, nothing more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pagedllm.bench.workloads import WorkloadRequest, make_workload
from pagedllm.errors import PagedLLMError

if TYPE_CHECKING:
    from pagedllm.llm import LLM

WARM_UP_REQUESTS = 4
WARM_UP_SEED = 1 << 32  # no repetition has it


@dataclass(frozen=True, slots=True)
class Measurement:
    """One call of an engine."""

    seconds: float
    num_output_tokens: int
    kv_waste: float | None = None  # share of the allocated KV slots without a token, over all steps; None: not known

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds


class MeasuredEngine(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
        """Generates all requests in one call, greedy, to their exact lengths."""
        ...


class OwnEngine:
    """pagedllm behind the protocol."""

    def __init__(self, llm: LLM) -> None:
        import pagedllm

        self.name = f"pagedllm {pagedllm.__version__}"
        self._llm = llm

    def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
        from pagedllm import SamplingParams

        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.num_output_tokens, detokenize=False)
            for request in requests
        ]
        before = self._llm.stats.copy()
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        token_ids = [output.outputs[0].token_ids for output in outputs]
        check_output_lengths(self.name, requests, token_ids)
        after = self._llm.stats
        num_wasted_slots = after.sum_wasted_slots - before.sum_wasted_slots
        num_allocated_slots = after.sum_allocated_slots - before.sum_allocated_slots
        return Measurement(seconds, sum(map(len, token_ids)), num_wasted_slots / num_allocated_slots)


@dataclass(frozen=True, slots=True)
class EngineResult:
    engine: str
    tokens_per_second: list[float]  # one per repetition
    median: float
    ratio: float | None  # median over the repetitions of (first engine / this one); None for the first itself
    kv_waste: float | None  # mean over the repetitions


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    workload: str
    num_requests: int
    num_prompt_tokens: int  # of the first repetition
    num_output_tokens: int
    engines: list[EngineResult]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_output_lengths(engine: str, requests: Sequence[WorkloadRequest], token_ids: Sequence[Sequence[int]]) -> None:
    """Raises PagedLLMError unless each request got exactly the tokens it asked for: else speeds do not compare."""
    wanted, got = [request.num_output_tokens for request in requests], [len(ids) for ids in token_ids]
    if len(got) != len(wanted):
        raise PagedLLMError(f"{engine} answered {len(got)} of {len(wanted)} requests")
    for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
        if want != have:
            raise PagedLLMError(f"{engine} gave {have} instead of {want} tokens for request {index}")


def measure_throughput(
    engines: Sequence[MeasuredEngine], workload: str, num_requests: int, vocab_size: int, repeat: int
) -> ThroughputReport:
    """Warms each engine up with a small call, then runs them in turn, `repeat` times."""
    warm_up = make_workload(workload, min(num_requests, WARM_UP_REQUESTS), vocab_size, WARM_UP_SEED)
    for engine in engines:
        engine.run(warm_up)
    measurements: list[list[Measurement]] = [[] for _ in engines]
    for seed in range(repeat):
        requests = make_workload(workload, num_requests, vocab_size, seed)
        for engine, of_engine in zip(engines, measurements, strict=True):
            of_engine.append(engine.run(requests))
    first = make_workload(workload, num_requests, vocab_size, seed=0)
    return ThroughputReport(
        workload=workload,
        num_requests=num_requests,
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in first),
        num_output_tokens=sum(request.num_output_tokens for request in first),
        engines=[
            _summarize(engine.name, of_engine, None if engine is engines[0] else measurements[0])
            for engine, of_engine in zip(engines, measurements, strict=True)
        ],
    )


def _summarize(name: str, measurements: Sequence[Measurement], of_first: Sequence[Measurement] | None) -> EngineResult:
    speeds = [measurement.tokens_per_second for measurement in measurements]
    ratio = None
    if of_first is not None:
        ratio = statistics.median(ours.tokens_per_second / speed for ours, speed in zip(of_first, speeds, strict=True))
    wastes = [measurement.kv_waste for measurement in measurements if measurement.kv_waste is not None]
    return EngineResult(name, speeds, statistics.median(speeds), ratio, statistics.mean(wastes) if wastes else None)
