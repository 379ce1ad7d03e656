"""Chat templates: what transformers renders, in a sandbox, with errors that quote the template."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedllm.chat_template import ChatTemplates, read_templates
from pagedllm.errors import NotSupportedError, RequestError
from pagedllm.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]"
    "{% endfor %}{% endif %}{% endfor %}"
)
USER = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: Any = USER, **options: Any) -> str:
    templates = ChatTemplates({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"}, "MODEL")
    return apply(templates, messages, **options)


def apply(templates: ChatTemplates, messages: Any = USER, **options: Any) -> str:
    settings: dict[str, Any] = {"chat_template": None, "add_generation_prompt": False, "continue_final_message": False,
                                "tools": None, "clock": lambda: datetime(2026, 3, 1)}  # fmt: skip
    kwargs = {name: value for name, value in options.items() if name not in settings}
    settings |= {name: value for name, value in options.items() if name in settings}
    return templates.render(messages, **settings, kwargs=kwargs)


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " spaces "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "ü😀\n"}],
]
TEMPLATES = {
    "chatml": CHATML,
    "bos and trim": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "loopcontrols": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "blocks": "{% for m in messages %}\n    {% if true %}\n    {{ m.role }}\n    {% endif %}\n{% endfor %}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tools": "{{ tools is none }}{% if tools %}{{ tools | tojson }}{% endif %}{{ documents is none }}",
    "undefined": "[{{ missing }}]{{ messages[0].missing is defined }}",
    "self in namespace": "{% set ns = namespace({'a': 1}, self=2) %}{{ ns.self }}{% set ns.a = 3 %}{{ ns.a }}",
    "dict": "{% set d = dict(a=1) %}{{ d.a }}{{ dict.fromkeys([1, 2], 3) }}{{ range(3) | list }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_template_renders_as_in_transformers(template: str, messages: list[dict[str, Any]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] if "tools" in template else None
    for prompt in (True, False):
        (expected,), _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        assert render(template, messages, tools=tools, add_generation_prompt=prompt) == expected


def test_the_demo_models_own_template_gives_transformers_ids(demo_safetensors: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(demo_safetensors), Tokenizer.from_folder(demo_safetensors)
    for messages in CONVERSATIONS:
        text = ours.apply_chat_template(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("content", "end"), [("The answer is", "The answer is"), ("The answer is ", "The answer is "), ("a\n", "a\n")]
)
def test_a_prefill_ends_the_text_as_it_stands(content: str, end: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    assert render(CHATML, messages, continue_final_message=True).endswith(f"<|im_start|>assistant\n{end}")


def test_a_prefill_loses_the_space_that_the_template_trims() -> None:
    template = "{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": "So "}]
    assert render(template, messages, continue_final_message=True) == "Hi</s>So"


def test_a_prefill_that_the_template_drops_is_an_error() -> None:
    with pytest.raises(RequestError, match="leaves out or changes the final message") as caught:
        render("{{ messages[0].content }}", [*USER, {"role": "assistant", "content": "x"}], continue_final_message=True)
    assert caught.value.code == "template_error"


@pytest.mark.parametrize("content", [None, [{"type": "image"}]])
def test_a_prefill_without_text_is_an_error(content: Any) -> None:
    with pytest.raises((RequestError, NotSupportedError)):
        render(CHATML, [*USER, {"role": "assistant", "content": content}], continue_final_message=True)


def test_contradictory_flags_are_refused() -> None:
    with pytest.raises(RequestError, match="needs add_generation_prompt=False") as caught:
        render(CHATML, continue_final_message=True, add_generation_prompt=True)
    assert (caught.value.code, caught.value.field) == ("invalid_parameter", "continue_final_message")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "chat template: System role not supported"),
        ("{{ messages[0]['content'] + 1 }}", "chat template: can only concatenate str"),
        ("{{ messages[5].content }}", "chat template: list object has no element 5"),
        ("a\n{% if %}", "chat template, line 2: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "chat template: access to attribute 'append' of 'list' object is unsafe"),
        (
            "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
            "chat template: a namespace cannot hold the name '__class__'",
        ),
        ("{% set ns = namespace(_x=1) %}", "chat template: a namespace cannot hold the name '_x'"),
        ("{{ dict.mro() }}", "chat template: 'pagedllm.chat_template._PlainDict object' has no attribute 'mro'"),
        ("{% for i in range(10000000) %}{% endfor %}", "chat template: Range too big"),
    ],
)
def test_a_failing_template_is_quoted(template: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(template)
    assert caught.value.code == "template_error"
    assert str(caught.value).startswith(message)
    assert caught.value.index is None


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (["Hi"], r"messages\[0\] must be a dict with a role and content, got 'Hi'"),
        ([{"role": "user", "content": np.zeros(2)}], r"messages\[0\]\.content holds a ndarray"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]\.content holds a bytes"),
    ],
)
def test_messages_that_are_no_plain_data_are_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(CHATML, messages)


def test_an_empty_conversation_is_an_error() -> None:
    with pytest.raises(RequestError, match="no messages") as caught:
        render(CHATML, [])
    assert caught.value.code == "empty_prompt"


def test_text_parts_are_given_to_a_template_that_walks_over_them() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(PARTS, messages) == "[a][b]"


@pytest.mark.parametrize("template", [CHATML, "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"])
def test_text_parts_are_joined_for_a_template_that_wants_a_string(template: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(template, messages).endswith("a\nb<|im_end|>\n")


def test_an_image_part_is_refused_by_name() -> None:
    messages = [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    with pytest.raises(NotSupportedError, match=r"messages\[1\]\.content\[0\] is of type 'image_url'"):
        render(PARTS, messages)


def test_none_is_left_out_and_the_callers_messages_stay() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]
    before = json.dumps(messages)
    assert render("{{ messages[0].content is defined }}{{ messages[0].tool_calls[0].id }}", messages) == "False1"
    render(CHATML, final := [{"role": "user", "content": "x"}], continue_final_message=True)
    assert json.dumps(messages) == before
    assert final == [{"role": "user", "content": "x"}]


def test_dataclasses_and_models_are_messages_too() -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: str

    class Model:
        def model_dump(self) -> dict[str, str]:
            return {"role": "user", "content": "two"}

    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", [Message("user", "one"), Model()]) == "onetwo"


def test_template_kwargs_reach_the_template_and_win_over_special_tokens() -> None:
    template = "{{ enable_thinking }}{{ bos_token }}{{ date_string | default('none') }}"
    assert render(template, enable_thinking=False, bos_token="<B>", date_string="1 May") == "False<B>1 May"


def test_the_date_comes_from_the_given_clock() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "01 Mar 2026"


def test_a_function_becomes_a_tools_schema() -> None:
    def weather(city: str) -> str:
        """Get the weather.

        Args:
            city: The city.
        """
        return city

    schema = json.loads(render("{{ tools[0] | tojson }}", tools=[weather]))
    assert schema["function"]["name"] == "weather"
    with pytest.raises(RequestError, match=r"tools\[1\] must be a JSON schema or a function, got 5"):
        render("x", tools=[{}, 5])


def test_named_templates_are_chosen_by_name_and_by_tools() -> None:
    config = {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"},
                                {"name": "rag", "template": "R"}]}  # fmt: skip
    templates = ChatTemplates(read_templates({}, config, "MODEL"), {}, "MODEL")
    assert [apply(templates), apply(templates, tools=[]), apply(templates, chat_template="rag")] == ["D", "T", "R"]


def test_without_a_default_the_names_are_listed() -> None:
    templates = ChatTemplates({"rag": "R", "code": "C"}, {}, "MODEL")
    with pytest.raises(RequestError, match="MODEL has several chat templates: pass chat_template= one of code, rag"):
        apply(templates)


def test_no_template_says_what_to_pass() -> None:
    with pytest.raises(RequestError, match=r"^no chat template in MODEL; pass chat_template=$"):
        apply(ChatTemplates({}, {}, "MODEL"))


def test_a_template_may_be_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("F{{ messages[0].content }}")
    assert render("unused", chat_template="T{{ messages[0].content }}") == "THi"
    assert render("unused", chat_template=str(file)) == "FHi"
    with pytest.raises(RequestError, match=r"neither a template nor a readable file: 'nowhere\.jinja'"):
        render("unused", chat_template="nowhere.jinja")


def test_a_template_file_wins_over_the_config() -> None:
    config = {"chat_template": "config"}
    assert read_templates({}, config, "M") == {"default": "config"}
    files = {"chat_template.jinja": "jinja", "additional_chat_templates/rag.jinja": "rag"}
    assert read_templates(files, config, "M") == {"default": "jinja", "rag": "rag"}
