"""Every family and every switch of its config gives transformers' logits and greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from pagedllm.model.decoder import weight_bytes
from pagedllm.model.linear import PackedFormat
from pagedllm.model.registry import FAMILIES
from pagedllm.ops.library import load_kernels
from pagedllm.runtime.device import torch_threads
from tests.model import models_document
from tests.model.family_models import CASES, build_case
from tests.model.harness import Sequences, load
from tests.model.models import assert_parity, freeze_rope, logits_of, random_ids, relative_error, save

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text_are_those_of_transformers(name: str, tmp_path: Path, namespace: str) -> None:
    case = CASES[name]
    model = build_case(case)
    sequences = Sequences(load(save(model, tmp_path), namespace=namespace))
    if case.frozen_rope is not None:
        freeze_rope(model, case.frozen_rope)
    assert_parity(model, sequences, num_prompt=20)


@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_give_the_same_bits_in_every_batch_chunk_block_size_and_thread_count(
    name: str, tmp_path: Path
) -> None:
    decoder = load(save(build_case(CASES[name]), tmp_path), torch.bfloat16, load_kernels().namespace)
    assert decoder.memory.num_taken == weight_bytes(decoder.config, PackedFormat(torch.bfloat16))
    text = random_ids(60)
    alone = Sequences(decoder, block_size=8).logits(text)
    for block_size, chunk, num_threads in [(8, 1, 1), (16, 7, 2), (64, 60, 2)]:
        with torch_threads(num_threads):
            assert torch.equal(Sequences(decoder, block_size=block_size).logits(text, chunk=chunk), alone)
    sequences = Sequences(decoder, block_size=16)
    for sequence in "abc":
        sequences.begin(sequence, 60)
    sequences.step({"a": random_ids(33, 1), "b": text[:40], "c": random_ids(50, 2)})
    batch = sequences.step({"c": [5], "b": text[40:], "a": [6, 7]}, num_logits=1)
    assert torch.equal(batch["b"], alone[-1:])


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].frozen_rope is None])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = save(build_case(case).bfloat16(), tmp_path)

    def theirs_in(dtype: torch.dtype) -> torch.Tensor:
        model_class = getattr(transformers, case.architecture)
        return logits_of(model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval(), text)

    text = random_ids(80)
    exact = theirs_in(torch.float32)
    theirs = (theirs_in(torch.bfloat16) - exact).abs()
    decoder = load(folder, torch.bfloat16, load_kernels().namespace)
    ours = (Sequences(decoder).logits(text) - exact).abs()
    assert ours.median() < 2 * theirs.median()
    if not any(layer.is_sparse for layer in decoder.config.layers):
        # a token that stands at a tie between two experts goes either way, here as there, and is wrong by a lot
        assert ours.max() < 2 * theirs.max()
        assert ours.mean() < 2 * theirs.mean()


def test_a_gpt2_file_saved_without_its_head_has_names_without_prefix(tmp_path: Path, namespace: str) -> None:
    model = build_case(CASES["gpt2"])
    model.save_pretrained(tmp_path)
    model.transformer.save_pretrained(tmp_path)  # overwrites the weights; and the config, whose architecture changes
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path)
    text = random_ids(20)
    assert relative_error(Sequences(load(tmp_path, namespace=namespace)).logits(text), logits_of(model, text)) < 2e-4


def test_every_family_has_a_parity_case_and_docs_models_md_says_what_they_are() -> None:
    tested = {case.architecture for case in CASES.values()} | {"LlamaForCausalLM", "Qwen3ForCausalLM"}
    assert tested | {"Gemma3ForCausalLM"} == {family.architecture for family in FAMILIES}
    assert models_document.DOCUMENT.read_text() == models_document.document()
