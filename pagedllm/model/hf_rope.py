"""Reads a rope out of config.json in both spellings.

transformers 4: rope_theta, and rope_scaling (null, or an object with "rope_type" or "type" and its parameters).
transformers 5: rope_parameters, an object that holds rope_theta too; per kind of layer in Gemma 3.
A value that both spellings give must be the same in both. Unknown kinds and unknown parameters are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

from pagedllm.model.config import RopeConfig, RopeKind
from pagedllm.model.hf_config import ConfigReader

ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
MAX_FACTOR = 1_000_000
OLD_KIND_NAMES: dict[str, RopeKind] = {"su": "longrope"}  # the first Phi-3 files
KINDS_WITH_ORIGINAL_LENGTH = ("yarn", "longrope", "llama3")


@dataclass(frozen=True, slots=True)
class PartialRotary:
    """Of a family that may rotate the first features of a head only."""

    default: float = 1.0  # share of the features, where the config is silent
    key: str = "partial_rotary_factor"  # at the top of the config

    def read(self, reader: ConfigReader) -> float | None:
        """What the top of the config says, or None."""
        share = reader.number(self.key, None)
        if share is not None and share > 1:
            raise reader.error(self.key, f"must be at most 1, got {share:g}")
        return share


def read_rope(
    reader: ConfigReader,
    *,
    head_dim: int,
    max_position: int,
    default_theta: float,
    theta_key: str = "rope_theta",
    partial: PartialRotary | None = None,
    is_interleaved: bool = False,
) -> RopeConfig:
    """The rope of a model that has one, taken from the top of its config. partial: None for whole heads."""
    theta = reader.number(theta_key, None)
    share = partial.read(reader) if partial else None
    original = reader.integer("original_max_position_embeddings", None)
    spellings = [nested for key in ("rope_parameters", "rope_scaling") if (nested := reader.nested(key))]
    ropes = [
        read_rope_object(
            nested,
            head_dim=head_dim,
            max_position=max_position,
            theta=theta,
            default_theta=default_theta,
            original_max_position=original,
            partial=partial,
            share=share,
            is_interleaved=is_interleaved,
        )
        for nested in spellings
    ]
    if not ropes:
        rotary_dim = _rotary_dim(reader, head_dim, share or (partial.default if partial else 1.0))
        return RopeConfig(theta or default_theta, rotary_dim, is_interleaved=is_interleaved)
    if ropes[0] != ropes[-1]:
        raise reader.error("rope_scaling", f"says {ropes[-1]}, but rope_parameters says {ropes[0]}: remove one of them")
    return ropes[0]


def read_rope_object(
    reader: ConfigReader,
    *,
    head_dim: int,
    max_position: int,
    theta: float | None,
    default_theta: float,
    original_max_position: int | None = None,
    partial: PartialRotary | None = None,
    share: float | None = None,
    is_interleaved: bool = False,
) -> RopeConfig:
    """A rope from rope_parameters or rope_scaling.

    theta, original_max_position, share (of the features): what the top of the config says, None where it is silent.
    """
    kind = _read_kind(reader)
    theta = _agreed(reader, "rope_theta", reader.number("rope_theta", theta), theta) or default_theta
    own_share = _agreed(reader, "partial_rotary_factor", reader.number("partial_rotary_factor", share), share)
    if partial is None and own_share not in (None, 1.0):
        raise reader.error("partial_rotary_factor", "must be 1: this family rotates whole heads")
    rotary_dim = _rotary_dim(reader, head_dim, own_share or (partial.default if partial else 1.0))
    values: dict[str, Any] = {}
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        values["factor"] = _read_factor(reader)
    if kind == "dynamic":
        values["original_max_position"] = max_position
    if kind in KINDS_WITH_ORIGINAL_LENGTH:
        own = reader.integer("original_max_position_embeddings", original_max_position)
        original = _agreed(reader, "original_max_position_embeddings", own, original_max_position) or max_position
        values["original_max_position"] = original
        values |= _read_parameters(reader, kind, original, rotary_dim, max_position)
    reader.finish_nested()
    return RopeConfig(theta, rotary_dim, kind, **values, is_interleaved=is_interleaved)


def _rotary_dim(reader: ConfigReader, head_dim: int, share: float) -> int:
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise reader.error(
            "partial_rotary_factor", f"{share:g} of head_dim {head_dim} is not an even number of features"
        )
    return rotary_dim


def _read_parameters(
    reader: ConfigReader, kind: RopeKind, original: int, rotary_dim: int, max_position: int
) -> dict[str, Any]:
    if kind == "yarn":
        return {
            "attention_factor": reader.number("attention_factor", None),
            "beta_fast": reader.number("beta_fast", 32.0),
            "beta_slow": reader.number("beta_slow", 1.0),
            "mscale": reader.number("mscale", None, minimum=-1.0),  # 0 means: not used
            "mscale_all_dim": reader.number("mscale_all_dim", None, minimum=-1.0),
            "truncate": reader.boolean("truncate", True),
        }
    if kind == "longrope":
        return {
            "factor": _read_factor(reader, max_position / original),
            "attention_factor": reader.number("attention_factor", None),
            "short_factors": reader.numbers("short_factor", rotary_dim // 2),
            "long_factors": reader.numbers("long_factor", rotary_dim // 2),
        }
    low = cast(float, reader.number("low_freq_factor"))
    high = cast(float, reader.number("high_freq_factor"))
    if high <= low:
        raise reader.error("high_freq_factor", f"must be above low_freq_factor {low:g}, got {high:g}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _read_kind(reader: ConfigReader) -> RopeKind:
    names = {reader.text(key) for key in ("rope_type", "type") if reader.has(key)} or {"default"}
    if len(names) > 1:
        raise reader.error("rope_type", f"and type differ: {' and '.join(sorted(names))}")
    name = names.pop()
    name = OLD_KIND_NAMES.get(name or "", name)
    if name not in ROPE_KINDS:
        raise reader.error("rope_type", f"must be one of {ROPE_KINDS}, got {name!r}")
    return name


def _read_factor(reader: ConfigReader, default: float | None = None) -> float:
    factor = reader.number("factor") if default is None else reader.number("factor", default)
    if not 1 <= factor <= MAX_FACTOR:
        raise reader.error("factor", f"must be in [1, {MAX_FACTOR}], got {factor:g}")
    return factor


def _agreed(reader: ConfigReader, key: str, own: Any, outer: Any) -> Any:
    if outer is not None and own != outer:
        raise reader.error(key, f"is {own}, but {key} at the top of the config is {outer}: remove one of them")
    return own


def stretched_length(rope: RopeConfig, max_position: int) -> int:
    """The longest text of a model whose max_position_embeddings is the length before scaling."""
    if rope.kind in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position
