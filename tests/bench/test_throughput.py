"""Throughput: engines alternate on the same ids, speeds and ratios are what the clock says, cheating is noticed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagedllm.bench.peers import Peer, PeerError, open_openvino
from pagedllm.bench.throughput import Measurement, measure_throughput
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


def test_kv_waste_is_the_mean_of_the_measured_calls_without_the_warm_up() -> None:
    class Engine:
        name = "ours"

        def __init__(self) -> None:
            self.wastes = [0.9, 0.1, 0.3]

        def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
            return Measurement(1.0, 1, self.wastes.pop(0))

    (result,) = measure_throughput([Engine()], "decode", 8, 100, repeat=2).engines
    assert result.kv_waste == pytest.approx(0.2)


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


def test_a_folder_that_is_no_openvino_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"holds no openvino_model.xml"):
        open_openvino(sys.executable, str(tmp_path), 1, 1 << 30)
