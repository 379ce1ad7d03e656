"""A scheduler without an engine around it, and one step of it."""

from __future__ import annotations

from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.engine.policy import FCFSPolicy, Policy
from pagedllm.engine.scheduler import Scheduler
from pagedllm.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagedllm.request import Request, TokenLogprobs
from tests.engine.fakes import assert_manager_conserved


def make_scheduler(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 100,
    max_model_len: int = 1000,
    policy: Policy | None = None,
    enable_prefix_caching: bool = True,
) -> Scheduler:
    return Scheduler(
        KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=policy or FCFSPolicy(),
    )


def append(request: Request, token_id: int, logprobs: TokenLogprobs | None) -> bool:
    """As OutputProcessor, but ends by length only."""
    request.token_ids.append(token_id)
    if request.num_output_tokens >= request.max_output_tokens:
        request.finish_reason = "length"
    return request.finish_reason is not None


def results(plan: SchedulerOutput, token_id: int = 7, failed: tuple[str, ...] = ()) -> ModelRunnerOutput:
    """Samples token_id wherever the last token was computed."""
    is_last = [s.num_computed_tokens + s.num_new_tokens > s.first_logits_index for s in plan.scheduled]
    is_finite = [s.request_id not in failed for s in plan.scheduled]
    sampled = [(token_id,) if last and finite else () for last, finite in zip(is_last, is_finite, strict=True)]
    return ModelRunnerOutput(sampled, is_finite)


def update(scheduler: Scheduler, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[Request]:
    scheduler.update(plan, result, append)
    ended = scheduler.ended
    scheduler.forget_ended({request.request_id for request in ended})
    return ended


def step(
    scheduler: Scheduler, token_id: int = 7, failed: tuple[str, ...] = ()
) -> tuple[SchedulerOutput, list[Request]]:
    plan = scheduler.schedule()
    ended = update(scheduler, plan, results(plan, token_id, failed))
    assert_manager_conserved(scheduler.kv_cache)
    return plan, ended


def shares(plan: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(s.request_id, s.num_computed_tokens, s.num_new_tokens) for s in plan.scheduled]
