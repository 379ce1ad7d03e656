"""config.json is read strictly: real configs become the right ModelConfig, everything else is refused by name."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.errors import ModelError
from pagedllm.model.config import AttentionKind, LayerConfig, ModelConfig, RopeConfig
from pagedllm.model.hf_config import HARMLESS, NEUTRAL_VALUES
from pagedllm.model.registry import read_model_config
from pagedllm.ops.linear import Activation
from tests.model.configs import GEMMA_3_270M, LLAMA_31_8B, QWEN3_06B, REAL_CONFIGS, SMOLLM2_135M
from tests.model.family_models import CASES, config_json
from tests.model.published_configs import PUBLISHED

FOLDER = Path("model")
ALL_CONFIGS = {**REAL_CONFIGS, **{name: config_json(case) for name, case in CASES.items()}}


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return read_model_config({**config, **changes}, FOLDER)


def test_smollm2() -> None:
    rope = RopeConfig(theta=100_000.0, rotary_dim=64)
    assert read(SMOLLM2_135M) == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=576,
        intermediate_size=1536,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position=8192,
        norm_eps=1e-5,
        activation=Activation.SILU,
        layers=(LayerConfig(AttentionKind(rope=rope)),) * 30,
        attention_scale=0.125,
        is_tied=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_llama_31() -> None:
    config = read(LLAMA_31_8B)
    assert config.ropes == (RopeConfig(500_000.0, 128, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),)
    assert (config.max_position, config.is_tied, config.head_dim) == (131072, False, 128)
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_qwen3() -> None:
    config = read(QWEN3_06B)
    assert config.ropes == (RopeConfig(1_000_000.0, 128),)
    assert (config.qk_norm, config.head_dim, config.num_q_heads, config.is_tied) == ("head", 128, 16, True)
    assert {layer.attention.window for layer in config.layers} == {0}


def test_gemma3() -> None:
    config = read(GEMMA_3_270M)
    local = AttentionKind(window=512, rope=RopeConfig(10_000.0, 256))
    other = AttentionKind(window=0, rope=RopeConfig(1_000_000.0, 256))
    assert [layer.attention for layer in config.layers] == ([local] * 5 + [other]) * 3
    assert config.ropes == (local.rope, other.rope)
    assert config.embedding_scale == math.sqrt(640)
    assert (config.attention_scale, config.norm_weight_offset, config.logit_softcap) == (1 / 16, 1.0, 0.0)
    assert (config.has_post_norms, config.qk_norm, config.is_tied) == (True, "head", True)
    assert config.activation == Activation.GELU_TANH


@pytest.mark.parametrize("model", ALL_CONFIGS)
@settings(max_examples=20, deadline=None)
@given(
    key=st.text(min_size=1, max_size=20)
    | st.sampled_from(["sliding_windo", "rope_thetas", "attn_scale", "logit_scale"]),
    value=st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.integers()),
)
def test_one_unknown_setting_is_refused_by_name(model: str, key: str, value: object) -> None:
    config = ALL_CONFIGS[model]
    if key in config or key in HARMLESS or key in NEUTRAL_VALUES:
        return
    with pytest.raises(ModelError) as caught:
        read(config, **{key: value})
    assert f"config.json: {key if key.isprintable() else repr(key)} is " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ALL_CONFIGS)
@pytest.mark.parametrize("key", ["factr", "rope_theta_local", "partial_rotary"])
def test_one_unknown_setting_of_a_rope_is_refused_by_name(model: str, key: str) -> None:
    config = ALL_CONFIGS[model]
    for place in ("rope_parameters", "rope_scaling"):
        rope = config.get(place)
        if not isinstance(rope, dict):
            continue
        for inner in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
            changed = json.loads(json.dumps(rope).replace(json.dumps(inner), json.dumps({**inner, key: 2.0})))
            with pytest.raises(ModelError, match=rf"config\.json: {place}\.(\w+\.)?{key} (is|must be) "):
                read(config, **{place: changed})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("model", ALL_CONFIGS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), value=JSON)
def test_nonsense_in_a_known_setting_gives_a_model_error_or_a_config(
    model: str, data: st.DataObject, value: Any
) -> None:
    config = ALL_CONFIGS[model]
    if model in REAL_CONFIGS:
        config = {**config, "rope_parameters": None, "original_max_position_embeddings": None}
    key = data.draw(st.sampled_from(sorted(config)))
    with contextlib.suppress(ModelError):
        assert isinstance(read(config, **{key: value}), ModelConfig)


@pytest.mark.parametrize("model", REAL_CONFIGS)
def test_every_size_must_be_there(model: str) -> None:
    config = REAL_CONFIGS[model]
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        with pytest.raises(ModelError, match=rf"config\.json: {key} is missing"):
            read_model_config({k: v for k, v in config.items() if k != key}, FOLDER)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "576"}, "hidden_size must be an integer >= 1, got '576'"),
        ({"hidden_size": True}, "hidden_size must be an integer >= 1, got True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, got 1000000000"),
        ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647, got 2147483648"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, which does not divide 9 heads"),
        ({"num_attention_heads": 10, "num_key_value_heads": 5}, "hidden_size is 576, which 10 heads do not divide"),
        ({"head_dim": 63}, "head_dim must be even, got 63"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, got nan"),
        ({"hidden_act": "relu"}, "hidden_act must be one of .*, got 'relu'"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got '</s>'"),
        ({"rope_interleaved": True}, "rope_interleaved is True, which is not supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True, which is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}: quantized weights of this kind"),
        (
            {"architectures": ["T5Model"]},
            "T5Model is not supported; supported: Cohere2ForCausalLM, CohereForCausalLM, F",
        ),
        ({"architectures": None}, "architectures must be a list of one name, got None"),
        ({"architectures": [["x"]]}, r"architectures must be a list of one name, got \[\['x'\]\]"),
        ({"model_type": "mistral"}, "model_type is 'mistral', but LlamaForCausalLM is llama"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling.rope_type must be one of .*, got 'mrope'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_type and type differ: linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            r"rope_scaling.factor must be in \[1, 1000000\], got 0.5",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "rope_scaling.factor must be in .*, got 1e.308"),
        ({"rope_scaling": {**YARN, "finetuned": True}}, "rope_scaling.finetuned is True, a setting that pagedllm does"),
        ({"rope_scaling": {**YARN, "long_factor": [1.0]}}, r"rope_scaling.long_factor is \[1.0\], a setting"),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
        ({"rope_scaling": {**YARN, "rope_theta": 7.0}}, "rope_scaling.rope_theta is 7.0, but rope_theta at the top of"),
        (
            {"original_max_position_embeddings": 512, "rope_scaling": YARN},
            "original_max_position_embeddings is 1024, but original_max_position_embeddings at the top .* is 512",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "rope_parameters.rope_theta is 10000.0, but rope_theta at the top of the config is 100000.0",
        ),
        (
            {"rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 2.0}},
            "rope_scaling says .*factor=2.0.* but rope_parameters says .*factor=4.0",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 31}},
            "rope_scaling.long_factor must be a list of 32 numbers above 0",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "rope_scaling.high_freq_factor must be above low_freq_factor 4, got 4",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_llama_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(SMOLLM2_135M, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_06B, {"layer_types": ["sliding_attention"] * 28}, "layer_types asks for sliding_attention, but"),
        (QWEN3_06B, {"layer_types": ["full_attention"] * 27}, "layer_types must be a list of 28 out of"),
        (QWEN3_06B, {"layer_types": ["chunked_attention"] * 28}, "layer_types must be a list of 28 out of"),
        (QWEN3_06B, {"mlp_bias": False}, "mlp_bias is False, a setting that pagedllm does not know"),
        (GEMMA_3_270M, {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        (GEMMA_3_270M, {"sliding_window": None}, "sliding_window is null, but there are layers of sliding_attention"),
        (GEMMA_3_270M, {"final_logit_softcapping": -30.0}, "final_logit_softcapping must be a number above 0, got -30"),
        (
            GEMMA_3_270M,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters.rope_theta is 1000000.0, a setting that pagedllm does not know here",
        ),
        (
            GEMMA_3_270M,
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5e3}}},
            "rope_parameters.sliding_attention.rope_theta is 5000.0, but rope_theta at the top of the config is 10000",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_settings_of_other_families_that_are_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(config, **changes)


def test_a_rope_without_any_setting_is_transformers_default() -> None:
    config = {key: value for key, value in SMOLLM2_135M.items() if not key.startswith("rope")}
    assert read_model_config(config, FOLDER).ropes == (RopeConfig(10_000.0, 64),)


@pytest.mark.parametrize(
    ("config", "scaling", "longest"),
    [
        (SMOLLM2_135M, {"type": "linear", "factor": 4.0}, 32768),
        (SMOLLM2_135M, {"type": "dynamic", "factor": 3.0}, 24576),
        (SMOLLM2_135M, {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}, 16384),
        (QWEN3_06B, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (QWEN3_06B, {"rope_type": "yarn", "factor": 4.0}, 163840),
        (GEMMA_3_270M, {"rope_type": "linear", "factor": 8.0}, 32768),  # Gemma's length is after scaling
    ],
)
def test_the_longest_text_follows_from_the_scaling(
    config: dict[str, Any], scaling: dict[str, Any], longest: int
) -> None:
    assert read(config, rope_scaling=scaling).max_position == longest


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 26}, [0] * 26 + [64] * 2),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, [0] * 28),
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, [0] * 28),
    ],
)
def test_qwen3_windows(changes: dict[str, Any], windows: list[int]) -> None:
    assert [layer.attention.window for layer in read(QWEN3_06B, **changes).layers] == windows


def test_gemma3_pattern_stands_in_for_layer_types() -> None:
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        config = {k: v for k, v in GEMMA_3_270M.items() if k not in ("layer_types", "_sliding_window_pattern")}
        windows = [layer.attention.window for layer in read(config, **{key: 3}).layers]
        assert windows == [512, 512, 0] * 6


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    settings = PUBLISHED[name]
    config = read(settings)
    assert config.num_layers == settings.get("num_hidden_layers", settings.get("n_layer"))
    assert config.activation != Activation.NONE


def test_command_rs_length_is_the_one_it_was_trained_for() -> None:
    assert read(PUBLISHED["c4ai-command-r-v01"]).max_position == 131072


def family_config(name: str) -> dict[str, Any]:
    return config_json(CASES[name])


ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer >= 1, got 0"),
        ("ministral", {"sliding_window": None}, "sliding_window is null, but there are layers of sliding_attention"),
        ("smollm3", {"no_rope_layers": [1, 1]}, r"no_rope_layers must be a list of 4 zeros and ones, got \[1, 1\]"),
        ("smollm3", {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers must be a list of 4 zeros and ones"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias is True, only False is supported"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1, got 1.5"),
        ("phi3", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor is 1.0, but partial_rotary_fa"),
        (
            "phi3",
            {"rope_parameters": {**ROTARY, "partial_rotary_factor": 0.1}},
            "partial_rotary_factor 0.1 of head_dim 32 is not an even number of features",
        ),
        ("granite", {"residual_multiplier": 1e-9}, r"residual_multiplier must be in \[0.001, 1000\], got 1e-09"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block is False, only True is supported"),
        ("gpt_neox", {"num_key_value_heads": 2}, "num_key_value_heads must be the number of heads 4"),
        ("gpt2", {"n_ctx": 64}, "n_ctx is 64, only 128 is supported"),
        ("gpt2", {"n_head": 3}, "n_embd is 128, which 3 heads do not divide"),
        ("falcon 7b", {"alibi": True}, "alibi is true: scores that fall with the distance are not supported by the k"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token is 3, only 2 is supported"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config is {'quant_method': 'gptq'",
        ),
        ("qwen3_moe", {"num_experts": 99, "num_local_experts": 99, "num_experts_per_tok": 65}, "is 65, at most 64 are"),
        ("falcon 7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, which is not supported here"),
        ("falcon 40b", {"parallel_attn": False}, "parallel_attn is false, which new_decoder_architecture contradicts"),
        ("falcon 40b", {"num_kv_heads": 3}, "num_kv_heads is 3, which does not fit 4 heads"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_settings_of_the_other_families_that_are_refused(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(family_config(case), **changes)
    assert "\n" not in str(caught.value)


def test_an_absent_window_of_mistral_is_transformers_default() -> None:
    config = {key: value for key, value in family_config("mistral").items() if key != "sliding_window"}
    assert {layer.attention.window for layer in read(config).layers} == {4096}
    assert {layer.attention.window for layer in read(config, sliding_window=None).layers} == {0}


def test_rotary_share_of_gpt_neox_in_the_spelling_of_version_4() -> None:
    config = {key: value for key, value in family_config("gpt_neox").items() if key != "rope_parameters"}
    assert read(config).ropes == (RopeConfig(10_000.0, 8),)
    assert read(config, rotary_pct=0.5, rotary_emb_base=5_000).ropes == (RopeConfig(5_000.0, 16),)


def test_phi3_calls_longrope_su_in_its_first_files() -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    config = {key: value for key, value in family_config("phi3").items() if key != "rope_parameters"}
    scaling = {"type": "su", **factors}
    ropes = read(config, rope_scaling=scaling, rope_theta=10_000.0, original_max_position_embeddings=64).ropes
    assert [(rope.kind, rope.long_factors) for rope in ropes] == [("longrope", (2.0,) * 16)]


def test_granite_divides_the_residual_stream_instead_of_multiplying_what_joins_it() -> None:
    config = read(family_config("granite"))
    assert config.embedding_scale == pytest.approx(12 / 0.22)
    assert config.norm_eps == pytest.approx(1e-5 / 0.22**2)
    assert (config.attention_scale, config.logit_scale) == (0.25, 1 / 8)
