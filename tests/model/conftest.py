"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedllm.ops.library import load_kernels
from pagedllm.runtime.device import torch_threads


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors run faster on one thread."""
    with torch_threads(1):
        yield


@pytest.fixture(params=["reference", "compiled"])
def namespace(request: pytest.FixtureRequest) -> str:
    """Of the operators: the twins, and the kernels compiled for this CPU."""
    return load_kernels("reference" if request.param == "reference" else "auto").namespace
