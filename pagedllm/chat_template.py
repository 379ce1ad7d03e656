"""Chat templates: which one a model folder has, and rendering messages with it, as transformers does.

Templates come from model files and are untrusted: they run in jinja's immutable sandbox and see plain data only. Every
failure is a RequestError("template_error") that quotes the template's own message; the caller adds the conversation's
index. Knows nothing of token ids. Called by Tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pagedllm.errors import ModelError, NotSupportedError, RequestError

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES_FOLDER = "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def read_templates(files: Mapping[str, str], config: Mapping[str, Any], source: str) -> dict[str, str]:
    """Name to template. A file of its own wins over the config, which has one, or a list with names."""
    found = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(found, str):
        templates[DEFAULT] = found
    elif isinstance(found, list) and all(isinstance(e, dict) and {"name", "template"} <= e.keys() for e in found):
        templates |= {str(entry["name"]): str(entry["template"]) for entry in found}
    elif found is not None:
        raise ModelError(f"{source}: chat_template must be a text or a list of names and templates, got {found!r:.80}")
    if TEMPLATE_FILE in files:
        templates[DEFAULT] = files[TEMPLATE_FILE]
    for name, text in files.items():
        if name.startswith(f"{NAMED_TEMPLATES_FOLDER}/"):
            templates[Path(name).stem] = text
    return templates


class ChatTemplates:
    """The templates of one tokenizer. `variables`: its special tokens by name, which templates may use."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str], source: str) -> None:
        self.templates = dict(templates)
        self._variables = dict(variables)
        self._source = source
        self._compiled: dict[str, jinja2.Template] = {}

    def check(self, chat_template: str) -> None:
        """Raises RequestError where it cannot be had or is no template."""
        self._compile(self._choose(chat_template, None))

    def render(
        self,
        messages: Sequence[Any],
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Any] | None,
        clock: Callable[[], datetime],
        kwargs: Mapping[str, Any],
    ) -> str:
        if continue_final_message and add_generation_prompt:
            _invalid("continue_final_message", "continue_final_message=True needs add_generation_prompt=False")
        if not messages:
            raise RequestError("empty_prompt", "the conversation has no messages")
        text = self._choose(chat_template, tools)
        template = self._compile(text)
        plain = [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        variables = self._variables | {
            "tools": None if tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": lambda form: clock().strftime(form),
            **{name: _plain(value, name) for name, value in kwargs.items()},
        }
        if not any(isinstance(message.get("content"), list) for message in plain):
            return _render(template, plain, variables, continue_final_message)
        flat = [_flattened(message, f"messages[{index}]") for index, message in enumerate(plain)]
        if _takes_parts(template, plain, variables):
            return _render(template, plain, variables, continue_final_message)
        return _render(template, flat, variables, continue_final_message)

    def _choose(self, chat_template: str | None, tools: Sequence[Any] | None) -> str:
        if chat_template is not None:
            if chat_template in self.templates:
                return self.templates[chat_template]
            if "{" in chat_template:
                return chat_template
            try:
                return Path(chat_template).read_text(encoding="utf-8")
            except (OSError, ValueError):
                _invalid("chat_template", f"chat_template is neither a template nor a readable file: {chat_template!r}")
        name = TOOL_USE if tools is not None and TOOL_USE in self.templates else DEFAULT
        if name in self.templates:
            return self.templates[name]
        if self.templates:
            names = ", ".join(sorted(self.templates))
            _invalid("chat_template", f"{self._source} has several chat templates: pass chat_template= one of {names}")
        raise RequestError("template_error", f"no chat template in {self._source}; pass chat_template=")

    def _compile(self, text: str) -> jinja2.Template:
        template = self._compiled.get(text)
        if template is None:
            import jinja2

            try:
                template = _environment().from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise RequestError("template_error", f"chat template, line {error.lineno}: {error.message}") from error
            self._compiled[text] = template
        return template


def _render(
    template: jinja2.Template, messages: list[dict[str, Any]], variables: dict[str, Any], continue_final_message: bool
) -> str:
    if not continue_final_message:
        return _run(template, messages, variables)
    final = messages[-1].get("content")
    if isinstance(final, list):
        part = next((part for part in reversed(final) if "text" in part), None)
    else:
        part = messages[-1] if isinstance(final, str) else None
    if part is None:
        _invalid("continue_final_message", "continue_final_message: the final message has no text to continue")
    key = "text" if isinstance(final, list) else "content"
    wanted = part[key]
    part[key] = wanted + CONTINUE_TAG
    text = _run(template, messages, variables)
    place = text.rfind(CONTINUE_TAG.strip())
    if place < 0 or wanted.strip() not in text:
        raise RequestError(
            "template_error", "continue_final_message: the chat template leaves out or changes the final message"
        )
    # where the template trims messages, the prefill's own trailing space goes too
    is_kept = text.startswith(CONTINUE_TAG, place)
    return text[:place] if is_kept else text[:place].rstrip()


def _run(template: jinja2.Template, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    try:
        return template.render(messages=messages, **variables)
    except Exception as error:  # a template may fail in any way that Python can
        reason = str(error) or type(error).__name__
        raise RequestError("template_error", f"chat template: {reason}") from error


def _takes_parts(template: jinja2.Template, messages: list[dict[str, Any]], variables: dict[str, Any]) -> bool:
    """Whether the template walks over content given as parts, rather than printing the list or failing on it."""
    try:
        text = template.render(messages=messages, **variables)
    except Exception:
        return False
    return not any(str(m["content"]) in text for m in messages if isinstance(m.get("content"), list))


def _flattened(message: dict[str, Any], place: str) -> dict[str, Any]:
    """The message with a list of text parts joined by newlines."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise NotSupportedError(f"{place}.content[{index}] is of type {kind!r}: only text parts are supported")
    return message | {"content": "\n".join(part["text"] for part in content)}


def _plain_message(message: Any, place: str) -> dict[str, Any]:
    plain = _plain(message, place)
    if not isinstance(plain, dict):
        raise RequestError("template_error", f"{place} must be a dict with a role and content, got {message!r:.80}")
    return {key: value for key, value in plain.items() if value is not None}  # templates print None


def _tool(tool: Any, place: str) -> Any:
    """A JSON schema, or a function with type hints and a docstring."""
    if callable(tool):
        from transformers.utils.chat_template_utils import get_json_schema

        tool = get_json_schema(tool)
    if not isinstance(tool, Mapping):
        _invalid("tools", f"{place} must be a JSON schema or a function, got {tool!r:.80}")
    return _plain(tool, place)


def _plain(value: Any, place: str) -> Any:
    """A copy in JSON's types, so that a template can reach no method of ours or of the user's."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # subclasses: enums, numpy's float64
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), place) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic, as OpenAI's client returns
        return _plain(value.model_dump(), place)
    raise RequestError("template_error", f"{place} holds a {type(value).__name__}, which a chat template cannot take")


def _invalid(field: str, message: str) -> NoReturn:
    raise RequestError("invalid_parameter", message, field=field)


class _PlainDict:
    """What templates may do with the name `dict`; the class itself is out of reach."""

    def __call__(self, *items: Any, **values: Any) -> dict[Any, Any]:
        return dict(*items, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _public(values: dict[str, Any]) -> dict[str, Any]:
    import jinja2

    for name in values:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")
    return values


def _environment() -> jinja2.Environment:
    """The globals, filters and tags that templates are written for."""
    import jinja2
    import jinja2.ext
    import jinja2.utils
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """{% generation %} marks what the assistant wrote, for training; here its body is simply rendered."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PlainNamespace(jinja2.utils.Namespace):
        """Refuses names that lead into Python's own objects."""

        def __init__(*arguments: Any, **values: Any) -> None:  # without `self`, so that a template may use that name
            namespace, *items = arguments
            jinja2.utils.Namespace.__init__(namespace, _public(dict(*items, **values)))

        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(name, _public({name: value})[name])

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """jinja's own escapes HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = _PlainDict()
    return environment
