"""`python -m pagedllm.bench.scores MODEL`: what scores and choices cost, transformers beside it in the same run.

- loglikelihood of 4 candidates of 8 tokens behind prompts of 300, against transformers with the same pairs apart, in
  batches of 32; both in bfloat16
- a decode step under 5,000 choices, against free greedy decoding of as many tokens
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

from pagedllm.llm import LLM
from pagedllm.sampling_params import SamplingParams
from pagedllm.structured_outputs import StructuredOutputsParams

PROMPT_TOKENS, CANDIDATES, CANDIDATE_TOKENS, BATCH = 300, 4, 8, 32
NUM_CHOICES, CHOICE_LETTERS, NUM_ROWS, REPETITIONS = 5000, 64, 128, 3
Pairs = list[tuple[list[int], list[int]]]


def make_pairs(num_prompts: int, vocab_size: int) -> Pairs:
    rng = random.Random(0)

    def ids(number: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(number)]

    prompts = [ids(PROMPT_TOKENS) for _ in range(num_prompts)]
    return [(prompt, ids(CANDIDATE_TOKENS)) for prompt in prompts for _ in range(CANDIDATES)]


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def score_by_transformers(model_path: str, pairs: Pairs, num_threads: int) -> tuple[list[float], float]:
    """Logprobs and seconds; every pair apart, logits of the last tokens only."""
    import torch
    import transformers

    from pagedllm.runtime.device import torch_threads

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    found: list[float] = []

    def run(number: int) -> None:
        found.clear()
        for begin in range(0, number, BATCH):
            batch = pairs[begin : min(begin + BATCH, number)]
            ids = torch.tensor([prompt + candidate for prompt, candidate in batch])
            logits = model(ids, logits_to_keep=CANDIDATE_TOKENS + 1).logits[:, :-1].float()
            picked = logits.log_softmax(-1).gather(2, ids[:, -CANDIDATE_TOKENS:, None])
            found.extend(picked.sum((1, 2)).tolist())

    with torch.inference_mode(), torch_threads(num_threads):
        run(BATCH)
        taken = seconds(lambda: run(len(pairs)))
    return found, taken


def compare_scores(model_path: str, llm: LLM, num_prompts: int) -> None:
    pairs = make_pairs(num_prompts, llm.vocab_size)
    grouped = [pairs[i : i + CANDIDATES] for i in range(0, len(pairs), CANDIDATES)]
    prompts, candidates = [group[0][0] for group in grouped], [[c for _, c in group] for group in grouped]
    llm.loglikelihood(prompts[:2], candidates[:2], use_tqdm=False)
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    scores = llm.loglikelihood(prompts, candidates, use_tqdm=False)
    ours = time.perf_counter() - begin
    theirs_scores, theirs = score_by_transformers(model_path, pairs, llm.info()["num_threads"])
    flat = [score.logprob for group in scores for score in group]  # type: ignore[union-attr]
    worst = max(abs(a - b) / abs(b) for a, b in zip(flat, theirs_scores, strict=True))
    print(
        f"loglikelihood, {num_prompts} prompts x {CANDIDATES} candidates: {ours:.1f} s, transformers {theirs:.1f} s, "
    )
    print(f"  {theirs / ours:.2f} x; largest difference of a score {worst:.1%}")


def compare_choices(llm: LLM) -> None:
    rng = random.Random(0)
    choices = ["".join(rng.choice("abcdefgh ") for _ in range(CHOICE_LETTERS)) + "." for _ in range(NUM_CHOICES)]
    structured = StructuredOutputsParams(choice=choices)
    prompts = [[rng.randrange(llm.vocab_size) for _ in range(16)] for _ in range(NUM_ROWS)]
    free = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    masked = SamplingParams(temperature=0, max_tokens=32, structured_outputs=structured, detokenize=False)
    first = seconds(lambda: llm.generate(prompts[:1], masked, use_tqdm=False))
    times: dict[str, list[float]] = {"free": [], "choices": []}
    for _ in range(REPETITIONS):
        for name, params in (("free", free), ("choices", masked)):
            num_tokens = -llm.stats.num_output_tokens
            taken = seconds(lambda params=params: llm.generate(prompts, params, use_tqdm=False))  # type: ignore[misc]
            num_tokens += llm.stats.num_output_tokens
            times[name].append(taken * NUM_ROWS / num_tokens)
    ratios = [a / b for a, b in zip(times["choices"], times["free"], strict=True)]
    print(
        f"{NUM_CHOICES:,} choices, {NUM_ROWS} rows, seconds per step of all rows: free {median(times['free']):.4f}, "
        f"choices {median(times['choices']):.4f}, ratio {median(ratios):.3f}; the first request {first:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder that transformers can read too")
    parser.add_argument("--prompts", type=int, default=500)
    args = parser.parse_args()
    with LLM(args.model, dtype="bfloat16", max_model_len=512) as llm:
        compare_choices(llm)
        compare_scores(args.model, llm, args.prompts)


if __name__ == "__main__":
    main()
