"""Stage 7: the engine as a whole: how long the device waits between steps, and tokens a second beside transformers'
`generate` on the same ids, in the same process."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pagedllm import LLM, SamplingParams
from pagedllm.config import field_names
from tests.device.exactness import OVERLAP
from tests.device.models import as_prompts, random_ids, save_random_llama
from tests.device.results import IDLE, Budget, Results
from tests.device.sizes import Shape
from tests.device.steps import time_sampling, time_step
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
    """A step's period in the running engine less what the device works in it: forward and sampling, timed alone."""
    num_seqs = target.sizes.running
    few, many = (4, 8) if target.is_rehearsal else (16, 80)
    prompts = as_prompts(random_ids(num_seqs, (PROMPT_TOKENS,), shape.vocab_size))
    settings = {"max_num_seqs": num_seqs, "max_model_len": 128, "enable_prefix_caching": False}
    for name, keywords in overlap_settings(results):
        with target.llm(folder, **settings, **keywords, kv_cache_memory_bytes=kv_bytes(shape, num_seqs, 144)) as llm:
            generate_seconds(llm, prompts, few)  # warms up
            period = (generate_seconds(llm, prompts, many) - generate_seconds(llm, prompts, few)) / (many - few)
            runner = llm._assembly.runtime.runner  # type: ignore[attr-defined, union-attr]
            busy = time_step(target, runner, num_seqs, PROMPT_TOKENS + (few + many) // 2)
            busy += time_sampling(target, num_seqs, shape.vocab_size)
            del runner
        note = f"a step every {period * 1e3:.2f} ms, {busy * 1e3:.2f} ms of work; {shape.name}, {num_seqs} sequences"
        results.figure(f"idle between steps, {name}", max(0.0, period - busy) * 1e3, "ms", IDLE, note)


def overlap_settings(results: Results) -> list[tuple[str, dict[str, Any]]]:
    if OVERLAP not in field_names():
        results.absent("idle between steps, planned ahead", f"this version of pagedllm has no keyword {OVERLAP}")
        return [("one after the other", {})]
    return [("one after the other", {OVERLAP: False}), ("planned ahead", {OVERLAP: True})]


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
