"""Rows: what a stage found out, one JSON object a line as soon as it is known: a stage that dies loses nothing.

A row is a check that passed or failed, a figure with its target, or a word of what was not done and why. No torch.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["pass", "FAIL", "met", "missed", "figure", "absent", "cut"]
REHEARSED = "rehearsal, not a GPU"


@dataclass(frozen=True)
class Row:
    stage: str
    name: str
    verdict: Verdict  # absent: cannot be done here; cut: left out for want of time or memory
    value: float | None = None
    unit: str = ""
    target: str = ""
    note: str = ""


@dataclass(frozen=True)
class Aim:
    """What a figure should be; DESIGN's targets on an H200."""

    bound: float
    unit: str
    is_at_least: bool

    def __str__(self) -> str:
        return f"{'>=' if self.is_at_least else '<='} {self.bound:g} {self.unit}".rstrip()

    def judge(self, value: float) -> Verdict:
        return "met" if (value >= self.bound if self.is_at_least else value <= self.bound) else "missed"


DECODE_ATTENTION = Aim(80, "% of copy", True)
PREFILL_ATTENTION = Aim(300, "TFLOP/s", True)
STEP_8B, STEP_1B = Aim(1.25, "x floor", False), Aim(1.6, "x floor", False)
IDLE = Aim(0.3, "ms", False)


ESSENTIAL = "the library fits"  # how the names of the checks begin without which nothing else makes sense


class Results:
    """The rows of one stage."""

    def __init__(self, stage: str, path: Path, is_rehearsal: bool) -> None:
        self.stage, self.is_rehearsal = stage, is_rehearsal
        self._file = path.open("a", encoding="utf-8")

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[Notes]:
        """The block is a check: whatever it raises makes it a failed one, and the stage goes on."""
        notes = Notes()
        try:
            yield notes
        except Exception as error:
            self._raised(name, error)
        else:
            self.add(Row(self.stage, name, "pass", note=notes.text))

    @contextlib.contextmanager
    def check_figure(self, name: str) -> Iterator[None]:
        """The block adds figures itself; whatever it raises is a failed check, and the stage goes on."""
        try:
            yield
        except Exception as error:
            self._raised(name, error)

    def _raised(self, name: str, error: Exception) -> None:
        traceback.print_exc()
        reason = str(error).strip().splitlines() or ["no words"]
        self.add(Row(self.stage, name, "FAIL", note=f"{type(error).__name__}: {reason[0]}"))

    def figure(self, name: str, value: float, unit: str, aim: Aim | None = None, note: str = "") -> None:
        verdict: Verdict = "figure"
        if aim is not None:
            assert unit == aim.unit, f"{name}: {unit} against {aim}"
            verdict = "figure" if self.is_rehearsal else aim.judge(value)
        if self.is_rehearsal:
            note = f"{note}; {REHEARSED}" if note else REHEARSED
        self.add(Row(self.stage, name, verdict, value, unit, str(aim or ""), note))

    def fact(self, name: str, note: str) -> None:
        self.add(Row(self.stage, name, "figure", note=note))

    def failed(self, name: str, why: str) -> None:
        self.add(Row(self.stage, name, "FAIL", note=why))

    def absent(self, name: str, why: str) -> None:
        self.add(Row(self.stage, name, "absent", note=why))

    def cut(self, name: str, why: str) -> None:
        self.add(Row(self.stage, name, "cut", note=why))

    def add(self, row: Row) -> None:
        self._file.write(json.dumps(asdict(row)) + "\n")
        self._file.flush()
        print(line(row), flush=True)


class Notes:
    """What a check wants said beside that it passed."""

    text = ""

    def say(self, text: str) -> None:
        self.text = f"{self.text}; {text}" if self.text else text


class Budget:
    """The time that a stage has; `allows` is asked before each part with what that takes, roughly."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def allows(self, results: Results, name: str, seconds: float) -> bool:
        """False, with a row that says so, where it would not be done in time."""
        if seconds <= self.left:
            return True
        results.cut(name, f"takes about {seconds:.0f} s, {max(0.0, self.left):.0f} s are left of the stage")
        return False


def read_rows(path: Path) -> list[Row]:
    """Of a stage that may have been killed while it wrote its last line."""
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(Row(**json.loads(text)))
    return rows


def line(row: Row) -> str:
    value = "" if row.value is None else f"{row.value:,.3g}" if abs(row.value) < 1000 else f"{row.value:,.0f}"
    figure = f"{value} {row.unit}".strip()
    target = f"[{row.target}]" if row.target else ""
    words = [f"{row.verdict:<7}{row.stage:<12}{row.name}", figure, target, row.note]
    return "  ".join(word for word in words if word)


def summary(rows: list[Row]) -> str:
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in Verdict.__args__}  # type: ignore[attr-defined]
    text = f"{counts['pass']} checks passed, {counts['FAIL']} failed; "
    text += f"targets: {counts['met']} met, {counts['missed']} missed; {counts['figure']} other figures and facts, "
    return text + f"{counts['absent']} absent, {counts['cut']} cut"
