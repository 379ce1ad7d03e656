"""Call: one call of generate or chat, from encoded prompts to RequestOutputs.

Construction checks every prompt with its params and builds the requests; `run` drives the engine; `outputs` may be
asked for at any time, also after an interrupt.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import numpy as np

from pagedllm.assembly import Assembly
from pagedllm.beam_search_params import BeamSearchParams
from pagedllm.driver import drive, feed
from pagedllm.engine.offline_plan import find_duplicates, plan_order
from pagedllm.engine.run_log import Ended, RunLog, Work
from pagedllm.errors import BatchError, RequestError
from pagedllm.notices import LOGGER
from pagedllm.outputs import RequestOutput, RequestOutputs
from pagedllm.progress import Bar, is_watched
from pagedllm.request import Request
from pagedllm.request_builder import EncodedPrompt, stream_key
from pagedllm.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

NUM_LISTED = 5  # bad indices that an error lists


class Call:
    def __init__(
        self,
        assembly: Assembly,
        name: str,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        *,
        call_number: int,
        first_request_number: int,
        priorities: Sequence[int],
        beam_search: BeamSearchParams | None = None,
    ) -> None:
        """name: "prompts" or "messages", for errors; params and priorities: one per prompt; beam_search: of all."""
        self._assembly = assembly
        self._name = name
        self._prompts = prompts
        self._first_request_number = first_request_number
        self._requests: dict[int, Request] = {}  # by index
        self._errors: dict[int, RequestError] = {}
        self._log: RunLog | None = None
        self._num_shared_tokens = 0  # that the prefix cache should have
        self._duplicate_of: dict[int, int] = {}  # indices that are not run, because another gives the same output
        copies: dict[int, SamplingParams] = {}  # by id: one engine's own copy of each object the caller passed
        seed = assembly.seed
        for index, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
            try:
                if id(given) not in copies:
                    assembly.builder.check_params(given)
                    copies[id(given)] = given.clone()
            except RequestError as error:
                self._errors[index] = _placed(error, f"sampling_params[{index}]", index)
                continue
            try:
                assembly.builder.check_prompt(prompt, given)
            except RequestError as error:
                self._errors[index] = _placed(error, f"{name}[{index}]", index)
                continue
            self._requests[index] = assembly.builder.build(
                self._request_id(index),
                index,
                prompt,
                copies[id(given)],
                stream_key(seed, call_number, index),
                priorities[index],
            )
            self._requests[index].beam_search = beam_search
        if assembly.engine.scheduler.policy.plans_ahead:
            self._plan()

    def raise_if_refused(self) -> None:
        """RequestError for the first prompt that cannot be run; its text lists the first five indices."""
        if not self._errors:
            return
        indices = sorted(self._errors)
        first = self._errors[indices[0]]
        text = first.message
        if len(indices) > 1:
            listed = ", ".join(map(str, indices[:NUM_LISTED])) + (", ..." if len(indices) > NUM_LISTED else "")
            text += f" ({len(indices):,} of {len(self._prompts):,} {self._name} are refused: {listed})"
        raise RequestError(first.code, text, index=first.index, field=first.field)

    def run(self, use_tqdm: bool | Callable[..., Any]) -> None:
        """Runs all requests to their end. An exception is raised again with `.outputs`, finished ones whole, others
        partial; KeyboardInterrupt also says how to reach them."""
        to_run = [request for index, request in self._requests.items() if index not in self._duplicate_of]
        to_run.sort(key=self._assembly.engine.scheduler.policy.admission_key)  # stable: by arrival, all of them 0 yet
        bar = Bar(
            len(self._requests),
            "Processed prompts",
            is_shown=bool(use_tqdm) and is_watched(),
            make=use_tqdm if callable(use_tqdm) else None,
        )
        num_equal_to = Counter(self._duplicate_of.get(index, index) for index in self._requests)
        num_finished = num_input_tokens = num_output_tokens = num_cut = 0
        engine = self._assembly.engine
        log, ended = RunLog(engine.stats), Ended()
        self._log = log
        num_tokens = sum(request.num_prompt_tokens for request in to_run) - self._num_shared_tokens
        num_samples = [request.sampling_params.num_samples for request in to_run]
        num_allowed = sum(map(mul, num_samples, (request.max_output_tokens for request in to_run)))
        work = Work(sum(num_samples), num_tokens, num_allowed)

        def seconds_left() -> float | None:
            return log.seconds_left(work, ended)

        try:
            source = feed(iter(to_run), self._assembly.max_num_seqs)
            with contextlib.closing(drive(engine, source)) as steps:
                for finished in steps:
                    log.note_step(engine.stats)
                    for request in finished:
                        for sample in request.samples:
                            ended.add(sample.num_output_tokens, sample.max_output_tokens, sample.finish_reason)
                        num_equal = num_equal_to[request.prompt_index]
                        num_finished += num_equal
                        num_input_tokens += request.num_prompt_tokens
                        num_output_tokens += sum(output.num_output_tokens for output in request.samples)
                        num_cut += num_equal * any(output.finish_reason == "length" for output in request.samples)
                        bar.show(num_finished, num_input_tokens, num_output_tokens, num_cut, seconds_left)
        except BaseException as error:
            for request in to_run:
                if request.finish_reason is None:  # the engine has not seen it
                    request.finish_reason, request.text = "abort", "" if request.sampling_params.detokenize else None
            attach_outputs(error, self.outputs())
            raise
        finally:
            bar.close()

    def outputs(self) -> RequestOutputs:
        """One output per prompt, in input order, of what there is now."""
        token_text = self._assembly.builder.token_text
        outputs = RequestOutputs()
        for index, prompt in enumerate(self._prompts):
            request = self._requests.get(self._duplicate_of.get(index, index))
            if request is None:
                error = self._errors[index]
                outputs.append(
                    RequestOutput.of_refused(
                        self._request_id(index), index, error, prompt.text, prompt.token_ids, prompt.metadata
                    )
                )
            else:
                output = RequestOutput.of_request(request, prompt.text, prompt.metadata, token_text)
                output.index, output.request_id = index, self._request_id(index)
                outputs.append(output)
        return outputs

    def requests(self) -> list[Request]:
        """What ran for each prompt, in input order, where none was refused; duplicates are one object."""
        return [self._requests[self._duplicate_of.get(index, index)] for index in range(len(self._prompts))]

    def _plan(self) -> None:
        """Ranks the requests by prefix and expected length, and finds those that need not run."""
        names: dict[int, str] = {}  # by id of params
        indices = list(self._requests)
        prompts = [array("i", self._requests[index].token_ids).tobytes() for index in indices]
        keys: list[tuple[bytes, str, int] | None] = []
        for prompt, index in zip(prompts, indices, strict=True):
            params = self._requests[index].sampling_params
            draws_its_own = not params.is_greedy and params.seed in (None, -1)
            if draws_its_own or params.logits_processors:  # a user's callable may keep a state
                keys.append(None)
                continue
            if id(params) not in names:
                names[id(params)] = repr(params)
            keys.append((prompt, names[id(params)], self._requests[index].num_unscored_tokens))
        duplicate_of = find_duplicates(keys)
        self._duplicate_of = {indices[i]: indices[j] for i, j in enumerate(duplicate_of) if j is not None}
        to_run = np.array([i for i, j in enumerate(duplicate_of) if j is None], np.int32)
        num_bytes = np.fromiter(map(len, prompts), np.int32, len(prompts))
        expected = np.array([self._requests[index].max_output_tokens for index in indices], np.int32)
        block_size = self._assembly.block_size
        order, num_shared_blocks = plan_order(prompts.__getitem__, num_bytes, expected, 4 * block_size, to_run)
        for rank, position in enumerate(order.tolist()):
            self._requests[indices[position]].rank = rank
        self._num_shared_tokens = num_shared_blocks * block_size

    def raise_if_failed(self, outputs: RequestOutputs) -> None:
        """BatchError with all outputs if a request failed while running."""
        failed = [index for index in self._requests if outputs[index].error is not None]
        if failed:
            first = outputs[failed[0]].error
            text = f"{len(failed):,} of {len(outputs):,} requests failed while running, the first: "
            raise BatchError(f"{text}{self._name}[{failed[0]}]: {first}; the others are in .outputs", outputs)

    def tell_of_limits(self) -> None:
        """One INFO record of what a long call was limited by; none where all of it ran at once."""
        assembly, log = self._assembly, self._log
        if log is None or len(self._requests) <= assembly.max_num_seqs:
            return
        scheduler = assembly.engine.scheduler
        limits = log.limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, assembly.num_blocks)
        seconds = max(log.total.seconds, 1e-9)
        LOGGER.info(
            "%s %s in %.1f s, out %s tokens/s, limited by %s",
            f"{len(self._requests):,}",
            self._name,
            seconds,
            f"{log.total.num_output_tokens / seconds:,.0f}",
            "; ".join(limits),
        )

    def tell_of_cuts(self) -> None:
        """One notice for the outputs that a length ended, where the caller did not ask for exact lengths."""
        by_params: Counter[int] = Counter()
        num_by_room = num_outputs = 0
        for index in self._requests:
            request = self._requests[self._duplicate_of.get(index, index)]
            params = request.sampling_params
            num_outputs += len(request.samples)
            for output in request.samples:
                if output.finish_reason == "length" and not params.ignore_eos and params.max_tokens != 0:
                    if output.num_output_tokens == params.max_tokens:
                        by_params[params.max_tokens] += 1
                    else:
                        num_by_room += 1
        total, notices = f"{num_outputs + len(self._errors):,}", self._assembly.notices
        if by_params:
            limits = sorted(by_params)
            where = f"max_tokens={limits[0]}" if len(limits) == 1 else f"max_tokens={limits[0]} to {limits[-1]}"
            default = " (the default)" if limits == [DEFAULT_MAX_TOKENS] else ""
            num_cut = f"{by_params.total():,}"
            notices.tell(f"{num_cut} of {total} outputs were cut at {where}{default}: pass max_tokens=... or None")
        if num_by_room:
            limit = self._assembly.builder.max_model_len
            notices.tell(f"{num_by_room:,} of {total} outputs were cut at max_model_len={limit:,}")

    def _request_id(self, index: int) -> str:
        return str(self._first_request_number + index)


def attach_outputs(error: BaseException, outputs: RequestOutputs) -> None:
    """Gives `.outputs` to an exception that ends a call; KeyboardInterrupt also says how to reach them."""
    error.outputs = outputs  # type: ignore[attr-defined]
    if isinstance(error, KeyboardInterrupt):
        num_finished = sum(output.finished for output in outputs)
        error.args = (
            f"{num_finished:,} of {len(outputs):,} outputs are finished: reach them by "
            "`except KeyboardInterrupt as e: e.outputs`, or as sys.last_value.outputs at a prompt",
        )


def _placed(error: RequestError, place: str, index: int) -> RequestError:
    """The error with its place in the list, unless it knows it already."""
    if error.index is not None:
        return error
    return RequestError(error.code, f"{place}: {error.message}", index=index, field=error.field)
