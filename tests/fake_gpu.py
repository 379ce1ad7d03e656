"""A GPU that is none: the CUDA kernels' emulation on the CPU behind the interface of a GPU.

Its memory has a size, and counts what is taken from it by `allocate`; copies to it are counted; graphs are torch's
operators recorded at capture and run again on the same storages.

Kernels run at once, so what a real device does later is played by its copies. One to the host leaves POISON there until
it has been waited for; what one to the device reads must not change until that, or anything after it, has been waited
for. Inside `no_reads` the host may read nothing but its own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from pagedllm.model.host_memory import DeviceMemory, Memory
from pagedllm.runtime.compute_device import Gpu, Graph, MemoryState

GIB = 1 << 30
POISON = 0x7F  # of each byte: token ids of 2,139,062,143
HOST_READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


@dataclass(eq=False)
class Copy:
    """One that was started. On the host: `place`, pinned memory; `value`: what is brought there, or was read there."""

    place: Tensor
    value: Tensor
    is_to_host: bool

    def finish(self) -> None:
        if self.is_to_host:
            self.place.copy_(self.value)
        else:
            assert torch.equal(self.place, self.value), "pinned memory was written to before a copy had read it"


class FakeGpu(Gpu):
    def __init__(self, total: int = 8 * GIB, used_by_others: int = 1 * GIB, step_bytes: int = 1 * GIB) -> None:
        """step_bytes: what a step seems to take besides what `allocate` gave."""
        self.name, self.torch_device = "Fake GPU", torch.device("cpu")
        self.total, self.used_by_others, self.step_bytes = total, used_by_others, step_bytes
        self.memories: list[Memory] = []
        self.num_copies = self.num_fetches = self.num_trims = 0  # copies to the device
        self.graphs: list[RecordedGraph] = []
        self.copies: list[Copy] = []  # not waited for, in order
        self._pinned: list[Tensor] = []  # all there ever was: no other tensor gets such an address

    def allocate(self, num_bytes: int) -> Memory:
        if num_bytes > self.memory().free:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes. More words.")
        memory = super().allocate(num_bytes)
        self.memories.append(memory)
        return memory

    @property
    def allocated(self) -> int:
        assert all(isinstance(memory, DeviceMemory) for memory in self.memories)
        return sum(memory._bytes.untyped_storage().nbytes() for memory in self.memories)

    def memory(self) -> MemoryState:
        allocated = self.allocated
        free = self.total - self.used_by_others - allocated
        return MemoryState(self.total, free, allocated, allocated + self.step_bytes)

    def reset_peak(self) -> None:
        pass

    def pinned(self, num_bytes: int) -> Tensor:
        self._pinned.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._pinned[-1]

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == pinned.data_ptr() for pinned in self._pinned)

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        is_to_host = self.is_pinned(target)
        assert is_to_host != self.is_pinned(source)
        self.num_copies += not is_to_host
        self.num_fetches += is_to_host
        copy = Copy(target if is_to_host else source, source.clone(), is_to_host)
        if is_to_host:
            target.view(-1).view(torch.uint8).fill_(POISON)
        else:
            target.copy_(source)
        self.copies.append(copy)

        def wait() -> None:
            while copy in self.copies:
                self.copies.pop(0).finish()

        return wait

    @contextmanager
    def no_reads(self) -> Iterator[None]:
        """Within it a tensor's values can be read on the host only if it is pinned; those of arrays are the host's."""

        def guarded(name: str, read: Any) -> Any:
            def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                assert self.is_pinned(tensor), f"{name} of a tensor on the device, which would wait for it"
                return read(tensor, *args, **kwargs)

            return method

        with pytest.MonkeyPatch.context() as patch:
            for name in HOST_READS:
                patch.setattr(Tensor, name, guarded(name, getattr(Tensor, name)))
            yield

    def trim(self) -> None:
        self.num_trims += 1

    def capture(self, run: Callable[[], object]) -> Graph:
        graph = RecordedGraph()
        with graph:
            run()
        self.graphs.append(graph)
        return graph


class RecordedGraph(TorchDispatchMode):
    """Records operators while it is entered. What an operator returned is refilled in place by `replay`, so that the
    next one finds it where it was; reading a value of a tensor on the host is an error, as it is for CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.num_replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: a value is read by the host")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pointers(self) -> set[int]:
        """Of all tensors that the recorded operators were given."""
        found: set[int] = set()
        for _, args, kwargs, _ in self.calls:
            tree_map_only(Tensor, lambda tensor: found.add(tensor.data_ptr()), (args, kwargs))
        return found
