"""Where tensors live and kernels run. ModelRunner and the sizing know a GPU by this interface only, so that tests can
put one in its place that has no more than a CPU.

The host shares memory with numpy: nothing is copied. A GPU gets a step's numbers in one copy out of pinned memory,
gives results back in the background, says what its memory holds, and records decode steps as graphs. All that it is
given it does in order, on one stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedllm.errors import NotEnoughMemoryError, NotSupportedError
from pagedllm.model.host_memory import DeviceMemory, HostMemory, Memory, aligned
from pagedllm.ops.library import CUDA_LIBRARY

OLDEST_CAPABILITY = (8, 0)  # of the kernels: cp.async, bfloat16 on tensor cores
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Bytes of a device."""

    total: int
    free: int  # that anybody could still allocate
    allocated: int  # by this process's tensors
    peak: int  # the most that was allocated since `reset_peak`


class Graph(Protocol):
    def replay(self) -> None:
        """Runs what was captured, on the tensors that it was captured on."""


class ComputeDevice(ABC):
    name: str  # for people
    torch_device: torch.device
    is_gpu: bool

    @abstractmethod
    def allocate(self, num_bytes: int) -> Memory:
        """Zeros for weights or KV cache."""

    @abstractmethod
    def stager(self, num_bytes: int | None = None) -> Stager:
        """num_bytes: of one that never moves; None: it grows as needed."""

    @abstractmethod
    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Array]]:
        """Starts to bring tensors to the host; what it returns waits until they are there, and gives them."""


class Gpu(ComputeDevice):
    is_gpu = True

    def allocate(self, num_bytes: int) -> Memory:
        return DeviceMemory(num_bytes, self.torch_device)

    def stager(self, num_bytes: int | None = None) -> Stager:
        return CopyingStager(self, num_bytes)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Array]]:
        """Into pinned memory of its own, which no other step writes to."""
        ends = np.cumsum([aligned(tensor.nbytes) for tensor in tensors]).tolist()
        host = self.pinned(ends[-1])
        places, wait = [], _nothing
        for tensor, end in zip(tensors, ends, strict=True):
            begin = end - aligned(tensor.nbytes)
            place = host[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            wait = self.copy(place, tensor)
            places.append(place.numpy())

        def take() -> list[Array]:
            wait()  # for the last one: copies are made in order
            return places

        return take

    @abstractmethod
    def pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, which the device can copy from and to in the background."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Starts a copy between pinned memory and the device; what it returns waits for its end."""

    @abstractmethod
    def memory(self) -> MemoryState: ...

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def trim(self) -> None:
        """Waits for all kernels, and gives memory that no tensor uses back to the device."""

    @abstractmethod
    def capture(self, run: Callable[[], object]) -> Graph:
        """`run` must have run before, must allocate nothing that outlives it, and must not wait for the device."""


class HostDevice(ComputeDevice):
    name, torch_device, is_gpu = "cpu", torch.device("cpu"), False

    def allocate(self, num_bytes: int) -> Memory:
        return HostMemory(num_bytes)

    def stager(self, num_bytes: int | None = None) -> Stager:
        return SharingStager()

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Array]]:
        arrays = [tensor.numpy() for tensor in tensors]
        return lambda: arrays


class Stager(ABC):
    """Brings a step's arrays to the device. Tensors are good until the next call."""

    @abstractmethod
    def stage(self, arrays: Sequence[Array]) -> list[Tensor]: ...


class SharingStager(Stager):
    """The device is the host: tensors over the arrays."""

    def stage(self, arrays: Sequence[Array]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]


class CopyingStager(Stager):
    """All arrays side by side in pinned memory, and one copy. Arrays of the same shapes come to the same places.

    There is one buffer, and `stage` waits for the last copy out of it. A second buffer would gain nothing: that copy is
    over when the kernels of its step begin, and the step after is staged while they run. On the device the next copy
    comes after the kernels that read what the last one brought.
    """

    def __init__(self, device: Gpu, num_bytes: int | None) -> None:
        self._device = device
        self._is_fixed = num_bytes is not None
        self._wait: Callable[[], None] = _nothing
        self._make_room(num_bytes or 1)

    def stage(self, arrays: Sequence[Array]) -> list[Tensor]:
        if not arrays:
            return []
        ends = np.cumsum([aligned(array.nbytes) for array in arrays]).tolist()
        total = ends[-1]
        self._wait()
        if total > len(self._host):
            assert not self._is_fixed, f"{total} bytes wanted of {len(self._host)}"
            self._make_room(2 * total)
        bytes_of_host = self._host.numpy()
        tensors = []
        for array, end in zip(arrays, ends, strict=True):
            begin = end - aligned(array.nbytes)
            bytes_of_host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            view = self._there[begin : begin + array.nbytes]
            tensors.append(view.view(torch.from_numpy(array[:0]).dtype).view(array.shape))
        self._wait = self._device.copy(self._there[:total], self._host[:total])
        return tensors

    def _make_room(self, num_bytes: int) -> None:
        self._host = self._device.pinned(num_bytes)
        self._there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)


def _nothing() -> None:
    pass


class CudaDevice(Gpu):
    def __init__(self, index: int) -> None:
        """`open_device` has looked whether it can be used."""
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self._graph_pool: Any = None

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event.synchronize

    def memory(self) -> MemoryState:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryState(
            total,
            free,
            torch.cuda.memory_allocated(self.torch_device),
            torch.cuda.max_memory_allocated(self.torch_device),
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def trim(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def capture(self, run: Callable[[], object]) -> Graph:
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.torch_device), torch.cuda.graph(graph, pool=self._graph_pool):
            run()
        return graph


def wants_cuda(device: str) -> bool:
    """Whether `device` means a GPU: "auto" does where torch and the kernels are built for CUDA."""
    if device == "auto":
        return torch.version.cuda is not None and CUDA_LIBRARY.exists()
    return device.partition(":")[0] == "cuda"


def open_device(device: str) -> ComputeDevice:
    """The device of an engine. NotSupportedError where it cannot be used: what was found, what is wanted."""
    number = device.partition(":")[2] or "0"
    if device not in ("auto", "cpu") and not (wants_cuda(device) and number.isdecimal()):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    return _open_cuda(device, int(number), "pass device='cpu', or") if wants_cuda(device) else HostDevice()


def _open_cuda(device: str, index: int, way_out: str) -> CudaDevice:
    if torch.version.cuda is None:
        raise NotSupportedError(
            f"device={device!r} needs a torch that is built for CUDA, this is torch {torch.__version__}: {way_out} "
            "install one"
        )
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        reason = str(error).splitlines()[0]
        raise NotSupportedError(
            f"device={device!r} finds no usable GPU and driver ({reason}): {way_out} mend that"
        ) from error
    if index >= count:
        raise NotSupportedError(f"device={device!r} wants GPU {index}, {count} are here: {way_out} name one of these")
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST_CAPABILITY:
        raise NotSupportedError(
            f"device={device!r} finds {torch.cuda.get_device_name(index)} of compute capability {found[0]}.{found[1]}, "
            f"the kernels need {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]}: {way_out} take a newer GPU"
        )
    return CudaDevice(index)


def out_of_memory(device: ComputeDevice, error: torch.OutOfMemoryError) -> NotEnoughMemoryError:
    """In one line."""
    reason = str(error).split(". ")[0].splitlines()[0]
    return NotEnoughMemoryError(
        f"{device.name} is out of memory ({reason}): take a smaller model, max_num_batched_tokens, max_num_seqs or "
        "gpu_memory_utilization, or end what else uses the GPU"
    )
