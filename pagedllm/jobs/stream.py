"""StreamWork: rows to a pipe, a device or stdout, in input order or as they end, by a bounded window of rows ahead.

Nothing can be continued there, so nothing is planned beyond the window: neither a huge input nor a slow first row fills
the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from pagedllm.assembly import Assembly
from pagedllm.driver import SEQS_AHEAD, drive
from pagedllm.jobs.formats import Row
from pagedllm.jobs.rows import CHUNK_ROWS, ReadyRow, RowReader
from pagedllm.jobs.score_rows import tell_end
from pagedllm.outputs import RequestOutput
from pagedllm.request import Request

MAX_HELD_BYTES = 64 << 20  # of result lines that wait for an earlier row


class StreamWork:
    def __init__(self, assembly: Assembly, reader: RowReader, *, is_ordered: bool) -> None:
        self._assembly = assembly
        self._reader = reader
        self._is_ordered = is_ordered
        self._max_in_flight = SEQS_AHEAD * assembly.max_num_seqs
        self._chunk_rows = min(CHUNK_ROWS, self._max_in_flight)
        self._read: dict[int, ReadyRow] = {}  # by row index, until its output is yielded
        self._finished: dict[int, RequestOutput] = {}
        self._order: dict[int, None] = {}  # row indices that were read and not yielded, in input order
        self._held_bytes = 0

    def steps(self) -> Generator[list[tuple[ReadyRow, RequestOutput]], None, None]:
        """After each step the rows that come next and are finished, perhaps none."""
        token_text = self._assembly.builder.token_text
        with contextlib.closing(drive(self._assembly.engine, self._source)) as steps:
            for ended in steps:
                for request in ended:
                    row = self._read[request.prompt_index]
                    text = row.encoded.text
                    tell_end(request)
                    self._finish(RequestOutput.of_request(request, text, None, token_text))
                yield self._ready()

    def _source(self, num_in_flight: int) -> list[Request] | None:
        """Reads some rows if there is room for them; those that can run become requests."""
        room = self._max_in_flight - num_in_flight
        if room < self._chunk_rows or (self._held_bytes > MAX_HELD_BYTES and num_in_flight):
            return []
        ready = self._reader.read(self._chunk_rows)
        if not ready:
            return None
        requests = []
        for row in ready:
            index = row.line.row
            self._read[index] = row
            self._order[index] = None
            if row.params is None:
                self._finish(row.refusal())
            else:
                requests.append(
                    self._reader.build(
                        index,
                        row.encoded.token_ids,
                        row.params,
                        row.id,
                        num_context_tokens=row.encoded.num_context_tokens,
                    )
                )
        return requests

    def _ready(self) -> list[tuple[ReadyRow, RequestOutput]]:
        ready = []
        for index in tuple(self._order if self._is_ordered else self._finished):
            output = self._finished.pop(index, None)
            if output is None:
                break
            row = self._read.pop(index)
            del self._order[index]
            self._held_bytes -= _num_bytes(row.row, output)
            ready.append((row, output))
        return ready

    def _finish(self, output: RequestOutput) -> None:
        self._finished[output.index] = output
        self._held_bytes += _num_bytes(self._read[output.index].row, output)


def _num_bytes(row: Row, output: RequestOutput) -> int:
    """About what a finished row holds."""
    return len(row.raw or "") + len(output.text or "") + 4 * len(output.prompt_token_ids)
