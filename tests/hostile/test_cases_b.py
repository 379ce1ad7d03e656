"""CASES (b): what becomes of text on its way to tokens and back, through generate, chat and files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pagedllm import LLM, RequestError, SamplingParams
from pagedllm.tokenizer import Tokenizer
from tests.hostile.harness import (
    GREEDY,
    MAX_MODEL_LEN,
    assert_nothing_left,
    completion,
    errors,
    forcing,
    open_llm,
)
from tests.model.gguf_files import sentencepiece_vocabulary, write_model
from tests.tiny import BOS, CHAT_TEMPLATE, END, EOS

USER = [{"role": "user", "content": "one two"}]
CHARACTERS = ["😀", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "e\u0301", "a\u0300\u0301", "你好", "हिन्दी", "\ufffd", "x\ufffdy"]
PIECES = ["▁", "a", "b", "▁a", "▁b", "ab", "▁world", "▁Hello"]


def changed(folder: Path, target: Path, **settings: Any) -> Path:
    """A copy with other entries in tokenizer_config.json; None removes one."""
    shutil.copytree(folder, target)
    file = target / "tokenizer_config.json"
    config = {**json.loads(file.read_text()), **settings}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target


def with_bos(folder: Path, target: Path) -> Path:
    """A copy whose tokenizer puts BOS before every text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    shutil.copytree(folder, target)
    backend = Backend.from_file(str(target / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.save(str(target / "tokenizer.json"))
    return target


@pytest.fixture(scope="module")
def bos_llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with open_llm(with_bos(folder, tmp_path_factory.mktemp("bos") / "model")) as llm:
        yield llm


@pytest.fixture(scope="module")
def sentencepiece_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """0 to 2 are <unk>, <s>, </s>; 3 + byte; then PIECES from 259."""
    file = write_model(
        tmp_path_factory.mktemp("sentencepiece") / "model.gguf",
        vocabulary=sentencepiece_vocabulary(PIECES),
        llama__attention__key_length=32,
        llama__attention__value_length=32,
        llama__rope__dimension_count=32,
    )
    with open_llm(file) as llm:
        yield llm


def piece(text: str) -> int:
    return 259 + PIECES.index(text)


def saying(token_ids: list[int], **fields: Any) -> SamplingParams:
    """The model says exactly this and no more."""
    settings = {"temperature": 0, "max_tokens": len(token_ids), "ignore_eos": True, **fields}
    return SamplingParams(logits_processors=[forcing(token_ids)], **settings)


def encoded(llm: LLM, text: str) -> list[int]:
    assert llm._assembly is not None
    return llm._assembly.builder.tokenizer.encode(text, add_special_tokens=False)


# B1


def test_b1_chat_has_the_ids_of_the_template_with_one_bos_and_its_text_in_generate_is_noticed_once(
    bos_llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    output = bos_llm.chat(USER, GREEDY, use_tqdm=False)[0]
    expected = bos_llm.get_tokenizer().apply_chat_template(USER, tokenize=True, add_generation_prompt=True)
    assert output.prompt_token_ids == list(expected["input_ids"] if not isinstance(expected, list) else expected)
    assert output.prompt_token_ids.count(BOS) == 1
    assert not [r for r in caplog.records if "BOS" in r.message]
    for _ in range(3):
        again = bos_llm.generate([output.prompt] * 2, GREEDY, use_tqdm=False)[0]
    assert again.prompt_token_ids == [BOS, *output.prompt_token_ids]
    notices = [r.message for r in caplog.records if "BOS" in r.message]
    assert notices == [
        "a prompt begins with the BOS token, and the tokenizer adds one more: "
        "leave it out of the text, or pass prompt_token_ids"
    ]


def test_b1_messages_in_generate_and_in_files_have_one_bos_too(bos_llm: LLM, tmp_path: Path) -> None:
    expected = bos_llm.chat(USER, GREEDY, use_tqdm=False)[0]
    output = bos_llm.generate({"messages": USER}, GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == expected.prompt_token_ids
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": USER}) + "\n")
    bos_llm.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params={"temperature": 0, "max_tokens": 1})
    assert json.loads((tmp_path / "out.jsonl").read_text())["prompt_tokens"] == len(expected.prompt_token_ids)


# B2


@pytest.mark.parametrize("text", CHARACTERS)
def test_b2_text_is_that_of_all_ids_wherever_the_output_is_cut(llm: LLM, text: str) -> None:
    token_ids = encoded(llm, text)
    tokenizer = llm._open().builder.tokenizer
    for length in range(1, len(token_ids) + 1):
        output = completion(llm.generate("one", saying(token_ids[:length]), use_tqdm=False))
        assert output.token_ids == token_ids[:length]
        assert output.text == tokenizer.decode(token_ids[:length])
        whole = b"".join(tokenizer._table[i] for i in token_ids[:length]).decode("utf-8", "replace")
        assert output.text == whole


def test_b2_a_character_that_the_prompt_left_open_is_completed_by_the_output(llm: LLM) -> None:
    token_ids = encoded(llm, "😀!")
    assert len(token_ids) > 3
    output = completion(llm.generate([token_ids[:2]], saying(token_ids[2:]), use_tqdm=False))
    assert output.text is not None
    assert output.text.endswith("!")
    assert "\ufffd" not in output.text


def test_b2_an_emoji_is_a_stop_string_though_its_bytes_are_tokens_of_their_own(llm: LLM) -> None:
    token_ids = encoded(llm, "ab😀cd")
    output = completion(llm.generate("one", saying(token_ids, stop="😀"), use_tqdm=False))
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "😀")
    for stop in ("\ufffd", "😁"):  # a broken half is no match
        output = completion(llm.generate("one", saying(token_ids, stop=stop), use_tqdm=False))
        assert (output.text, output.finish_reason) == ("ab😀cd", "length")


# B4


@pytest.mark.parametrize(
    ("prompt", "said", "text"),
    [
        ("Hello", ["▁world"], " world"),
        ("Hello", ["ab"], "ab"),
        ("Hello ", ["▁world"], " world"),
        ("Hello ", ["a"], "a"),
        ("a", ["▁", "▁world"], "  world"),
        ("a", ["▁a", "b"], " ab"),
    ],
)
def test_b4_prompt_and_text_read_as_their_ids_do_together(
    sentencepiece_llm: LLM, prompt: str, said: list[str], text: str
) -> None:
    token_ids = [piece(p) for p in said]
    tokenizer = sentencepiece_llm._open().builder.tokenizer
    output = sentencepiece_llm.generate(prompt, saying(token_ids), use_tqdm=False)[0]
    assert output.text == text
    assert tokenizer.decode(output.prompt_token_ids) + text == tokenizer.decode(output.prompt_token_ids + token_ids)
    from_ids = sentencepiece_llm.generate([output.prompt_token_ids], saying(token_ids), use_tqdm=False)[0]
    assert from_ids.text == text


# B6


def test_b6_an_empty_text_runs_where_there_is_a_bos_and_is_that_prompts_error_where_there_is_none(
    llm: LLM, bos_llm: LLM
) -> None:
    outputs = bos_llm.generate(["", "x"], GREEDY, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12, 12]
    assert outputs[0].prompt_token_ids == [BOS]
    outputs = llm.generate(["", "x", []], GREEDY, use_tqdm=False, on_error="return")
    assert [e and e.code for e in errors(outputs)] == ["empty_prompt", None, "empty_prompt"]
    with pytest.raises(RequestError, match=r"^prompts\[0\]: the prompt has no tokens") as caught:
        llm.generate(["", "x"], GREEDY, use_tqdm=False)
    assert caught.value.index == 0
    for nothing in (llm.generate([], GREEDY), llm.chat([], GREEDY), bos_llm.generate([], GREEDY)):
        assert nothing == []
    assert errors(llm.chat([USER, []], GREEDY, use_tqdm=False, on_error="return"))[1].code == "empty_prompt"  # type: ignore[union-attr]
    assert_nothing_left(llm)


# B7


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN])
def test_b7_one_over_long_prompt_of_100_costs_the_others_nothing(llm: LLM, length: int, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    rows = [{"prompt": "one"} for _ in range(100)]
    rows[37] = {"prompt": "Z" * length}
    assert len(encoded(llm, "Z" * length)) == length
    prompts = [row["prompt"] for row in rows]
    with pytest.raises(RequestError, match=r"^prompts\[37\]: ") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert (caught.value.code, caught.value.index) == ("prompt_too_long", 37)
    outputs = llm.generate(prompts, params, use_tqdm=False, on_error="return")
    assert [o.index for o in outputs if o.error] == [37]
    assert len({o.text for i, o in enumerate(outputs) if i != 37}) == 1
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    chats = llm.chat(conversations, params, use_tqdm=False, on_error="return")
    assert [o.index for o in chats if o.error] == [37]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = {"temperature": 0, "max_tokens": 2}
    report = llm.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params=defaults)
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (report.num_rows, report.num_failed) == (100, 1)
    assert [r["row"] for r in results if r["error"]] == [37]
    assert results[37]["error"].startswith("prompt_too_long: ")
    assert_nothing_left(llm)
    assert llm.generate("one", params, use_tqdm=False)[0].text == outputs[0].text


# B8


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "in_tokenizer", "expected"),
    [
        (EOS, None, None, [EOS]),
        ([EOS, END], None, None, [EOS, END]),
        (None, END, None, [END]),
        (None, [7, END], None, [7, END]),
        (None, None, "</s>", [EOS]),
        (7, [8, END], "</s>", [7, 8, END, EOS]),
        (None, None, None, []),
    ],
)
def test_b8_eos_ids_are_the_union_of_all_that_name_one_and_the_reason_is_the_id(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    in_config: Any,
    in_generation_config: Any,
    in_tokenizer: str | None,
    expected: list[int],
) -> None:
    copy = changed(folder, tmp_path / "model", eos_token=in_tokenizer)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": in_config}))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))
    with open_llm(copy) as llm:
        for token_id in (EOS, END, 7, 8):
            params = SamplingParams(temperature=0, max_tokens=3, logits_processors=[forcing([9, token_id, 9])])
            output = completion(llm.generate("one", params, use_tqdm=False))
            ends = token_id in expected
            assert (output.finish_reason, output.stop_reason) == (("stop", token_id) if ends else ("length", None))
            assert len(output.token_ids) == (2 if ends else 3)
    told = [r.message for r in caplog.records if "names no eos token" in r.message]
    assert len(told) == (not expected)


# B9


def test_b9_without_a_template_the_error_says_what_to_pass(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path / "model", chat_template=None)
    with open_llm(copy) as llm:
        with pytest.raises(RequestError) as caught:
            llm.chat(USER, GREEDY, use_tqdm=False)
        assert str(caught.value) == f"messages[0]: no chat template in {copy}; pass chat_template="
        assert llm.chat(USER, GREEDY, use_tqdm=False, chat_template=CHAT_TEMPLATE)[0].text
    with open_llm(copy, chat_template="{{ messages[0].content }}") as llm:
        assert llm.chat(USER, GREEDY, use_tqdm=False)[0].prompt == "one two"


def test_b9_a_jinja_file_wins_over_the_config(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path / "model")
    (copy / "chat_template.jinja").write_text("FILE {{ messages[0].content }}")
    with open_llm(copy) as llm:
        assert llm.chat(USER, GREEDY, use_tqdm=False)[0].prompt == "FILE one two"


REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def test_b9_a_template_that_refuses_is_quoted_for_its_own_conversation_only(llm: LLM) -> None:
    conversations: list[Any] = [
        USER,
        [{"role": "system", "content": "a"}, *USER],
        [*USER, *USER],
        [{"role": "nobody", "content": "a"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "not a conversation",
        [{"role": "user"}],
        [*USER, {"role": "assistant", "content": None, "tool_calls": []}],
    ]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False, chat_template=REFUSING, on_error="return")
    found = [(e.code, str(e)) if e else None for e in errors(outputs)]
    assert found[:5] == [
        None,
        ("template_error", "messages[1]: chat template: no system role"),
        ("template_error", "messages[2]: chat template: roles must alternate"),
        ("template_error", "messages[3]: chat template: roles must alternate"),
        None,
    ]
    assert outputs[4].prompt == "a\nb"
    assert found[5] is not None
    assert found[5][0] == "unsupported"
    assert "image_url" in found[5][1]
    assert found[6] is not None
    assert found[6][0] == "invalid_parameter"
    assert found[7] is not None
    assert found[7][0] == "empty_prompt"  # no content is no text, as in transformers
    assert found[8] is None
    with pytest.raises(RequestError, match=r"^messages\[1\]: .*: no system role \(6 of 9 messages are refused: 1, 2"):
        llm.chat(conversations, GREEDY, use_tqdm=False, chat_template=REFUSING)


# B10


def test_b10_a_date_in_the_template_is_todays_unless_it_is_given(llm: LLM) -> None:
    template = "{{ date_string if date_string is defined else strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
    given = llm.chat(
        USER, GREEDY, use_tqdm=False, chat_template=template, chat_template_kwargs={"date_string": "2020-02-02"}
    )
    assert given[0].prompt == "2020-02-02 one two"
    tokenizer: Tokenizer = llm._open().builder.tokenizer
    for day in (1, 2):
        today = datetime(2030, 1, day)
        text = tokenizer.apply_chat_template(USER, chat_template=template, clock=[today].pop)
        assert text == f"2030-01-0{day} one two"


# B11


def test_b11_template_kwargs_and_prefills_work_offline(llm: LLM) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[a]"
    template += "{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}{% endif %}"
    chat = {"use_tqdm": False, "chat_template": template}
    assert llm.chat(USER, GREEDY, **chat)[0].prompt == "[user]one two</s>[a]"
    off = llm.chat(USER, GREEDY, chat_template_kwargs={"enable_thinking": False}, **chat)[0]
    assert off.prompt == "[user]one two</s>[a]<off>"
    none = llm.chat(USER, GREEDY, add_generation_prompt=False, **chat)[0]
    assert none.prompt == "[user]one two</s>"
    prefilled = [*USER, {"role": "assistant", "content": "the answer is "}]
    output = llm.chat(prefilled, GREEDY, add_generation_prompt=False, continue_final_message=True, **chat)[0]
    assert output.prompt == "[user]one two</s>[assistant]the answer is "
    assert output.prompt_token_ids[-1] not in (EOS, END)
    with pytest.raises(ValueError, match="continue_final_message=True needs add_generation_prompt=False"):
        llm.chat(prefilled, GREEDY, continue_final_message=True, **chat)


# B14

FORK = """
import os, sys
from pagedllm import LLM, SamplingParams
before = os.environ.get("TOKENIZERS_PARALLELISM")
with LLM(sys.argv[1], max_model_len=64, kv_cache_memory_bytes=8 << 20, num_threads=1, dtype="float32") as llm:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([f"prompt {i}" for i in range(300)], params, use_tqdm=False)
    child = os.fork()
    if child == 0:
        try:
            llm.generate("one", params, use_tqdm=False)
        except RuntimeError as error:
            print(error)
            os._exit(7)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert len(llm.generate("one", params, use_tqdm=False)) == 1
assert os.environ.get("TOKENIZERS_PARALLELISM") == before
print(os.waitstatus_to_exitcode(status), os.getpid())
"""


def test_b14_a_fork_prints_no_warning_and_its_use_of_the_llm_raises_with_the_process_id(folder: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    said, last = done.stdout.splitlines()
    code, pid = last.split()
    assert code == "7"
    assert said.startswith(f"this LLM belongs to process {pid} and cannot be used in its fork ")
