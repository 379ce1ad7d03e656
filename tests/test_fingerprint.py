"""LLM.fingerprint: what it holds, and what it does not depend on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pagedllm import LLM
from pagedllm.config import EngineConfig
from pagedllm.fingerprint import fingerprint
from tests.tiny import save_tiny_model

SMALL = {"max_model_len": 64, "kv_cache_memory_bytes": 8 << 20, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("fingerprint") / "model")


def of(folder: Path, **settings: object) -> str:
    with LLM(folder, **{**SMALL, **settings}) as llm:  # type: ignore[arg-type]
        return llm.fingerprint


def test_fingerprint_is_the_same_wherever_the_model_lies_and_however_it_is_batched(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    first = of(folder)
    assert len(first) == 32
    assert first == of(tmp_path / "copy", max_num_seqs=3, block_size=32, num_threads=2, seed=7, max_model_len=32)


def test_fingerprint_tells_weights_tokenizer_template_dtype_kernels_and_numerics_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {
        "as it is": of(folder),
        "float32": of(folder, dtype="float32"),
        "reference": of(folder, kernels="reference"),
    }
    seen["template given"] = of(folder, chat_template="{{ messages[0].content }}")
    template = tmp_path / "template.jinja"
    for text in ("{{ 1 }}", "{{ 2 }}"):
        template.write_text(text)
        seen[f"template {text} in a file"] = of(folder, chat_template=str(template))
    seen["no generation config"] = of(folder, generation_config="none")
    for name, change in (
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("tokenizer.json", lambda content: content + b"\n"),
        ("tokenizer_config.json", lambda content: json.dumps({**json.loads(content), "chat_template": "x"}).encode()),
    ):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(change((folder / name).read_bytes()))
        seen[name] = of(copy)
    monkeypatch.setattr("pagedllm.assembly.NUMERICS_VERSION", "another")
    seen["numerics"] = of(folder)
    assert len(set(seen.values())) == len(seen), seen


def test_a_job_is_bound_to_the_parts_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "one"}\n')
    with LLM(folder, **SMALL) as llm:  # type: ignore[arg-type]
        llm.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        job = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["job"]
        assert {"model", "dtype", "kernels", "numerics"} <= job.keys()
        numerics = {name: job[name] for name in ("dtype", "kernels", "numerics")}
        assert fingerprint(EngineConfig(model=str(folder)), numerics) == llm.fingerprint
