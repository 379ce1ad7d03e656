"""Scheduler: whose tokens are computed next. A pure function of its requests: no clock, no set order, no torch.

One rule: each step hands out at most max_num_batched_tokens tokens to requests whose num_computed_tokens lags behind
their tokens, running ones first, then admissions, both in policy order. There is no prefill and no decode. A request
without room preempts the policy's victim, which starts again from what the cache still holds; nobody is admitted in a
step that preempted, so a pending block is never withdrawn from under a request of the same plan by preemption.
A request that asks for several outputs is run as several (families.py): samples fork from the one that computed their
prompt as far as there is room; beams go in step, and are preempted together. Called by EngineCore: `schedule` makes a
plan, `update` takes its results; where a GPU computes, `schedule_ahead` makes the next one before them (ahead.py).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import repeat

from pagedllm.engine.ahead import can_plan_ahead, foresee
from pagedllm.engine.request_states import RequestStates
from pagedllm.engine.scheduler_output import ModelRunnerOutput, NewRequestData, ScheduledRequest, SchedulerOutput
from pagedllm.errors import RequestError
from pagedllm.request import Request, RequestStatus, TokenLogprobs

AppendToken = Callable[[Request, int, "TokenLogprobs | None"], bool]  # True: the request ended with this token
NON_FINITE_ADVICE = "the model's weights may be damaged, or overflow in this dtype; try dtype='float32'"


class Scheduler(RequestStates):
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

    # The plan

    def schedule(self) -> SchedulerOutput:
        """The next plan. Raises RuntimeError with a dump rather than make one that gets nobody further."""
        scheduled: dict[str, ScheduledRequest] = {}
        has_preempted = self._fork_beams() if self._groups else False
        blocks_to_copy = self.kv_cache.take_blocks_to_copy()
        budget, has_preempted_more = self._schedule_running(scheduled, self.max_num_batched_tokens)
        if not has_preempted and not has_preempted_more:
            budget = self._schedule_admissions(scheduled, budget)
        if not scheduled and not self.ended:
            raise RuntimeError(f"no request can advance: {self.dump()}")
        return self._plan(scheduled, blocks_to_copy, budget)

    def schedule_ahead(self, plan: SchedulerOutput) -> SchedulerOutput | None:
        """The plan after `plan`, which is under way; None where its results must be there first, or nobody goes on."""
        self._foreseen = foresee(self, plan)
        if not can_plan_ahead(self, self._foreseen):
            return None
        self.kv_cache.begin_next_plan()
        scheduled: dict[str, ScheduledRequest] = {}
        budget, has_preempted = self._schedule_running(scheduled, self.max_num_batched_tokens)
        assert not has_preempted, "a block is missing that was counted"
        budget = self._schedule_admissions(scheduled, budget)
        return self._plan(scheduled, (), budget) if scheduled else None

    def _plan(
        self, scheduled: dict[str, ScheduledRequest], blocks_to_copy: Sequence[tuple[int, int]], budget: int
    ) -> SchedulerOutput:
        self._count_limit(budget)
        self._under_way.append((self.kv_cache.pool.num_used, self.kv_cache.num_wasted_slots, len(self.running)))
        self._last_released = tuple(self._released)
        self._released.clear()
        num_tokens = self.max_num_batched_tokens - budget
        return SchedulerOutput(tuple(scheduled.values()), self._last_released, blocks_to_copy, num_tokens)

    def _fork_beams(self) -> bool:
        """Gives the chosen beams their blocks; returns whether somebody was preempted for that.

        Each beam that was dropped has left a block for the copy that a fork takes, so only a trunk that branches ever
        finds too few.
        """
        has_preempted = False
        branching = [group for group in self._groups.values() if group.forks]
        for group in sorted(branching, key=lambda group: self.policy.admission_key(group.first)):
            while group.forks:  # none is left where the group itself was preempted
                if self._fork(*group.forks[0]):
                    del group.forks[0]
                else:
                    self._preempt_victim({})
                    has_preempted = True
        return has_preempted

    def _schedule_running(self, scheduled: dict[str, ScheduledRequest], budget: int) -> tuple[int, bool]:
        """Returns the budget that is left, and whether somebody was preempted."""
        allocate_slots, is_running = self.kv_cache.allocate_slots, RequestStatus.RUNNING
        untold, foreseen = self._untold, self._foreseen
        has_preempted = False
        for request in tuple(self.running):
            if not budget:
                break
            if request.status is not is_running:  # preempted just now
                continue
            num_computed_tokens = request.num_computed_tokens
            num_wanted_tokens = len(request.token_ids)
            first_logits_index = num_wanted_tokens - 1
            if request.num_unscored_tokens:
                first_logits_index, num_wanted_tokens = request.first_logits_index, request.num_wanted_tokens
            num_new_tokens = min(num_wanted_tokens - num_computed_tokens, budget)
            if not num_new_tokens:
                if request.request_id not in foreseen:  # a beam that waits for its group; or it ends by length now
                    continue
                first_logits_index, num_new_tokens = num_computed_tokens, 1
            new_block_ids = allocate_slots(request, num_new_tokens)
            while new_block_ids is None and request.status is is_running:
                has_preempted = True
                budget += self._preempt_victim(scheduled)
                if request.status is is_running:
                    new_block_ids = allocate_slots(request, num_new_tokens)
            if new_block_ids is not None:
                budget -= num_new_tokens
                request_id = request.request_id
                new_token_ids: tuple[int, ...] = ()
                if untold and request_id in untold:
                    if request_id not in self._held_rows:
                        scheduled[request_id] = self._as_new(request, num_new_tokens)
                        continue
                    new_token_ids = tuple(request.token_ids[-untold.pop(request_id) :])
                scheduled[request_id] = ScheduledRequest(
                    request_id,
                    num_computed_tokens,
                    num_new_tokens,
                    new_token_ids,
                    (),
                    new_block_ids,
                    first_logits_index,
                    request.num_samples,
                )
        return budget, has_preempted

    def _schedule_admissions(self, scheduled: dict[str, ScheduledRequest], budget: int) -> int:
        """Looks at the head of the waiting queue only; returns the budget that is left.

        A request is admitted if all its present tokens fit and each running one could still take one more block a KV
        group: they will ask for it within block_size steps. A policy that plans ahead leaves room for all that they are
        expected to ask for, and this one too, unless nobody runs.
        """
        if not budget or self._num_free_seqs() < 1:  # most steps: nothing to sum up
            return budget
        num_spare = self._num_blocks_to_come()
        while budget and self._waiting:
            request = self._waiting[0][-1]
            if request.is_finished:
                heapq.heappop(self._waiting)
                self._num_aborted_waiting -= 1
                continue
            if self._num_free_seqs() < self._num_seqs(request):
                break
            computed_blocks = self.kv_cache.get_computed_blocks(request, request.first_logits_index)
            num_own = self._num_own_blocks_ahead(request) if self.running else 0
            if not self.kv_cache.can_admit(request, computed_blocks, num_spare + num_own):
                break
            num_spare += max(num_own, len(self.kv_cache.groups))
            heapq.heappop(self._waiting)
            num_cached_tokens = self.kv_cache.admit(request, computed_blocks)
            self._count_admission(request, num_cached_tokens)
            request.num_computed_tokens = num_cached_tokens
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=self.policy.admission_key)
            num_new_tokens = min(request.num_wanted_tokens - num_cached_tokens, budget)
            new_block_ids = self.kv_cache.allocate_slots(request, num_new_tokens)
            assert new_block_ids is not None
            budget -= num_new_tokens
            scheduled[request.request_id] = self._as_new(request, num_new_tokens)
        return budget

    def _as_new(self, request: Request, num_new_tokens: int) -> ScheduledRequest:
        """For a runner that knows nothing of the request."""
        self._untold.pop(request.request_id, None)
        self._held_rows[request.request_id] = None
        return ScheduledRequest(
            request.request_id,
            request.num_computed_tokens,
            num_new_tokens,
            new_token_ids=tuple(request.token_ids),
            new_block_ids=self.kv_cache.block_ids(request),
            first_logits_index=request.first_logits_index,
            num_samples=request.num_samples,
            new_request=NewRequestData(
                request.num_prompt_tokens,
                request.sampling_params,
                request.seed,
                request.eos_token_ids,
                request.rope_variant,
                bad_word_ids=request.bad_word_ids,
                choices=request.choices,
                sample_index=request.sample_index,
            ),
        )

    # Room

    def _num_seqs(self, request: Request) -> int:
        """Rows that must be free for one that waits."""
        group = self._groups.get(request.family_id) if self._groups else None
        return 1 if group is None else group.search.width

    def _num_blocks_to_come(self) -> int:
        """Blocks to leave free for those that run."""
        if not self.policy.plans_ahead or not self._waiting:
            return len(self.running) * len(self.kv_cache.groups)
        return sum(map(self._num_blocks_ahead, self.running))

    def _num_blocks_ahead(self, request: Request) -> int:
        return self._outlook.num_blocks_ahead(request, self.kv_cache.groups)

    def _num_own_blocks_ahead(self, request: Request) -> int:
        """To find free, besides those of its present tokens, for one that waits while others run."""
        num_seqs, num_ahead = self._num_seqs(request), 0
        if self.policy.plans_ahead:
            num_ahead = self._num_blocks_ahead(request)
            num_seqs = max(num_seqs, min(request.num_samples, self._num_free_seqs()))
        if num_seqs > 1 and request.num_samples == 0:  # beams branch without being asked again
            num_tokens = self._groups[request.family_id].num_tokens_to_branch
            num_ahead = max(num_ahead, (1 + num_tokens // self.kv_cache.block_size) * len(self.kv_cache.groups))
        return num_seqs * num_ahead

    def _preempt_victim(self, scheduled: dict[str, ScheduledRequest]) -> int:
        """Preempts the policy's choice, and drops it from the plan; returns the tokens it had been given there."""
        first = self.running[0]  # is never preempted, nor are the beams beside it: something always advances
        candidates = [
            request
            for request in self.running[1:]
            if request.num_samples or not first.family_id or request.family_id != first.family_id
        ]
        if not candidates:
            raise RuntimeError(f"one request alone finds no free block: {self.dump()}")
        victim = max(candidates, key=self.policy.victim_key)
        num_tokens = 0
        for request in self._preempt(victim):
            dropped = scheduled.pop(request.request_id, None)
            num_tokens += dropped.num_new_tokens if dropped is not None else 0
        return num_tokens

    # Its results

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput, append_token: AppendToken) -> None:
        """Takes what a plan's execution gave, 0 to k tokens a request; who ends is added to `ended`."""
        self._count_step(plan)
        has_next_plan = len(self._under_way) > 0
        lost_rows = frozenset(self._last_released) if has_next_plan else frozenset()  # since this plan was made
        self._foreseen.clear()
        if result.errors or not all(result.is_finite):
            self._fail_requests(plan, result, lost_rows)
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
                continue  # failed, or counted on one that failed, or ended before, which was not known
            if lost_rows and scheduled.request_id in lost_rows:
                continue  # the same, and it runs again, or another of that name does
            if result.prompt_logprobs:
                _take_prompt_logprobs(request, result)
            if not sampled:
                request.num_computed_tokens = scheduled.num_computed_tokens + scheduled.num_new_tokens
                if request.max_output_tokens == 0 and not request.num_unscored_tokens:
                    request.finish_reason = "length"
                    self._end(request)
                elif not scheduled.num_samples and logprobs and logprobs[i]:
                    self._groups[request.family_id].take(request, logprobs[i][0])
                continue
            if scheduled.num_samples > 1:
                entries = logprobs[i] if logprobs else ()
                num_output_tokens += self._start_samples(request, sampled, entries, append_token)
                sampled = sampled[:1]
            is_ended = False
            for token_id, entry in zip(sampled, (logprobs and logprobs[i]) or no_logprobs):  # noqa: B905
                is_ended = append_token(request, token_id, entry)
                num_output_tokens += 1
                if is_ended:
                    break
            request.num_computed_tokens = len(request.token_ids) - 1  # drafts that were rejected are behind it
            if is_ended:
                if has_next_plan:
                    self.kv_cache.publish_early(request)
                self._end(request)
        if self._groups:
            self._advance_beams()
        self.stats.num_output_tokens += num_output_tokens
        self.stats.num_running = len(self.running)
        self.stats.num_waiting = len(self.requests) - len(self.running)

    def _start_samples(
        self, leader: Request, sampled: Sequence[int], logprobs: Sequence[TokenLogprobs], append_token: AppendToken
    ) -> int:
        """Samples that have not begun take the tokens that were drawn for them, as long as there is room to go on, and
        fork; of the rest the first waits. Returns how many began."""
        family = self._families[leader.family_id]
        leader.num_samples = 1
        num_started, num_spare, num_groups = 0, self._num_blocks_to_come(), len(self.kv_cache.groups)
        for token_id, entry in zip(sampled[1:], logprobs[1:] or repeat(None)):  # noqa: B905
            sample = family.unstarted[0]
            num_spare += num_groups + (self._num_blocks_ahead(sample) if self.policy.plans_ahead else num_groups)
            has_room = self._num_free_seqs() > 0 and num_spare <= self.kv_cache.pool.num_free
            if not has_room and sample.max_output_tokens > 1:
                break
            family.unstarted.popleft()
            num_started += 1
            sample.num_computed_tokens = sample.num_prompt_tokens
            sample.block_hashes = list(leader.block_hashes)
            if append_token(sample, token_id, entry):
                self._end(sample)
            else:
                self._fork(leader, sample)
        if family.unstarted:
            sample = family.unstarted.popleft()
            self._let_lead(sample, family)
            self._wait(sample)
        return num_started

    def _advance_beams(self) -> None:
        """Chooses the next beams of the groups whose results are all there, and ends the groups that are finished."""
        for group in tuple(self._groups.values()):
            if not group.is_ready:
                continue
            going_on, dropped = group.branch()
            if group.search.is_finished:
                group.finish()
                self.stats.num_output_tokens += sum(request.num_output_tokens for request in group.first.samples)
                self._end_group(group)
                continue
            for beam in dropped:
                self._drop_beam(beam)
            self._untold.update((beam.request_id, num_tokens) for beam, num_tokens in going_on)

    def _fail_requests(self, plan: SchedulerOutput, result: ModelRunnerOutput, lost_rows: frozenset[str]) -> None:
        """Ends those that failed; whoever counted on blocks of theirs computes again, and is not judged now."""
        for scheduled, is_finite in zip(plan.scheduled, result.is_finite, strict=True):
            request = self.requests.get(scheduled.request_id)
            error = result.errors.get(scheduled.request_id)
            if (error is None and is_finite) or request is None or request.status is not RequestStatus.RUNNING:
                continue
            if scheduled.request_id in lost_rows:
                continue
            name = request.family_id
            members = [member for member in self.running if member is request or (name and member.family_id == name)]
            for member in members:
                for dependant in self.kv_cache.withdraw(member):
                    if dependant.status is RequestStatus.RUNNING:
                        self._preempt(dependant)
            if error is None:
                self.kv_cache.forget(request)
                text = f"the logits after token {len(request.token_ids)} hold NaN or infinity: {NON_FINITE_ADVICE}"
                error = RequestError("non_finite_logits", text)
            error.index = request.prompt_index
            self.fail(request, error)

    def _count_admission(self, request: Request, num_cached_tokens: int) -> None:
        if request.num_preemptions == 0 and request.sample_index == 0:
            added = self.find(request.family_id) or request
            added.first_step = self.stats.num_steps + len(self._under_way)
            added.num_cached_tokens = num_cached_tokens
            self.stats.num_prompt_tokens += request.num_prompt_tokens
            self.stats.num_cached_tokens += num_cached_tokens

    def _count_limit(self, budget: int) -> None:
        """What kept others waiting in the step that was just planned."""
        if len(self._waiting) == self._num_aborted_waiting:
            return
        if not budget:
            self.stats.num_steps_limited_by_tokens += 1
        elif len(self.running) >= self.max_num_seqs:
            self.stats.num_steps_limited_by_seqs += 1
        else:
            self.stats.num_steps_limited_by_blocks += 1

    def _count_step(self, plan: SchedulerOutput) -> None:
        stats, (num_blocks, num_wasted_slots, num_running) = self.stats, self._under_way.popleft()
        stats.num_steps += 1
        stats.num_used_blocks = num_blocks
        stats.num_computed_tokens += plan.num_tokens
        stats.sum_allocated_slots += num_blocks * self.kv_cache.block_size
        stats.sum_wasted_slots += num_wasted_slots
        stats.peak_num_blocks = max(stats.peak_num_blocks, num_blocks)
        stats.peak_running = max(stats.peak_running, num_running)


def _take_prompt_logprobs(request: Request, result: ModelRunnerOutput) -> None:
    """Rows first: while tokens count as unscored, what is there is not handed out."""
    rows = result.prompt_logprobs.get(request.request_id)
    if rows is not None:
        request.prompt_logprobs.append(rows)
        request.num_unscored_tokens -= len(rows.ranks)
