"""A GPU that is none: the CUDA kernels' emulation on the CPU behind the interface of a GPU.

Its memory has a size, and counts what is taken from it by `allocate`; copies to it are counted; graphs are torch's
operators recorded at capture and run again on the same storages.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from pagedllm.model.host_memory import DeviceMemory, Memory
from pagedllm.runtime.compute_device import Gpu, Graph, MemoryState

GIB = 1 << 30


# Operators whose results' shapes, or whose results, the host must know on a GPU.
READ_BY_HOST = (
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.bincount.default, torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default, torch.ops.aten._unique2.default, torch.ops.aten.equal.default,
    torch.ops.aten.repeat_interleave.Tensor,
)  # fmt: skip


class FakeGpu(Gpu):
    def __init__(
        self,
        total: int = 8 * GIB,
        used_by_others: int = 1 * GIB,
        step_bytes: int = 1 * GIB,
        graph_bytes: Callable[[int], int] = lambda index: 0,
    ) -> None:
        """step_bytes: what a step seems to take besides what `allocate` gave; graph_bytes: what the index-th graph of
        a pool does, until it is let go."""
        self.name, self.torch_device = "Fake GPU", torch.device("cpu")
        self.total, self.used_by_others, self.step_bytes = total, used_by_others, step_bytes
        self.memories: list[Memory] = []
        self.num_copies = self.num_trims = self.num_replays = 0
        self.graph_bytes = graph_bytes
        self._graphs: list[weakref.ref[RecordedGraph]] = []
        self.num_captured = 0

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

    @property
    def graphs(self) -> list[RecordedGraph]:
        """Those that are still held."""
        return [graph for reference in self._graphs if (graph := reference()) is not None]

    def memory(self) -> MemoryState:
        allocated = self.allocated
        free = self.total - self.used_by_others - allocated - sum(graph.num_bytes for graph in self.graphs)
        return MemoryState(self.total, free, allocated, allocated + self.step_bytes)

    def reset_peak(self) -> None:
        pass

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        self.num_copies += 1
        target.copy_(source)
        return lambda: None

    def trim(self) -> None:
        self.num_trims += 1

    def graph_pool(self) -> object:
        return itertools.count()

    def capture(self, run: Callable[[], object], pool: object) -> Graph:
        assert isinstance(pool, itertools.count)
        graph = RecordedGraph(self, self.graph_bytes(next(pool)))
        with graph:
            run()
        self._graphs.append(weakref.ref(graph))
        self.num_captured += 1
        return graph


class RecordedGraph(TorchDispatchMode):
    """Records operators while it is entered. What an operator returned is refilled in place by `replay`, so that the
    next one finds it where it was; what the host would have to read is an error, as it is for CUDA."""

    def __init__(self, gpu: FakeGpu, num_bytes: int) -> None:
        super().__init__()
        self.gpu, self.num_bytes = gpu, num_bytes
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func in READ_BY_HOST or by_mask:
            raise RuntimeError("operation not permitted when stream is capturing: a value is read by the host")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        self.gpu.num_replays += 1
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
