"""What a benchmark counts of a model: weights, bytes that a token reads, experts; and models of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedllm import LLM
from pagedllm.bench.model_layers import ModelCost, expert_choices, layer_products
from pagedllm.bench.random_model import SHAPES
from pagedllm.cli import main
from pagedllm.model.config import ModelConfig
from pagedllm.model.loader import open_checkpoint
from pagedllm.model.registry import read_model_config
from tests.tiny import save_tiny_model

ATTENTION = 64 * (128 + 64 + 64) + 128 * 64  # tests.tiny: qkv and output of a layer
EXPERT = 64 * 2 * 40 + 40 * 64
ROUTER = 64 * 6


def config_of(folder: Path) -> ModelConfig:
    checkpoint = open_checkpoint(str(folder), dtype=torch.bfloat16)
    return read_model_config(checkpoint.config, checkpoint.path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def test_a_token_of_a_mixture_costs_the_experts_that_it_passes(mixture: Path) -> None:
    cost = ModelCost.of(config_of(mixture), torch.bfloat16)
    assert cost.layer_weights == 3 * (ATTENTION + ROUTER + 2 * EXPERT)
    assert cost.head_weights == 64 * 320


def test_a_token_reads_no_other_expert_and_no_second_vocabulary(mixture: Path, tmp_path: Path) -> None:
    def read(folder: Path) -> int:
        return ModelCost.of(config_of(folder), torch.bfloat16).weight_bytes

    tied = read(save_tiny_model(tmp_path / "tied", tie_word_embeddings=True))
    assert read(save_tiny_model(tmp_path / "untied", tie_word_embeddings=False)) == tied
    one_more = read(save_tiny_model(tmp_path / "three", "qwen3_moe", num_experts_per_tok=3))
    packed_expert = 2 * (64 * 2 * 64 + 40 * 64)  # 40 columns of gate and of up take two panels
    assert one_more - read(mixture) == 3 * packed_expert


def test_dense_layers_of_a_mixture_are_counted_as_such(tmp_path: Path) -> None:
    config = config_of(save_tiny_model(tmp_path, "qwen3_moe", mlp_only_layers=[1]))
    assert {name: product.num_layers for name, product in layer_products(config).items()} == {
        "qkv": 3,
        "output": 3,
        "gate_up": 1,
        "down": 1,
        "router": 2,
        "expert_gate_up": 2,
        "expert_down": 2,
    }


@pytest.mark.parametrize(
    ("num_rows", "bounds"),
    [(2, [[0, 1, 2, 2, 2, 2], [0, 0, 0, 1, 2, 2]]), (5, [[0, 1, 2, 3, 4, 5]]), (12, [[0, 2, 4, 7, 9, 12]])],
)
def test_experts_are_chosen_evenly_and_others_with_each_call(num_rows: int, bounds: list[list[int]]) -> None:
    assert [choice.tolist() for choice in expert_choices(num_rows, 5)] == bounds


def test_a_mixture_is_measured_over_a_call_and_kernel_by_kernel(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagedllm.bench.model_layers.MAX_NUM_COPIES", 1)  # what is timed does not matter here
    common = ["-m", str(mixture), "--num-threads", "1", "--json"]
    lengths = ["--workload", "16,4", "--num-requests", "3", "--kv-cache-memory-bytes", str(8 << 20)]
    assert main(["bench", "throughput", *common, *lengths]) == 0
    engine = json.loads(capsys.readouterr().out)["engines"][0]
    flops = 2 * (3 * 19 * 3 * (ATTENTION + ROUTER + 2 * EXPERT) + 3 * 4 * 64 * 320)
    assert engine["work"]["gflops"] == pytest.approx(flops * engine["median"] / 12 / 1e9)
    assert engine["work"]["linear_share"] > 0
    assert main(["bench", "kernels", *common]) == 0
    kernels = {(k["kernel"], k["shape"]): k for k in json.loads(capsys.readouterr().out)["kernels"]}
    one, many = (kernels["linear expert_down", f"40 x 64, M={num_tokens}"] for num_tokens in (1, 32))
    assert one["flops"] == 2 * 2 * 40 * 64
    assert one["bytes"] == 2 * 2 * (40 * 64 + 40 + 64)
    assert many["bytes"] == 2 * 6 * 40 * 64 + 2 * 64 * (40 + 64)
    assert ("linear router", "64 x 6, M=8") in kernels


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 64)
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    monkeypatch.setitem(SHAPES, "tiny", {"model_type": "llama", "vocab_size": 320, **sizes, **counts})
    return "tiny"


def test_a_random_model_is_written_once_and_runs(
    tiny_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    assert main(["bench", "random-model", tiny_shape, str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    weights = (folder / "model.safetensors").read_bytes()
    with LLM(str(folder), kv_cache_memory_bytes=8 << 20, num_threads=1) as llm:
        (output,) = llm.generate(["\u03b1"], use_tqdm=False)
        assert len(output.prompt_token_ids) == 2  # bytes
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "random-model", tiny_shape, str(folder)])
    assert f"{folder} holds a model already" in capsys.readouterr().err
    assert main(["bench", "random-model", tiny_shape, str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights


def test_llama_1b_has_the_layers_of_llama_3_2_1b() -> None:
    import transformers

    config = transformers.AutoConfig.for_model(**SHAPES["llama-1b"]).to_dict()
    cost = ModelCost.of(
        read_model_config({**config, "architectures": ["LlamaForCausalLM"]}, Path("llama-1b")), torch.bfloat16
    )
    assert cost.layer_weights == 16 * (2048 * (2048 + 512 + 512) + 2048 * 2048 + 3 * 2048 * 8192)
    assert cost.head_weights == 2048 * 32_000
