"""The folder of converted GGUF models: where it is, what it holds, and how it is emptied. Imports no torch.

Who writes into it is gguf_cache.py, which draws its inside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("PAGEDLLM_CACHE") or Path.home() / ".cache" / "pagedllm")


@dataclass(frozen=True, slots=True)
class Conversion:
    folder: Path
    num_bytes: int
    seconds: float  # since the epoch, when it was made


def list_conversions() -> list[Conversion]:
    """What the cache holds, by name."""
    found = []
    for folder in sorted(cache_folder().glob("gguf/[!.]*")):
        if folder.is_dir():
            num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            found.append(Conversion(folder, num_bytes, folder.stat().st_mtime))
    return found


def clear_cache(names: Collection[str] = ()) -> list[Conversion]:
    """Removes these conversions, or all, with what killed ones left; a process that uses one keeps its files open."""
    conversions = list_conversions()
    unknown = sorted(set(names) - {conversion.folder.name for conversion in conversions})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not in {cache_folder()}: see pagedllm cache list")
    removed = [conversion for conversion in conversions if not names or conversion.folder.name in names]
    for conversion in removed:
        shutil.rmtree(conversion.folder)
    if not names:
        for path in cache_folder().glob("gguf/.unfinished-*"):
            shutil.rmtree(path, ignore_errors=True)
    return removed


def room_in(folder: Path) -> int | None:
    """Bytes free where the folder is, or would be made; None where it cannot be written."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free if folder.is_dir() and os.access(folder, os.W_OK) else None
