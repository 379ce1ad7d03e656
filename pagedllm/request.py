"""Request: what the engine knows of one prompt. Plain data; EngineCore, the Scheduler and KVCacheManager act on it.

`token_ids` is prompt + output and only grows. A request has no phase: each step brings `num_computed_tokens` closer
to `len(token_ids)`, a few tokens or many at a time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagedllm.beam_search_params import BeamSearchParams
    from pagedllm.choices import ChoiceTable
    from pagedllm.errors import RequestError
    from pagedllm.reasoning import Thinking
    from pagedllm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again; its blocks are given back, its tokens are kept
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at one output position: the sampled token first, then the top k (which may hold it again)."""

    token_ids: NDArray[np.int32]  # [1 + k]
    logprobs: NDArray[np.float32]  # [1 + k]
    sampled_rank: int  # 1 + number of tokens with a strictly greater logit


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Logprobs of m prompt tokens that follow each other, each given all tokens before it."""

    token_ids: NDArray[np.int32]  # [m, 1 + k]: the prompt's own token first, then the top k (which may hold it again)
    logprobs: NDArray[np.float32]  # [m, 1 + k]
    ranks: NDArray[np.int32]  # [m] 1 + number of tokens with a strictly greater logit
    is_greedy: NDArray[np.bool_]  # [m] whether greedy decoding would take just this token

    @classmethod
    def joined(cls, parts: Sequence[LogprobRows]) -> LogprobRows:
        """Of the same k; none are no rows."""
        import numpy as np

        if not parts:
            ids = np.zeros((0, 1), np.int32)
            return cls(ids, ids.astype(np.float32), ids[:, 0], ids[:, 0].astype(np.bool_))
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.is_greedy for part in parts]),
        )


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    token_ids: list[int]  # prompt + output, append only
    num_prompt_tokens: int
    sampling_params: SamplingParams
    max_output_tokens: int  # concrete: min(max_tokens or infinity, max_model_len - prompt)
    seed: int = 0  # 64-bit key of this request's random stream
    eos_token_ids: tuple[int, ...] = ()
    thinking: Thinking | None = None  # of a thinking model's requests
    call_id: int = 0
    prompt_index: int = 0
    arrival: int = 0  # number in the order the scheduler received them
    priority: int = 0  # lower is served first (PRIORITY policy)
    rank: int = 0  # place in the offline plan
    rope_variant: int = 0  # which table of positions its keys are rotated by; fixed at admission
    choices: ChoiceTable | None = None  # the texts that the output may be
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # bad_words as the tokenizer writes them, with and without a space
    stop_tokens: Mapping[int, str] = field(default_factory=dict)  # special tokens whose text is one of the stops
    extra_keys: tuple[object, ...] = ()  # adapter, rope variant, cache salt, weight version: root of the block hashes
    num_unscored_tokens: int = 0  # at the prompt's end: those whose logprobs are wanted and not there yet
    follows_output: bool = False  # its masks, callables or penalties, on the host, must know a token before the next
    beam_search: BeamSearchParams | None = None  # of a request whose output is searched for, not sampled

    # Of what the scheduler makes of one request that asks for several outputs.
    family_id: str = ""  # the request_id of the request that was added; empty where it asks for one output
    sample_index: int = 0  # which of a prompt's n samples; 0 is the request that was added
    num_samples: int = 1  # tokens to draw from the next logits: more for samples to come, 0 for a beam
    shares_blocks: bool = False  # also without a prefix cache: with the others of its family
    other_samples: list[Request] = field(default_factory=list)  # indices 1, 2 ... of the request that was added

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the eos / stop token
    error: RequestError | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission
    num_preemptions: int = 0
    first_step: int = 0  # how many steps came before the one that admitted it first
    num_steps: int = 0  # set at the end: how many it took from then on
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids

    text: str | None = None  # set at finish, unless sampling_params.detokenize is False
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one entry per output token when asked for
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[LogprobRows] = field(default_factory=list)  # of the prompt's last tokens, in order
    score: float | None = None  # of a hypothesis of beam search: cumulative_logprob / length ** length_penalty

    @property
    def samples(self) -> tuple[Request, ...]:
        """All outputs of the request that was added, by sample_index."""
        return (self, *self.other_samples)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_wanted_tokens(self) -> int:
        """How many of the present tokens are to be computed: from the last one of a prompt that is only scored nothing
        follows."""
        return len(self.token_ids) - (self.max_output_tokens == 0)

    @property
    def first_logits_index(self) -> int:
        """The first position whose logits are wanted; nothing from there on is taken from the prefix cache."""
        if self.num_unscored_tokens:
            return self.num_prompt_tokens - 1 - self.num_unscored_tokens
        return len(self.token_ids) - 1

    def scored_rows(self) -> LogprobRows:
        """The logprobs of all prompt tokens that were to be scored, once they are there."""
        return LogprobRows.joined(self.prompt_logprobs)

    @property
    def text_token_ids(self) -> list[int]:
        """The output tokens that `text` is made of: all, but for the eos or stop token that ended it.

        With include_stop_str_in_output that one too. A stop string ends the text somewhere else: the engine cuts it.
        """
        token_ids = self.output_token_ids
        if isinstance(self.stop_reason, int) and not self.sampling_params.include_stop_str_in_output:
            token_ids.pop()
        return token_ids

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
