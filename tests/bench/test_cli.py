"""`pagedllm bench throughput`, on a tiny random model, with a peer that is not there."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from pagedllm.bench.cli import read_cpu_name
from pagedllm.cli import main
from tests.tiny import save_tiny_model

FAKE_PEER = Path(__file__).with_name("fake_peer.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def peer_arguments(tmp_path: Path) -> list[str]:
    """A "Python" that runs the fake peer whatever it is told to run, and a folder that looks like an export."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, str(FAKE_PEER)])}\n")
    python.chmod(0o755)
    (tmp_path / "openvino_model.xml").touch()
    return ["--compare", "openvino", "--openvino-python", str(python), "--openvino-model", str(tmp_path)]


def bench(model: str, *arguments: str) -> list[str]:
    return ["bench", "throughput", "-m", model, "--kv-cache-memory-bytes", str(32 << 20), *arguments]


def test_json_holds_both_engines_their_speeds_and_the_ratio(
    model: str, peer_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--workload", "decode", "--num-requests", "6", "--repeat", "2", "--num-threads", "1", "--json"]
    assert main(bench(model, *arguments, *peer_arguments)) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["workload"], facts["num_requests"], facts["num_threads"]) == ("decode", 6, 1)
    assert (facts["num_prompt_tokens"], facts["num_output_tokens"]) == (6 * 32, 6 * 128)
    ours, theirs = facts["engines"]
    assert ours["engine"].startswith("pagedllm ")
    assert theirs["engine"] == "Fake 1.0"
    assert theirs["tokens_per_second"] == [6 * 128 / 0.5] * 2
    ratios = sorted(a / b for a, b in zip(ours["tokens_per_second"], theirs["tokens_per_second"], strict=True))
    assert theirs["ratio"] == pytest.approx(sum(ratios) / 2)
    assert 0 < ours["kv_waste"] < 16 / 48
    assert theirs["kv_waste"] is None


def test_text_names_workload_machine_engines_and_waste(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench(model, "--workload", "mixed", "--num-requests", "3", "--num-threads", "1")) == 0
    heading, columns, ours, waste = capsys.readouterr().out.splitlines()
    assert heading.startswith("mixed: 3 requests, ")
    assert heading.endswith(f"{read_cpu_name()}, 1 threads")
    assert columns.split()[:3] == ["engine", "output", "tokens/s"]
    assert ours.startswith("pagedllm ")
    assert waste.split()[:2] == ["KV", "waste"]


def test_a_peer_without_its_python_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(bench("no-such-model", "--compare", "openvino"))
    assert "--compare openvino needs --openvino-python PATH and --openvino-model DIR" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_counts_must_be_positive(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(bench("no-such-model", "--num-requests", value))
    assert "--num-requests" in capsys.readouterr().err


def test_cpu_name_is_read_from_cpuinfo_or_is_the_machine_type(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A CPU: fast\n")
    assert read_cpu_name(tmp_path / "cpuinfo") == "A CPU: fast"
    assert read_cpu_name(tmp_path / "missing") != ""
