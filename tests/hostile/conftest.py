"""The tiny models, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedllm import LLM
from tests.hostile.harness import open_llm
from tests.tiny import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("hostile") / "llama")


@pytest.fixture(scope="session")
def window_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of 24 tokens, two ropes, softcaps."""
    return save_tiny_model(tmp_path_factory.mktemp("hostile") / "gemma3", "gemma3")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm
