"""What nvcc makes of every kernel, for sm_80 and sm_90: registers, spills, and the instructions of the main loops.

sm_100 and sm_120: of the kernel with the most registers; the others behind the slow marker."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.simt.nvcc import (
    GATED_ARCHS,
    LATER_ARCHS,
    NO_NVCC,
    NO_NVDISASM,
    SOURCES,
    Resources,
    compile_source,
    find_tool,
    read_machine_code,
    read_resources,
)

pytestmark = pytest.mark.skipif(find_tool("nvcc") is None, reason=NO_NVCC)

# Blocks of 128 threads an SM has registers for: 65536 / (128 * registers).
MAX_REGISTERS = {(16, 64): 96, (16, 80): 112, (16, 96): 120, (16, 112): 128, (16, 128): 128, (16, 256): 232}
MAX_REGISTERS |= {(64, 64): 160, (64, 80): 168, (64, 96): 184, (64, 112): 200, (64, 128): 216, (64, 256): 255}
MAX_REGISTERS_OF_EXPERTS = {16: 72, 64: 128}  # by rows of a tile: shared memory lets in 5 and 3 blocks of 128 threads
MAX_REGISTERS_OF_OTHERS = 64


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], dict[str, Resources]]:
    jobs = [(stem, arch) for arch in GATED_ARCHS for stem in SOURCES]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: compile_source(*job, "cubin"), jobs))
    return {job: read_resources(result.log) for job, result in zip(jobs, results, strict=True)}


def attention_shape(kernel: str) -> tuple[int, int] | None:
    """(rows, head_dim) of an attention kernel's symbol."""
    match = re.search(r"attention_kernelI.*Li(\d+)ELi(\d+)EEE", kernel)
    return (int(match[2]), int(match[1])) if match else None


def register_budget(kernel: str) -> int:
    if shape := attention_shape(kernel):
        return MAX_REGISTERS.get(shape, 255)
    if experts := re.search(r"grouped_dense_kernelI.*Li(\d+)ELb", kernel):
        return MAX_REGISTERS_OF_EXPERTS[int(experts[1])]
    return MAX_REGISTERS_OF_OTHERS


@pytest.mark.parametrize("arch", GATED_ARCHS)
def test_no_kernel_spills_or_has_a_stack(compiled: dict[tuple[str, str], dict[str, Resources]], arch: str) -> None:
    kernels = {name: r for (_, a), found in compiled.items() if a == arch for name, r in found.items()}
    assert len(kernels) == 2 * (5 * 3 + 2) + 2 * 6 + 2 * 6 + (6 + 3) + (6 + 2) + 1 + 1 + 1 + 2 * 2 * 2
    assert [name for name, r in kernels.items() if r.spilled_bytes or r.stack_bytes] == []


@pytest.mark.parametrize(
    "stem", [pytest.param(stem, marks=[] if stem == "attention_d128" else [pytest.mark.slow]) for stem in SOURCES]
)
@pytest.mark.parametrize("arch", LATER_ARCHS)
def test_no_kernel_spills_on_later_gpus(stem: str, arch: str) -> None:
    kernels = read_resources(compile_source(stem, arch, "cubin").log)
    assert [name for name, r in kernels.items() if r.spilled_bytes or r.stack_bytes] == []


@pytest.mark.parametrize("arch", GATED_ARCHS)
def test_kernels_keep_to_their_register_budget(
    compiled: dict[tuple[str, str], dict[str, Resources]], arch: str
) -> None:
    over = {}
    for (_, a), kernels in compiled.items():
        for name, r in kernels.items() if a == arch else ():
            if r.registers > register_budget(name):
                over[name] = r.registers
    assert over == {}


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason=NO_NVDISASM)
@pytest.mark.parametrize("arch", GATED_ARCHS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
def test_attention_has_the_instructions_it_was_designed_with(head_dim: int, arch: str) -> None:
    code = read_machine_code(compile_source(f"attention_d{head_dim}", arch, "cubin").path)
    kernels = {shape: ops for name, ops in code.items() if (shape := attention_shape(name)) and "bfloat16" in name}
    assert sorted(kernels) == [(rows, head_dim) for rows in ((16, 64, 128) if head_dim <= 128 else (16, 64))]
    for (rows, _), ops in kernels.items():
        opcodes = [op.split()[0] for op in ops]
        families = Counter(opcode.split(".")[0] for opcode in opcodes)
        steps, pairs = head_dim // 16, head_dim // 16  # k-steps of q.k, n16 tiles of columns
        groups = 2 if rows == 128 else 1
        if rows == 16:  # 16 keys a warp in q.k; all 64 keys, a quarter of the columns in p.v
            warp_pairs = -(-pairs // 4)
            hmma = 2 * steps + 4 * (1 + 2 * warp_pairs)
            ldsm = steps + steps + 4 * (1 + warp_pairs)  # Q once, K, P and V
        else:
            hmma = groups * (8 * steps + 4 * (1 + 2 * pairs))
            ldsm = groups * steps + 4 * steps + 4 * pairs  # Q, K, V
        assert families["HMMA"] == hmma, f"{rows} rows"
        assert families["LDSM"] == ldsm, f"{rows} rows"
        copies = [opcode for opcode in opcodes if opcode.startswith("LDGSTS")]
        assert copies
        assert all(opcode.endswith("128") for opcode in copies), f"{rows} rows"
        assert families["LDL"] + families["STL"] == 0
        # other calls are loops, or __syncwarp
        assert [op for op in ops if op.startswith("CALL") and re.search("div|rem|rcp|sqrt", op)] == []
        assert any(opcode.startswith("STG") and opcode.endswith("128") for opcode in opcodes), (
            "16-byte stores of the output"
        )
