"""ScoringMethods: the calls of LLM that score texts instead of generating them.

Each is one call of the engine: pairs are made and checked by `scoring`, run together, and told apart again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

from pagedllm.errors import NotSupportedError
from pagedllm.outputs import Classification, Loglikelihood
from pagedllm.prompts import parse_prompts
from pagedllm.request_builder import EncodedPrompt
from pagedllm.scoring import (
    SCORING,
    classification,
    encode_pairs,
    nested,
    parse_choices,
    parse_continuations,
    rolling_windows,
    score_of,
)

if TYPE_CHECKING:
    from pagedllm.assembly import Assembly
    from pagedllm.call import Call
    from pagedllm.call_lock import CallLock
    from pagedllm.request import Request
    from pagedllm.sampling_params import SamplingParams


class ScoringMethods(ABC):
    _lock: CallLock

    @abstractmethod
    def _open(self) -> Assembly: ...

    @abstractmethod
    def _start_call(
        self,
        name: str,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        *,
        raises: bool,
    ) -> Call: ...

    def loglikelihood(
        self, prompts: Any, continuations: Any, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[Loglikelihood] | list[list[Loglikelihood]]:
        """How likely each continuation is after its prompt, without generating anything.

        prompts: as in `generate`. continuations: one text or list of token ids per prompt, or one list of such
            candidates per prompt; the result is nested alike. What prompts share is computed once.

        Texts are cut as evaluation harnesses do: whitespace at the prompt's end moves to the continuation, both are
        encoded together, and the continuation is what lies behind the first len(encode(prompt)) tokens. An empty prompt
        stands for the model's BOS or EOS token. Logprobs are those of the model's own logits.

        Raises RequestError before any work if a pair cannot be scored, BatchError if one failed while running.
        """
        with self._lock:
            parsed = parse_prompts(prompts)
            candidates, is_nested = parse_continuations(continuations, len(parsed))
            scores = self._score(encode_pairs(self._open().builder, parsed, candidates, is_nested), use_tqdm)
            return nested(scores, candidates) if is_nested else scores

    def loglikelihood_rolling(self, texts: Any, *, use_tqdm: bool | Callable[..., Any] = True) -> list[Loglikelihood]:
        """How likely each whole text, or list of token ids, is; exp(-logprob / num_tokens) is its perplexity.

        A text begins behind the model's BOS token (EOS where it has none). One that is longer than max_model_len is
        scored in windows, as evaluation harnesses do: every token once, windows after the first begin with one token of
        context, and the last one is as long as the others.
        """
        with self._lock:
            builder = self._open().builder
            parsed = [rolling_windows(builder, text, f"texts[{i}]") for i, text in enumerate(parse_prompts(texts))]
            ends = list(accumulate(len(windows) for _, windows in parsed))
            requests = self._run_scoring([window for _, windows in parsed for window in windows], use_tqdm)
            return [
                score_of(requests[end - len(windows) : end], token_ids)
                for end, (token_ids, windows) in zip(ends, parsed, strict=True)
            ]

    def classify_by_choice(
        self, prompts: Any, choices: Any, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[Classification]:
        """The likeliest of some texts after each prompt, and the probabilities of all as if nothing else were possible.

        choices: texts for all prompts, or one list of texts per prompt; most want a space at their beginning. Each
        counts as `loglikelihood` scores it, by the sum over its tokens.
        """
        with self._lock:
            parsed = parse_prompts(prompts)
            wanted = parse_choices(choices, len(parsed))
            scores = self._score(encode_pairs(self._open().builder, parsed, wanted, True), use_tqdm)
            return [classification(*pair) for pair in zip(wanted, nested(scores, wanted), strict=True)]

    def score(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here: see the error."""
        raise NotSupportedError(
            "LLM.score means the similarity of texts in other libraries: for how likely a continuation is, "
            "there is loglikelihood(prompts, continuations)"
        )

    def _score(self, pairs: Sequence[EncodedPrompt], use_tqdm: bool | Callable[..., Any]) -> list[Loglikelihood]:
        requests = self._run_scoring(pairs, use_tqdm)
        return [
            score_of([request], pair.token_ids[pair.num_context_tokens :])
            for request, pair in zip(requests, pairs, strict=True)
        ]

    def _run_scoring(self, prompts: Sequence[EncodedPrompt], use_tqdm: bool | Callable[..., Any]) -> list[Request]:
        """Runs checked prompts, of which all tokens behind the context are scored."""
        call = self._start_call("prompts", prompts, [SCORING] * len(prompts), [0] * len(prompts), raises=True)
        call.run(use_tqdm)
        requests = call.requests()
        if any(request.error is not None for request in requests):
            call.raise_if_failed(call.outputs())
        return requests
