"""The differential matrix: whatever the engine's settings, a request gets the same tokens, text, logprobs and usage.

Some prompts have several samples, and a beam search runs besides.

For each kind of attention settings are chosen to cover every pair of values, for the other models to cover every value;
the slow runs draw full settings at random, and meet the demo model. The first setting of a model (roomy, no cache, one
request at a time) is the reference of the others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from pagedllm.kv_groups import KVGroups
from pagedllm.model.layer_groups import group_layers
from pagedllm.model.registry import read_model_config
from pagedllm.outputs import RequestOutput
from tests.tiny import ROPES, save_tiny_model

PAIRWISE = [("llama", "float32"), ("qwen3", "bfloat16"), ("gemma3", "bfloat16"), ("mistral", "float32")]
WINDOWED = ("gemma3", "mistral")
KINDS = ("llama", "qwen3", *WINDOWED, *ROPES)
OTHERS = [(kind, dtype) for kind in KINDS for dtype in ("float32", "bfloat16") if (kind, dtype) not in PAIRWISE]

AXES: dict[str, tuple[Any, ...]] = {
    "pool": ("roomy", "starved"),
    "enable_prefix_caching": (False, True),
    "max_num_batched_tokens": (512, 1, 15, 16),
    "arrangement": ("alone", "batch", "reversed"),
    "is_warm": (False, True),
    "num_threads": (1, 2),
    "block_size": (16, 8, 64),
    "enforce_eager": (True, False),
}
REFERENCE = {name: values[0] for name, values in AXES.items()}
SHARED = "the quick brown fox jumps over the lazy dog. "
PROMPTS = [
    SHARED * 3,
    SHARED * 3 + "one two three",
    "a",
    SHARED * 3 + "four five six seven eight nine ten",
    "one two three four five six seven eight nine ten " * 4,
    "zyx",
    SHARED,
    "the lazy dog",
    SHARED * 2,
]


def downhill(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A user's callable that depends on the output so far."""
    logits[sum(token_ids) % len(logits)] += 5
    return logits - torch.arange(len(logits)) * 0.001


PARAMS = [
    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, bad_words=["e", "the", "fox jumps"]),
    SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=80, min_tokens=60, logprobs=0, prompt_logprobs=1),
    SamplingParams(n=2, temperature=0.8, top_p=0.95, top_k=50, seed=2, max_tokens=40),
    SamplingParams(temperature=0, max_tokens=50, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=1),
    SamplingParams(
        temperature=1.2, min_p=0.02, seed=3, min_tokens=40, max_tokens=70, logits_processors=[downhill], logprobs=1
    ),
    SamplingParams(temperature=0, max_tokens=30, stop=["e", "the"], presence_penalty=0.3, prompt_logprobs=0),
    SamplingParams(temperature=0.7, seed=4, max_tokens=90, logit_bias={5: 2.0}, stop_token_ids=[7, 8]),
    SamplingParams(
        temperature=1,
        seed=5,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(choice=[SHARED, SHARED + "one", "the quick"]),
    ),
]
CANDIDATES = [[" one two", " the", "."], [" nine"], [" b", " a b"]]  # of the first prompts


BEAM_PROMPTS = [SHARED * 2, SHARED + "one"]
BEAMS = BeamSearchParams(2, 14)  # the starved pool just holds both


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    num_prompt_tokens: int
    cumulative_logprob: float | None
    logprobs: str  # of every position, floats as they are
    prompt_logprobs: str


def pairwise_settings() -> list[dict[str, Any]]:
    """Greedy pairwise cover of AXES: every two values of two axes meet in some setting."""
    names = list(AXES)
    uncovered = {((a, x), (b, y)) for a, b in combinations(names, 2) for x, y in product(AXES[a], AXES[b])}
    candidates = [dict(zip(names, values, strict=True)) for values in product(*AXES.values())]
    chosen = []
    while uncovered:
        best = max(candidates, key=lambda c: sum(pair in uncovered for pair in combinations(c.items(), 2)))
        uncovered.difference_update(combinations(best.items(), 2))
        chosen.append(best)
    return chosen


def covering_settings() -> list[dict[str, Any]]:
    """Every value of every axis in some setting."""
    number = max(map(len, AXES.values()))
    return [{name: values[i % len(values)] for name, values in AXES.items()} for i in range(1, number)]


def preempting_settings(kind: str) -> list[dict[str, Any]]:
    """Pairs of values alone do not make a starved pool preempt: it takes a batch and steps that serve all of it.

    Where windows give blocks back it takes small steps, too, that have no room of their own, and a policy without plan.
    """
    base = {**REFERENCE, "pool": "starved"}
    if kind in WINDOWED:
        base |= {"max_num_batched_tokens": 16, "scheduling_policy": "fcfs"}
    return [
        {**base, "arrangement": "batch", "block_size": 8},
        {**base, "arrangement": "reversed", "enable_prefix_caching": True, "is_warm": True},
        {**base, "arrangement": "batch", "enable_prefix_caching": True, "num_threads": 2},
    ]


def make_llm(folder: Path, dtype: str, setting: dict[str, Any], roomy_bytes: int) -> LLM:
    max_model_len = 128
    arrangement = {"pool", "arrangement", "is_warm"}  # the other axes are LLM's own
    fields = {name: value for name, value in setting.items() if name not in arrangement}
    config = group_layers(read_model_config(json.loads((folder / "config.json").read_text()), folder), max_model_len)
    groups = KVGroups(setting["block_size"], config.kv_windows, setting["max_num_batched_tokens"])
    bytes_per_token = config.num_layers_per_block * 2 * 2 * 32 * (4 if dtype == "float32" else 2)
    num_blocks = max(groups.num_blocks(max_model_len), groups.num_blocks_of_branches(21, 34, 2))  # one text; two beams
    starved_bytes = num_blocks * setting["block_size"] * bytes_per_token
    return LLM(
        str(folder),
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=starved_bytes if setting["pool"] == "starved" else roomy_bytes,
        **fields,
    )


def answers(llm: LLM, arrangement: str) -> list[Answer]:
    def generate(places: list[int]) -> list[RequestOutput]:
        return llm.generate([PROMPTS[i] for i in places], [PARAMS[i] for i in places], use_tqdm=False)

    def search(places: list[int]) -> list[RequestOutput]:
        return llm.beam_search([BEAM_PROMPTS[i] for i in places], BEAMS, use_tqdm=False)

    outputs = []
    for run, number in ((generate, len(PROMPTS)), (search, len(BEAM_PROMPTS))):
        order = list(range(number))
        if arrangement == "alone":
            outputs += [run([i])[0] for i in order]
        elif arrangement == "batch":
            outputs += run(order)
        else:
            outputs += run(order[::-1])[::-1]
    return [
        Answer(
            text=completion.text,
            token_ids=tuple(completion.token_ids),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            num_prompt_tokens=len(output.prompt_token_ids),
            cumulative_logprob=completion.cumulative_logprob,
            logprobs=repr(list(completion.logprobs or ())),
            prompt_logprobs=repr(list(output.prompt_logprobs or ())),
        )
        for output in outputs
        for completion in output.outputs
    ]


def scores(llm: LLM, arrangement: str) -> list[list[tuple[bool, str]]]:
    order = list(range(len(CANDIDATES)))
    if arrangement == "reversed":
        order.reverse()
    groups = [[i] for i in order] if arrangement == "alone" else [order]
    found = {}
    for group in groups:
        results = llm.loglikelihood([PROMPTS[i] for i in group], [CANDIDATES[i] for i in group], use_tqdm=False)
        found |= dict(zip(group, results, strict=True))
    return [[(s.is_greedy, s.token_logprobs.tobytes().hex()) for s in found[i]] for i in range(len(CANDIDATES))]


def run_setting(folder: Path, dtype: str, setting: dict[str, Any]) -> tuple[list[Any], int]:
    """The answers, then the scores; and how often a request was preempted."""
    with make_llm(folder, dtype, setting, roomy_bytes=64 << 20) as llm:
        if setting["is_warm"]:
            answers(llm, "batch")
        found = answers(llm, setting["arrangement"])
        return [*found, scores(llm, setting["arrangement"])], llm.stats.num_preemptions


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_tiny_model(root / kind, kind) for kind in KINDS}


def random_settings(seed: int, number: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for _ in range(number):
        yield {name: rng.choice(values) for name, values in AXES.items()}


def check_settings(folder: Path, dtype: str, settings: list[dict[str, Any]], preempting: list[dict[str, Any]]) -> None:
    reference, _ = run_setting(folder, dtype, REFERENCE)
    assert len({a.text for a in reference[:-1]}) >= len(PROMPTS)
    for setting in settings:
        found, _ = run_setting(folder, dtype, setting)
        assert found == reference, f"differs under {setting}"
    for setting in preempting:
        found, num_preemptions = run_setting(folder, dtype, setting)
        assert found == reference, f"differs under {setting}"
        assert num_preemptions > 0, f"no preemption under {setting}: this test proves less than it says"


@pytest.mark.parametrize(("kind", "dtype"), PAIRWISE)
def test_no_pair_of_settings_changes_anything(folders: dict[str, Path], kind: str, dtype: str) -> None:
    check_settings(folders[kind], dtype, pairwise_settings(), preempting_settings(kind))


@pytest.mark.parametrize(("kind", "dtype"), OTHERS)
def test_no_setting_changes_anything(folders: dict[str, Path], kind: str, dtype: str) -> None:
    check_settings(folders[kind], dtype, covering_settings(), preempting_settings(kind)[:1])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_requests_of_the_matrix_meet_both_tables_of_a_rope_that_changes(folders: dict[str, Path], kind: str) -> None:
    with make_llm(folders[kind], "float32", REFERENCE, roomy_bytes=1 << 20) as llm:
        builder = llm._assembly.builder
        totals = [
            len(builder.tokenizer.encode(prompt)) + params.max_tokens
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        assert {builder.rope_variant(total) for total in totals} == {0, 1}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_setting_changes_anything_on_the_demo_model(demo_safetensors: Path, dtype: str) -> None:
    def run(num_blocks: int, order: list[int], **fields: Any) -> tuple[dict[int, tuple[Any, ...]], int]:
        block_size = fields.get("block_size", 16)
        bytes_per_block = block_size * 30 * 2 * 3 * 64 * (4 if dtype == "float32" else 2)
        found = {}
        with LLM(
            str(demo_safetensors),
            dtype=dtype,
            max_model_len=256,
            kv_cache_memory_bytes=num_blocks * bytes_per_block,
            **fields,
        ) as llm:
            for part in [order] if fields else [[i] for i in order]:
                for i, output in zip(
                    part,
                    llm.generate([PROMPTS[i] for i in part], [PARAMS[i] for i in part], use_tqdm=False),
                    strict=True,
                ):
                    found[i] = (
                        repr(list(output.prompt_logprobs or ())),
                        *((c.text, c.token_ids, c.stop_reason, repr(list(c.logprobs or ()))) for c in output.outputs),
                    )
            return found, llm.stats.num_preemptions

    order = list(range(len(PROMPTS)))
    reference, _ = run(160, order)
    for num_blocks, places, fields in (
        (160, order, {"max_num_batched_tokens": 512}),
        (160, order[::-1], {"max_num_batched_tokens": 33, "num_threads": 1, "enable_prefix_caching": False}),
        (40, order, {"block_size": 64, "max_num_seqs": 3}),
    ):
        assert run(num_blocks, places, **fields)[0] == reference, f"differs under {fields}"
    found, num_preemptions = run(16, order, scheduling_policy="fcfs")
    assert found == reference
    assert num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_settings_change_nothing(folders: dict[str, Path], kind: str, dtype: str) -> None:
    reference, _ = run_setting(folders[kind], dtype, REFERENCE)
    seed = random.randrange(2**32)
    for setting in random_settings(seed, 38):
        assert run_setting(folders[kind], dtype, setting)[0] == reference, f"seed {seed}: differs under {setting}"
