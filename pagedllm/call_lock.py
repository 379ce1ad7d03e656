"""CallLock: one call at a time on an LLM; others wait in the order they came.

A call from inside a call (a callback, a prompt iterator) would wait for itself: it raises instead. So does a process
that was forked after the LLM was made, since the threads of the parent are not there.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from types import TracebackType


class CallLock:
    def __init__(self) -> None:
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()
        self._owner: int | None = None

    def check_process(self) -> None:
        """Raises RuntimeError in a fork of the process that made the LLM."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this LLM belongs to process {self._pid} and cannot be used in its fork {os.getpid()}: "
                "make the LLM in the process that uses it"
            )

    def acquire_if_free(self) -> bool:
        """Takes the lock without waiting; True where it did: `release` then. For finalizers, which may run anywhere."""
        with self._condition:
            if self._owner is not None or self._queue or os.getpid() != self._pid:
                return False
            self._owner = threading.get_ident()
            return True

    def release(self) -> None:
        with self._condition:
            self._owner = None
            self._condition.notify_all()

    def __enter__(self) -> None:
        self.check_process()
        me, ticket = threading.get_ident(), object()
        with self._condition:
            if self._owner == me:
                raise RuntimeError("this LLM is already running a call in this thread: no call from inside a call")
            self._queue.append(ticket)
            try:
                self._condition.wait_for(lambda: self._owner is None and self._queue[0] is ticket)
                self._owner = me
            finally:
                self._queue.remove(ticket)
                self._condition.notify_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
