"""What doctor finds, and what it says to do."""

from __future__ import annotations

import importlib.metadata

import pytest

from pagedllm import doctor, self_test
from pagedllm.runtime.device import MemoryLimits, ThreadLimits


def test_a_finding_is_verdict_what_value_and_advice():
    assert str(doctor.Finding("ok", "torch", "2.13.0")) == "ok    torch         2.13.0"
    assert str(doctor.Finding("warn", "gguf", "missing", "install it")) == "warn  gguf          missing -> install it"


def test_this_machine_is_well():
    findings = {finding.what: finding for finding in doctor.examine()}
    assert [f"{finding}" for finding in findings.values() if finding.verdict == "fail"] == []
    assert set(findings) >= {"platform", "torch", "transformers", "kernels", "gpu", "threads", "memory"}
    assert set(findings) >= {"cache", "gguf", "self-test"}
    assert findings["self-test"].value == "3 tokens equal to the reference, in bfloat16 and float32"


def test_a_missing_library_is_a_failure_with_the_build_command(monkeypatch, tmp_path):
    monkeypatch.setattr("pagedllm.ops.library.LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr("torch.ops.loaded_libraries", set())
    finding = doctor.check_kernels()
    assert finding.verdict == "fail"
    assert "do not exist; build them: pip install" in finding.value
    assert doctor.check_self_test().verdict == "fail"


def test_a_forced_instruction_set_is_a_warning(monkeypatch):
    monkeypatch.setenv("PAGEDLLM_KERNELS", "reference")
    finding = doctor.check_kernels()
    assert (finding.verdict, finding.value) == ("warn", "reference, forced by PAGEDLLM_KERNELS")


def test_kernels_that_give_other_tokens_fail_the_self_test(monkeypatch):
    monkeypatch.setattr(self_test, "generate_tokens", lambda kernels, dtype: [1, 2, 3 if kernels == "auto" else 4])
    finding = doctor.check_self_test()
    assert finding.verdict == "fail"
    assert finding.value == "bfloat16: the kernels give tokens [1, 2, 3], the reference [1, 2, 4]"


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("2.9.1", "fail  torch         2.9.1 -> pip install 'torch>=2.10'"),
        ("2.10.0+cpu", "ok    torch         2.10.0+cpu"),
        (None, "fail  torch         missing -> pip install 'torch>=2.10'"),
    ],
)
def test_versions_are_compared_as_numbers(monkeypatch, version, line):
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    assert str(next(doctor.check_versions())) == line


def test_nothing_that_needs_torch_is_tried_without_it(monkeypatch):
    monkeypatch.setattr(doctor, "check_versions", lambda: iter([doctor.Finding("fail", "torch", "missing")]))
    assert [finding.what for finding in doctor.examine()] == ["platform", "torch"]


def test_threads_tell_affinity_and_quota(monkeypatch):
    monkeypatch.setattr("pagedllm.runtime.device.read_thread_limits", lambda: ThreadLimits(8, 2.0))
    assert doctor.check_threads().value == "affinity 8, quota 2.0 -> 2"


def test_little_memory_is_a_warning(monkeypatch):
    limits = MemoryLimits(total=4 << 30, available=1 << 30, reserved=1 << 29)
    monkeypatch.setattr("pagedllm.runtime.device.read_memory_limits", lambda: limits)
    finding = doctor.check_memory()
    assert (finding.verdict, finding.value) == (
        "warn",
        "0.5 GiB free of 4.0 GiB: models up to 0.2 billion parameters in bfloat16",
    )


def test_a_missing_extra_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [str(finding) for finding in doctor.check_extras()] == [
        "warn  gguf          missing: no GGUF files -> pip install 'pagedllm[gguf]'",
        "warn  pyarrow       missing: no Parquet files -> pip install 'pagedllm[tables]'",
        "warn  matplotlib    missing: no reports with charts -> pip install 'pagedllm[charts]'",
    ]


def test_a_driver_without_a_torch_for_it_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr("torch.version.cuda", None)
    assert str(doctor.check_gpu()) == "ok    gpu           none; the CPU is used"
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    finding = doctor.check_gpu()
    assert finding.verdict == "warn"
    assert finding.value.startswith("NVIDIA driver 580.65.06, but torch ")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.check_gpu().value == "torch for CUDA 13.0 finds no GPU, driver 580.65.06"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA Thing")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (7, 5))
    assert doctor.check_gpu().value.startswith(
        "device='cuda' finds NVIDIA Thing of compute capability 7.5, the kernels need 8.0"
    )


def test_the_cache_tells_its_size_and_whether_it_can_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDLLM_CACHE", str(tmp_path / "cache"))
    assert str(doctor.check_cache()).startswith(
        f"ok    cache         {tmp_path}/cache: 0.0 GiB in 0 converted models, "
    )
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGEDLLM_CACHE", str(tmp_path / "file" / "cache"))
    finding = doctor.check_cache()
    assert finding.verdict == "warn"
    assert finding.value.endswith("0 converted models, cannot be written")
    monkeypatch.setattr("pagedllm.model.cache_folder.room_in", lambda folder: 1 << 20)
    assert doctor.check_cache().advice == "make room (pagedllm cache clear), or set PAGEDLLM_CACHE"


def test_a_model_adds_what_it_is_whether_it_fits_and_its_dtype(monkeypatch, demo_gguf, tmp_path):
    monkeypatch.setenv("PAGEDLLM_CACHE", str(tmp_path / "cache"))
    model, fit, dtype = doctor.check_model(str(demo_gguf))
    assert (model.verdict, model.value) == ("ok", f"{demo_gguf}: LlamaForCausalLM")
    assert (fit.what, fit.verdict) == ("fit", "ok")
    assert "in memory as bfloat16, + 45.0 MiB KV for one 2,048-token request; available" in fit.value
    assert dtype.value.startswith("stored as 4-bit, computed as bfloat16, ")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(
        "pagedllm.runtime.footprint.read_memory_limits", lambda: MemoryLimits(1 << 20, 1 << 20, reserved=0)
    )
    _, fit, _ = doctor.check_model(str(demo_gguf))
    assert fit.verdict == "fail"
    assert fit.value.endswith("available 1.0 MiB: does not fit")
    assert fit.advice
    (finding,) = doctor.check_model("no-such-folder")
    assert (finding.verdict, finding.what) == ("fail", "model")
    assert "no-such-folder does not exist" in finding.value
