from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from pagedllm.ops.library import load_cuda_kernels
from tests.simt.emulator import Emulator, build
from tests.simt.on_device import NoEmulator, OnDevice


@pytest.fixture(scope="session")
def loaded_emulator(pytestconfig: pytest.Config) -> Emulator | NoEmulator:
    if pytestconfig.getoption("operators_on") == "cuda":
        load_cuda_kernels()
        return NoEmulator()
    return Emulator(build())


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors are small: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def emulator(
    loaded_emulator: Emulator | NoEmulator, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Emulator | NoEmulator]:
    place = pytestconfig.getoption("operators_on")
    if place == "copies":  # what is captured would be the copies, which are gone, and each call twice
        monkeypatch.setattr(
            loaded_emulator, "capture_begin", lambda: pytest.skip("as on a GPU, nothing is captured here")
        )
    loaded_emulator.configure()
    with contextlib.nullcontext() if place == "emulator" else OnDevice(place):
        yield loaded_emulator
    loaded_emulator.configure()
