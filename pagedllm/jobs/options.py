"""JobOptions: the keywords of `run_file`, checked without a model and without a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagedllm.jobs.prompting import PromptForm
from pagedllm.jobs.report_page import check_report_path
from pagedllm.jobs.result_form import ResultForm, refuse_prompt_logprobs
from pagedllm.jobs.score_rows import LOGLIKELIHOOD, NO_PARAMS, TASKS
from pagedllm.prompts import brief
from pagedllm.sampling_params import SamplingParams, is_int

IfExists = Literal["resume", "overwrite", "fail"]
Retry = Literal["failed", "cut"]
Order = Literal["input", "completion"]
CHOICES = {
    "if_exists": ("resume", "overwrite", "fail"),
    "retry": (None, "failed", "cut"),
    "order": ("input", "completion"),
    "task": TASKS,
}


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Raises ValueError or NotSupportedError, naming field and value. The fields are told of in `LLM.run_file`."""

    sampling_params: Mapping[str, Any]
    task: str = TASKS[0]
    if_exists: IfExists = "resume"
    retry: Retry | None = None
    limit: int | None = None
    shard: tuple[int, int] = (1, 1)
    order: Order = "input"
    max_failed: int | float | None = None  # rows, or a share (a float)
    template: str | None = None
    chat: bool = False
    system: str | None = None
    keep: str | Sequence[str] = "all"  # "all", "none" or names
    output_column: str = "output"
    output_prefix: str = ""
    report: str | os.PathLike[str] | None = None
    report_text: bool = False

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                words = ", ".join(repr(choice) for choice in choices)
                raise ValueError(f"{name} must be one of {words}, got {getattr(self, name)!r}")
        if self.limit is not None and (not is_int(self.limit) or self.limit < 1):
            raise ValueError(f"limit must be None or an int >= 1, got {self.limit!r}")
        number, num_shards = self.shard
        if not 1 <= number <= num_shards:
            raise ValueError(f"shard must be (i, n) with 1 <= i <= n, got {self.shard!r}")
        if self.max_failed is not None and not 0 <= self.max_failed <= (
            1 if isinstance(self.max_failed, float) else float("inf")
        ):
            raise ValueError(f"max_failed must be None, an int >= 0 or a share from 0.0 to 1.0, got {self.max_failed}")
        if self.retry is not None and self.if_exists != "resume":
            raise ValueError(f"retry={self.retry!r} continues a job: it needs if_exists='resume'")
        if self.report is not None:
            check_report_path(os.fspath(self.report))
        self._verify_texts()
        for name, value in self.sampling_params.items():
            if not _is_json(value):
                raise ValueError(f"a job's sampling_params must be JSON values, got {name}={brief(value)}")
        refuse_prompt_logprobs(SamplingParams.from_json(self.sampling_params))
        if self.task == LOGLIKELIHOOD and self.sampling_params:
            raise ValueError(f"{NO_PARAMS}: got {', '.join(self.sampling_params)}")
        self.result_form()

    def _verify_texts(self) -> None:
        for name in ("template", "system"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ValueError(f"{name} must be None or a str, got {getattr(self, name)!r}")
        if not isinstance(self.chat, bool):
            raise ValueError(f"chat must be a bool, got {self.chat!r}")
        names = self.keep
        if isinstance(names, str) and names not in ("all", "none"):
            raise ValueError(f"keep must be 'all', 'none' or a list of columns, got {names!r}")
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"keep must be 'all', 'none' or a list of columns, got {names!r}")
        for name in ("output_column", "output_prefix"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a str, got {getattr(self, name)!r}")

    def prompt_form(self) -> PromptForm:
        return PromptForm(self.template, self.chat or self.system is not None, self.system)

    def result_form(self) -> ResultForm:
        """Raises ValueError for names that the result's columns cannot have."""
        keep = {"all": None, "none": ()}[self.keep] if isinstance(self.keep, str) else tuple(self.keep)
        n, logprobs = self.sampling_params.get("n"), self.sampling_params.get("logprobs")
        return ResultForm(1 if n is None else n, logprobs, keep, self.output_column, self.output_prefix, self.task)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
