"""Compiles csrc/ into plain shared libraries in pagedllm/lib.

    libpagedllm_cpu_<set>.so   one per instruction set: csrc/cpu/*.cpp, and csrc/bindings/*.cpp, compiled once
    libpagedllm_cuda.so        csrc/cuda/*.cu by nvcc, and csrc/bindings/cuda/*.cpp
    libpagedllm_simt.so        the same sources as the CUDA library by the C++ compiler, and the emulator csrc/simt; for
                               tests: every load and store is checked

They hold no Python symbols and use torch's stable ABI, so that one build serves every Python 3 and every torch from
2.10 on. Adding a kernel is adding files: sources are found, not listed.

PAGEDLLM_BUILD is a list of "cpu", "cuda" and "simt". Not set, the CPU's libraries are built, and CUDA's where torch is
a CUDA build and nvcc is found (by CUDA_HOME, PATH, or the pip package nvidia-cuda-nvcc). Only where "cuda" is asked for
is a missing nvcc an error. PAGEDLLM_CUDA_ARCHS is the list of architectures (80;90;100;120; PTX of the first is added).

CXX names the compiler (default g++), MAX_JOBS the number of compilers at a time (default: the CPUs).
Objects are kept in build/kernels and compiled again when a source, a header they include, or a flag changes.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
BUILD = Path("build/kernels")
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10

AVX2 = ["-DPAGEDLLM_ISA_AVX2", "-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-DPAGEDLLM_ISA_AVX512", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
INSTRUCTION_SETS: dict[str, list[str]] = {"generic": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {"avx2": AVX2, "avx512": AVX512}
    INSTRUCTION_SETS["avx512_bf16"] = [*AVX512, "-DPAGEDLLM_ISA_AVX512_BF16", "-mavx512bf16"]

# No contraction: where a fused multiply-add is wanted it is written, so that bits do not depend on the optimizer.
# -Wno-*uninitialized: GCC 12 warns of its own intrinsics.
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized",
    "-Wno-maybe-uninitialized", "-Icsrc",
]  # fmt: skip

# Emulated kernels: -fsanitize=thread makes the compiler call a hook for every load and store; its library stays out.
SIMT_FLAGS = ["-DPAGEDLLM_SIMT", "-g1", "-O1"]
# Visible, so that a launch can name its kernel.
SIMT_KERNEL_FLAGS = [*SIMT_FLAGS, "-x", "c++", "-fsanitize=thread", "-fvisibility=default", "-Wno-unknown-pragmas"]

NVCC_FLAGS = [
    "-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Icsrc",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall",
]  # fmt: skip


def find_compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(command[0]) is None:
        raise PlatformError(
            f"the C++ compiler {command[0]!r} was not found: install it (Debian, Ubuntu: apt install g++; "
            "Fedora: dnf install gcc-c++) or name another one in the environment variable CXX"
        )
    return command


def find_torch() -> Path:
    """The folder of the torch that will load the libraries; torch itself is not imported, which would take a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PlatformError(
            "torch was not found: install torch >= 2.10 first, then build with pip install --no-build-isolation"
        )
    return Path(spec.origin).parent


def find_nvcc() -> str | None:
    cuda_home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [f"{cuda_home}/bin/nvcc"] if cuda_home else []
    if on_path := shutil.which("nvcc"):
        candidates.append(on_path)
    spec = importlib.util.find_spec("nvidia")  # a namespace package: pip's nvidia-cuda-nvcc
    for folder in spec.submodule_search_locations or () if spec else ():
        candidates += sorted(map(str, Path(folder).glob("*/bin/nvcc")), reverse=True)
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def kinds_to_build() -> list[str]:
    asked = os.environ.get("PAGEDLLM_BUILD")
    if asked:
        kinds = [kind.strip() for kind in asked.split(",")]
        unknown = sorted(set(kinds) - {"cpu", "cuda", "simt"})
        if unknown:
            raise SystemExit(f"error: PAGEDLLM_BUILD must list cpu, cuda or simt, got {unknown[0]!r}")
        if "cuda" in kinds and find_nvcc() is None:
            raise SystemExit(
                "error: PAGEDLLM_BUILD asks for cuda, but nvcc was not found by CUDA_HOME, PATH or in the pip package "
                "nvidia-cuda-nvcc"
            )
        return kinds
    version = (find_torch() / "version.py").read_text()
    if re.search(r"^cuda\b.*= None", version, re.MULTILINE):
        return ["cpu"]
    if find_nvcc() is None:
        print("nvcc was not found: the CUDA kernels are not built", flush=True)
        return ["cpu"]
    return ["cpu", "cuda"]


def is_stale(output: Path, command: list[str]) -> bool:
    """Whether the output is missing, older than what it was made from, or made by another command."""
    record = output.with_suffix(".command")
    if not output.exists() or not record.exists() or record.read_text() != shlex.join(command):
        return True
    depfile = output.with_suffix(".d")
    if not depfile.exists():
        return False
    inputs = re.sub(r"\\\n", " ", depfile.read_text()).split(":", 1)[1].split()
    made = output.stat().st_mtime_ns
    return any(not os.path.exists(path) or os.stat(path).st_mtime_ns > made for path in inputs)


def run(output: Path, command: list[str]) -> None:
    sys.stdout.write(f"building {output}\n")  # at once: several threads tell what they build
    sys.stdout.flush()
    output.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        output.unlink(missing_ok=True)
        raise CompileError(f"{result.stderr}\nthe compiler failed on the above; its command was: {shlex.join(command)}")
    print(result.stderr, end="", flush=True)
    output.with_suffix(".command").write_text(shlex.join(command))


class Jobs:
    """Commands by what they make: objects, then libraries."""

    def __init__(self, compiler: list[str], torch: Path) -> None:
        self.compiler, self.torch = compiler, torch
        self.compile: dict[Path, list[str]] = {}
        self.link: dict[Path, list[str]] = {}
        self.torch_flags = [f"-isystem{torch / 'include'}", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]

    def add_cpu(self) -> None:
        bindings = self.add_objects("bindings", Path("csrc/bindings").glob("*.cpp"), self.torch_flags)
        for name, isa_flags in INSTRUCTION_SETS.items():
            objects = bindings + self.add_objects(name, Path("csrc/cpu").glob("*.cpp"), isa_flags)
            self.add_library(f"cpu_{name}", objects, ["-pthread", "-Wl,--no-undefined", "-s"])

    def add_simt(self) -> None:
        runtime = [path for path in Path("csrc/simt").glob("*.cpp") if path.name != "memory_unchecked.cpp"]
        objects = self.add_objects("simt", runtime, ["-O2", "-march=native", "-g1"])
        objects += self.add_objects("simt", self.device_bindings(), [*SIMT_FLAGS, *self.torch_flags])
        objects += self.add_objects("simt", Path("csrc/cuda").glob("*.cu"), SIMT_KERNEL_FLAGS)
        self.add_library("simt", objects, ["-ldl"])

    def add_cuda(self) -> None:
        nvcc = [str(find_nvcc()), "-ccbin", self.compiler[0]]
        archs = (os.environ.get("PAGEDLLM_CUDA_ARCHS") or "80;90;100;120").split(";")
        flags = [*NVCC_FLAGS, f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}"]
        flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        objects = []
        for source in sorted([*self.device_bindings(), *Path("csrc/cuda").glob("*.cu")]):
            output = BUILD / "cuda" / f"{source.stem}{source.suffix}.o"
            includes = (
                [f"-isystem={self.torch / 'include'}", self.torch_flags[1], "-DUSE_CUDA"]
                if source.suffix == ".cpp"
                else []
            )
            depfile = ["-MD", "-MF", str(output.with_suffix(".d"))]
            self.compile[output] = [*nvcc, *flags, *includes, *depfile, "-c", str(source), "-o", str(output)]
            objects.append(output)
        library, stub = BUILD / "libpagedllm_cuda.so", BUILD / "stub" / "libtorch_cuda.so"
        # Torch's CUDA half has to be named as needed, or its symbols are not found, though torch has loaded it: the
        # system's loader looks into what a library names. It knows it by this name; a CPU-only torch, which has none,
        # can link with an empty one.
        self.link[stub] = [
            *self.compiler, "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libtorch_cuda.so", "-o", str(stub)
        ]  # fmt: skip
        torch_libraries = [f"-L{self.torch / 'lib'}", "-ltorch_cpu", f"-Xlinker=-rpath-link={self.torch / 'lib'}"]
        torch_libraries += [f"-L{stub.parent}", "-Xlinker=--no-as-needed", "-ltorch_cuda"]
        self.link[library] = [*nvcc, "-shared", *map(str, objects), "-o", str(library), *torch_libraries]

    def device_bindings(self) -> list[Path]:
        shared = [Path("csrc/bindings/checks.cpp"), Path("csrc/bindings/registration.cpp")]
        return [*Path("csrc/bindings/cuda").glob("*.cpp"), *shared]

    def add_objects(self, folder: str, sources: Iterable[Path], flags: list[str]) -> list[Path]:
        outputs = []
        for source in sorted(sources):
            # bindings and kernels share base names, so a CUDA source keeps its suffix
            output = BUILD / folder / (f"{source.name}.o" if source.suffix == ".cu" else f"{source.stem}.o")
            command = [*self.compiler, *FLAGS, *flags, "-MMD", "-MF", str(output.with_suffix(".d"))]
            self.compile[output] = [*command, "-c", str(source), "-o", str(output)]
            outputs.append(output)
        return outputs

    def add_library(self, name: str, objects: list[Path], flags: list[str]) -> None:
        library = BUILD / f"libpagedllm_{name}.so"
        self.link[library] = [
            *self.compiler, "-shared", *map(str, objects), "-o", str(library), f"-L{self.torch / 'lib'}",
            f"-Wl,-rpath-link,{self.torch / 'lib'}", "-Wl,--as-needed", "-ltorch_cpu", *flags,
        ]  # fmt: skip


def library_names() -> list[str]:
    names = {"cpu": [f"cpu_{name}" for name in INSTRUCTION_SETS], "cuda": ["cuda"], "simt": ["simt"]}
    return [name for kind in kinds_to_build() for name in names[kind]]


class BuildKernels(build_ext):
    """build_ext with its own compile step: setuptools knows neither instruction sets nor header dependencies."""

    def run(self) -> None:
        os.chdir(ROOT)
        jobs = Jobs(find_compiler(), find_torch())
        for kind in kinds_to_build():
            getattr(jobs, f"add_{kind}")()
        stale = {output: command for output, command in jobs.compile.items() if is_stale(output, command)}
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            list(pool.map(run, stale.keys(), stale.values()))
        for library, command in jobs.link.items():
            objects_changed = any(str(output) in command for output in stale)
            if objects_changed or is_stale(library, command):
                run(library, command)
        target_root = ROOT if self.inplace else Path(self.build_lib)
        for ext in self.extensions:
            target = target_root / self.get_ext_filename(ext.name)
            built = BUILD / target.name
            if not target.exists() or target.stat().st_mtime_ns < built.stat().st_mtime_ns:
                target.parent.mkdir(parents=True, exist_ok=True)
                # a new file, not new bytes in the old one: a running process may have that mapped
                partial = target.with_suffix(".partial")
                shutil.copyfile(built, partial)
                partial.replace(target)

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no interpreter tag: these are not Python modules

    def get_outputs(self) -> list[str]:
        return [os.path.join(self.build_lib, self.get_ext_filename(ext.name)) for ext in self.extensions]

    def get_output_mapping(self) -> dict[str, str]:
        return dict(zip(self.get_outputs(), (self.get_ext_filename(ext.name) for ext in self.extensions), strict=True))

    def get_source_files(self) -> list[str]:
        return [
            str(path) for pattern in ("*.cpp", "*.h", "*.cu", "*.cuh") for path in sorted(Path("csrc").rglob(pattern))
        ]


class AnyPythonWheel(bdist_wheel):
    """One wheel for every Python 3: the libraries do not link to the interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(f"pagedllm.lib.libpagedllm_{name}", sources=[]) for name in library_names()],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
