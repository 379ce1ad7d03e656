"""`python -m pagedllm.bench.startup MODEL`: from nothing to the first token, and the memory that is held by then.

Each run is a process of its own, with the default KV pool and with one of 1 GiB in turns, after a run that warms up the
system's cache of files. Seconds count from the process's first line: `import pagedllm`, `LLM(...)`, one token. Peak
memory (VmHWM) counts pages that were touched; beside it stand the packed weights and what is touched of the pool, and
what is left: Python, torch, kernels, buffers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median
from typing import Any

MB = 1e6
POOLS = {"default": None, "1 GiB": 1 << 30}
CHILD = """
import time
begin = time.perf_counter()
import json, sys
import pagedllm
imported = time.perf_counter()
model, pool_bytes = json.loads(sys.argv[1])
llm = pagedllm.LLM(model, kv_cache_memory_bytes=pool_bytes)
opened = time.perf_counter()
params = pagedllm.SamplingParams(temperature=0, max_tokens=1)
llm.generate("The capital of France is", params, use_tqdm=False)
end = time.perf_counter()
from pagedllm.bench.startup import memory_of
seconds = dict(zip(("import", "constructor", "first token", "in all"),
                   (imported - begin, opened - imported, end - opened, end - begin)))
print(json.dumps({"seconds": seconds, "phases": llm._assembly.runtime.seconds, **memory_of(llm)}))
"""


def memory_of(llm: Any) -> dict[str, int]:
    """Bytes of this process at its peak, of the packed weights, of the pool, and touched of the pool."""
    runner = llm._assembly.runtime.runner
    with open("/proc/self/status", encoding="ascii") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    k_cache, _ = runner.kv_cache.layers[0]
    return {
        "peak": peak * 1024,
        "weights": runner.decoder.num_weight_bytes,
        "pool": llm.info()["kv_cache_bytes"],
        "touched": resident_bytes(k_cache.data_ptr()),
    }


def resident_bytes(address: int) -> int:
    """What is in memory of the mapping that holds the address."""
    is_inside = False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            first, *words = line.split()
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                is_inside = begin <= address < end
            elif is_inside and first == "Rss:":
                return int(words[0]) * 1024
    raise ValueError(f"no mapping holds the address {address:#x}")


def run_once(model: str, pool_bytes: int | None) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD, json.dumps([model, pool_bytes])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the process failed: {result.stderr.strip()}")
    facts: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return facts


def report(pool: str, runs: list[dict[str, Any]]) -> str:
    """Medians of the runs."""
    seconds = {name: median(run["seconds"][name] for run in runs) for name in runs[0]["seconds"]}
    phases = {name: median(run["phases"][name] for run in runs) for name in runs[0]["phases"]}
    peak, weights, size, touched = (
        median(run[name] for run in runs) / MB for name in ("peak", "weights", "pool", "touched")
    )
    return "\n".join([
        f"pool: {pool} ({size:,.0f} MB), median of {len(runs)}",
        "  seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()),
        "  of the constructor: " + ", ".join(f"{name} {value:.2f}" for name, value in phases.items()),
        f"  peak {peak:,.0f} MB: weights {weights:,.0f}, touched of the pool {touched:,.0f}, the rest "
        f"{peak - weights - touched:,.0f}",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=5, help="default 5")
    args = parser.parse_args()
    run_once(args.model, POOLS["1 GiB"])
    runs: dict[str, list[dict[str, Any]]] = {pool: [] for pool in POOLS}
    for _ in range(args.repeat):
        for pool, pool_bytes in POOLS.items():
            runs[pool].append(run_once(args.model, pool_bytes))
    for pool, found in runs.items():
        print(report(pool, found))


if __name__ == "__main__":
    main()
