"""The operators' tests again on each instruction set that this CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.isa import run_on_every_instruction_set

FILES = (
    "test_linear.py",
    "test_elementwise.py",
    "test_moe.py",
    "test_norm.py",
    "test_rows.py",
    "test_kv_write.py",
    "test_attention.py",
    "test_sampling.py",
)
KEYWORD = "not opcheck and not large_batches and not refused"  # checks of arguments are the same code in every library


@pytest.mark.timeout(900)
def test_operators_on_every_instruction_set() -> None:
    folder = Path(__file__).parent
    run_on_every_instruction_set(*(str(folder / name) for name in FILES), keyword=KEYWORD)
