"""Stage 4: the engine on this device. Against the CPU under teacher forcing; against itself in other batches, chunks
and orders, from the cache, captured and not, planned ahead and not; and whether memory comes back."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pagedllm import LLM, SamplingParams
from pagedllm.errors import NotEnoughMemoryError
from pagedllm.outputs import RequestOutput
from tests.device.models import as_prompts, random_ids, save_random_llama
from tests.device.results import Budget, Results
from tests.device.target import Target
from tests.tiny import VOCAB_SIZE, save_tiny_model

HEADS = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
ENGINE: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 128}
POOL_BYTES = 16 << 20


def run(target: Target, results: Results, budget: Budget) -> None:
    target.load()
    with tempfile.TemporaryDirectory(prefix="pagedllm-device-") as name:
        root = Path(name)
        tiny = {
            kind: save_tiny_model(root / kind, kind, dtype=torch.bfloat16, **HEADS)
            for kind in {"llama", "gemma3", *target.sizes.kinds}
        }
        compare_settings(target, results, tiny["gemma3"])
        compare_graphs(target, results, tiny["llama"])
        compare_overlap(target, results, tiny["llama"])
        check_memory(target, results, tiny["llama"])
        for kind in target.sizes.kinds:
            if budget.allows(results, f"tokens of a tiny {kind} against the CPU", 5):
                compare_with_cpu(target, results, tiny[kind], f"a tiny {kind}", VOCAB_SIZE)
        shape = target.sizes.small
        if budget.allows(results, f"tokens of {shape.name} against the CPU", 15):
            folder = save_random_llama(root / "shape", shape, target.device)
            compare_with_cpu(target, results, folder, f"random weights of {shape.name}", shape.vocab_size)


def open_llm(target: Target, folder: Path, **settings: Any) -> LLM:
    return target.llm(folder, **{**ENGINE, "kv_cache_memory_bytes": POOL_BYTES, **settings})


# ---- against the CPU


@dataclass(frozen=True)
class Scores:
    """Of the tokens of some texts, the first of each left out."""

    own: list[float]  # log probability of the token that stands there
    best: list[int]
    gaps: list[float]  # between the best two

    def error(self, exact: Scores) -> float:
        """Root of the mean square."""
        squares = [(a - b) ** 2 for a, b in zip(self.own, exact.own, strict=True)]
        return math.sqrt(sum(squares) / len(squares))


def compare_with_cpu(target: Target, results: Results, folder: Path, name: str, vocab_size: int) -> None:
    """The device's greedy tokens, scored in float32 on the CPU: where that is surer than errors are large, they are its
    own choice. Errors are at most half as large again as those of the CPU's 16-bit kernels."""
    with results.check(f"tokens of {name} against the CPU") as notes:
        prompts = random_ids(len(target.sizes.lengths), target.sizes.lengths, vocab_size)
        greedy = SamplingParams(temperature=0, max_tokens=target.sizes.num_tokens, ignore_eos=True, detokenize=False)
        with open_llm(target, folder) as llm:
            outputs = llm.generate(as_prompts(prompts), greedy, use_tqdm=False)
            texts = [[*ids, *o.outputs[0].token_ids] for ids, o in zip(prompts, outputs, strict=True)]
            found = score(llm, texts)
        exact, twin = (score_on_cpu(folder, texts, dtype) for dtype in ("float32", "bfloat16"))
        error, allowed = found.error(exact), 1.5 * twin.error(exact)
        largest = max(abs(a - b) for a, b in zip(found.own, exact.own, strict=True))
        tokens = [token for text in texts for token in text[1:]]
        is_output = [n >= len(ids) for ids, text in zip(prompts, texts, strict=True) for n in range(1, len(text))]
        is_clear = [wanted and gap > 2 * largest for wanted, gap in zip(is_output, exact.gaps, strict=True)]
        differing = [n for n, clear in enumerate(is_clear) if clear and tokens[n] != exact.best[n]]
        notes.say(
            f"log probabilities off by {error:.1e}, {allowed:.1e} allowed (largest {largest:.1e}); "
            f"{sum(is_clear)} of {sum(is_output)} choices are clear"
        )
        assert error <= allowed, notes.text
        assert not differing, f"{len(differing)} clear choices differ; {notes.text}"
        assert sum(is_clear) >= target.sizes.min_clear, f"too few to compare; {notes.text}"


def score_on_cpu(folder: Path, texts: list[list[int]], dtype: str) -> Scores:
    with LLM(str(folder), device="cpu", dtype=dtype, **ENGINE, kv_cache_memory_bytes=2 * POOL_BYTES) as llm:
        return score(llm, texts)


def score(llm: LLM, texts: list[list[int]]) -> Scores:
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2, detokenize=False)
    scores = Scores([], [], [])
    for text, output in zip(texts, llm.generate(as_prompts(texts), params, use_tqdm=False), strict=True):
        for token, entry in zip(text[1:], list(output.prompt_logprobs)[1:], strict=True):
            best, second = sorted(entry.items(), key=lambda item: (item[1].rank, item[0]))[:2]
            scores.own.append(entry[token].logprob)
            scores.best.append(best[0])
            scores.gaps.append(best[1].logprob - second[1].logprob)
    return scores


# ---- against itself


def answers(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(tuple(o.outputs[0].token_ids), list(o.outputs[0].logprobs or [])) for o in outputs]


def various_params(target: Target, count: int) -> list[SamplingParams]:
    common = {"max_tokens": target.sizes.num_tokens, "ignore_eos": True, "detokenize": False, "logprobs": 2}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.2, "min_p": 0.02, "seed": 3, "logit_bias": {5: 2.0}},
    ]
    return [SamplingParams(**common, **kinds[n % len(kinds)]) for n in range(count)]


def compare_settings(target: Target, results: Results, folder: Path) -> None:
    """Alone, in a batch, reversed, from the cache and in chunks: equal, if the probe of products promises it."""
    prompts = as_prompts(random_ids(len(target.sizes.lengths), target.sizes.lengths, VOCAB_SIZE, seed=1))
    params = various_params(target, len(prompts))
    with open_llm(target, folder, deterministic=True, enable_prefix_caching=False) as llm:
        is_promised = bool(llm.info()["deterministic"])
        alone = [answers(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
        found = {
            "in a batch": answers(llm.generate(prompts, params, use_tqdm=False)),
            "reversed": answers(llm.generate(prompts[::-1], params[::-1], use_tqdm=False))[::-1],
        }
    with open_llm(target, folder, deterministic=True) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        found["from the cache"] = answers(llm.generate(prompts, params, use_tqdm=False))
        num_cached = llm.stats.num_cached_tokens
    chunked = {"max_num_batched_tokens": 13, "block_size": 8, "enable_prefix_caching": False}
    with open_llm(target, folder, deterministic=True, **chunked) as llm:
        found["in chunks of 13 tokens"] = answers(llm.generate(prompts, params, use_tqdm=False))
    for name, answer in found.items():
        num_equal = sum(a == b for a, b in zip(answer, alone, strict=True))
        told = f"{num_equal} of {len(alone)} requests as alone, bit for bit"
        if not is_promised:
            results.absent(f"the same tokens {name}", f"products depend on the batch here, says the probe; {told}")
            continue
        with results.check(f"the same tokens {name}") as notes:
            notes.say(told)
            assert num_equal == len(alone), told
            assert name != "from the cache" or num_cached > 0, "nothing came from the cache"


def compare_graphs(target: Target, results: Results, folder: Path) -> None:
    """In batches of a graph's very size: products have the same number of rows, so that nothing may differ."""
    found: list[list[Any]] = []
    with results.check("captured steps give what eager ones give") as notes:
        for enforce_eager in (True, False):
            with open_llm(target, folder, enforce_eager=enforce_eager, enable_prefix_caching=False) as llm:
                found.append([same_lengths(target, llm, size) for size in target.sizes.graph_batches])
        notes.say(f"batches of {target.sizes.graph_batches}")
        differing = [size for size, a, b in zip(target.sizes.graph_batches, *found, strict=True) if a != b]
        assert not differing, f"they differ in batches of {differing}"


def same_lengths(target: Target, llm: LLM, size: int) -> list[Any]:
    prompts = as_prompts(random_ids(size, (9,), VOCAB_SIZE, seed=size))
    return answers(llm.generate(prompts, various_params(target, size), use_tqdm=False))


def compare_overlap(target: Target, results: Results, folder: Path) -> None:
    """Requests of one length are in step with and without; so products have the same rows."""
    with results.check("steps planned ahead give what others give") as notes:
        found = []
        for is_ahead in (False, True):
            with open_llm(target, folder, async_scheduling=is_ahead, enable_prefix_caching=False) as llm:
                assert llm.info()["async_scheduling"] is is_ahead
                found.append([same_lengths(target, llm, size) for size in target.sizes.graph_batches])
        notes.say(f"batches of {target.sizes.graph_batches}")
        assert found[0] == found[1], "tokens or log probabilities differ"


# ---- memory


def check_memory(target: Target, results: Results, folder: Path) -> None:
    prompts, params = as_prompts(random_ids(4, (9,), VOCAB_SIZE)), SamplingParams(max_tokens=4, detokenize=False)
    gpu = target.gpu()
    with open_llm(target, folder) as llm:  # libraries keep what they take at their first call
        llm.generate(prompts, params, use_tqdm=False)
    gpu.trim()
    before = gpu.memory()
    with results.check("close gives the memory back") as notes:
        with open_llm(target, folder) as llm:
            llm.generate(prompts, params, use_tqdm=False)
            taken = gpu.memory().allocated - before.allocated
            notes.say(f"{taken / 2**20:.1f} MiB")
            assert taken > 0, "the engine took nothing"
        check_equal(gpu.memory(), before)
    with results.check("close gives the memory back after an exception"):
        llm = open_llm(target, folder)
        runner = llm._assembly.runtime.runner  # type: ignore[attr-defined, union-attr]
        broken = mock.patch.object(runner, "forward", side_effect=RuntimeError("a broken step"))
        with broken, pytest.raises(RuntimeError, match="a broken step"):
            llm.generate(prompts, params, use_tqdm=False)
        llm.close()
        del runner
        check_equal(gpu.memory(), before)
    with results.check("a second engine is sized by what the first left"):
        share = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.002}
        with open_llm(target, folder, **share) as first, open_llm(target, folder, **share) as second:
            pools = [llm.info()["kv_cache_bytes"] for llm in (first, second)]
            assert 0 < pools[1] <= pools[0], f"pools of {pools} bytes"
    with results.check("out of memory is said in one line") as notes, target.starved():
        with pytest.raises(NotEnoughMemoryError, match=r"^[^\n]* is out of memory [^\n]*$") as error:
            open_llm(target, folder).close()
        notes.say(str(error.value))


def check_equal(found: Any, before: Any) -> None:
    assert found.allocated == before.allocated, f"{found.allocated - before.allocated:,} bytes are still allocated"
    missing = before.free - found.free
    assert missing < 64 << 20, f"{missing:,} bytes fewer are free"
