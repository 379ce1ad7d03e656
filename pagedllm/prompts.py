"""What callers pass as prompts and messages -> a list of Prompt, in order.

Knows the kinds that SURFACE names and refuses the others by name and place. Knows no tokenizer and no model: lengths
and token ranges are checked by RequestBuilder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedllm.errors import RequestError
from pagedllm.sampling_params import is_int

KINDS = "a str, a list of token ids, or a dict with 'prompt', 'prompt_token_ids' or 'messages'"
KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as given: exactly one of text, token_ids, messages and error is set."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Any] | None = None
    metadata: Any = None
    error: RequestError | None = None


def parse_prompts(prompts: Any) -> list[Prompt]:
    """The argument of `generate`. TypeError where it is no list of prompts; a bad item becomes a Prompt with error."""
    if isinstance(prompts, str):
        return [Prompt(text=prompts)]
    if isinstance(prompts, Mapping):
        if _is_columns(prompts):
            raise TypeError("prompts is a dict of columns: pass one of them, df['column']")
        return [_parse_item(prompts, 0)]
    items = _items(prompts, "prompts", KINDS)
    if items and is_int(items[0]):
        return [_parse_item(items, 0)]
    return [_parse_item(item, index) for index, item in enumerate(items)]


def iter_prompts(prompts: Any) -> Iterator[Prompt]:
    """Like `parse_prompts`, but an iterable that is no list, array or Series is read as the result is."""
    if isinstance(prompts, (str, Mapping, list, tuple)) or _list_method(prompts) or not isinstance(prompts, Iterable):
        return iter(parse_prompts(prompts))
    _refuse_tables(prompts, "prompts")
    return (_parse_item(item, index) for index, item in enumerate(prompts))


def parse_one(prompt: Any) -> Prompt:
    """One prompt of any kind; RequestError where it is none."""
    parsed = _parse_item(prompt, 0)
    if parsed.error is not None:
        raise RequestError(parsed.error.code, parsed.error.message.replace("prompts[0]", "prompt", 1), field="prompt")
    return parsed


def parse_conversations(messages: Any) -> list[Prompt]:
    """The argument of `chat`: one conversation or several. TypeError where it is neither."""
    if isinstance(messages, (str, Mapping)):
        raise TypeError(
            f"messages must be a list of dicts with 'role' and 'content', got {brief(messages)}: "
            "pass [{'role': 'user', 'content': ...}]"
        )
    items = _items(messages, "messages", "a list of dicts with 'role' and 'content', or several such lists")
    if not items:
        return []
    if not isinstance(items[0], (list, tuple, str, bytes, type(None))):
        return [_parse_conversation(items, "messages", 0)]
    return [_parse_conversation(item, f"messages[{index}]", index) for index, item in enumerate(items)]


def _items(values: Any, name: str, kinds: str) -> list[Any]:
    """The items of a list, generator, Series, array or column; TypeError for what has no order or no items."""
    _refuse_tables(values, name)
    method = _list_method(values)
    if method is not None:
        values = getattr(values, method)()
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be {kinds}, or an iterable of them; got {brief(values)}")
    return list(values)


def _list_method(values: Any) -> str | None:
    """The method by which numpy, pandas, polars or pyarrow give a list of Python objects."""
    return next((method for method in ("tolist", "to_list", "to_pylist") if hasattr(values, method)), None)


def _refuse_tables(values: Any, name: str) -> None:
    if isinstance(values, (bytes, bytearray)):
        raise TypeError(f"{name} is {type(values).__name__}: decode it first, {name}.decode('utf-8')")
    if isinstance(values, (set, frozenset)):
        raise TypeError(f"{name} is a {type(values).__name__}, which has no order: pass a list")
    if hasattr(values, "columns") or hasattr(values, "column_names"):
        raise TypeError(f"{name} is a {type(values).__name__}: pass one column of it, df['column']")


def _parse_item(item: Any, index: int) -> Prompt:
    place = f"prompts[{index}]"
    if isinstance(item, str):
        return Prompt(text=item)
    if isinstance(item, Mapping):
        return _parse_dict(item, place, index)
    if hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, (list, tuple)):
        if _is_conversation(item):
            return _refused(f"{place} looks like chat messages: call llm.chat(...)", index)
        return _parse_token_ids(item, place, index)
    if isinstance(item, (bytes, bytearray)):
        return _refused(f"{place} is {type(item).__name__}: decode it first, .decode('utf-8')", index)
    return _refused(f"{place} is {brief(item)}, not {KINDS}", index)


def _parse_dict(item: Mapping[str, Any], place: str, index: int) -> Prompt:
    if "role" in item and "prompt" not in item:
        return _refused(f"{place} looks like chat messages: call llm.chat(...)", index)
    present = [key for key in KEYS if key in item]
    unknown = [key for key in item if key not in KEYS and key != "metadata"]
    if unknown:
        return _refused(f"{place} has an unknown key {unknown[0]!r}: what to keep of a row goes into 'metadata'", index)
    if len(present) != 1:
        found = " and ".join(map(repr, present)) or "none of them"
        return _refused(f"{place} must have one of 'prompt', 'prompt_token_ids' and 'messages', got {found}", index)
    key, value, metadata = present[0], item[present[0]], item.get("metadata")
    if key == "prompt":
        if not isinstance(value, str):
            return _refused(f"{place}['prompt'] must be a str, got {brief(value)}", index, metadata)
        return Prompt(text=value, metadata=metadata)
    if key == "prompt_token_ids":
        return _parse_token_ids(value, f"{place}['prompt_token_ids']", index, metadata)
    return _parse_conversation(value, f"{place}['messages']", index, metadata)


def _parse_token_ids(value: Any, place: str, index: int, metadata: Any = None) -> Prompt:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return _refused(f"{place} must be a list of token ids, got {brief(value)}", index, metadata)
    if set(map(type, value)) <= {int}:  # without a loop in Python: a prompt may have thousands
        return Prompt(token_ids=list(value), metadata=metadata)
    for position, token_id in enumerate(value):
        if not is_int(token_id):
            return _refused(f"{place} must be a list of ints: item {position} is {brief(token_id)}", index, metadata)
    return Prompt(token_ids=[int(token_id) for token_id in value], metadata=metadata)


def _parse_conversation(value: Any, place: str, index: int, metadata: Any = None) -> Prompt:
    try:
        return Prompt(messages=check_conversation(value, place), metadata=metadata)
    except RequestError as error:
        return _refused(str(error), index, metadata)


def check_conversation(value: Any, place: str) -> list[Any]:
    """The messages as they are; RequestError where they are no list. What one may hold is the template's to say."""
    if not isinstance(value, (list, tuple)):
        raise RequestError("invalid_parameter", f"{place} must be a list of messages, got {brief(value)}")
    return list(value)


def _is_columns(prompts: Mapping[str, Any]) -> bool:
    """True for {"prompt": ["a", "b"]} and {"text": [...]}: a table, not a prompt."""
    values = [prompts[key] for key in KEYS if key in prompts]
    nested = any(isinstance(v, (list, tuple)) and v and isinstance(v[0], (str, list, tuple)) for v in values)
    return nested or (not values and "role" not in prompts)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _refused(text: str, index: int, metadata: Any = None) -> Prompt:
    return Prompt(error=RequestError("invalid_parameter", text, index=index, field="prompts"), metadata=metadata)


def brief(value: object) -> str:
    """`nan (float)`: the value, at most 80 characters of it, and its type."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
