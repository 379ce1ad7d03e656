"""CASES (d): model loading, through LLM: what is loaded is what transformers computes, what is not is one line.

Expected tokens are those of one forward pass of transformers over our own text: by induction both generate it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagedllm import LLM, SamplingParams
from pagedllm.errors import PagedLLMError
from tests.hostile.harness import ids, open_llm
from tests.model.models import edit_config, freeze_rope, random_ids
from tests.tiny import SIZES, save_tokenizer

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ORIGINAL = 32


def build(folder: Path, family: str = "Llama", max_shard_size: str = "50GB", **settings: Any) -> Any:
    """Saves a model and its tokenizer; returns it in float32."""
    config_class = getattr(transformers, f"{family}Config")
    sizes = {key: value for key, value in {**SIZES, **settings}.items() if value != "absent"}
    config = config_class(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return model


def assert_greedy(model: Any, llm: LLM, lengths: tuple[int, ...] = (5, 20), num_tokens: int = 12) -> None:
    prompts = [random_ids(length, seed=length) for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = ids(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False))
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0]
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def refused(folder: Path, *parts: str, **fields: Any) -> None:
    with pytest.raises((PagedLLMError, ValueError)) as caught:
        open_llm(folder, **fields)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def change_weights(folder: Path, **tensors: Any) -> None:
    """Adds or replaces tensors; None removes one."""
    weights = {**load_file(folder / MODEL), **tensors}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / MODEL)


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
@pytest.mark.parametrize("is_tied", [True, False, None])
def test_d1_tied_embeddings(is_tied: bool | None, head: str, tmp_path: Path) -> None:
    model = build(tmp_path, tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=is_tied)  # None: absent, which is false for Llama
    embedding = model.model.embed_tokens.weight.detach()
    stored = {"absent": None, "equal": embedding.clone(), "different": model.lm_head.weight.detach()}[head]
    change_weights(tmp_path, **{HEAD: stored})
    if is_tied and head == "different":
        refused(tmp_path, f"{HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true")
    elif not is_tied and stored is None:
        refused(tmp_path, f"{HEAD} is missing (config.json does not set tie_word_embeddings)")
    else:
        if head != "different":
            model.lm_head.weight.data.copy_(embedding)
        with open_llm(tmp_path) as llm:
            assert_greedy(model, llm)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: shards(f)[1].unlink(), "is missing, model.safetensors.index.json names it"),
    "cut in half": (
        lambda f: shards(f)[1].write_bytes(shards(f)[1].read_bytes()[: shards(f)[1].stat().st_size // 2]),
        "is not a whole safetensors file",
    ),
    "absent tensor in the index": (
        lambda f: edit_index(f, **{"model.layers.9.x": shards(f)[0].name}),
        "names model.layers.9.x in model-00001",
    ),
    "stale index": (
        lambda f: edit_index(f, **{EMBEDDING: shards(f)[-1].name}),
        f"names {EMBEDDING} in model-0",
    ),
    "unknown tensor": (
        lambda f: (
            save_file({**load_file(shards(f)[-1]), "model.extra.weight": torch.ones(3)}, shards(f)[-1]),
            edit_index(f, **{"model.extra.weight": shards(f)[-1].name}),
        ),
        "model.extra.weight is unknown to LlamaForCausalLM",
    ),
    "two sets": (lambda f: save_file({"a": torch.ones(1)}, f / MODEL), "the folder may hold two sets of weights"),
    "a tensor twice": (
        lambda f: save_file(
            {**load_file(shards(f)[1]), **dict([next(iter(load_file(shards(f)[0]).items()))])}, shards(f)[1]
        ),
        "keep one of them",
    ),
    "LFS pointer": (lambda f: shards(f)[1].write_text(POINTER), "is a Git LFS pointer, not the file itself"),
    "LFS pointer for the index": (lambda f: (f / INDEX).write_text(POINTER), "is a Git LFS pointer"),
    "no index": (lambda f: (f / INDEX).unlink(), "model.safetensors.index.json is missing beside"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_d2_damaged_weights_are_named(damage: str, tmp_path: Path) -> None:
    build(tmp_path, max_shard_size="150KB")
    assert len(shards(tmp_path)) >= 3
    damages, message = DAMAGES[damage]
    damages(tmp_path)
    refused(tmp_path, message, str(tmp_path))


def test_d2_tensors_that_mean_nothing_may_lie_there(tmp_path: Path) -> None:
    model = build(tmp_path)
    change_weights(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    with open_llm(tmp_path) as llm:
        assert_greedy(model, llm)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_attention_heads": 4, "head_dim": 32},
        {"hidden_size": 128, "num_attention_heads": 4, "head_dim": "absent"},
        {"head_dim": 80, "num_key_value_heads": 1},
        {"head_dim": 96},
        {"head_dim": 112, "num_key_value_heads": 4},
    ],
    ids=lambda sizes: ",".join(f"{key}={value}" for key, value in sizes.items()),
)
def test_d3_head_dim_beside_hidden_size(sizes: dict[str, Any], tmp_path: Path) -> None:
    model = build(tmp_path, **sizes)
    if sizes["head_dim"] == "absent":
        edit_config(tmp_path, head_dim=None)
    with open_llm(tmp_path) as llm:
        assert_greedy(model, llm)


@pytest.mark.parametrize("head_dim", [20, 40, 512])
def test_d3_an_unsupported_head_dim_is_named(head_dim: int, tmp_path: Path) -> None:
    build(tmp_path, head_dim=head_dim)
    refused(tmp_path, f"head_dim {head_dim} is not supported")


NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def test_d6_both_spellings_of_theta_give_the_same(tmp_path: Path) -> None:
    model = build(tmp_path, **NEW)
    with open_llm(tmp_path) as llm:
        assert_greedy(model, llm, (40,))
    edit_config(tmp_path, rope_parameters=None, rope_theta=500.0)
    with open_llm(tmp_path) as llm:
        assert_greedy(model, llm, (40,))
    edit_config(tmp_path, **NEW)  # both, and they agree
    with open_llm(tmp_path) as llm:
        assert_greedy(model, llm, (40,))


def test_d6_neither_spelling_is_transformers_default(tmp_path: Path) -> None:
    model = build(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    edit_config(tmp_path, rope_parameters=None)
    with open_llm(tmp_path) as llm:
        assert_greedy(model, llm, (40,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 10_000.0}, "rope_parameters.rope_theta is 500.0, but rope_theta at the top of the config is 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}, "rope_scaling says"),
        ({"rope_parameters": {"rope_type": "default", "theta": 500.0}}, "rope_parameters.theta is 500.0, a setting"),
        ({"rope_parameters": {"rope_type": "default", "type": "linear", "factor": 2.0}}, "rope_type and type differ"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "rope_parameters.rope_type must be one of"),
        ({"rope_scaling": {"type": "su-scaled"}}, "rope_scaling.rope_type must be one of"),
    ],
)
def test_d6_conflicts_and_unknown_rope_settings_are_reported(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    build(tmp_path, **NEW)
    edit_config(tmp_path, **changes)
    refused(tmp_path, message)


STRETCHED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
FACTORS = {"short_factor": [1.0 + i / 32 for i in range(16)], "long_factor": [1.0 + i / 4 for i in range(16)]}
ROPES: dict[str, tuple[int, dict[str, Any]]] = {  # max_position_embeddings, parameters
    "linear": (ORIGINAL, {"rope_theta": 10_000.0, "factor": 4.0}),
    "dynamic": (ORIGINAL, {"rope_theta": 10_000.0, "factor": 4.0}),
    "yarn": (4 * ORIGINAL, STRETCHED),
    "llama3": (4 * ORIGINAL, {**STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "longrope": (4 * ORIGINAL, {**STRETCHED, **FACTORS}),
}


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ROPES)
def test_d7_a_scaled_rope_matches_while_decoding_across_the_original_length(
    kind: str, key: str, tmp_path: Path
) -> None:
    """The variant of a request is fixed by prompt + max_tokens, so transformers' is frozen to that length."""
    max_position, parameters = ROPES[kind]
    model = build(tmp_path, max_position_embeddings=max_position, rope_parameters={"rope_type": kind, **parameters})
    edit_config(tmp_path, rope_parameters={key: kind, **parameters})
    num_prompt, num_tokens = ORIGINAL - 3, 3 * ORIGINAL + 3  # ends at 4 x the original length
    if kind in ("dynamic", "longrope"):
        freeze_rope(model, num_prompt + num_tokens)
    with open_llm(tmp_path) as llm:
        assert_greedy(model, llm, (num_prompt,), num_tokens)


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("layer_types", [["sliding_attention"] * 3, ["sliding_attention", "full_attention"] * 2])
def test_d8_a_window_counts_as_in_transformers(layer_types: list[str], chunk: int, tmp_path: Path) -> None:
    model = build(
        tmp_path, "Qwen3", num_hidden_layers=len(layer_types), sliding_window=8,
        use_sliding_window=True, layer_types=layer_types,
    )  # fmt: skip
    with open_llm(tmp_path, max_num_batched_tokens=chunk, max_num_seqs=4, block_size=8) as llm:
        for _ in ("cold", "warm"):  # the second time out of the prefix cache
            assert_greedy(model, llm, (7, 8, 9, 40))


def test_d8_use_sliding_window_false_means_none(tmp_path: Path) -> None:
    model = build(tmp_path, "Qwen3", sliding_window=8, use_sliding_window=False, max_window_layers=0)
    with open_llm(tmp_path) as llm:
        assert_greedy(model, llm, (40,))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16, "float32", torch.float32])
def test_d11_a_bfloat16_checkpoint_runs_in_what_a_cpu_has(dtype: Any, tmp_path: Path) -> None:
    build(tmp_path)
    change_weights(tmp_path, **{name: tensor.bfloat16() for name, tensor in load_file(tmp_path / MODEL).items()})
    edit_config(tmp_path, dtype="bfloat16")
    with open_llm(tmp_path, dtype=dtype) as llm:
        wanted = "float32" if "32" in str(dtype) else "bfloat16"
        assert llm.info()["dtype"] == wanted
        assert len(ids(llm.generate(["x"], SamplingParams(max_tokens=3), use_tqdm=False))[0]) > 0


@pytest.mark.parametrize("dtype", ["half", "fp16", "float16", torch.float16])
def test_d11_float16_on_a_cpu_names_the_way_out(dtype: Any, tmp_path: Path) -> None:
    build(tmp_path)
    refused(tmp_path, "is not supported on a CPU: pass dtype='bfloat16' or 'float32'", dtype=dtype)


def test_d11_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    build(tmp_path)
    refused(tmp_path, "dtype must be one of", "got 'int8'", dtype="int8")
