"""From a checkpoint to a Decoder, with every tensor accounted for.

Names, shapes and types are checked from the headers before any tensor is read; then they are read one at a time,
packed and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pagedllm.errors import ModelError
from pagedllm.model.checkpoint import Check, Checkpoint, SafetensorsCheckpoint
from pagedllm.model.config import ModelConfig
from pagedllm.model.decoder import Decoder
from pagedllm.model.family import Family
from pagedllm.model.hf_config import shown
from pagedllm.model.layer_groups import group_layers
from pagedllm.model.linear import WeightFormat, WeightSlot
from pagedllm.model.registry import find_family, read_model_config
from pagedllm.ops.attention import AttentionBackend

LOAD_FORMATS = ("auto", "safetensors", "gguf")
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def open_checkpoint(
    model: str,
    load_format: str = "auto",
    gguf_file: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    check: Check | None = None,
) -> Checkpoint:
    """A folder of safetensors, a GGUF file, or a folder that holds one (`gguf_file` chooses among several).

    dtype: what GGUF's quantized tensors become in the cached conversion; safetensors are read as they are. check: see
    there; called once, before a GGUF file is converted.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {LOAD_FORMATS}, got {load_format!r}")
    path = Path(model)
    if not path.exists():
        raise ModelError(
            f"{path} does not exist: pass the path of a model folder or of a GGUF file, or a Hugging Face id"
        )
    gguf = _find_gguf(path, load_format, gguf_file)
    if gguf is not None:
        from pagedllm.model.gguf import open_gguf  # needs the extra `gguf`

        return open_gguf(gguf, str(dtype).removeprefix("torch."), check=check)
    if path.is_file():
        raise ModelError(f"{path} is a file: pass the folder that holds it, with config.json and the tokenizer")
    checkpoint = SafetensorsCheckpoint(path)
    if check is not None:
        check(checkpoint, checkpoint.stored)
    return checkpoint


def _find_gguf(path: Path, load_format: str, gguf_file: str | None) -> Path | None:
    """The GGUF file meant, or None for safetensors."""
    if load_format == "safetensors":
        if gguf_file is not None:
            raise ValueError(f"gguf_file={gguf_file!r} contradicts load_format='safetensors'")
        return None
    if path.is_file():
        is_gguf = path.suffix == ".gguf" or load_format == "gguf"
        return path if is_gguf else None
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise ModelError(f"{path / gguf_file} does not exist: gguf_file must name a file of the model folder")
        return path / gguf_file
    found = sorted(path.glob("*.gguf"))
    if load_format == "auto" and (not found or any(path.glob("*.safetensors"))):
        return None
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "no GGUF file"
        raise ModelError(f"{path} holds {names}: pass gguf_file=...")
    return found[0]


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    backend: AttentionBackend,
    namespace: str,
    weight_format: WeightFormat | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Builds and fills a Decoder. Raises ModelError naming the setting or the tensor that does not fit.

    max_model_len: layers are put into KV groups for texts up to it, or to the model's own length; None: into one group.
    """
    family = find_family(checkpoint.config, checkpoint.path)
    config = read_model_config(checkpoint.config, checkpoint.path)
    if config.head_dim not in backend.supported_head_dims:
        raise ModelError(
            f"{checkpoint.path}: head_dim {config.head_dim} is not supported; the kernels have "
            f"{', '.join(map(str, backend.supported_head_dims))}"
        )
    if max_model_len is not None:
        config = group_layers(config, min(max_model_len, config.max_position))
    decoder = Decoder(config, dtype, backend, namespace, weight_format)  # zeros, which take no memory yet
    family = family.of_checkpoint(config, checkpoint.names())
    slots = family.tensor_slots(decoder.slots(), config)
    _check_tensors(checkpoint, config, family, slots)
    _check_tied_head(checkpoint, config, family)
    for name in checkpoint.names():  # in the order of the files
        if name in slots:
            slots[name].load(checkpoint.read(name))
    return decoder


def _check_tensors(
    checkpoint: Checkpoint, config: ModelConfig, family: Family, wanted: Mapping[str, WeightSlot]
) -> None:
    """Every tensor used or ignorable, every slot filled, shapes and types right: all of it from the headers."""
    present = checkpoint.names()
    missing = sorted(set(wanted) - set(present))
    if missing:
        hint = ""
        if missing == [family.tensor_name("head.weight")]:
            hint = " (config.json does not set tie_word_embeddings)"
        raise ModelError(f"{checkpoint.path}: {_listed(missing)} missing{hint}: download the weights again")
    unknown = [name for name in present if name not in wanted and not _may_stay(name, config, family)]
    if unknown:
        where = f"unknown to {config.architecture}: the weights do not fit config.json"
        raise ModelError(f"{checkpoint.path}: {_listed(unknown)} {where}")
    for name, slot in wanted.items():
        if checkpoint.shape(name) != slot.shape:
            shapes = f"{list(checkpoint.shape(name))}, config.json asks for {list(slot.shape)}"
            raise ModelError(f"{checkpoint.path}: {name} has shape {shapes}")
        if checkpoint.dtype(name) not in FLOATING:
            kind = str(checkpoint.dtype(name)).removeprefix("torch.")
            raise ModelError(
                f"{checkpoint.path}: {name} is {kind}, a floating type is needed: quantized weights are read from GGUF"
            )


def _may_stay(name: str, config: ModelConfig, family: Family) -> bool:
    is_tied_head = config.is_tied and name == family.tensor_name("head.weight")
    return is_tied_head or family.is_ignorable(name)


def _check_tied_head(checkpoint: Checkpoint, config: ModelConfig, family: Family) -> None:
    """A head that is stored although it is tied must be the embedding."""
    head, embedding = family.tensor_name("head.weight"), family.tensor_name("embedding.weight")
    if not config.is_tied or head not in checkpoint.names():
        return
    if not torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
        raise ModelError(
            f"{checkpoint.path}: {head} differs from {embedding}, but tie_word_embeddings is true: set it to false in "
            "config.json or remove the tensor"
        )


def _listed(names: list[str]) -> str:
    """At most three names, then how many more; ends with the verb."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(shown, names[:3]))}{more} {'is' if len(names) == 1 else 'are'}"
