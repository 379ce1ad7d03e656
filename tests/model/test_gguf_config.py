"""From header keys to config.json: what families read, what is refused, and that transformers agrees on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedllm.errors import ModelError
from pagedllm.model.gguf import GGUFCheckpoint
from pagedllm.model.gguf_rope import llama3_scaling
from pagedllm.model.registry import read_model_config
from tests.model.gguf_files import (
    CONTROL,
    SIZES,
    byte_level_vocabulary,
    model_keys,
    random_tensors,
    write_gguf,
    write_model,
)


def config_of(path: Path, architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    return dict(GGUFCheckpoint(write_model(path / "m.gguf", architecture, **changes)).config)


def test_llamas_config(tmp_path: Path) -> None:
    assert config_of(tmp_path) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 258,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    }


def test_gemma_3s_windows_scale_and_second_rope(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma3", gemma3__block_count=7, gemma3__attention__key_length=32,
                       gemma3__final_logit_softcapping=30.0)  # fmt: skip
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["rope_theta"], config["rope_local_base_freq"]) == (16, 10000.0, 10000.0)
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (32, 32)
    assert (config["final_logit_softcapping"], config["attn_logit_softcapping"]) == (30.0, None)
    assert config["hidden_activation"] == "gelu_pytorch_tanh"


def test_gemma_3_without_a_window_sees_everything(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma3", gemma3__attention__sliding_window=None)
    assert config["layer_types"] == ["full_attention"] * 2


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_the_family_reads_the_config_whole(tmp_path: Path, architecture: str) -> None:
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "m.gguf", architecture))
    config = read_model_config(checkpoint.config, checkpoint.path)
    assert (config.num_layers, config.hidden_size, config.head_dim, config.num_kv_heads) == (2, 64, 16, 2)
    assert config.qk_norm == ("none" if architecture == "llama" else "head")


def test_linear_scaling_in_both_spellings(tmp_path: Path) -> None:
    expected = {"rope_type": "linear", "factor": 8.0}
    new = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 8.0}
    assert config_of(tmp_path, **new)["rope_scaling"] == expected
    assert config_of(tmp_path, llama__rope__scale_linear=8.0)["rope_scaling"] == expected
    assert config_of(tmp_path, llama__rope__scaling__type="none")["rope_scaling"] is None


def test_yarn_scaling(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0, "attn_factor": 1.0}
    changes = {f"qwen3__rope__scaling__{key}": value for key, value in keys.items()}
    assert config_of(tmp_path, "qwen3", **changes)["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
    }  # fmt: skip


def rope_divisors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> Any:
    """As llama.cpp's converter writes them, in float32."""
    frequencies = 1 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    wavelengths = (2 * np.pi / frequencies).astype(np.float32)
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths < original / high, 1, np.where(wavelengths > original / low, factor, between))
    return divisors.astype(np.float32)


@pytest.mark.parametrize(
    ("theta", "head_dim", "factor", "high", "original"),
    [(500000.0, 128, 8.0, 4.0, 8192), (500000.0, 64, 32.0, 4.0, 8192), (10000.0, 64, 2.5, 8.0, 2048)],
)
def test_llama3_scaling_is_recovered_from_its_divisors(
    theta: float, head_dim: int, factor: float, high: float, original: int
) -> None:
    divisors = rope_divisors(theta, head_dim, factor, 1.0, high, original)
    assert llama3_scaling(divisors, theta, head_dim, "m.gguf") == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip


def write_with_divisors(path: Path, divisors: Any, **changes: Any) -> Path:
    vocabulary = byte_level_vocabulary()
    keys = model_keys("llama", SIZES, vocabulary) | {key.replace("__", "."): value for key, value in changes.items()}
    tensors = random_tensors("llama", SIZES, len(vocabulary["tokens"])) | {"rope_freqs.weight": divisors}
    return write_gguf(path / "m.gguf", "llama", keys, tensors)


def test_divisors_in_a_file_become_llama3_scaling(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_with_divisors(tmp_path, rope_divisors(10000.0, 16, 8.0, 1.0, 16.0, 64)))
    assert checkpoint.config["rope_scaling"]["factor"] == 8.0
    assert checkpoint.config["rope_scaling"]["original_max_position_embeddings"] == 64
    assert "rope_freqs.weight" not in checkpoint.names()


def test_divisors_of_one_scale_nothing(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_with_divisors(tmp_path, np.ones(8, np.float32)))
    assert checkpoint.config["rope_scaling"] is None


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        ([1, 1, 1, 2, 3, 3, 4, 8], "is not what llama3 scaling"),
        ([1, 1, 1, 1, 1, 1, 1, 8], "is not what llama3 scaling"),
        ([0.5, 1, 1, 1, 1, 1, 1, 8], "must hold 8 numbers >= 1"),
        ([np.nan, 1, 1, 1, 1, 1, 1, 8], "must hold 8 numbers >= 1"),
        ([1, 1, 1, 8], "must hold 8 numbers >= 1"),
    ],
)
def test_other_divisors_are_refused(tmp_path: Path, divisors: list[float], message: str) -> None:
    file = write_with_divisors(tmp_path, np.array(divisors, np.float32))
    with pytest.raises(ModelError, match=f"rope_freqs.weight {message}"):
        GGUFCheckpoint(file)


def test_divisors_and_linear_scaling_together_are_refused(tmp_path: Path) -> None:
    file = write_with_divisors(tmp_path, np.ones(8, np.float32), llama__rope__scale_linear=2.0)
    with pytest.raises(ModelError, match=r"both rope_freqs\.weight and linear rope scaling"):
        GGUFCheckpoint(file)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("mamba", {}, "GGUF architecture 'mamba' is not supported; supported are llama, smollm3,"),
    "unknown key": ("llama", {"llama__odd": 1, "odd__key": 2}, "unknown header keys: llama.odd, odd.key"),
    "adapter": ("llama", {"general__type": "adapter"}, "general.type is 'adapter': not a model"),
    "split": ("llama", {"split__count": 3}, "one part of a split GGUF: join the parts"),
    "experts": ("llama", {"llama__expert_count": 8}, "the key llama.expert_used_count is missing"),
    "odd router": (
        "qwen3moe", {"qwen3moe__expert_count": 8, "qwen3moe__expert_gating_func": 2},
        "qwen3moe.expert_gating_func = 2 is not supported: the router's weights are a softmax",
    ),
    "olmo 3": ("olmo2", {"olmo2__attention__sliding_window": 8}, "olmo2.attention.sliding_window = 8 is not supported"),
    "falcon with alibi": (
        "falcon", {"falcon__attention__head_count_kv": 4, "falcon__attention__layer_norm_epsilon": 1e-5},
        "a Falcon with as many KV heads as heads: the file does not say whether it has a rope",
    ),
    "bidirectional": ("llama", {"llama__attention__causal": False}, "llama.attention.causal = False is not supported"),
    "embedding model": ("qwen3", {"qwen3__pooling_type": 3}, "qwen3.pooling_type = 3 is not supported"),
    "partial rope": ("llama", {"llama__rope__dimension_count": 8}, "rope.dimension_count is 8, not the head size 16"),
    "two head sizes": ("qwen3", {"qwen3__attention__value_length": 8}, "attention.value_length is 8, not the head"),
    "odd yarn": (
        "qwen3", {"qwen3__rope__scaling__yarn_attn_factor": 2.0}, "qwen3.rope.scaling.yarn_attn_factor = 2.0 is not"
    ),
    "unknown scaling": ("llama", {"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type = 'longrope'"),
    "missing": ("llama", {"llama__block_count": None}, "the key llama.block_count is missing"),
    "zero": ("llama", {"llama__attention__head_count": 0}, "llama.attention.head_count must be positive, got 0"),
    "not finite": ("llama", {"llama__rope__freq_base": float("inf")}, "llama.rope.freq_base must be a positive number"),
    "layers": ("llama", {"llama__block_count": 1 << 30}, "llama.block_count is 1,073,741,824, the file has no such"),
    "vocabulary": ("llama", {"llama__vocab_size": 100}, "vocab_size is 100, token_embd has 258 rows"),
    "uneven heads": ("llama", {"llama__attention__head_count_kv": [2, 1]}, "head_count_kv differs between layers"),
}  # fmt: skip


@pytest.mark.parametrize(("architecture", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_we_do_not_compute_is_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    vocabulary = byte_level_vocabulary()
    keys = model_keys(architecture, SIZES, vocabulary)
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = random_tensors("llama", SIZES, len(vocabulary["tokens"]))
    file = write_gguf(
        tmp_path / "m.gguf", architecture, {key: value for key, value in keys.items() if value is not None}, tensors
    )
    with pytest.raises(ModelError) as caught:
        GGUFCheckpoint(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    config_of(
        tmp_path,
        general__name="n", general__base_model__0__name="b", general__license__link="l", general__tags=["a"],
        general__file_type=3, quantize__imatrix__file="f", llama__expert_count=0, llama__attention__causal=True,
        llama__rope__dimension_count=16, tokenizer__ggml__fim_pre_token_id=1,
    )  # fmt: skip


def test_a_list_that_says_the_same_of_every_layer_is_one_value(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary()
    keys = model_keys("llama", SIZES, vocabulary) | {"llama.attention.head_count_kv": [2, 2]}
    file = write_gguf(tmp_path / "m.gguf", "llama", keys, random_tensors("llama", SIZES, len(vocabulary["tokens"])))
    assert GGUFCheckpoint(file).config["num_key_value_heads"] == 2


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary()
    tensors = random_tensors("llama", SIZES, len(vocabulary["tokens"])) | {
        "blk.0.attn_gate.weight": np.ones(1, np.float32)
    }
    file = write_gguf(tmp_path / "m.gguf", "llama", model_keys("llama", SIZES, vocabulary), tensors)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.attn_gate\.weight is unknown for the architecture llama"):
        GGUFCheckpoint(file)


def test_declared_ends_come_first_then_those_known_by_name(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary(
        specials={"<|im_end|>": CONTROL, "<|eot|>": CONTROL, "<eos>": CONTROL, "<end_of_turn>": CONTROL}
    ) | {"eos_token_id": 259, "eot_token_id": 258, "bos_token_id": 259}
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "m.gguf", vocabulary=vocabulary))
    assert checkpoint.generation_config == {"bos_token_id": 259, "eos_token_id": [259, 258, 257, 260]}


def test_recommended_sampling_goes_into_the_generation_config(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(
        write_model(tmp_path / "m.gguf", general__sampling__temp=0.5, general__sampling__top_k=20)
    )
    assert checkpoint.generation_config == {
        "bos_token_id": None, "eos_token_id": 257, "temperature": 0.5, "top_k": 20, "do_sample": True,
    }  # fmt: skip
