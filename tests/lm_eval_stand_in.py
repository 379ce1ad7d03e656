"""A stand-in for lm-evaluation-harness, for examples/lm_eval_pagedllm.py: its names, and its way with requests.

Only what the example uses: TemplateLM makes pairs of token ids as the harness does, `simple_evaluate` runs three tasks
of one request kind each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Instance:
    args: tuple[Any, ...]


class TemplateLM:
    def __init__(self) -> None:
        self._rank = 0

    def _encode_pair(self: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
        end = context[len(context.rstrip()) :]
        context = context.rstrip()
        before = self.tok_encode(context)
        return before, self.tok_encode(context + end + continuation)[len(before) :]

    def loglikelihood(self: Any, requests: list[Instance]) -> list[tuple[float, bool]]:
        pairs = []
        for context, continuation in (request.args for request in requests):
            if context:
                pairs.append(((context, continuation), *self._encode_pair(context, continuation)))
            else:
                ids = self.tok_encode(continuation, add_special_tokens=False)
                pairs.append(((context, continuation), [self.prefix_token_id], ids))
        return list(self._loglikelihood_tokens(pairs))


def simple_evaluate(model: Any, tasks: list[str], limit: int | None) -> dict[str, Any]:
    choices = [("The capital of Italy is", " Rome"), ("The capital of Italy is", " Oslo"), ("", "Rome")]
    until = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    results = {}
    for task in tasks:
        if task == "choices":
            answers = model.loglikelihood([Instance(pair) for pair in choices[:limit]])
        elif task == "perplexity":
            answers = model.loglikelihood_rolling([Instance(("Rome is the capital of Italy. " * 20,))])
        else:
            answers = model.generate_until([Instance(("1, 2, 3, 4,", until)), Instance(("a b " * 2000, until))])
        results[task] = {"answers": answers, "first": float(len(answers))}
        print(task, answers)
    return {"results": results}


def modules() -> dict[str, ModuleType]:
    """To be put into sys.modules."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model")
    made = {name: ModuleType(name) for name in names}
    made["lm_eval"].simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    made["lm_eval.api.model"].TemplateLM = TemplateLM  # type: ignore[attr-defined]
    return made


if __name__ == "__main__":
    import runpy

    sys.modules.update(modules())
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
