"""Where a model's files lie: a local path as it is, or a Hugging Face id, fetched once into the hub's own cache.

What lies in that cache is used without any connection, so a branch that has moved on since is fetched by
`hf download ID`, not by us. Only the files that are read are fetched: no pickle, no code. Offline is HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

from pagedllm.config import EngineConfig
from pagedllm.errors import ModelError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pth")
INDEX_FILE = "model.safetensors.index.json"
SMALL_FILES = ("*.json", "*.jinja", "*.model")
WEIGHTS = "*.safetensors"
IGNORED = ("consolidated*", "*/*.safetensors")  # a second set of the same weights

logger = logging.getLogger("pagedllm")


def locate(config: EngineConfig) -> EngineConfig:
    """The config with local paths as model and tokenizer; fetches what the hub's cache lacks.

    Raises ValueError for a revision of a local path, ModelError where an id cannot be had.
    """
    model = _find(config.model, config.revision, config.gguf_file, is_whole_model=True)
    if model is None:
        if config.revision is not None:
            raise ValueError(f"revision={config.revision!r} is of Hugging Face ids, and model={config.model!r} is none")
        model = config.model
    tokenizer = config.tokenizer
    if tokenizer is not None:
        tokenizer = _find(tokenizer, None, None, is_whole_model=False) or tokenizer
    return replace(config, model=model, tokenizer=tokenizer, revision=None)


def find_cached(config: EngineConfig) -> EngineConfig | None:
    """`locate` without fetching: None where an id is not in the cache."""
    places: list[str | None] = []
    for place, revision in ((config.model, config.revision), (config.tokenizer, None)):
        folder = _cached(place, revision) if place is not None and is_id(place) else place
        if place is not None and folder is None:
            return None
        places.append(folder)
    return replace(config, model=places[0] or config.model, tokenizer=places[1], revision=None)


def is_id(place: str) -> bool:
    """`organisation/name` that is no path here."""
    is_formed = ID.fullmatch(place) is not None and not place.lower().endswith(FILE_SUFFIXES)
    return is_formed and not Path(place).exists()


def _find(place: str, revision: str | None, gguf_file: str | None, *, is_whole_model: bool) -> str | None:
    """The folder of an id, None for a path."""
    if not is_id(place):
        return None
    folder = _cached(place, revision)
    if folder is not None and (not is_whole_model or _is_whole(Path(folder), gguf_file)):
        return folder
    folder = _fetch(place, revision, gguf_file, is_whole_model)
    if is_whole_model and not _is_whole(Path(folder), gguf_file):
        wanted = f"no {gguf_file}" if gguf_file is not None else "no safetensors: if it has GGUF files, pass gguf_file="
        raise ModelError(f"{place} on the Hugging Face hub has {wanted}")
    return folder


def _cached(place: str, revision: str | None) -> str | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(place, revision=revision, local_files_only=True, allow_patterns=["config.json"]))
    except LocalEntryNotFoundError:
        return None


def _fetch(place: str, revision: str | None, gguf_file: str | None, is_whole_model: bool) -> str:
    from huggingface_hub import snapshot_download

    patterns = list(SMALL_FILES) if gguf_file is None else [gguf_file]
    if is_whole_model and gguf_file is None:
        patterns.append(WEIGHTS)
    logger.info("fetching %s from the Hugging Face hub", place)
    try:
        folder = snapshot_download(place, revision=revision, allow_patterns=patterns, ignore_patterns=list(IGNORED))
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        at = "" if revision is None else f" at revision {revision!r}"
        raise ModelError(
            f"{place!r}{at} is no path here, and cannot be had from the Hugging Face hub: {reason}; "
            "offline, pass the path of a model folder or of a GGUF file"
        ) from None
    return str(folder)


def _is_whole(folder: Path, gguf_file: str | None) -> bool:
    if gguf_file is not None:
        return (folder / gguf_file).is_file()
    if not (folder / "config.json").is_file():
        return False
    index = folder / INDEX_FILE
    if not index.is_file():
        return any(folder.glob(WEIGHTS))
    weight_map = json.loads(index.read_bytes()).get("weight_map", {})
    return all((folder / name).is_file() for name in set(weight_map.values()))
