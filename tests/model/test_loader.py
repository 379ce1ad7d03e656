"""Weights are accounted for to the last tensor; whatever is missing, torn or contradictory is refused in one line."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagedllm.errors import ModelError
from pagedllm.model.checkpoint import SafetensorsCheckpoint
from pagedllm.model.decoder import Decoder
from pagedllm.model.loader import load_model, open_checkpoint
from pagedllm.ops.attention import CpuAttentionBackend
from tests.model.configs import SMOLLM2_135M
from tests.model.harness import REFERENCE, Sequences, load
from tests.model.models import build, edit_config, logits_of, random_ids, relative_error, save

INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """A Llama's, untied."""
    return {name: tensor.contiguous() for name, tensor in build("llama").state_dict().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(build("llama"), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    model = build("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    return tmp_path


def change_weights(folder: Path, **changes: Any) -> None:
    """Adds tensors to model.safetensors, or replaces them."""
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **changes}, folder / "model.safetensors")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


MEASURE = """
import sys, torch
from pathlib import Path
from pagedllm.model.loader import load_model, open_checkpoint
from pagedllm.ops.attention import CpuAttentionBackend
from pagedllm.ops.library import load_kernels
namespace = load_kernels().namespace
torch.set_num_threads(1)
torch.nn.functional.pad(torch.ones(2, 2).bfloat16(), (0, 1)).float()  # what is loaded lazily

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

checkpoint, before = open_checkpoint(sys.argv[1]), peak()
decoder = load_model(checkpoint, torch.bfloat16, CpuAttentionBackend(namespace), namespace)
print((peak() - before) / decoder.memory.num_taken)
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_holds_little_beside_the_packed_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of 57 MB of weights at most 1.3 times as much at any time, though the file has twice that in float32."""
    hidden, inner, vocabulary = 512, 2048, 49152
    config = {**SMOLLM2_135M, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary,
              "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {EMBEDDING: (vocabulary, hidden), NORM: (hidden,)}
    save_file({name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.9 < float(result.stdout) < 1.3


def load_by(num_threads: int, folder: Path) -> Decoder:
    return load_model(
        open_checkpoint(str(folder)), torch.float32, CpuAttentionBackend(REFERENCE), REFERENCE, num_threads=num_threads
    )


def test_threads_load_the_same_and_pass_on_what_goes_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_ids(20)
    expected = Sequences(load_by(1, folder)).logits(text)
    assert torch.equal(Sequences(load_by(3, folder)).logits(text), expected)

    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pagedllm.model.checkpoint.os.preadv", fail)
    with pytest.raises(ModelError, match=r"model.safetensors: .* cannot be read: Input/output error"):
        load_by(3, folder)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def test_shards_give_the_same_weights_as_one_file(sharded: Path) -> None:
    single = save(build("llama"), sharded / "single")
    text = random_ids(20)
    assert torch.equal(Sequences(load(sharded)).logits(text), Sequences(load(single)).logits(text))


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    tied = load(save(build("llama", tie_word_embeddings=True), tmp_path))
    assert tied.embedding is tied.head


def test_a_tied_head_that_equals_the_embedding_may_be_stored(tmp_path: Path) -> None:
    model = build("llama", tie_word_embeddings=True)
    folder = save(model, tmp_path)
    change_weights(folder, **{"lm_head.weight": model.state_dict()[EMBEDDING].clone()})
    text = random_ids(20)
    assert relative_error(Sequences(load(folder)).logits(text), logits_of(model, text)) < 2e-4


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    model = build("llama", tie_word_embeddings=True)
    folder = save(model, tmp_path)
    change_weights(folder, **{"lm_head.weight": model.state_dict()[EMBEDDING] + 1})
    refused(folder, "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings is true: set it")


def test_a_missing_head_is_refused_where_embeddings_are_not_tied(tmp_path: Path) -> None:
    folder = save(build("llama", tie_word_embeddings=True), tmp_path)
    for changes in ({"tie_word_embeddings": False}, {"tie_word_embeddings": None}):
        edit_config(folder, **changes)
        refused(folder, r"lm_head.weight is missing \(config.json does not set tie_word_embeddings\)")


def test_gemma3_is_tied_unless_it_says_otherwise(tmp_path: Path) -> None:
    folder = save(build("gemma3"), tmp_path, tie_word_embeddings=None)
    assert load(folder).config.is_tied


def test_old_rotary_tables_may_lie_there(folder: Path) -> None:
    change_weights(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    assert isinstance(load(folder), Decoder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.bias": torch.zeros(97)}, "lm_head.bias is unknown to LlamaForCausalLM"),
        (
            {f"model.layers.{i}.self_attn.q_norm.weight": torch.ones(32) for i in range(5)},
            r"model.layers.0.self_attn.q_norm.weight, .* and 2 more are unknown to LlamaForCausalLM",
        ),
        ({"model.norm.weight": torch.ones(47)}, r"model.norm.weight has shape \[47\], config.json asks for \[48\]"),
        (
            {"model.layers.1.mlp.down_proj.weight": torch.ones(56, 48)},
            r"model.layers.1.mlp.down_proj.weight has shape \[56, 48\], config.json asks for \[48, 56\]",
        ),
        ({EMBEDDING: torch.ones(97, 48, dtype=torch.int8)}, "model.embed_tokens.weight is int8, a floating type is n"),
        (
            {EMBEDDING: torch.ones(97, 48).to(torch.float8_e4m3fn)},
            "model.embed_tokens.weight is float8_e4m3fn, a floating type is needed: quantized weights are read from",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(changes: dict[str, Tensor], message: str, folder: Path) -> None:
    change_weights(folder, **changes)
    refused(folder, message)


def test_every_single_missing_tensor_is_named(folder: Path, weights: dict[str, Tensor]) -> None:
    for name in weights:
        save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors")
        refused(folder, f"{re.escape(name)} is missing")


def test_a_config_that_asks_for_more_than_there_is(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    refused(folder, r"model.layers.2.input_layernorm.weight, .* and 6 more are missing")
    edit_config(folder, num_hidden_layers=2, attention_bias=True)
    refused(folder, r"model.layers.0.self_attn.k_proj.bias, .* and 5 more are missing")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = first_shard(sharded)
    shard.unlink()
    refused(sharded, f"{shard.name} is missing, {INDEX} names it: download it again")


def test_a_missing_index_is_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    refused(sharded, f"{INDEX} is missing beside {first_shard(sharded).name}")


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_torn_file_is_named(kept: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept == 0.5 else int(kept)])
    refused(folder, r"model.safetensors is not a whole safetensors file \(.*\): download it again")


def test_a_torn_shard_is_named(sharded: Path) -> None:
    shard = first_shard(sharded)
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(sharded, f"{shard.name} is not a whole safetensors file")


def write_header(header: dict[str, Any]) -> bytes:
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + b"\0" * 64


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        write_header({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 65]}}),
        write_header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]}}),
        write_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 64]}}),
        write_header({"a": {"dtype": "X9", "shape": [16], "data_offsets": [0, 64]}}),
    ],
)
def test_a_header_that_lies_is_refused(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors is not a whole safetensors file")


def test_a_header_with_any_byte_changed_loads_or_is_refused_in_one_line(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    generator = random.Random(0)
    num_refused = 0
    for _ in range(150):
        place = generator.choice((generator.randrange(header_end), generator.randrange(10)))
        damaged = bytearray(content)
        damaged[place] = generator.choice((0, 10, 34, 48, 57, 91, 125, 255, generator.randrange(256)))
        path.write_bytes(damaged)
        try:
            load(folder)
        except ModelError as error:
            num_refused += 1
            message = str(error)
            assert "\n" not in message
    assert num_refused > 100


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_git_lfs_pointer_is_named(name: str, folder: Path) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(folder, rf"{name} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")


def test_two_complete_sets_are_refused(sharded: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, sharded / "model.safetensors")
    refused(sharded, f"model.safetensors is not named by {INDEX}: the folder may hold two sets of weights")


def test_two_single_files_are_refused(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.fp16.safetensors")
    refused(folder, "holds model.fp16.safetensors and model.safetensors: keep one set of weights")


def test_mistrals_own_format_beside_the_usual_one_is_not_a_second_set(folder: Path) -> None:
    save_file({"anything": torch.ones(1)}, folder / "consolidated.safetensors")
    assert isinstance(load(folder), Decoder)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update({"x.weight": min(m.values())}), "names x.weight in model-0.*, which does not hold it"),
        (lambda m: m.update({NORM: min(m.values())}), f"names {NORM} in model-00001.*, which does not hold it"),
        (lambda m: m.update({EMBEDDING: "model-9.safetensors"}), f"model-9.safetensors is missing, {INDEX} names it"),
        (
            lambda m: m.update({EMBEDDING: "../x.safetensors"}),
            r"names '../x.safetensors' for model.embed_tokens.weight",
        ),
        (lambda m: m.update({EMBEDDING: 7}), "names 7 for model.embed_tokens.weight: a safetensors file beside it is"),
        (lambda m: m.clear(), "has no weight_map from tensors to files"),
    ],
)
def test_an_index_that_does_not_fit_the_shards(
    edit: Callable[[dict[str, str]], object], message: str, sharded: Path
) -> None:
    edit_index(sharded, edit)
    refused(sharded, message)


def test_one_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    weights = load_file(shards[1])
    name, tensor = next(iter(load_file(shards[0]).items()))
    save_file({**weights, name: tensor}, shards[1])
    refused(sharded, f"holds {name}, and so does .*{shards[0].name}: keep one of them")


def test_a_pickle_is_never_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(folder, "holds pytorch_model.bin, a pickle, which is never read: convert it")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.json is not JSON"),
        (b"{", "config.json is not JSON"),
        (b"\xff\xfe", "config.json is not JSON"),
        (b"[" * 100_000, "config.json is not JSON"),
        (b"[]", "config.json must hold a JSON object, got list"),
    ],
)
def test_a_broken_config_is_refused(content: bytes, message: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    refused(folder, message)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors is missing: download the whole model folder")
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing: download the whole model folder")
    refused(tmp_path / "nowhere", "nowhere does not exist: pass the path of a model folder or of a GGUF file")


def test_an_unsupported_head_dim_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(build("llama", head_dim=20), tmp_path)
    refused(folder, "head_dim 20 is not supported; the kernels have 32, 48, 64")


def test_a_shard_instead_of_its_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model.safetensors is a file: pass the folder that holds it"):
        open_checkpoint(str(folder / "model.safetensors"))


def test_load_format_and_gguf_file_are_checked(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"load_format must be one of .*, got 'pickle'"):
        open_checkpoint(str(folder), load_format="pickle")
    with pytest.raises(ValueError, match=r"gguf_file='a.gguf' contradicts load_format='safetensors'"):
        open_checkpoint(str(folder), load_format="safetensors", gguf_file="a.gguf")
    with pytest.raises(ModelError, match=r"a.gguf does not exist: gguf_file must name a file of the model folder"):
        open_checkpoint(str(folder), gguf_file="a.gguf")
    with pytest.raises(ModelError, match="holds no GGUF file: pass gguf_file="):
        open_checkpoint(str(folder), load_format="gguf")


def test_safetensors_win_over_a_gguf_file_beside_them(folder: Path) -> None:
    (folder / "a.gguf").write_bytes(b"GGUF")
    assert isinstance(open_checkpoint(str(folder)), SafetensorsCheckpoint)


def test_several_gguf_files_need_a_choice(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds a.gguf, b.gguf: pass gguf_file="):
        open_checkpoint(str(folder))


def test_generation_config_is_read_where_there_is_one(folder: Path) -> None:
    assert SafetensorsCheckpoint(folder).generation_config["eos_token_id"] == 2
    (folder / "generation_config.json").unlink()
    assert SafetensorsCheckpoint(folder).generation_config == {}
