"""Recorded decode steps: the bits of eager ones, whatever changes from step to step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedllm import LLM, SamplingParams
from pagedllm.ops.library import load_kernels
from pagedllm.ops.norm import rms_norm
from pagedllm.ops.tape import Tape
from tests.tiny import save_tiny_model

KERNELS = load_kernels()


def open_llm(folder: Path, **fields: object) -> LLM:
    return LLM(str(folder), max_model_len=1500, kv_cache_memory_bytes=64 << 20, max_num_seqs=5, **fields)  # type: ignore[arg-type]


@pytest.fixture(params=["llama", "qwen3_moe"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return save_tiny_model(tmp_path, request.param, max_position_embeddings=2048)


def test_a_tape_runs_its_kernels_again_on_what_lies_there_now() -> None:
    x, out, weight = torch.ones(2, 32), torch.empty(2, 32), torch.full((32,), 3.0)
    tape = Tape(KERNELS.path)  # type: ignore[arg-type]
    with tape.recording():
        rms_norm(KERNELS.namespace, out, x, weight, 0.0)
    assert out.tolist() == [[3.0] * 32] * 2
    x[1] = -2.0
    rms_norm(KERNELS.namespace, x, torch.zeros(2, 32), weight, 1.0)  # recording is over
    x[0], x[1] = 5.0, -2.0
    tape.run()
    assert out.tolist() == [[3.0] * 32, [-3.0] * 32]


def test_nothing_is_recorded_after_an_exception() -> None:
    x, out, weight = torch.ones(1, 32), torch.empty(1, 32), torch.ones(32)
    tape = Tape(KERNELS.path)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="rms_norm: weight"), tape.recording():
        rms_norm(KERNELS.namespace, out, x, torch.ones(31), 0.0)
    rms_norm(KERNELS.namespace, out, x, weight, 0.0)
    out.zero_()
    tape.run()
    assert out.tolist() == [[0.0] * 32]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_give_the_bits_of_eager_ones_as_lengths_splits_and_batches_change(
    folder: Path, dtype: str
) -> None:
    prompts = [{"prompt_token_ids": [5 + i % 60 for i in range(n)]} for n in (3, 1010, 500, 17, 1100, 40, 7)]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=1) for n in (60, 30, 25, 9, 3, 50, 1)
    ]
    found = []
    for enforce_eager in (True, False):
        with open_llm(folder, dtype=dtype, enforce_eager=enforce_eager) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append([(o.outputs[0].token_ids, list(o.outputs[0].token_logprobs)) for o in outputs])
            tapes = llm._assembly.runtime.runner.decode_tapes
            assert (tapes is None) == enforce_eager
            assert enforce_eager or len(tapes._tapes) > 1
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_steps_find_without_logits_what_steps_with_logits_find(folder: Path, dtype: str) -> None:
    """Recorded or not; a request that wants logprobs among them makes the step compute its logits."""
    prompts = [{"prompt_token_ids": [5 + i % 60 for i in range(n)]} for n in (3, 200, 17, 40, 9, 31)]
    plain = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 30, 3, 9, 33, 1)]
    mixed = [p.clone() for p in plain]
    mixed[3].logprobs = 2
    found = []
    for enforce_eager in (True, False):
        with open_llm(folder, dtype=dtype, enforce_eager=enforce_eager) as llm:
            runner = llm._assembly.runtime.runner
            for params in (plain, mixed, plain):
                runner.buffers.logits.fill_(torch.nan)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append([o.outputs[0].token_ids for o in outputs])
                assert bool(runner.buffers.logits.isnan().all()) == (params is plain)
            if not enforce_eager:
                kinds = {wants_likeliest for _, wants_likeliest in runner.decode_tapes._tapes}
                assert kinds == {True, False}
    assert found[1:] == found[:1] * 5
