"""Scheduler: whose tokens are computed next. A pure function of its requests: no clock, no set order, no torch.

One rule: each step hands out at most max_num_batched_tokens tokens to requests whose num_computed_tokens lags behind
their tokens, running ones first, then admissions, both in policy order. There is no prefill and no decode. A request
without room preempts the policy's victim, which starts again from what the cache still holds; nobody is admitted in a
step that preempted, so a pending block is never withdrawn from under a request of the same plan by preemption.
A request that asks for several outputs is run as several (families.py): samples fork from the one that computed their
prompt as far as there is room, beams go in step, and leave it together. Called by EngineCore: `schedule` makes a plan,
`update` takes its results.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from itertools import repeat

from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.engine.families import BeamGroup, SampleFamily
from pagedllm.engine.limits import why_never
from pagedllm.engine.outlook import OutputOutlook
from pagedllm.engine.policy import Policy, PolicyKey
from pagedllm.engine.scheduler_output import ModelRunnerOutput, NewRequestData, ScheduledRequest, SchedulerOutput
from pagedllm.engine.stats import EngineStats
from pagedllm.errors import RequestError
from pagedllm.request import Request, RequestStatus, TokenLogprobs

AppendToken = Callable[[Request, int, "TokenLogprobs | None"], bool]  # True: the request ended with this token
NUM_DUMPED = 8
NON_FINITE_ADVICE = "the model's weights may be damaged, or overflow in this dtype; try dtype='float32'"


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
        self._families: dict[str, SampleFamily] = {}  # by family_id, while a sample is open
        self._groups: dict[str, BeamGroup] = {}  # by family_id, likewise
        self._untold: dict[str, int] = {}  # of running ones: tokens at the end that the runner's row lacks
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

    def find(self, request_id: str) -> Request | None:
        """The request that was added under this name and has not ended, all its outputs together."""
        family = self._families.get(request_id)
        return self.requests.get(request_id) if family is None else family.first

    def added_requests(self) -> list[Request]:
        """Those that were added and are not handed out, also in a state that an interrupt left anywhere."""
        families = self._families.values()
        alone = [request for request in self.requests.values() if not request.family_id]
        return list(dict.fromkeys((*self.ended, *(family.first for family in families), *alone)))

    def group_of(self, request: Request) -> BeamGroup | None:
        """The beams of a request that was added."""
        return self._groups.get(request.request_id)

    def add(self, request: Request) -> None:
        """Takes a request; one that can never run ends at once."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        error = why_never(
            request,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.kv_cache.pool.num_blocks,
            block_size=self.kv_cache.block_size,
        )
        if error is not None:
            request.error, request.finish_reason = error, "error"
            self._end(request)
            return
        # The last token of an output gets no slot: nothing is computed from it.
        limit = min(self.max_model_len, self.kv_cache.num_slots + 1)
        request.max_output_tokens = min(request.max_output_tokens, limit - request.num_prompt_tokens)
        if request.num_output_tokens >= request.max_output_tokens:
            request.finish_reason = "length"
            self._end(request)
        elif request.beam_search is not None:
            group = self._groups[request.request_id] = BeamGroup.of(request)
            self._plant(group)
        else:
            if request.sampling_params.n > 1 and not request.sampling_params.is_greedy:
                self._open_family(request)
            self._wait(request)

    def abort(self, request: Request) -> None:
        """request: one that was added."""
        self._end_all_of(request, None)

    def fail(self, request: Request, error: RequestError) -> None:
        """Ends a request that runs, and with it all outputs of the one that was added."""
        family, group = self._families.get(request.family_id), self._groups.get(request.family_id)
        added = family.first if family is not None else group.first if group is not None else request
        self._end_all_of(added, error)

    def forget_ended(self, request_ids: Collection[str]) -> None:
        """The caller has handed these out."""
        self.ended = [request for request in self.ended if request.request_id not in request_ids]

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
        self._last_released = tuple(self._released)
        self._released.clear()
        num_tokens = self.max_num_batched_tokens - budget
        return SchedulerOutput(tuple(scheduled.values()), self._last_released, blocks_to_copy, num_tokens)

    def _schedule_running(self, scheduled: dict[str, ScheduledRequest], budget: int) -> tuple[int, bool]:
        """Returns the budget that is left, and whether somebody was preempted."""
        allocate_slots, is_running, untold = self.kv_cache.allocate_slots, RequestStatus.RUNNING, self._untold
        has_preempted = False
        for request in tuple(self.running):
            if not budget:
                break
            if request.status is not is_running:  # preempted just now
                continue
            num_computed_tokens = request.num_computed_tokens
            last_index = len(request.token_ids) - 1
            num_new_tokens = min(last_index + 1 - num_computed_tokens, budget)
            if not num_new_tokens:  # a beam that waits for the others of its group
                continue
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
                    last_index,
                    request.num_samples,
                )
        return budget, has_preempted

    def _schedule_admissions(self, scheduled: dict[str, ScheduledRequest], budget: int) -> int:
        """Looks at the head of the waiting queue only; returns the budget that is left.

        A request is admitted if all its present tokens fit and each running one could still take one more block: they
        will ask for it within block_size steps. A policy that plans ahead leaves room for all that they are expected to
        ask for, and this one too, unless nobody runs.
        """
        num_spare = self._num_blocks_to_come()
        while budget and self._waiting:
            request = self._waiting[0][-1]
            if request.is_finished:
                heapq.heappop(self._waiting)
                self._num_aborted_waiting -= 1
                continue
            if self._num_free_seqs() < self._num_seqs(request):
                break
            last_index = len(request.token_ids) - 1  # the only logits wanted, and never taken from the cache
            computed_blocks = self.kv_cache.get_computed_blocks(request, last_index)
            num_own = self._num_own_blocks_ahead(request) if self.running else 0
            if not self.kv_cache.can_admit(request, computed_blocks, num_spare + num_own):
                break
            num_spare += max(num_own, 1)
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
            first_logits_index=len(request.token_ids) - 1,
            num_samples=request.num_samples,
            new_request=NewRequestData(
                request.num_prompt_tokens,
                request.sampling_params,
                request.seed,
                request.eos_token_ids,
                request.rope_variant,
                bad_word_ids=request.bad_word_ids,
                sample_index=request.sample_index,
            ),
        )

    def _num_free_seqs(self) -> int:
        """Rows that nobody has and no group of beams is about to take."""
        num_missing = sum(group.num_missing for group in self._groups.values())
        return self.max_num_seqs - len(self.running) - num_missing

    def _num_seqs(self, request: Request) -> int:
        """Rows that must be free for one that waits."""
        group = self._groups.get(request.family_id) if self._groups else None
        return 1 if group is None else group.search.width

    def _num_blocks_to_come(self) -> int:
        """Blocks to leave free for those that run."""
        if not self.policy.plans_ahead or not self._waiting:
            return len(self.running)
        return sum(map(self._num_blocks_ahead, self.running))

    def _num_blocks_ahead(self, request: Request) -> int:
        return self._outlook.num_blocks_ahead(request, self.kv_cache.block_size)

    def _num_own_blocks_ahead(self, request: Request) -> int:
        """To find free, besides those of its present tokens, for one that waits while others run."""
        num_seqs, num_ahead = self._num_seqs(request), 0
        if self.policy.plans_ahead:
            num_ahead = self._num_blocks_ahead(request)
            num_seqs = max(num_seqs, min(request.num_samples, self._num_free_seqs()))
        if num_seqs > 1 and request.num_samples == 0:  # beams branch without being asked again
            num_tokens = self._groups[request.family_id].num_tokens_to_branch
            num_ahead = max(num_ahead, 1 + num_tokens // self.kv_cache.block_size)
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

    def _preempt(self, victim: Request) -> list[Request]:
        """Makes the victim wait again, and all who counted on blocks that it does not compute now; returns them.

        A beam takes the others of its group along: a new trunk waits for all of them.
        """
        preempted, groups = [victim], {}
        for request in preempted:
            others = self.kv_cache.withdraw(request)
            if not request.num_samples:
                groups[request.family_id] = group = self._groups[request.family_id]
                others += [beam for beam in group.beams if beam.status is RequestStatus.RUNNING]
            preempted += [other for other in others if other not in preempted]
        for request in preempted:
            if not request.num_samples:
                self._drop_beam(request)
                continue
            self.running.remove(request)
            self._release(request)
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            request.status = RequestStatus.PREEMPTED
            self.stats.num_preemptions += 1
            self._wait(request)
        for group in groups.values():
            group.first.num_preemptions += 1
            self.stats.num_preemptions += 1
            self._plant(group)
        return preempted

    # Several outputs

    def _open_family(self, first: Request) -> None:
        """Makes the samples, of which the first will wait."""
        if not self.kv_cache.enable_prefix_caching:
            first.shares_blocks = True
            first.extra_keys = (*first.extra_keys, f"samples of {first.arrival}")
        family = self._families[first.request_id] = SampleFamily.of(first)
        for sample in family.unstarted:
            sample.arrival = self._num_arrivals
            self._num_arrivals += 1
            assert sample.request_id not in self.requests
            self.requests[sample.request_id] = sample
        self._let_lead(first, family)

    def _let_lead(self, sample: Request, family: SampleFamily) -> None:
        """The sample is the next to compute the prompt's last token; it draws for others too, if any are left."""
        sample.num_samples = min(1 + len(family.unstarted), max(self.max_num_seqs, 2))

    def _start_samples(
        self, leader: Request, sampled: Sequence[int], logprobs: Sequence[TokenLogprobs], append_token: AppendToken
    ) -> int:
        """Samples that have not begun take the tokens that were drawn for them, as long as there is room to go on, and
        fork; of the rest the first waits. Returns how many began."""
        family = self._families[leader.family_id]
        leader.num_samples = 1
        num_started, num_spare = 0, self._num_blocks_to_come()
        for token_id, entry in zip(sampled[1:], logprobs[1:] or repeat(None)):  # noqa: B905
            sample = family.unstarted[0]
            num_spare += 1 + (self._num_blocks_ahead(sample) if self.policy.plans_ahead else 1)
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

    def _fork(self, parent: Request, child: Request) -> bool:
        """False, and nothing done, if there is no block for it."""
        if not self.kv_cache.fork(parent, child):
            return False
        child.status = RequestStatus.RUNNING
        self.requests[child.request_id] = child
        self._untold[child.request_id] = len(child.token_ids)
        insort(self.running, child, key=self.policy.admission_key)
        return True

    def _plant(self, group: BeamGroup) -> None:
        trunk = group.plant()
        self.requests[trunk.request_id] = trunk
        self._wait(trunk)

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

    def _drop_beam(self, beam: Request) -> None:
        """One that runs."""
        beam.status = RequestStatus.FINISHED
        del self.requests[beam.request_id]
        self.running.remove(beam)
        self._release(beam)

    def _end_group(self, group: BeamGroup) -> None:
        for beam in group.beams:
            if beam.status is RequestStatus.RUNNING:
                self._drop_beam(beam)
            elif beam.request_id in self.requests:  # a trunk that waits
                beam.status = RequestStatus.FINISHED
                del self.requests[beam.request_id]
        self._end(group.first)
        del self._groups[group.first.request_id]

    def _end_all_of(self, added: Request, error: RequestError | None) -> None:
        """Ends whatever has not ended of a request that was added; without an error it is aborted."""
        group, family = self._groups.get(added.request_id), self._families.get(added.request_id)
        members, unstarted = [added], set()
        if family is not None:
            members, unstarted = family.open_samples, set(family.unstarted)
            family.unstarted.clear()
        waiting = [r for r in (group.beams[:1] if group is not None else members) if r not in unstarted]
        waiting = [request for request in waiting if request.status is not RequestStatus.RUNNING]
        for request in waiting:
            self.kv_cache.stop_expecting(request)
        if error is not None:
            added.error = error
        for request in members:
            request.finish_reason = "abort" if error is None else "error"
        if group is None:
            for request in members:
                self._end(request)
        else:
            if error is None:
                group.finish()
            self._end_group(group)
        self._num_aborted_waiting += len(waiting)
        if 2 * self._num_aborted_waiting > len(self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[-1].is_finished]
            heapq.heapify(self._waiting)
            self._num_aborted_waiting = 0

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
                if not scheduled.num_samples and logprobs and logprobs[i]:
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
                self._end(request)
        if self._groups:
            self._advance_beams()
        self.stats.num_output_tokens += num_output_tokens
        self.stats.num_running = len(self.running)
        self.stats.num_waiting = len(self.requests) - len(self.running)

    def _fail_requests(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Ends those that failed; whoever counted on blocks of theirs computes again, and is not judged now."""
        for scheduled, is_finite in zip(plan.scheduled, result.is_finite, strict=True):
            request = self.requests.get(scheduled.request_id)
            error = result.errors.get(scheduled.request_id)
            if (error is None and is_finite) or request is None or request.status is not RequestStatus.RUNNING:
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

    # Shared by both

    def _wait(self, request: Request) -> None:
        heapq.heappush(self._waiting, (self.policy.admission_key(request), request.arrival, request))
        if self.policy.plans_ahead:
            self.kv_cache.expect(request)

    def _end(self, request: Request) -> None:
        """Lets go of a request whose finish_reason is set; what was added is kept in `ended` for the caller, once the
        last of its samples is here."""
        was_running = request.status is RequestStatus.RUNNING
        if request.finish_reason in ("stop", "length"):
            self._outlook.learn(request)
        request.status = RequestStatus.FINISHED
        family = self._families.get(request.family_id) if request.family_id else None
        added: Request | None = request
        if family is not None:
            family.num_open -= 1
            added = None if family.num_open else family.first
        if added is not None:
            self.ended.append(added)
            self.stats.count_end(added.finish_reason if added.error is None else "error")
            self._families.pop(added.request_id, None)
        del self.requests[request.request_id]
        if was_running:
            self.running.remove(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        """Gives the blocks back, and the runner's row with the next plan."""
        self.kv_cache.free(request)
        self._untold.pop(request.request_id, None)
        if request.request_id in self._held_rows:  # else it forked and never reached the runner
            self._released.append(request.request_id)  # first: `emptied` must know of the row at every moment
            del self._held_rows[request.request_id]

    def _count_admission(self, request: Request, num_cached_tokens: int) -> None:
        if request.num_preemptions == 0 and request.sample_index == 0:
            added = self.find(request.family_id) or request
            added.num_cached_tokens = num_cached_tokens
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
