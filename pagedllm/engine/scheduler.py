"""Scheduler: whose tokens are computed next. A pure function of its requests: no clock, no set order, no torch.

One rule: each step hands out at most max_num_batched_tokens tokens to requests whose num_computed_tokens lags behind
their tokens, running ones first, then admissions, both in policy order. There is no prefill and no decode. A request
without room preempts the policy's victim, which starts again from what the cache still holds; nobody is admitted in a
step that preempted, so a pending block is never withdrawn from under a request of the same plan by preemption.
Called by EngineCore: `schedule` makes a plan, `update` takes its results.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Collection
from itertools import repeat

from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.engine.policy import Policy, PolicyKey
from pagedllm.engine.scheduler_output import ModelRunnerOutput, NewRequestData, ScheduledRequest, SchedulerOutput
from pagedllm.engine.stats import EngineStats
from pagedllm.errors import RequestError
from pagedllm.request import Request, RequestStatus, TokenLogprobs

AppendToken = Callable[[Request, int, "TokenLogprobs | None"], bool]  # True: the request ended with this token
NUM_DUMPED = 8
NON_FINITE_ADVICE = "the model's weights may be damaged, or overflow in this dtype; try dtype='float32'"


class OutputOutlook:
    """How long outputs are expected to be: the share of their limit that those before took, half of it at first."""

    def __init__(self) -> None:
        self._num_tokens, self._num_allowed = 512, 1024

    def learn(self, request: Request) -> None:
        self._num_tokens += request.num_output_tokens
        self._num_allowed += request.max_output_tokens

    def num_output_tokens(self, request: Request) -> int:
        """More than the request has, no more than it may have."""
        expected = request.max_output_tokens * self._num_tokens // self._num_allowed
        return min(request.max_output_tokens, max(expected, request.num_output_tokens + 1))


class Scheduler:
    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy,
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.stats = EngineStats(kv_cache.pool.num_blocks, kv_cache.block_size)
        self.requests: dict[str, Request] = {}  # that have not ended
        self.running: list[Request] = []  # in policy order
        self.ended: list[Request] = []  # and were not handed out yet
        self._waiting: list[tuple[PolicyKey, int, Request]] = []  # a heap, in which aborted ones stay for a while
        self._num_aborted_waiting = 0
        self._num_arrivals = 0
        self._outlook = OutputOutlook()
        self._held_rows: dict[str, None] = {}  # ids that the runner has a row for
        self._released: list[str] = []  # ids to tell in the next plan
        self._last_released: tuple[str, ...] = ()  # in the latest plan, which may have failed

    def emptied(self) -> Scheduler:
        """A scheduler with the same settings and counters, and no request; its first plan releases all rows."""
        scheduler = Scheduler(
            self.kv_cache.emptied(),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            policy=self.policy,
        )
        scheduler.stats = self.stats
        scheduler._num_arrivals = self._num_arrivals
        scheduler._outlook = self._outlook
        scheduler._released = list(dict.fromkeys((*self._last_released, *self._released, *self._held_rows)))
        return scheduler

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `schedule` and `update` have something to do or to give back."""
        return bool(self.requests or self.ended)

    def add(self, request: Request) -> None:
        """Takes a request; one that can never run ends at once."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        error = self._check(request)
        if error is not None:
            self.fail(request, error)
            return
        # The last token of an output gets no slot: nothing is computed from it.
        limit = min(self.max_model_len, self.kv_cache.num_slots + 1)
        request.max_output_tokens = min(request.max_output_tokens, limit - request.num_prompt_tokens)
        if request.num_output_tokens >= request.max_output_tokens:
            request.finish_reason = "length"
            self._end(request)
        else:
            self._wait(request)

    def abort(self, request: Request) -> None:
        is_waiting = request.status is not RequestStatus.RUNNING
        self.kv_cache.stop_expecting(request)
        request.finish_reason = "abort"
        self._end(request)
        if is_waiting:
            self._num_aborted_waiting += 1
            if 2 * self._num_aborted_waiting > len(self._waiting):
                self._waiting = [entry for entry in self._waiting if not entry[-1].is_finished]
                heapq.heapify(self._waiting)
                self._num_aborted_waiting = 0

    def fail(self, request: Request, error: RequestError) -> None:
        request.error = error
        request.finish_reason = "error"
        self._end(request)

    def forget_ended(self, request_ids: Collection[str]) -> None:
        """The caller has handed these out."""
        self.ended = [request for request in self.ended if request.request_id not in request_ids]

    # The plan

    def schedule(self) -> SchedulerOutput:
        """The next plan. Raises RuntimeError with a dump rather than make one that gets nobody further."""
        scheduled: dict[str, ScheduledRequest] = {}
        blocks_to_copy = self.kv_cache.take_blocks_to_copy()
        budget, has_preempted = self._schedule_running(scheduled, self.max_num_batched_tokens)
        if not has_preempted:
            budget = self._schedule_admissions(scheduled, budget)
        if not scheduled and not self.ended:
            raise RuntimeError(f"no request can advance: {self.dump()}")
        self._last_released = tuple(self._released)
        self._released.clear()
        num_tokens = self.max_num_batched_tokens - budget
        return SchedulerOutput(tuple(scheduled.values()), self._last_released, blocks_to_copy, num_tokens)

    def _schedule_running(self, scheduled: dict[str, ScheduledRequest], budget: int) -> tuple[int, bool]:
        """Returns the budget that is left, and whether somebody was preempted."""
        allocate_slots, is_running = self.kv_cache.allocate_slots, RequestStatus.RUNNING
        has_preempted = False
        for request in tuple(self.running):
            if not budget:
                break
            if request.status is not is_running:  # preempted just now
                continue
            num_computed_tokens = request.num_computed_tokens
            last_index = len(request.token_ids) - 1
            num_new_tokens = min(last_index + 1 - num_computed_tokens, budget)
            new_block_ids = allocate_slots(request, num_new_tokens)
            while new_block_ids is None and request.status is is_running:
                has_preempted = True
                budget += self._preempt_victim(scheduled)
                if request.status is is_running:
                    new_block_ids = allocate_slots(request, num_new_tokens)
            if new_block_ids is not None:
                budget -= num_new_tokens
                request_id = request.request_id
                scheduled[request_id] = ScheduledRequest(
                    request_id, num_computed_tokens, num_new_tokens, (), (), new_block_ids, last_index
                )
        return budget, has_preempted

    def _schedule_admissions(self, scheduled: dict[str, ScheduledRequest], budget: int) -> int:
        """Looks at the head of the waiting queue only; returns the budget that is left.

        A request is admitted if all its present tokens fit and each running one could still take one more block a KV
        group: they will ask for it within block_size steps. A policy that plans ahead leaves room for all that they are
        expected to ask for, and this one too, unless nobody runs.
        """
        num_spare = self._num_blocks_to_come()
        while budget and self._waiting and len(self.running) < self.max_num_seqs:
            request = self._waiting[0][-1]
            if request.is_finished:
                heapq.heappop(self._waiting)
                self._num_aborted_waiting -= 1
                continue
            last_index = len(request.token_ids) - 1  # the only logits wanted, and never taken from the cache
            computed_blocks = self.kv_cache.get_computed_blocks(request, last_index)
            num_own = self._num_blocks_ahead(request) if self.policy.plans_ahead and self.running else 0
            if not self.kv_cache.can_admit(request, computed_blocks, num_spare + num_own):
                break
            num_spare += max(num_own, len(self.kv_cache.groups))
            heapq.heappop(self._waiting)
            num_cached_tokens = self.kv_cache.admit(request, computed_blocks)
            self._count_admission(request, num_cached_tokens)
            request.num_computed_tokens = num_cached_tokens
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=self.policy.admission_key)
            num_new_tokens = min(last_index + 1 - num_cached_tokens, budget)
            new_block_ids = self.kv_cache.allocate_slots(request, num_new_tokens)
            assert new_block_ids is not None
            budget -= num_new_tokens
            self._held_rows[request.request_id] = None
            scheduled[request.request_id] = ScheduledRequest(
                request.request_id,
                num_cached_tokens,
                num_new_tokens,
                new_token_ids=tuple(request.token_ids),
                new_block_ids=self.kv_cache.block_ids(request),
                first_logits_index=last_index,
                new_request=NewRequestData(
                    request.num_prompt_tokens,
                    request.sampling_params,
                    request.seed,
                    request.eos_token_ids,
                    request.rope_variant,
                    bad_word_ids=request.bad_word_ids,
                ),
            )
        return budget

    def _num_blocks_to_come(self) -> int:
        """Blocks to leave free for those that run."""
        if not self.policy.plans_ahead or not self._waiting:
            return len(self.running) * len(self.kv_cache.groups)
        return sum(map(self._num_blocks_ahead, self.running))

    def _num_blocks_ahead(self, request: Request) -> int:
        """That the request is expected to take yet, besides those of its present tokens."""
        num_to_come = self._outlook.num_output_tokens(request) - request.num_output_tokens
        return self.kv_cache.num_blocks_ahead(len(request.token_ids), num_to_come)

    def _preempt_victim(self, scheduled: dict[str, ScheduledRequest]) -> int:
        """Preempts the policy's choice, and drops it from the plan; returns the tokens it had been given there."""
        candidates = self.running[1:]  # the first is never preempted: something always advances
        if not candidates:
            raise RuntimeError(f"one request alone finds no free block: {self.dump()}")
        victim = max(candidates, key=self.policy.victim_key)
        num_tokens = 0
        for request in self._preempt(victim):
            dropped = scheduled.pop(request.request_id, None)
            num_tokens += dropped.num_new_tokens if dropped is not None else 0
        return num_tokens

    def _preempt(self, victim: Request) -> list[Request]:
        """Makes the victim wait again, and all who counted on blocks that it does not compute now; returns them."""
        preempted = [victim, *self.kv_cache.withdraw(victim)]
        for request in preempted:
            self.running.remove(request)
            self._release(request)
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            request.status = RequestStatus.PREEMPTED
            self.stats.num_preemptions += 1
            self._wait(request)
        return preempted

    # Its results

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput, append_token: AppendToken) -> None:
        """Takes what a plan's execution gave, 0 to k tokens a request; who ends is added to `ended`."""
        self._count_step(plan)
        if result.errors or not all(result.is_finite):
            self._fail_requests(plan, result)
        self.kv_cache.publish()
        requests, is_running, logprobs, no_logprobs = (
            self.requests,
            RequestStatus.RUNNING,
            result.logprobs,
            repeat(None),
        )
        num_output_tokens = 0
        for i, (scheduled, sampled) in enumerate(zip(plan.scheduled, result.sampled_token_ids, strict=True)):
            request = requests.get(scheduled.request_id)
            if request is None or request.status is not is_running:
                continue  # failed, or counted on one that failed
            if not sampled:
                request.num_computed_tokens += scheduled.num_new_tokens
                continue
            is_ended = False
            for token_id, entry in zip(sampled, (logprobs and logprobs[i]) or no_logprobs):  # noqa: B905
                is_ended = append_token(request, token_id, entry)
                num_output_tokens += 1
                if is_ended:
                    break
            request.num_computed_tokens = len(request.token_ids) - 1  # drafts that were rejected are behind it
            if is_ended:
                self._end(request)
        self.stats.num_output_tokens += num_output_tokens
        self.stats.num_running = len(self.running)
        self.stats.num_waiting = len(self.requests) - len(self.running)

    def _fail_requests(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Ends those that failed; whoever counted on blocks of theirs computes again, and is not judged now."""
        for scheduled, is_finite in zip(plan.scheduled, result.is_finite, strict=True):
            request = self.requests[scheduled.request_id]
            error = result.errors.get(request.request_id)
            if (error is None and is_finite) or request.status is not RequestStatus.RUNNING:
                continue
            for dependant in self.kv_cache.withdraw(request):
                self._preempt(dependant)
            if error is None:
                self.kv_cache.forget(request)
                text = f"the logits after token {len(request.token_ids)} hold NaN or infinity: {NON_FINITE_ADVICE}"
                error = RequestError("non_finite_logits", text)
            error.index = request.prompt_index
            self.fail(request, error)

    # Shared by both

    def _check(self, request: Request) -> RequestError | None:
        """Why the request can never run, if so."""
        num_tokens, limit = request.num_prompt_tokens, self.max_model_len
        if num_tokens == 0:
            return RequestError("empty_prompt", "the prompt has no tokens", index=request.prompt_index)
        if num_tokens > limit:
            text = f"{num_tokens:,} tokens exceed max_model_len {limit:,} by {num_tokens - limit:,}"
            return RequestError("prompt_too_long", text, index=request.prompt_index)
        if num_tokens == limit and request.max_output_tokens > 0:
            text = f"{num_tokens:,} tokens leave no room for an output token: max_model_len is {limit:,}"
            return RequestError("prompt_too_long", text, index=request.prompt_index)
        if num_tokens > self.kv_cache.num_slots:
            text = f"{num_tokens:,} tokens never fit: the KV cache holds {self.kv_cache.num_slots:,}"
            return RequestError("never_fits", text, index=request.prompt_index)
        return None

    def _wait(self, request: Request) -> None:
        heapq.heappush(self._waiting, (self.policy.admission_key(request), request.arrival, request))
        if self.policy.plans_ahead:
            self.kv_cache.expect(request)

    def _end(self, request: Request) -> None:
        """Lets go of a request whose finish_reason is set; it is kept in `ended` for the caller."""
        was_running = request.status is RequestStatus.RUNNING
        if request.finish_reason in ("stop", "length"):
            self._outlook.learn(request)
        request.status = RequestStatus.FINISHED
        self.ended.append(request)
        del self.requests[request.request_id]
        if was_running:
            self.running.remove(request)
            self._release(request)
        self.stats.count_end(request.finish_reason)

    def _release(self, request: Request) -> None:
        """Gives the blocks back, and the runner's row with the next plan."""
        self.kv_cache.free(request)
        self._released.append(request.request_id)  # first: `emptied` must know of the row at every moment
        del self._held_rows[request.request_id]

    def _count_admission(self, request: Request, num_cached_tokens: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens
            self.stats.num_prompt_tokens += request.num_prompt_tokens
            self.stats.num_cached_tokens += num_cached_tokens

    def _count_step(self, plan: SchedulerOutput) -> None:
        stats, num_blocks = self.stats, self.kv_cache.pool.num_used
        stats.num_steps += 1
        stats.num_computed_tokens += plan.num_tokens
        stats.sum_allocated_slots += num_blocks * self.kv_cache.block_size
        stats.sum_wasted_slots += self.kv_cache.num_wasted_slots
        stats.peak_num_blocks = max(stats.peak_num_blocks, num_blocks)
        stats.peak_running = max(stats.peak_running, len(self.running))

    def dump(self) -> str:
        """The state in a few lines, for an error that should not happen."""
        pool = self.kv_cache.pool
        lines = [
            f"{len(self.running)} running, {len(self.requests) - len(self.running)} waiting, "
            f"{pool.num_free} of {pool.num_blocks} blocks free, max_num_seqs {self.max_num_seqs}, "
            f"max_num_batched_tokens {self.max_num_batched_tokens}"
        ]
        waiting = [request for _, _, request in self._waiting[:NUM_DUMPED]]
        lines += [
            f"  {request.request_id}: {request.status.value}, {request.num_computed_tokens} of "
            f"{len(request.token_ids)} tokens computed, {request.num_preemptions} preemptions"
            for request in (*self.running[:NUM_DUMPED], *waiting)
        ]
        return "\n".join(lines)
