"""Models run by transformers over the paged cache: its own tokens, or a refusal by name."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedllm import LLM, NotSupportedError, SamplingParams
from pagedllm.errors import ModelError, RequestError
from pagedllm.model.checkpoint import SafetensorsCheckpoint
from pagedllm.model.transformers_model import TransformersDecoder, load_transformers_model
from pagedllm.ops.attention import CpuAttentionBackend
from pagedllm.ops.library import load_kernels
from pagedllm.runtime.eager_check import check_against_eager
from tests.model.transformers_cases import REFUSED, WITH_FAMILY, WITHOUT_FAMILY, save_model
from tests.tiny import VOCAB_SIZE, save_tiny_model

NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def open_llm(folder: Path, **fields: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 4 << 20, **fields})


def greedy_by_transformers(model: Any, prompt: list[int]) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=VOCAB_SIZE,  # none
        pad_token_id=0,
    )
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("architecture", [*WITHOUT_FAMILY, *WITH_FAMILY])
def test_tokens_are_those_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str) -> None:
    model = save_model(tmp_path, {**WITHOUT_FAMILY, **WITH_FAMILY}[architecture])
    rng = random.Random(1)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    prompts = [shared[:5], *([*shared, *(rng.randrange(3, VOCAB_SIZE) for _ in range(n))] for n in (1, 20, 50))]
    expected = [greedy_by_transformers(model, prompt) for prompt in prompts]
    assert len({token_id for tokens in expected for token_id in tokens}) > 20
    has_family = architecture in WITH_FAMILY
    fields = {"model_impl": "transformers"} if has_family else {}
    with caplog.at_level(logging.WARNING, logger="pagedllm"):
        llm = open_llm(tmp_path, max_num_batched_tokens=33, **fields)
    with llm:
        assert (f"{architecture} is run by transformers" in caplog.text) == (not has_family)
        info = llm.info()
        assert (info["model_impl"], info["deterministic"]) == ("transformers", False)
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [0, 32, 48, 80]


def test_preemption_changes_nothing(tmp_path: Path) -> None:
    model = save_model(tmp_path, WITHOUT_FAMILY["Exaone4ForCausalLM"])
    prompts = [[3 + (7 * i + j) % 300 for j in range(30)] for i in range(4)]
    fields = {"max_model_len": 80, "scheduling_policy": "fcfs", "max_num_batched_tokens": 32}
    with open_llm(tmp_path, kv_cache_memory_bytes=20 * 16 * 2 * 2 * 32 * 4, **fields) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.stats.num_preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == [greedy_by_transformers(model, p) for p in prompts]


@pytest.fixture(scope="module")
def starcoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "starcoder2"
    save_model(folder, WITHOUT_FAMILY["Starcoder2ForCausalLM"])
    return folder


def load(folder: Path) -> TransformersDecoder:
    namespace = load_kernels().namespace
    backend = CpuAttentionBackend(namespace)
    return load_transformers_model(SafetensorsCheckpoint(folder), torch.float32, backend, namespace, 512)


def test_the_head_computes_wanted_rows_only(starcoder: Path) -> None:
    with open_llm(starcoder) as llm:
        decoder = llm._assembly.runtime.runner.decoder  # type: ignore[union-attr, attr-defined]
        rows: list[int] = []
        decoder.model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
        llm.generate([[5] * 30, [6] * 20], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert rows == [2, 2]


def test_a_model_that_counts_positions_itself_is_caught_before_it_is_used(starcoder: Path) -> None:
    decoder = load(starcoder)
    with torch.inference_mode():
        check_against_eager(decoder, decoder.backend, 16)
    forward = decoder.model.forward

    def without_positions(position_ids: Tensor | None = None, **others: Any) -> Any:
        return forward(**others)

    decoder.model.forward = without_positions
    with torch.inference_mode(), pytest.raises(NotSupportedError, match="its logits differ from those with its own"):
        check_against_eager(decoder, decoder.backend, 16)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_right_is_refused_by_name(tmp_path: Path, case: str) -> None:
    make_config, reason = REFUSED[case]
    model = save_model(tmp_path, make_config)
    with pytest.raises(NotSupportedError) as caught:
        load(tmp_path)
    text = f"{type(model).__name__} cannot be run by transformers over the paged cache: {reason}"
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"quantization_config": {"bits": 4}}, "has quantized weights (quantization_config)"),
        (
            {"architectures": ["OddLM"], "model_type": "odd", "auto_map": {"AutoConfig": "odd.py"}},
            "needs code from its folder",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "has a rope of kind 'longrope'"),
        ({"architectures": ["Starcoder2Model"]}, "is not a causal language model of transformers"),
    ],
)
def test_settings_are_refused_before_anything_is_loaded(
    starcoder: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    config = json.loads((starcoder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "model.safetensors").symlink_to(starcoder / "model.safetensors")
    with pytest.raises(NotSupportedError) as caught:
        load(tmp_path)
    assert text in str(caught.value)


def test_weights_that_do_not_fit_are_an_error(starcoder: Path, tmp_path: Path) -> None:
    config = json.loads((starcoder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    (tmp_path / "model.safetensors").symlink_to(starcoder / "model.safetensors")
    with pytest.raises(ModelError, match=r"transformers reports missing_keys: model\.layers\.3"):
        load(tmp_path)


def test_determinism_is_not_promised(starcoder: Path) -> None:
    with pytest.raises(ValueError, match="deterministic=True is refused with a model run by transformers"):
        open_llm(starcoder, deterministic=True)


def test_logprobs_of_prompts_are_refused_by_name(starcoder: Path) -> None:
    with (
        open_llm(starcoder) as llm,
        pytest.raises(RequestError, match="prompt_logprobs and scores") as caught,
    ):
        llm.loglikelihood(["one"], [" two"])
    assert (caught.value.code, caught.value.field) == ("unsupported", "prompt_logprobs")


def test_our_own_decoder_can_be_asked_for(starcoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Starcoder2ForCausalLM is not supported; supported: "):
        open_llm(starcoder, model_impl="pagedllm")
    with open_llm(save_tiny_model(tmp_path / "llama"), model_impl="pagedllm") as llm:
        assert llm.info()["model_impl"] == "pagedllm"
