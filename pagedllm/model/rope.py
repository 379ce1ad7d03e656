"""Tables of cosines and sines, computed as transformers computes them, attention factors included.

A key's rotation may depend on its position and on its request's *variant* only, never on how long the text happens
to be at a step: keys already written cannot turn again. So the variant is chosen at admission from the longest the
request may become, and stays:

    longrope  the long factors if that length exceeds the original one, else the short ones
    dynamic   the base for that length, rounded up to the original length times a power of two

A model's variants are the intervals between all the lengths at which any of its ropes changes; variant 0 is the
shortest. All variants of a rope lie in one table, one after the other.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagedllm.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, num_total_tokens: int) -> Tensor:
    """Angle per position of each pair, [rotary_dim / 2] float32, for texts of at most `num_total_tokens`."""
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu") / rope.rotary_dim
    base = rope.theta
    if rope.kind == "dynamic":
        doublings = math.ceil(math.log2(max(1.0, num_total_tokens / rope.original_max_position)))
        stretch = rope.factor * 2**doublings - (rope.factor - 1)
        base *= stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    powers: Tensor = base**exponent
    if rope.kind == "linear":
        return 1.0 / powers / rope.factor
    if rope.kind == "longrope":
        is_long = num_total_tokens > rope.original_max_position
        factors = rope.long_factors if is_long else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, 1.0 / powers)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, powers)
    assert rope.kind in ("default", "dynamic")
    return 1.0 / powers


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_slowed = rope.original_max_position / rope.low_freq_factor
    slowed = torch.where(wavelength > shortest_slowed, frequencies / rope.factor, frequencies)
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * slowed / rope.factor + blend * slowed
    is_between = (wavelength >= longest_kept) & (wavelength <= shortest_slowed)
    return torch.where(is_between, blended, slowed)


def _yarn_frequencies(rope: RopeConfig, powers: Tensor) -> Tensor:
    """Peng et al., YaRN, 2023: pairs that turn often keep their speed, rare ones are slowed by `factor`."""

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that makes so many turns over the original length."""
        turns = rope.original_max_position / (times * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # as transformers: a step instead of a division by zero
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        return _yarn_scale(rope.factor, 1.0)
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    return 1.0


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_table(rope: RopeConfig, num_rows: int, num_total_tokens: int) -> Tensor:
    """Cosines, then sines, of positions 0 .. num_rows - 1: [num_rows, rotary_dim] float32."""
    positions = torch.arange(num_rows, dtype=torch.float32, device="cpu")
    angles = positions[:, None] * inverse_frequencies(rope, num_total_tokens)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    factor = attention_factor(rope)
    return table if factor == 1.0 else table * factor


def _changes(rope: RopeConfig, longest: int) -> Iterator[int]:
    """The lengths after which this rope turns differently, those below `longest`."""
    length = rope.original_max_position
    if rope.kind == "longrope" and length < longest:
        yield length
    while rope.kind == "dynamic" and length < longest:
        yield length
        length *= 2


class RopeTables:
    """The tables of a model's ropes, for texts up to max_model_len.

    ropes: ModelConfig.ropes; max_position_in_config: the length in the model's config, which may be longer. The
    variants are those of the config's length, so that lowering max_model_len changes no request's variant.
    """

    def __init__(self, ropes: Sequence[RopeConfig], max_position_in_config: int, max_model_len: int) -> None:
        assert max_model_len <= max_position_in_config
        self._longest = max_position_in_config
        changes = {length for rope in ropes for length in _changes(rope, self._longest)}
        self._variant_lengths = (*sorted(changes), self._longest)  # a variant serves texts up to its length
        tables, offsets = [], []
        for rope in ropes:
            lengths = [*_changes(rope, self._longest), self._longest]
            pieces = [rope_table(rope, min(length, max_model_len), length) for length in lengths]
            first_rows = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
            offsets.append(tuple(first_rows[bisect.bisect_left(lengths, length)] for length in self._variant_lengths))
            tables.append(torch.cat(pieces))
        self.tables: tuple[Tensor, ...] = tuple(tables)  # [num_rows, rotary_dim] float32 each
        self._offsets = tuple(offsets)

    @property
    def num_variants(self) -> int:
        return len(self._variant_lengths)

    def variant(self, num_total_tokens: int | None) -> int:
        """Of a request that may grow to `num_total_tokens`; None and what exceeds the config's length: that length."""
        if num_total_tokens is None:
            return self.num_variants - 1
        return bisect.bisect_left(self._variant_lengths, min(num_total_tokens, self._longest))

    def row_offset(self, rope_index: int, variant: int) -> int:
        """The row of position 0 in table `rope_index`."""
        return self._offsets[rope_index][variant]
