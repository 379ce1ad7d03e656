"""ResultForm: which columns a result has, by which names and types, and what of the input row stays beside them.

The journal holds columns by their own names; the form gives the names of the result file. With n outputs a row, four
columns (and those of logprobs) are lists of n in every row, failed ones too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedllm.errors import RequestError
from pagedllm.jobs.formats import columns_text, result_line
from pagedllm.jobs.score_rows import LOGLIKELIHOOD, NO_PARAMS, SCORE_COLUMNS, TASKS, no_score, score_columns
from pagedllm.outputs import RESULT_COLUMNS, CompletionOutput, RequestOutput
from pagedllm.sampling_params import SamplingParams

LOGPROB_COLUMNS = ("token_ids", "token_logprobs", "top_logprobs")
PER_OUTPUT = ("output", "finish_reason", "stop_reason", "completion_tokens", *LOGPROB_COLUMNS)
TYPES = {
    "output": "string",
    "finish_reason": "string",
    "stop_reason": "string",
    "prompt_tokens": "int",
    "completion_tokens": "int",
    "error": "string",
    "row": "int",
    "token_ids": "int[]",
    "token_logprobs": "float[]",
    "top_logprobs": "top[][]",
    "logprob": "double",
    "is_greedy": "bool",
}


@dataclass(frozen=True, slots=True)
class ResultForm:
    """n: outputs a row; keep: names of the input's columns, None: all. Raises ValueError for a name used twice."""

    n: int = 1
    logprobs: int | None = None
    keep: tuple[str, ...] | None = None
    output_column: str = "output"
    output_prefix: str = ""
    task: str = TASKS[0]

    def __post_init__(self) -> None:
        names = list(self.names().values())
        if not all(names):
            raise ValueError("output_column must not be empty")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"output_column={self.output_column!r}: {twice!r} is the name of another result column")

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON has them."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> ResultForm:
        keep = settings["keep"]
        return cls(**{**settings, "keep": None if keep is None else tuple(keep)})

    def columns(self) -> tuple[str, ...]:
        """By their own names, in order."""
        more: tuple[str, ...] = () if self.logprobs is None else LOGPROB_COLUMNS
        if self.task == LOGLIKELIHOOD:
            more = SCORE_COLUMNS
        return (*RESULT_COLUMNS[:-1], *more, RESULT_COLUMNS[-1])

    def names(self) -> dict[str, str]:
        """Own name -> name in the file."""
        names = {name: self.output_prefix + name for name in self.columns()}
        if self.output_column != "output":
            names["output"] = self.output_column
        return names

    def types(self) -> dict[str, str]:
        """Name in the file -> type, [] for each list."""
        lists = "[]" if self.n > 1 else ""
        return {name: TYPES[column] + (lists if column in PER_OUTPUT else "") for column, name in self.names().items()}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises ValueError where these columns of the input cannot stand beside the result's."""
        for name in self.keep or ():
            if name not in columns:
                raise ValueError(f"keep: {name!r} is no column: the columns are {', '.join(columns)}")
        clash = next((name for name in columns if name in self.reserved()), None)
        if clash is not None:
            raise ValueError(
                f"the field {clash!r} has the name of a result column: rename it, leave it out (--keep), or rename the "
                "results (--output-column, --output-prefix)"
            )

    def reserved(self) -> frozenset[str]:
        """Names that no column of the input may have, since it would stay beside a result's."""
        names = frozenset(self.names().values())
        return names if self.keep is None else names.intersection(self.keep)

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError where a row's own parameters would give columns of another type, or none."""
        if self.task == LOGLIKELIHOOD:
            raise RequestError("invalid_parameter", NO_PARAMS, field="sampling_params")
        refuse_prompt_logprobs(params)
        for name, value, wanted in (("n", params.n, self.n), ("logprobs", params.logprobs, self.logprobs)):
            if value != wanted:
                text = f"{name}={value} in a row, {wanted} in the job: all rows of a file have the same columns, pass "
                raise RequestError("invalid_parameter", f"{text}--{name} {value}", field=name)

    def values(self, output: RequestOutput) -> dict[str, Any]:
        """The columns of a result but `row`, by their own names."""
        error = output.error
        if self.task == LOGLIKELIHOOD:
            plain = dataclasses.replace(self, task=TASKS[0]).values(output)
            values = plain | (no_score() if error is not None else score_columns(output))
            return {name: values[name] for name in self.columns() if name != "row"}
        one_each = [_failed()] * self.n if error is not None else [_completed(o) for o in output.outputs]
        values = {}
        for name in self.columns():
            if name == "prompt_tokens":
                values[name] = len(output.prompt_token_ids)
            elif name == "error":
                values[name] = "" if error is None else f"{error.code}: {error.message}"
            elif name != "row":
                values[name] = one_each[0][name] if self.n == 1 else [one[name] for one in one_each]
        return values

    def line(self, raw: str | None, text: str, row: int) -> bytes:
        """A result line. text: the journal's columns as JSON without braces; row: of the input."""
        if self.output_prefix or self.output_column != "output":
            text = columns_text(self.named(json.loads(f"{{{text}}}"), row))
        else:
            text = f'{text}, "row": {row}'
        return result_line(raw if raw is None else self.kept(raw), text)

    def named(self, values: Mapping[str, Any], row: int) -> dict[str, Any]:
        """By the names of the file, the row among them."""
        return {name: row if column == "row" else values[column] for column, name in self.names().items()}

    def kept(self, raw: str) -> str:
        """The object's text with the fields that stay, each as it was."""
        if self.keep is None:
            return raw
        return "{" + ", ".join(text for name, text in _fields(raw) if name in self.keep) + "}"


def refuse_prompt_logprobs(params: SamplingParams) -> None:
    """Raises RequestError: there is no column for them."""
    if params.prompt_logprobs is not None:
        raise RequestError("unsupported", "prompt_logprobs are not written to files", field="prompt_logprobs")


def _completed(output: CompletionOutput) -> dict[str, Any]:
    values: dict[str, Any] = {
        "output": output.text or "",
        "finish_reason": output.finish_reason or "",
        "stop_reason": "" if output.stop_reason is None else str(output.stop_reason),
        "completion_tokens": len(output.token_ids),
        "token_ids": output.token_ids,
    }
    if output.logprobs is not None and output.token_logprobs is not None:
        values["token_logprobs"] = [_number(value) for value in output.token_logprobs.tolist()]
        values["top_logprobs"] = [
            [
                {"token_id": id, "token": entry.decoded_token, "logprob": _number(entry.logprob), "rank": entry.rank}
                for id, entry in sorted(position.items(), key=lambda item: item[1].rank)
            ]
            for position in output.logprobs
        ]
    return values


def _failed() -> dict[str, Any]:
    values = {"output": None, "finish_reason": "error", "stop_reason": "", "completion_tokens": 0}
    return values | {name: [] for name in LOGPROB_COLUMNS}


def _number(value: float) -> float | None:
    """JSON has no infinity: the logprob of a token that cannot come is null."""
    return value if abs(value) != float("inf") else None


def _fields(raw: str) -> Iterable[tuple[str, str]]:
    """(name, text with its name) of an object's fields. raw: JSON that was parsed before."""
    decoder, position = json.JSONDecoder(), 1
    while True:
        begin = position = _skip(raw, position)
        if raw[position] == "}":
            return
        name, position = decoder.raw_decode(raw, position)
        _, position = decoder.raw_decode(raw, _skip(raw, _skip(raw, position) + 1))
        yield name, raw[begin:position]
        position = _skip(raw, position)
        if raw[position] == "}":
            return
        position += 1


def _skip(raw: str, position: int) -> int:
    while raw[position] in " \t\n\r":
        position += 1
    return position
