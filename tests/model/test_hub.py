"""Hugging Face ids: fetched once from a hub (here a small server of our own), then used without any connection."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pagedllm import LLM, SamplingParams
from pagedllm.config import EngineConfig
from pagedllm.errors import ModelError
from pagedllm.model.hub import is_id, locate
from tests.tiny import save_tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ID = "someone/tiny"
LOCATE = """
from pagedllm.config import EngineConfig
from pagedllm.model.hub import locate
print(locate(EngineConfig(model={model!r}{more})).model)
"""
LOAD = """
from pagedllm import LLM, SamplingParams
with LLM({model!r}, max_model_len=64, kv_cache_memory_bytes=8 << 20, num_threads=1{more}) as llm:
    print(llm.generate("one two", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids)
"""


class Hub(ThreadingHTTPServer):
    """What the hub's client asks of a server, of one repository."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.requests: list[str] = []


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        headers: dict[str, str] = {}
        if path.startswith(f"/api/models/{ID}/revision/") and not path.endswith("/nowhere"):
            body = self.json({"id": ID, "sha": COMMIT, "siblings": [{"rfilename": n} for n in self.server.files]})
        elif path.startswith(f"/api/models/{ID}/tree/"):
            body = self.json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in self.server.files.items()
                ]
            )
        elif (name := path.removeprefix(f"/{ID}/resolve/{COMMIT}/")) in self.server.files:
            body = self.server.files[name]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            code = "RevisionNotFound" if f"/{ID}/" in path else "RepoNotFound"
            self.send(404, b"", {"X-Error-Code": code}, has_body)
            return
        self.send(200, body, headers, has_body)

    def json(self, value: Any) -> bytes:
        return json.dumps(value).encode()

    def send(self, status: int, body: bytes, headers: dict[str, str], has_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("hub") / "model")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"another form")
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run(
    script: str, model: str, home: Path, endpoint: str, more: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", script.format(model=model, more=more)], env=env, capture_output=True, text=True
    )


def test_an_id_is_fetched_once_without_pickles_and_code_and_then_used_without_a_connection(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    first = run(LOCATE, ID, tmp_path, endpoint, ", revision='main'")
    assert first.returncode == 0, first.stderr
    fetched = {path.rpartition(f"/{COMMIT}/")[2] for path in hub.requests if "/resolve/" in path}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched
    assert not {name for name in fetched if name.endswith((".bin", ".py")) or name == "onnx/model.safetensors"}
    hub.requests.clear()
    again = run(LOCATE, ID, tmp_path, endpoint, ", revision='main'")
    offline = run(LOCATE, ID, tmp_path, "http://127.0.0.1:1", HF_HUB_OFFLINE="1")
    loaded = run(LOAD, ID, tmp_path, endpoint)
    assert hub.requests == []
    assert first.stdout == again.stdout == offline.stdout
    with LLM(folder, max_model_len=64, kv_cache_memory_bytes=8 << 20, num_threads=1) as llm:
        expected = llm.generate("one two", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids
    assert loaded.stdout == f"{expected}\n", loaded.stderr


def test_what_cannot_be_fetched_says_why_and_what_to_do(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    for model, more, environment in (
        (ID, ", revision='nowhere'", {}),
        ("someone/else", "", {}),
        (ID, "", {"HF_HUB_OFFLINE": "1"}),
    ):
        result = run(LOCATE, model, tmp_path, endpoint, more, **environment)
        assert result.returncode == 1
        last = result.stderr.splitlines()[-1]
        assert last.startswith(f"pagedllm.errors.ModelError: '{model}'"), result.stderr
        assert "is no path here, and cannot be had from the Hugging Face hub: " in last
        assert last.endswith("offline, pass the path of a model folder or of a GGUF file")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("a/b", True),
        ("model.gguf", False),
        ("models/a.gguf", False),
        ("./a/b", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("~/b", False),
        ("../b", False),
        ("gpt2", False),
    ],
)
def test_an_id_is_organisation_and_name(place: str, expected: bool) -> None:
    assert is_id(place) == expected


def test_a_path_that_is_there_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert not is_id("models/tiny")


def test_a_revision_is_refused_for_a_path_and_where_it_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"revision='main' is of Hugging Face ids, and model='/.+' is none"):
        locate(EngineConfig(model=str(tmp_path), revision="main"))
    with pytest.raises(ValueError, match="revision must be None or a branch, tag or commit of a Hugging Face id"):
        LLM(tmp_path, revision=3)  # type: ignore[arg-type]


def test_an_id_without_weights_that_can_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedllm.model.hub._cached", lambda place, revision: None)
    monkeypatch.setattr("pagedllm.model.hub._fetch", lambda *arguments: str(tmp_path))
    with pytest.raises(ModelError, match=r"a/b on the Hugging Face hub has no safetensors: if it has GGUF files"):
        locate(EngineConfig(model="a/b"))
    with pytest.raises(ModelError, match=r"a/b on the Hugging Face hub has no c\.gguf"):
        locate(EngineConfig(model="a/b", gguf_file="c.gguf"))
    (tmp_path / "c.gguf").touch()
    assert locate(EngineConfig(model="a/b", gguf_file="c.gguf")).model == str(tmp_path)
