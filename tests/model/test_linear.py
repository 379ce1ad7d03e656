"""Merged weights lie where the operators look for them, and take the memory that was foretold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedllm.model.decoder import Decoder, weight_bytes
from pagedllm.model.host_memory import HostMemory
from pagedllm.model.linear import Linear, LinearShape, PackedFormat
from pagedllm.model.registry import read_model_config
from pagedllm.ops.attention import CpuAttentionBackend
from pagedllm.ops.linear import GATED_HALF, unpack
from tests.model.configs import REAL_CONFIGS
from tests.model.harness import REFERENCE
from tests.model.models import build

DTYPES = [torch.bfloat16, torch.float32]


def fill(shape: LinearShape, dtype: torch.dtype) -> tuple[Linear, list[torch.Tensor], list[torch.Tensor]]:
    weight_format = PackedFormat(dtype)
    linear = Linear(shape, weight_format, HostMemory(Linear.num_bytes(shape, weight_format)))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, shape.in_features, generator=generator).to(dtype) for n in shape.part_sizes]
    biases = [torch.randn(n, generator=generator) for n in shape.part_sizes]
    for part, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        linear.load_weight(part, weight)
        if shape.has_bias:
            linear.load_bias(part, bias)
    return linear, weights, biases


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part_sizes", [(64,), (192, 64, 64), (96, 32, 32), (97,), (1, 200, 3), (63, 2), (640, 16)])
@pytest.mark.parametrize("in_features", [48, 33])
def test_parts_follow_each_other_and_padding_is_zero(
    part_sizes: tuple[int, ...], in_features: int, dtype: torch.dtype
) -> None:
    linear, weights, biases = fill(LinearShape(in_features, part_sizes, has_bias=True), dtype)
    stored = unpack(linear.weight)
    expected = torch.zeros_like(stored)
    expected[: sum(part_sizes), :in_features] = torch.cat(weights)
    assert torch.equal(stored, expected)
    assert linear.bias is not None
    assert torch.equal(linear.bias[: sum(part_sizes)], torch.cat(biases))
    assert not linear.bias[sum(part_sizes) :].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 64, 56, 1, 100])
def test_gate_and_up_alternate_by_32_columns(size: int, dtype: torch.dtype) -> None:
    linear, (gate, up), (gate_bias, up_bias) = fill(LinearShape(16, (size, size), is_gated=True, has_bias=True), dtype)
    stored = unpack(linear.weight)
    assert linear.bias is not None
    for row in range(size):
        column = row // GATED_HALF * 64 + row % GATED_HALF
        assert torch.equal(stored[column], gate[row])
        assert torch.equal(stored[column + GATED_HALF], up[row])
        assert linear.bias[column] == gate_bias[row]
        assert linear.bias[column + GATED_HALF] == up_bias[row]
    assert int((stored != 0).any(1).sum()) == 2 * size


def test_rows_from_an_odd_place_in_a_file_are_packed() -> None:
    shape = LinearShape(4, (64,))
    weight_format = PackedFormat(torch.bfloat16)
    linear = Linear(shape, weight_format, HostMemory(Linear.num_bytes(shape, weight_format)))
    file = torch.arange(257, dtype=torch.bfloat16)
    linear.load_weight(0, file[1:].view(64, 4))
    assert torch.equal(unpack(linear.weight), file[1:].view(64, 4))


def test_a_wrong_shape_is_refused() -> None:
    linear, _, _ = fill(LinearShape(4, (6,), has_bias=True), torch.float32)
    with pytest.raises(ValueError, match=r"expected a weight of shape \(6, 4\), got \(4, 6\)"):
        linear.load_weight(0, torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"expected a bias of shape \(6,\), got \(4,\)"):
        linear.load_bias(0, torch.zeros(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 1, "intermediate_size": 33}),
        ("qwen3", {"num_hidden_layers": 3}),
        ("gemma3", {}),
    ],
)
def test_weight_bytes_is_what_the_decoder_takes(family: str, settings: dict[str, object], dtype: torch.dtype) -> None:
    model = build(family, **settings)
    config = read_model_config({**model.config.to_dict(), "architectures": [type(model).__name__]}, Path("model"))
    decoder = Decoder(config, dtype, CpuAttentionBackend(REFERENCE), REFERENCE)
    assert decoder.memory.num_taken == weight_bytes(config, PackedFormat(dtype))


@pytest.mark.parametrize(
    ("model", "num_parameters", "num_norm_parameters"),  # as their makers count them; norms are kept in float32
    [
        ("smollm2", 134_515_008, 35_136),
        ("llama 3.1", 8_030_261_248, 266_240),
        ("qwen3", 596_049_920, 65_536),
        ("gemma 3", 268_098_176, 55_936),
    ],
)
def test_weight_bytes_of_real_models(model: str, num_parameters: int, num_norm_parameters: int) -> None:
    config = read_model_config(REAL_CONFIGS[model], Path("model"))
    assert weight_bytes(config, PackedFormat(torch.bfloat16)) == 2 * num_parameters + 2 * num_norm_parameters
    assert weight_bytes(config, PackedFormat(torch.float32)) == 4 * num_parameters
