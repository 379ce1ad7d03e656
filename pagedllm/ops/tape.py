"""Tape: kernel calls recorded once and run again in one call, without Python or torch's dispatcher between them.

Holds pointers, not tensors: whoever records sees to it that every tensor that a kernel was given stays where it is,
and refills the inputs in place. Only operators of the "pagedllm" namespace on CPU tensors are recorded; what torch
computes in between is not. csrc/bindings/tape.h is the other half.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path


class Tape:
    def __init__(self, library: Path) -> None:
        """library: the kernels in use, `KernelSet.path`."""
        kernels = ctypes.CDLL(str(library))  # loaded already: this is a handle to it
        kernels.pagedllm_tape_new.restype = ctypes.c_void_p
        for function in (kernels.pagedllm_tape_record, kernels.pagedllm_tape_run, kernels.pagedllm_tape_delete):
            function.argtypes, function.restype = [ctypes.c_void_p], None
        self._kernels = kernels
        self._tape: int = kernels.pagedllm_tape_new()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Kernels that this thread calls in the block run as ever, and are added to the tape."""
        self._kernels.pagedllm_tape_record(self._tape)
        try:
            yield
        finally:
            self._kernels.pagedllm_tape_record(None)

    def run(self) -> None:
        """All recorded calls, in order; the interpreter lock is released."""
        self._kernels.pagedllm_tape_run(self._tape)

    def __del__(self) -> None:
        if hasattr(self, "_tape"):
            self._kernels.pagedllm_tape_delete(self._tape)
