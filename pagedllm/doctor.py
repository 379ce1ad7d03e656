"""`pagedllm doctor`: does this machine run pagedllm as it should? One Finding a line, each with what to do about it.

With a model: whether that is understood and fits, from its headers; nothing large is read and nothing is converted.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagedllm.errors import PagedLLMError

REQUIRED = {"torch": (2, 10), "transformers": (4, 57), "safetensors": (0, 5), "numpy": (1, 26), "tqdm": (4, 66)}
EXTRAS = {  # module -> extra, what needs it
    "gguf": ("gguf", "GGUF files"),
    "pyarrow": ("tables", "Parquet files"),
    "matplotlib": ("charts", "reports with charts"),
}
GIB = 1 << 30
MIN_FREE_BYTES = 1 * GIB
MIN_CACHE_BYTES = 1 * GIB  # a conversion of a small model
KV_SHARE = 0.2  # of the free memory, for what is not weights
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Literal["ok", "warn", "fail"]
    what: str
    value: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict:<5} {self.what:<13} {self.value}"
        return f"{line} -> {self.advice}" if self.advice else line


def examine(model: str | None = None) -> Iterator[Finding]:
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
    yield check_cache()
    yield from check_extras()
    yield check_self_test()
    if model is not None:
        yield from check_model(model)


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
    """The GPU and its driver, as torch sees them; none is fine."""
    import torch

    from pagedllm.ops.library import CUDA_LIBRARY
    from pagedllm.runtime.compute_device import load_kernels_of, open_device

    driver = _driver_version()
    if torch.version.cuda is None:
        if driver is None:
            return Finding("ok", "gpu", "none; the CPU is used")
        value = f"NVIDIA driver {driver}, but torch {torch.__version__} was built without CUDA"
        return Finding("warn", "gpu", value, "install a CUDA build of torch to use the GPU; the CPU is used")
    if not torch.cuda.is_available():
        value = f"torch for CUDA {torch.version.cuda} finds no GPU, driver {driver or 'not loaded'}"
        return Finding("warn", "gpu", value, "load the NVIDIA driver, or pass device='cpu'")
    try:
        device = open_device("cuda")
        load_kernels_of(device, "auto")
    except PagedLLMError as error:
        # without the library device="auto" takes the CPU
        return Finding("fail" if CUDA_LIBRARY.exists() else "warn", "gpu", f"{error}; driver {driver}")
    properties = torch.cuda.get_device_properties(device.torch_device)
    value = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / GIB:.0f} GiB"
    return Finding("ok", "gpu", f"{value}, driver {driver}, CUDA {torch.version.cuda}")


def _driver_version() -> str | None:
    try:
        text = NVIDIA_DRIVER.read_text()
    except OSError:
        return None
    version = re.search(r"\d+\.\d+(\.\d+)?", text)
    return version[0] if version else "unknown"


def check_threads() -> Finding:
    from pagedllm.runtime.device import read_thread_limits

    limits = read_thread_limits()
    quota = "none" if limits.quota is None else f"{limits.quota:.1f}"
    return Finding("ok", "threads", f"affinity {limits.affinity}, quota {quota} -> {limits.num_threads}")


def check_memory() -> Finding:
    from pagedllm.runtime.device import read_memory_limits

    limits = read_memory_limits()
    billions = limits.free * (1 - KV_SHARE) / 2 / 1e9
    value = (
        f"{limits.free / GIB:.1f} GiB free of {limits.total / GIB:.1f} GiB: "
        f"models up to {billions:.1f} billion parameters in bfloat16"
    )
    if limits.free < MIN_FREE_BYTES:
        return Finding("warn", "memory", value, "end other programs, or raise the container's limit")
    return Finding("ok", "memory", value)


def check_cache() -> Finding:
    from pagedllm.model.cache_folder import cache_folder, list_conversions, room_in

    folder, conversions = cache_folder(), list_conversions()
    total = sum(conversion.num_bytes for conversion in conversions)
    value = f"{folder}: {total / GIB:.1f} GiB in {len(conversions)} converted models"
    room = room_in(folder)
    if room is None:
        return Finding("warn", "cache", f"{value}, cannot be written", "set PAGEDLLM_CACHE to a folder that can be")
    value += f", {room / GIB:.1f} GiB free"
    if room < MIN_CACHE_BYTES:
        return Finding("warn", "cache", value, "make room (pagedllm cache clear), or set PAGEDLLM_CACHE")
    return Finding("ok", "cache", value)


def check_extras() -> Iterator[Finding]:
    for name, (extra, purpose) in EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield Finding("warn", name, f"missing: no {purpose}", f"pip install 'pagedllm[{extra}]'")
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


def check_model(model: str) -> Iterator[Finding]:
    """Whether this version understands the model, whether it fits, and as what it is computed."""
    from pagedllm.config import EngineConfig
    from pagedllm.runtime.footprint import look_at

    try:
        checkpoint, footprint = look_at(EngineConfig(model=model))
    except (PagedLLMError, ValueError) as error:
        yield Finding("fail", "model", str(error))
        return
    yield Finding("ok", "model", f"{model}: {checkpoint.config['architectures'][0]}")
    if footprint.fits:
        yield Finding("ok", "fit", str(footprint))
    else:
        yield Finding("fail", "fit", str(footprint), "end other programs, lower max_model_len, or take a smaller model")
    yield Finding("ok", "dtype", f"stored as {footprint.stored.kind}, computed as {footprint.dtype}{_how_computed()}")


def _how_computed() -> str:
    from pagedllm.ops.library import load_kernels
    from pagedllm.runtime.compute_device import wants_cuda

    if wants_cuda("auto"):
        return ""
    if load_kernels().name == "avx512_bf16":
        return ", by this CPU's own bfloat16 products"
    return ", widened to float32 in the kernels: this CPU has no bfloat16 products"
