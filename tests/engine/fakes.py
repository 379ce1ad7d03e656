"""An engine without a model: the next token is a function of all tokens before it, read back through the blocks.

FakeRunner plays the runner's part of the contract to the letter and checks the scheduler's: it keeps rows by the plan's
news alone, writes tokens into slots of a fake KV pool, and "attends" by reading a sequence back through its blocks.
`launch` computes at once, as a device does in its order, and shows the results when they are waited for.
So a wrong block, a hit on something never computed, a forgotten row or a write into a shared block changes a token or
trips an assertion. With windows there is a table for each KV group, over the same slots; what a window hides is not
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.engine.core import EngineCore
from pagedllm.engine.policy import FCFSPolicy, Policy
from pagedllm.engine.scheduler import Scheduler
from pagedllm.engine.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from pagedllm.request import LogprobRows, Request, TokenLogprobs
from pagedllm.sampling_params import SamplingParams

VOCAB_SIZE = 97
EMPTY = -1

NextToken = Callable[[Sequence[int], int], int]  # (all tokens before, the request's seed) -> id


def hashed_token(token_ids: Sequence[int], seed: int) -> int:
    """A model with a long memory: any wrong token before changes what comes."""
    digest = blake2b(repr((tuple(token_ids), seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def logprob_of(token_ids: Sequence[int]) -> float:
    return -(1 + hashed_token(token_ids, 1 << 60)) / 8  # exact in float32


def sample_seed(seed: int, sample_index: int) -> int:
    """The random stream of one of a prompt's samples; the first has the request's own."""
    return seed + 1_000_003 * sample_index


def next_logprobs(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """[VOCAB_SIZE]: what a beam may go on with. Eighths, whose sums are exact, with ties among them."""
    rng = np.random.default_rng(int.from_bytes(blake2b(repr(tuple(token_ids)).encode(), digest_size=8).digest()))
    return (-rng.integers(1, 60, VOCAB_SIZE) / 8).astype(np.float32)


def reference_tokens(request: Request, next_token: NextToken = hashed_token) -> list[int]:
    """What a plain loop gives: no cache, no batch. Ends by eos, stop ids and length; strings are tested elsewhere."""
    params = request.sampling_params
    ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_token_ids)}
    token_ids = request.token_ids[: request.num_prompt_tokens]
    output: list[int] = []
    while len(output) < request.max_output_tokens:
        output.append(next_token([*token_ids, *output], sample_seed(request.seed, request.sample_index)))
        if output[-1] in ends and len(output) >= params.min_tokens:
            break
    return output


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: tuple[list[int], ...]  # per KV group
    seed: int
    sample_index: int
    num_logprobs: int | None


@dataclass
class FakeRunner:
    """`execute` and `launch` of an engine. `non_finite` names requests whose logits are not finite, by request id."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    next_token: NextToken = hashed_token
    windows: tuple[int, ...] = (0,)
    non_finite: set[str] = field(default_factory=set)
    plans: list[SchedulerOutput] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)  # ("launch" or "result", number of the plan)
    rows: dict[str, _Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [EMPTY] * (self.num_blocks * self.block_size)

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        self._update_rows(plan)
        self._copy_blocks(plan)
        written: set[int] = set()
        for scheduled in plan.scheduled:  # K and V of the whole batch are written before anyone attends
            row = self.rows[scheduled.request_id]
            end = scheduled.num_computed_tokens + scheduled.num_new_tokens
            assert scheduled.num_new_tokens > 0
            assert end <= len(row.token_ids)
            for group, position in product(range(len(self.windows)), range(scheduled.num_computed_tokens, end)):
                slot = self._slot(row, position, group)
                assert slot not in written, "a slot is written twice"
                written.add(slot)
                self.slots[slot] = row.token_ids[position]
        return self._sample(plan)

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        number = len(self.plans)
        self.events.append(("launch", number))
        output = self(plan)

        def take_results() -> ModelRunnerOutput:
            self.events.append(("result", number))
            return output

        return take_results

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for request_id in plan.released_request_ids:
            self.rows.pop(request_id, None)
        assert len({scheduled.request_id for scheduled in plan.scheduled}) == len(plan.scheduled)
        assert sum(scheduled.num_new_tokens for scheduled in plan.scheduled) == plan.num_tokens
        for scheduled in plan.scheduled:
            if scheduled.new_request is not None:
                assert scheduled.request_id not in self.rows, "a row is taken twice"
                new = scheduled.new_request
                self.rows[scheduled.request_id] = _Row(
                    [], tuple([] for _ in self.windows), new.seed, new.sample_index, new.sampling_params.logprobs
                )
            row = self.rows[scheduled.request_id]
            row.token_ids += scheduled.new_token_ids
            for block_ids, new_block_ids in zip(row.block_ids, scheduled.new_block_ids):  # noqa: B905
                block_ids += new_block_ids
        assert len(self.rows) <= self.max_num_seqs

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        sources, targets = {pair[0] for pair in plan.blocks_to_copy}, [pair[1] for pair in plan.blocks_to_copy]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets)
        for source, target in plan.blocks_to_copy:
            for i in range(self.block_size):
                self.slots[target * self.block_size + i] = self.slots[source * self.block_size + i]

    def _slot(self, row: _Row, position: int, group: int) -> int:
        return row.block_ids[group][position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, row: _Row, num_computed_tokens: int, end: int, group: int) -> list[int]:
        """What the new tokens attend to; before the first one's window, which it does not see, the row's own ids."""
        window = self.windows[group]
        first = max(0, num_computed_tokens + 1 - window) if window else 0
        return row.token_ids[:first] + [self.slots[self._slot(row, i, group)] for i in range(first, end)]

    def _seen(self, row: _Row, num_computed_tokens: int, end: int) -> list[int]:
        """What is read back up to there; by the group that reads anything wrong, if one does."""
        views = [self._read(row, num_computed_tokens, end, group) for group in range(len(self.windows))]
        return next((view for view in views if view != row.token_ids[:end]), views[0])

    def _sample(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        sampled: list[tuple[int, ...]] = []
        is_finite: list[bool] = []
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        scores: dict[str, LogprobRows] = {}
        for scheduled in plan.scheduled:
            row = self.rows[scheduled.request_id]
            end = scheduled.num_computed_tokens + scheduled.num_new_tokens
            rows = self._score(scheduled, row.token_ids, end)
            if rows is not None:
                scores[scheduled.request_id] = rows
            assert scheduled.first_logits_index <= len(row.token_ids) - 1
            is_finite.append(scheduled.request_id not in self.non_finite)
            if end < len(row.token_ids) or not is_finite[-1]:
                sampled.append(())
                logprobs.append(())
                if end == len(row.token_ids):
                    row.token_ids.append(0)  # for a step that is launched before anybody knows
                continue
            seen = self._seen(row, scheduled.num_computed_tokens, end)
            if not scheduled.num_samples:
                assert row.num_logprobs is not None
                sampled.append(())
                logprobs.append((top_logprobs(seen, row.num_logprobs),))
                continue
            indices = range(row.sample_index, row.sample_index + scheduled.num_samples)
            token_ids = tuple(self.next_token(seen, sample_seed(row.seed, index)) for index in indices)
            row.token_ids.append(token_ids[0])
            sampled.append(token_ids)
            values = np.array([logprob_of(seen)], np.float32)
            logprobs.append(tuple(TokenLogprobs(np.array([i], np.int32), values, 1) for i in token_ids))
        return ModelRunnerOutput(sampled, is_finite, logprobs, prompt_logprobs=scores)

    def _score(self, scheduled: ScheduledRequest, token_ids: list[int], end: int) -> LogprobRows | None:
        """Of the tokens after those that are computed now and whose logits are wanted."""
        row = self.rows[scheduled.request_id]
        begin = max(scheduled.num_computed_tokens, scheduled.first_logits_index)
        scored = range(begin + 1, min(end + 1, len(token_ids)))
        if not scored:
            return None
        seen = self._seen(row, scheduled.num_computed_tokens, end)
        values = [logprob_of([*seen[:position], token_ids[position]]) for position in scored]
        return LogprobRows(
            np.array([[token_ids[position]] for position in scored], np.int32),
            np.array(values, np.float32)[:, None],
            np.ones(len(scored), np.int32),
            np.array([self.next_token(seen[:p], row.seed) == token_ids[p] for p in scored]),
        )


def top_logprobs(token_ids: Sequence[int], k: int) -> TokenLogprobs:
    """The largest first, lower ids first among equals, behind the one that greedy decoding takes."""
    values = next_logprobs(token_ids)
    order = np.lexsort((np.arange(VOCAB_SIZE), -values))[:k].astype(np.int32)
    order = np.concatenate((order[:1], order))
    return TokenLogprobs(order, values[order], 1)


class LetterDetokenizer:
    """Token i reads as one to three letters; half of the even ones hold their last letter back in a stream."""

    def piece(self, token_id: int) -> str:
        letters = "abcdefghij"
        return "".join(letters[(token_id * k) % 10] for k in range(1, 2 + token_id % 3))

    def decode(self, request: Request) -> str:
        return "".join(map(self.piece, request.text_token_ids))

    def stream(self, request: Request) -> LetterStream:
        return LetterStream(self)


@dataclass
class LetterStream:
    detokenizer: LetterDetokenizer
    held: str = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = self.held + "".join(map(self.detokenizer.piece, token_ids))
        cut = len(text) - (1 if token_ids[-1] % 4 == 0 else 0)
        self.held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        text, self.held = self.held, ""
        return text


def make_request(
    request_id: str,
    prompt: Iterable[int],
    max_output_tokens: int = 8,
    *,
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    priority: int = 0,
    extra_keys: tuple[object, ...] = (),
    **params: object,
) -> Request:
    token_ids = list(prompt)
    return Request(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(max_tokens=max_output_tokens, **params),  # type: ignore[arg-type]
        max_output_tokens=max_output_tokens,
        seed=seed,
        eos_token_ids=eos_token_ids,
        priority=priority,
        extra_keys=extra_keys,
    )


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 10_000,
    policy: Policy | None = None,
    enable_prefix_caching: bool = True,
    next_token: NextToken = hashed_token,
    windows: tuple[int, ...] = (0,),
    is_overlapped: bool = False,
) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(num_blocks, block_size, max_num_seqs, next_token, windows)
    kv_cache = KVCacheManager(
        num_blocks,
        block_size,
        windows=windows,
        max_num_new_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    scheduler = Scheduler(
        kv_cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=policy or FCFSPolicy(),
    )
    return EngineCore(scheduler, runner, LetterDetokenizer(), runner.launch if is_overlapped else None), runner


def run_all(engine: EngineCore, requests: Iterable[Request]) -> list[Request]:
    """Adds and runs them to the end; returns them in the order they ended."""
    for request in requests:
        engine.add_request(request)
    ended: list[Request] = []
    while engine.has_unfinished_requests():
        ended += engine.step()
        assert_slots_conserved(engine)
    return ended


def assert_slots_conserved(engine: EngineCore) -> None:
    """free + used == total, holders and counts agree, and no sequence wastes a block."""
    assert_manager_conserved(engine.scheduler.kv_cache)
    running = {request.request_id: request for request in engine.scheduler.running}
    assert set(engine.scheduler.kv_cache.request_ids) == set(running)
    for request in running.values():
        for block_ids in engine.scheduler.kv_cache.block_ids(request):
            num_filled = request.num_computed_tokens
            if engine._state.under_way is not None:  # which may bring more
                num_filled = engine.scheduler.kv_cache._tables[request.request_id].num_filled
            waste = len(block_ids) * engine.scheduler.kv_cache.block_size - num_filled
            assert 0 <= waste < engine.scheduler.kv_cache.block_size


def assert_manager_conserved(kv_cache: KVCacheManager) -> None:
    pool = kv_cache.pool
    free = [*pool.free_block_queue, *pool.retained]
    assert len(set(free)) == len(free)
    held = [block for block in pool.blocks if block.ref_count > 0]
    assert len(free) == pool.num_free
    assert {block.block_id for block in free} | {block.block_id for block in held} == set(range(pool.num_blocks))
    assert len(free) + len(held) == pool.num_blocks
    holders = {block.block_id: 0 for block in pool.blocks}
    num_slots = num_filled = 0
    for table in kv_cache._tables.values():
        for group, blocks in enumerate(table.blocks):
            num_left = table.num_blocks - len(blocks)
            assert 0 <= num_left <= kv_cache.groups.num_left_behind(group, table.num_filled)
            num_slots += table.num_blocks * kv_cache.block_size
            num_filled += table.num_filled
            for block in blocks:
                holders[block.block_id] += 1
    for source in kv_cache._copies.values():
        holders[source.block_id] += 1
    assert [block.ref_count for block in pool.blocks] == [holders[i] for i in range(pool.num_blocks)]
    assert kv_cache.num_wasted_slots == num_slots - num_filled
    cached = [block for block in pool.blocks if block.block_hash is not None]
    assert {(block.group, block.block_hash): block for block in cached} == {
        (group, name): block for group, blocks in enumerate(pool._cached_blocks) for name, block in blocks.items()
    }


def assert_idle(engine: EngineCore) -> None:
    """Nobody is left, and nothing that belonged to anybody."""
    assert not engine.has_unfinished_requests()
    assert_slots_conserved(engine)
    assert engine.scheduler.kv_cache.pool.num_free == engine.scheduler.kv_cache.pool.num_blocks
    assert engine.scheduler.requests == {}
    assert engine.scheduler.kv_cache._expected == engine.scheduler.kv_cache.pool.uses._ranks == {}
    assert engine.scheduler.running == []
    assert engine.scheduler._families == engine.scheduler._groups == engine.scheduler._untold == {}
    assert engine._state.outputs._ends == {}
