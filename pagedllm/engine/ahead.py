"""Planning ahead: the next plan is made while a step is under way, before its results are there (a GPU runs the step).

Each request for which the step draws a token is *foreseen* to have it: there is a place in the plan for it, and the
runner, which has the token on the device, puts it in. When the results come, one step late, some requests will have
ended. What was planned for those is computed and thrown away: a result counts only for who has kept its row since.

Their blocks are free at once, although a step that still writes to them runs: whoever takes them writes and reads in
later steps, and a device runs steps in order. It cannot spoil what the prefix cache has: a block with a name is full of
known tokens, and no step writes to a full block. Nor is anything published whose step has not succeeded: what a plan
made pending is published by its own results, and a block that a foreseen token fills has no name until that is known.

`can_plan_ahead` is the whole rule of when. Used by the Scheduler.
"""

from __future__ import annotations

from pagedllm.engine.request_states import RequestStates
from pagedllm.engine.scheduler_output import SchedulerOutput
from pagedllm.request import RequestStatus


def foresee(states: RequestStates, plan: SchedulerOutput) -> set[str]:
    """Counts a plan that is under way as computed, as `Scheduler.update` will; returns the ids of those that will have
    a further token then, and something to compute. Who has its last token by this plan is not among them."""
    foreseen = set()
    for scheduled in plan.scheduled:
        request = states.requests.get(scheduled.request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            continue  # it ended since it was planned, or waits again
        request.num_computed_tokens = scheduled.num_computed_tokens + scheduled.num_new_tokens
        is_drawn = request.num_computed_tokens == len(request.token_ids)
        if is_drawn and request.num_output_tokens + 1 < request.max_output_tokens:
            foreseen.add(request.request_id)
    return foreseen


def can_plan_ahead(states: RequestStates, foreseen: set[str]) -> bool:
    """Not where a result decides what is computed next: beams, samples that will fork, and masks, callables or
    penalties that follow the output. Not while a prompt is scored, which is done when the result is taken. And not
    where somebody would have to be preempted: the results may give blocks back."""
    num_blocks, most_new_tokens = 0, states.max_num_batched_tokens
    for request in states.running:
        if request.num_samples != 1 or request.follows_output or request.num_unscored_tokens:
            return False
        num_tokens = len(request.token_ids) + (request.request_id in foreseen)
        num_new_tokens = min(num_tokens - request.num_computed_tokens, most_new_tokens)
        num_blocks += states.kv_cache.num_blocks_wanted(request, num_new_tokens)
    return num_blocks <= states.kv_cache.pool.num_free
