"""Where a row that a length ended may go on, so that `--retry cut` computes what is new only.

A state is [rope variant, output ids ...]. The tokens are those that a longer run would have begun with, since none
depends on max_tokens; but keys are rotated by the variant, which does: where it would be another, the row starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedllm.request import Request


def cut_state(request: Request) -> list[int]:
    """Of a request that has ended; empty where it cannot go on: it ended otherwise, or its logprobs are wanted."""
    if request.finish_reason != "length" or not _is_tokens_only(request):
        return []
    return [request.rope_variant, *request.output_token_ids]


def go_on(request: Request, state: Sequence[int]) -> None:
    """Gives a new request the output that it begins with, where the state fits."""
    variant, *token_ids = state or (request.rope_variant,)
    if variant == request.rope_variant and len(token_ids) < request.max_output_tokens and _is_tokens_only(request):
        request.token_ids.extend(token_ids)


def _is_tokens_only(request: Request) -> bool:
    params = request.sampling_params
    return params.n == 1 and params.logprobs is None and params.prompt_logprobs is None
