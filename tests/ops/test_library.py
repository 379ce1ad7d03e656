"""Choice and loading of the compiled kernels: nothing falls back, and every refusal says how to mend it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedllm.errors import LibraryError
from pagedllm.ops.library import (
    INSTRUCTION_SETS,
    KernelSet,
    choose,
    compare_signatures,
    cpu_flags,
    defined_schemas,
    load_kernels,
    load_library,
)

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (frozenset(), "generic"),
        (frozenset({"avx2"}), "generic"),  # without FMA
        (AVX2, "avx2"),
        (AVX2 | {"avx512f"}, "avx2"),  # the first AVX-512 CPUs
        (AVX512, "avx512"),
        (AVX512 | {"avx512_bf16"}, "avx512_bf16"),
    ],
)
def test_auto_is_the_best_set_that_the_cpu_has(flags: frozenset[str], name: str) -> None:
    assert choose("auto", flags) == name


def test_the_environment_takes_the_place_of_auto_only() -> None:
    assert choose("auto", AVX512, "avx2") == "avx2"
    assert choose("auto", AVX512, "") == "avx512"
    assert choose("generic", AVX512, "avx2") == "generic"
    assert choose("reference", AVX512, "avx2") == "reference"


def test_a_set_that_the_cpu_lacks_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="kernels='avx512' cannot run on this CPU, which lacks avx512bw, avx512dq, "):
        choose("avx512", AVX2)
    with pytest.raises(ValueError, match=r"^PAGEDLLM_KERNELS='avx2' .* lacks avx2, f16c, fma; the best .* 'generic'$"):
        choose("auto", frozenset(), "avx2")


def test_an_unknown_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"^kernels must be one of 'auto', 'avx512_bf16', .*, got 'sse2'$"):
        choose("sse2", AVX512)


def test_loading_twice_gives_the_same_and_the_reference_needs_no_library() -> None:
    kernels = load_kernels()
    assert kernels == load_kernels()
    assert kernels.namespace == "pagedllm"
    assert kernels.path is not None
    assert str(kernels.path) in torch.ops.loaded_libraries
    assert load_kernels("reference") == KernelSet("reference", "pagedllm_reference", None)


def test_a_second_set_in_one_process_is_refused() -> None:
    loaded = load_kernels()
    others = [name for name, needed in INSTRUCTION_SETS.items() if name != loaded.name and needed <= cpu_flags()]
    for name in others:
        with pytest.raises(LibraryError, match=rf"has loaded .*{loaded.name}\.so and cannot load .*{name}\.so"):
            load_kernels(name)


def test_a_missing_library_is_named_with_the_build_command(tmp_path: Path) -> None:
    path = tmp_path / "libpagedllm_cpu_avx2.so"
    with pytest.raises(LibraryError, match=rf"^the kernels {path} do not exist; build them: pip install .*build_ext"):
        load_library(path)


def test_signatures_are_compared_whole() -> None:
    ours = ["f(Tensor(a!) out, float eps) -> ()", "g(Tensor x) -> ()"]
    assert compare_signatures(ours, ours[::-1]) is None
    assert compare_signatures(ours, ours[:1]) == "they lack g"
    assert compare_signatures(ours[:1], ours) == "they implement 'g', which this version does not define"
    swapped = ["f(float eps, Tensor(a!) out) -> ()", ours[1]]
    assert compare_signatures(ours, swapped) == (
        "they implement 'f(float eps, Tensor(a!) out) -> ()' "
        "where this version defines 'f(Tensor(a!) out, float eps) -> ()'"
    )


def test_every_operator_is_compared() -> None:
    names = {schema[: schema.index("(")] for schema in defined_schemas()}
    assert {"packed_linear", "rms_norm", "rope_norm_write_kv", "paged_attention", "sample"} <= names


def build(source: str, path: Path) -> None:
    """A shared library out of C++ text."""
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def test_libraries_that_do_not_fit_are_refused_at_load(tmp_path: Path) -> None:
    """In a process of its own: torch keeps what it has loaded."""
    (tmp_path / "libpagedllm_cpu_torn.so").write_bytes(b"\x7fELF torn")
    schema = "rms_norm(Tensor(a!) out, Tensor weight, Tensor x, float eps) -> ()"
    old = f'extern "C" const char* pagedllm_signatures() {{ return "{schema}\\n"; }}'
    build(old, tmp_path / "libpagedllm_cpu_old.so")
    program = f"""
from pathlib import Path
from pagedllm.errors import LibraryError
from pagedllm.ops.library import load_library
for name in ("torn", "old"):
    try:
        load_library(Path({str(tmp_path)!r}) / f"libpagedllm_cpu_{{name}}.so")
    except LibraryError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    torn_line, old_line = result.stdout.splitlines()
    assert torn_line.startswith(
        f"the kernels {tmp_path}/libpagedllm_cpu_torn.so do not load into torch {torch.__version__} ("
    )
    assert f"they implement {schema!r} where this version defines 'rms_norm(Tensor(a!) out, Tensor x" in old_line
    assert all("build them again: pip install" in line for line in (torn_line, old_line))


@pytest.mark.slow
def test_the_compiler_refuses_a_schema_that_is_not_the_functions(tmp_path: Path) -> None:
    source = tmp_path / "binding.cpp"
    source.write_text("""
#include "bindings/registration.h"
void f(const pagedllm::Tensor&, const std::optional<pagedllm::Tensor>&, double, int64_t, bool);
static_assert(pagedllm::takes(&f, "f(Tensor(a!) out, Tensor? x, float eps, int n, bool b) -> ()"));
static_assert(!pagedllm::takes(&f, "f(Tensor(a!) out, Tensor x, float eps, int n, bool b) -> ()"));
static_assert(!pagedllm::takes(&f, "f(Tensor(a!) out, Tensor? x, int n, float eps, bool b) -> ()"));
static_assert(!pagedllm::takes(&f, "f(Tensor(a!) out, Tensor? x, float eps, int n) -> ()"));
static_assert(!pagedllm::takes(&f, "f(Tensor(a!) out, Tensor? x, float eps, int n, bool b, int m) -> ()"));
""")
    include = Path(torch.__file__).parent / "include"
    flags = [f"-I{REPOSITORY / 'csrc'}", f"-isystem{include}", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", *flags, str(source)], check=True)
