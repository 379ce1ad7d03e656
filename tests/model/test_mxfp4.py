"""MXFP4 experts of gpt-oss: the numbers that transformers makes of them, and what is damaged is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagedllm.errors import ModelError
from pagedllm.model.checkpoint import SafetensorsCheckpoint
from pagedllm.model.mxfp4 import Mxfp4Checkpoint
from tests.model.family_models import CASES, build_case
from tests.model.harness import Sequences, load
from tests.model.models import edit_config, logits_of, random_ids, relative_error, save

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
EXPERTS = "model.layers.{layer}.mlp.experts.{name}"


def packed(weight: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales for a tensor [E, K, N], and that tensor set to their numbers."""
    num_experts, k, n = weight.shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 125, (num_experts, n, k // 32), generator=generator, dtype=torch.uint8)
    weight.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    return blocks, scales


@pytest.fixture
def quantized(tmp_path: Path) -> tuple[Any, Path]:
    """A model, and a folder with its experts in MXFP4."""
    model = build_case(CASES["gpt_oss"], intermediate_size=96)
    own: dict[str, Tensor] = {}
    for layer, module in enumerate(model.model.layers):
        for index, name in enumerate(("gate_up_proj", "down_proj")):
            blocks, scales = packed(getattr(module.mlp.experts, name), 2 * layer + index)
            full = EXPERTS.format(layer=layer, name=name)
            own |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
    save(model, tmp_path)
    replaced = {name.removesuffix("_blocks") for name in own}
    kept = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if name not in replaced}
    save_file(kept | own, tmp_path / "model.safetensors")
    edit_config(tmp_path, **CONFIG)
    return model, tmp_path


def test_logits_are_those_of_the_numbers(quantized: tuple[Any, Path], namespace: str) -> None:
    model, folder = quantized
    text = random_ids(30)
    assert relative_error(Sequences(load(folder, namespace=namespace)).logits(text), logits_of(model, text)) < 2e-4


def test_every_byte_and_scale_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 4, 2, 16)
    scales = torch.tensor([0, 1, 100, 120, 126, 127, 128, 130, 131, 140, 150, 200, 240, 250, 3, 127], dtype=torch.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales.view(2, 4, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Mxfp4Checkpoint(SafetensorsCheckpoint(tmp_path))
    expected = convert_moe_packed_tensors(blocks, scales.view(2, 4, 2))
    assert checkpoint.names() == ["x"]
    assert checkpoint.shape("x") == (2, 64, 4)
    assert torch.equal(checkpoint.read("x"), expected)
    assert torch.equal(checkpoint.read("x", slice(1, 2)), expected[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_blocks": torch.zeros(5, 192, 4, 8, dtype=torch.uint8)}, "gate_up_proj is no MXFP4: its blocks have shape"),
        ({"_scales": torch.zeros(5, 192, 3, dtype=torch.uint8)}, "gate_up_proj is no MXFP4: its blocks have shape"),
        ({"_scales": torch.zeros(5, 192, 4, dtype=torch.int8)}, "gate_up_proj is int8, a floating type is needed"),
        ({"_scales": None}, r"gate_up_proj is missing"),
    ],
)
def test_damaged_blocks_are_named(changes: dict[str, Tensor | None], message: str, quantized: tuple[Any, Path]) -> None:
    _, folder = quantized
    weights: dict[str, Tensor | None] = dict(load_file(folder / "model.safetensors"))
    full = EXPERTS.format(layer=1, name="gate_up_proj")
    weights |= {f"{full}{suffix}": tensor for suffix, tensor in changes.items()}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
