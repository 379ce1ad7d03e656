"""The pages of docs/ and the examples: their code runs on the demo model and prints what the pages show.

`python -m tests.test_docs` writes what the pages' code prints.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.test_readme import ROOT, find_blocks, make_demo_folder, run, run_readme, write_outputs

PAGES = sorted((ROOT / "docs").glob("*.md"))
PAGES_WITH_CODE = [
    page for page in PAGES if any(b.language in ("python", "console") for b in find_blocks(page.read_text()))
]
EXAMPLES = {
    "quickstart.py": r"'The capital of Italy is' -> ' Rome",
    "chat.py": r"user: And of France\?\nassistant: .*Paris",
    "two_models.py": r"What is two plus two\? \| .+ \| .+",
    "pandas_column.py": r"Tokyo\s+Japan",
    "batch_job.py": r"(?s)too-long \| prompt_too_long: .*4 rows, 1 failed, [1-9].*reviews-report.html",
    "openai_batch.py": r"(?s)capital-of-japan \| .*Tokyo.*capital-of-france \| .*Paris.*with-tools \| .*tools",
    "datasets_map.py": r"\{'city': 'Rome', 'country': ' Italy",
}


def test_some_page_has_code_that_runs() -> None:
    assert [page.name for page in PAGES_WITH_CODE] == ["quickstart.md", "run.md", "scoring.md", "several-outputs.md"]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)
def test_code_in_docs_prints_what_the_page_shows(page: Path, demo_gguf: Path, tmp_path: Path) -> None:
    make_demo_folder(tmp_path, demo_gguf)
    pieces = run_readme(page.read_text(encoding="utf-8"), tmp_path)
    assert pieces
    assert "".join(piece.printed for piece in pieces) == "".join(piece.shown for piece in pieces)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_the_demo_model(name: str, demo_gguf: Path, tmp_path: Path) -> None:
    make_demo_folder(tmp_path, demo_gguf)
    printed = run([sys.executable, f"examples/{name}"], tmp_path)
    assert re.search(EXAMPLES[name], printed), printed


def test_the_harness_class_scores_and_generates(demo_gguf: Path, tmp_path: Path) -> None:
    """With lm-evaluation-harness itself where it is installed, its stand-in otherwise."""
    make_demo_folder(tmp_path, demo_gguf)
    stand_in = [sys.executable, str(ROOT / "tests" / "lm_eval_stand_in.py")]
    model = "demo-output/SmolLM2-135M-Instruct.gguf"
    printed = run([*stand_in, "examples/lm_eval_pagedllm.py", model, "choices,perplexity,text"], tmp_path)
    lines = dict(line.split(" ", 1) for line in printed.splitlines() if " [" in line)
    (rome, is_greedy), (oslo, _), (alone, _) = ast.literal_eval(lines["choices"])
    assert oslo < rome < 0
    assert alone < 0
    assert is_greedy is True
    (whole,) = ast.literal_eval(lines["perplexity"])
    assert -400 < whole < 0
    assert ast.literal_eval(lines["text"])[0].startswith(" 5")
    assert "choices {'first': 3.0}" in printed


def test_every_example_is_run() -> None:
    # run by `make demo`, by test_examples.py, and above
    others = {"show_answers.py", "fastapi_app.py", "celery_worker.py", "lm_eval_pagedllm.py"}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_named_in_docs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    if page.name.startswith("adding-"):
        files = re.findall(r"`((?:pagedllm|tests|csrc)/[a-z_0-9/]+(?:\.py|/))`", text)
        assert files
        assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_diagram_is_drawn_from_its_source(tmp_path: Path) -> None:
    source = tmp_path / "architecture.diagram"
    source.write_text((ROOT / "docs" / "architecture.diagram").read_text(encoding="utf-8"), encoding="utf-8")
    run([sys.executable, str(ROOT / "docs" / "diagram.py"), str(source)], tmp_path)
    drawn = source.with_suffix(".svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8"), "run python docs/diagram.py"
    assert "(architecture.svg)" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_files_named_in_the_diagram_exist() -> None:
    text = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    named = re.findall(r"[a-z_/]+(?:\.py|/)", " ".join(re.findall(r'class="files"[^>]*>([^<]*)', text)))
    assert len(named) > 10
    for name in named:
        places = [ROOT / name, *(ROOT / "pagedllm").glob(f"**/{name.rstrip('/')}")]
        assert any(place.exists() for place in places), name


def test_the_api_reference_builds_without_a_warning_and_has_every_public_name(tmp_path: Path) -> None:
    import pagedllm

    run([sys.executable, str(ROOT / "docs" / "reference" / "make.py"), str(tmp_path)], ROOT)
    page = (tmp_path / "pagedllm.html").read_text(encoding="utf-8")
    names = [name for name in pagedllm.__all__ if not name.startswith("_")]
    assert [name for name in names if f'id="{name}"' not in page] == []
    assert [name for name in names if not getattr(pagedllm, name).__doc__] == []
    assert {"outputs.html", "errors.html"} <= {path.name for path in (tmp_path / "pagedllm").iterdir()}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.name != "index.md" and f"({page.name})" not in index] == []


if __name__ == "__main__":
    for page in PAGES_WITH_CODE:
        write_outputs(page)
