"""What this machine gives us: threads and memory, as the operating system and the container limit them.

Reads /proc and the cgroup files; knows nothing of models. All sizes are bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ThreadLimits:
    affinity: int  # CPUs this process may run on
    quota: float | None  # CPUs' worth of time the container may use, None = unlimited

    @property
    def num_threads(self) -> int:
        if self.quota is None:
            return self.affinity
        return max(1, min(self.affinity, int(self.quota)))


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    total: int  # of the machine or the container, whichever is smaller
    available: int  # what can still be taken without swapping or being killed
    reserved: int  # part of it that this process has mapped but not touched: another engine's pool, say

    @property
    def free(self) -> int:
        return max(0, self.available - self.reserved)


def read_thread_limits(cgroup: Path = CGROUP_ROOT) -> ThreadLimits:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadLimits(affinity, _read_cpu_quota(cgroup))


def _read_cpu_quota(cgroup: Path) -> float | None:
    v2 = _read_text(cgroup / "cpu.max")
    if v2 is not None:
        quota, period = v2.split()
        return None if quota == "max" else int(quota) / int(period)
    quota_v1 = _read_text(cgroup / "cpu/cpu.cfs_quota_us")
    period_v1 = _read_text(cgroup / "cpu/cpu.cfs_period_us")
    if quota_v1 is None or period_v1 is None or int(quota_v1) <= 0:
        return None
    return int(quota_v1) / int(period_v1)


def read_memory_limits(cgroup: Path = CGROUP_ROOT, proc: Path = PROC) -> MemoryLimits:
    """The machine's memory, cut down to the container's where that is smaller."""
    machine = _read_table(proc / "meminfo")
    total, available = machine["MemTotal"] * 1024, machine["MemAvailable"] * 1024
    limit, used = _read_cgroup_memory(cgroup)
    if limit is not None and limit < total:
        total, available = limit, min(available, max(0, limit - used))
    process = _read_table(proc / "self/status")
    reserved = max(0, process["VmData"] - process["RssAnon"]) * 1024
    return MemoryLimits(total, available, reserved)


def _read_cgroup_memory(cgroup: Path) -> tuple[int | None, int]:
    """(limit or None, bytes used that the kernel cannot drop)."""
    for limit_name, usage_name, stat_name, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        limit, usage = _read_text(cgroup / limit_name), _read_text(cgroup / usage_name)
        if limit is None or usage is None:
            continue
        if limit == "max":
            return None, 0
        droppable = _read_table(cgroup / stat_name).get(cache_key, 0)
        return int(limit), max(0, int(usage) - droppable)
    return None, 0


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_table(path: Path) -> dict[str, int]:
    """Lines of "name value ..." or "name: value ..." whose value is a number."""
    table = {}
    for line in (_read_text(path) or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            table[words[0]] = int(words[1])
    return table


@contextlib.contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Runs the block with torch's thread count set, and puts the caller's count back."""
    before = torch.get_num_threads()
    if before == num_threads:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
