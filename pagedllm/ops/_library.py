"""Defines every operator once, for every namespace.

An operator is one Python function, decorated with its schema: the function is the slow readable twin, and calling
the resulting Operator is the typed way to run it. Three namespaces share the schema:

    pagedllm            compiled kernels (csrc/), on CPU and CUDA tensors
    pagedllm_simt       the CUDA kernels run on the CPU by an emulator, for tests
    pagedllm_reference  the twins themselves, for kernels="reference"

All operators write into tensors that they are given and return nothing, so a fake needs no code and a captured graph
needs no allocation. C++ registers implementations only; `pagedllm.ops.library` compares their signatures at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec

import torch

NAMESPACES = ("pagedllm", "pagedllm_simt", "pagedllm_reference")
_LIBRARIES = {namespace: torch.library.Library(namespace, "DEF") for namespace in NAMESPACES}
P = ParamSpec("P")


class Operator(Generic[P]):
    """An operator: `operator(namespace, *args)` runs it, `operator.reference(*args)` runs its twin."""

    def __init__(self, schema: str, reference: Callable[P, None], is_torch_on_gpu: bool) -> None:
        self.name = schema[: schema.index("(")]
        self.schema = schema
        self.reference = reference
        self.__doc__ = reference.__doc__
        for namespace, library in _LIBRARIES.items():
            library.define(schema)
            torch.library.register_fake(f"{namespace}::{self.name}", lambda *args, **kwargs: None, lib=library)
        _LIBRARIES["pagedllm_reference"].impl(self.name, reference, "CompositeExplicitAutograd")
        if is_torch_on_gpu:
            _LIBRARIES["pagedllm"].impl(self.name, reference, "CUDA")
            _LIBRARIES["pagedllm_simt"].impl(self.name, reference, "CPU")
        self._overloads: dict[str, Any] = {
            namespace: getattr(getattr(torch.ops, namespace), self.name).default for namespace in NAMESPACES
        }

    def __call__(self, namespace: str, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._overloads[namespace](*args, **kwargs)


def operator(schema: str, *, is_torch_on_gpu: bool = False) -> Callable[[Callable[P, None]], Operator[P]]:
    """Decorator: `schema` is `name(arguments) -> ()` in torch's schema language; the function below it is the twin.

    is_torch_on_gpu: there is no CUDA kernel, and torch computes the twin there (and in the emulation).
    """

    def define(reference: Callable[P, None]) -> Operator[P]:
        return Operator(schema, reference, is_torch_on_gpu)

    return define
