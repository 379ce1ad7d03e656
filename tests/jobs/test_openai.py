"""OpenAI batch lines: what is read, what is refused where in the answer, and that a job of them is continued."""

from __future__ import annotations

import json
import logging
import re

import pytest

from pagedllm import LLM
from pagedllm.jobs.formats import JobRefused
from pagedllm.jobs.tools import merge_shards

pytestmark = pytest.mark.usefixtures("no_model")


@pytest.fixture(autouse=True)
def one_time(monkeypatch):
    monkeypatch.setattr("pagedllm.jobs.runner.time.time", lambda: 1700000000)


def chat(custom_id="a", url="/v1/chat/completions", method="POST", **body):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def completion(custom_id="a", **body):
    body = {"model": "m", "prompt": "hi", "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def run(tmp_path):
    def run(*lines, **options):
        (tmp_path / "in").write_bytes(
            b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        )
        with LLM("fake") as llm:
            run.report = llm.run_file(tmp_path / "in", tmp_path / "out", if_exists="overwrite", **options)
        return [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]

    return run


def test_a_chat_completion_has_the_published_form(run):
    (line,) = run(chat("req-1"))
    response = line["response"]
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert (line["custom_id"], line["error"]) == ("req-1", None)
    assert line["id"].startswith("batch_req_")
    assert list(response) == ["status_code", "request_id", "body"]
    body = response["body"]
    text = body["choices"][0]["message"]["content"]
    assert len(text) == 4
    assert body == {
        "id": "chatcmpl-" + line["id"].removeprefix("batch_req_"),
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 19, "completion_tokens": 4, "total_tokens": 23},
    }


def test_a_completion_of_a_text_and_of_ids(run):
    lines = run(completion("a"), completion("b", prompt=[0, 107, 108]))
    bodies = [line["response"]["body"] for line in lines]
    assert [body["object"] for body in bodies] == ["text_completion"] * 2
    texts = {body["choices"][0]["text"] for body in bodies}
    assert len(texts) == 1  # "hi" is 0, 107, 108


def test_refused_requests_have_status_400_and_unreadable_lines_no_response(run):
    lines = run(
        chat("ok"),
        b"{",
        chat("no method", method="GET"),
        chat("ok"),
        completion("other url"),
        chat("temprature", temprature=1),
        chat("stream", stream=True),
        chat("tools", tools=[{"type": "function"}]),
        chat("json", response_format={"type": "json_object"}),
        chat("top_p", top_p=7),
        chat("n", n=0),
        chat("long", messages=[{"role": "user", "content": "x" * 500}]),
        chat("none", messages=None),
        {**chat("body"), "body": 5},
        {**chat(), "custom_id": 7},
        chat("model", model=None),
    )
    assert [line["custom_id"] for line in lines] == [
        "ok", None, "no method", "ok", "other url", "temprature", "stream", "tools", "json", "top_p", "n", "long",
        "none", "body", None, "model",
    ]  # fmt: skip
    codes = [(line["error"] or line["response"]["body"].get("error") or {"code": ""})["code"] for line in lines]
    assert codes == [
        "", "invalid_json_line", "invalid_json_line", "duplicate_custom_id", "url_mismatch", "invalid_parameter",
        "unsupported", "unsupported", "unsupported", "invalid_parameter", "invalid_parameter", "prompt_too_long",
        "invalid_parameter", "invalid_json_line", "invalid_json_line", "invalid_parameter",
    ]  # fmt: skip
    for line, code in zip(lines, codes, strict=True):
        if code in ("invalid_json_line", "duplicate_custom_id", "url_mismatch"):
            assert line["response"] is None
        else:
            assert line["response"]["status_code"] == (400 if code else 200)
            assert line["error"] is None
    error = lines[5]["response"]["body"]["error"]
    assert error["message"] == "sampling_params has no parameter 'temprature': did you mean 'temperature'?"
    assert error["type"] == "invalid_request_error"
    assert (run.report.num_rows, run.report.num_failed) == (16, 15)


def test_neutral_values_are_taken_and_harmless_fields_told_once(run, caplog):
    neutral = {"stream": False, "tools": None, "n": 1, "response_format": {"type": "text"}, "logprobs": False}
    body = chat("b", **neutral, user="me", store=True, max_tokens=None, max_completion_tokens=3)
    with caplog.at_level(logging.WARNING, "pagedllm"):
        (line,) = run(body)
    assert line["response"]["body"]["usage"]["completion_tokens"] == 3
    assert [record.message for record in caplog.records] == [
        "the lines ask for model 'm': fake answered",
        "fields of the lines that change no answer here: user, store",
    ]


def test_two_models_are_refused(run):
    with pytest.raises(JobRefused, match="the lines ask for two models, 'm' and 'x'"):
        run(chat("a"), chat("b", model="x"))


def test_a_job_is_continued(tmp_path, run, monkeypatch):
    lines = [chat(str(i), temperature=1, messages=[{"role": "user", "content": f"{i % 7}"}]) for i in range(60)]
    run(*lines)
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").unlink()
    (tmp_path / "out.manifest.json").unlink()

    class Stopped(Exception):
        pass

    def stop(step, plan):
        if step == 20:
            raise Stopped

    with LLM("fake") as llm:
        llm._assembly.runtime.script = stop
        with pytest.raises(Stopped):
            llm.run_file(tmp_path / "in", tmp_path / "out")
    monkeypatch.setattr("pagedllm.jobs.runner.time.time", lambda: 1800000000)
    with LLM("fake") as llm:
        report = llm.run_file(tmp_path / "in", tmp_path / "out")
        assert report.num_resumed > 0
        assert (tmp_path / "out").read_bytes() == whole


BODIES = [
    chat(),
    chat(n=3, temperature=1),
    chat(logprobs=True, top_logprobs=2, n=2),
    chat(logprobs=True),
    chat(stop=["e", "t"], seed=5, temperature=1, user="me"),
    completion(n=2, temperature=1),
    completion(logprobs=1),
    completion(logprobs=0, n=2),
    completion(prompt=[0, 107, 108], max_tokens=0),
]


@pytest.mark.parametrize("line", BODIES, ids=lambda line: json.dumps(line["body"])[13:80])
def test_answers_have_the_published_schema(run, line):
    """By the types of OpenAI's own client, without fields that it does not know."""
    types = pytest.importorskip("openai.types")
    (answer,) = run(line)
    model = types.Completion if line["url"] == "/v1/completions" else types.chat.ChatCompletion
    body = answer["response"]["body"]
    parsed = model.model_validate(body, strict=True)
    assert known_fields(parsed) == body
    wanted = line["body"]
    assert [choice.index for choice in parsed.choices] == list(range(wanted.get("n", 1)))
    assert all((choice.logprobs is not None) == (wanted.get("logprobs") is not None) for choice in parsed.choices)


def known_fields(parsed):
    """What a parsed object holds in fields that its type has."""
    if isinstance(parsed, list):
        return [known_fields(item) for item in parsed]
    if not hasattr(parsed, "model_fields_set"):
        return parsed
    return {
        name: known_fields(getattr(parsed, name)) for name in parsed.model_fields_set & type(parsed).model_fields.keys()
    }


def test_logprobs_are_those_of_the_sampled_tokens_and_the_likeliest(run):
    (answer,) = run(chat(logprobs=True, top_logprobs=2, max_tokens=2))
    choice = answer["response"]["body"]["choices"][0]
    first = choice["logprobs"]["content"][0]
    assert first == {
        "token": choice["message"]["content"][0],
        "logprob": -1.0,
        "bytes": [ord(choice["message"]["content"][0])],
        "top_logprobs": [
            {"token": "a", "logprob": -2.0, "bytes": [97]},
            {"token": "b", "logprob": -3.0, "bytes": [98]},
        ],
    }
    (answer,) = run(completion(logprobs=1, max_tokens=2))
    choice = answer["response"]["body"]["choices"][0]
    assert choice["logprobs"]["tokens"] == list(choice["text"])
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert choice["logprobs"]["top_logprobs"][0] == {choice["text"][0]: -1.0, "a": -2.0}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (chat(logprobs=3), "logprobs must be a bool, got 3 (int)"),
        (chat(top_logprobs=3), "top_logprobs needs logprobs=true"),
        (chat(logprobs=True, top_logprobs=21), "logprobs must be at most max_logprobs (20), or -1, got 21"),
        (completion(top_logprobs=3), "top_logprobs is for chat: use logprobs"),
        (completion(logprobs=True), "logprobs must be None, an int >= 0, or -1 (the whole vocabulary), got True"),
    ],
)
def test_wrong_logprobs_are_refused(run, line, text):
    (answer,) = run(line)
    assert answer["response"]["body"]["error"]["message"] == text


def test_a_finished_batch_whose_input_changed_is_continued_and_old_answers_stay_as_they_were(
    tmp_path, run, monkeypatch
):
    lines = [chat(str(i), temperature=1, n=1 + i % 2, logprobs=i == 3) for i in range(8)] + [b"{", chat("x", top_p=7)]
    before = run(*lines)
    monkeypatch.setattr("pagedllm.jobs.runner.time.time", lambda: 1800000000)
    changed = [*lines[:2], chat("new"), *lines[3:], chat("last", n=2)]
    (tmp_path / "in").write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in changed))
    with LLM("fake") as llm:
        report = llm.run_file(tmp_path / "in", tmp_path / "out")
    after = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert (report.num_rows, report.num_resumed, report.num_failed) == (11, 9, 2)
    assert [after[i] for i in (0, 1, *range(3, 10))] == [before[i] for i in (0, 1, *range(3, 10))]
    assert [after[2]["custom_id"], after[10]["custom_id"]] == ["new", "last"]
    assert {a["response"]["body"]["created"] for a in (after[2], after[10])} == {1700000000}  # the job's start


def test_shards_of_a_batch_are_merged_into_the_whole(tmp_path, run):
    run(*(chat(str(i)) for i in range(8)))
    with LLM("fake") as llm:
        for i in (1, 2, 3):
            llm.run_file(tmp_path / "in", tmp_path / f"s{i}", shard=(i, 3))
    assert merge_shards([str(tmp_path / f"s{i}") for i in (2, 3, 1)], str(tmp_path / "merged")) == 8
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "out").read_bytes()
    (tmp_path / "merged").unlink()
    with pytest.raises(ValueError, match="row 1 is missing"):
        merge_shards([str(tmp_path / "s1"), str(tmp_path / "s3")], str(tmp_path / "merged"))
    (tmp_path / "s2.manifest.json").unlink()
    with pytest.raises(ValueError, match="s2: no finished OpenAI batch has its manifest beside it"):
        merge_shards([str(tmp_path / f"s{i}") for i in (1, 2, 3)], str(tmp_path / "merged"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"template": "{x}"}, "template='{x}' is for plain rows: the input is OpenAI batch lines"),
        ({"keep": "none"}, "keep='none' is for plain rows"),
        ({"sampling_params": {"n": 2}}, "n stands in the body of each OpenAI batch line"),
    ],
)
def test_what_is_for_plain_rows_is_refused(run, options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        run(chat(), **options)


def test_a_custom_id_with_half_a_surrogate_pair_is_answered(run):
    lines = run(chat("\ud800"), b'{"custom_id": "\\udfff", "method": "GET", "url": "", "body": {}}')
    assert [line["custom_id"] for line in lines] == ["\ud800", "\udfff"]


def test_equal_lines_of_two_ids_draw_differently_and_again_the_same(run):
    lines = [chat(name, temperature=1, max_tokens=12) for name in "ab"]
    first = [line["response"]["body"]["choices"][0]["message"]["content"] for line in run(*lines)]
    assert first[0] != first[1]
    again = [line["response"]["body"]["choices"][0]["message"]["content"] for line in run(*reversed(lines))]
    assert again == first[::-1]
