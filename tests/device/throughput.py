"""Stage 7: the engine as a whole: how long the device waits between steps, and tokens a second beside transformers'
`generate` on the same ids, in the same process."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pagedllm import LLM, SamplingParams
from pagedllm.runtime.compute_device import Gpu
from tests.device.models import as_prompts, random_ids, save_random_llama
from tests.device.results import IDLE, Budget, Results
from tests.device.sizes import Shape
from tests.device.target import Target

PROMPT_TOKENS = 32


def run(target: Target, results: Results, budget: Budget) -> None:
    target.load()
    shape = target.sizes.throughput
    with tempfile.TemporaryDirectory(prefix="pagedllm-device-") as root:
        folder = save_random_llama(Path(root) / shape.name, shape, target.device)
        if budget.allows(results, "idle between steps", 15):
            with results.check_figure("idle between steps"):
                measure_idle(target, results, folder, shape)
        if budget.allows(results, "throughput beside transformers", 20):
            with results.check_figure("throughput beside transformers"):
                measure_throughput(target, results, folder, shape)


def measure_idle(target: Target, results: Results, folder: Path, shape: Shape) -> None:
    """From the device's own time line: between a step's last kernel and the copy that the next one begins with."""
    num_seqs, num_tokens = target.sizes.running, target.sizes.num_idle_steps
    prompts = as_prompts(random_ids(num_seqs, (PROMPT_TOKENS,), shape.vocab_size))
    settings = {"max_num_seqs": num_seqs, "max_model_len": 128, "enable_prefix_caching": False}
    for name, is_ahead in (("one after the other", False), ("planned ahead", True)):
        with target.llm(
            folder, **settings, async_scheduling=is_ahead, kv_cache_memory_bytes=kv_bytes(shape, num_seqs, 144)
        ) as llm:
            generate_seconds(llm, prompts, 4)  # warms up
            with watched(target, llm._assembly.runtime.runner.device) as marks:  # type: ignore[attr-defined, union-attr]
                generate_seconds(llm, prompts, num_tokens)
        target.synchronize()
        idle = [target.between(a, b) for (was, a), (now, b) in pairwise(marks) if (was, now) == ("end", "begin")]
        begins = [mark for kind, mark in marks if kind == "begin"]
        periods = [target.between(a, b) for a, b in pairwise(begins)]
        assert len(idle) >= num_tokens - 1, f"{len(idle)} gaps between {num_tokens} steps"
        note = f"a step every {median(periods) * 1e3:.2f} ms; {shape.name}, {num_seqs} sequences"
        results.figure(f"idle between steps, {name}", median(idle) * 1e3, "ms", IDLE, note)


@contextlib.contextmanager
def watched(target: Target, device: Gpu) -> Iterator[list[tuple[str, Any]]]:
    """("begin" or "end", mark) of each step: its numbers are brought in one copy, in the end results are fetched."""
    marks: list[tuple[str, Any]] = []
    copy, fetch = device.copy, device.fetch

    def marked_copy(there: Tensor, here: Tensor) -> Callable[[], None]:
        marks.append(("begin", target.mark()))
        return copy(there, here)

    def marked_fetch(tensors: Sequence[Tensor]) -> Callable[[], list[Any]]:
        marks.append(("end", target.mark()))
        with mock.patch.object(device, "copy", copy):
            return fetch(tensors)

    with mock.patch.object(device, "copy", marked_copy), mock.patch.object(device, "fetch", marked_fetch):
        yield marks


def kv_bytes(shape: Shape, num_seqs: int, num_tokens: int) -> int:
    return num_seqs * num_tokens * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2


def generate_seconds(llm: LLM, prompts: list[dict[str, Any]], num_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return seconds


def measure_throughput(target: Target, results: Results, folder: Path, shape: Shape) -> None:
    num_prompts, num_in, num_out = target.sizes.peer_prompts
    ids = random_ids(num_prompts, (num_in,), shape.vocab_size)
    name = f"{shape.name}, {num_prompts} x {num_in} in, {num_out} out"
    settings = {"max_num_seqs": num_prompts, "max_model_len": num_in + num_out + 16, "enable_prefix_caching": False}
    pool = kv_bytes(shape, num_prompts, num_in + num_out + 32)
    with target.llm(folder, **settings, kv_cache_memory_bytes=pool) as llm:
        generate_seconds(llm, as_prompts(ids), 2)
        ours = num_prompts * num_out / generate_seconds(llm, as_prompts(ids), num_out)
    theirs = num_prompts * num_out / transformers_seconds(target, folder, ids, num_out)
    results.figure(f"pagedllm, {name}", ours, "tokens/s", note=f"{ours / theirs:.2f} x transformers")
    results.figure(f"transformers generate, {name}", theirs, "tokens/s")


def transformers_seconds(target: Target, folder: Path, ids: list[list[int]], num_out: int) -> float:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(target.device).eval()
    inputs = torch.tensor(ids, device=target.device)
    mask = torch.ones_like(inputs)

    def generate(num_tokens: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                inputs, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        target.synchronize()
        assert found.shape[1] == inputs.shape[1] + num_tokens
        return time.perf_counter() - begin

    generate(2)
    return generate(num_out)
