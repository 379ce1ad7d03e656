"""Throughput: output tokens per second of whole calls, loading excluded, engines alternating on the same token ids.

Each repetition draws new ids, so that no engine's prefix cache holds an earlier repetition; a repetition may run its
ids a second time, to see what such caches are worth across calls. Ratios are taken within a repetition, because a
machine's speed drifts between them. Knows an engine as a name and `run`, nothing more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pagedllm.bench.workloads import WorkloadRequest, make_workload
from pagedllm.errors import PagedLLMError

if TYPE_CHECKING:
    from pagedllm.bench.model_layers import ModelCost
    from pagedllm.llm import LLM

WARM_UP_REQUESTS = 4
WARM_UP_SEED = 1 << 32  # no repetition has it


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine of our own did in a call, as only it can know."""

    kv_waste: float  # share of the allocated KV slots without a token, over all steps
    num_computed_tokens: int
    flops: float  # of the products with weights
    linear_rate: float  # FLOP/s of our own products over the layers' shapes, measured right after the call
    read_bandwidth: float  # bytes/s of a 270 MB buffer, measured right after the call
    weight_read_rate: float | None  # of one request alone: packed bytes/s, if each output token reads all weights once


@dataclass(frozen=True, slots=True)
class Measurement:
    """One call of an engine."""

    seconds: float
    num_output_tokens: int
    work: Work | None = None  # None: a peer

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds


class MeasuredEngine(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
        """Generates all requests in one call to their exact lengths."""
        ...


class OwnEngine:
    """pagedllm behind the protocol."""

    def __init__(
        self,
        llm: LLM,
        cost: ModelCost,
        measure_machine: Callable[[], tuple[float, float]],
        *,
        is_greedy: bool = False,
    ) -> None:
        """cost: of this model; measure_machine: gives Work's linear_rate and read_bandwidth.

        is_greedy: ignores the requests' sampling, to be compared with an engine that does not.
        """
        import pagedllm

        self.name = f"pagedllm {pagedllm.__version__}" + (" greedy" if is_greedy else "")
        self._llm = llm
        self._cost = cost
        self._measure_machine = measure_machine
        self._is_greedy = is_greedy

    def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
        from pagedllm import SamplingParams

        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        params = [
            SamplingParams(
                ignore_eos=True,
                max_tokens=request.num_output_tokens,
                detokenize=False,
                **({"temperature": 0} if request.sampling is None or self._is_greedy else asdict(request.sampling)),
            )
            for request in requests
        ]
        if self._is_greedy:
            self._llm.reset_prefix_cache()  # the other engine, of the same LLM, has just had these prompts
        before = self._llm.stats.copy()
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        token_ids = [output.outputs[0].token_ids for output in outputs]
        check_output_lengths(self.name, requests, token_ids)
        after = self._llm.stats
        num_output_tokens = sum(map(len, token_ids))
        num_computed_tokens = after.num_computed_tokens - before.num_computed_tokens
        num_wasted_slots = after.sum_wasted_slots - before.sum_wasted_slots
        num_allocated_slots = after.sum_allocated_slots - before.sum_allocated_slots
        linear_rate, bandwidth = self._measure_machine()
        work = Work(
            kv_waste=num_wasted_slots / num_allocated_slots,
            num_computed_tokens=num_computed_tokens,
            flops=self._cost.flops(num_computed_tokens, num_output_tokens),
            linear_rate=linear_rate,
            read_bandwidth=bandwidth,
            weight_read_rate=self._cost.weight_bytes * num_output_tokens / seconds if len(requests) == 1 else None,
        )
        return Measurement(seconds, num_output_tokens, work)


@dataclass(frozen=True, slots=True)
class WorkResult:
    """Medians over the repetitions, but for kv_waste, which is the mean."""

    kv_waste: float
    num_computed_tokens: int
    gflops: float  # flops of the products / seconds of the whole call
    linear_gflops: float  # our own products over the layers' shapes at 512 rows
    linear_share: float  # median of gflops / linear_gflops of each repetition
    read_gbytes: float  # GB/s of a 270 MB buffer
    weight_read_gbytes: float | None  # of one request alone
    weight_read_share: float | None  # median of weight_read_rate / read_bandwidth of each repetition


@dataclass(frozen=True, slots=True)
class EngineResult:
    engine: str
    tokens_per_second: list[float]  # one per repetition
    median: float
    ratio: float | None  # median over the repetitions of (first engine / this one); None for the first itself
    work: WorkResult | None  # None: a peer


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    workload: str
    num_requests: int
    num_prompt_tokens: int  # of the first repetition
    num_output_tokens: int
    engines: list[EngineResult]
    second_call: list[EngineResult]  # the same ids again, or empty

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
    engines: Sequence[MeasuredEngine],
    workload: str,
    num_requests: int,
    vocab_size: int,
    repeat: int,
    *,
    has_second_call: bool = False,
) -> ThroughputReport:
    """Warms each engine up with a small call, then runs them in turn, `repeat` times.

    has_second_call: each repetition runs its ids in two rounds, so that a cache that outlives a call shows.
    """
    warm_up = make_workload(workload, min(num_requests, WARM_UP_REQUESTS), vocab_size, WARM_UP_SEED)
    for engine in engines:
        engine.run(warm_up)
    num_rounds = 2 if has_second_call else 1
    rounds: list[list[list[Measurement]]] = [[[] for _ in engines] for _ in range(num_rounds)]
    for seed in range(repeat):
        requests = make_workload(workload, num_requests, vocab_size, seed)
        for measurements in rounds:
            for engine, of_engine in zip(engines, measurements, strict=True):
                of_engine.append(engine.run(requests))
    first = make_workload(workload, num_requests, vocab_size, seed=0)
    results = [_summarize_round(engines, measurements) for measurements in rounds]
    return ThroughputReport(
        workload=workload,
        num_requests=num_requests,
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in first),
        num_output_tokens=sum(request.num_output_tokens for request in first),
        engines=results[0],
        second_call=results[1] if has_second_call else [],
    )


def _summarize_round(
    engines: Sequence[MeasuredEngine], measurements: Sequence[Sequence[Measurement]]
) -> list[EngineResult]:
    return [
        _summarize(engine.name, of_engine, None if engine is engines[0] else measurements[0])
        for engine, of_engine in zip(engines, measurements, strict=True)
    ]


def _summarize(name: str, measurements: Sequence[Measurement], of_first: Sequence[Measurement] | None) -> EngineResult:
    speeds = [measurement.tokens_per_second for measurement in measurements]
    ratio = None
    if of_first is not None:
        ratio = statistics.median(ours.tokens_per_second / speed for ours, speed in zip(of_first, speeds, strict=True))
    return EngineResult(name, speeds, statistics.median(speeds), ratio, _summarize_work(measurements))


def _summarize_work(measurements: Sequence[Measurement]) -> WorkResult | None:
    known = [(measurement.work, measurement.seconds) for measurement in measurements if measurement.work is not None]
    if not known:
        return None
    reads = [(work.weight_read_rate, work.read_bandwidth) for work, _ in known if work.weight_read_rate is not None]
    return WorkResult(
        kv_waste=statistics.mean(work.kv_waste for work, _ in known),
        num_computed_tokens=statistics.median_low(work.num_computed_tokens for work, _ in known),
        gflops=statistics.median(work.flops / seconds for work, seconds in known) / 1e9,
        linear_gflops=statistics.median(work.linear_rate for work, _ in known) / 1e9,
        linear_share=statistics.median(work.flops / seconds / work.linear_rate for work, seconds in known),
        read_gbytes=statistics.median(work.read_bandwidth for work, _ in known) / 1e9,
        weight_read_gbytes=statistics.median(rate for rate, _ in reads) / 1e9 if reads else None,
        weight_read_share=statistics.median(rate / bandwidth for rate, bandwidth in reads) if reads else None,
    )
