"""Chooses the compiled kernels for this CPU and loads them, once a process.

    load_kernels("auto")        the best instruction set that the CPU has
    load_kernels("avx2")        that set, or an error that names it and what the CPU has
    load_kernels("simt")        the CUDA kernels on an emulator on the CPU, for tests; loads beside any of the others
    load_kernels("reference")   the Python twins; no library is touched

The environment variable PAGEDLLM_KERNELS takes the place of "auto", for tests. Nothing falls back: a library that is
missing, does not load or was built from other schemas is a LibraryError that names file, cause and build command.
What is loaded is torch's knowledge (its dispatch table and its list of libraries), not a variable of ours.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from pagedllm.errors import LibraryError
from pagedllm.ops import attention, elementwise, kv_write, linear, moe, norm, sampling
from pagedllm.ops._library import Operator

BUILD_COMMAND = "pip install --no-build-isolation -e . (or python setup.py build_ext --inplace) in a source checkout"
LIBRARY_FOLDER = Path(__file__).resolve().parent.parent / "lib"
CUDA_LIBRARY = LIBRARY_FOLDER / "libpagedllm_cuda.so"
SIMT_LIBRARY = LIBRARY_FOLDER / "libpagedllm_simt.so"
# Of weights that are packed for a CPU; and of families for which torch computes on a GPU.
CPU_ONLY_OPERATORS = frozenset({
    "packed_linear", "packed_argmax", "embedding", "route_tokens", "grouped_linear", "combine_experts",
    "layer_norm_heads", "finish_logits", "add_rows", "clamp_rows",
})  # fmt: skip

# From best to worst, with the flags of /proc/cpuinfo that each needs.
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
INSTRUCTION_SETS: dict[str, frozenset[str]] = {
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": frozenset(),
}
_OPERATOR_MODULES: tuple[ModuleType, ...] = (attention, elementwise, kv_write, linear, moe, norm, sampling)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """What was chosen. `path` is None for the reference."""

    name: str  # "avx512_bf16", ..., "reference"
    namespace: str  # of the operators
    path: Path | None


def load_kernels(kernels: str = "auto") -> KernelSet:
    """Loads the kernels that `kernels` names and returns them.

    Raises ValueError for a name that is unknown or that this CPU cannot run, LibraryError for a library that cannot be
    used, or when this process has loaded another set already (torch has one table of implementations).
    """
    name = choose(kernels, cpu_flags(), os.environ.get("PAGEDLLM_KERNELS"))
    if name == "reference":
        return KernelSet(name, "pagedllm_reference", None)
    if name == "simt":
        load_library(SIMT_LIBRARY, CPU_ONLY_OPERATORS)
        return KernelSet(name, "pagedllm_simt", SIMT_LIBRARY)
    path = LIBRARY_FOLDER / f"libpagedllm_cpu_{name}.so"
    load_library(path)
    return KernelSet(name, "pagedllm", path)


def load_cuda_kernels(kernels: str = "auto") -> KernelSet:
    """Loads the kernels for CUDA tensors; beside them those for CPU tensors may be loaded. Raises LibraryError, also
    where the library was built for a torch that this one does not fit."""
    if kernels not in ("auto", "cuda"):
        raise ValueError(f"kernels must be 'auto' or 'cuda' on CUDA, got {kernels!r}")
    load_library(CUDA_LIBRARY, CPU_ONLY_OPERATORS)
    return KernelSet("cuda", "pagedllm", CUDA_LIBRARY)


def cpu_flags() -> frozenset[str]:
    """Instruction sets that CPU and operating system offer, in the words of /proc/cpuinfo."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def choose(kernels: str, flags: frozenset[str], forced: str | None = None) -> str:
    """The name of the set to load. `forced`, where not None or empty, takes the place of "auto"."""
    field = "kernels"
    if kernels == "auto" and forced:
        field, kernels = "PAGEDLLM_KERNELS", forced
    usable = [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]
    if kernels == "auto":
        return usable[0]
    if kernels in ("simt", "reference") or kernels in usable:
        return kernels
    if kernels in INSTRUCTION_SETS:
        missing = ", ".join(sorted(INSTRUCTION_SETS[kernels] - flags))
        raise ValueError(
            f"{field}={kernels!r} cannot run on this CPU, which lacks {missing}; the best it can run is {usable[0]!r}"
        )
    known = ("auto", *INSTRUCTION_SETS, "simt", "reference")
    raise ValueError(f"{field} must be one of {', '.join(map(repr, known))}, got {kernels!r}")


def load_library(path: Path, lacking: frozenset[str] = frozenset()) -> None:
    """Loads one library and checks it against our schemas but for what it may lack. Raises LibraryError."""
    if not path.exists():
        raise LibraryError(f"the kernels {path} do not exist; build them: {BUILD_COMMAND}")
    others = [name for name in torch.ops.loaded_libraries if "libpagedllm_cpu_" in name and name != str(path)]
    if others and "libpagedllm_cpu_" in path.name:
        raise LibraryError(
            f"this process has loaded {', '.join(sorted(others))} and cannot load {path} besides: "
            "one process runs one instruction set"
        )
    try:
        torch.ops.load_library(str(path))
        get_signatures = ctypes.CDLL(str(path)).pagedllm_signatures
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"the kernels {path} do not load into torch {torch.__version__} ({error}); "
            f"build them again: {BUILD_COMMAND}"
        ) from error
    get_signatures.restype = ctypes.c_char_p
    defined = [schema for schema in defined_schemas() if schema[: schema.index("(")] not in lacking]
    difference = compare_signatures(defined, get_signatures().decode().splitlines())
    if difference:
        raise LibraryError(
            f"the kernels {path} were built from other sources: {difference}; build them again: {BUILD_COMMAND}"
        )


def defined_schemas() -> list[str]:
    """The schemas of all operators that the package defines."""
    return [
        value.schema for module in _OPERATOR_MODULES for value in vars(module).values() if isinstance(value, Operator)
    ]


def compare_signatures(defined: list[str], compiled: list[str]) -> str | None:
    """Says the first difference between the package's schemas and a library's, or None.

    torch does not compare them: a library built before an argument was added would read garbage.
    """
    ours, theirs = ({schema[: schema.index("(")]: schema for schema in schemas} for schemas in (defined, compiled))
    for name, schema in theirs.items():
        if name not in ours:
            return f"they implement {name!r}, which this version does not define"
        if schema != ours[name]:
            return f"they implement {schema!r} where this version defines {ours[name]!r}"
    missing = ours.keys() - theirs.keys()
    return f"they lack {', '.join(sorted(missing))}" if missing else None
