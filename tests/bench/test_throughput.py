"""Throughput: engines alternate on the same ids, speeds and ratios are what the clock says, cheating is noticed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagedllm.bench.peers import Peer, PeerError, find_preloads, open_peer, peer_environment
from pagedllm.bench.throughput import Measurement, Work, measure_throughput
from pagedllm.bench.workloads import WorkloadRequest, make_workload
from pagedllm.errors import PagedLLMError

FAKE_PEER = str(Path(__file__).with_name("fake_peer.py"))


class ScriptedEngine:
    """Takes the given seconds for its measured calls (one for the warm-up) and notes what it was given."""

    def __init__(self, name: str, seconds: list[float], log: list[tuple[str, Sequence[WorkloadRequest]]]) -> None:
        self.name = name
        self._seconds = [1.0, *seconds]
        self._log = log

    def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
        self._log.append((self.name, requests))
        return Measurement(self._seconds.pop(0), sum(request.num_output_tokens for request in requests))


def test_engines_alternate_on_the_same_new_ids_in_each_repetition() -> None:
    log: list[tuple[str, Sequence[WorkloadRequest]]] = []
    engines = [ScriptedEngine(name, [1.0, 1.0], log) for name in ("a", "b")]
    measure_throughput(engines, "decode", 8, 100, repeat=2)
    assert [name for name, _ in log] == ["a", "b"] * 3
    assert [len(requests) for _, requests in log] == [4, 4, 8, 8, 8, 8]
    assert log[2][1] == log[3][1] == make_workload("decode", 8, 100, seed=0)
    assert log[4][1] == log[5][1] == make_workload("decode", 8, 100, seed=1)


def test_speeds_are_medians_and_the_ratio_is_the_median_of_each_repetitions_ratio() -> None:
    engines = [ScriptedEngine("ours", [2.0, 4.0, 1.0], []), ScriptedEngine("theirs", [4.0, 2.0, 4.0], [])]
    report = measure_throughput(engines, "decode", 8, 100, repeat=3)
    ours, theirs = report.engines
    assert (report.num_prompt_tokens, report.num_output_tokens) == (256, 1024)
    assert ours.tokens_per_second == [512.0, 256.0, 1024.0]
    assert (ours.engine, ours.median, ours.ratio) == ("ours", 512.0, None)
    assert theirs.tokens_per_second == [256.0, 512.0, 256.0]
    assert (theirs.engine, theirs.median, theirs.ratio) == ("theirs", 256.0, 2.0)


def test_a_second_call_runs_the_same_ids_again_and_is_reported_apart() -> None:
    log: list[tuple[str, Sequence[WorkloadRequest]]] = []
    engines = [ScriptedEngine("ours", [2.0, 1.0, 2.0, 1.0], log), ScriptedEngine("theirs", [4.0, 4.0, 4.0, 4.0], log)]
    report = measure_throughput(engines, "decode", 8, 100, repeat=2, has_second_call=True)
    assert [name for name, _ in log] == ["ours", "theirs"] * 5
    assert log[2][1] == log[4][1] == make_workload("decode", 8, 100, seed=0)
    assert log[6][1] == log[8][1] == make_workload("decode", 8, 100, seed=1)
    assert [result.tokens_per_second for result in report.engines] == [[512.0, 512.0], [256.0, 256.0]]
    assert [result.tokens_per_second for result in report.second_call] == [[1024.0, 1024.0], [256.0, 256.0]]
    assert report.second_call[1].ratio == 4.0


def test_work_is_summarized_over_the_measured_calls_without_the_warm_up() -> None:
    class Engine:
        name = "ours"

        def __init__(self) -> None:
            self.works = [  # KV waste, FLOP, our products' FLOP/s, bytes/s of memory, bytes/s of weights
                Work(0.9, 1, 1.0, 1.0, 1.0, 1.0),
                Work(0.1, 7, 6e9, 5e9, 40e9, 10e9),
                Work(0.3, 7, 4e9, 5e9, 20e9, 10e9),
            ]

        def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
            return Measurement(2.0, 1, self.works.pop(0))

    (result,) = measure_throughput([Engine()], "decode", 8, 100, repeat=2).engines
    assert result.work is not None
    assert result.work.kv_waste == pytest.approx(0.2)
    assert result.work.num_computed_tokens == 7
    assert (result.work.gflops, result.work.linear_gflops) == (2.5, 5.0)
    assert result.work.linear_share == pytest.approx((3 / 5 + 2 / 5) / 2)
    assert (result.work.read_gbytes, result.work.weight_read_gbytes) == (30.0, 10.0)
    assert result.work.weight_read_share == pytest.approx((1 / 4 + 1 / 2) / 2)


def test_a_peer_is_measured_by_its_own_clock() -> None:
    with Peer([sys.executable, FAKE_PEER]) as peer:
        assert peer.name == "Fake 1.0"
        assert peer.run(make_workload("decode", 2, 100, seed=0)) == Measurement(0.5, 256)
        assert peer.run(make_workload("prefix", 3, 100, seed=0)) == Measurement(0.5, 96)


@pytest.mark.parametrize(
    ("misbehaviour", "message"),
    [
        ("short", "Fake 1.0 gave 127 instead of 128 tokens for request 1"),
        ("loses one", "Fake 1.0 answered 1 of 2 requests"),
        ("dies", "ended with exit code 4"),
    ],
)
def test_a_peer_that_does_not_do_the_work_is_an_error(misbehaviour: str, message: str) -> None:
    with Peer([sys.executable, FAKE_PEER, misbehaviour]) as peer, pytest.raises(PagedLLMError, match=message):
        peer.run(make_workload("decode", 2, 100, seed=0))


def test_a_peer_that_does_not_start_is_an_error_with_its_command() -> None:
    with pytest.raises(PeerError, match=r"fake_peer.py no start` ended with exit code 3"):
        Peer([sys.executable, FAKE_PEER, "no start"])
    with pytest.raises(PeerError, match="cannot start the peer `no-such-python x`"):
        Peer(["no-such-python", "x"])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("openvino", "is no model for openvino, which reads a folder with openvino_model.xml"),
        ("vllm", "is no model for vllm, which reads a folder of safetensors"),
        ("llama.cpp", "is no model for llama.cpp, which reads a GGUF file"),
        ("transformers", "is no model for transformers, which reads a folder of safetensors"),
    ],
)
def test_a_model_in_a_form_that_the_peer_cannot_read_is_named(engine: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=message):
        open_peer(engine, sys.executable, str(tmp_path), 1, 1 << 30)


def test_a_peer_is_told_whether_to_sample(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    with Peer([sys.executable, FAKE_PEER, "", str(log)]) as peer:
        peer.run(make_workload("decode", 1, 100, seed=0))
        peer.run(make_workload("sampled", 1, 100, seed=0))
    assert log.read_text().splitlines() == ["null", '{"temperature": 0.8, "top_p": 0.95, "top_k": 50}']


def test_every_peer_gets_the_threads_and_vllm_its_memory_and_cpus_too() -> None:
    assert peer_environment("transformers", "python", 3, 1 << 30) == {"OMP_NUM_THREADS": "3"}
    environment = peer_environment("vllm", "python", 1, (4 << 30) + 1)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "5"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"].isdigit()


def test_vllm_preloads_the_openmp_of_its_own_environment(tmp_path: Path) -> None:
    library = tmp_path / "lib/python3/site-packages/libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert find_preloads(tmp_path / "bin/python")[-1] == library
