"""The emulated library is loaded as any other: its schemas are compared with the package's."""

from __future__ import annotations

from pagedllm.ops.library import CPU_ONLY_OPERATORS, KernelSet, defined_schemas, load_kernels
from tests.simt.emulator import LIBRARY, Emulator


def test_the_emulated_kernels_are_a_kernel_set(emulator: Emulator) -> None:
    assert load_kernels("simt") == KernelSet("simt", "pagedllm_simt", LIBRARY)


def test_every_operator_but_those_for_cpus_only_has_a_cuda_kernel(emulator: Emulator) -> None:
    wanted = {schema for schema in defined_schemas() if schema[: schema.index("(")] not in CPU_ONLY_OPERATORS}
    assert set(emulator.signatures()) == wanted
