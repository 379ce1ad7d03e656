"""`pagedllm bench`, on a tiny random model, with a peer that is not there."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from pagedllm.bench.cli import read_cpu_name
from pagedllm.bench.report import format_throughput
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
    assert theirs["work"] is None
    work = ours["work"]
    assert 0 < work["kv_waste"] < 16 / 48
    assert work["num_computed_tokens"] == 6 * (32 + 127)  # the last token of each is never computed
    layer = 64 * (128 + 64 + 64) + 128 * 64 + 64 * 192 + 96 * 64  # qkv, output, gate and up, down
    flops = 2 * (work["num_computed_tokens"] * 3 * layer + 6 * 128 * 64 * 320)
    rates = sorted(flops * speed / (6 * 128) / 1e9 for speed in ours["tokens_per_second"])
    assert work["gflops"] == pytest.approx(sum(rates) / 2)
    assert work["linear_gflops"] > 0
    assert work["weight_read_share"] is None  # of one request alone only
    assert facts["second_call"] == []


def test_text_names_workload_machine_engines_and_waste(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench(model, "--workload", "mixed", "--num-requests", "3", "--num-threads", "1")) == 0
    heading, columns, ours, rate, waste = capsys.readouterr().out.splitlines()
    assert heading.startswith("mixed: 3 requests, ")
    assert heading.endswith(f"{read_cpu_name()}, 1 threads")
    assert columns.split()[:3] == ["engine", "output", "tokens/s"]
    assert ours.startswith("pagedllm ")
    assert "of our own products'" in rate
    assert waste.split()[:2] == ["KV", "waste"]


def test_a_second_call_finds_its_prompts_in_the_cache(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "64,4", "--num-requests", "5", "--num-threads", "1", "--second-call"]
    assert main(bench(model, *arguments, "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["engines"][0]["work"]["num_computed_tokens"] == 5 * (64 + 3)
    assert facts["second_call"][0]["work"]["num_computed_tokens"] == 5 * (16 + 3)  # all blocks but the last hit
    assert "the same requests again, in a second call:" in format_throughput(facts)


def test_sampled_is_measured_beside_our_own_greedy_on_the_same_ids(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--workload", "sampled", "--num-requests", "3", "--num-threads", "1", "--json"]
    assert main(bench(model, *arguments)) == 0
    sampled, greedy = json.loads(capsys.readouterr().out)["engines"]
    assert greedy["engine"] == sampled["engine"] + " greedy"
    assert greedy["work"]["num_computed_tokens"] == sampled["work"]["num_computed_tokens"]  # no prefix hits
    assert greedy["ratio"] == sampled["median"] / greedy["median"]


def test_one_request_alone_is_set_beside_the_read_bandwidth(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "32,16", "--num-requests", "1", "--num-threads", "1"]
    assert main(bench(model, *arguments, "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    work = facts["engines"][0]["work"]
    assert work["weight_read_share"] == pytest.approx(work["weight_read_gbytes"] / work["read_gbytes"])
    assert "of what a 270 MB buffer is read at" in format_throughput(facts)


def test_kernels_are_set_beside_the_floors_of_the_same_run(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagedllm.bench.model_layers.MAX_NUM_COPIES", 1)  # what is timed does not matter here
    assert main(["bench", "kernels", "-m", model, "--num-threads", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    kernels = {(kernel["kernel"], kernel["shape"]): kernel for kernel in facts["kernels"]}
    assert [shape for kernel, shape in kernels if kernel == "linear gate_up"] == [
        f"64 x 192, M={rows}" for rows in (1, 8, 32, 128, 512)
    ]
    assert {name for name, _ in kernels} == {
        *(f"linear {name}" for name in ("qkv", "output", "gate_up", "down", "head")),
        *("attention", "rms_norm", "add_rms_norm", "sample greedy", "sample 0.8/0.95/50"),
    }
    product = kernels["linear gate_up", "64 x 192, M=8"]
    assert product["flops"] == 2 * 8 * 64 * 192
    assert product["bytes"] == 2 * (64 * 192 + 8 * 64 + 8 * 96)
    decode = kernels["attention", "128 x 1 new, 96 keys"]
    assert decode["flops"] == 4 * 128 * 96 * 4 * 32
    assert decode["bytes"] == 2 * (2 * 128 * 96 * 2 * 32 + 2 * 128 * 4 * 32)
    prefill = kernels["attention", "1 x 512 new, 2048 keys"]
    assert prefill["flops"] == 4 * sum(range(1537, 2049)) * 4 * 32
    for kernel in kernels.values():
        by_bytes = kernel["bytes"] / facts["read_gbytes"] / 1e9
        by_flops = kernel["flops"] / facts["peak_gflops"] / 1e9
        assert kernel["floor_seconds"] == pytest.approx(max(by_bytes, by_flops))
        assert kernel["floor"] == ("bytes" if by_bytes > by_flops else "flops")
        assert kernel["share"] == pytest.approx(kernel["floor_seconds"] / kernel["seconds"])


def test_host_times_the_parts_of_a_step_for_each_number_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "host", "--num-running", "1", "24", "--num-waiting", "7", "--num-threads", "1", "--json"]) == 0
    )
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["num_running"], step["num_waiting"]) for step in steps] == [(1, 7), (24, 7)]
    for step in steps:
        parts = [step[f"{part}_seconds"] for part in ("schedule", "execute", "update")]
        assert min(parts) > 0
        assert sum(parts) <= step["step_seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "vllm"], "--compare vllm needs --vllm-python PATH\n"),
        (["--compare", "openvino,sglang"], "knows openvino, vllm, llama.cpp, transformers, got 'sglang'"),
        (["--compare", "llama.cpp"], "--compare llama.cpp needs --llama-cpp-python PATH and --llama-cpp-model PATH"),
        (
            ["--compare", "llama.cpp", "--llama-cpp-python", "p", "--llama-cpp-model", "m", "--num-requests", "2"],
            "--compare llama.cpp needs --num-requests 1, got 2",
        ),
        (["--workload", "1,2,3"], "must be one of decode, mixed, prefix, sampled, or IN,OUT, got '1,2,3'"),
        (["--workload", "sampled", "--second-call"], "--second-call is not for --workload sampled"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused_before_anything_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(bench("no-such-model", *arguments))
    assert message in capsys.readouterr().err


def test_a_peer_without_its_python_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(bench("no-such-model", "--compare", "openvino"))
    assert "--compare openvino needs --openvino-python PATH and --openvino-model PATH" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_counts_must_be_positive(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(bench("no-such-model", "--num-requests", value))
    assert "--num-requests" in capsys.readouterr().err


def test_cpu_name_is_read_from_cpuinfo_or_is_the_machine_type(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A CPU: fast\n")
    assert read_cpu_name(tmp_path / "cpuinfo") == "A CPU: fast"
    assert read_cpu_name(tmp_path / "missing") != ""
