"""The contract between the scheduler and the runner: what one step computes, and what came of it.

Nothing in it is a live object, and nothing grows with a request's length: the runner keeps persistent rows, and a
ScheduledRequest tells only what is new. A running decode costs one ScheduledRequest with empty tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pagedllm.choices import ChoiceTable
    from pagedllm.errors import RequestError
    from pagedllm.request import LogprobRows, TokenLogprobs
    from pagedllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """What the runner must know of a request once, when it (re)enters the batch."""

    num_prompt_tokens: int
    sampling_params: SamplingParams  # the engine's own copy
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    rope_variant: int = 0
    adapter_id: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    choices: ChoiceTable | None = None  # made once for all requests with these choices
    sample_index: int = 0  # of the first token that is drawn in a step


class ScheduledRequest(NamedTuple):  # 0.2 us to make, a frozen dataclass 0.75 us: one per running request and step
    request_id: str
    num_computed_tokens: int  # tokens whose K and V are in the cache before this step
    num_new_tokens: int  # computed in this step: positions num_computed_tokens ...
    new_token_ids: tuple[int, ...] = ()  # ids that the runner does not hold; for a new request all its tokens
    draft_token_ids: tuple[int, ...] = ()  # speculation: proposed continuations, verified in this step
    new_block_ids: tuple[tuple[int, ...], ...] = ((),)  # per KV group, appended to the row's table; whole table if new
    # Absolute position; logits are wanted for new tokens from it on. Those of the last token known are sampled from,
    # those of prompt tokens before it give the logprobs of the prompt's next token.
    first_logits_index: int = 0
    num_samples: int = 1  # drawn from the last logits: the row keeps the first. 0: a beam, only logprobs are wanted
    new_request: NewRequestData | None = None

    @property
    def is_new(self) -> bool:
        return self.new_request is not None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    scheduled: Sequence[ScheduledRequest]
    # Finished or preempted since the last step: their rows are free, before new ones are taken, since an id may be both
    # released and new in one plan. After a step that failed, ids may be among them that the runner never held.
    released_request_ids: Sequence[str] = ()
    blocks_to_copy: Sequence[tuple[int, int]] = ()  # (from, to), before anything else; copy-on-write
    num_tokens: int = 0  # sum of num_new_tokens


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Results of one step; the sequences are parallel to `SchedulerOutput.scheduled`."""

    sampled_token_ids: Sequence[tuple[int, ...]]  # () where the request's last token was not reached, and for a beam
    is_finite: Sequence[bool]  # False: the logits held NaN or infinity, nothing was sampled
    logprobs: Sequence[tuple[TokenLogprobs, ...]] = ()  # one per sampled id, or for a beam; empty: nobody asked
    errors: dict[str, RequestError] = field(default_factory=dict)  # by request_id: a user's callable raised, say
    prompt_logprobs: dict[str, LogprobRows] = field(default_factory=dict)  # by request_id, of requests that wanted any
