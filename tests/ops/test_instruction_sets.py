"""Products, norms, row operators and cache writes: their tests again on each instruction set that this CPU has."""

from __future__ import annotations

from pathlib import Path

from tests.ops.isa import run_on_every_instruction_set

FILES = ("test_linear.py", "test_norm.py", "test_rows.py", "test_kv_write.py")


def test_products_norms_and_cache_writes_on_every_instruction_set() -> None:
    folder = Path(__file__).parent
    run_on_every_instruction_set(*(str(folder / name) for name in FILES), keyword="not opcheck and not large_batches")
