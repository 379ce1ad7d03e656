"""Submitter: `LLM.submit`: one daemon thread that runs what many threads hand in, together.

The thread takes the LLM's lock for a step at a time and lets waiting calls in between; it holds no reference to the LLM
while it sleeps, so that a dropped LLM is freed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pagedllm.open_requests import OpenRequests
from pagedllm.outputs import RequestOutput
from pagedllm.prompts import Prompt
from pagedllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedllm.llm import LLM

Job = tuple[Prompt, "SamplingParams | None", "Future[RequestOutput]"]


class Submitter:
    def __init__(self, llm: LLM) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(llm), self._jobs), name="pagedllm-submit", daemon=True
        )
        weakref.finalize(llm, self._jobs.put, None).atexit = False
        self._thread.start()

    def submit(self, prompt: Prompt, params: SamplingParams | None) -> Future[RequestOutput]:
        future: Future[RequestOutput] = Future()
        self._jobs.put((prompt, params, future))
        return future

    def close(self) -> None:
        """The thread ends after what it has."""
        self._jobs.put(None)


def _serve(reference: weakref.ref[LLM], jobs: queue.SimpleQueue[Job | None]) -> None:
    while True:
        first = jobs.get()
        llm = reference()
        if first is None or llm is None:
            _refuse_rest(jobs, first)
            return
        is_last = _Batch(llm, jobs).run(first)
        if is_last:
            _refuse_rest(jobs, None)
            return
        del llm


def _refuse_rest(jobs: queue.SimpleQueue[Job | None], first: Job | None) -> None:
    """What came after the end."""
    rest = [first]
    with contextlib.suppress(queue.Empty):
        while True:
            rest.append(jobs.get_nowait())
    for job in rest:
        if job is not None and job[2].set_running_or_notify_cancel():
            job[2].set_exception(RuntimeError("this LLM is closed: make a new one"))


class _Batch:
    """From the first job of a quiet thread until no job is left."""

    def __init__(self, llm: LLM, jobs: queue.SimpleQueue[Job | None]) -> None:
        self._llm = llm
        self._jobs = jobs
        self._futures: dict[int, Future[RequestOutput]] = {}  # by index in the session
        self._num_added = 0
        self._is_last = False

    def run(self, first: Job) -> bool:
        """True if the thread was told to end."""
        waiting: list[Job] = [first]
        requests: OpenRequests | None = None
        while waiting or self._futures:
            outputs: list[RequestOutput] = []
            try:
                with self._llm._lock:
                    self._llm._open()
                    if requests is None:
                        requests = self._llm._open_requests()
                    outputs = self._admit(requests, waiting)
                    try:
                        outputs += requests.step()
                    except BaseException:
                        requests.abort()
                        raise
            except BaseException as error:
                self._fail(waiting, error)
                requests = None
            for output in outputs:
                _deliver(self._futures.pop(output.index), output)
            waiting = self._take_waiting()
        return self._is_last

    def _take_waiting(self) -> list[Job]:
        taken: list[Job] = []
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is None:
                    self._is_last = True
                else:
                    taken.append(job)
        return taken

    def _admit(self, requests: OpenRequests, waiting: list[Job]) -> list[RequestOutput]:
        """Brings the jobs in; gives back the outputs of those that are refused."""
        wanted = [job for job in waiting if job[2].set_running_or_notify_cancel()]
        waiting.clear()
        if not wanted:
            return []
        for _, _, future in wanted:
            self._futures[self._num_added] = future
            self._num_added += 1
        params = [given or self._llm._defaults() for _, given, _ in wanted]
        return requests.add([prompt for prompt, _, _ in wanted], params)

    def _fail(self, waiting: list[Job], error: BaseException) -> None:
        """A step that failed is the failure of all that were in it; the thread goes on."""
        for _, _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        waiting.clear()
        for future in self._futures.values():
            future.set_exception(error)
        self._futures.clear()
        self._num_added = 0


def _deliver(future: Future[RequestOutput], output: RequestOutput) -> None:
    output.index = 0
    if output.error is None:
        future.set_result(output)
    else:
        future.set_exception(output.error)
