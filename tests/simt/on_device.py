"""The operators' tests on another device: what they give to the emulated operators runs there, and comes back.

    pytest tests/simt/test_rows.py                        the emulator
    pytest tests/simt/test_rows.py --operators-on cuda    the compiled kernels on the GPU
    ... --operators-on copies                             the emulator, by the way that leads to a GPU

Whole storages travel, so strides, aliases and what lies between rows stay as they are. Each call is run twice on the
same inputs: other bits are an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

EMULATED = "pagedllm_simt"


class OnDevice(TorchDispatchMode):
    """Runs `pagedllm_simt` operators on copies of their tensors: on the GPU those of `pagedllm`."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.num_calls = 0
        self._device = torch.device("cuda" if place == "cuda" else "cpu")
        self._namespace = "pagedllm" if place == "cuda" else EMULATED

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != EMULATED:
            return func(*args, **(kwargs or {}))
        assert not kwargs, "operators are called with positional arguments"
        self.num_calls += 1
        name = func._schema.name.partition("::")[2]
        operator = getattr(getattr(torch.ops, self._namespace), name).default
        first, second = Copies(self._device), Copies(self._device)
        for copies in (first, second):
            operator(*tree_map_only(Tensor, copies.of, args))
        first.write_back()
        second.compare(name)
        return None


class Copies:
    """Of the storages of a call's tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (here, there), as bytes

    def of(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._pairs:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            self._pairs[key] = here, here.to(self._device, copy=True)
        there = self._pairs[key][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return view.set_(there, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]

    def write_back(self) -> None:
        for here, there in self._pairs.values():
            here.copy_(there)

    def compare(self, name: str) -> None:
        """With what was written back."""
        for here, there in self._pairs.values():
            num_differing = int((there.to(here.device) != here).sum())
            assert num_differing == 0, f"{name}: {num_differing} bytes differ between two runs on the same inputs"


class NoEmulator:
    """In the emulator's place: there is no order of threads to choose, and nothing is counted."""

    def configure(self, order: int = 0, seed: int = 1) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(f"`{name}` is the emulator's")
