"""RequestStates: all requests of an engine, and how each passes from one state to the next.

    add -> WAITING -> RUNNING -> FINISHED -> ended, until the caller has it
                  <- PREEMPTED <-

What a request holds (blocks, the runner's row, a place in the queue) is taken and given back here and nowhere else, for
it and for those of its family (families.py). Decides nothing: the Scheduler, which is one of these, says who and when.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Collection

from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.engine.families import BeamGroup, SampleFamily
from pagedllm.engine.limits import why_never
from pagedllm.engine.outlook import OutputOutlook
from pagedllm.engine.policy import Policy, PolicyKey
from pagedllm.engine.stats import EngineStats
from pagedllm.errors import RequestError
from pagedllm.request import Request, RequestStatus

NUM_DUMPED = 8


class RequestStates:
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
        # Plans without results, one more where one was made ahead: blocks in use, wasted slots and requests of each.
        self._under_way: deque[tuple[int, int, int]] = deque()
        self._foreseen: set[str] = set()  # ids of running ones that get a token, not known yet, by the plan under way

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `schedule` and `update` have something to do or to give back."""
        return bool(self.requests or self.ended)

    def find(self, request_id: str) -> Request | None:
        """The request that was added under this name and has not ended, all its outputs together."""
        if request_id in self._families:
            return self._families[request_id].first
        request = self.requests.get(request_id)
        return request if request is not None and _was_added(request) else None

    def added_requests(self) -> list[Request]:
        """Those that were added and are not handed out, also in a state that an interrupt left anywhere."""
        families = self._families.values()
        alone = [request for request in self.requests.values() if _was_added(request)]
        return list(dict.fromkeys((*self.ended, *(family.first for family in families), *alone)))

    def group_of(self, request: Request) -> BeamGroup | None:
        """The beams of a request that was added."""
        return self._groups.get(request.request_id)

    def add(self, request: Request) -> None:
        """Takes a request; one that can never run ends at once."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.first_step = self.stats.num_steps
        request.follows_output = _follows_output(request)
        self.requests[request.request_id] = request
        error = why_never(
            request,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.kv_cache.pool.num_blocks,
            groups=self.kv_cache.groups,
        )
        if error is not None:
            request.error, request.finish_reason = error, "error"
            self._end(request)
            return
        # The last token of an output gets no slot: nothing is computed from it.
        limit = min(self.max_model_len, self.kv_cache.num_slots + 1)
        request.max_output_tokens = min(request.max_output_tokens, limit - request.num_prompt_tokens)
        if request.num_output_tokens >= request.max_output_tokens and not request.num_unscored_tokens:
            request.finish_reason = "length"
            self._end(request)
        elif request.beam_search is not None:
            group = self._groups[request.request_id] = BeamGroup.of(request)
            self._plant(group)
        else:
            if request.sampling_params.num_samples > 1 and request.max_output_tokens:
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

    # Passing on

    def _wait(self, request: Request) -> None:
        heapq.heappush(self._waiting, (self.policy.admission_key(request), request.arrival, request))
        if self.policy.plans_ahead:
            self.kv_cache.expect(request)

    def _fork(self, parent: Request, child: Request) -> bool:
        """False, and nothing done, if there is no block for it."""
        if not self.kv_cache.fork(parent, child):
            return False
        child.status = RequestStatus.RUNNING
        self.requests[child.request_id] = child
        self._untold[child.request_id] = len(child.token_ids)
        insort(self.running, child, key=self.policy.admission_key)
        return True

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
            added.num_steps = self.stats.num_steps - added.first_step
            self.ended.append(added)
            self.stats.count_end(added.finish_reason if added.error is None else "error")
            self._families.pop(added.request_id, None)
        del self.requests[request.request_id]
        if was_running:
            self.running.remove(request)
            self._release(request)

    def _end_all_of(self, added: Request, error: RequestError | None) -> None:
        """Ends whatever has not ended of a request that was added; without an error it is aborted."""
        group, family = self._groups.get(added.request_id), self._families.get(added.request_id)
        outputs = queued = [added]
        if group is not None:
            queued = group.beams[:1]  # its trunk, if that waits
        elif family is not None:
            outputs = family.open_samples
            queued = [sample for sample in outputs if sample not in family.unstarted]
            family.unstarted.clear()
        queued = [request for request in queued if request.status is not RequestStatus.RUNNING]
        for request in queued:
            self.kv_cache.stop_expecting(request)
        added.error = error
        if group is not None:
            if error is None:
                group.finish()
            else:
                added.finish_reason = "error"
            self._end_group(group)
        else:
            for request in outputs:
                request.finish_reason = "abort" if error is None else "error"
                self._end(request)
        self._num_aborted_waiting += len(queued)
        if 2 * self._num_aborted_waiting > len(self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[-1].is_finished]
            heapq.heapify(self._waiting)
            self._num_aborted_waiting = 0

    def _release(self, request: Request) -> None:
        """Gives the blocks back, and the runner's row with the next plan."""
        self.kv_cache.free(request)
        self._untold.pop(request.request_id, None)
        if request.request_id in self._held_rows:  # else it forked and never reached the runner
            self._released.append(request.request_id)  # first: `emptied` must know of the row at every moment
            del self._held_rows[request.request_id]

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

    def _plant(self, group: BeamGroup) -> None:
        trunk = group.plant()
        self.requests[trunk.request_id] = trunk
        self._wait(trunk)

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

    def _num_free_seqs(self) -> int:
        """Rows that nobody has and no group of beams is about to take."""
        num_missing = sum(group.num_missing for group in self._groups.values())
        return self.max_num_seqs - len(self.running) - num_missing

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


def _follows_output(request: Request) -> bool:
    """Whether something on the host edits the logits by what was drawn before, or might."""
    params = request.sampling_params
    return (
        request.choices is not None
        or bool(request.bad_word_ids or params.logits_processors)
        or params.allowed_token_ids is not None
        or params.min_tokens > 0
        or (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
    )


def _was_added(request: Request) -> bool:
    """Rather than made for another one, as a further sample or a beam."""
    return request.family_id in ("", request.request_id)
