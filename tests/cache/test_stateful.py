"""KVCacheManager under random admissions, growth, forks, preemptions, failures and aborts.

A model beside it remembers what every slot holds. After each step each request's tokens are read back through its
tables, as far as a window lets them be seen, so sharing a wrong block, writing into a shared one, giving one back too
early or hitting one that was never filled is noticed.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.request import Request
from tests.engine.fakes import assert_manager_conserved, make_request

MAX_CHUNK = 14
TOKENS = st.integers(0, 1)  # two letters: most prompts share something


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        windows=st.sampled_from(((0,), (5,), (1,), (0, 3), (4, 0, 4), (2, 7))),
        is_cached=st.booleans(),
    )
    def begin(self, num_blocks: int, block_size: int, windows: tuple[int, ...], is_cached: bool) -> None:
        num_blocks *= len(windows)
        self.block_size = block_size
        self.windows = windows
        self.manager = KVCacheManager(
            num_blocks, block_size, windows=windows, max_num_new_tokens=MAX_CHUNK, enable_prefix_caching=is_cached
        )
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.running: list[Request] = []
        self.scheduled: dict[str, int] = {}  # new tokens of the step being made
        self.copies: list[tuple[int, int]] = []
        self.num_requests = 0

    def new_id(self) -> str:
        self.num_requests += 1
        return str(self.num_requests)

    def slots_of(self, request: Request, first: int, end: int, group: int) -> list[int]:
        block_ids = self.manager.block_ids(request)[group]
        return [block_ids[i // self.block_size] * self.block_size + i % self.block_size for i in range(first, end)]

    def assert_readable(self, request: Request) -> None:
        """What the next token sees holds the request's own tokens, in every group."""
        end = request.num_computed_tokens
        for group, window in enumerate(self.windows):
            first = max(0, end + 1 - window) if window else 0
            stored = [self.slots[slot] for slot in self.slots_of(request, first, end, group)]
            assert stored == request.token_ids[first:end]

    def drop(self, request: Request) -> None:
        self.running.remove(request)
        self.scheduled.pop(request.request_id, None)
        self.manager.free(request)

    def begin_step(self) -> None:
        if not self.scheduled:
            self.copies += self.manager.take_blocks_to_copy()

    @rule(token_ids=st.lists(TOKENS, min_size=1, max_size=MAX_CHUNK), share=st.integers(1, MAX_CHUNK))
    def admit(self, token_ids: list[int], share: int) -> None:
        self.begin_step()
        request = make_request(self.new_id(), token_ids)
        blocks = self.manager.get_computed_blocks(request, len(token_ids) - 1)
        if not self.manager.can_admit(request, blocks, 0):
            return
        request.num_computed_tokens = self.manager.admit(request, blocks)
        assert request.num_computed_tokens < len(token_ids)
        num_new_tokens = min(share, len(token_ids) - request.num_computed_tokens)
        assert self.manager.allocate_slots(request, num_new_tokens) is not None
        self.running.append(request)
        self.scheduled[request.request_id] = num_new_tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_id=TOKENS, share=st.integers(1, MAX_CHUNK))
    def grow(self, data: st.DataObject, token_id: int, share: int) -> None:
        self.begin_step()
        request = data.draw(st.sampled_from(self.running))
        if request.request_id in self.scheduled:
            return
        num_new_tokens = len(request.token_ids) - request.num_computed_tokens
        if num_new_tokens == 0:
            request.token_ids.append(token_id)
            num_new_tokens = 1
        num_new_tokens = min(share, num_new_tokens)
        if self.manager.allocate_slots(request, num_new_tokens) is not None:
            self.scheduled[request.request_id] = num_new_tokens
        else:
            num_blocks = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
            num_missing = sum(num_blocks - len(block_ids) for block_ids in self.manager.block_ids(request))
            assert self.manager.pool.num_free < num_missing

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.running))
        for request in (victim, *self.manager.withdraw(victim)):
            self.drop(request)

    @precondition(lambda self: self.running and not self.scheduled)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.running))
        child = make_request(self.new_id(), parent.token_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens
        num_free = self.manager.pool.num_free
        if self.manager.fork(parent, child):
            self.running.append(child)
        else:
            assert num_free < len(self.windows)

    @precondition(lambda self: not self.scheduled)
    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        self.copies += self.manager.take_blocks_to_copy() if not self.scheduled else ()
        for source, target in self.copies:
            for i in range(self.block_size):
                self.slots[target * self.block_size + i] = self.slots[source * self.block_size + i]
        self.copies.clear()
        written: set[int] = set()
        scheduled = [request for request in self.running if request.request_id in self.scheduled]
        for request in scheduled:
            end = request.num_computed_tokens + self.scheduled[request.request_id]
            new_token_ids = request.token_ids[request.num_computed_tokens : end]
            for group in range(len(self.windows)):
                slots = self.slots_of(request, request.num_computed_tokens, end, group)
                for slot, token_id in zip(slots, new_token_ids, strict=True):
                    assert slot not in written
                    written.add(slot)
                    self.slots[slot] = token_id
        if scheduled and data.draw(st.booleans()):
            failed = data.draw(st.sampled_from(scheduled))
            for request in (failed, *self.manager.withdraw(failed)):
                self.drop(request)
        self.manager.publish()
        for request in self.running:
            self.assert_readable(request)  # as it was when the step's first token attended
            request.num_computed_tokens += self.scheduled.get(request.request_id, 0)
            self.assert_readable(request)
        self.scheduled.clear()

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "manager"):
            return
        assert_manager_conserved(self.manager)
        assert set(self.manager.request_ids) == {request.request_id for request in self.running}
        wasted = 0
        for request in self.running:
            num_filled = request.num_computed_tokens + self.scheduled.get(request.request_id, 0)
            wasted += -num_filled % self.block_size
            num_held = sum(map(len, self.manager._tables[request.request_id].blocks))
            assert num_held <= self.manager.groups.num_blocks(num_filled)
        assert self.manager.num_wasted_slots == wasted * len(self.windows)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
