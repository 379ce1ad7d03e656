"""The walls of the package, read from its source: who imports whom (DESIGN §2), and no process-wide state (STYLE 3).

A new top-level module must be given a place in LAYER_OF; a folder's layer is its name.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import pagedllm

PACKAGE = Path(pagedllm.__file__).parent
FOLDERS = {"cache", "engine", "ops", "model", "sampling", "runtime", "jobs", "bench"}
LAYER_OF = {
    **dict.fromkeys(
        (
            "errors",
            "sampling_params",
            "outputs",
            "config",
            "request",
            "keywords",
            "vllm_keywords",
            "reasoning",
            "choices",
            "structured_outputs",
        ),
        "base",
    ),
    "kv_groups": "base",
    "beam_search_params": "base",
    **dict.fromkeys(("tokenizer", "detokenizer", "chat_template"), "tokenizer"),
    **dict.fromkeys(
        ("llm", "assembly", "call", "call_arguments", "call_lock", "driver", "prompts", "request_builder"), "llm"
    ),
    **dict.fromkeys(("request_builder", "generation_defaults", "notices", "progress", "fingerprint"), "llm"),
    **dict.fromkeys(
        ("open_requests", "output_iterator", "scoring", "scoring_methods", "file_methods", "submitter"), "llm"
    ),
    **dict.fromkeys(("cli", "doctor", "exit_codes", "flags", "self_test", "job_commands", "machine_commands"), "cli"),
    "__main__": "cli",
}
PLAN = "engine.scheduler_output"  # the contract between the scheduler and the torch side
BELOW_RUNTIME = {"base", "ops", "model", "sampling", PLAN}
BELOW_LLM = BELOW_RUNTIME | {"cache", "engine", "runtime", "tokenizer"}
MAY_IMPORT = {  # besides its own layer
    "base": set(),
    "cache": {"base"},
    "engine": {"base", "cache"},
    "ops": {"base"},
    "model": {"base", "ops"},
    "sampling": {"base", "ops", PLAN},
    "runtime": BELOW_RUNTIME,
    "tokenizer": {"base", "model"},  # it reads the tokenizer out of a GGUF file
    "llm": BELOW_LLM,
    "jobs": BELOW_LLM | {"llm"},
    "bench": BELOW_LLM | {"llm"},
    "cli": BELOW_LLM | {"llm", "jobs", "bench"},
}
LAZY_UPWARD = {("file_methods.py", "jobs")}  # LLM.run_file, inside the method or for its types
HOST_SIDE = {"base", "cache", "engine"}
HEAVY = {"torch", "transformers", "tokenizers", "safetensors"}


@dataclass(frozen=True)
class Import:
    module: str  # dotted, absolute
    is_lazy: bool  # inside a function or for type checkers only
    line: int


def source_files() -> list[Path]:
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text())


def imports_of(tree: ast.Module) -> Iterator[Import]:
    def visit(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, is_lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            is_package = node.module == "pagedllm" or (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}" if is_package else node.module, is_lazy, node.lineno)
        is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        is_lazy = is_lazy or is_type_checking or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_lazy)

    yield from visit(tree, False)


def layer_of(parts: tuple[str, ...]) -> str:
    """parts: of a module inside the package, like ("engine", "core")."""
    if parts[0] in FOLDERS:
        return parts[0]
    assert parts[0] in LAYER_OF, f"pagedllm/{parts[0]}.py has no layer: give it one in LAYER_OF"
    return LAYER_OF[parts[0]]


def wall_errors(path: Path, tree: ast.Module) -> list[str]:
    if path.name == "__init__.py" and path.parent == Path():
        return [f"{path}:{i.line} imports {i.module} at once" for i in imports_of(tree) if is_ours(i) and not i.is_lazy]
    layer = layer_of(path.with_suffix("").parts)
    errors = []
    for found in imports_of(tree):
        parts = tuple(found.module.split("."))
        if layer in HOST_SIDE and parts[0] in HEAVY:
            errors.append(f"{path}:{found.line} imports {found.module}: the host side does not know it")
        if not is_ours(found) or len(parts) == 1 or parts[1] in pagedllm.__all__:
            continue
        target = layer_of(parts[1:])
        is_plan = ".".join(parts[1:3]) == PLAN and PLAN in MAY_IMPORT[layer]
        is_allowed = target == layer or target in MAY_IMPORT[layer] or is_plan
        if not is_allowed and not (found.is_lazy and (str(path), target) in LAZY_UPWARD):
            errors.append(f"{path}:{found.line} imports {found.module}: {layer} stands below {target}")
    return errors


def is_ours(found: Import) -> bool:
    return found.module.split(".")[0] == "pagedllm"


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_imports_go_one_way(path: Path) -> None:
    assert wall_errors(path, parse(path)) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/core.py", "import torch"),
        ("cache/block.py", "def f():\n    from torch import Tensor"),
        ("cache/block.py", "from pagedllm.engine.core import EngineCore"),
        ("cache/block.py", "from pagedllm.engine import core"),
        ("errors.py", "import pagedllm.cache.block"),
        ("model/decoder.py", "from pagedllm.runtime import memory"),
        ("runtime/model_runner.py", "from pagedllm.engine.scheduler import Scheduler"),
        ("engine/core.py", "from pagedllm.tokenizer import Tokenizer"),
        ("file_methods.py", "from pagedllm.jobs.runner import JobRunner"),
        ("__init__.py", "from pagedllm.llm import LLM"),
    ],
)
def test_a_forbidden_import_is_seen(path: str, source: str) -> None:
    assert len(wall_errors(Path(path), ast.parse(source))) == 1


def test_the_engine_runs_without_torch_and_numpy() -> None:
    code = "import sys, pagedllm.engine.core; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


# Process-wide state

FORBIDDEN_CALLS = {
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.set_default_dtype",
    "torch.set_default_device",
    "torch.set_default_tensor_type",
    "torch.use_deterministic_algorithms",
    "torch.set_num_interop_threads",
    "torch.set_float32_matmul_precision",
    "random.seed",
    "np.random.seed",
    "numpy.random.seed",
    "atexit.register",
    "logging.basicConfig",
    "warnings.simplefilter",
    "warnings.filterwarnings",
    "locale.setlocale",
    "os.putenv",
}
CALLS_OF_ONE_FILE = {"torch.set_num_threads": "runtime/device.py", "signal.signal": "cli.py"}  # set and restored there
MUTATORS = {
    "add",
    "append",
    "update",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
}


def state_errors(path: Path, tree: ast.Module) -> list[str]:
    """`global`, changed module-level objects, attributes of classes written from functions, process-wide setters."""
    module_names = {
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    classes |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name[:1].isupper()
    }
    errors = []
    for node in ast.walk(tree):
        what = None
        if isinstance(node, ast.Global):
            what = f"global {', '.join(node.names)}"
        elif isinstance(node, ast.Call):
            what = forbidden_call(path, node)
        if what is not None:
            errors.append(f"{path}:{node.lineno} {what}")
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            local = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
            local |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            own_class = {"cls"} if "classmethod" in map(ast.unparse, function.decorator_list) else set()
            for node in ast.walk(function):
                what = changed_object(node, module_names - local, (classes - local) | own_class)
                if what is not None:
                    errors.append(f"{path}:{node.lineno} {what}")  # type: ignore[attr-defined]
    return sorted(set(errors))


def forbidden_call(path: Path, node: ast.Call) -> str | None:
    name = ast.unparse(node.func)
    is_elsewhere = name in CALLS_OF_ONE_FILE and CALLS_OF_ONE_FILE[name] != path.as_posix()
    return f"calls {name}" if name in FORBIDDEN_CALLS or is_elsewhere else None


def changed_object(node: ast.AST, module_names: set[str], classes: set[str]) -> str | None:
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        owner = ast.unparse(node.value)
        if owner == "os.environ" or owner in module_names:
            return f"changes {owner}"
        if isinstance(node, ast.Attribute) and owner in classes:
            return f"writes the class attribute {ast.unparse(node)}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value)
        if node.func.attr in MUTATORS and owner in module_names | {"os.environ"}:
            return f"changes {owner}"
    is_setattr = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
    if is_setattr and ast.unparse(node.args[0]) in classes | module_names:  # type: ignore[attr-defined]
        return f"sets an attribute of {ast.unparse(node.args[0])}"  # type: ignore[attr-defined]
    return None


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_no_module_keeps_or_changes_process_wide_state(path: Path) -> None:
    assert state_errors(path, parse(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    global x\n    x = 1",
        "cache = {}\ndef f(k):\n    cache[k] = 1",
        "cache: dict = {}\ndef f(k):\n    del cache[k]",
        "seen = []\ndef f(k):\n    seen.append(k)",
        "class A:\n    n = 0\ndef f():\n    A.n = 1",
        "class A:\n    n = 0\n    @classmethod\n    def f(cls):\n        cls.n += 1",
        "from pagedllm.llm import LLM\ndef f():\n    LLM.n = 1",
        "from pagedllm.llm import LLM\ndef f():\n    setattr(LLM, 'n', 1)",
        "import torch\ntorch.manual_seed(0)",
        "import torch\ndef f():\n    torch.set_default_dtype(torch.float32)",
        "import torch\ndef f():\n    torch.set_num_threads(1)",
        "import logging\nlogging.basicConfig()",
        "import atexit\natexit.register(print)",
        "import os\ndef f():\n    os.environ['A'] = 'b'",
    ],
)
def test_a_forbidden_state_is_seen(source: str) -> None:
    assert len(state_errors(Path("llm.py"), ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "TABLE = {1: 2}\ndef f(k):\n    return TABLE[k]",
        "x = []\ndef f():\n    x = []\n    x.append(1)",
        "class A:\n    def f(self):\n        self.n = 1",
        "def f(a):\n    a.n = 1",
    ],
)
def test_innocent_code_is_not_accused(source: str) -> None:
    assert state_errors(Path("llm.py"), ast.parse(source)) == []
