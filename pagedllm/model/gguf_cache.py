"""Converts a GGUF file once, into a checkpoint folder kept in the cache: later starts read safetensors.

    PAGEDLLM_CACHE or ~/.cache/pagedllm
      gguf/<file stem>-<16 hex digits of the key>/   config.json  generation_config.json  tokenizer.json
                                                     tokenizer_config.json  chat_template.jinja  model.safetensors

The key holds the header, the file's size and time, the dtype and CONVERTER_VERSION, so a changed file or converter is
another folder. A folder appears by one rename, whole. Tensors are written one at a time: no second model in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from pagedllm.model.cache_folder import cache_folder
from pagedllm.model.gguf import GGUFCheckpoint
from pagedllm.model.gguf_header import GGUFHeader

CONVERTER_VERSION = 2  # raise it when the conversion gives anything else
DTYPES = {
    "bfloat16": (torch.bfloat16, "BF16", 2),
    "float16": (torch.float16, "F16", 2),
    "float32": (torch.float32, "F32", 4),
}
SPARE_BYTES = 256 << 20  # left free on the disk
ABANDONED_SECONDS = 3600  # a conversion this old was killed

logger = logging.getLogger("pagedllm")


def convert_gguf(
    file: Path | str,
    cache_dir: Path | None = None,
    dtype: str = "bfloat16",
    *,
    header: GGUFHeader | None = None,
    check: Callable[[GGUFCheckpoint], None] | None = None,
) -> Path | None:
    """The converted folder, or None, with a notice, where it cannot be written: no room, or no right to.

    header: the file's, where the caller has read it. check: called before a conversion, which it may stop by raising.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    header = header or GGUFHeader(Path(file))
    parent = (cache_dir or cache_folder()) / "gguf"
    folder = parent / f"{header.path.stem[:80]}-{_key(header, dtype)}"
    if folder.is_dir():
        return folder
    checkpoint = GGUFCheckpoint(file, header)
    if check is not None:
        check(checkpoint)
    needed = sum(_num_values(checkpoint, name) for name in checkpoint.names()) * DTYPES[dtype][2]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        free = shutil.disk_usage(parent).free
        if free < needed + SPARE_BYTES:
            raise OSError(f"it needs {needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free")
        _write_folder(checkpoint, folder, dtype)
    except OSError as error:
        logger.warning("%s is not converted into the cache %s: %s", checkpoint.path, parent, error)
        return None
    return folder


def _write_folder(checkpoint: GGUFCheckpoint, folder: Path, dtype: str) -> None:
    unfinished = folder.with_name(f".unfinished-{os.getpid()}-{os.urandom(4).hex()}")
    unfinished.mkdir()
    try:
        _write(checkpoint, unfinished, dtype)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first: its folder is the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _key(header: GGUFHeader, dtype: str) -> str:
    status = header.path.stat()
    digest = hashlib.sha256(header.header_bytes)
    digest.update(f"{status.st_size} {status.st_mtime_ns} {dtype} {CONVERTER_VERSION}".encode())
    return digest.hexdigest()[:16]


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(".unfinished-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _write(checkpoint: GGUFCheckpoint, folder: Path, dtype: str) -> None:
    files = checkpoint.tokenizer_files()
    files["config.json"] = json.dumps({**checkpoint.config, "torch_dtype": dtype}, indent=2)
    files["generation_config.json"] = json.dumps(dict(checkpoint.generation_config), indent=2)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        _write_safetensors(checkpoint, file, dtype)


def _write_safetensors(checkpoint: GGUFCheckpoint, file: IO[bytes], dtype: str) -> None:
    """The format is 8 bytes of header length, a JSON header, the tensors' bytes in its order."""
    torch_dtype, type_name, value_bytes = DTYPES[dtype]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in checkpoint.names():
        start, end = end, end + _num_values(checkpoint, name) * value_bytes
        entries[name] = {"dtype": type_name, "shape": checkpoint.shape(name), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for name in checkpoint.names():
        tensor = checkpoint.read(name, dtype=torch_dtype)
        file.write(tensor.view(-1).view(torch.uint8).numpy().data)


def _num_values(checkpoint: GGUFCheckpoint, name: str) -> int:
    count = 1
    for size in checkpoint.shape(name):
        count *= size
    return count
