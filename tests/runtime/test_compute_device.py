"""Devices: which one is meant, why one cannot be used, and how a step's arrays get there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedllm.config import EngineConfig
from pagedllm.errors import NotSupportedError
from pagedllm.runtime.compute_device import HostDevice, open_device, out_of_memory
from tests.fake_gpu import FakeGpu


def pretend(monkeypatch: pytest.MonkeyPatch, count: int = 1, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Thing")


def test_auto_is_the_cpu_where_torch_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert isinstance(open_device("auto"), HostDevice)
    assert isinstance(open_device("cpu"), HostDevice)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:-1", "cpu:0", ""])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got '{device}'"):
        open_device(device)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NotSupportedError) as caught:
        open_device("cuda")
    assert str(caught.value).startswith(
        f"device='cuda' needs a torch that is built for CUDA, this is torch {torch.__version__}: pass device='cpu'"
    )


def test_a_missing_driver_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check ...")

    pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(NotSupportedError) as caught:
        open_device("cuda")
    assert str(caught.value) == (
        "device='cuda' finds no usable GPU and driver (Found no NVIDIA driver on your system.): pass device='cpu', or "
        "mend that"
    )


def test_a_number_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=2)
    with pytest.raises(NotSupportedError, match="device='cuda:2' wants GPU 2, 2 are here"):
        open_device("cuda:2")


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability=(7, 5))
    with pytest.raises(NotSupportedError, match=r"NVIDIA Thing of compute capability 7\.5, the kernels need 8\.0"):
        open_device("cuda:0")


def test_a_gpu_that_can_be_used_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    device = open_device("cuda")
    assert (device.name, device.torch_device, device.is_gpu) == ("NVIDIA Thing", torch.device("cuda", 0), True)


def test_out_of_memory_is_one_line() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total ...\nMore")
    assert str(out_of_memory(FakeGpu(), error)) == (
        "Fake GPU is out of memory (CUDA out of memory): take a smaller model, max_num_batched_tokens, max_num_seqs or "
        "gpu_memory_utilization, or end what else uses the GPU"
    )


def test_nondeterminism_is_refused_on_a_cpu_only() -> None:
    assert EngineConfig(model="m", device="cuda", deterministic=False).deterministic is False
    with pytest.raises(ValueError, match="deterministic=False is refused on a CPU"):
        EngineConfig(model="m", deterministic=False)


def test_arrays_are_staged_in_one_copy_and_keep_their_places() -> None:
    gpu = FakeGpu()
    stager = gpu.stager(1 << 12)
    arrays = [np.arange(5, dtype=np.int32), np.zeros((0, 3), np.int64), np.array([[1.5, 2.0]], np.float32)]
    first = stager.stage(arrays)
    assert gpu.num_copies == 1
    for tensor, array in zip(first, arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == 0
    again = stager.stage([array + 1 for array in arrays])
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in first]
    assert again[0].tolist() == [1, 2, 3, 4, 5]


def test_a_stager_grows_and_a_fixed_one_does_not() -> None:
    gpu = FakeGpu()
    assert gpu.stager().stage([np.arange(10_000)])[0].tolist() == list(range(10_000))
    with pytest.raises(AssertionError, match="80000 bytes wanted of 64"):
        gpu.stager(64).stage([np.arange(10_000)])
