"""drive: keeps an engine busy until a source of requests runs dry; what is left when it stops early is aborted.

`feed` makes a source of a long line of requests: those far behind need not be in the engine yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

from pagedllm.engine.core import EngineCore
from pagedllm.errors import PagedLLMError
from pagedllm.request import Request

SEQS_AHEAD = 4  # requests in the engine, in units of what it runs at once: enough to choose from
Source = Callable[[int], Sequence[Request] | None]  # number in flight -> requests to add now; None: no more will come


def feed(requests: Iterator[Request], max_num_seqs: int) -> Source:
    """A source that keeps some requests waiting in the engine, and takes more from the iterator as they go."""
    max_in_flight = SEQS_AHEAD * max_num_seqs

    def source(num_in_flight: int) -> list[Request] | None:
        if num_in_flight > max_in_flight // 2:
            return []
        return list(itertools.islice(requests, max_in_flight - num_in_flight)) or None

    return source


def drive(engine: EngineCore, source: Source) -> Generator[list[Request], None, None]:
    """Yields after each step the requests that ended in it, perhaps none.

    Closing the iterator, or any exception (KeyboardInterrupt too), aborts the requests in flight: their objects then
    hold what they had, with finish_reason "abort", and the engine is free for the next call. Requests of others that
    are in the engine (`open_requests.py`) advance along with these; where one ends it is set aside for its owner.
    """
    in_flight: dict[str, Request] = {}
    has_more = True
    try:
        while has_more or in_flight:
            added = source(len(in_flight)) if has_more else None
            has_more = added is not None
            for request in added or ():
                in_flight[request.request_id] = request
                engine.add_request(request)
            ended = engine.step() if in_flight else []
            if in_flight and not ended and not engine.has_unfinished_requests():
                raise PagedLLMError(
                    f"the engine has lost {len(in_flight)} requests: something emptied it during a step "
                    "(reading EngineCore.scheduler from inside one does)"
                )
            mine = [request for request in ended if in_flight.pop(request.request_id, None) is not None]
            if len(mine) < len(ended):
                engine.set_aside(request for request in ended if request not in mine)
            yield mine
    finally:
        if in_flight:
            engine.abort(list(in_flight))
