"""The runner executes plans written by hand, and start-up measures before it sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedllm.config import EngineConfig
from pagedllm.engine.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from pagedllm.model.loader import open_checkpoint
from pagedllm.runtime.startup import Runtime, start
from pagedllm.sampling_params import SamplingParams
from tests.tiny import save_tiny_model

PROMPT = tuple(range(5, 25))
BLOCK_BYTES = 2 * 16 * 2 * 32 * 4 * 3  # block size, KV heads, head size, bytes per element, layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def runtime(folder: Path) -> Iterator[Runtime]:
    runtime = open_runtime(folder, max_num_batched_tokens=32)
    yield runtime
    runtime.close()


def open_runtime(folder: Path, **fields: object) -> Runtime:
    config = EngineConfig(model=str(folder), dtype="float32", **fields)  # type: ignore[arg-type]
    return start(config, open_checkpoint(config.model))


def new(name: str, num_tokens: int, blocks: tuple[int, ...]) -> ScheduledRequest:
    data = NewRequestData(len(PROMPT), SamplingParams(temperature=0), seed=0)
    return ScheduledRequest(
        name, 0, num_tokens, PROMPT, (), (blocks,), first_logits_index=len(PROMPT) - 1, new_request=data
    )


def more(name: str, computed: int, num_tokens: int, blocks: tuple[int, ...] = ()) -> ScheduledRequest:
    first = max(computed, len(PROMPT) - 1)
    return ScheduledRequest(name, computed, num_tokens, new_block_ids=(blocks,), first_logits_index=first)


def execute(
    runtime: Runtime,
    *scheduled: ScheduledRequest,
    released: tuple[str, ...] = (),
    copies: tuple[tuple[int, int], ...] = (),
) -> list[tuple[int, ...]]:
    num_tokens = sum(s.num_new_tokens for s in scheduled)
    plan = SchedulerOutput(scheduled, released, copies, num_tokens)
    return list(runtime.runner.execute(plan).sampled_token_ids)


def greedy_by_transformers(folder: Path, num_tokens: int) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return list(ids[0, len(PROMPT) :].tolist())


def test_chunks_then_decode_give_the_tokens_of_transformers(runtime: Runtime, folder: Path) -> None:
    assert execute(runtime, new("a", 8, (3, 7, 9))) == [()]
    assert execute(runtime, more("a", 8, 8)) == [()]
    ((token,),) = execute(runtime, more("a", 16, 4))
    tokens = [token]
    for computed in range(20, 35):
        ((token,),) = execute(runtime, more("a", computed, 1))
        tokens.append(token)
    assert tokens == greedy_by_transformers(folder, 16)


def test_a_copied_block_serves_as_the_original(runtime: Runtime) -> None:
    ((first,),) = execute(runtime, new("a", 20, (3, 7)))
    expected = execute(runtime, more("a", 20, 1))
    again = new("b", 20, (3, 11))._replace(num_computed_tokens=16, num_new_tokens=4)
    assert execute(runtime, again, released=("a",), copies=((7, 11),)) == [(first,)]
    assert execute(runtime, more("b", 20, 1)) == expected


def test_an_empty_plan_only_releases_rows(runtime: Runtime) -> None:
    execute(runtime, new("a", 20, (3, 7)))
    assert len(runtime.runner.rows) == 1
    assert execute(runtime, released=("a",)) == []
    assert len(runtime.runner.rows) == 0


def test_a_request_of_the_same_id_can_return_in_the_plan_that_releases_it(runtime: Runtime) -> None:
    tokens = execute(runtime, new("a", 20, (3, 7)))
    assert execute(runtime, new("a", 20, (5, 2)), released=("a",)) == tokens


def test_the_pool_and_its_parts_are_told_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagedllm"):
        runtime = open_runtime(folder, kv_cache_memory_bytes=40 * BLOCK_BYTES)
    assert runtime.pool.num_blocks == 40
    assert runtime.pool.bytes_per_block == BLOCK_BYTES == 24_576
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory: ")]
    assert "40 blocks of 16 tokens, 24,576 bytes each (2 x 16 tokens x 2 KV heads x 32 x 4 bytes x 3 layers)" in line
    assert line.endswith("a text of 512 tokens takes 0.75 MiB")
    runtime.close()


def test_a_pool_too_small_for_the_models_length_lowers_it_with_a_notice(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = open_runtime(folder, kv_cache_memory_bytes=5 * BLOCK_BYTES)
    assert runtime.pool.max_model_len == 80
    assert "max_model_len lowered from 512 to 80" in caplog.text
    runtime.close()


def test_close_gives_the_memory_back_while_tensors_are_still_held(folder: Path) -> None:
    def resident_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0])

    runtime = open_runtime(folder, kv_cache_memory_bytes=4000 * BLOCK_BYTES, max_num_seqs=128)
    held = [tensor for layer in runtime.runner.kv_cache.layers for tensor in layer]
    for tensor in held:
        tensor.fill_(1.0)
    before = resident_kib()
    runtime.close()
    assert before - resident_kib() > 0.9 * 4000 * BLOCK_BYTES / 1024
    assert float(held[0].sum()) == 0.0
