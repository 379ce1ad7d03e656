"""An exception or Ctrl-C injected anywhere in a step, through LLM: what was done comes back, the next call is exact.

CASES C6, C7. One engine goes through all of it, so whatever one failure left behind is met by the next.
tests/engine/test_interrupts.py does the same at every instruction of the host side.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, BatchError, SamplingParams
from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.detokenizer import Detokenizer, TextStream
from pagedllm.engine.output_processor import OutputProcessor
from pagedllm.engine.scheduler import Scheduler
from pagedllm.model.decoder import Decoder
from pagedllm.outputs import RequestOutput
from pagedllm.runtime.block_table import RequestRows
from pagedllm.runtime.model_runner import ModelRunner
from pagedllm.sampling.metadata import SamplingRows
from pagedllm.sampling.sampler import Sampler
from tests.hostile.harness import (
    BYTES_PER_TOKEN,
    GREEDY,
    answers,
    assert_nothing_left,
    errors,
    make_request,
    open_llm,
)

SHARED = "the quick brown fox jumps over the lazy dog. "
PROMPTS = [SHARED + "one", SHARED + "two", "a", SHARED * 2, "zyx", "one two"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=30, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0, max_tokens=26, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, stop=["never here"], bad_words=["e", "two"], ignore_eos=True),
    SamplingParams(seed=2, max_tokens=28, ignore_eos=True, min_tokens=4, logit_bias={9: 2.0}),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0),
]
TIGHT = {"kv_cache_memory_bytes": 8 * 16 * BYTES_PER_TOKEN, "max_num_seqs": 4, "max_num_batched_tokens": 40}
SITES: list[tuple[type, str]] = [
    (Scheduler, "schedule"),
    (Scheduler, "update"),
    (KVCacheManager, "allocate_slots"),
    (KVCacheManager, "admit"),
    (KVCacheManager, "publish"),
    (KVCacheManager, "free"),
    (ModelRunner, "forward"),
    (ModelRunner, "_draw"),
    (ModelRunner, "_take_up"),
    (ModelRunner, "_update_rows"),
    (RequestRows, "acquire"),
    (SamplingRows, "set"),
    (SamplingRows, "accept"),
    (Decoder, "forward"),
    (Sampler, "prepare"),
    (Sampler, "launch"),
    (Sampler, "finish"),
    (OutputProcessor, "append"),
    (Detokenizer, "decode"),
    (Detokenizer, "stream"),
    (TextStream, "push"),
    (TextStream, "finish"),
]


@pytest.fixture(scope="module")
def tight(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, max_model_len=112, **TIGHT) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    with open_llm(folder, max_model_len=112, **TIGHT) as llm:
        found = answers(llm.generate(PROMPTS, PARAMS))
        assert llm.stats.num_preemptions > 0
        return found


def fail_at(
    monkeypatch: pytest.MonkeyPatch, site: tuple[type, str], call: int, error: BaseException, late: bool
) -> Any:
    """The `call`-th call of this method raises, before or after its work. The list returned holds True once it did."""
    owner, name = site
    original, count, raised = getattr(owner, name), 0, []

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count - 1 == call and not late:
            raised.append(True)
            raise error
        result = original(self, *args, **options)
        if count - 1 == call:
            raised.append(True)
            raise error
        return result

    monkeypatch.setattr(owner, name, failing)
    return raised


def assert_given_back(outputs: Any, expected: list[Any]) -> None:
    """Finished ones whole, the others a prefix of what they would have been."""
    assert [output.index for output in outputs] == list(range(len(expected)))
    for output, whole in zip(outputs, expected, strict=True):
        assert output.error is None
        part = output.outputs[0]
        if output.finished:
            assert answers([output]) == [whole]  # type: ignore[arg-type]
        else:
            assert part.finish_reason in ("abort", None)
            assert tuple(part.token_ids) == whole[1][: len(part.token_ids)]
            if part.logprobs is not None:
                assert len(part.logprobs) == len(part.token_ids)


def assert_exact_afterwards(llm: LLM, expected: list[Any]) -> None:
    assert_nothing_left(llm)
    assert answers(llm.generate(PROMPTS, PARAMS)) == expected
    assert_nothing_left(llm)


@pytest.mark.parametrize("make_error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("site", SITES, ids=[f"{owner.__name__}.{name}" for owner, name in SITES])
def test_a_failure_anywhere_in_a_step_gives_back_what_was_done_and_the_next_call_is_exact(
    tight: LLM,
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    site: tuple[type, str],
    make_error: Callable[[], Any],
) -> None:
    num_raised = 0
    for call, late in ((0, False), (1, True), (7, False), (23, True)):
        error = make_error()
        with monkeypatch.context() as patch:
            raised = fail_at(patch, site, call, error, late)
            try:
                outputs = tight.generate(PROMPTS, PARAMS)
                assert not raised
            except make_error:  # type: ignore[misc]
                outputs = error.outputs
        num_raised += len(raised)
        assert_given_back(outputs, expected)
        assert_nothing_left(tight)
    assert num_raised >= 2
    assert_exact_afterwards(tight, expected)


@pytest.mark.parametrize("make_error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("site", SITES, ids=[f"{owner.__name__}.{name}" for owner, name in SITES])
def test_a_failure_anywhere_in_a_step_of_an_iterator_spoils_no_output_and_ends_only_the_iterator(
    tight: LLM,
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    site: tuple[type, str],
    make_error: Callable[[], Any],
) -> None:
    num_raised = 0
    for call, late in ((0, False), (7, True)):
        outputs: list[RequestOutput] = []
        with monkeypatch.context() as patch:
            raised = fail_at(patch, site, call, make_error(), late)
            iterator = tight.generate_iter(PROMPTS, PARAMS)
            try:
                outputs.extend(iterator)
                assert not raised
            except make_error:  # type: ignore[misc]
                assert list(iterator) == []
        num_raised += len(raised)
        for output in outputs:
            assert answers([output]) == [expected[output.index]]  # type: ignore[arg-type]
        assert_nothing_left(tight)
    assert num_raised >= 1
    assert_exact_afterwards(tight, expected)


class FailingBar:
    """A progress bar that raises at its k-th update."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error, self.num_updates, self.is_closed = step, error, 0, False

    def __call__(self, **options: Any) -> FailingBar:
        return self

    def set_postfix_str(self, *args: Any, **options: Any) -> None:
        pass

    def update(self, number: int) -> None:
        self.num_updates += 1
        if self.num_updates - 1 == self.step:
            raise self.error

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("make_error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", range(4))
def test_a_progress_callback_that_raises_ends_the_call_and_only_the_call(
    tight: LLM, expected: list[Any], step: int, make_error: Callable[[], Any]
) -> None:
    bar = FailingBar(step, make_error())
    with pytest.raises(type(bar.error)) as caught:
        tight.generate(PROMPTS, PARAMS, use_tqdm=bar)
    assert bar.is_closed
    assert_given_back(caught.value.outputs, expected)
    assert sum(output.finished for output in caught.value.outputs) >= step + 1
    assert_exact_afterwards(tight, expected)


@pytest.mark.parametrize("item", [0, 3])
@pytest.mark.parametrize("make_error", [RuntimeError, KeyboardInterrupt])
def test_a_lazy_prompt_iterator_that_raises_leaves_nothing_behind(
    tight: LLM, expected: list[Any], item: int, make_error: Callable[[], Any]
) -> None:
    def prompts() -> Iterator[str]:
        yield from PROMPTS[:item]
        raise make_error()

    with pytest.raises(make_error):  # type: ignore[call-overload]
        tight.generate(prompts(), PARAMS)
    assert_exact_afterwards(tight, expected)

    outputs: list[RequestOutput] = []
    with pytest.raises(make_error):  # type: ignore[call-overload]
        outputs.extend(tight.generate_iter(prompts(), PARAMS, max_in_flight=1))
    assert len(outputs) == item
    for output in outputs:
        assert answers([output]) == [expected[output.index]]  # type: ignore[arg-type]
    assert_exact_afterwards(tight, expected)


@pytest.mark.parametrize("step", range(0, 21, 2))
def test_c7_ctrl_c_at_any_step_ends_the_call_within_a_step(tight: LLM, expected: list[Any], step: int) -> None:
    """A signal, as the terminal sends it."""
    num_steps = 0

    def interrupting(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        if num_steps - 1 == step:
            signal.raise_signal(signal.SIGINT)
        return logits

    before = tight.stats.num_steps
    params = [
        *PARAMS[:-1],
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logits_processors=[interrupting]),
    ]
    with pytest.raises(KeyboardInterrupt) as caught:
        tight.generate(PROMPTS, params)
    assert num_steps == step + 1
    assert tight.stats.num_steps > before or step == 0
    assert "of 6 outputs are finished: reach them by `except KeyboardInterrupt as e: e.outputs`" in str(caught.value)
    assert_given_back(caught.value.outputs[:-1], expected[:-1])
    assert_exact_afterwards(tight, expected)


def test_c7_a_thread_that_waits_for_its_turn_gets_it_after_an_interrupt(tight: LLM, expected: list[Any]) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(answers(tight.generate(PROMPTS, PARAMS))))

    def starting(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == 2:
            thread.start()
            raise KeyboardInterrupt
        return logits

    with pytest.raises(KeyboardInterrupt):
        tight.generate("one", SamplingParams(max_tokens=5, ignore_eos=True, logits_processors=[starting]))
    thread.join(60)
    assert found == expected


# Logits that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [0, 2])
def test_logits_that_are_not_finite_are_that_requests_error_with_advice(
    tight: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch, value: float, step: int
) -> None:
    original, num_calls = Sampler.launch, 0

    def poisoned(self: Sampler, logits: torch.Tensor, *given: Any) -> Any:
        nonlocal num_calls
        if num_calls == step:
            logits[0, 7] = value
        num_calls += 1
        return original(self, logits, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "launch", poisoned)
        with pytest.raises(BatchError) as caught:
            tight.generate(PROMPTS, PARAMS)
    failed = [i for i, error in enumerate(errors(caught.value.outputs)) if error is not None]
    assert len(failed) == 1
    error = caught.value.outputs[failed[0]].error
    assert (error.code, error.index) == ("non_finite_logits", failed[0])
    assert "hold NaN or infinity: the model's weights may be damaged" in error.message
    assert "dtype='float32'" in error.message
    others = [answer for i, answer in enumerate(expected) if i != failed[0]]
    assert answers(caught.value.outputs) == others
    assert_exact_afterwards(tight, expected)


# Two engines


def test_two_engines_stepped_in_turn_do_not_meet(folder: Path, window_folder: Path) -> None:
    with open_llm(folder, seed=1) as first, open_llm(window_folder, block_size=8, dtype="bfloat16") as second:
        engines = []
        for llm in (first, second):
            wanted = llm.generate(PROMPTS, PARAMS)
            requests = [
                make_request(llm, f"turn {i}", output.prompt_token_ids, params)
                for i, (output, params) in enumerate(zip(wanted, PARAMS, strict=True))
            ]
            for request in requests:
                llm._assembly.engine.add_request(request)
            engines.append((llm, requests, [output.outputs[0].token_ids for output in wanted]))
        while any(llm._assembly.engine.has_unfinished_requests() for llm, _, _ in engines):
            for llm, _, _ in engines:
                llm._assembly.engine.step()
        for llm, requests, wanted_ids in engines:
            assert [request.output_token_ids for request in requests] == wanted_ids
            assert_nothing_left(llm)
        assert engines[0][2] != engines[1][2]
        assert errors(first.generate("one", GREEDY)) == [None]
