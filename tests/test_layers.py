"""Imports go one way: each module may import its own layer's list and what lies below."""

from __future__ import annotations

import ast
from pathlib import Path

import pagedllm

PACKAGE = Path(__file__).resolve().parent.parent / "pagedllm"
# From below to above; modules in one line may import each other. A name stands for the module and all inside it.
LAYERS = [
    {"errors"},
    {"keywords", "notices"},
    {"sampling_params"},
    {"config", "request", "prompts", "progress", "generation_defaults"},
    {"outputs"},
    {"cache"},
    {"engine.scheduler_output", "engine.detokenizer"},
    {"ops"},
    {"model", "sampling", "engine"},
    {"runtime"},
    {"chat_template", "detokenizer"},
    {"tokenizer"},
    {"request_builder", "call_lock", "driver", "self_test"},
    {"assembly"},
    {"call"},
    {"llm"},
    {"jobs", "bench"},
    {"doctor", "flags"},
    {"cli"},
    {"__main__"},
]
HOST_SIDE = ("engine", "cache")
LAZY_UPWARD = {("llm", "jobs")}  # LLM.run_file
NO_TORCH = {"torch", "transformers", "tokenizers", "safetensors"}


def layer_of(module: str) -> int:
    parts = module.split(".")
    for name in (".".join(parts[:2]), parts[0]):
        for index, layer in enumerate(LAYERS):
            if name in layer:
                return index
    raise AssertionError(f"pagedllm.{module} stands in no layer")


def imports_of(path: Path) -> list[str]:
    """Absolute names imported anywhere in the file, but for annotations (`if TYPE_CHECKING:`)."""
    found: list[str] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            is_package = (PACKAGE.parent / module.replace(".", "/")).is_dir()
            found.extend(f"{module}.{alias.name}" if is_package else module for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text()))
    return found


def modules() -> list[tuple[str, Path]]:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
    return [(".".join(path.relative_to(PACKAGE).with_suffix("").parts), path) for path in paths]


def test_imports_go_one_way() -> None:
    upward = []
    for module, path in modules():
        for name in imports_of(path):
            if not name.startswith("pagedllm.") or name == "pagedllm.__version__":
                continue
            target = name.removeprefix("pagedllm.")
            target = pagedllm._HOME.get(target, name).removeprefix("pagedllm.")
            if (module, target.split(".")[0]) in LAZY_UPWARD:
                continue
            if layer_of(target) > layer_of(module):
                upward.append(f"{module} imports {target}")
    assert upward == []


def test_the_host_side_imports_no_torch() -> None:
    found = [
        f"{module} imports {name}"
        for module, path in modules()
        if module.split(".")[0] in HOST_SIDE
        for name in imports_of(path)
        if name.split(".")[0] in NO_TORCH
    ]
    assert found == []
