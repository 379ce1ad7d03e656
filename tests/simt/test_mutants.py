"""Planted bugs: the checkers notice each. Slow, a mutant is compiled and run in a process of its own."""
# ruff: noqa: E501 (lines of the kernels)

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.simt.emulator import ROOT, build
from tests.simt.nvcc import NO_NVCC, find_tool

pytestmark = pytest.mark.slow


class Mutant(NamedTuple):
    name: str
    file: str  # in csrc/cuda
    old: str
    new: str
    notice: str  # a regular expression of what is said


KERNEL, TILE, MERGE = "attention_kernel.cuh", "attention_tile.cuh", "attention_merge.cuh"
EMULATED = [
    Mutant("no barrier when a half tile has arrived", KERNEL, "__syncthreads();  // all threads' copies have arrived", "// ",
           "race|in flight|uninitialised"),
    Mutant("waits for one group too few", KERNEL, "copy_async_wait<S::kSlots - 2>()", "copy_async_wait<S::kSlots - 1>()",
           "cp.async still in flight"),
    Mutant("copies into the slot that is read", KERNEL, "(tile, S::previous_slot(slot_byte))", "(tile, slot_byte)",
           "race|in flight|uninitialised"),
    Mutant("keys past the end are read", TILE, "key >= first_visible && key < end_key", "key >= first_visible",
           "out-of-bounds|wrong numbers"),
    Mutant("keys before the window are read", TILE, "key >= first_visible && key < end_key", "key < end_key",
           "out-of-bounds|bytes"),
    Mutant("no barrier after the maxima are shared", KERNEL, "      mine[8] = high;\n    }\n    __syncthreads();",
           "      mine[8] = high;\n    }", "race|uninitialised"),
    Mutant("no barrier before the output is read", KERNEL, "      });\n    }\n    __syncthreads();\n    T* out", "      });\n    }\n    T* out",
           "race|uninitialised"),
    Mutant("no barrier between two items", KERNEL, "    __syncthreads();  // shared memory is free for the next item", "",
           "race|in flight|divergent"),
    Mutant("no __syncwarp before the carry is overwritten", KERNEL,
           "    __syncwarp();  // all threads of a row have read the state that one of them overwrites", "", "race"),
    Mutant("a barrier that a warp skips", KERNEL, "    __syncthreads();  // all threads' copies", "    if (threadIdx.x >= 32) __syncthreads();  // all threads' copies",
           "race|deadlock|diverge|in flight|uninitialised"),
    Mutant("a shuffle that half a warp skips", KERNEL, "    m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));",
           "    if (threadIdx.x % 32 < 16) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));", "diverged|deadlock"),
    Mutant("too little shared memory", KERNEL, "Tile<D, ROWS>::kSharedBytes, stream, p);", "Tile<D, ROWS>::kSharedBytes - 128, stream, p);",
           "out-of-bounds shared memory"),
    Mutant("causal mask off by one", KERNEL, "item.position(first_row + 16 * i + 8 * h + lane / 4) - warp_key", "item.position(first_row + 16 * i + 8 * h + lane / 4) - 1 - warp_key",
           "wrong numbers"),
    Mutant("a tile counts as full one key early", KERNEL, "warp_key + 8 * N - 1 <=", "warp_key + 8 * N - 2 <=", "wrong numbers"),
    Mutant("fragments of p swapped", KERNEL, "weights[i][2 * k + (r >> 1)][r & 1]", "weights[i][2 * k + (r & 1)][r >> 1]", "wrong numbers"),
    Mutant("rows past the end are stored", KERNEL, "index < item.work().num_rows * S::kChunks;", "index < ROWS * S::kChunks;",
           "out-of-bounds|race between blocks|wrong numbers"),
    Mutant("the merge forgets a split", MERGE, "split < item.num_splits; ++split", "split + 1 < item.num_splits; ++split", "wrong numbers"),
    Mutant("the accumulators are not rescaled", KERNEL, "if (!__any_sync(kAllLanes, has_moved)) return;", "return;", "wrong numbers"),
    Mutant("block ids of the wrong split", TILE, "tile / kTilesPerSplit * kSplitKeys >>", "(tile - 1) / kTilesPerSplit * kSplitKeys >>",
           "out-of-bounds|wrong numbers"),
    Mutant("no barrier before the item is read", KERNEL, "    const Item item(p, i);\n    __syncthreads();", "    const Item item(p, i);",
           "race|uninitialised"),
    Mutant("the next item is written while the last is read", KERNEL, "    i = Item::state().index + static_cast<int>(gridDim.x);\n    __syncthreads();  // shared memory is free for the next item",
           "    __syncthreads();\n    i = Item::state().index + static_cast<int>(gridDim.x);", "race"),
    Mutant("a decode forgets what a shared item left it", KERNEL, "has_flag(kContinues)) load_state();", "false) load_state();", "wrong numbers"),
    Mutant("every shared row goes to the first sequence's slot", KERNEL, "item.member(packed_row).first_slot", "item.member(0).first_slot",
           "wrong numbers|race|uninitialised"),
    Mutant("a shared row's window is its neighbour's", TILE, "row < last_row ? row : last_row", "0", "wrong numbers"),
    Mutant("the merge reads splits before the window", MERGE, "p.window > 0 && window_begin > 0 ?", "false ?", "wrong numbers|uninitialised"),
    Mutant("no swizzle", "swizzle.cuh", "(chunk ^ (row >> kRowShift & (kPeriod - 1))) * 16", "chunk * 16", "bank conflicts|wrong numbers"),
    Mutant("histogram without a barrier", "sampling_row.cuh", "      scratch.counts[thread] = 0;\n    }\n    __syncthreads();",
           "      scratch.counts[thread] = 0;\n    }", "race|uninitialised"),
    Mutant("norm without a barrier", "elementwise.cuh", "  __syncthreads();\n  float sum = 0.f;", "  float sum = 0.f;", "race|uninitialised"),
]  # fmt: skip

RUN = """
import math, sys, torch
torch.set_num_threads(1)
from tests.simt.attention_case import AttentionCase, make_batch, relative_error
from tests.simt.emulator import Emulator
from pagedllm.ops.norm import rms_norm
from pagedllm.ops.sampling import sample
emulator = Emulator({library!r})
cases = [
    AttentionCase((70, 20, 1), (75, 60, 520)),
    AttentionCase((1, 1, 1, 1), (130, 600, 64, 700), num_q_heads=8, window=90),
    AttentionCase((140,), (1040,), num_q_heads=1, num_kv_heads=1),
    AttentionCase((3, 130), (40, 200), num_q_heads=2, num_kv_heads=1),
    AttentionCase((1, 1), (63, 79)),
    AttentionCase((1, 1, 1), (660, 700, 645), prefixes=((0, 0), (0, 640), (0, 640)), is_shared=True),
    AttentionCase((1, 1, 1), (660, 1200, 645), prefixes=((0, 0), (0, 640), (0, 640)), is_shared=True, window=200),
]
for order in (0, 1, 2):
    emulator.configure(order, seed=order + 3)
    for case in cases:
        batch = make_batch(case)
        before = emulator.counters()
        error = relative_error(batch.attend(), batch.expected())
        if not error < 5e-3:
            sys.exit(f"wrong numbers, {{error}}")
        after = emulator.counters()
        loads = after["load_matrix"] - before["load_matrix"]
        if after["load_matrix_wavefronts"] - before["load_matrix_wavefronts"] > 4 * loads:
            sys.exit("bank conflicts")
        if case.window and not case.is_shared:
            minimum = sum(min(case.window, length) for length in case.seq_lens) * case.num_kv_heads * case.head_dim * 2
            if emulator.traffic()["k_cache"].bytes_read > 1.02 * minimum:
                sys.exit("more bytes than needed")
    x = torch.randn(2, 576)
    out = torch.empty_like(x)
    rms_norm("pagedllm_simt", out, x, torch.ones(576), 1e-6)
    one, ids = torch.ones(2), torch.empty(2, dtype=torch.int32)
    sample("pagedllm_simt", ids, x, one, ids * 0 + 20, one * 0.9, one * 0, torch.tensor([1, 2]), torch.zeros(2, 2, dtype=torch.int32))
"""


@pytest.fixture(scope="module")
def mutant_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with their objects, so that a mutant compiles only what it touches."""
    build()
    root = tmp_path_factory.mktemp("mutants")
    for name in ("csrc", "build/kernels/simt"):
        shutil.copytree(ROOT / name, root / name)  # with times of modification
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, root / name)
    only_small = [path for path in (root / "csrc/cuda").glob("attention_d*.cu") if path.stem != "attention_d64"]
    for path in only_small:  # other head dims would be compiled for every mutant
        path.write_text("")
    dispatch = root / "csrc/cuda/attention.cu"
    lines = dispatch.read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("extern template") or "<64>" in line)
    for head_dim in (80, 96, 112, 128, 256):
        text = text.replace(
            f"    case {head_dim}:\n      return launch_attention_of<{head_dim}>(params, stream);\n", ""
        )
    dispatch.write_text(text)
    return root


def run_mutant(root: Path, library: Path) -> str:
    """What the checkers say, or "" if they notice nothing."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN.format(library=str(library))]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return "" if result.returncode == 0 else result.stderr


def test_the_original_passes(mutant_root: Path) -> None:
    assert run_mutant(mutant_root, build(mutant_root)) == ""


@pytest.mark.parametrize("mutant", EMULATED, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_the_emulator_notices(mutant: Mutant, mutant_root: Path) -> None:
    path = mutant_root / "csrc/cuda" / mutant.file
    original = path.read_text()
    assert original.count(mutant.old) == 1
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        said = run_mutant(mutant_root, build(mutant_root))
    finally:
        path.write_text(original)
    assert re.search(mutant.notice, said), f"the checkers said: {said[-1500:]!r}"


ASSEMBLY = [
    ("packs the halves the wrong way round", '"f"(high), "f"(low)', '"f"(low), "f"(high)'),
    ("b's registers swapped", '"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)'),
    ("a's registers swapped", '"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])'),
    ("ldmatrix without its transposition", "m8n8.x4.trans.shared", "m8n8.x4.shared"),
    ("cp.async without zeros past the end", '[%0], [%1], 16, %2;"', '[%0], [%1], 16;"'),
]


@pytest.mark.skipif(find_tool("nvcc") is None, reason=NO_NVCC)
@pytest.mark.parametrize(("old", "new"), [m[1:] for m in ASSEMBLY], ids=[m[0].replace(" ", "_") for m in ASSEMBLY])
def test_the_interpreter_notices_wrong_assembly(old: str, new: str, mutant_root: Path) -> None:
    """The emulator cannot: it has other bodies for these instructions."""
    path = mutant_root / "csrc/cuda/instructions.cuh"
    original = path.read_text()
    assert old in original
    path.write_text(original.replace(old, new))
    script = f"""
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from tests.simt.attention_case import AttentionCase, make_batch, relative_error
from tests.simt.emulator import Emulator, build
from tests.simt.nvcc import compile_source
from tests.simt.ptx_interpreter import run_launch
from tests.simt.ptx_parser import parse_ptx
emulator = Emulator(build())
kernels = parse_ptx(compile_source("attention_d64", "80", "ptx", Path({str(mutant_root)!r})).path.read_text())
batch = make_batch(AttentionCase((1, 20), (70, 30), num_q_heads=2, num_kv_heads=1))
emulator.capture_begin()
batch.attend()
for launch in emulator.capture_end():
    run_launch(kernels[launch.symbol], launch, emulator.traffic())
sys.exit(not relative_error(batch.out, batch.expected()) < 5e-3)
"""
    try:
        result = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
        )
    finally:
        path.write_text(original)
    assert result.returncode != 0
