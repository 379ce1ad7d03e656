"""A GGUF file of each family gives the logits of the checkpoint that it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedllm.model.gguf import GGUFCheckpoint
from pagedllm.model.gguf_architectures import ARCHITECTURES
from pagedllm.model.loader import load_model
from pagedllm.ops.attention import CpuAttentionBackend
from pagedllm.ops.library import load_kernels
from tests.model import gguf_families
from tests.model.family_models import CASES
from tests.model.harness import Sequences
from tests.model.models import freeze_rope, logits_of, random_ids, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", gguf_families.GGUF_CASES)
def test_logits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model, file = gguf_families.write_case(name, tmp_path)
    namespace = load_kernels().namespace
    decoder = load_model(GGUFCheckpoint(file), torch.float32, CpuAttentionBackend(namespace), namespace)
    frozen = CASES[name].frozen_rope
    if frozen is not None:
        freeze_rope(model, frozen)
    text = random_ids(frozen or 40)
    assert relative_error(Sequences(decoder).logits(text), logits_of(model, text)) < 2e-4


def test_every_architecture_is_tested() -> None:
    import gguf

    written = {gguf.MODEL_ARCH_NAMES[gguf_families.ARCHITECTURES[CASES[name].architecture]]
               for name in gguf_families.GGUF_CASES}  # fmt: skip
    assert written | {"qwen3", "gemma3"} == set(ARCHITECTURES)  # those two: test_gguf.py
