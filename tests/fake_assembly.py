"""An LLM without a model: the real engine over a runner that computes the next token by arithmetic.

The tokenizer has one token per byte; id 0 is BOS, 1 and 2 end the text. `FakeRunner.script` makes single steps fail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedllm.assembly import Assembly
from pagedllm.cache.kv_cache_manager import KVCacheManager
from pagedllm.config import EngineConfig
from pagedllm.engine.core import EngineCore
from pagedllm.engine.policy import make_policy
from pagedllm.engine.scheduler import Scheduler
from pagedllm.engine.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from pagedllm.errors import RequestError
from pagedllm.generation_defaults import GenerationDefaults
from pagedllm.notices import Notices
from pagedllm.request import Request, TokenLogprobs
from pagedllm.request_builder import RequestBuilder

if TYPE_CHECKING:
    from pagedllm import LLM

BOS, EOS, END = 0, 1, 2
VOCAB_SIZE = 259


class FakeTokenizer:
    """Bytes, shifted by three special tokens."""

    bos_token_id: int | None = BOS
    eos_token_ids = (EOS, END)
    special_token_ids = frozenset((BOS, EOS, END))
    vocab_size = VOCAB_SIZE
    think_ids: Mapping[str, int] = {}
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        bos = [BOS] if add_special_tokens and self.bos_token_id is not None else []
        return bos + [byte + 3 for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        specials = {} if skip_special_tokens else {BOS: b"<s>", EOS: b"</s>", END: b"<end>"}
        return b"".join(specials.get(i, b"") if i < 3 else bytes([i - 3]) for i in token_ids).decode("latin-1")

    def token_to_id(self, token: str) -> int | None:
        return self.think_ids.get(token)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages):
            raise RequestError("template_error", "the chat template refuses: a role and a content are needed")
        if any(message["role"] == "tool" for message in messages):
            raise RequestError("template_error", "the chat template refuses: no tools here")
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return text + ("[assistant]" if options["add_generation_prompt"] else "")


class FakeDetokenizer:
    def decode(self, request: Request) -> str:
        return FakeTokenizer().decode(request.text_token_ids)

    def stream(self, request: Request) -> FakeStream:
        return FakeStream()


class FakeStream:
    def push(self, token_ids: Sequence[int]) -> str:
        return FakeTokenizer().decode(token_ids)

    def finish(self) -> str:
        return ""


class FakeRunner:
    """next token = a hash of the tokens so far, and of the seed where the request samples; always a letter a to z."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[list[int], NewRequestData]] = {}
        self.num_steps = 0
        self.script: Callable[[int, SchedulerOutput], ModelRunnerOutput | None] = lambda step, plan: None
        self.is_closed = False
        self.forced: Callable[[list[int], NewRequestData], int | None] = lambda tokens, data: None

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        scripted = self.script(self.num_steps, plan)
        self.num_steps += 1
        for request_id in plan.released_request_ids:
            self.rows.pop(request_id, None)
        if scripted is not None:
            return scripted
        sampled: list[tuple[int, ...]] = []
        finite: list[bool] = []
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        for item in plan.scheduled:
            if item.new_request is not None:
                self.rows[item.request_id] = ([], item.new_request)
            tokens, data = self.rows[item.request_id]
            tokens.extend(item.new_token_ids)
            is_last = item.num_computed_tokens + item.num_new_tokens == len(tokens)
            indices = range(data.sample_index, data.sample_index + max(1, item.num_samples)) if is_last else ()
            drawn = tuple(self.next_token(tokens, data, index) for index in indices)
            finite.append(-1 not in drawn)
            logprobs.append(self.logprobs(drawn, data) if finite[-1] else ())
            sampled.append(drawn if finite[-1] and item.num_samples else ())
            tokens.extend(sampled[-1][:1])
        return ModelRunnerOutput(sampled, finite, logprobs if any(logprobs) else ())

    def next_token(self, tokens: list[int], data: NewRequestData, sample_index: int = 0) -> int:
        forced = self.forced(tokens, data)
        if forced is not None:
            return forced
        seed = 0 if data.sampling_params.is_greedy else data.seed + sample_index
        digest = hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=4).digest()
        return 3 + ord("a") + int.from_bytes(digest, "little") % 26

    def logprobs(self, token_ids: tuple[int, ...], data: NewRequestData) -> tuple[TokenLogprobs, ...]:
        """The sampled token has -1, rank k + 1; the top k are 100, 101 ..., with -2, -3 ..."""
        k = data.sampling_params.logprobs
        if k is None:
            return ()
        values = -np.arange(1, 2 + k, dtype=np.float32)
        return tuple(
            TokenLogprobs(np.array([token_id, *range(100, 100 + k)], np.int32), values, sampled_rank=k + 1)
            for token_id in token_ids
        )

    def close(self) -> None:
        self.is_closed = True


def fake_assemble(
    config: EngineConfig,
    *,
    generation_config: Mapping[str, Any] | None = None,
    bos_token_id: int | None = BOS,
    num_blocks: int = 512,
    thinks: bool = False,
) -> Assembly:
    runner, tokenizer, notices = FakeRunner(), FakeTokenizer(), Notices()
    tokenizer.bos_token_id = bos_token_id
    tokenizer.think_ids = {"<think>": 3, "</think>": 4} if thinks else {}
    max_num_seqs, max_model_len = config.max_num_seqs or 8, config.max_model_len or 128
    scheduler = Scheduler(
        KVCacheManager(num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or 64,
        max_model_len=max_model_len,
        policy=make_policy(config.scheduling_policy),
    )
    builder = RequestBuilder(
        tokenizer,  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
        max_position=1024,
        max_model_len=max_model_len,
        max_logprobs=config.max_logprobs,
        eos_token_ids=tokenizer.eos_token_ids,
        rope_variant=lambda num_total_tokens: 0,
        chat_template=config.chat_template,
        notices=notices,
    )
    return Assembly(
        engine=EngineCore(scheduler, runner.execute, FakeDetokenizer()),
        runtime=runner,
        builder=builder,
        defaults=GenerationDefaults.from_config(generation_config or {}),
        notices=notices,
        seed=config.seed,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=config.block_size,
        bytes_per_block=1024,
        numerics={"dtype": "none", "kernels": "fake"},
        located=config,
        info={
            "model": config.model,
            "device": "cpu",
            "dtype": "none",
            "kernels": "fake",
            "deterministic": True,
            "num_threads": 1,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_prefix_caching": config.enable_prefix_caching,
            "block_size": config.block_size,
            "num_blocks": num_blocks,
            "kv_cache_bytes": 1024 * num_blocks,
        },
    )


def runner_of(llm: LLM) -> FakeRunner:
    return llm._assembly.runtime  # type: ignore[union-attr, return-value]


def slow_program(seconds: float) -> str:
    """The command line as a program, over an engine without a model that takes this long for a step."""
    return f"""
import sys, time
import pagedllm.llm
from tests.fake_assembly import fake_assemble
from pagedllm.cli import main

def assemble(config):
    assembly = fake_assemble(config)
    assembly.runtime.script = lambda step, plan: time.sleep({seconds})
    return assembly

pagedllm.llm.assemble = assemble
sys.exit(main())
"""
