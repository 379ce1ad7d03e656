"""Limits of threads and memory are read from what the container says, in both cgroup versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedllm.runtime.device import ThreadLimits, read_memory_limits, read_thread_limits, torch_threads

MIB = 1 << 20


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def fake_proc(folder: Path) -> Path:
    return write(
        folder,
        meminfo="MemTotal:       8388608 kB\nMemFree: 100 kB\nMemAvailable:   6291456 kB\n",
        self__status="Name:\tpython\nVmData:\t 1048576 kB\nRssAnon:\t  524288 kB\n",
    )


def test_quota_of_cgroup_v2_limits_threads(tmp_path: Path) -> None:
    assert read_thread_limits(write(tmp_path, cpu_dot_max="150000 100000\n")).quota == 1.5
    assert read_thread_limits(write(tmp_path, cpu_dot_max="max 100000\n")).quota is None


def test_quota_of_cgroup_v1_limits_threads(tmp_path: Path) -> None:
    write(tmp_path, cpu__cpu_dot_cfs_quota_us="300000", cpu__cpu_dot_cfs_period_us="100000")
    assert read_thread_limits(tmp_path).quota == 3.0
    write(tmp_path, cpu__cpu_dot_cfs_quota_us="-1")
    assert read_thread_limits(tmp_path).quota is None


@pytest.mark.parametrize(("affinity", "quota", "expected"), [(8, None, 8), (8, 2.0, 2), (2, 16.0, 2), (8, 0.5, 1)])
def test_threads_are_the_smaller_of_affinity_and_quota(affinity: int, quota: float | None, expected: int) -> None:
    assert ThreadLimits(affinity, quota).num_threads == expected


def test_memory_without_a_container_is_the_machines(tmp_path: Path) -> None:
    limits = read_memory_limits(tmp_path / "none", fake_proc(tmp_path / "proc"))
    assert limits.total == 8192 * MIB
    assert limits.available == 6144 * MIB
    assert limits.reserved == 512 * MIB
    assert limits.free == 5632 * MIB


def test_memory_of_cgroup_v2_does_not_count_droppable_pages(tmp_path: Path) -> None:
    cgroup = write(
        tmp_path / "cgroup",
        memory_dot_max=str(2048 * MIB),
        memory_dot_current=str(1500 * MIB),
        memory_dot_stat=f"anon 5\ninactive_file {500 * MIB}\n",
    )
    limits = read_memory_limits(cgroup, fake_proc(tmp_path / "proc"))
    assert limits.total == 2048 * MIB
    assert limits.available == 1048 * MIB


def test_memory_of_cgroup_v1_is_read(tmp_path: Path) -> None:
    cgroup = write(
        tmp_path / "cgroup",
        memory__memory_dot_limit_in_bytes=str(2048 * MIB),
        memory__memory_dot_usage_in_bytes=str(1000 * MIB),
        memory__memory_dot_stat=f"total_inactive_file {0}\n",
    )
    assert read_memory_limits(cgroup, fake_proc(tmp_path / "proc")).available == 1048 * MIB


def test_the_callers_thread_count_comes_back_after_an_exception() -> None:
    before = torch.get_num_threads()

    def fail_inside() -> None:
        with torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert torch.get_num_threads() == before
