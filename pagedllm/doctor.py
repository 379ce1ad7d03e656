"""`pagedllm doctor`: does this machine run pagedllm as it should? One Finding a line, each with what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pagedllm.errors import PagedLLMError

REQUIRED = {"torch": (2, 10), "transformers": (4, 57), "safetensors": (0, 5), "numpy": (1, 26), "tqdm": (4, 66)}
EXTRAS = {"gguf": "GGUF files"}
GIB = 1 << 30
MIN_FREE_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Literal["ok", "warn", "fail"]
    what: str
    value: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict:<5} {self.what:<13} {self.value}"
        return f"{line} -> {self.advice}" if self.advice else line


def examine() -> Iterator[Finding]:
    """All findings, one by one as they are made; those that need a broken part are left out."""
    yield check_platform()
    versions = list(check_versions())
    yield from versions
    if any(finding.verdict == "fail" for finding in versions):
        return
    yield check_kernels()
    yield check_gpu()
    yield check_threads()
    yield check_memory()
    yield from check_extras()
    yield check_self_test()


def check_platform() -> Finding:
    system, machine, python = platform.system(), platform.machine(), platform.python_version()
    value = f"{system} {machine}, Python {python}"
    if system != "Linux":
        return Finding("fail", "platform", value, "pagedllm runs on Linux")
    if machine not in ("x86_64", "AMD64"):
        return Finding("warn", "platform", value, "only the generic kernels run here; x86-64 has faster ones")
    return Finding("ok", "platform", value)


def check_versions() -> Iterator[Finding]:
    for name, oldest in REQUIRED.items():
        wanted = ".".join(map(str, oldest))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", name, "missing", f"pip install '{name}>={wanted}'")
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
        if numbers < oldest:
            yield Finding("fail", name, version, f"pip install '{name}>={wanted}'")
        else:
            yield Finding("ok", name, version)


def check_kernels() -> Finding:
    from pagedllm.ops.library import INSTRUCTION_SETS, cpu_flags, load_kernels

    try:
        kernels = load_kernels()
    except (PagedLLMError, ValueError) as error:
        return Finding("fail", "kernels", str(error))
    forced = os.environ.get("PAGEDLLM_KERNELS")
    if forced:
        return Finding("warn", "kernels", f"{kernels.name}, forced by PAGEDLLM_KERNELS", "unset it to get the best")
    names = list(INSTRUCTION_SETS)
    better = names[: names.index(kernels.name)]
    if not better:
        return Finding("ok", "kernels", f"{kernels.name}, the fastest set")
    missing = ", ".join(sorted(INSTRUCTION_SETS[better[-1]] - cpu_flags()))
    return Finding("ok", "kernels", f"{kernels.name}; {better[-1]} needs {missing}, which this CPU lacks")


def check_gpu() -> Finding:
    """Whether device="cuda" would work; a machine without a GPU is in order."""
    import torch

    from pagedllm.ops.library import CUDA_LIBRARY, load_cuda_kernels
    from pagedllm.runtime.compute_device import open_device

    if torch.version.cuda is None:
        return Finding("ok", "gpu", f"not used: torch {torch.__version__} is built for CPUs")
    try:
        device = open_device("cuda")
        load_cuda_kernels()
    except PagedLLMError as error:
        is_asked_for = CUDA_LIBRARY.exists()  # else device="auto" takes the CPU
        return Finding("fail" if is_asked_for else "warn", "gpu", str(error))
    return Finding("ok", "gpu", f"{device.name}, torch {torch.__version__} for CUDA {torch.version.cuda}")


def check_threads() -> Finding:
    from pagedllm.runtime.device import read_thread_limits

    limits = read_thread_limits()
    quota = "none" if limits.quota is None else f"{limits.quota:g}"
    return Finding("ok", "threads", f"affinity {limits.affinity}, quota {quota} -> {limits.num_threads}")


def check_memory() -> Finding:
    from pagedllm.runtime.device import read_memory_limits

    limits = read_memory_limits()
    value = f"{limits.free / GIB:.1f} GiB free of {limits.total / GIB:.1f} GiB"
    if limits.free < MIN_FREE_BYTES:
        return Finding("warn", "memory", value, "end other programs, or raise the container's limit")
    return Finding("ok", "memory", value)


def check_extras() -> Iterator[Finding]:
    for name, purpose in EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield Finding("warn", name, f"missing: {purpose} cannot be read", f"pip install 'pagedllm[{name}]'")
        else:
            yield Finding("ok", name, f"{importlib.metadata.version(name)}, for {purpose}")


def check_self_test() -> Finding:
    """Generates with the kernels and with the Python references; both must give the same tokens."""
    from pagedllm.self_test import NUM_TOKENS, generate_tokens

    try:
        for dtype in ("bfloat16", "float32"):
            tokens, expected = generate_tokens("auto", dtype), generate_tokens("reference", dtype)
            if tokens != expected:
                value = f"{dtype}: the kernels give tokens {tokens}, the reference {expected}"
                return Finding("fail", "self-test", value, "build the kernels again, and report this line")
    except (PagedLLMError, ValueError, RuntimeError) as error:
        return Finding("fail", "self-test", str(error).splitlines()[0])
    return Finding("ok", "self-test", f"{NUM_TOKENS} tokens equal to the reference, in bfloat16 and float32")
