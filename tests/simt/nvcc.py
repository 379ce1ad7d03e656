"""nvcc's outputs for tests: PTX and machine code of csrc/cuda, kept in build/ until a source changes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.simt.emulator import ROOT, only_builder_of

FOLDER = ROOT / "build" / "nvcc"
SOURCES = sorted(path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
GATED_ARCHS = ("80", "90")
LATER_ARCHS = ("100", "120")
NO_NVCC = "nvcc was not found by CUDA_HOME, PATH or in the pip package nvidia-cuda-nvcc"
NO_NVDISASM = "nvdisasm was not found by CUDA_HOME, PATH or in the pip package nvidia-cuda-nvdisasm"


def find_tool(name: str) -> str | None:
    """nvcc, or a tool of the pip packages nvidia-cuda-nvdisasm and nvidia-cuda-nvcc."""
    homes = [os.environ[variable] + "/bin" for variable in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(variable)]
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    in_packages = [str(path) for folder in folders for path in sorted(folder.glob(f"*/bin/{name}"))]
    candidates = [f"{home}/{name}" for home in homes] + [shutil.which(name) or "", *in_packages]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


class Compiled(NamedTuple):
    path: Path
    log: str


def compile_source(stem: str, arch: str, kind: str, root: Path = ROOT) -> Compiled:
    """kind: "ptx" or "cubin"."""
    folder = root / FOLDER.relative_to(ROOT)
    output, log = folder / f"{stem}_{arch}.{kind}", folder / f"{stem}_{arch}.{kind}.log"
    inputs = [path for pattern in ("*.cu", "*.cuh", "*.h") for path in (root / "csrc" / "cuda").glob(pattern)]
    flags = ["-Xptxas=-v"] if kind == "cubin" else []
    target = f"-gencode=arch=compute_{arch},code={'sm' if kind == 'cubin' else 'compute'}_{arch}"
    with only_builder_of(output):
        if not log.exists() or log.stat().st_mtime < max(path.stat().st_mtime for path in inputs):
            command = [str(find_tool("nvcc")), "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Icsrc"]
            command += [target, f"-{kind}", *flags, f"csrc/cuda/{stem}.cu", "-o", str(output)]
            result = subprocess.run(command, cwd=root, capture_output=True, text=True)
            if result.returncode != 0:
                raise RuntimeError(f"nvcc fails on {stem}.cu for {arch}:\n{result.stderr[-8000:]}")
            log.write_text(result.stderr)
        return Compiled(output, log.read_text())


class Resources(NamedTuple):
    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int


def read_resources(log: str) -> dict[str, Resources]:
    """Of each kernel, from ptxas -v."""
    resources = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?Used \d+ registers[^\n]*)", log, re.DOTALL):
        stack, stores, loads = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", text)[:3]
        registers = re.search(r"Used (\d+) registers", text)
        shared = re.search(r"(\d+) bytes smem", text)
        assert registers is not None
        resources[name] = Resources(
            int(registers[1]), int(stack), int(stores) + int(loads), int(shared[1]) if shared else 0
        )
    return resources


def read_machine_code(cubin: Path) -> dict[str, list[str]]:
    """The instructions of each kernel, such as "LDGSTS.E.BYPASS.LTC128B.128 [R5], ..."."""
    command = [str(find_tool("nvdisasm")), "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if match := re.match(r"\.text\.(\w+):", line):
            current = code.setdefault(match[1], [])
        elif current is not None and (
            match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+(?:\.[A-Za-z0-9_]+)*[^;]*)", line)
        ):
            current.append(match[1])
    return code
