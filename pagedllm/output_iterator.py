"""OutputIterator: what `LLM.generate_iter` gives: outputs as they finish, from prompts that are read as there is room.

Takes the LLM's lock for each step and holds none while the caller works on an output. When it is closed or dropped its
requests are aborted: at once if the lock is free, else before the next call.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pagedllm.assembly import Assembly
from pagedllm.call import attach_outputs
from pagedllm.call_lock import CallLock
from pagedllm.open_requests import OpenRequests, abort_requests
from pagedllm.outputs import RequestOutput, RequestOutputs
from pagedllm.prompts import Prompt
from pagedllm.sampling_params import SamplingParams

CHUNK_PROMPTS = 64  # encoded at once


class OutputIterator(Iterator[RequestOutput]):
    def __init__(
        self,
        lock: CallLock,
        open_assembly: Callable[[], Assembly],
        call_number: int,
        prompts: Iterator[tuple[Prompt, SamplingParams]],
        *,
        max_in_flight: int,
        is_ordered: bool,
        raises: bool,
        abandoned: deque[list[str]],
    ) -> None:
        """open_assembly: raises once the LLM is closed. abandoned: where ids go that cannot be aborted at once."""
        self._lock = lock
        self._open_assembly = open_assembly
        self._assembly = open_assembly()
        self._requests = OpenRequests(self._assembly, call_number, is_list=True)
        self._prompts = prompts
        self._max_in_flight = max_in_flight
        self._is_ordered = is_ordered
        self._raises = raises
        self._abandoned = abandoned
        self._finished: dict[int, RequestOutput] = {}  # by index, in the order they finished; not yet given out
        self._next_index = 0
        self._has_more = True
        self._is_closed = False

    def __next__(self) -> RequestOutput:
        try:
            output = self._next()
        except BaseException as error:
            attach_outputs(error, self._close_with_outputs())
            raise
        if output is not None and output.error is not None and self._raises:
            self.close()
            raise output.error
        if output is None:
            self.close()
            raise StopIteration
        return output

    def close(self) -> None:
        """Aborts what is not finished. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        request_ids = self._requests.request_ids
        self._finished.clear()
        if not request_ids:
            return
        if self._lock.acquire_if_free():
            try:
                abort_requests(self._assembly, request_ids)
            finally:
                self._lock.release()
        else:
            self._abandoned.append(request_ids)

    def _close_with_outputs(self) -> RequestOutputs:
        """Closes; what was not given out yet, in input order: finished ones whole, others as far as they came."""
        outputs = list(self._finished.values())
        if not self._is_closed and self._lock.acquire_if_free():
            try:
                outputs += self._requests.abort_with_outputs()
            finally:
                self._lock.release()
        self.close()
        return RequestOutputs(sorted(outputs, key=lambda output: output.index))

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):
            self.close()

    def _next(self) -> RequestOutput | None:
        """The next output, or None at the end."""
        if self._is_closed:
            return None
        output = self._take_finished()
        if output is not None:
            return output
        with self._lock:
            self._open_assembly()
            while output is None and (self._fill() or self._requests.num_in_flight or self._finished):
                for ended in self._requests.step():
                    self._finished[ended.index] = ended
                output = self._take_finished()
        return output

    def _fill(self) -> bool:
        """Reads prompts while there is room for them; True if it read any."""
        room = self._max_in_flight - self._requests.num_in_flight - len(self._finished)
        if not self._has_more or room <= 0:
            return False
        chunk = list(itertools.islice(self._prompts, min(room, CHUNK_PROMPTS)))
        self._has_more = bool(chunk)
        for refused in self._requests.add([prompt for prompt, _ in chunk], [params for _, params in chunk]):
            self._finished[refused.index] = refused
        return self._has_more

    def _take_finished(self) -> RequestOutput | None:
        if not self._is_ordered:
            return self._finished.pop(next(iter(self._finished))) if self._finished else None
        output = self._finished.pop(self._next_index, None)
        self._next_index += output is not None
        return output


def pairs(prompts: Iterator[Prompt], params: SamplingParams | Iterator[Any]) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Each prompt with its params, one for all or one each."""
    if isinstance(params, SamplingParams):
        return zip(prompts, itertools.repeat(params), strict=False)
    return _matched(prompts, params)


def _matched(prompts: Iterator[Prompt], params: Iterator[Any]) -> Iterator[tuple[Prompt, SamplingParams]]:
    for index, prompt in enumerate(prompts):
        given = next(params, None)
        if given is None:
            raise ValueError(f"{index} sampling_params for more prompts: pass one, or one per prompt")
        if not isinstance(given, SamplingParams):
            raise TypeError(f"sampling_params[{index}] must be a SamplingParams, got {type(given).__name__}")
        yield prompt, given
