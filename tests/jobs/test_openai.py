"""OpenAI batch lines: what is read, what is refused where in the answer, and that a job of them is continued."""

from __future__ import annotations

import json
import logging

import pytest

from pagedllm import LLM
from pagedllm.jobs.formats import JobRefused
from tests.fake_assembly import fake_assemble


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    monkeypatch.setattr("pagedllm.llm.assemble", fake_assemble)
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
        chat("n", n=2),
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
        "unsupported", "unsupported", "unsupported", "invalid_parameter", "unsupported", "prompt_too_long",
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


def test_equal_lines_of_two_ids_draw_differently_and_again_the_same(run):
    lines = [chat(name, temperature=1, max_tokens=12) for name in "ab"]
    first = [line["response"]["body"]["choices"][0]["message"]["content"] for line in run(*lines)]
    assert first[0] != first[1]
    again = [line["response"]["body"]["choices"][0]["message"]["content"] for line in run(*reversed(lines))]
    assert again == first[::-1]
