"""What the decoder promises beside the right logits: wanted rows only, one row's independence, no allocation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagedllm.ops.library import load_kernels
from pagedllm.runtime.device import torch_threads
from tests.model.family_models import CASES, build_case
from tests.model.harness import Sequences, load
from tests.model.models import VOCAB_SIZE, build, random_ids, save

pytestmark = pytest.mark.usefixtures("one_thread")
VIEWS = {"aten.slice.Tensor", "aten.unflatten.int", "aten.view.default", "aten._unsafe_view.default"}
FAMILIES = ["llama", "qwen3", "gemma3"]


class Recorder(TorchDispatchMode):
    """Names of the operators that run, those inside the twins left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_chosen_rows_are_those_of_all_rows(family: str, tmp_path: Path, namespace: str) -> None:
    sequences = Sequences(load(save(build(family), tmp_path), namespace=namespace))
    text = random_ids(20)
    everything = sequences.logits(text)
    sequences.begin("tail", 20)
    tail = sequences.step({"tail": text}, num_logits=3)["tail"]
    torch.testing.assert_close(tail, everything[-3:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_kernels_give_the_same_bits_in_every_batch_chunk_block_size_and_thread_count(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    decoder = load(save(build(family), tmp_path), dtype, load_kernels().namespace)
    text = random_ids(100)
    alone = Sequences(decoder, block_size=8).logits(text)
    for block_size, chunk, num_threads in [(8, 1, 1), (16, 7, 2), (64, 64, 1), (128, 100, 2)]:
        with torch_threads(num_threads):
            assert torch.equal(Sequences(decoder, block_size=block_size).logits(text, chunk=chunk), alone)
    sequences = Sequences(decoder, block_size=16)
    for name in "abc":
        sequences.begin(name, 100)
    sequences.step({"a": random_ids(33, 1), "b": text[:40], "c": random_ids(50, 2)})
    batch = sequences.step({"c": [5], "b": text[40:], "a": [6, 7]}, num_logits=1)
    assert torch.equal(batch["b"], alone[-1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_without_wanted_rows_fills_the_cache(family: str, tmp_path: Path, namespace: str) -> None:
    sequences = Sequences(load(save(build(family), tmp_path), namespace=namespace))
    text = random_ids(20)
    sequences.begin("chunked", 20)
    assert sequences.step({"chunked": text[:13]}, num_logits=0)["chunked"].shape == (0, VOCAB_SIZE)
    last = sequences.step({"chunked": text[13:]})["chunked"]
    torch.testing.assert_close(last, sequences.logits(text)[-1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        # embedding, first norm, 2 layers of 8, two gathers, head
        ("llama", {"packed_linear": 9, "rms_norm": 5, "rope_norm_write_kv": 2, "paged_attention": 2}),
        # 4 layers of 10
        (
            "gemma3",
            {
                "packed_linear": 17,
                "rms_norm": 9,
                "add_rms_norm": 8,
                "rope_norm_write_kv": 4,
                "paged_attention": 4,
            },
        ),
    ],
)
def test_a_step_runs_our_operators_and_allocates_nothing(
    family: str, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    sequences = Sequences(load(save(build(family), tmp_path), namespace=namespace))
    decoder = sequences.decoder
    recorder = Recorder()
    forward = decoder.forward

    def recorded(*args: Any) -> torch.Tensor:
        with recorder:
            return forward(*args)

    monkeypatch.setattr(decoder, "forward", recorded)
    sequences.begin("a", 20)
    sequences.step({"a": random_ids(20)})
    ours = [name.split(".")[1] for name in recorder.names if name.startswith("pagedllm")]
    others = {name for name in recorder.names if not name.startswith("pagedllm")}
    assert {name: ours.count(name) for name in ours} == {"embedding": 1, "gather_rows": 2, **expected}
    assert others <= VIEWS


@pytest.mark.parametrize("name", CASES)
def test_every_model_runs_only_kernels_and_finds_the_likeliest_token_without_its_logits(
    name: str, tmp_path: Path
) -> None:
    """A decode step is recorded on a tape, and what torch computes would be missing there."""
    sequences = Sequences(load(save(build_case(CASES[name]), tmp_path), namespace=load_kernels().namespace))
    forward, recorder, found = sequences.decoder.forward, Recorder(), []

    def recorded(*args: Any) -> torch.Tensor:
        with recorder:
            found.append(forward(*args, wants_likeliest=True).clone())
            return forward(*args)

    sequences.decoder.forward = recorded  # type: ignore[method-assign]
    sequences.begin("a", 20)
    logits = sequences.step({"a": random_ids(20)}, num_logits=None)["a"]
    assert {name for name in recorder.names if not name.startswith("pagedllm")} - VIEWS == {"aten.clone.default"}
    assert recorder.names.count("pagedllm.packed_argmax.default") == 1
    assert found[0].tolist() == logits.argmax(1).tolist()


def test_close_gives_the_weights_back_while_a_tensor_is_still_held(tmp_path: Path, namespace: str) -> None:
    decoder = load(save(build("llama"), tmp_path), namespace=namespace)
    held = decoder.head.weight
    assert held.abs().sum() > 0
    decoder.close()
    assert held.abs().sum() == 0


def test_two_decoders_do_not_touch_each_other(tmp_path: Path, namespace: str) -> None:
    first = Sequences(load(save(build("llama", seed=1), tmp_path / "a"), namespace=namespace))
    text = random_ids(20)
    before = first.logits(text)
    second = Sequences(load(save(build("gemma3", seed=2), tmp_path / "b"), namespace=namespace))
    second.logits(text)
    assert torch.equal(first.logits(text), before)
