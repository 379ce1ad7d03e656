"""LLM: the door to the engine. Prompts in, RequestOutputs out; everything is checked before the first step.

One call at a time; any number of LLMs in a process. Knows prompts, defaults, errors and notices; the work is done by
EngineCore, which `assemble` builds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from pagedllm.assembly import Assembly, assemble
from pagedllm.beam_search_params import BeamSearchParams
from pagedllm.call import Call
from pagedllm.call_arguments import OnError, check_on_error, params_per_prompt, priority_per_prompt
from pagedllm.call_lock import CallLock
from pagedllm.config import MAX_LOGPROBS_DEFAULT, EngineConfig, SchedulingPolicy
from pagedllm.errors import NotEnoughMemoryError
from pagedllm.file_methods import FileMethods
from pagedllm.fingerprint import fingerprint
from pagedllm.keywords import RENAMED_LLM_KEYWORDS, checks_keywords
from pagedllm.open_requests import OpenRequests, abort_requests
from pagedllm.output_iterator import OutputIterator, pairs
from pagedllm.outputs import RequestOutput, RequestOutputs
from pagedllm.prompts import Prompt, iter_prompts, parse_conversations, parse_one, parse_prompts
from pagedllm.request_builder import ChatOptions, EncodedPrompt
from pagedllm.sampling_params import SamplingParams, is_int
from pagedllm.scoring_methods import ScoringMethods
from pagedllm.submitter import Submitter
from pagedllm.vllm_keywords import FOREIGN_LLM_KEYWORDS

if TYPE_CHECKING:
    import os
    from concurrent.futures import Future

    from pagedllm.engine.stats import EngineStats


@checks_keywords(RENAMED_LLM_KEYWORDS, FOREIGN_LLM_KEYWORDS)
class LLM(ScoringMethods, FileMethods):
    """A model, ready to generate. `close()` or `with` gives its memory back.

    model: a folder (config.json, safetensors, tokenizer), a GGUF file, or a Hugging Face id ("organisation/name"),
        fetched into the hub's cache where it is not there yet. revision: its branch, tag or commit.
    tokenizer: another folder for the tokenizer. chat_template: a template's text or file instead of the model's own.
    dtype: "auto" (bfloat16), "bfloat16", "float32". kernels: "auto", an instruction set's name, or "reference";
    "simt" runs CUDA's kernels on an emulator, for tests, in bfloat16 or float16.
    max_model_len: longest prompt + output; default: the model's, lowered to what the KV cache holds.
    gpu_memory_utilization: share of the free memory the KV cache may take; kv_cache_memory_bytes: its size instead.
    max_num_seqs, max_num_batched_tokens: requests and new tokens per step.
    async_scheduling: plan and launch the next step while a GPU runs one; None: where there is a GPU. A CPU computes in
        the thread that plans, so True changes nothing there, nor does it with logprobs_mode="processed_logprobs".
        info() says what is in force. The outputs are those of any other batch.
    num_threads: default: all that this process may use.
    scheduling_policy: "offline" orders a call by its prefixes and its expected lengths and runs equal requests once;
        "fcfs" runs in the order given; "priority" by `generate(..., priority=)`. The outputs are the same.
    seed: of all requests that have none of their own. generation_config: "auto", or "none" to ignore the model's file.

    Raises ValueError, TypeError or NotSupportedError for what was asked, ModelError for the model's files,
    NotEnoughMemoryError (a MemoryError and a ValueError) where it does not fit, LibraryError for the compiled kernels.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: Any = "auto",
        device: str = "auto",
        kernels: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        scheduling_policy: SchedulingPolicy = "offline",
        deterministic: bool | None = None,
        num_threads: int | None = None,
        seed: int = 0,
        generation_config: str = "auto",
        chat_template: str | None = None,
        revision: str | None = None,
        load_format: str = "auto",
        gguf_file: str | os.PathLike[str] | None = None,
        model_impl: str = "auto",
        logprobs_mode: str = "raw_logprobs",
        max_logprobs: int = MAX_LOGPROBS_DEFAULT,
    ) -> None:
        self.config = EngineConfig(
            model=model,  # type: ignore[arg-type]
            tokenizer=tokenizer,  # type: ignore[arg-type]
            dtype=dtype,
            device=device,
            kernels=kernels,
            max_model_len=max_model_len,
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            scheduling_policy=scheduling_policy,
            deterministic=deterministic,
            num_threads=num_threads,
            seed=seed,
            generation_config=generation_config,
            chat_template=chat_template,
            revision=revision,
            load_format=load_format,
            gguf_file=gguf_file,  # type: ignore[arg-type]
            model_impl=model_impl,
            logprobs_mode=logprobs_mode,
            max_logprobs=max_logprobs,
        )
        self._lock = CallLock()
        self._num_calls = 0
        self._num_requests = 0
        self._abandoned: deque[list[str]] = deque()  # ids of dropped iterators that could not be aborted at once
        self._submitter: Submitter | None = None
        self._transformers_tokenizer: Any = None
        self._fingerprint: str | None = None
        self._assembly: Assembly | None = None
        try:
            self._assembly = assemble(self.config)
        except NotEnoughMemoryError as error:
            raise NotEnoughMemoryError(f"{error}{_open_elsewhere()}") from None

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        on_error: OnError = "raise",
    ) -> RequestOutputs:
        """One RequestOutput per prompt, in input order.

        prompts: a str, a list of token ids, a dict {"prompt" | "prompt_token_ids" | "messages", "metadata"}, or any
            iterable of them.
        sampling_params: one for all, one per prompt, or None for the model's own defaults.
        use_tqdm: a progress bar on stderr; a callable makes it instead of `tqdm.tqdm`.
        priority: one int per prompt, lower is served first; needs scheduling_policy="priority".
        on_error: "raise": a RequestError before any work if a prompt cannot be run, a BatchError with `.outputs` at
            the end if one failed while running; "return": such prompts have an output with `.error`.

        KeyboardInterrupt is raised again within a step, with `.outputs`: finished ones whole, others partial. So is any
        other exception that ends the call, a progress bar's own, say.
        """
        with self._lock:
            return self._call(
                parse_prompts(prompts), "prompts", sampling_params, ChatOptions(), priority, use_tqdm, on_error
            )

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> RequestOutputs:
        """Answers one conversation (a list of {"role", "content"}) or a list of them, through the chat template.

        continue_final_message: the answer goes on where the last message ends; needs add_generation_prompt=False.
        The rest is as in `generate`; a template that refuses a conversation is a RequestError("template_error").
        """
        if add_generation_prompt and continue_final_message:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False")
        chat = ChatOptions(
            chat_template, add_generation_prompt, continue_final_message, tools, dict(chat_template_kwargs or {})
        )
        with self._lock:
            prompts = parse_conversations(messages)
            return self._call(prompts, "messages", sampling_params, chat, None, use_tqdm, on_error)

    def generate_iter(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        ordered: bool = False,
        max_in_flight: int | None = None,
        on_error: OnError = "return",
    ) -> Iterator[RequestOutput]:
        """Yields outputs as they finish, while prompts are read as there is room: for input that is large or endless.

        ordered: in input order instead. max_in_flight: prompts read and not yet given out; default: twice max_num_seqs.
        on_error: "return": a prompt that fails is an output with `.error`; "raise": its RequestError ends the iterator.

        Outputs are those of `generate`. Other calls may run between two outputs; closing or dropping the iterator
        aborts what is under way. A step of another call that fails ends it too, with finish_reason "abort". An
        exception out of the iterator, KeyboardInterrupt too, has in `.outputs` what was not given out yet.
        """
        check_on_error(on_error)
        if max_in_flight is not None and (not is_int(max_in_flight) or max_in_flight < 1):
            raise ValueError(f"max_in_flight must be None or an int >= 1, got {max_in_flight!r}")
        if isinstance(sampling_params, (str, bytes, Mapping)):
            raise TypeError(
                f"sampling_params must be a SamplingParams or several, got {type(sampling_params).__name__}"
            )
        with self._lock:
            assembly = self._open()
            params: SamplingParams | Iterator[SamplingParams]
            if sampling_params is None or isinstance(sampling_params, SamplingParams):
                params = params_per_prompt(assembly, sampling_params, 1)[0]
            else:
                params = iter(sampling_params)
            iterator = OutputIterator(
                self._lock,
                self._open,
                self._num_calls,
                pairs(iter_prompts(prompts), params),
                max_in_flight=max_in_flight or 2 * assembly.max_num_seqs,
                is_ordered=ordered,
                raises=on_error == "raise",
                abandoned=self._abandoned,
            )
            self._num_calls += 1
            return iterator

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_error: OnError = "raise",
    ) -> RequestOutputs:
        """The likeliest outputs that beam search finds: one RequestOutput per prompt, beam_width outputs each.

        They come best first, with `cumulative_logprob` and `score`. The search is that of transformers'
        `generate(num_beams=...)`; all beams of all prompts advance together. The rest is as in `generate`; beams that
        the KV cache can never hold all at their full length are a RequestError("never_fits").
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be a BeamSearchParams, got {type(params).__name__}")
        with self._lock:
            self._open().builder.check_beam_search(params)
            return self._call(
                parse_prompts(prompts),
                "prompts",
                params.sampling_params(),
                ChatOptions(),
                None,
                use_tqdm,
                on_error,
                replace(params),
            )

    def submit(self, prompt: Any, params: SamplingParams | None = None) -> Future[RequestOutput]:
        """Hands in one prompt and returns at once; what many threads hand in runs together, in one daemon thread.

        For web handlers: `asyncio.wrap_future(llm.submit(...))`. The future's result is the RequestOutput; a prompt
        that cannot be run is its RequestError. Messages go in as {"messages": [...]}.
        """
        self._lock.check_process()
        parsed = parse_one(prompt)
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params must be a SamplingParams, got {type(params).__name__}")
        self._open()
        if self._submitter is None:
            with self._lock:
                self._submitter = self._submitter or Submitter(self)
        return self._submitter.submit(parsed, None if params is None else params.clone())

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as a transformers object; made on the first call, from local files."""
        from pagedllm.tokenizer import transformers_tokenizer

        with self._lock:
            source = self._open().builder.tokenizer.source
            if self._transformers_tokenizer is None:
                self._transformers_tokenizer = transformers_tokenizer(source)
            return self._transformers_tokenizer

    def reset_seed(self, seed: int) -> None:
        """What is sampled from here on is what a new LLM with this seed would sample."""
        with self._lock:
            config = replace(self.config, seed=seed)
            self._open().seed = seed
            self.config = config
            self._num_calls = 0

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine since it was made."""
        return self._open().engine.stats

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return self._open().builder.vocab_size

    @property
    def fingerprint(self) -> str:
        """Of weights, tokenizer, template, dtype, kernels and the version of the numerics.

        Engines with equal fingerprints give equal tokens to equal greedy or seeded requests. Large weight files are
        sampled, not read whole.
        """
        assembly = self._open()
        if self._fingerprint is None:
            self._fingerprint = fingerprint(assembly.located, assembly.numerics)
        return self._fingerprint

    def info(self) -> dict[str, Any]:
        """What this engine uses: kernels, dtype, sizes, and whether its tokens are `deterministic`."""
        return dict(self._open().info)

    def reset_prefix_cache(self) -> None:
        """No later prompt will take K and V from an earlier one."""
        with self._lock:
            self._open().engine.reset_prefix_cache()

    def close(self) -> None:
        """Gives weights and KV cache back at once. May be called again; the outputs of earlier calls stay whole."""
        with self._lock:
            if self._assembly is not None:
                self._assembly.runtime.close()
                self._assembly = None
        if self._submitter is not None:
            self._submitter.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled: make one in each process; outputs and params can be")

    def __enter__(self) -> LLM:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Assembly:
        if self._assembly is None:
            raise RuntimeError("this LLM is closed: make a new one")
        return self._assembly

    def _open_requests(self) -> OpenRequests:
        """For `submit`: a stream of prompts that end whenever they end. Needs the lock."""
        requests = OpenRequests(self._open(), self._num_calls, is_list=False)
        self._num_calls += 1
        return requests

    def _defaults(self) -> SamplingParams:
        return params_per_prompt(self._open(), None, 1)[0]

    def _call(
        self,
        prompts: Sequence[Prompt],
        name: str,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        chat: ChatOptions,
        priority: Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
        on_error: OnError,
        beam_search: BeamSearchParams | None = None,
    ) -> RequestOutputs:
        assembly = self._open()
        check_on_error(on_error)
        params = params_per_prompt(assembly, sampling_params, len(prompts))
        priorities = priority_per_prompt(self.config.scheduling_policy, priority, len(prompts))
        encoded = assembly.builder.encode(prompts, chat)
        call = self._start_call(name, encoded, params, priorities, beam_search, raises=on_error == "raise")
        call.run(use_tqdm)
        if beam_search is None:
            call.tell_of_cuts()
        call.tell_of_limits()
        outputs = call.outputs()
        if on_error == "raise":
            call.raise_if_failed(outputs)
        return outputs

    def _start_call(
        self,
        name: str,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        beam_search: BeamSearchParams | None = None,
        *,
        raises: bool,
    ) -> Call:
        assembly = self._open()
        while self._abandoned:
            abort_requests(assembly, self._abandoned.popleft())
        call = Call(
            assembly,
            name,
            prompts,
            params,
            call_number=self._num_calls,
            first_request_number=self._num_requests,
            priorities=priorities,
            beam_search=beam_search,
        )
        if raises:
            call.raise_if_refused()
        self._num_calls += 1
        self._num_requests += len(prompts)
        return call


def _open_elsewhere() -> str:
    """What to do about an LLM that this process still has open, an earlier one in a notebook, say."""
    import gc

    found = [o for o in gc.get_objects() if type(o) is LLM and o.__dict__.get("_assembly") is not None]
    if not found:
        return ""
    return f"; an LLM of {found[0].config.model} is open in this process: close() it first"
