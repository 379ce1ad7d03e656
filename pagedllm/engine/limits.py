"""What can never run, whoever else runs: `why_never` gives the RequestError, pure and without a scheduler."""

from __future__ import annotations

from pagedllm.errors import ErrorCode, RequestError
from pagedllm.kv_groups import KVGroups
from pagedllm.request import Request


def why_never(
    request: Request, *, max_model_len: int, max_num_seqs: int, num_blocks: int, groups: KVGroups
) -> RequestError | None:
    """None if the request can run alone; its max_output_tokens is lowered to what max_model_len leaves already."""

    def error(code: ErrorCode, text: str) -> RequestError:
        return RequestError(code, text, index=request.prompt_index)

    num_tokens, num_slots = request.num_prompt_tokens, groups.longest_text(num_blocks)
    if num_tokens == 0:
        return error("empty_prompt", "the prompt has no tokens")
    if num_tokens > max_model_len:
        excess = num_tokens - max_model_len
        return error("prompt_too_long", f"{num_tokens:,} tokens exceed max_model_len {max_model_len:,} by {excess:,}")
    if num_tokens == max_model_len and request.max_output_tokens > 0:
        text = f"{num_tokens:,} tokens leave no room for an output token: max_model_len is {max_model_len:,}"
        return error("prompt_too_long", text)
    if num_tokens > num_slots:
        return error("never_fits", f"{num_tokens:,} tokens never fit: the KV cache holds {num_slots:,}")
    if request.beam_search is not None:
        width = request.beam_search.beam_width
        if width > max_num_seqs:
            return error("never_fits", f"beam_width={width} never fits: max_num_seqs is {max_num_seqs}")
        num_needed = num_blocks_of_beams(request, width, min(max_model_len, num_slots + 1), groups)
        if num_needed > num_blocks:
            num_output = request.max_output_tokens
            text = f"{width} beams of {num_tokens:,} + {num_output:,} tokens never fit: they take {num_needed:,} blocks"
            return error("never_fits", f"{text} of {groups.block_size}, the KV cache holds {num_blocks:,}")
    return None


def num_blocks_of_beams(request: Request, width: int, max_num_tokens: int, groups: KVGroups) -> int:
    """At their full length: the prompt's full blocks once, all others for each beam. No token follows the last one."""
    if request.max_output_tokens == 1:
        width = 1  # it ends before it branches
    num_tokens = min(request.num_prompt_tokens + request.max_output_tokens, max_num_tokens) - 1
    return groups.num_blocks_of_branches(request.num_prompt_tokens, num_tokens, width)
