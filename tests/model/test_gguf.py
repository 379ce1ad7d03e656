"""Weights: every quantization as the gguf package dequantizes it, and HF's form as transformers makes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagedllm.errors import ModelError
from pagedllm.model.gguf import SLAB_VALUES, GGUFCheckpoint
from pagedllm.model.gguf_header import TENSOR_TYPES, GGUFHeader
from pagedllm.model.gguf_tensors import row_order
from tests.model.gguf_files import SIZES, byte_level_vocabulary, model_keys, random_tensors, write_gguf, write_model

QUANTIZED = [name for name, values, _ in TENSOR_TYPES.values() if values > 1]


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[rows, bytes of a row]: any bytes are valid quants; the float16 scales in them are made finite and small."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(kind.value).integers(0, 256, (rows * columns // values, size), np.uint8)
    places = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2],
              "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64], "IQ1_M": [], "MXFP4": [], "NVFP4": []}  # fmt: skip
    for place in places.get(kind.name, [0]):
        blocks[:, place : place + 2] = np.full(len(blocks), 0.01, np.float16).view(np.uint8).reshape(-1, 2)
    if kind.name == "IQ1_M":  # the scale's bits are spread over the last four words
        for word, nibble in enumerate((0xF, 0x1, 0x1, 0x2)):
            place = 49 + 2 * word
            blocks[:, place] = blocks[:, place] & 0xF | nibble << 4
    elif kind.name == "MXFP4":
        blocks[:, 0] = 120  # an exponent
    elif kind.name == "NVFP4":
        blocks[:, :4] = 0x38  # scales
    return blocks.reshape(rows, -1)


def write_matrix(path: Path, name: str, data: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> Path:
    """A llama of one layer whose matrix `name` has the given type; the other tensors are float32."""
    sizes = SIZES | {"block_count": 1, "embedding_length": 256, "feed_forward_length": 256}
    vocabulary = byte_level_vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in model_keys("llama", sizes, vocabulary).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, float(value))
    for other, tensor in random_tensors("llama", sizes, len(vocabulary["tokens"])).items():
        if other != name:
            writer.add_tensor(other, tensor)
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_matrix_reads_as_the_gguf_package_dequantizes_it(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind, 256, 256)
    checkpoint = GGUFCheckpoint(write_matrix(tmp_path / "m.gguf", "blk.0.ffn_up.weight", data, kind))
    tensor = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert tensor.dtype == torch.float32
    assert expected.isfinite().all()
    assert torch.equal(tensor, expected)
    assert torch.equal(checkpoint.read("model.layers.0.mlp.up_proj.weight", dtype=torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_a_matrix_survives_quantization_within_its_step(tmp_path: Path, name: str) -> None:
    """Independent of the package's dequantization: the values that were quantized come back."""
    steps = {
        "Q4_0": 1 / 7,
        "Q4_1": 2 / 15,
        "Q5_0": 1 / 15,
        "Q5_1": 2 / 31,
        "Q8_0": 1 / 127,
        "F16": 2e-3,
        "BF16": 8e-3,
        "F32": 0,
    }
    kind = gguf.GGMLQuantizationType[name]
    file = write_model(tmp_path / "m.gguf", types={"blk.1.ffn_up.weight": kind})
    original = random_tensors("llama", SIZES, 258)["blk.1.ffn_up.weight"]
    read = GGUFCheckpoint(file).read("model.layers.1.mlp.up_proj.weight").numpy()
    blocks = np.abs(original).reshape(-1, 32)
    error = np.abs(read - original).reshape(-1, 32).max(1) / blocks.max(1)
    assert error.max() <= steps[name]


def test_a_tensor_larger_than_a_slab_is_read_whole(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    rows = 2 * SLAB_VALUES // 256 + 3
    data = random_blocks(kind, rows, 256)
    file = write_matrix(tmp_path / "m.gguf", "token_embd.weight", data, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert torch.equal(GGUFCheckpoint(file).read("model.embed_tokens.weight"), expected)


def test_reading_gives_a_tensor_of_its_own(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "m.gguf"))
    first = checkpoint.read("model.norm.weight")
    first.zero_()
    assert checkpoint.read("model.norm.weight").abs().sum() > 0


def test_rows_are_put_back_in_the_checkpoints_order(tmp_path: Path) -> None:
    header = GGUFHeader(write_model(tmp_path / "m.gguf"))
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert row_order("halves", "blk.0.attn_k.weight", 16, config, header)[:8].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    by_group = row_order("kv_groups", "blk.0.attn_qkv.weight", 16, config, header).tolist()  # heads of 2 rows
    assert by_group == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    with pytest.raises(ModelError, match=r"attn_qkv\.weight has 15 rows, no multiple of its heads' number"):
        row_order("kv_groups", "blk.0.attn_qkv.weight", 15, config, header)


def test_biases_are_put_in_order_too(tmp_path: Path) -> None:
    tensors = random_tensors("llama", SIZES, 258)
    biases = {f"blk.0.attn_{name}.bias": np.arange(size, dtype=np.float32)
              for name, size in (("q", 64), ("k", 32), ("v", 32), ("output", 64))}  # fmt: skip
    keys = model_keys("llama", SIZES, byte_level_vocabulary())
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", keys, tensors | biases))
    assert checkpoint.config["attention_bias"] is True
    read = {
        name: checkpoint.read(f"model.layers.0.self_attn.{name}_proj.bias").tolist() for name in ("q", "k", "v", "o")
    }
    one_head = [0.0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert read["q"][:16] == read["k"][:16] == one_head
    assert read["v"][:16] == read["o"][:16] == list(range(16))


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "m.gguf"))
    checkpoint.config = {**checkpoint.config, "num_attention_heads": 5}
    with pytest.raises(ModelError, match=r"attn_q\.weight has 64 rows, no multiple of 2 x 5 heads"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")


def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no tensor lm_head\.weight"):
        GGUFCheckpoint(write_model(tmp_path / "m.gguf")).shape("lm_head.weight")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_every_tensor_equals_what_transformers_makes_of_the_file(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    matrices = [name for name in random_tensors(architecture, SIZES, 258) if "norm" not in name]
    types = dict(zip(matrices, [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "Q5_0", "F16")] * 9,
                     strict=False))  # fmt: skip
    head_dim = 128 if architecture == "qwen3" else 16  # transformers takes Qwen's default, not the header's
    changes = {f"{architecture}__attention__{key}_length": head_dim for key in ("key", "value")}
    file = write_model(tmp_path / "m.gguf", architecture, types=types, **changes)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    theirs = model.state_dict()
    ours = GGUFCheckpoint(file)
    assert set(theirs) - set(ours.names()) == {"lm_head.weight"}  # tied
    for name in ours.names():
        assert torch.equal(ours.read(name), theirs[name]), name
        assert ours.shape(name) == tuple(theirs[name].shape)


def test_an_untied_head_has_its_name(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary()
    tensors = random_tensors("llama", SIZES, 258)
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    checkpoint = GGUFCheckpoint(
        write_gguf(tmp_path / "m.gguf", "llama", model_keys("llama", SIZES, vocabulary), tensors)
    )
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.read("lm_head.weight"), torch.from_numpy(tensors["output.weight"]))


def test_without_the_package_gguf_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(ModelError, match=r"pip install pagedllm\[gguf\]"):
        GGUFCheckpoint(file)
