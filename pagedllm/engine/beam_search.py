"""BeamSearch: which beams of one prompt go on with which tokens, and which hypotheses are complete. Numbers only.

The rules are those of transformers' `generate(num_beams=...)`. Of the K best continuations of all beams together those
that do not end are the next beams; of those that end, the ones among the first beam_width are complete hypotheses, of
which the beam_width with the best scores are kept. K is beam_width times max(2, 1 + the number of ids that end an
output), so enough remain to go on. Sums are float32, in the order of the tokens; ties go to the earlier beam, then to
the lower id. Knows nothing of requests and blocks; `families.BeamGroup` asks it once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagedllm.beam_search_params import BeamSearchParams
    from pagedllm.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Hypothesis:
    output: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"] | None = None  # None: it may go on


class BeamSearch:
    def __init__(self, params: BeamSearchParams, end_token_ids: frozenset[int], max_output_tokens: int) -> None:
        self.width = params.beam_width
        self.num_candidates = max(2, 1 + len(end_token_ids)) * self.width
        self.running: tuple[Hypothesis, ...] = (Hypothesis((), 0.0, 0.0),)  # best first
        self.complete: tuple[Hypothesis, ...] = ()  # best first, at most `width`
        self.is_finished = False
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._end_token_ids = end_token_ids
        self._max_output_tokens = max_output_tokens

    def advance(self, results: Sequence[TokenLogprobs]) -> list[tuple[int, int]]:
        """Takes the logprobs after each running beam, with the top `num_candidates` of the vocabulary or all of it;
        returns the (beam, token) that the next ones are made of, the best first. None of them once `is_finished`."""
        length = len(self.running[0].output) + 1
        is_last = length >= self._max_output_tokens
        goes_on: list[Hypothesis] = []
        complete, chosen = list(self.complete), []
        for place, (beam, token_id, total) in enumerate(self._best_continuations(results)):
            is_end = token_id in self._end_token_ids
            is_complete = is_end or is_last
            if not (place < self.width if is_complete else len(goes_on) < self.width):
                continue
            output = (*self.running[beam].output, token_id)
            if is_complete:
                complete.append(Hypothesis(output, total, self._score(total, length), "stop" if is_end else "length"))
            else:
                goes_on.append(Hypothesis(output, total, self._score(total, length)))
                chosen.append((beam, token_id))
        complete.sort(key=lambda hypothesis: -hypothesis.score)  # stable: earlier ones stay in front
        self.complete = tuple(complete[: self.width])
        self.is_finished = is_last or self._cannot_improve(goes_on[0].cumulative_logprob, length)
        if self.is_finished:
            return []
        self.running = tuple(goes_on)
        return chosen

    def _best_continuations(self, results: Sequence[TokenLogprobs]) -> Iterator[tuple[int, int, float]]:
        """(beam, token, sum of logprobs) of K, the largest sum first."""
        import numpy as np  # for searches only: the engine runs without

        token_ids = np.stack([result.token_ids[1:] for result in results])  # [beams, K]
        logprobs = np.stack([result.logprobs[1:] for result in results])
        before = np.array([hypothesis.cumulative_logprob for hypothesis in self.running], np.float32)
        sums = logprobs + before[:, None]
        beams = np.repeat(np.arange(len(results)), token_ids.shape[1])
        order = np.lexsort((token_ids.ravel(), beams, -sums.ravel()))[: self.num_candidates]
        return zip(beams[order].tolist(), token_ids.ravel()[order].tolist(), sums.ravel()[order].tolist(), strict=True)

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return float(cumulative_logprob / length**self._length_penalty)

    def _cannot_improve(self, best_running: float, length: int) -> bool:
        if len(self.complete) < self.width:
            return False
        if self._early_stopping is True:
            return True
        favours_length = self._early_stopping == "never" and self._length_penalty > 0
        best_possible = self._score(best_running, self._max_output_tokens if favours_length else length)
        return best_possible <= self.complete[-1].score
