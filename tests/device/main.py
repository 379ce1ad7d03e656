"""Runs the stages one after the other, each in a process of its own with its own time, and makes a table and a JSON
file of what they found. Needs nothing but Python's own library, so that it can say what is missing.

Exit status: 0; 1 if a check failed; 2 if something is missing and nothing was run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.device.results import ESSENTIAL, REHEARSED, Row, line, read_rows, summary

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "pagedllm" / "lib" / "libpagedllm_cuda.so"
MODULES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "tqdm", "jinja2", "huggingface_hub", "pytest")
CPU_LIBRARY = "libpagedllm_cpu_*.so"
MINUTES = 8.0


@dataclass(frozen=True)
class Stage:
    name: str
    limit: float  # seconds, at most
    reserve: float  # seconds that the stages before leave for it


STAGES = (
    Stage("environment", 60, 0),
    Stage("operators", 120, 30),
    Stage("sanitizer", 100, 30),
    Stage("exactness", 110, 40),
    Stage("kernels", 60, 30),
    Stage("steps", 90, 45),
    Stage("throughput", 80, 40),
)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    missing = find_missing(args.rehearse)
    if missing is not None:
        print(f"run.sh: {missing}", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * args.minutes
    folder: Path = args.json.parent
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    wanted = [stage for stage in STAGES if args.only is None or stage.name in args.only]
    for index, stage in enumerate(wanted):
        if any(row.name.startswith(ESSENTIAL) and row.verdict == "FAIL" for row in rows):
            rows.append(Row(stage.name, "the whole stage", "cut", note="the library cannot be used here"))
            continue
        reserve = sum(later.reserve for later in wanted[index + 1 :]) * args.minutes / MINUTES
        limit = min(stage.limit * args.minutes / MINUTES, end - time.monotonic() - reserve)
        begin = time.monotonic()
        rows += run_stage(stage.name, limit, folder, args.rehearse)
        seconds[stage.name] = time.monotonic() - begin
        write_json(args.json, rows, seconds, args.rehearse)
    write_json(args.json, rows, seconds, args.rehearse)
    print_table(rows, seconds, args.json, args.rehearse)
    return 1 if any(row.verdict == "FAIL" for row in rows) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("run.sh", description="Checks and measures pagedllm on a machine with a GPU.")
    parser.add_argument("--rehearse", action="store_true", help="the same on the emulated kernels, without a GPU")
    default = Path(os.environ.get("OUT") or "device-results") / "results.json"
    parser.add_argument("--json", type=Path, default=default, help="the results; logs beside it (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it (default: %(default)s)")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=f"some of {', '.join(names)}")
    return parser.parse_args(arguments)


def find_missing(is_rehearsal: bool) -> str | None:
    """What this machine lacks, in one line."""
    lacking = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{sys.executable} has no {', '.join(lacking)}: set PYTHON to one that has"
    if not list(LIBRARY.parent.glob(CPU_LIBRARY)):
        return f"{LIBRARY.parent}/{CPU_LIBRARY} is missing: build with PAGEDLLM_BUILD=cpu,cuda and carry pagedllm/lib"
    if is_rehearsal:
        return None
    if not LIBRARY.exists():
        return f"{LIBRARY} is missing: build with PAGEDLLM_BUILD=cpu,cuda and carry pagedllm/lib"
    probe = "import torch; torch.cuda.init(); print(torch.version.cuda, torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    if found.returncode != 0:
        reason = (found.stderr.strip().splitlines() or ["no words"])[-1]
        return f"torch of {sys.executable} finds no GPU that it can use: {reason}"
    return None


def run_stage(name: str, limit: float, folder: Path, is_rehearsal: bool) -> list[Row]:
    """Its rows, and one more where it did not end well."""
    if limit < 5:
        return [Row(name, "the whole stage", "cut", note="no time is left")]
    with tempfile.TemporaryDirectory(prefix="pagedllm-rows-") as scratch:
        rows_path, log = Path(scratch) / "rows.jsonl", folder / f"{name}.log"
        command = [sys.executable, "-m", "tests.device.run_stage", name, str(rows_path), str(max(1.0, limit - 5))]
        with log.open("w", encoding="utf-8") as output:
            status = run_limited([*command, *(["--rehearse"] if is_rehearsal else [])], limit, output)
        rows = read_rows(rows_path)
    for row in rows:
        print(line(row), flush=True)
    if status != 0:
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        how = f"ran past {limit:.0f} s" if status is None else f"ended with status {status}"
        rows.append(Row(name, "the whole stage", "FAIL", note=f"{how}: {words[-1][:200]}"))
        print(line(rows[-1]), flush=True)
    return rows


def run_limited(command: list[str], limit: float, output: object) -> int | None:
    """The exit status, None where it took too long; whatever it had started is ended too."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # type: ignore[call-overload]  # fmt: skip
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write_json(path: Path, rows: list[Row], seconds: dict[str, float], is_rehearsal: bool) -> None:
    value = {
        "kind": REHEARSED if is_rehearsal else "a GPU",
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "summary": summary(rows),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def print_table(rows: list[Row], seconds: dict[str, float], path: Path, is_rehearsal: bool) -> None:
    print()
    for row in rows:
        print(line(row))
    took = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    print(f"\n{summary(rows)}\n{took}; {path}")
    if is_rehearsal:
        print(f"This was a {REHEARSED}: its figures say nothing but that they can be taken.")


if __name__ == "__main__":
    sys.exit(main())
