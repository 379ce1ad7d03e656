"""Scaling of a rope from a GGUF header: linear, yarn, and what the converter keeps as tensors, llama3 and longrope.

The result is what config.json's rope_scaling would say. Called by gguf_config.py and gguf_architectures.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedllm.errors import ModelError
from pagedllm.model.gguf_header import GGUFHeader
from pagedllm.model.gguf_keys import Keys

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS)
ReadFactors = Callable[[str], NDArray[np.float32]]  # of a tensor of the file


def rope_scaling(header: GGUFHeader, keys: Keys, config: dict[str, Any], read: ReadFactors) -> dict[str, Any] | None:
    """Of every architecture but Phi 3."""
    freqs = read(ROPE_FREQS) if ROPE_FREQS in header.tensors else None
    kind = keys.get("rope.scaling.type", str, "none")
    legacy = keys.real("rope.scale_linear", 1.0)
    factor = keys.real("rope.scaling.factor", legacy)
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        keys.require(f"rope.scaling.{key}", (1.0,), "its effect on attention is not that of the model's own config")
    if kind in ("none", "linear"):
        keys.left.discard(keys.prefix + "rope.scaling.original_context_length")
        if freqs is not None:
            if factor != 1.0:
                raise ModelError(f"{keys.path}: both {ROPE_FREQS} and linear rope scaling: not supported")
            return llama3_scaling(freqs, config["rope_theta"], config["head_dim"], str(keys.path))
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or freqs is not None:
        raise ModelError(f"{keys.path}: {keys.prefix}rope.scaling.type = {kind!r} is not supported")
    scaling = {"rope_type": "yarn", "factor": factor,
               "original_max_position_embeddings": keys.count("rope.scaling.original_context_length")}  # fmt: skip
    for key in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{key}"):
            scaling[key] = keys.real(f"rope.scaling.yarn_{key}")
    return scaling


def longrope_scaling(
    header: GGUFHeader, keys: Keys, config: dict[str, Any], read: ReadFactors
) -> dict[str, Any] | None:
    """Phi 3: a factor a pair for texts up to the original length, and one for longer ones."""
    keys.left.discard(keys.prefix + "rope.scaling.type")
    present = [name for name in (SHORT_FACTORS, LONG_FACTORS) if name in header.tensors]
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    attention_factor = keys.real("rope.scaling.attn_factor", 1.0)
    if len(present) < 2:
        if present or attention_factor != 1.0:
            raise ModelError(f"{keys.path}: {' and '.join(present) or 'neither'} of {SHORT_FACTORS} and {LONG_FACTORS}")
        return None
    if original < 2:
        raise ModelError(f"{keys.path}: {keys.prefix}rope.scaling.original_context_length must be above 1")
    config["original_max_position_embeddings"] = original
    short, long = ([float(str(value)) for value in read(name)] for name in (SHORT_FACTORS, LONG_FACTORS))
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scale = config["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if not math.isclose(attention_factor, usual, rel_tol=1e-5):
        scaling["attention_factor"] = attention_factor
    return scaling


def llama3_scaling(freqs: NDArray[np.float32], theta: float, head_dim: int, path: str) -> dict[str, Any] | None:
    """The parameters of llama3 scaling, from the divisors that the converter computed with them.

    With w the wavelength, divisors are 1 for w < original / high, `factor` for w > original / low, and between them
    1 / ((1 - s) / factor + s) with s = (original / w - low) / (high - low): linear in 1 / w. Only two ratios of
    (original, low, high) have an effect, so low = 1 is taken, as all published models have it.
    """
    divisors = freqs.astype(np.float64)
    if divisors.shape != (head_dim // 2,) or not np.isfinite(divisors).all() or divisors.min() < 1:
        raise ModelError(f"{path}: {ROPE_FREQS} must hold {head_dim // 2} numbers >= 1")
    factor = float(str(freqs.max()))
    if factor == 1.0:
        return None
    inverse_wavelength = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    is_between = (divisors > 1) & (divisors < divisors.max())
    smooth = (1 / divisors[is_between] - 1 / factor) / (1 - 1 / factor)
    if len(smooth) >= 2:
        x = inverse_wavelength[is_between]
        slope = (smooth[0] - smooth[-1]) / (x[0] - x[-1])  # original / (high - 1)
        span = 1 / max(slope * x[0] - smooth[0], 1e-9)  # high - 1, since slope * x - s = 1 / (high - 1)
        original, high = round(float(slope * span)), 1 + round(float(span), 3)
        s = np.clip((original * inverse_wavelength - 1) / max(high - 1, 1e-9), 0, 1)
        if original > 0 and np.allclose(1 / ((1 - s) / factor + s), divisors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ModelError(f"{path}: {ROPE_FREQS} is not what llama3 scaling with low_freq_factor 1 gives: not supported")
