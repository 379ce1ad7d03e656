"""The families this version knows. A new one is a file in `families/` and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedllm.errors import ModelError
from pagedllm.model.config import ModelConfig
from pagedllm.model.families import (
    cohere,
    falcon,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen_moe,
    smollm3,
    stablelm,
)
from pagedllm.model.family import Family
from pagedllm.model.hf_config import ConfigReader

FAMILIES = (
    cohere.FAMILY,
    cohere.COHERE2,
    falcon.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    gpt_oss.FAMILY,
    granite.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    mistral.MINISTRAL,
    mixtral.FAMILY,
    olmo2.FAMILY,
    olmoe.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen_moe.QWEN2_MOE,
    qwen_moe.QWEN3_MOE,
    smollm3.FAMILY,
    stablelm.FAMILY,
)


def find_family(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a config.json; `path` is its folder, for messages."""
    architectures = config.get("architectures")
    by_name = {family.architecture: family for family in FAMILIES}
    where = path / "config.json"
    if not (isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)):
        raise ModelError(f"{where}: architectures must be a list of one name, got {architectures!r}")
    family = by_name.get(architectures[0])
    if family is None:
        raise ModelError(f"{where}: {architectures[0]} is not supported; supported: {', '.join(sorted(by_name))}")
    if config.get("model_type", family.model_type) != family.model_type:
        raise ModelError(
            f"{where}: model_type is {config['model_type']!r}, but {family.architecture} is {family.model_type}"
        )
    return family


def has_family(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names an architecture that is known here; it may be wrong in other ways."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(family.architecture in architectures for family in FAMILIES)


def read_model_config(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelError, by name, for whatever is missing, wrong or unknown."""
    family = find_family(config, path)
    reader = ConfigReader(config, path)
    model_config = family.read_config(reader)
    reader.finish()
    return model_config
