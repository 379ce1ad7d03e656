"""The header reader: what it reads, and that no damaged or hostile file does worse than a ModelError of one line."""

from __future__ import annotations

import random
import resource
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from pagedllm.errors import ModelError
from pagedllm.model.gguf import GGUFCheckpoint
from pagedllm.model.gguf_header import REFUSED_TYPES, TENSOR_TYPES, GGUFHeader
from tests.model.gguf_families import write_case
from tests.model.gguf_files import byte_level_vocabulary, sentencepiece_vocabulary, write_gguf, write_model


def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    file = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in (("uint8", 255), ("int8", -128), ("uint16", 65535), ("int16", -2), ("uint32", 1 << 31),
                        ("int32", -5), ("uint64", 1 << 60), ("int64", -(1 << 60)), ("float32", 0.1), ("float64", 0.1),
                        ("bool", True), ("string", "ü")):  # fmt: skip
        getattr(writer, f"add_{name}")(name, value)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("booleans", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFHeader(file).metadata
    assert {name: metadata[name] for name in metadata if "." not in name and name[-1] != "s"} == {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -2, "uint32": 1 << 31, "int32": -5, "uint64": 1 << 60,
        "int64": -(1 << 60), "float32": 0.1, "float64": 0.1, "bool": True, "string": "ü",
    }  # fmt: skip
    assert metadata["numbers"].tolist() == [1, 2, 3]
    assert metadata["strings"] == ["a", "", "ü"]
    assert metadata["booleans"].tolist() == [True, False]


def test_the_header_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", types={"token_embd.weight": gguf.GGMLQuantizationType.Q8_0})
    header, reader = GGUFHeader(file), gguf.GGUFReader(file)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert info.type_name == tensor.tensor_type.name
        assert np.array_equal(header.raw(info).reshape(-1), tensor.data.view(np.uint8).reshape(-1))
    assert {key for key in reader.fields if not key.startswith("GGUF.")} == set(header.metadata)


def test_the_type_tables_are_those_of_the_gguf_package() -> None:
    for type_id, (name, values, size) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (values, size))
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind.value not in TENSOR_TYPES}.items() <= (
        REFUSED_TYPES.items()
    )


def test_an_unreadable_tensor_type_is_named(tmp_path: Path) -> None:
    file = tmp_path / "q2.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((1, 40), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight has type Q8_1, which is not read"):
        GGUFHeader(file)


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys)


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


HUGE = (1 << 64) - 1
STRING, ARRAY = 8, 9
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "other file": (b"PK\x03\x04" + b"0" * 60, r"not a GGUF file \(it starts with b'PK"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "only magic": (b"GGUF", "truncated or damaged: the version"),
    "version 1": (header(version=1), "GGUF of version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF big-endian is not supported"),
    "huge key count": (header(num_keys=HUGE), "claims 18,446,744,073,709,551,615 keys"),
    "huge tensor count": (header(num_tensors=HUGE), "claims 18,446,744,073,709,551,615 tensors"),
    "missing keys": (header(num_keys=60000), "truncated or damaged: a key's name"),
    "huge string": (header(0, 1) + text(b"k", HUGE), "a key's name claims"),
    "long string": (header(0, 1) + text(b"k", 1 << 20), "a key's name needs 1,048,576 bytes"),
    "not utf-8": (header(0, 1) + text(b"\xff\xfe"), "a key's name is not UTF-8"),
    "unknown kind": (header(0, 1) + text(b"k") + struct.pack("<I", 99) + b"0" * 64, "k has the unknown value type 99"),
    "huge array": (header(0, 1) + text(b"k") + struct.pack("<IIQ", ARRAY, 4, HUGE), "k claims"),
    "huge string array": (
        header(0, 1) + text(b"k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 23),
        "k needs 67,108,864",
    ),
    "array item too long": (
        header(0, 1) + text(b"k") + struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"abc", HUGE),
        "item 0 of k needs",
    ),
    "array of arrays": (
        header(0, 1) + text(b"k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + b"0" * 99,
        "array of arrays",
    ),
    "key twice": (header(0, 2) + (text(b"k") + struct.pack("<II", 4, 1)) * 2, "the key 'k' stands twice"),
    "alignment": (
        header(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 24),
        "general.alignment must be a power of two",
    ),
    "no dimension": (header(1) + text(b"t") + struct.pack("<I", 0), "has 0 dimensions, not 1 to 4"),
    "many dimensions": (header(1) + text(b"t") + struct.pack("<I", 1 << 30), "has 1073741824 dimensions"),
    "empty tensor": (header(1) + text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0), "is empty"),
    "huge tensor": (
        header(1) + text(b"t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0),
        "truncated or damaged: tensor t",
    ),
    "far tensor": (header(1) + text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 1 << 62), "truncated or damaged: tensor t"),
    "unaligned tensor": (header(1) + text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 4) + b"0" * 99, "tensor t needs"),
    "broken blocks": (
        header(1) + text(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0) + b"0" * 99,
        "rows of 33 are no whole",
    ),
    "tensor twice": (
        header(2) + (text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0)) * 2 + b"0" * 99,
        "the tensor 't' stands twice",
    ),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_a_model_error_and_costs_no_memory(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            GGUFHeader(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf: cannot be read: No such file"):
        GGUFHeader(tmp_path / "nowhere.gguf")


def read_all(file: Path) -> None:
    checkpoint = GGUFCheckpoint(file)
    for name in checkpoint.names():
        checkpoint.read(name)
    checkpoint.tokenizer_files()


@pytest.fixture
def small_files(tmp_path: Path) -> list[Path]:
    """One layer of each kind of file, a few kilobytes."""
    sizes = {f"llama__{key}": value for key, value in (
        ("block_count", 1), ("embedding_length", 32), ("feed_forward_length", 32))}  # fmt: skip
    gemma = {key.replace("llama", "gemma3"): value for key, value in sizes.items()}
    pieces = ["▁", "a", "▁a", "aa"]
    return [
        write_model(tmp_path / "a.gguf", vocabulary=byte_level_vocabulary(["a b", "ab c"]), **sizes),
        write_model(tmp_path / "b.gguf", "gemma3", sentencepiece_vocabulary(pieces), **gemma),
    ]


Mutation = Callable[[random.Random, bytearray], None]


def assert_only_model_errors(file: Path, mutate: Mutation, rounds: int) -> int:
    """Number of mutants that were refused. Memory is limited, so that a huge allocation fails here."""
    read_all(file)  # imports what is imported lazily
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        return sum(is_refused(file, mutate, seed) for seed in range(rounds))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def is_refused(file: Path, mutate: Mutation, seed: int) -> bool:
    data, mutant = bytearray(file.read_bytes()), file.with_name("mutant.gguf")
    mutate(random.Random(seed), data)
    mutant.write_bytes(data)
    try:
        read_all(mutant)
    except ModelError as error:
        if "\n" in str(error):
            raise AssertionError(f"{file.name}, seed {seed}: more than a line") from error
        return True
    except BaseException as error:
        raise AssertionError(f"{file.name}, seed {seed}: {error!r}") from error
    return False


def truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def flip_header(rng: random.Random, data: bytearray) -> None:
    """Up to three bytes of the first kilobytes, where keys, counts and tokens are."""
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(min(len(data), 9000))] = rng.choice([0, 1, 8, 9, 127, 128, 255, rng.randrange(256)])


def test_truncated_files_are_refused(small_files: list[Path]) -> None:
    for file in small_files:
        assert assert_only_model_errors(file, truncate, 40) == 40


def test_damaged_files_are_read_or_refused(small_files: list[Path]) -> None:
    for file in small_files:
        assert assert_only_model_errors(file, flip_header, 250) > 50


@pytest.mark.parametrize(
    "name",
    ["qwen2_moe", "gpt_oss", "falcon 40b", "gpt2", "phi4-mini, longrope on half of each head", "stablelm, qk norm"],
)
def test_damaged_files_of_other_families_are_read_or_refused(name: str, tmp_path: Path) -> None:
    _, file = write_case(name, tmp_path)
    assert assert_only_model_errors(file, flip_header, 50) > 10


@pytest.mark.slow
def test_many_damaged_files_are_read_or_refused(small_files: list[Path]) -> None:
    for file in small_files:
        assert assert_only_model_errors(file, flip_header, 5000) > 1000


def test_a_key_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", {"llama.attention.head_count": "four"}, {})
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count has the wrong type: 'four'"):
        GGUFCheckpoint(file)
