"""Compiles csrc/ into plain shared libraries, one per instruction set: pagedllm/lib/libpagedllm_cpu_<set>.so.

They hold no Python symbols and use torch's stable ABI, so that one build serves every Python 3 and every torch from
2.10 on. Kernels (csrc/cpu/*.cpp) are compiled once per set, bindings (csrc/bindings/*.cpp) once. Adding a kernel is
adding files: sources are found, not listed.

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
    print(f"building {output}", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        output.unlink(missing_ok=True)
        raise CompileError(f"{result.stderr}\nthe compiler failed on the above; its command was: {shlex.join(command)}")
    print(result.stderr, end="", flush=True)
    output.with_suffix(".command").write_text(shlex.join(command))


class BuildKernels(build_ext):
    """build_ext with its own compile step: setuptools knows neither instruction sets nor header dependencies."""

    def run(self) -> None:
        os.chdir(ROOT)
        compiler, torch = find_compiler(), find_torch()
        compile_jobs: dict[Path, list[str]] = {}
        link_jobs: dict[Path, list[str]] = {}
        bindings = []
        for source in sorted(Path("csrc/bindings").glob("*.cpp")):
            output = BUILD / "bindings" / f"{source.stem}.o"
            includes = [f"-isystem{torch / 'include'}", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
            compile_jobs[output] = self.compile_command(compiler, source, output, includes)
            bindings.append(output)
        for name, isa_flags in INSTRUCTION_SETS.items():
            objects = list(bindings)
            for source in sorted(Path("csrc/cpu").glob("*.cpp")):
                output = BUILD / name / f"{source.stem}.o"
                compile_jobs[output] = self.compile_command(compiler, source, output, isa_flags)
                objects.append(output)
            library = BUILD / f"libpagedllm_cpu_{name}.so"
            link_jobs[library] = [
                *compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library), f"-L{torch / 'lib'}",
                f"-Wl,-rpath-link,{torch / 'lib'}", "-Wl,--no-undefined", "-Wl,--as-needed", "-ltorch_cpu", "-s",
            ]  # fmt: skip

        stale = {output: command for output, command in compile_jobs.items() if is_stale(output, command)}
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            list(pool.map(run, stale.keys(), stale.values()))
        for library, command in link_jobs.items():
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

    def compile_command(self, compiler: list[str], source: Path, output: Path, flags: list[str]) -> list[str]:
        depfile = output.with_suffix(".d")
        return [*compiler, *FLAGS, *flags, "-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(output)]

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no interpreter tag: these are not Python modules

    def get_outputs(self) -> list[str]:
        return [os.path.join(self.build_lib, self.get_ext_filename(ext.name)) for ext in self.extensions]

    def get_output_mapping(self) -> dict[str, str]:
        return dict(zip(self.get_outputs(), (self.get_ext_filename(ext.name) for ext in self.extensions), strict=True))

    def get_source_files(self) -> list[str]:
        return [str(path) for pattern in ("*.cpp", "*.h") for path in sorted(Path("csrc").rglob(pattern))]


class AnyPythonWheel(bdist_wheel):
    """One wheel for every Python 3: the libraries do not link to the interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(f"pagedllm.lib.libpagedllm_cpu_{name}", sources=[]) for name in INSTRUCTION_SETS],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
