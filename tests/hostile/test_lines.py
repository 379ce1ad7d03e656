"""CASES G4, G5: files of hostile lines. Every line is answered, none is fatal, and the answers load as rows."""

from __future__ import annotations

import contextlib
import json
import random

import pytest

from pagedllm import LLM
from pagedllm.jobs.source import Source
from tests.fake_assembly import fake_assemble

NASTY = [
    b"{",
    b"[]",
    b"1",
    b'"x"',
    b"null",
    b"{}",
    b"\x00\x00",
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "a", "x": NaN}',
    b'{"prompt": "a", "x": 1e999}',
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ""}',
    b'{"prompt": "' + b"y" * 5000 + b'"}',
    b'{"prompt": "a", "sampling_params": {"max_tokens": 1e400}}',
    b'{"prompt": "a", "sampling_params": {"max_tokens": -5}}',
    b'{"prompt": "a", "sampling_params": {"stop": [""]}}',
    b'{"prompt": "a", "sampling_params": {"seed": 1e30}}',
    b'{"prompt": "a", "sampling_params": {"seed": 123456789012345678901234567890}}',
    b'{"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}',
    b'{"prompt": "a", "sampling_params": {"temperature": true}}',
    b'{"prompt": "a", "sampling_params": {"logits_processors": [1]}}',
    b'{"messages": "hi"}',
    b'{"messages": []}',
    b'{"messages": [{"role": 7}]}',
    b'{"messages": [null]}',
    b'{"messages": [{"role": "user", "content": null}]}',
    b'{"prompt": "\xe2\x80\xa8", "error": 1}',
    '{"prompt": "\u2028\x85"}'.encode(),
]
VALID = [b'{"prompt": "ab", "n": 1}', b'{"messages": [{"role": "user", "content": "hi"}], "id": 1.10}']
BATCH = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    b'"body": {"model": "m", "prompt": "hi", "max_tokens": 1}}'
)


def hostile_lines(num_lines: int, seed: int, first: bytes) -> list[bytes]:
    """Whole ones, and whole ones with bytes changed, cut out or put in."""
    rng, lines = random.Random(seed), [first]
    while len(lines) < num_lines:
        line = bytearray(rng.choice([*NASTY, *VALID, *VALID, BATCH]))
        for _ in range(rng.choice((0, 0, 1, 3))):
            position = rng.randrange(len(line) + 1)
            line[position : position + rng.randrange(2)] = bytes(rng.randrange(256) for _ in range(rng.randrange(3)))
        lines.append(bytes(line).replace(b"\n", b" ").replace(b"\r", b" ").strip() or b"{}")
    return lines


@pytest.mark.parametrize("first", [VALID[0], BATCH], ids=["plain", "openai"])
@pytest.mark.parametrize(
    ("num_lines", "seed"), [(600, 0), pytest.param(10_000, 1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_every_hostile_line_is_answered(tmp_path, monkeypatch, first, num_lines, seed):
    monkeypatch.setattr("pagedllm.llm.assemble", fake_assemble)
    lines = hostile_lines(num_lines, seed, first)
    if first is BATCH:  # a line that asks for another model stops the job, as it should
        lines = [line for line in lines if line is first or b'"model"' not in line or b'"m"' in line]
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    with LLM("fake") as llm:
        report = llm.run_file(tmp_path / "in", tmp_path / "out", sampling_params={"max_tokens": 2}, max_failed=1.0)
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert len(answers) == len(lines) == report.num_rows
    assert 0 < report.num_failed < report.num_rows or first is BATCH
    if first is BATCH:
        assert {tuple(answer) for answer in answers} == {("id", "custom_id", "response", "error")}
    else:
        assert [answer["row"] for answer in answers] == list(range(len(lines)))
        assert {type(answer["error"]) for answer in answers} == {str}
        assert all((answer["output"] is None) == bool(answer["error"]) for answer in answers)


CELLS = [
    b"a",
    b'"a, b"',
    b'"two\nlines"',
    b'"say ""hi"""',
    b'5" pipe',
    b"\xff\xfe",
    b"\x00",
    b"",
    b'"',
    b'"never closed',
    b"=1+1",
]
OBJECTS = [b"", b'"{""max_tokens"": 1}"', b"{}", b"{", b'"[1]"', b'"{""top_p"": 7}"', b'"{""x"": NaN}"']


@pytest.mark.parametrize("output", ["out.csv", "out.jsonl"])
@pytest.mark.parametrize(("num_records", "seed"), [(400, 0), pytest.param(10_000, 1, marks=pytest.mark.slow)])
def test_every_hostile_record_is_answered(tmp_path, monkeypatch, output, num_records, seed):
    monkeypatch.setattr("pagedllm.llm.assemble", fake_assemble)
    rng = random.Random(seed)
    lines = [b"id,prompt,sampling_params"]
    for _ in range(num_records):
        line = b",".join(
            [rng.choice(CELLS), rng.choice(CELLS), rng.choice(OBJECTS), *[b"more"] * (rng.random() < 0.05)]
        )
        lines.append(line if rng.random() < 0.8 else line[: rng.randrange(len(line) + 1)])
    (tmp_path / "in.csv").write_bytes(rng.choice([b"\n", b"\r\n"]).join(lines))
    with LLM("fake") as llm:
        params = {"max_tokens": 2}
        report = llm.run_file(tmp_path / "in.csv", tmp_path / output, sampling_params=params, max_failed=1.0)
        again = llm.run_file(tmp_path / "in.csv", tmp_path / output, sampling_params=params, max_failed=1.0)
    with contextlib.closing(Source(str(tmp_path / output))) as source:
        answers = [json.loads(line.text) for line in source.lines()]
    assert [int(answer["row"]) for answer in answers] == list(range(report.num_rows))
    assert sum(bool(answer["error"]) for answer in answers) == report.num_failed == again.num_failed
    assert 0 < report.num_failed < report.num_rows == again.num_rows
    assert again.num_resumed == report.num_rows
