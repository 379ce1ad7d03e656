"""Families: the requests that the scheduler makes of one that asks for several outputs.

Samples (n > 1) share nothing but their prompt: the first computes it and draws the first token of as many others as
have room, which fork from it; the rest start when there is room. The request that was added is sample 0.

Beams go in step: a group starts as one request, its trunk, whose result is branched into beams, and each step chooses
among the results of all of them. Where a group is preempted its beams fall together to a new trunk, what their outputs
have in common, which branches into all of them again. The request that was added never runs: it becomes the best
hypothesis at the end.

Plain data; the Scheduler gives turns and blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pagedllm.engine.beam_search import BeamSearch, Hypothesis
from pagedllm.request import Request, RequestStatus, TokenLogprobs
from pagedllm.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class SampleFamily:
    """The n samples of one prompt; `first` is the request that was added."""

    first: Request
    unstarted: deque[Request]  # by sample_index; none of them waits or runs
    num_open: int  # that have not ended

    @classmethod
    def of(cls, first: Request) -> SampleFamily:
        """Makes the other samples of a request that has not begun."""
        first.family_id = first.request_id
        first.other_samples = [
            replace(
                first,
                request_id=f"{first.request_id}#{index}",
                sample_index=index,
                token_ids=list(first.token_ids),
                other_samples=[],
                block_hashes=[],
                logprobs=[],
                num_unscored_tokens=0,
                prompt_logprobs=[],
            )
            for index in range(1, first.sampling_params.n)
        ]
        return cls(first, deque(first.other_samples), first.sampling_params.n)

    @property
    def open_samples(self) -> list[Request]:
        return [request for request in self.first.samples if not request.is_finished]


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The beams of one prompt; `first` is the request that was added."""

    first: Request
    search: BeamSearch
    beams: list[Request] = field(default_factory=list)  # in the order of search.running; or the trunk alone
    forks: list[tuple[Request, Request]] = field(default_factory=list)  # (parent, child): beams without blocks yet
    _params: SamplingParams = field(default_factory=SamplingParams)  # of the beams
    _results: dict[str, TokenLogprobs] = field(default_factory=dict)  # by request_id of the beam
    _has_fallen_together: bool = False  # the trunk is only the beginning of the running hypotheses
    _num_made: int = 0

    @classmethod
    def of(cls, first: Request) -> BeamGroup:
        """Of a request that has not begun; `plant` makes its trunk."""
        params = first.sampling_params
        assert first.beam_search is not None
        eos_token_ids = () if params.ignore_eos else first.eos_token_ids
        ends = frozenset((*eos_token_ids, *(params.stop_token_ids or ())))
        group = cls(first, BeamSearch(first.beam_search, ends, first.max_output_tokens))
        group._params = replace(params, logprobs=group.search.num_candidates)
        return group

    @property
    def num_missing(self) -> int:
        """Beams that a group whose trunk runs will have, and that do not run yet."""
        if self.beams[0].status is not RequestStatus.RUNNING:
            return 0
        return self.search.width - len(self.beams) + len(self.forks)

    @property
    def is_ready(self) -> bool:
        """Whether the results of all beams are there."""
        return len(self._results) == len(self.beams)

    @property
    def num_tokens_to_branch(self) -> int:
        """Of each running hypothesis, behind the trunk."""
        return len(self.search.running[0].output) - self.beams[0].num_output_tokens

    def plant(self) -> Request:
        """Makes the trunk, which is then the only request of the group."""
        outputs = [hypothesis.output for hypothesis in self.search.running]
        length = _num_common(min(outputs), max(outputs))
        trunk = self._make([*self.first.token_ids, *outputs[0][:length]], [])
        self.beams, self.forks, self._results = [trunk], [], {}
        self._has_fallen_together = length < len(outputs[0])
        return trunk

    def take(self, beam: Request, logprobs: TokenLogprobs) -> None:
        """The result of one beam."""
        self._results[beam.request_id] = logprobs

    def branch(self) -> tuple[list[tuple[Request, int]], list[Request]]:
        """Chooses the next beams, of which `forks` need blocks; changes none if `search.is_finished`.

        Returns the beams that go on with how many tokens were appended to each, and those that are dropped.
        """
        if self._has_fallen_together:
            begin = self.beams[0].num_output_tokens
            chosen = [(0, hypothesis.output[begin:]) for hypothesis in self.search.running]
            self._has_fallen_together = False
        else:
            results = [self._results[beam.request_id] for beam in self.beams]
            chosen = [(beam, (token_id,)) for beam, token_id in self.search.advance(results)]
        self._results = {}
        if self.search.is_finished:
            return [], []
        before, self.beams = self.beams, []
        going_on: dict[int, tuple[int, ...]] = {}
        for place, token_ids in chosen:
            beam = before[place]
            if place in going_on:
                child = self._make([*beam.token_ids, *token_ids], beam.block_hashes)
                child.num_computed_tokens = beam.num_computed_tokens
                self.forks.append((beam, child))
                self.beams.append(child)
            else:
                going_on[place] = token_ids
                self.beams.append(beam)
        for place, token_ids in going_on.items():
            before[place].token_ids += token_ids
        dropped = [beam for place, beam in enumerate(before) if place not in going_on]
        return [(before[place], len(token_ids)) for place, token_ids in going_on.items()], dropped

    def finish(self) -> None:
        """Makes `first` the best hypothesis there is and gives it the others; those not complete are aborted ones.

        Sets no status. May be called again if it was interrupted.
        """
        first = self.first
        hypotheses: tuple[Hypothesis, ...] = self.search.running
        if self.search.is_finished:
            hypotheses = self.search.complete
        first.other_samples = [
            replace(
                first,
                request_id=f"{first.request_id}#{index}",
                sample_index=index,
                token_ids=first.token_ids[: first.num_prompt_tokens],
                other_samples=[],
                status=RequestStatus.FINISHED,
            )
            for index in range(1, len(hypotheses))
        ]
        for request, hypothesis in zip(reversed(first.samples), reversed(hypotheses), strict=True):
            request.token_ids[request.num_prompt_tokens :] = hypothesis.output
            request.cumulative_logprob, request.score = hypothesis.cumulative_logprob, hypothesis.score
            request.stop_reason = hypothesis.output[-1] if hypothesis.finish_reason == "stop" else None
            request.finish_reason = hypothesis.finish_reason or "abort"

    def _make(self, token_ids: list[int], block_hashes: Iterable[bytes]) -> Request:
        name = f"{self.first.request_id}#{self._num_made}"
        self._num_made += 1
        return replace(
            self.first,
            request_id=name,
            family_id=self.first.request_id,
            token_ids=token_ids,
            sampling_params=self._params,
            num_samples=0,
            block_hashes=list(block_hashes),
            beam_search=None,
            logprobs=[],
            other_samples=[],
        )


def _num_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
