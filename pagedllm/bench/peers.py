"""Peers: other engines, measured in the same run on the same token ids.

A peer has its own Python with its own packages, so it runs as a child process and talks in JSON lines; the protocol
stands in `openvino_driver.py`. Whoever opens a Peer closes it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pagedllm.bench.throughput import Measurement, check_output_lengths
from pagedllm.bench.workloads import WorkloadRequest
from pagedllm.errors import PagedLLMError

OPENVINO_DRIVER = Path(__file__).with_name("openvino_driver.py")


class PeerError(PagedLLMError):
    """A peer could not be started or ended early; the message holds its command, its own messages are on stderr."""


class Peer:
    """A running peer.

    Attributes:
        name: the engine and its version, as the peer tells it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Starts `command` and waits until it has loaded its model. Raises PeerError."""
        self._command = " ".join(command)
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise PeerError(f"cannot start the peer `{self._command}`: {error}") from error
        self.name: str = self._read()["engine"]

    def run(self, requests: Sequence[WorkloadRequest]) -> Measurement:
        """One call of the peer over all requests; raises PeerError when it dies or gives other lengths."""
        assert self._process.stdin is not None
        line = {
            "prompt_token_ids": [request.prompt_token_ids for request in requests],
            "num_output_tokens": [request.num_output_tokens for request in requests],
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


def open_openvino(python: str, model_dir: str, num_threads: int, kv_cache_bytes: int) -> Peer:
    """OpenVINO GenAI. `python` has openvino-genai; `model_dir` is an export by optimum-cli."""
    if not Path(model_dir, "openvino_model.xml").is_file():
        raise PeerError(
            f"{model_dir!r} holds no openvino_model.xml: export the model with optimum-cli, see docs/log.md"
        )
    return Peer([python, str(OPENVINO_DRIVER), model_dir, str(num_threads), str(kv_cache_bytes)])
