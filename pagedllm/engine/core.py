"""EngineCore: requests in, ended requests out; a step is schedule, execute, update.

Knows neither torch nor the tokenizer: both come as callables. Called by LLM, by one thread at a time.

Either a call does all it should, or the engine is emptied. An exception out of a call that is not one request's error
(a failing kernel, KeyboardInterrupt between two pointer writes) leaves a state that nobody should try to repair: the
scheduler and the pool are made anew over the same KV tensors, in milliseconds, without the prefix cache. Requests under
way end there: those that were complete keep their reason, the others get "abort" and what they had. `abort` hands them
out with their texts. The new state is built aside and takes the old one's place in one assignment, and a torn state is
recognized by the next call too, so a second interrupt, during the rebuild, does no harm.

With `launch` a step computes in the background (on a GPU), and the plan after it is made and launched before its
results are waited for, where `Scheduler.schedule_ahead` finds that it can be: then one step is under way between two
calls of `step`. A call that changes more than a step does takes its results first. An emptied engine forgets it: what
it still writes lies in blocks that later steps write again before they read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedllm.engine.detokenizer import Detokenizer
from pagedllm.engine.output_processor import OutputProcessor
from pagedllm.engine.scheduler import Scheduler
from pagedllm.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagedllm.engine.stats import EngineStats
from pagedllm.request import Request, RequestStatus

Execute = Callable[[SchedulerOutput], ModelRunnerOutput]
TakeResults = Callable[[], ModelRunnerOutput]  # waits for them; called once, in the order of the launches
Launch = Callable[[SchedulerOutput], TakeResults]


class _StepUnderWay(NamedTuple):
    plan: SchedulerOutput
    take_results: TakeResults


@dataclass(slots=True)
class _State:
    scheduler: Scheduler
    outputs: OutputProcessor
    torn_requests: dict[str, Request] = field(default_factory=dict)  # ended by the latest rebuild, not yet handed out
    under_way: _StepUnderWay | None = None  # launched, its results not taken
    is_open: bool = False  # a call is changing it, or was interrupted while it did


class EngineCore:
    def __init__(
        self, scheduler: Scheduler, execute: Execute, detokenizer: Detokenizer, launch: Launch | None = None
    ) -> None:
        """launch: where steps compute in the background; `execute` is not called then."""
        self._execute = execute
        self._launch = launch
        self._detokenizer = detokenizer
        self._state = _State(scheduler, OutputProcessor(detokenizer))
        self._set_aside: dict[str, Request] = {}

    @property
    def scheduler(self) -> Scheduler:
        """For reading; replaced when the engine is emptied."""
        self._empty_if_torn()
        return self._state.scheduler

    @property
    def stats(self) -> EngineStats:
        return self._state.scheduler.stats

    def add_request(self, request: Request) -> None:
        """Takes a request, to be changed by the engine until it ends. One that can never run ends in the next step.

        It may bring output tokens of an earlier run of its own: it goes on behind them.

        Raises ValueError if a request of that id has not ended, or this one is not new.
        """
        scheduler = self.scheduler
        if request.request_id in scheduler.requests or scheduler.find(request.request_id) is not None:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        if request.status is not RequestStatus.WAITING or request.finish_reason is not None:
            raise ValueError(f"request {request.request_id!r} is not new: make a new Request for every run")
        if request.num_output_tokens and (request.sampling_params.n > 1 or request.beam_search is not None):
            raise ValueError(f"request {request.request_id!r} asks for several outputs and brings tokens of one")
        with self._all_or_nothing() as state:
            state.scheduler.add(request)

    def step(self) -> list[Request]:
        """Computes once, and returns the requests that ended since the last step. Without requests: nothing.

        With `launch`: takes the results of one step, while the next is under way already where it can be.
        """
        with self._all_or_nothing() as state:
            scheduler, stats = state.scheduler, state.scheduler.stats
            if not scheduler.has_unfinished_requests:
                return []
            if self._launch is None:
                plan = stats.timed("schedule", scheduler.schedule)
                result = stats.timed("execute", self._execute, plan)
                stats.timed("update", scheduler.update, plan, result, state.outputs.append)
            else:
                _step_overlapped(state, self._launch)
            return _hand_out(state, scheduler.ended)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends these requests with finish_reason "abort" and returns them, with the text they have so far.

        Those that ended without having been returned are among them: also those ended by a call that raised. Ids that
        the engine does not have are ignored.
        """
        with self._all_or_nothing() as state:
            _take_results(state)
            wanted = dict.fromkeys(request_ids)
            for request_id in wanted:
                request = state.scheduler.find(request_id)
                if request is not None:
                    state.scheduler.abort(request)
            torn = [request for request_id, request in state.torn_requests.items() if request_id in wanted]
            return _hand_out(state, torn + [r for r in state.scheduler.ended if r.request_id in wanted])

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute or to return."""
        return self.scheduler.has_unfinished_requests

    def set_aside(self, ended: Iterable[Request]) -> None:
        """Keeps requests that `step` returned to one caller and that another one added, until `take` or `abort`."""
        self._set_aside.update((request.request_id, request) for request in ended)

    def take(self, request_ids: Collection[str]) -> list[Request]:
        """Those of these requests that were set aside; they are forgotten here."""
        if not self._set_aside:
            return []
        return [self._set_aside.pop(request_id) for request_id in request_ids if request_id in self._set_aside]

    def reset_prefix_cache(self) -> None:
        """No request will hit anything computed before."""
        with self._all_or_nothing() as state:
            _take_results(state)
            state.scheduler.kv_cache.reset_prefix_cache()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[_State]:
        self._empty_if_torn()
        state = self._state
        state.is_open = True
        try:
            yield state
            state.is_open = False
        except BaseException:
            self._empty_if_torn()
            raise

    def _empty_if_torn(self) -> None:
        if self._state.is_open:
            self._state = self._emptied()

    def _emptied(self) -> _State:
        """An empty state whose `torn_requests` are those of the present one. Changes nothing but requests."""
        torn = self._state.scheduler
        requests = {request.request_id: request for request in torn.added_requests()}
        for request in requests.values():
            group = torn.group_of(request)
            if group is not None and request.finish_reason is None and request.error is None:
                group.finish()
            unfinished = [output for output in request.samples if not output.is_finished]
            for output in unfinished:
                _end_where_it_is(output)
            if unfinished:
                torn.stats.count_end(request.finish_reason)
        return _State(torn.emptied(), OutputProcessor(self._detokenizer), requests)


def _step_overlapped(state: _State, launch: Launch) -> None:
    """Takes the results of one step, the next being launched already where that can be. Nothing is under way once
    nobody is left."""
    scheduler, stats = state.scheduler, state.scheduler.stats
    if state.under_way is None:
        plan = stats.timed("schedule", scheduler.schedule)
        state.under_way = _StepUnderWay(plan, stats.timed("execute", launch, plan))
    next_plan = stats.timed("schedule", scheduler.schedule_ahead, state.under_way.plan)
    following = None
    if next_plan is not None:
        following = _StepUnderWay(next_plan, stats.timed("execute", launch, next_plan))
    _take_results(state)
    state.under_way = following
    if not scheduler.requests:
        _take_results(state)


def _take_results(state: _State) -> None:
    """Of the step that is under way, if one is."""
    if state.under_way is not None:
        (plan, take_results), state.under_way = state.under_way, None
        scheduler, stats = state.scheduler, state.scheduler.stats
        result = stats.timed("execute", take_results)
        stats.timed("update", scheduler.update, plan, result, state.outputs.append)


def _hand_out(state: _State, ended: list[Request]) -> list[Request]:
    """Sets the texts that are still missing, then lets go: a failing detokenizer must not lose a request."""
    for request in ended:
        for output in request.samples:
            state.outputs.close(output)
    request_ids = {request.request_id for request in ended}
    state.scheduler.forget_ended(request_ids)
    for request_id in request_ids & state.torn_requests.keys():
        del state.torn_requests[request_id]
    return ended


def _end_where_it_is(request: Request) -> None:
    """Makes a request whole whose step was torn anywhere: finish_reason is always set last, tokens after logprobs."""
    if request.finish_reason is None:
        request.stop_reason = request.text = None
        request.finish_reason = "abort" if request.error is None else "error"
    if request.sampling_params.logprobs is not None:
        del request.logprobs[request.num_output_tokens :]
        request.cumulative_logprob = 0.0
        for entry in request.logprobs:
            request.cumulative_logprob += float(entry.logprobs[0])
    request.status = RequestStatus.FINISHED
