"""Choice and loading of the compiled kernels: nothing falls back, and every refusal says how to mend it."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedllm import doctor
from pagedllm.errors import LibraryError
from pagedllm.exit_codes import FAILED
from pagedllm.machine_commands import doctor_command
from pagedllm.ops.library import (
    INSTRUCTION_SETS,
    KernelSet,
    choose,
    compare_signatures,
    cpu_flags,
    defined_schemas,
    explain,
    load_kernels,
    load_library,
)
from tests.runtime.test_compute_device import pretend as pretend_gpu

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


def build(source: str, path: Path, *flags: str) -> None:
    """A shared library out of C++ text."""
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-x", "none", *flags, "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


SWAPPED = "rms_norm(Tensor(a!) out, Tensor weight, Tensor x, float eps) -> ()"
SIGNATURES = f'extern "C" const char* pagedllm_signatures() {{ return "{SWAPPED}\\n"; }}\n'
OF_ANOTHER_TORCH = f'{SIGNATURES} extern "C" int torch_of_tomorrow(); int used() {{ return torch_of_tomorrow(); }}'


def test_libraries_that_do_not_fit_are_refused_at_load(tmp_path: Path) -> None:
    """Each in one line that names what it wants and what is here. In a process of its own: torch keeps what it has
    loaded."""
    names = ("cpu_torn", "cpu_tomorrow", "cuda_tomorrow", "cuda_other", "cuda_foreign", "cpu_old", "cuda_old")
    paths = {name: tmp_path / f"libpagedllm_{name}.so" for name in names}
    paths["cpu_torn"].write_bytes(b"\x7fELF torn")
    runtime = tmp_path / "elsewhere" / "libcudart.so.99"
    runtime.parent.mkdir()
    build('extern "C" int cudaLaunch() { return 0; }', runtime, f"-Wl,-soname,{runtime.name}")
    launching = f'{SIGNATURES} extern "C" int cudaLaunch(); int used() {{ return cudaLaunch(); }}'
    build(launching, paths["cuda_other"], str(runtime))
    build("int nothing;", paths["cuda_foreign"])
    build(OF_ANOTHER_TORCH, paths["cpu_tomorrow"])
    build(SIGNATURES, paths["cpu_old"])
    for name in ("tomorrow", "old"):
        shutil.copyfile(paths[f"cpu_{name}"], paths[f"cuda_{name}"])
    program = f"""
from pathlib import Path
from pagedllm.errors import LibraryError
from pagedllm.ops.library import CPU_ONLY_OPERATORS, load_library
for name in {names}:
    try:
        lacking = CPU_ONLY_OPERATORS if name.startswith("cuda") else frozenset()
        load_library(Path({str(tmp_path)!r}) / f"libpagedllm_{{name}}.so", lacking)
    except LibraryError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    lines = dict(zip(names, result.stdout.splitlines(), strict=True))
    refused = {name: f"the kernels {path} do not load into torch {torch.__version__} (" for name, path in paths.items()}
    assert lines["cpu_torn"].startswith(f"{refused['cpu_torn']}{paths['cpu_torn']}: ")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    built = f"they were built for another torch; this one has {cuda}); build them again: pip install"
    for name in ("cpu_tomorrow", "cuda_tomorrow"):
        assert lines[name].startswith(f"{refused[name]}they want 'torch_of_tomorrow', which it lacks: {built}")
    assert lines["cuda_other"].startswith(
        f"{refused['cuda_other']}they want libcudart.so.99, which is not found: {built}"
    )
    assert f"{paths['cuda_foreign']} are none of pagedllm's: they lack 'pagedllm_sig" in lines["cuda_foreign"]
    for name in ("cpu_old", "cuda_old"):
        assert f"they implement {SWAPPED!r} where this version defines 'rms_norm(Tensor(a!) out, Ten" in lines[name]
    assert all("build them again: pip install" in line for line in lines.values())


def test_a_newer_system_is_named() -> None:
    """As glibc's loader says it."""
    text = "/lib/libc.so.6: version `GLIBC_2.99' not found (required by /somewhere/libpagedllm_cpu_avx2.so)"
    assert explain(text) == "they want GLIBC_2.99, which /lib/libc.so.6 lacks: they were built on a newer system"


def test_doctor_tells_of_a_library_for_another_torch_in_the_same_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the CPU's kernels and of the GPU's; as lines and as JSON."""
    library = tmp_path / f"libpagedllm_cpu_{choose('auto', cpu_flags())}.so"
    build(OF_ANOTHER_TORCH, library)
    monkeypatch.setattr("pagedllm.ops.library.LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr("pagedllm.ops.library.CUDA_LIBRARY", library)
    monkeypatch.setattr("torch.ops.loaded_libraries", set())
    monkeypatch.delenv("PAGEDLLM_KERNELS", raising=False)
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path / "none")
    with pytest.raises(LibraryError) as caught:
        load_kernels()
    line = str(caught.value)
    assert "they want 'torch_of_tomorrow'" in line
    monkeypatch.setattr(doctor, "examine", lambda model: iter([doctor.check_kernels(), doctor.check_gpu()]))
    for as_json in (False, True):
        assert doctor_command(argparse.Namespace(model=None, json=as_json)) == FAILED
    kernels, gpu, report = capsys.readouterr().out.split("\n", 2)
    assert kernels == f"fail  kernels       {line}"
    assert gpu == f"fail  gpu           {line}; driver None"
    assert [finding["value"] for finding in json.loads(report)["findings"]] == [line, f"{line}; driver None"]


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
