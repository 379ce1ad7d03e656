"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedllm.runtime.device import torch_threads


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors run faster on one thread."""
    with torch_threads(1):
        yield
