"""The decoder gives transformers' logits and greedy text, for every family and every switch of its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.gemma3 import modeling_gemma3

from tests.model.harness import Sequences, load
from tests.model.models import (
    assert_parity,
    build,
    edit_config,
    freeze_rope,
    logits_of,
    random_ids,
    relative_error,
    reload,
    save,
)

pytestmark = pytest.mark.usefixtures("one_thread")
FACTORS = [1.0 + 0.1 * i for i in range(16)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn, every parameter": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": FACTORS,
    "long_factor": [3 * f for f in FACTORS],
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("rope", ROPES)
def test_llama_matches_past_the_original_length_with_each_rope(rope: str, tmp_path: Path, namespace: str) -> None:
    model = build("llama", rope_parameters=ROPES[rope])
    assert_parity(model, Sequences(load(save(model, tmp_path), namespace=namespace)), num_prompt=60)


def test_llama_with_longrope_uses_the_short_factors_up_to_the_original_length(tmp_path: Path, namespace: str) -> None:
    model = build("llama", rope_parameters=LONGROPE)
    sequences = Sequences(load(save(model, tmp_path), namespace=namespace))
    freeze_rope(model, 32)
    assert_parity(model, sequences, num_prompt=12, num_tokens=20)


def test_llama_with_longrope_uses_the_long_factors_for_a_request_that_may_cross(tmp_path: Path, namespace: str) -> None:
    model = build("llama", rope_parameters=LONGROPE)
    sequences = Sequences(load(save(model, tmp_path), namespace=namespace))
    freeze_rope(model, 33)
    assert_parity(model, sequences, num_prompt=12, num_tokens=64)  # crosses 32 while decoding


@pytest.mark.parametrize(("num_prompt", "num_total"), [(20, 84), (64, 128), (12, 32)])
def test_llama_with_dynamic_rope_uses_the_base_of_the_length_rounded_up(
    num_prompt: int, num_total: int, tmp_path: Path, namespace: str
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    model = build("llama", rope_parameters=rope, max_position_embeddings=32)
    sequences = Sequences(load(save(model, tmp_path), namespace=namespace))
    freeze_rope(model, 32 if num_total <= 32 else 128)
    assert_parity(model, sequences, num_prompt=num_prompt, num_tokens=num_total - num_prompt)


def test_dynamic_rope_of_a_whole_power_of_two_is_what_transformers_computes_by_itself(
    tmp_path: Path, namespace: str
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    model = build("llama", rope_parameters=rope, max_position_embeddings=32)
    text = random_ids(64)
    assert (
        relative_error(Sequences(load(save(model, tmp_path), namespace=namespace)).logits(text), logits_of(model, text))
        < 2e-4
    )


ORIGINAL = 32
EDGES = [0, 1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL]
THETA = {"rope_theta": 10_000.0}
STRETCHED = {**THETA, "factor": 8.0, "original_max_position_embeddings": ORIGINAL}


@pytest.mark.parametrize(
    ("rope", "max_position", "frozen"),
    [
        ({"rope_type": "default", **THETA}, 256, None),
        ({"rope_type": "linear", **THETA, "factor": 8.0}, ORIGINAL, None),
        ({"rope_type": "dynamic", **THETA, "factor": 8.0}, ORIGINAL, 256),
        ({"rope_type": "yarn", **STRETCHED}, 256, None),
        ({"rope_type": "llama3", **STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256, None),
        ({**LONGROPE, "factor": 8.0}, 256, 129),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("spelling", [4, 5])
def test_logits_at_the_edges_of_each_ropes_length(
    rope: dict[str, Any], max_position: int, frozen: int | None, spelling: int, tmp_path: Path, namespace: str
) -> None:
    """Each position by itself: an error that grows with the position is lost beside the others."""
    model = build("llama", rope_parameters=rope, max_position_embeddings=max_position)
    folder = save(model, tmp_path) if spelling == 5 else spelled_as_in_version_4(model, tmp_path)
    text = random_ids(4 * ORIGINAL + 1)
    ours = Sequences(load(folder, namespace=namespace)).logits(text)
    if frozen is not None:
        freeze_rope(model, frozen)
    theirs = logits_of(model, text)
    for position in EDGES:
        assert relative_error(ours[position], theirs[position]) < 2e-4, position


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"hidden_size": 64, "head_dim": 48},
        {"hidden_size": 128, "head_dim": None},
        {"head_dim": 80, "num_key_value_heads": 1},
        {"head_dim": 96, "num_key_value_heads": 4},
        {"head_dim": 112, "num_attention_heads": 6, "num_key_value_heads": 2},
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 33},
        {"hidden_act": "gelu", "vocab_size": 130, "rms_norm_eps": 1e-3},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()),
)
def test_llama_matches_in_every_shape(settings: dict[str, Any], tmp_path: Path, namespace: str) -> None:
    model = build("llama", **settings)
    assert_parity(model, Sequences(load(save(model, tmp_path), namespace=namespace)), num_prompt=20)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True, "head_dim": 64, "attention_bias": True},
        {"rope_parameters": ROPES["yarn"]},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items())[:60] or "plain",
)
def test_qwen3_matches(settings: dict[str, Any], tmp_path: Path, namespace: str) -> None:
    model = build("qwen3", **settings)
    assert_parity(model, Sequences(load(save(model, tmp_path), namespace=namespace)), num_prompt=20)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"final_logit_softcapping": 2.0},
        {"query_pre_attn_scalar": 48, "attention_bias": True},
        {"tie_word_embeddings": False, "head_dim": 256, "num_key_value_heads": 1},
        {"num_hidden_layers": 7, "layer_types": None},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items())[:60] or "plain",
)
def test_gemma3_matches(settings: dict[str, Any], tmp_path: Path, namespace: str) -> None:
    model = build("gemma3", **settings)
    assert_parity(model, Sequences(load(save(model, tmp_path), namespace=namespace)), num_prompt=20)


@pytest.mark.parametrize("length", [7, 8, 9, 40])
def test_window_counts_the_token_itself(length: int, tmp_path: Path, namespace: str) -> None:
    model = build("gemma3", sliding_window=8, layer_types=["sliding_attention"] * 4)
    sequences = Sequences(load(save(model, tmp_path), namespace=namespace))
    text = random_ids(length)
    for chunk in (length, 1, 5):
        assert relative_error(sequences.logits(text, chunk=chunk), logits_of(model, text)) < 2e-4


def test_gemma3_caps_attention_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    """transformers 5.24 leaves attn_logit_softcapping out for Gemma 3; here it is handed to its own eager attention."""
    eager = modeling_gemma3.eager_attention_forward

    def capped(module: Any, *args: Any, **kwargs: Any) -> Any:
        return eager(module, *args, softcap=module.attn_logit_softcapping, **kwargs)

    model = build("gemma3", attn_logit_softcapping=0.7)
    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    assert_parity(model, Sequences(load(save(model, tmp_path), namespace=namespace)), num_prompt=20)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_batch_of_sequences_in_different_states_gives_each_its_own_logits(
    family: str, tmp_path: Path, namespace: str
) -> None:
    model = build(family)
    sequences = Sequences(load(save(model, tmp_path), namespace=namespace))
    texts = {"long": random_ids(40, 1), "short": random_ids(3, 2), "late": random_ids(17, 3)}
    for name, text in texts.items():
        sequences.begin(name, len(text))
    sequences.step({"long": texts["long"][:39], "short": texts["short"][:2]})
    logits = sequences.step({"late": texts["late"], "short": texts["short"][2:], "long": texts["long"][39:]})
    for name, text in texts.items():
        assert relative_error(logits[name], logits_of(model, text)[-1:]) < 2e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(family: str, tmp_path: Path, namespace: str) -> None:
    folder = save(build(family, num_hidden_layers=4, hidden_size=128, intermediate_size=256), tmp_path / "float32")
    folder = save(reload(family, folder, torch.bfloat16), tmp_path / "bfloat16")
    text = random_ids(100)
    exact = logits_of(reload(family, folder, torch.float32), text)
    theirs = (logits_of(reload(family, folder, torch.bfloat16), text) - exact).abs()
    ours = (Sequences(load(folder, torch.bfloat16, namespace)).logits(text) - exact).abs()
    assert ours.max() < 2 * theirs.max()
    assert ours.mean() < 2 * theirs.mean()


def test_a_float16_checkpoint_is_widened_without_loss(tmp_path: Path, namespace: str) -> None:
    folder = save(build("llama"), tmp_path / "float32")
    folder = save(reload("llama", folder, torch.float16), tmp_path / "float16")
    text = random_ids(20)
    expected = logits_of(reload("llama", folder, torch.float32), text)
    assert relative_error(Sequences(load(folder, namespace=namespace)).logits(text), expected) < 2e-4


def spelled_as_in_version_4(model: PreTrainedModel, folder: Path) -> Path:
    rope = dict(model.config.rope_parameters)
    theta = rope.pop("rope_theta")
    scaling = (
        None if rope["rope_type"] == "default" else {"type" if k == "rope_type" else k: v for k, v in rope.items()}
    )
    save(model, folder, rope_parameters=None)
    edit_config(folder, rope_theta=theta, rope_scaling=scaling)
    return folder


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_both_spellings_of_a_rope_give_the_same_logits(rope: str, tmp_path: Path, namespace: str) -> None:
    model = build("llama", rope_parameters=ROPES[rope])
    text = random_ids(50)
    new = Sequences(load(save(model, tmp_path / "new"), namespace=namespace)).logits(text)
    old = Sequences(load(spelled_as_in_version_4(model, tmp_path / "old"), namespace=namespace)).logits(text)
    assert torch.equal(new, old)


def test_gemma3_ropes_in_the_spelling_of_version_4(tmp_path: Path, namespace: str) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    model = build("gemma3", rope_parameters=ropes)
    folder = save(model, tmp_path, rope_parameters=None, layer_types=None, _sliding_window_pattern=2)
    scaling = {"rope_type": "linear", "factor": 8.0}
    edit_config(folder, rope_theta=2e6, rope_local_base_freq=5e3, rope_scaling=scaling)
    text = random_ids(50)
    assert relative_error(Sequences(load(folder, namespace=namespace)).logits(text), logits_of(model, text)) < 2e-4
