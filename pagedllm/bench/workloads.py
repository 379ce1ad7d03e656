"""Workloads: the token ids and output lengths that every engine in a benchmark is given.

Plain data from a fixed seed, so that two engines, two runs and two machines work on the same ids. Output lengths are
exact (`ignore_eos`): what is measured does not depend on what a model says. Besides the named workloads, "IN,OUT" is
one of prompts of IN tokens and outputs of OUT.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float
    top_p: float
    top_k: int


SAMPLED = Sampling(temperature=0.8, top_p=0.95, top_k=50)


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    prompt_token_ids: list[int]
    num_output_tokens: int
    sampling: Sampling | None = None  # None: greedy; the same for all requests of a workload


def make_mixed(num_requests: int, vocab_size: int, rng: random.Random) -> list[WorkloadRequest]:
    """Prompts of 16-256 tokens, outputs of 16-192, both uniform: a list of unrelated questions."""
    return [
        WorkloadRequest(_random_ids(rng.randint(16, 256), vocab_size, rng), rng.randint(16, 192))
        for _ in range(num_requests)
    ]


def make_decode(num_requests: int, vocab_size: int, rng: random.Random) -> list[WorkloadRequest]:
    """Prompts of 32 tokens, outputs of 128: the time goes into steps of one token a request."""
    return make_uniform(32, 128, num_requests, vocab_size, rng)


def make_sampled(num_requests: int, vocab_size: int, rng: random.Random) -> list[WorkloadRequest]:
    """The requests of `decode`, drawn from the model's distribution by SAMPLED."""
    return [replace(request, sampling=SAMPLED) for request in make_decode(num_requests, vocab_size, rng)]


def make_prefix(num_requests: int, vocab_size: int, rng: random.Random) -> list[WorkloadRequest]:
    """480 tokens shared by all, 16-64 of its own for each, outputs of 32: one long system prompt."""
    shared = _random_ids(480, vocab_size, rng)
    return [
        WorkloadRequest(shared + _random_ids(rng.randint(16, 64), vocab_size, rng), 32) for _ in range(num_requests)
    ]


WORKLOADS: dict[str, Callable[[int, int, random.Random], list[WorkloadRequest]]] = {
    "mixed": make_mixed,
    "decode": make_decode,
    "prefix": make_prefix,
    "sampled": make_sampled,
}


def make_uniform(
    num_prompt_tokens: int, num_output_tokens: int, num_requests: int, vocab_size: int, rng: random.Random
) -> list[WorkloadRequest]:
    """Unrelated prompts of one length, outputs of one length."""
    return [
        WorkloadRequest(_random_ids(num_prompt_tokens, vocab_size, rng), num_output_tokens) for _ in range(num_requests)
    ]


def parse_lengths(name: str) -> tuple[int, int] | None:
    """(prompt tokens, output tokens) of "IN,OUT", both at least 1; None for anything else."""
    found = re.fullmatch(r"([1-9][0-9]*),([1-9][0-9]*)", name)
    return (int(found[1]), int(found[2])) if found else None


def is_workload(name: str) -> bool:
    return name in WORKLOADS or parse_lengths(name) is not None


def make_workload(name: str, num_requests: int, vocab_size: int, seed: int) -> list[WorkloadRequest]:
    """The requests of workload `name`, for which `is_workload` holds; equal arguments give equal requests."""
    rng = random.Random(seed)
    if name in WORKLOADS:
        return WORKLOADS[name](num_requests, vocab_size, rng)
    lengths = parse_lengths(name)
    assert lengths is not None, name
    return make_uniform(*lengths, num_requests, vocab_size, rng)


def _random_ids(count: int, vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
