"""Workloads: the token ids and output lengths that every engine in a benchmark is given.

Plain data from a fixed seed, so that two engines, two runs and two machines work on the same ids. Output lengths are
exact (`ignore_eos`): what is measured does not depend on what a model says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    prompt_token_ids: list[int]
    num_output_tokens: int


def make_mixed(num_requests: int, vocab_size: int, rng: random.Random) -> list[WorkloadRequest]:
    """Prompts of 16-256 tokens, outputs of 16-192, both uniform: a list of unrelated questions."""
    return [
        WorkloadRequest(_random_ids(rng.randint(16, 256), vocab_size, rng), rng.randint(16, 192))
        for _ in range(num_requests)
    ]


def make_decode(num_requests: int, vocab_size: int, rng: random.Random) -> list[WorkloadRequest]:
    """Prompts of 32 tokens, outputs of 128: the time goes into steps of one token a request."""
    return [WorkloadRequest(_random_ids(32, vocab_size, rng), 128) for _ in range(num_requests)]


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
}


def make_workload(name: str, num_requests: int, vocab_size: int, seed: int) -> list[WorkloadRequest]:
    """The requests of workload `name`; equal arguments give equal requests."""
    return WORKLOADS[name](num_requests, vocab_size, random.Random(seed))


def _random_ids(count: int, vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
