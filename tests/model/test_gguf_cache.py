"""The cached conversion: a folder like any other, made once, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from pagedllm.errors import ModelError
from pagedllm.model import gguf_cache
from pagedllm.model.checkpoint import SafetensorsCheckpoint
from pagedllm.model.gguf import GGUFCheckpoint, open_gguf
from pagedllm.model.gguf_cache import cache_folder, convert_gguf
from pagedllm.tokenizer import Tokenizer
from tests.model.gguf_files import write_model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf", tokenizer__chat_template="{{ messages }}")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="pagedllm"):
        yield caplog


def converted(file: Path, cache: Path, dtype: str = "bfloat16") -> Path:
    folder = convert_gguf(file, cache, dtype)
    assert folder is not None
    return folder


def test_the_folder_is_a_whole_checkpoint(file: Path, cache: Path) -> None:
    folder = converted(file, cache)
    assert folder.parent == cache / "gguf"
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    checkpoint, original = SafetensorsCheckpoint(folder), GGUFCheckpoint(file)
    assert dict(checkpoint.config) == original.config
    assert dict(checkpoint.generation_config) == original.generation_config
    assert sorted(checkpoint.names()) == sorted(original.names())
    for name in original.names():
        assert torch.equal(checkpoint.read(name), original.read(name).bfloat16()), name
    assert Tokenizer.from_folder(folder).encode("qq") == Tokenizer.from_folder(file).encode("qq") == [256]
    assert Tokenizer.from_folder(folder).chat_template == "{{ messages }}"


def test_the_safetensors_library_reads_what_we_write(file: Path, cache: Path) -> None:
    tensors = load_file(converted(file, cache) / "model.safetensors")
    assert {tuple(t.shape) for t in tensors.values()} >= {(258, 64), (96, 64), (64,)}


def test_transformers_reads_the_folder(file: Path, cache: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = converted(file, cache, "float32")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(model.state_dict()["model.norm.weight"], GGUFCheckpoint(file).read("model.norm.weight"))
    assert AutoTokenizer.from_pretrained(folder).encode("qq") == [256]


def test_the_demo_model_equals_the_one_that_transformers_converts(
    demo_gguf: Path, demo_safetensors: Path, cache: Path
) -> None:
    ours, theirs = SafetensorsCheckpoint(converted(demo_gguf, cache)), SafetensorsCheckpoint(demo_safetensors)
    assert set(ours.names()) == set(theirs.names()) - {"lm_head.weight"}
    for name in ours.names():
        assert torch.equal(ours.read(name), theirs.read(name)), name


def test_float32_keeps_exact_values_in_a_folder_of_its_own(file: Path, cache: Path) -> None:
    folder = converted(file, cache, "float32")
    assert folder != converted(file, cache)
    original, name = GGUFCheckpoint(file), "model.embed_tokens.weight"
    assert torch.equal(SafetensorsCheckpoint(folder).read(name), original.read(name))
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_second_conversion_touches_nothing(file: Path, cache: Path) -> None:
    folder = converted(file, cache)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert converted(file, cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_hit_needs_no_gguf_package(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(file, cache)
    monkeypatch.setattr(gguf_cache, "GGUFCheckpoint", None)
    assert converted(file, cache) == folder


def test_a_changed_file_is_converted_anew(file: Path, cache: Path) -> None:
    folder = converted(file, cache)
    os.utime(file, ns=(1, 1))
    assert converted(file, cache) != folder


def test_a_new_converter_converts_anew(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(file, cache)
    monkeypatch.setattr(gguf_cache, "CONVERTER_VERSION", gguf_cache.CONVERTER_VERSION + 1)
    assert converted(file, cache) != folder


def test_a_failed_conversion_leaves_nothing(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_cache, "_write_safetensors", fail)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(file, cache)
    assert list((cache / "gguf").iterdir()) == []


def test_a_disk_that_fills_up_is_a_notice(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, notices: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_cache, "_write_safetensors", fail)
    assert convert_gguf(file, cache) is None
    assert "No space left on device" in notices.records[0].getMessage()
    assert list((cache / "gguf").iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_later(file: Path, cache: Path) -> None:
    (cache / "gguf" / ".unfinished-old").mkdir(parents=True)
    (cache / "gguf" / ".unfinished-now").mkdir()
    os.utime(cache / "gguf" / ".unfinished-old", (0, 0))
    folder = converted(file, cache)
    assert sorted(path.name for path in (cache / "gguf").iterdir()) == [".unfinished-now", folder.name]


def test_the_other_process_that_was_first_wins(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = gguf_cache._write
    folder = converted(file, cache)
    shutil.move(folder, cache / "theirs")

    def write_and_be_overtaken(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        shutil.move(cache / "theirs", folder)
        (folder / "mark").touch()

    monkeypatch.setattr(gguf_cache, "_write", write_and_be_overtaken)
    assert converted(file, cache) == folder
    assert (folder / "mark").exists()
    assert list((cache / "gguf").iterdir()) == [folder]


def test_without_room_the_file_itself_is_read_with_a_notice(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, notices: pytest.LogCaptureFixture
) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 << 20))
    checkpoint = open_gguf(file, cache_dir=cache)
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert [record.getMessage() for record in notices.records] == [
        f"{file} is not converted into the cache {cache / 'gguf'}: it needs 0 MiB, 100 MiB are free"
    ]
    assert Tokenizer.from_folder(checkpoint.path).encode("qq") == [256]


def test_a_cache_that_cannot_be_written_is_skipped_with_a_notice(
    file: Path, tmp_path: Path, notices: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert convert_gguf(file, tmp_path / "cache") is None
    assert "is not converted into the cache" in notices.records[0].getMessage()


def test_an_opened_file_is_the_converted_folder(file: Path, cache: Path) -> None:
    assert open_gguf(file, cache_dir=cache).path == converted(file, cache)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEDLLM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("PAGEDLLM_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "pagedllm"


def test_an_unknown_dtype_is_refused(file: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of bfloat16, float16, float32, got 'int8'"):
        convert_gguf(file, cache, "int8")


def test_a_bad_file_leaves_no_folder(file: Path, cache: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(ModelError, match="truncated or damaged"):
        convert_gguf(file, cache)
    assert not (cache / "gguf").exists()
