"""MXFP4 tensors of a checkpoint as numbers: gpt-oss stores its experts so.

    NAME_blocks  [E, N, groups, 16] uint8  two values a byte, the lower four bits first
    NAME_scales  [E, N, groups]     uint8  the exponent of two, plus 127, of each group of 32 values

become NAME [E, K = 32 * groups, N] in bfloat16, the form of the checkpoint that is not quantized: every product of one
of the 16 values and a power of two is exact there. Other tensors pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedllm.errors import ModelError
from pagedllm.model.checkpoint import ALL_ROWS, Checkpoint
from pagedllm.model.hf_config import ConfigReader, shown

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def check_quantization(reader: ConfigReader) -> None:
    """Takes quantization_config where it says MXFP4; another kind stays, to be refused."""
    quantization: Any = reader.peek("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        reader.take("quantization_config")


class Mxfp4Checkpoint:
    """`checkpoint` with every pair of blocks and scales as one tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path: Path = checkpoint.path
        self.config: Mapping[str, Any] = checkpoint.config
        self.generation_config: Mapping[str, Any] = checkpoint.generation_config
        self._checkpoint = checkpoint
        self._packed: set[str] = set()
        present = set(checkpoint.names())
        for name in present:
            if name.endswith(BLOCKS) and f"{name.removesuffix(BLOCKS)}{SCALES}" in present:
                self._packed.add(name.removesuffix(BLOCKS))

    def names(self) -> list[str]:
        scales = {f"{name}{SCALES}" for name in self._packed}
        names = (name for name in self._checkpoint.names() if name not in scales)
        return [base if (base := name.removesuffix(BLOCKS)) in self._packed else name for name in names]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._checkpoint.shape(name)
        blocks, scales = self._checkpoint.shape(f"{name}{BLOCKS}"), self._checkpoint.shape(f"{name}{SCALES}")
        if len(blocks) != 4 or blocks[-1] != GROUP // 2 or scales != blocks[:-1]:
            raise ModelError(
                f"{self.path}: {shown(name)} is no MXFP4: its blocks have shape {list(blocks)}, its scales "
                f"{list(scales)}"
            )
        num_experts, num_rows, num_groups, _ = blocks
        return num_experts, num_groups * GROUP, num_rows

    def dtype(self, name: str) -> torch.dtype:
        if name not in self._packed:
            return self._checkpoint.dtype(name)
        kinds = {self._checkpoint.dtype(f"{name}{suffix}") for suffix in (BLOCKS, SCALES)}
        return torch.bfloat16 if kinds == {torch.uint8} else (kinds - {torch.uint8}).pop()

    def read(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        if name not in self._packed:
            return self._checkpoint.read(name, rows)
        blocks, scales = (self._checkpoint.read(f"{name}{suffix}", rows) for suffix in (BLOCKS, SCALES))
        values = torch.empty(*blocks.shape[:-1], GROUP, dtype=torch.bfloat16, device="cpu")
        table = torch.tensor(VALUES, dtype=torch.bfloat16, device="cpu")
        for expert in range(len(blocks)):
            exponents = scales[expert, ..., None].int() - 127
            for first, nibbles in enumerate((blocks[expert] & 15, blocks[expert] >> 4)):
                values[expert, ..., first::2] = torch.ldexp(table[nibbles.int()], exponents)
        return values.flatten(2).transpose(1, 2)
