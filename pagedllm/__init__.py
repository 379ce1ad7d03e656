"""pagedllm: offline batch inference of language models, embedded in your program.

    from pagedllm import LLM, SamplingParams

    with LLM("path/to/model") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.text)

Importing the package imports neither torch nor transformers; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "pagedllm.llm",
    "BatchError": "pagedllm.errors",
    "BeamSearchParams": "pagedllm.beam_search_params",
    "CompletionOutput": "pagedllm.outputs",
    "NotSupportedError": "pagedllm.errors",
    "PagedLLMError": "pagedllm.errors",
    "RequestError": "pagedllm.errors",
    "RequestOutput": "pagedllm.outputs",
    "SamplingParams": "pagedllm.sampling_params",
    "StructuredOutputsParams": "pagedllm.structured_outputs",
}

__all__ = [
    "LLM",
    "BatchError",
    "BeamSearchParams",
    "CompletionOutput",
    "NotSupportedError",
    "PagedLLMError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from pagedllm.beam_search_params import BeamSearchParams
    from pagedllm.errors import BatchError, NotSupportedError, PagedLLMError, RequestError
    from pagedllm.llm import LLM
    from pagedllm.outputs import CompletionOutput, RequestOutput
    from pagedllm.sampling_params import SamplingParams
    from pagedllm.structured_outputs import StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pagedllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
