"""What a run on a GPU and its rehearsal differ in, all of it: the device, the clock, the sizes, how memory runs out.

Stages know a Target. Only compute-sanitizer, which needs a GPU, makes one of them ask which it is.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pagedllm import LLM
from pagedllm.ops.library import CUDA_LIBRARY, KernelSet, load_cuda_kernels, load_kernels
from pagedllm.runtime.compute_device import CudaDevice, Gpu
from tests.device.sizes import ON_A_GPU, REHEARSED, Sizes
from tests.fake_gpu import FakeGpu
from tests.simt.emulator import build


class Target(ABC):
    is_rehearsal: bool
    operators_on: str  # of the tests' option
    sizes: Sizes
    namespace: str  # of the operators
    device: torch.device
    settings: dict[str, Any]  # of an LLM that runs here

    @abstractmethod
    def load(self) -> KernelSet:
        """Loads the kernels, or raises LibraryError."""

    @abstractmethod
    def card(self) -> str: ...

    @abstractmethod
    def gpu(self) -> Gpu:
        """To ask about memory, and to capture with."""

    @abstractmethod
    def opening(self) -> contextlib.AbstractContextManager[Any]:
        """Engines that are made within are made for this device."""

    @abstractmethod
    def starved(self) -> contextlib.AbstractContextManager[Any]:
        """Next to no memory can be allocated within."""

    @abstractmethod
    def mark(self) -> Any:
        """Where the device is when it has done what it was given so far."""

    @abstractmethod
    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that the device has passed."""

    @abstractmethod
    def synchronize(self) -> None: ...

    def llm(self, model: Path, **settings: Any) -> LLM:
        with self.opening():
            return LLM(str(model), **{**self.settings, **settings})

    def median(self, run: Callable[[], object]) -> float:
        """Seconds on the device of one of several runs, after some that warm up."""
        for _ in range(self.sizes.num_warm_ups):
            run()
        marks = []
        for _ in range(self.sizes.num_runs):
            begin = self.mark()
            run()
            marks.append((begin, self.mark()))
        self.synchronize()
        return statistics.median(self.between(begin, end) for begin, end in marks)

    def median_captured(self, run: Callable[[], object]) -> float:
        """As a graph, so that what Python takes to start kernels is not in it."""
        run()
        graph = self.gpu().capture(run)
        return self.median(graph.replay)


class CudaTarget(Target):
    is_rehearsal, operators_on, sizes, namespace = False, "cuda", ON_A_GPU, "pagedllm"

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.settings = {"device": "cuda"}

    def load(self) -> KernelSet:
        return load_cuda_kernels()

    def card(self) -> str:
        found = torch.cuda.get_device_properties(self.device)
        return (
            f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} SMs, "
            f"{found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, "
            f"library of {CUDA_LIBRARY.stat().st_size:,} bytes"
        )

    def gpu(self) -> Gpu:
        return CudaDevice(0)

    def opening(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def starved(self) -> Iterator[None]:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        held = torch.cuda.memory_reserved(self.device)
        torch.cuda.set_per_process_memory_fraction((held + 4096) / total, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class RehearsalTarget(Target):
    is_rehearsal, operators_on, sizes, namespace = True, "copies", REHEARSED, "pagedllm_simt"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.settings = {"device": "cpu", "kernels": "simt", "num_threads": 1}
        self._gpu = FakeGpu()

    def load(self) -> KernelSet:
        build()
        return load_kernels("simt")

    def card(self) -> str:
        return f"{self._gpu.name}: the CUDA kernels' emulation on a CPU"

    def gpu(self) -> Gpu:
        return self._gpu

    def opening(self) -> contextlib.AbstractContextManager[Any]:
        return mock.patch("pagedllm.runtime.startup.open_device", return_value=self._gpu)

    @contextlib.contextmanager
    def starved(self) -> Iterator[None]:
        with mock.patch.object(self._gpu, "used_by_others", self._gpu.total - self._gpu.allocated - 4096):
            yield

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def synchronize(self) -> None:
        pass
