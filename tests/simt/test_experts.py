"""Mixtures of experts through the emulated CUDA kernels: every family's logits beside the twins' in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedllm.ops.library import load_kernels
from pagedllm.ops.moe import route_tokens
from tests.model.family_models import CASES, VOCAB_SIZE, build_case
from tests.simt.emulator import Emulator
from tests.simt.test_end_to_end import simt_logits, twin_logits

SIMT = "pagedllm_simt"
EXPERTS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss")
FAMILIES = [name for name, case in CASES.items() if case.architecture.startswith(EXPERTS)]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


def test_every_architecture_with_experts_is_here() -> None:
    assert {CASES[name].architecture.removesuffix("ForCausalLM") for name in FAMILIES} == set(EXPERTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_as_exact_as_the_twins_in_16_bits(emulator: Emulator, tmp_path: Path, name: str) -> None:
    """Teacher forcing. Where a token's experts are nearly tied it passes others than in float32, and all later tokens
    see that; seldom in float16, which has three bits more."""
    build_case(CASES[name], **HEADS).bfloat16().save_pretrained(tmp_path)
    token_ids = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = twin_logits(tmp_path, token_ids, torch.float32)
    twin, found, chunked, fine = (
        float((logits - exact).abs().amax(1).median())
        for logits in (
            twin_logits(tmp_path, token_ids, torch.bfloat16),
            simt_logits(tmp_path, token_ids, torch.bfloat16, 60),
            simt_logits(tmp_path, token_ids, torch.bfloat16, 7),
            simt_logits(tmp_path, token_ids, torch.float16, 25),
        )
    )
    assert twin < 0.2 * float(exact.std())
    assert max(found, chunked) < 2.5 * twin
    assert fine < 0.8 * twin


def test_routing_by_torch_is_that_of_the_kernels(emulator: Emulator) -> None:
    logits = torch.randn(19, 11, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    results = []
    load_kernels()
    for namespace in ("pagedllm", SIMT):
        result = (
            torch.empty(19, 4), torch.empty(19, 4, dtype=torch.int32), torch.empty(76, dtype=torch.int32),
            torch.empty(12, dtype=torch.int32),
        )  # fmt: skip
        route_tokens(namespace, *result, logits, True)
        results.append(result)
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=0)
