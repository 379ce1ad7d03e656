"""Peers: other engines, measured in the same run on the same token ids.

A peer has its own Python with its own packages, so it runs as a child process and talks in JSON lines; the protocol
stands in `peer_driver.py`. Whoever opens a Peer closes it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pagedllm.bench.throughput import Measurement, check_output_lengths
from pagedllm.bench.workloads import WorkloadRequest
from pagedllm.errors import PagedLLMError

DRIVER = Path(__file__).with_name("peer_driver.py")


@dataclass(frozen=True, slots=True)
class PeerKind:
    """What the command line must know of a peer."""

    model_form: str
    is_model: Callable[[Path], bool]
    takes_our_model: bool  # reads the folder that pagedllm reads
    has_batches: bool = True


def _is_safetensors_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


PEERS: dict[str, PeerKind] = {
    "openvino": PeerKind(
        "a folder with openvino_model.xml: export the model with optimum-cli, see docs/log.md",
        lambda path: (path / "openvino_model.xml").is_file(),
        takes_our_model=False,
    ),
    "vllm": PeerKind("a folder of safetensors", _is_safetensors_folder, takes_our_model=True),
    "llama.cpp": PeerKind("a GGUF file", Path.is_file, takes_our_model=False, has_batches=False),
    "transformers": PeerKind("a folder of safetensors", _is_safetensors_folder, takes_our_model=True),
}


class PeerError(PagedLLMError):
    """A peer could not be started or ended early; the message holds its command, its own messages are on stderr."""


class Peer:
    """A running peer.

    Attributes:
        name: the engine and its version, as the peer tells it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Starts `command` and waits until it has loaded its model. Raises PeerError."""
        self._command = " ".join(command)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        except OSError as error:
            raise PeerError(f"cannot start the peer `{self._command}`: {error}") from error
        self.name: str = self._read()["engine"]

    def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
        """One call of the peer over all requests; raises PeerError when it dies or gives other lengths."""
        assert self._process.stdin is not None
        (sampling,) = {request.sampling for request in requests}
        line = {
            "prompt_token_ids": [request.prompt_token_ids for request in requests],
            "num_output_tokens": [request.num_output_tokens for request in requests],
            "sampling": None if sampling is None else asdict(sampling),
        }
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _read tells how it ended
        reply = self._read()
        check_output_lengths(self.name, requests, reply["output_token_ids"])
        return Measurement(reply["seconds"], sum(map(len, reply["output_token_ids"])))

    def close(self) -> None:
        """Ends the peer; may be called again."""
        self._process.communicate()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the peer `{self._command}` ended with exit code {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def open_peer(engine: str, python: str, model: str, num_threads: int, kv_cache_bytes: int) -> Peer:
    """Starts the peer `engine`, one of PEERS. `python` has its packages; `model` is the model in the peer's form."""
    if not PEERS[engine].is_model(Path(model)):
        raise PeerError(f"{model!r} is no model for {engine}, which reads {PEERS[engine].model_form}")
    command = [python, "-I", str(DRIVER), engine, model, str(num_threads), str(kv_cache_bytes)]
    return Peer(command, {**os.environ, **peer_environment(engine, python, num_threads, kv_cache_bytes)})


def peer_environment(engine: str, python: str, num_threads: int, kv_cache_bytes: int) -> dict[str, str]:
    """The variables that a peer is set up by, besides ours."""
    environment = {"OMP_NUM_THREADS": str(num_threads)}
    if engine == "vllm":
        cpus = sorted(os.sched_getaffinity(0))[:num_threads]
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(-(-kv_cache_bytes >> 30))  # GiB, rounded up
        libraries = find_preloads(Path(python))
        if libraries:
            environment["LD_PRELOAD"] = ":".join(map(str, libraries))
    return environment


def find_preloads(python: Path) -> list[Path]:
    """vLLM's advice for CPUs: tcmalloc of the system and the Intel OpenMP of its own environment, where they exist."""
    system = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return system[:1] + sorted(python.parent.parent.glob("lib/**/libiomp5.so"))[:1]
