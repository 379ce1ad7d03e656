"""What a call is given beside its prompts, checked and brought to one value per prompt.

Knows the SamplingParams, priorities and `on_error` that users pass; what they mean for a prompt is checked by
RequestBuilder. Called by LLM before anything is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pagedllm.assembly import Assembly
from pagedllm.config import SchedulingPolicy
from pagedllm.sampling_params import SamplingParams, is_int

OnError = Literal["raise", "return"]


def check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")


def params_per_prompt(
    assembly: Assembly, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """A single one that is wrong is the call's error; one of a list is its prompt's. None: the model's defaults.

    Tells once which defaults are in force.
    """
    defaults = assembly.defaults
    if given is None:
        assembly.notices.tell(f"sampling_params=None: {defaults.describe()}")
        given = defaults.params()
    elif defaults.values:
        assembly.notices.tell(defaults.describe_given())
    if isinstance(given, SamplingParams):
        assembly.builder.check_params(given)
        return [given] * num_prompts
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them, got {type(given).__name__}")
    params = list(given)
    for index, item in enumerate(params):
        if not isinstance(item, SamplingParams):
            raise TypeError(f"sampling_params[{index}] must be a SamplingParams, got {type(item).__name__}")
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling_params for {num_prompts} prompts: pass one, or one per prompt")
    return params


def priority_per_prompt(policy: SchedulingPolicy, priority: Sequence[int] | None, num_prompts: int) -> Sequence[int]:
    if priority is None:
        return [0] * num_prompts
    if policy != "priority":
        raise ValueError("priority needs LLM(..., scheduling_policy='priority')")
    if len(priority) != num_prompts:
        raise ValueError(f"{len(priority)} priorities for {num_prompts} prompts: pass one per prompt")
    for index, item in enumerate(priority):
        if not is_int(item):
            raise ValueError(f"priority[{index}] must be an int, got {item!r}")
    return priority
