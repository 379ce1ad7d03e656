"""OutputProcessor: takes sampled tokens into requests, and knows when an output ends and what its text is.

Order within one token: logprobs, token, then the ends: eos and stop ids, stop strings, a choice after which nothing can
come, length. An interrupt between two lines leaves a request that EngineCore can still hand out, because
`finish_reason` is set last: where it is set, all else is. Knows nothing of blocks and turns. The Scheduler calls
`append`, EngineCore the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedllm.engine.detokenizer import Detokenizer, TextStream
from pagedllm.request import FinishReason, Request, TokenLogprobs


@dataclass(slots=True)
class _Ends:
    """How one request may end."""

    min_tokens: int
    token_ids: frozenset[int]  # eos and stop ids
    stop_strings: StopStringFinder | None


class OutputProcessor:
    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._ends: dict[str, _Ends] = {}  # of requests with output tokens; kept through preemption

    def append(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Takes one sampled token; True if the request ended with it, its text and finish_reason set."""
        ends = self._ends.get(request.request_id) or self._open(request)
        if logprobs is not None:
            request.logprobs.append(logprobs)
            request.cumulative_logprob += float(logprobs.logprobs[0])
        request.token_ids.append(token_id)
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        has_enough = num_output_tokens >= ends.min_tokens
        if has_enough and token_id in ends.token_ids:
            self._end_by_token(request, ends, token_id)
            return True
        if ends.stop_strings is not None:
            if has_enough and token_id in request.stop_tokens:
                self._end_by_stop_token(request, ends.stop_strings, request.stop_tokens[token_id])
                return True
            stop = ends.stop_strings.push(token_id, has_enough)
            if stop is not None:
                self._set_end(request, "stop", stop, ends.stop_strings.text)
                return True
        choices = request.choices
        if choices is not None and has_enough and choices.state(choices.prefix(request.output_token_ids)).is_final:
            self._end_without_stop(request, ends, "stop")
            return True
        if num_output_tokens >= request.max_output_tokens:
            self._end_without_stop(request, ends, "length")
            return True
        return False

    def close(self, request: Request) -> None:
        """Forgets a request that has ended, and sets its text where no token ended it: after an abort, say."""
        ends = self._ends.pop(request.request_id, None)
        if request.text is not None or request.error is not None:
            return
        if ends is not None and ends.stop_strings is not None:
            ends.stop_strings.finish(is_tested=False)
            request.text = ends.stop_strings.text
        elif request.sampling_params.detokenize:
            request.text = self._detokenizer.decode(request)

    def _open(self, request: Request) -> _Ends:
        params = request.sampling_params
        eos_token_ids = () if params.ignore_eos else request.eos_token_ids
        stop_strings = None
        if params.stops:
            stream = self._detokenizer.stream(request)
            stop_strings = StopStringFinder(params.stops, params.include_stop_str_in_output, stream)
            for number, token_id in enumerate(request.output_token_ids, start=1):  # of an earlier run: none ended it
                stop_strings.push(token_id, is_tested=number >= params.min_tokens)
        ends = _Ends(params.min_tokens, frozenset((*eos_token_ids, *(params.stop_token_ids or ()))), stop_strings)
        self._ends[request.request_id] = ends
        return ends

    def _end_by_token(self, request: Request, ends: _Ends, token_id: int) -> None:
        finder = ends.stop_strings
        if finder is None:
            self._set_end(request, "stop", token_id, None)
            return
        stop: str | int | None = None
        if request.sampling_params.include_stop_str_in_output:
            stop = finder.push(token_id, is_tested=True)
        stop = stop or finder.finish(is_tested=True)  # text that was held back may hold a stop string, which came first
        self._set_end(request, "stop", token_id if stop is None else stop, finder.text)

    def _end_by_stop_token(self, request: Request, finder: StopStringFinder, stop: str) -> None:
        """A stop string that is a special token's text, which the text itself leaves out."""
        earlier = finder.finish(is_tested=True)
        if earlier is not None:
            self._set_end(request, "stop", earlier, finder.text)
        else:
            shown = stop if request.sampling_params.include_stop_str_in_output else ""
            self._set_end(request, "stop", stop, finder.text + shown)

    def _end_without_stop(self, request: Request, ends: _Ends, reason: FinishReason) -> None:
        finder = ends.stop_strings
        if finder is None:
            self._set_end(request, reason, None, None)
            return
        stop = finder.finish(is_tested=request.num_output_tokens >= ends.min_tokens)
        self._set_end(request, reason if stop is None else "stop", stop, finder.text)

    def _set_end(self, request: Request, reason: FinishReason, stop: str | int | None, text: str | None) -> None:
        request.stop_reason = stop
        if text is None and request.sampling_params.detokenize:
            text = self._detokenizer.decode(request)
        request.text = text
        request.finish_reason = reason


class StopStringFinder:
    """Finds the first stop string in a growing text, across tokens and inside them, and cuts the text there.

    The match that begins first wins; of those that begin together, the shortest. While too few tokens are out
    (min_tokens) text is taken but not tested, and later a match must end in text that came after. A push costs the
    new text and as much of the old as the longest stop string, so long outputs cost no more per token than short ones.
    """

    def __init__(self, stops: tuple[str, ...], is_included: bool, stream: TextStream) -> None:
        self._stops = stops
        self._is_included = is_included
        self._stream = stream
        self._overlap = max(map(len, stops)) - 1
        self._pieces: list[str] = []
        self._length = 0  # characters in the pieces
        self._tail = ""  # the last `overlap` of them
        self._num_untestable = 0  # leading characters in which no match may end
        self._end: int | None = None  # where the text is cut

    @property
    def text(self) -> str:
        return "".join(self._pieces)[: self._end]

    def push(self, token_id: int, is_tested: bool) -> str | None:
        return self._take(self._stream.push((token_id,)), is_tested)

    def finish(self, is_tested: bool) -> str | None:
        """No token follows: tests the text that the stream held back."""
        return self._take(self._stream.finish(), is_tested)

    def _take(self, piece: str, is_tested: bool) -> str | None:
        window = self._tail + piece
        window_begin = self._length - len(self._tail)
        self._pieces.append(piece)
        self._length += len(piece)
        self._tail = window[-self._overlap :] if self._overlap else ""
        if not is_tested:
            self._num_untestable = self._length
            return None
        first_end = self._num_untestable - window_begin + 1  # a match must end here or later
        matches = []
        for stop in self._stops:
            begin = window.find(stop, max(0, first_end - len(stop)))
            if begin >= 0:
                matches.append((begin, len(stop), stop))
        if not matches:
            return None
        begin, length, stop = min(matches)
        self._end = window_begin + begin + (length if self._is_included else 0)
        return stop
