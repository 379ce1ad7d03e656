"""What the start-up benchmark measures."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from pagedllm.bench.startup import report, resident_bytes, run_once
from tests.tiny import save_tiny_model

PAGE = 4096


def test_resident_bytes_counts_the_pages_that_were_written() -> None:
    mapping = mmap.mmap(-1, 1000 * PAGE)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    for page in (0, 5, 999):
        mapping[page * PAGE] = 1
    held = ctypes.c_char.from_buffer(mapping)
    try:
        address = ctypes.addressof(held)
        before = resident_bytes(address)
        mapping[7 * PAGE] = 1
        assert resident_bytes(address + 500 * PAGE) == before + PAGE
    finally:
        del held


def test_a_start_of_a_tiny_model_is_told(tmp_path: Path) -> None:
    facts = run_once(str(save_tiny_model(tmp_path)), 64 << 20)
    assert facts["weights"] < 1 << 20 < facts["touched"] < facts["peak"]
    assert facts["pool"] <= 64 << 20
    assert facts["touched"] <= facts["pool"] + (2 << 20)  # huge pages
    assert sum(facts["phases"].values()) < facts["seconds"]["constructor"] < facts["seconds"]["in all"]
    lines = report("64 MiB", [facts, facts, facts]).splitlines()
    assert lines[0] == f"pool: 64 MiB ({facts['pool'] / 1e6:,.0f} MB), median of 3"
    assert len(lines) == 4
