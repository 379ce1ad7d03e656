"""Steps planned ahead on a GPU that is none: the outputs of steps that wait for each other, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedllm import LLM, SamplingParams
from pagedllm.errors import BatchError
from pagedllm.outputs import RequestOutput
from pagedllm.runtime.cuda_graph import DecodeGraphs
from pagedllm.runtime.last_tokens import LastTokens
from pagedllm.sampling.metadata import SamplingRows
from pagedllm.sampling.sampler import Sampler
from tests.fake_gpu import POISON, FakeGpu
from tests.simt.test_end_to_end import BYTES_PER_TOKEN, SHARED, SIZES
from tests.simt.test_gpu_runtime import open_llm, runner_of
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.usefixtures("emulator", "row_invariant_products")

PROMPTS = [SHARED, SHARED + "one", "a", "seven eight nine ten", SHARED + "zyx", "b c", "two", SHARED + "one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", dtype=torch.bfloat16, **SIZES)


@pytest.fixture
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    return lambda gpu=None, **settings: open_llm(folder, monkeypatch, gpu or FakeGpu(), **settings)


def sampled_params(**fields: Any) -> list[SamplingParams]:
    """Greedy and seeded ones, with logprobs and without, of several lengths."""
    return [
        SamplingParams(
            temperature=(0, 1.0, 0.8)[i % 3], seed=i, max_tokens=4 + i, top_k=(0, 30)[i % 2],
            logprobs=(None, 2, 0, None)[i % 4], ignore_eos=True, **fields,
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[object, ...]]:
    return [
        (len(o.prompt_token_ids), *(
            (
                tuple(c.token_ids), c.text, c.finish_reason, c.stop_reason, repr(list(c.logprobs or ())),
                c.cumulative_logprob,
            )
            for c in o.outputs
        ))
        for o in outputs
    ]  # fmt: skip


def watch(llm: LLM) -> list[str]:
    """What is launched and taken from now on, in order."""
    engine, events = llm._open().engine, list[str]()
    launch = engine._launch
    assert launch is not None
    num_launched = 0

    def watched(plan: Any) -> Any:
        nonlocal num_launched
        number = num_launched
        num_launched += 1
        events.append(f"L{number}")
        take = launch(plan)

        def taken() -> Any:
            events.append(f"R{number}")
            return take()

        return taken

    engine._launch = watched
    return events


def num_ahead(events: Sequence[str]) -> int:
    """Results that were taken behind a later launch."""
    launched = [int(event[1:]) for event in events if event[0] == "L"]
    positions = {event: i for i, event in enumerate(events)}
    return sum(positions[f"L{n + 1}"] < positions[f"R{n}"] for n in launched[:-1])


# ---- the same outputs


def endings(llm: LLM) -> list[SamplingParams]:
    """That end by stop strings and by tokens somewhere in the middle: by what the model says without them."""
    free = sampled_params()
    params = []
    for i, (given, output) in enumerate(zip(free, llm.generate(PROMPTS, free, use_tqdm=False), strict=True)):
        token_ids, text = output.outputs[0].token_ids, output.outputs[0].text
        if i % 2:
            params.append(given.clone())
            params[-1].stop_token_ids = [token_ids[len(token_ids) // 2]]
        else:
            params.append(given.clone())
            params[-1].stop = [text[len(text) // 2 :][:2]]
    return params


SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {"block_size": 8},
    "eager, in chunks": {"block_size": 8, "enforce_eager": True, "max_num_batched_tokens": 10},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_the_same_with_and_without(opened: Callable[..., LLM], name: str) -> None:
    """Eight requests on six rows: by length, then by stops, then among them one that is held back."""
    found = []
    for is_overlapped in (False, True):
        with opened(async_scheduling=is_overlapped, **SETTINGS[name]) as llm:
            assert llm.info()["async_scheduling"] is is_overlapped
            stops = endings(llm)
            events = watch(llm) if is_overlapped else []
            mixed = [*stops[:-1], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, repetition_penalty=1.2)]
            calls = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (stops, mixed)]
            found.append([answers(outputs) for outputs in calls])
            assert llm.stats.num_cached_tokens > 0
    assert found[0] == found[1]
    assert {answer[1][2] for answer in found[0][0]} == {"stop"}  # type: ignore[index]
    assert num_ahead(events) > 4


def test_preempted_requests_get_the_same_outputs(opened: Callable[..., LLM]) -> None:
    """Three of 16 tokens in a pool for one of 32."""
    params = [SamplingParams(temperature=t, seed=5, max_tokens=16, ignore_eos=True) for t in (0, 1, 0.7)]
    crowded = {"kv_cache_memory_bytes": 32 * BYTES_PER_TOKEN, "max_model_len": 32, "block_size": 8}
    found = []
    for is_overlapped in (False, True):
        with opened(async_scheduling=is_overlapped, scheduling_policy="fcfs", **crowded) as llm:
            events = watch(llm) if is_overlapped else []
            found.append(answers(llm.generate(["a", "zyx", "one"], params, use_tqdm=False)))
            assert llm.stats.num_preemptions > 0
    assert found[0] == found[1]
    assert num_ahead(events) > 4


def test_several_samples_beams_masks_and_callables_are_the_same(opened: Callable[..., LLM]) -> None:
    def prefer_8(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits.index_fill(0, torch.tensor([8]), 50.0) if len(token_ids) == 2 else logits

    common: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 5, "ignore_eos": True}
    params = [
        SamplingParams(**common, n=3), SamplingParams(**common, allowed_token_ids=[7, 8, 9]),
        SamplingParams(**common, logits_processors=[prefer_8]), SamplingParams(**common, bad_words=["the", "a b"]),
        SamplingParams(**common, logit_bias={5: 3.0}), SamplingParams(**common, prompt_logprobs=1),
    ]  # fmt: skip
    found = []
    for is_overlapped in (False, True):
        with opened(async_scheduling=is_overlapped) as llm:
            outputs = [llm.generate([p], s, use_tqdm=False)[0] for p, s in zip(PROMPTS, params, strict=False)]
            outputs += llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
            found.append((answers(outputs), repr(list(outputs[5].prompt_logprobs))))
    assert found[0] == found[1]


# ---- that it is so, and what a launch may not do


def test_a_step_is_launched_before_the_results_of_the_one_before_are_taken(opened: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for settings in ({}, {"enforce_eager": True}):
        with opened(**settings) as llm:
            events = watch(llm)
            llm.generate(["a"], params, use_tqdm=False)
            assert " ".join(events) == "L0 L1 R0 L2 R1 L3 R2 R3"


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_launch_reads_nothing_from_the_device(opened: Callable[..., LLM], enforce_eager: bool) -> None:
    gpu = FakeGpu()
    with opened(gpu, enforce_eager=enforce_eager) as llm:
        engine = llm._open().engine
        launch = engine._launch
        assert launch is not None

        def guarded(plan: Any) -> Any:
            with gpu.no_reads():
                return launch(plan)

        engine._launch = guarded
        llm.generate(PROMPTS, sampled_params(logit_bias={5: 1.0}), use_tqdm=False)
        with pytest.raises(AssertionError, match="tolist of a tensor on the device"), gpu.no_reads():
            torch.zeros(1).tolist()


def test_a_step_is_fetched_at_once_and_by_one_copy_where_no_logprobs_are_wanted(opened: Callable[..., LLM]) -> None:
    gpu = FakeGpu()
    with opened(gpu) as llm:
        llm.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
        assert gpu.num_fetches == llm.stats.num_steps == 6


def test_off_where_it_is_turned_off_and_where_there_is_nothing_to_overlap(
    opened: Callable[..., LLM], folder: Path
) -> None:
    with LLM(str(folder), kernels="simt", async_scheduling=True, max_num_seqs=1, max_model_len=32) as llm:
        assert llm.info()["async_scheduling"] is False
    for settings in ({"async_scheduling": False}, {"async_scheduling": True, "logprobs_mode": "processed_logprobs"}):
        with opened(**settings) as llm:
            assert llm.info()["async_scheduling"] is False
            assert llm._open().engine._launch is None


# ---- the parts


def test_last_tokens_fill_placeholders_and_nothing_else() -> None:
    last = LastTokens(4, torch.device("cpu"))
    last.keep(torch.tensor([2, 0, last.nowhere, 1]), torch.tensor([77, 55, 99, -1], dtype=torch.int32))
    token_ids = torch.tensor([5, ~2, 0, ~0, ~1, 9], dtype=torch.int32)
    last.fill(token_ids)
    assert token_ids.tolist() == [5, 77, 0, 55, 0, 9]


def test_fetched_tensors_are_poison_until_they_are_waited_for() -> None:
    gpu = FakeGpu()
    take = gpu.fetch([torch.tensor([3, 4], dtype=torch.int32), torch.zeros(0, 2), torch.tensor([[1.5]])])
    assert gpu._pinned[-1][:8].tolist() == [POISON] * 8
    assert [array.tolist() for array in take()] == [[3, 4], [], [[1.5]]]


def test_the_fake_sees_pinned_memory_that_is_used_again_too_early() -> None:
    gpu = FakeGpu()
    stager = gpu.stager(1 << 10)
    stager.stage([np.arange(5)])
    stager._wait = lambda: None  # type: ignore[attr-defined]
    stager.stage([np.arange(5) + 1])
    with pytest.raises(AssertionError, match="written to before a copy had read it"):
        gpu.fetch([torch.zeros(1)])()


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [1]}, {"min_tokens": 1}, {"logits_processors": [lambda ids, logits: logits]},
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1},
        {"temperature": 0.5, "logprobs": 3, "logit_bias": {3: 1.0}, "stop": ["x"], "top_p": 0.5},
    ],
)  # fmt: skip
def test_the_scheduler_and_the_sampler_agree_on_who_follows_its_output(
    opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """What the sampler wants to be told of is never planned ahead."""
    follows = []
    original = SamplingRows.follow_output

    def watched(self: SamplingRows, rows: Any) -> bool:
        follows.append(original(self, rows))
        return follows[-1]

    monkeypatch.setattr(SamplingRows, "follow_output", watched)
    with opened(enforce_eager=True) as llm:
        events = watch(llm)
        llm.generate(["a"], SamplingParams(max_tokens=3, ignore_eos=False, **fields), use_tqdm=False)
    assert any(follows) == ("logit_bias" not in fields)
    assert (num_ahead(events) > 0) != any(follows)


# ---- whatever happens


def test_dropped_iterators_aborts_submits_and_closing_with_a_step_under_way(opened: Callable[..., LLM]) -> None:
    gpu, params = FakeGpu(), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with opened(async_scheduling=False) as llm:
        expected = answers(llm.generate(PROMPTS[:4], params, use_tqdm=False))
    llm = opened(gpu)
    lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 12, 12, 12)]
    outputs = llm.generate_iter(PROMPTS[:4], lengths)
    first = next(outputs)
    assert llm._open().engine._state.under_way is not None
    assert list(first.outputs[0].token_ids) == list(expected[0][1][0])[:3]  # type: ignore[index]
    assert answers(llm.generate(PROMPTS[:4], params, use_tqdm=False)) == expected  # beside the suspended ones
    assert [answers([output])[0] for output in sorted(outputs, key=lambda output: output.index)] == expected[1:]
    dropped = llm.generate_iter(PROMPTS[:4], lengths)
    next(dropped)
    dropped.close()
    engine = llm._open().engine
    assert engine._state.under_way is None
    assert engine.scheduler.kv_cache.pool.num_used == 0
    futures = [llm.submit(prompt, params) for prompt in PROMPTS[:4]]
    assert answers([future.result() for future in futures]) == expected
    suspended = llm.generate_iter(PROMPTS[:4], lengths)
    next(suspended)
    llm.close()
    assert gpu.allocated == 0


def test_logits_that_are_not_finite_fail_alone_though_the_next_step_is_launched(
    opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with opened() as llm:
        expected = answers(llm.generate(PROMPTS[:4], params, use_tqdm=False))
        launch, calls = Sampler.launch, list[int]()

        def spoiled(self: Sampler, logits: Tensor, given: Any, staged: Any) -> Any:
            calls.append(len(logits))
            if len(calls) == 3:
                logits[1] = torch.nan
            return launch(self, logits, given, staged)

        monkeypatch.setattr(Sampler, "launch", spoiled)
        events = watch(llm)
        with pytest.raises(BatchError) as caught:
            llm.generate(PROMPTS[:4], params, use_tqdm=False)
        assert events.index("L3") < events.index("R2")
        failed = [output.index for output in caught.value.outputs if output.error is not None]
        assert len(failed) == 1
        for index in {0, 1, 2, 3} - set(failed):
            assert answers(caught.value.outputs)[index] == expected[index]
        assert answers(llm.generate(PROMPTS[:4], params, use_tqdm=False)) == expected


class Failing:
    """In the place of a function: raises at its `number`-th call."""

    def __init__(self, function: Any, number: int, error: BaseException) -> None:
        self.function, self.number, self.error, self.num_calls = function, number, error, 0

    def __get__(self, owner: Any, kind: Any) -> Any:
        return lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.number:
            raise self.error
        return self.function(*args, **kwargs)


PLACES: list[tuple[type, str]] = [
    (DecodeGraphs, "forward"), (Sampler, "prepare"), (Sampler, "launch"), (Sampler, "finish"), (FakeGpu, "fetch"),
    (LastTokens, "keep"),
]  # fmt: skip


def test_after_an_exception_anywhere_the_next_call_is_exact(
    opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with opened() as llm:
        expected = answers(llm.generate(PROMPTS[:3], params, use_tqdm=False))
        for owner, name in PLACES:
            for number, error in ((1, RuntimeError("a broken kernel")), (3, KeyboardInterrupt())):
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, Failing(getattr(owner, name), number, error))
                    with pytest.raises(type(error)):
                        llm.generate(PROMPTS[:3], params, use_tqdm=False)
                engine = llm._open().engine
                assert not engine.has_unfinished_requests()
                assert engine._state.under_way is None
                assert engine.scheduler.kv_cache.pool.num_used == 0
            assert answers(llm.generate(PROMPTS[:3], params, use_tqdm=False)) == expected


def test_tokens_are_kept_by_the_row_that_drew_them(opened: Callable[..., LLM]) -> None:
    """Rows change hands while steps are under way: one request after another on two rows."""
    params = [SamplingParams(temperature=0, max_tokens=2 + n % 4, ignore_eos=True) for n in range(8)]
    with opened(async_scheduling=False, max_num_seqs=2) as llm:
        expected = answers(llm.generate(PROMPTS, params, use_tqdm=False))
    with opened(max_num_seqs=2) as llm:
        events = watch(llm)
        assert answers(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
        assert num_ahead(events) > 5
        assert runner_of(llm).last_tokens is not None
