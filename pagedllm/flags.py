"""Command-line flags from the fields of EngineConfig and SamplingParams: same names, same defaults, same checks.

An LLM flag has the keyword's default; a sampling flag that is not given is unset, so that a row, the model's own
generation config or the neutral default decides. `--seed` is the LLM's: a row's own stands in its sampling_params.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from pagedllm.config import EngineConfig
from pagedllm.keywords import RENAMED_LLM_KEYWORDS, RENAMED_SAMPLING_PARAMS, nearest_name
from pagedllm.sampling_params import SamplingParams

NO_SAMPLING_FLAG = ("seed", "logits_processors")  # --seed is the LLM's; a callable has no text
SAMPLING_PREFIX = "sampling."  # of the names in the namespace

MODEL_HELP = "a model folder, a GGUF file or a Hugging Face id"
LLM_HELP = {
    "tokenizer": "another folder for the tokenizer",
    "dtype": "auto, bfloat16 or float32",
    "device": "auto, cpu, cuda or cuda:N",
    "kernels": "auto, an instruction set's name, or reference",
    "max_model_len": "longest prompt + output, in tokens",
    "block_size": "tokens per KV-cache block: 8, 16, 32, 64 or 128",
    "gpu_memory_utilization": "share of the free memory that the KV cache may take",
    "kv_cache_memory_bytes": "size of the KV cache instead",
    "max_num_seqs": "requests per step",
    "max_num_batched_tokens": "new tokens per step",
    "enable_prefix_caching": "share the KV cache of equal beginnings",
    "enforce_eager": "every step run by Python: decode steps are not recorded",
    "async_scheduling": "plan the next step while a GPU runs one; default: with a GPU",
    "scheduling_policy": "offline, fcfs or priority",
    "deterministic": "always so on a CPU",
    "num_threads": "threads; default: all that this process may use",
    "seed": "of all rows that have none of their own",
    "generation_config": "auto, or none to ignore the model's file",
    "chat_template": "a template's text or file instead of the model's own",
    "revision": "branch, tag or commit of a Hugging Face id",
    "load_format": "auto, safetensors or gguf",
    "gguf_file": "the file to take where the model is a folder of several",
    "model_impl": "auto, pagedllm, or transformers: who computes the model",
    "logprobs_mode": "raw_logprobs, or processed_logprobs: of the distribution that is drawn from",
    "max_logprobs": "largest logprobs a request may ask for",
}
SAMPLING_HELP = {
    "n": "outputs per prompt: the columns of each become lists",
    "temperature": "0 to 2; 0 is greedy",
    "top_p": "share of the probability to sample from, (0, 1]",
    "top_k": "sample from the k likeliest; 0 = off",
    "min_p": "drop tokens below this share of the likeliest's probability",
    "presence_penalty": "-2 to 2, once for each token that the output has",
    "frequency_penalty": "-2 to 2, for each time it has it",
    "repetition_penalty": "> 0, over prompt and output; 1 = off",
    "max_tokens": "longest output in tokens; none = up to max_model_len",
    "min_tokens": "shortest output in tokens",
    "stop": "text that ends the output; may be given again",
    "stop_token_ids": "ids that end the output: 1,2,3",
    "include_stop_str_in_output": "keep the stop text",
    "ignore_eos": "go on after the model's end-of-text token",
    "detokenize": "give text",
    "skip_special_tokens": "leave special tokens out of the text",
    "spaces_between_special_tokens": "put spaces between them",
    "logprobs": "adds token_ids, token_logprobs and top_logprobs, of the K likeliest",
    "prompt_logprobs": "not for files: --task loglikelihood scores texts",
    "logit_bias": 'JSON object: {"id": number}',
    "bad_words": "text that never comes, with or without a space before it; may be given again",
    "allowed_token_ids": "ids to sample from, no others: 1,2,3",
    "structured_outputs": 'JSON object: {"choice": ["a", "b"]}',
}


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Arguments with the underscores of a flag's name turned to dashes: --max_tokens is --max-tokens."""
    changed: list[str] = []
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*changed, *arguments[position:]]
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        changed.append(argument)
    return changed


def unknown_flag(argument: str, names: Sequence[str]) -> str:
    """What is said of an argument that `run` does not have. names: of its other arguments."""
    flag = argument.partition("=")[0]
    name = flag.removeprefix("--").replace("-", "_")
    if name == flag:
        return f"unrecognized arguments: {argument}"
    renamed = RENAMED_LLM_KEYWORDS | RENAMED_SAMPLING_PARAMS
    known = [*names, *(field.name for field in dataclasses.fields(SamplingParams))]
    hint = renamed.get(name) or nearest_name(name, known)
    return f"unrecognized arguments: {flag}" + (f": {hint}".replace("_", "-") if hint else "")


def add_llm_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", required=True, metavar="MODEL", help="a model folder, a GGUF file or a Hugging Face id"
    )
    group = parser.add_argument_group("model and engine")
    for field in dataclasses.fields(EngineConfig):
        if field.name != "model":
            _add(group, field, field.name, field.default, LLM_HELP[field.name])


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling, where a row says nothing else")
    for field in dataclasses.fields(SamplingParams):
        if field.name not in NO_SAMPLING_FLAG:
            _add(group, field, SAMPLING_PREFIX + field.name, argparse.SUPPRESS, SAMPLING_HELP[field.name])
    group.add_argument(
        "--choice",
        dest=SAMPLING_PREFIX + "structured_outputs",
        type=_choices,
        default=argparse.SUPPRESS,
        metavar="A,B",
        help="the output is one of these texts",
    )


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of LLM, `model` included."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields whose flags were given."""
    given = vars(args)
    return {
        name.removeprefix(SAMPLING_PREFIX): value for name, value in given.items() if name.startswith(SAMPLING_PREFIX)
    }


def _add(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], dest: str, default: Any, help: str) -> None:
    flag = "--" + field.name.replace("_", "-")
    kind = str(field.type)
    if default is not argparse.SUPPRESS and default is not None:
        help += f" (default: {str(default).lower() if isinstance(default, bool) else default})"
    if kind.startswith("bool"):
        group.add_argument(flag, dest=dest, action=_Switch, default=default, help=help)
    elif field.name in ("stop", "bad_words"):
        group.add_argument(flag, dest=dest, action="append", default=default, metavar="TEXT", help=help)
    else:
        convert, metavar = _converter(field.name, kind)
        group.add_argument(flag, dest=dest, type=convert, default=default, metavar=metavar, help=help)


class _Switch(argparse.BooleanOptionalAction):
    """--name and --no-name; the help is as it is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any, help: str) -> None:
        super().__init__(option_strings, dest, default=None, help=None)
        self.default, self.help = default, help


def _converter(name: str, kind: str) -> tuple[Callable[[str], Any], str]:
    if name in ("stop_token_ids", "allowed_token_ids"):
        return _ids, "IDS"
    if name in ("logit_bias", "structured_outputs"):
        return _object, "JSON"
    if kind.startswith("int"):
        return (_int_or_none if "None" in kind else int), "N"
    if kind == "float":
        return float, "X"
    return str, "TEXT"


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _choices(text: str) -> dict[str, Any]:
    return {"choice": text.split(",")}


def _int_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


# argparse names the converter in its message: "argument --max-tokens: invalid int value: 'x'".
for _function, _name in ((_ids, "list of ints"), (_object, "JSON object"), (_int_or_none, "int or none")):
    _function.__name__ = _name
