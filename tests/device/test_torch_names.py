"""Lines that only a GPU runs are read here: every name of torch's that they use is there, with those keywords."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([
    *(ROOT / "pagedllm").rglob("*.py"),
    *(ROOT / "tests" / "device").glob("*.py"),
    ROOT / "tests" / "simt" / "on_device.py",
    ROOT / "tests" / "fake_gpu.py",
])  # fmt: skip
DYNAMIC = ("torch.ops",)  # operators are there once a library has been loaded


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` of a chain of attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def torch_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Whole chains that begin with torch, and their lines."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = dotted(node)
            if name is not None and name.startswith("torch.") and not name.startswith(DYNAMIC):
                yield name, node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def exists(name: str) -> bool:
    try:
        resolve(name)
    except AttributeError:
        return False
    return True


def resolve(name: str) -> Any:
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_torch_exists(path: Path) -> None:
    names = torch_names(ast.parse(path.read_text()))
    assert [f"line {line}: {name}" for name, line in names if not exists(name)] == []


def test_the_check_would_see_a_wrong_name() -> None:
    tree = ast.parse("torch.cuda.max_memory_alocated(0)\nx = torch.cuda.Event(enable_timings=True)")
    names = [name for name, _ in torch_names(tree)]
    assert names == ["torch.cuda.max_memory_alocated", "torch.cuda.Event"]
    assert [exists(name) for name in names] == [False, True]
    assert wrong_keywords(tree) == ["line 2: torch.cuda.Event has no enable_timings"]


def wrong_keywords(tree: ast.AST) -> list[str]:
    """Of calls of torch.cuda, whose functions are Python's and have signatures."""
    wrong = []
    for node in ast.walk(tree):
        name = dotted(node.func) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or name is None or not name.startswith("torch.cuda."):
            continue
        if not exists(name):
            continue  # the other test's
        function = resolve(name)
        signature = inspect.signature(function.__new__ if function is torch.cuda.Event else function)
        parameters = signature.parameters.values()
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            continue
        unknown = {keyword.arg for keyword in node.keywords if keyword.arg} - {p.name for p in parameters}
        wrong += [f"line {node.lineno}: {name} has no {keyword}" for keyword in sorted(unknown)]
        num_places = sum(p.kind != p.KEYWORD_ONLY for p in parameters)
        if len(node.args) > num_places:
            wrong.append(f"line {node.lineno}: {name} takes {num_places} arguments")
    return wrong


def test_functions_of_torch_cuda_have_these_keywords() -> None:
    assert {str(path): found for path in FILES if (found := wrong_keywords(ast.parse(path.read_text())))} == {}


def test_objects_of_torch_cuda_have_these_methods() -> None:
    """That tests/device and compute_device call on an event, a graph, a stream."""
    assert {"record", "synchronize", "elapsed_time"} <= set(dir(torch.cuda.Event))
    assert {"replay", "capture_begin", "capture_end"} <= set(dir(torch.cuda.CUDAGraph))


def test_a_card_has_these_properties() -> None:
    """From the stub: the class itself is in CUDA builds only."""
    stub = ast.parse((Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text())
    (found,) = (node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "_CudaDeviceProperties")
    fields = {dotted(node.target) for node in found.body if isinstance(node, ast.AnnAssign)}
    assert {"name", "major", "minor", "multi_processor_count", "total_memory"} <= fields
