"""Mixtures of experts through the emulated CUDA kernels: every family's logits beside the twins' in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.family_models import CASES, VOCAB_SIZE, build_case
from tests.simt.emulator import Emulator
from tests.simt.test_end_to_end import simt_logits, twin_logits

EXPERTS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss")
FAMILIES = [name for name, case in CASES.items() if case.architecture.startswith(EXPERTS)]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


def test_every_architecture_with_experts_is_here() -> None:
    assert {CASES[name].architecture.removesuffix("ForCausalLM") for name in FAMILIES} == set(EXPERTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_as_exact_as_the_twins_in_16_bits(emulator: Emulator, tmp_path: Path, name: str) -> None:
    """Teacher forcing. A token whose experts are nearly tied may pass others than in float32, the twins' as well."""
    build_case(CASES[name], **HEADS).bfloat16().save_pretrained(tmp_path)
    token_ids = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = twin_logits(tmp_path, token_ids, torch.float32)
    twin, found, chunked = (
        (logits - exact).abs().amax(1)
        for logits in (
            twin_logits(tmp_path, token_ids, torch.bfloat16),
            simt_logits(tmp_path, token_ids, torch.bfloat16, 60),
            simt_logits(tmp_path, token_ids, torch.bfloat16, 7),
        )
    )
    assert float(twin.median()) < 0.2 * float(exact.std())
    for errors in (found, chunked):
        assert float(errors.median()) < 1.5 * float(twin.median())
        assert float((errors < 6 * twin.median()).float().mean()) > 0.8
