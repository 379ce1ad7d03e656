"""What a call gives back: plain data that pickles and holds no engine, no tokenizer and no tensor.

RequestOutputs is the list of a call, in input order; RequestOutput one prompt's answer; CompletionOutput one text.
`result_columns` is the row that a request becomes in a result file.
"""

from __future__ import annotations

import html
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from pagedllm.errors import RequestError
    from pagedllm.request import LogprobRows, Request, TokenLogprobs

RESULT_COLUMNS = ("output", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "error", "row")

NUM_SHOWN = 20  # rows in a notebook


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int  # 1 = the most likely token
    decoded_token: str


Entry = TypeVar("Entry")


class _Dicts(Sequence[Entry]):
    """Dicts of logprobs, one a token, built on access."""

    @abstractmethod
    def _build(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self._build(place) for place in range(len(self))[index]]
        return self._build(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<logprobs of {len(self)} tokens>"


class LogprobDicts(_Dicts[dict[int, Logprob]]):
    """One dict per output token, as in vLLM: {token id: Logprob}, the sampled token first."""

    def __init__(self, positions: Sequence[TokenLogprobs], token_texts: Mapping[int, str]) -> None:
        self._positions = tuple(positions)
        self._token_texts = token_texts

    def __len__(self) -> int:
        return len(self._positions)

    def _build(self, index: int) -> dict[int, Logprob]:
        position = self._positions[index]
        return _entries(position.token_ids, position.logprobs, position.sampled_rank, self._token_texts)


class PromptLogprobs(_Dicts[dict[int, Logprob] | None]):
    """One dict per prompt token, as in vLLM: {token id: Logprob}, the prompt's own token first; the first is None.

    token_logprobs [num_prompt_tokens] float32: those of the prompt's own tokens, the first NaN.
    """

    def __init__(self, rows: LogprobRows, num_prompt_tokens: int, token_texts: Mapping[int, str]) -> None:
        """rows: of the prompt's last tokens; those before them have None."""
        self.rows = rows
        self._num_unscored = num_prompt_tokens - len(rows.ranks)
        self._token_texts = token_texts

    def __len__(self) -> int:
        return self._num_unscored + len(self.rows.ranks)

    @property
    def token_logprobs(self) -> NDArray[np.float32]:
        import numpy as np

        return np.concatenate((np.full(self._num_unscored, np.nan, np.float32), self.rows.logprobs[:, 0]))

    def _build(self, index: int) -> dict[int, Logprob] | None:
        rows, i = self.rows, index - self._num_unscored
        if i < 0:
            return None
        return _entries(rows.token_ids[i], rows.logprobs[i], int(rows.ranks[i]), self._token_texts)


def _entries(
    token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], rank: int, token_texts: Mapping[int, str]
) -> dict[int, Logprob]:
    """The token itself first, with its rank, then the top k."""
    ids, values = token_ids.tolist(), logprobs.tolist()
    entries = {ids[0]: Logprob(values[0], rank, token_texts[ids[0]])}
    for place, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), start=1):
        if token_id not in entries:
            entries[token_id] = Logprob(value, place, token_texts[token_id])
    return entries


@dataclass(slots=True)
class CompletionOutput:
    """One generated text. `token_ids` holds the token that ended it, `text` ends before a stop string."""

    index: int
    text: str | None  # None where sampling_params.detokenize was False
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: LogprobDicts | None = field(default=None, repr=False)
    token_logprobs: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the eos or stop token
    reasoning: str | None = None  # of thinking models: what stood between the think tags, then not in `text`
    score: float | None = None  # of beam_search: cumulative_logprob / length ** length_penalty


@dataclass(frozen=True, slots=True)
class Loglikelihood:
    """How likely a continuation is, given its prompt; -logprob / num_tokens is its cross entropy in nats."""

    logprob: float  # the sum
    token_logprobs: NDArray[np.float32] = field(repr=False, compare=False)
    token_ids: list[int] = field(repr=False)  # of the continuation
    num_tokens: int
    is_greedy: bool  # whether greedy decoding after the prompt would take just these tokens


@dataclass(frozen=True, slots=True)
class Classification:
    """The likeliest choice, and the probability of each as if nothing else were possible."""

    label: str
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What a request cost. Depends on the batch, the texts do not."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_steps: int  # from its first admission to its end
    max_output_tokens: int  # of each sample
    num_samples: int  # that ran; greedy ones are equal and run once


@dataclass(slots=True)
class RequestOutput:
    """One prompt's answer: n outputs, or one per beam. A failed one has `outputs == []`, `text is None` and `error`."""

    request_id: str
    index: int  # place of the prompt in the call
    prompt: str | None  # the final text, after the chat template; None where ids were given
    prompt_token_ids: list[int] = field(repr=False)
    outputs: list[CompletionOutput]
    error: RequestError | None = None
    metadata: Any = None
    prompt_logprobs: PromptLogprobs | None = field(default=None, repr=False)
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, repr=False)
    finished: bool = True  # False: an interrupt came first, the text is what there was

    @property
    def text(self) -> str | None:
        return self.outputs[0].text if self.outputs else None

    @classmethod
    def of_refused(
        cls, request_id: str, index: int, error: RequestError, prompt: str | None, token_ids: list[int], metadata: Any
    ) -> RequestOutput:
        """A prompt that was refused before any work; token_ids may be empty."""
        return cls(request_id, index, prompt, token_ids, [], error=error, metadata=metadata)

    @classmethod
    def of_request(
        cls, request: Request, prompt: str | None, metadata: Any, token_text: Callable[[int], str]
    ) -> RequestOutput:
        """A request that ran, whole or not; token_text: how a single token reads, for logprobs."""
        output = cls(
            request_id=request.request_id,
            index=request.prompt_index,
            prompt=prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            outputs=[],
            error=request.error,
            metadata=metadata,
            num_cached_tokens=request.num_cached_tokens,
            metrics=RequestMetrics(
                request.num_prompt_tokens,
                sum(sample.num_output_tokens for sample in request.samples),
                request.num_cached_tokens,
                sum(sample.num_preemptions for sample in request.samples),
                request.num_steps,
                request.max_output_tokens,
                len(request.samples),
            ),
            finished=all(sample.is_finished and sample.finish_reason != "abort" for sample in request.samples),
        )
        if request.error is None:
            samples = request.samples
            if len(samples) == 1:  # greedy ones are all equal and run once
                samples *= request.sampling_params.n
            output.outputs = [_completion(sample, index, token_text) for index, sample in enumerate(samples)]
            if request.sampling_params.prompt_logprobs is not None and not request.num_unscored_tokens:
                rows = request.scored_rows()
                texts = {token_id: token_text(token_id) for token_id in set(rows.token_ids.ravel().tolist())}
                output.prompt_logprobs = PromptLogprobs(rows, request.num_prompt_tokens, texts)
        return output


def _completion(request: Request, index: int, token_text: Callable[[int], str]) -> CompletionOutput:
    completion = CompletionOutput(
        index=index,
        text=request.text,
        token_ids=request.output_token_ids,
        finish_reason=None if request.finish_reason == "error" else request.finish_reason,
        stop_reason=request.stop_reason,
    )
    if request.thinking is not None and completion.text is not None:
        completion.reasoning, completion.text = request.thinking.split(completion.text)
    if request.score is not None:
        completion.score, completion.cumulative_logprob = request.score, request.cumulative_logprob
    if request.sampling_params.logprobs is not None:
        import numpy as np

        positions = request.logprobs
        distinct = {token_id for position in positions for token_id in position.token_ids.tolist()}
        completion.logprobs = LogprobDicts(positions, {token_id: token_text(token_id) for token_id in distinct})
        completion.token_logprobs = np.array([position.logprobs[0] for position in positions], np.float32)
        completion.cumulative_logprob = request.cumulative_logprob
    return completion


def result_columns(output: RequestOutput, n: int = 1) -> dict[str, Any]:
    """The columns that a result row has besides the input's own: always these, one type each.

    n: outputs per row; if more than one, what each of them has of its own are lists, of n in a failed row too.
    A thinking model's thought is not among them: it is `CompletionOutput.reasoning`.
    """
    error_text = "" if output.error is None else f"{output.error.code}: {output.error.message}"
    texts: list[str | None] = [None] * n
    reasons, stops, counts = ["error"] * n, [""] * n, [0] * n
    if output.error is None:
        texts = [completion.text or "" for completion in output.outputs]
        reasons = [completion.finish_reason or "" for completion in output.outputs]
        stops = ["" if c.stop_reason is None else str(c.stop_reason) for c in output.outputs]
        counts = [len(completion.token_ids) for completion in output.outputs]
    per_output = (texts, reasons, stops, counts) if n > 1 else (texts[0], reasons[0], stops[0], counts[0])
    values = (*per_output[:3], len(output.prompt_token_ids), per_output[3], error_text, output.index)
    return dict(zip(RESULT_COLUMNS, values, strict=True))


class RequestOutputs(list[RequestOutput]):
    """The answers of a call, in input order: a list with a few views of it."""

    @property
    def texts(self) -> list[str | None]:
        return [output.text for output in self]

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict per prompt: `prompt`, `metadata` where any prompt has some, and the columns of a result file.

        Where a prompt has several outputs, `output`, `finish_reason`, `stop_reason` and `completion_tokens` are lists.
        """
        n = max((len(output.outputs) for output in self), default=1)
        has_metadata = any(output.metadata is not None for output in self)
        rows = []
        for output in self:
            row: dict[str, Any] = {"prompt": output.prompt}
            if has_metadata:
                row["metadata"] = output.metadata
            rows.append({**row, **result_columns(output, n)})
        return rows

    def to_pandas(self) -> pd.DataFrame:
        """`to_dicts` as a DataFrame; needs pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas, or use to_dicts()") from error
        return pd.DataFrame(self.to_dicts())

    def _repr_html_(self) -> str:
        """A table for notebooks: the first 20 rows, everything escaped."""
        names = ("prompt", "output", "finish_reason", "error")
        lines = ["<table><thead><tr><th></th>", *(f"<th>{name}</th>" for name in names), "</tr></thead><tbody>"]
        for output in self[:NUM_SHOWN]:
            row = {"prompt": output.prompt, **result_columns(output)}
            cells = "".join(f"<td>{html.escape(str('' if row[name] is None else row[name]))}</td>" for name in names)
            lines.append(f"<tr><th>{output.index}</th>{cells}</tr>")
        rest = f"<p>{len(self) - NUM_SHOWN:,} more</p>" if len(self) > NUM_SHOWN else ""
        return "".join(lines) + "</tbody></table>" + rest
