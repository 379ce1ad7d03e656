"""FileMethods: the calls of LLM that run files of prompts.

What may be asked is checked by `open_job` in `jobs`, which lies above: it is imported when it is called. `run_job` and
`plan_job` take a job that was opened before the model was loaded, as the command line does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pagedllm.config import EngineConfig

if TYPE_CHECKING:
    import os

    from pagedllm.assembly import Assembly
    from pagedllm.call_lock import CallLock
    from pagedllm.jobs.options import IfExists, Order, Retry
    from pagedllm.jobs.plan import JobPlan
    from pagedllm.jobs.report import JobReport
    from pagedllm.jobs.runner import Job


class FileMethods(ABC):
    config: EngineConfig
    _lock: CallLock

    @abstractmethod
    def _open(self) -> Assembly: ...

    def run_file(
        self,
        input: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        sampling_params: Mapping[str, Any] | None = None,
        task: Literal["generate", "loglikelihood"] = "generate",
        if_exists: IfExists = "resume",
        retry: Retry | None = None,
        limit: int | None = None,
        shard: tuple[int, int] = (1, 1),
        order: Order = "input",
        max_failed: int | float | None = None,
        report: str | os.PathLike[str] | None = None,
        report_text: bool = False,
        template: str | None = None,
        chat: bool = False,
        system: str | None = None,
        keep: str | Sequence[str] = "all",
        output_column: str = "output",
        output_prefix: str = "",
    ) -> JobReport:
        """Runs a file of rows into a file of results, in input order. Again: it continues.

        JSON lines, plain or .gz; .csv and .tsv; .parquet. A row has `prompt` or `messages`, perhaps `sampling_params`,
        and any other fields, which come back with the result's columns. The row's own sampling_params come first, then
        those given here (a dict of fields), then the model's generation_config.json, then the neutral defaults.

        task: "loglikelihood" scores each row's `continuation` after its prompt, instead of writing one: no sampling
            parameters then, and the columns logprob, is_greedy, token_ids and token_logprobs besides.
        if_exists: "resume" continues what an earlier run of the same job left (in OUT.partial) and computes what is new
            in the input; "overwrite" starts anew; "fail" refuses. retry: "failed" rows, or those that were "cut" by a
            length, are run again, the latter from where they stopped. limit: the first rows only. shard: (i, n), every
            n-th row from the i-th on. order: of the results, "input" or "completion". max_failed: rows, or a share
            (float); the job stops at more.
        template: makes the prompt: {column} is replaced, other braces stay. chat: the prompt is one user message,
            behind `system` where that is given, which implies chat.
        keep: of the input's columns: "all", "none" or a list. output_column: the name of the text's column;
            output_prefix: stands before the names of the result's columns.
        report: a file to tell how it went, .html (with charts where matplotlib is installed), .json or .md; rows by
            number and id, with report_text also some outputs.

        Raises as `pagedllm.jobs.opening.open_job` and `Job.run`; a bad row has its reason in its `error` column.
        """
        from pagedllm.jobs.opening import open_job

        with open_job(
            input,
            output,
            config=self.config,
            sampling_params=sampling_params,
            task=task,
            if_exists=if_exists,
            retry=retry,
            limit=limit,
            shard=shard,
            order=order,
            max_failed=max_failed,
            report=report,
            report_text=report_text,
            template=template,
            chat=chat,
            system=system,
            keep=keep,
            output_column=output_column,
            output_prefix=output_prefix,
        ) as job:
            return self.run_job(job)

    def run_job(
        self,
        job: Job,
        on_progress: Callable[[JobReport], None] | None = None,
        on_plan: Callable[[JobPlan], None] | None = None,
    ) -> JobReport:
        """Runs a job that `pagedllm.jobs.opening.open_job` made before this model was loaded."""
        with self._lock:
            return job.run(self._open(), self.config, on_progress, on_plan)

    def plan_job(self, job: Job) -> JobPlan:
        """What running this job would do; nothing of it is written. The job is used up."""
        with self._lock:
            return job.plan(self._open(), self.config)
