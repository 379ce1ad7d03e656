from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simt.emulator import Emulator, build


@pytest.fixture(scope="session")
def loaded_emulator() -> Emulator:
    return Emulator(build())


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors are small: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def emulator(loaded_emulator: Emulator) -> Iterator[Emulator]:
    loaded_emulator.configure()
    yield loaded_emulator
    loaded_emulator.configure()
