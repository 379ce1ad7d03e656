"""Builds and loads the emulated CUDA kernels, and reads what the emulator counted. Operators are `pagedllm_simt::*`."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "pagedllm" / "lib" / "libpagedllm_simt.so"
FORWARD, BACKWARD, RANDOM = range(3)  # the order in which ready threads and blocks run


class TensorTraffic(NamedTuple):
    begin: int
    end: int
    is_writable: bool
    bytes_read: int
    bytes_written: int


class Line(NamedTuple):
    """A load or store of the source: how many sectors or wavefronts its requests took, and how few are possible."""

    kind: str  # global_load, global_store, shared_load, shared_store
    place: str  # file:line
    requests: int
    units: int
    ideal: int


class CapturedLaunch(NamedTuple):
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: bytes


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("is_writable", ctypes.c_uint64),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("symbol", ctypes.c_char * 512),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint64),
    )


@contextlib.contextmanager
def only_builder_of(output: Path) -> Iterator[None]:
    """Waits for another run of the tests that builds the same; what it built is then up to date."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output.with_suffix(output.suffix + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, however the process ends
        yield


def build(root: Path = ROOT) -> Path:
    """Compiles what is stale."""
    environment = os.environ | {"PAGEDLLM_BUILD": "simt"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    with only_builder_of(root / "build" / LIBRARY.name):
        result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"the emulated kernels do not build:\n{result.stdout[-4000:]}\n{result.stderr[-8000:]}")
    return root / LIBRARY.relative_to(ROOT)


class Emulator:
    """The library's own interface; the library holds one emulated device."""

    def __init__(self, path: Path = LIBRARY) -> None:
        torch.ops.load_library(str(path))
        self._library = ctypes.CDLL(str(path))
        for name in ("simt_counter_names", "simt_profile_end", "simt_last_error", "pagedllm_signatures"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._counter_names = self._library.simt_counter_names().decode().split()

    def configure(self, order: int = FORWARD, seed: int = 1) -> None:
        self._library.simt_configure(order, ctypes.c_uint64(seed))

    def signatures(self) -> list[str]:
        """The schemas of the operators that the library implements."""
        return self._library.pagedllm_signatures().decode().splitlines()

    def counters(self) -> dict[str, int]:
        """Since the process began."""
        values = (ctypes.c_uint64 * len(self._counter_names))()
        self._library.simt_counters(values)
        return dict(zip(self._counter_names, values, strict=True))

    def traffic(self) -> dict[str, TensorTraffic]:
        """Of the last operator's tensors."""
        result = {}
        for index in range(self._library.simt_num_tensors()):
            t = _Tensor()
            self._library.simt_tensor(index, ctypes.byref(t))
            result[t.name.decode()] = TensorTraffic(t.begin, t.end, bool(t.is_writable), t.bytes_read, t.bytes_written)
        return result

    def profile_begin(self) -> None:
        self._library.simt_profile_begin()

    def profile_end(self) -> list[Line]:
        rows = [line.split() for line in self._library.simt_profile_end().decode().splitlines()]
        return [Line(kind, place, int(r), int(u), int(i)) for kind, place, r, u, i in rows]

    def capture_begin(self) -> None:
        """From here on launches are recorded instead of run."""
        self._library.simt_capture_begin()

    def capture_end(self) -> list[CapturedLaunch]:
        launches = []
        for index in range(self._library.simt_capture_end()):
            launch = _Launch()
            self._library.simt_captured(index, ctypes.byref(launch))
            params = ctypes.string_at(launch.params, launch.params_bytes)
            grid, block = tuple(launch.grid), tuple(launch.block)
            launches.append(CapturedLaunch(launch.symbol.decode(), grid, block, launch.shared_bytes, params))
        return launches

    def replay(self) -> None:
        """Runs what was captured, with its parameters as they were and its tensors as they are."""
        if self._library.simt_replay() != 0:
            raise RuntimeError(self._library.simt_last_error().decode())
