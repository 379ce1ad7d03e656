"""What a model, and all that decides its tokens, is known by: hashes, so that a job is not continued with another one.

Small files count whole; of large ones their size, their beginning (where headers and names stand) and samples spread
evenly, so that this takes milliseconds for any size. Reads no tensor and imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from pagedllm.config import EngineConfig

# Raised by every change after which the same request may get other tokens on the same machine: of a kernel's rounding,
# of sampling, of a rope table, of how text becomes ids.
NUMERICS_VERSION = "3"
SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf", ".model")
WHOLE_BYTES = 16 << 20
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096


def fingerprint(config: EngineConfig, numerics: Mapping[str, str]) -> str:
    """Of the model and of how it is computed: equal fingerprints give equal tokens to equal requests."""
    parts = [("model", model_digest(config)), *sorted(numerics.items())]
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def model_digest(config: EngineConfig) -> str:
    """Of weights, configs, tokenizer and templates, and of the settings that change what they mean.

    Paths are local: an id that is not in the hub's cache counts as no file.
    """
    digest = blake2b(digest_size=16)
    settings = (config.gguf_file, config.load_format, config.generation_config, config.chat_template)
    digest.update(repr(settings).encode())
    template = config.chat_template
    for place in (config.model, config.tokenizer, None if template is None or "{" in template else template):
        for path in _files(Path(place)) if place is not None else ():
            digest.update(repr((path.name, path.stat().st_size)).encode())
            _add_file(digest, path)
    return digest.hexdigest()


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(path for path in place.iterdir() if path.suffix in SUFFIXES and path.is_file())
    return [place] if place.is_file() else []


def _add_file(digest: blake2b, path: Path) -> None:
    with open(path, "rb") as stream:
        digest.update(stream.read(WHOLE_BYTES))
        size = os.fstat(stream.fileno()).st_size
        step = (size - WHOLE_BYTES) // NUM_SAMPLES
        for number in range(NUM_SAMPLES if step > 0 else 0):
            stream.seek(WHOLE_BYTES + number * step)
            digest.update(stream.read(SAMPLE_BYTES))
