from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagedllm.model.dense_format import DenseFormat
from pagedllm.model.linear import Epilogue
from pagedllm.ops.library import load_cuda_kernels
from tests.simt.emulator import Emulator, build
from tests.simt.on_device import NoEmulator, OnDevice
from tests.tiny import VOCAB_SIZE


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


@pytest.fixture(scope="module")
def row_invariant_products() -> None:
    """Skips where torch gives a row other bits in another batch: then settings may change tokens."""
    generator = torch.Generator().manual_seed(0)
    for num_features, num_columns in ((64, 256), (128, 64), (64, 192), (96, 64), (64, VOCAB_SIZE)):
        x, weight, residual = (
            torch.randn(shape, generator=generator).bfloat16()
            for shape in ((64, num_features), (num_columns, num_features), (64, num_columns))
        )
        whole = DenseFormat(torch.bfloat16)
        for residuals in (None, residual):
            expected = product(whole, x, weight, residuals)
            for num_rows in (1, 2, 3, 4, 5, 8, 13, 16, 33):
                rows = None if residuals is None else residuals[:num_rows]
                if not torch.equal(product(whole, x[:num_rows], weight, rows), expected[:num_rows]):
                    pytest.skip(f"torch's product of {num_rows} rows has other bits than that of 64 on this CPU")


def product(weight_format: DenseFormat, x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    out = torch.empty(len(x), len(weight), dtype=x.dtype)
    weight_format.apply("pagedllm_simt", out, x, weight, None, Epilogue(residual=residual))
    return out
