"""CASES (g), JSONL batch jobs: what others lose, overwrite, mix up or die of. Over the engine without a model."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedllm import LLM, cli
from pagedllm.jobs.keys import MAX_RECENT
from tests.fake_assembly import slow_program

pytestmark = pytest.mark.usefixtures("no_model")

ROOT = Path(__file__).resolve().parents[2]
PARAMS = {"max_tokens": 4, "temperature": 0}
SLOW = slow_program(0.005)


@pytest.fixture(autouse=True)
def one_time(monkeypatch):
    monkeypatch.setattr("pagedllm.jobs.runner.time.time", lambda: 1700000000)


class Stopped(Exception):
    pass


class Folder:
    """A folder with an input; `run` gives the results."""

    def __init__(self, path):
        self.path, self.input, self.output = path, path / "in.jsonl", path / "out.jsonl"

    def write(self, *lines):
        self.input.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))

    def run(self, *, output=None, stop_after=None, llm=None, **options):
        def script(step, plan):
            if step == stop_after:
                raise Stopped

        output = output or self.output
        with LLM("fake", **(llm or {})) as engine:
            engine._assembly.runtime.script = script
            self.report = engine.run_file(self.input, output, **{"sampling_params": PARAMS, **options})
        return [json.loads(line) for line in output.read_text().splitlines()]

    def command(self, *arguments):
        return [sys.executable, "-c", SLOW, "run", "-m", "fake", "-i", str(self.input), "-q", *map(str, arguments)]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def chat(custom_id, content="hi", **body):
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


# G1, G2: nothing is lost, nothing is overwritten


def test_g1_finished_rows_are_on_disk_at_once_in_whole_lines(folder):
    folder.write(*({"prompt": f"{i}"} for i in range(200)))
    process = subprocess.Popen(folder.command("-o", folder.output, "--max-tokens", 3), cwd=ROOT)
    partial = folder.path / "out.jsonl.partial"
    deadline = time.monotonic() + 60
    while not partial.exists() or partial.read_bytes().count(b"\n") < 100:
        assert time.monotonic() < deadline, "no rows came"
        time.sleep(0.005)
    process.kill()
    process.wait(30)
    text = partial.read_bytes()
    assert text.endswith(b"\n")
    rows = [json.loads(line) for line in text.splitlines()]
    assert 100 <= len({row["row"] for row in rows}) == len(rows) < 200


@pytest.mark.parametrize("kind", ["same", "symlink", "hard link", "dotted", "case of partial"])
def test_g1_an_output_that_is_the_input_is_refused_before_anything_is_truncated(folder, kind):
    folder.write({"prompt": "a"})
    before = folder.input.read_bytes()
    output = folder.path / "link.jsonl"
    if kind == "symlink":
        output.symlink_to(folder.input)
    elif kind == "hard link":
        os.link(folder.input, output)
    elif kind == "case of partial":  # the output's journal would be the input
        folder.input = folder.input.rename(folder.path / "link.jsonl.partial")
    else:
        output = folder.input if kind == "same" else folder.path / "." / "x" / ".." / "in.jsonl"
        (folder.path / "x").mkdir()
    for if_exists in ("resume", "overwrite"):
        with pytest.raises(ValueError, match="are the same file"):
            folder.run(output=output, if_exists=if_exists)
    assert folder.input.read_bytes() == before


def test_g2_a_second_run_continues_our_file_and_refuses_a_foreign_one(folder):
    folder.write(*({"prompt": f"{i}"} for i in range(60)))
    with pytest.raises(Stopped):
        folder.run(stop_after=20)
    before = (folder.path / "out.jsonl.partial").read_bytes()
    folder.run()
    assert folder.report.num_resumed == before.count(b"\n") > 10
    foreign = folder.path / "foreign.jsonl"
    foreign.write_text("results of last week\n")
    with pytest.raises(FileExistsError, match="not of a job that can be continued"):
        folder.run(output=foreign)
    assert foreign.read_text() == "results of last week\n"


# G3: a resumed run of an edited input is that of the edited input


@pytest.mark.parametrize("kind", ["plain", "openai"])
@pytest.mark.parametrize("seed", range(4))
def test_g3_rows_are_matched_by_content_after_any_edit(folder, kind, seed):
    def row(i):
        params = {"temperature": i % 2, "max_tokens": 4 + i % 5}
        return (
            chat(f"id{i}", f"p{i}", **params)
            if kind == "openai"
            else {"prompt": f"p{i % 30}", "sampling_params": params}
        )

    rng = random.Random(seed)
    rows = [row(i) for i in range(40)]
    folder.write(*rows)
    with pytest.raises(Stopped):
        folder.run(stop_after=rng.randrange(5, 25))
    edited = [json.loads(json.dumps(row)) for row in rng.sample(rows, 34)]
    for place in rng.sample(range(34), 3):
        where = edited[place]["body"] if kind == "openai" else edited[place]["sampling_params"]
        where["max_tokens"] = 3
    edited[5:5] = [row(100), row(101)]
    folder.write(*edited)
    assert folder.run() == folder.run(output=folder.path / "whole")
    assert folder.output.read_bytes() == (folder.path / "whole").read_bytes()


@pytest.mark.parametrize(
    "change", [{"llm": {"seed": 2}}, {"sampling_params": {**PARAMS, "temperature": 1}}, {"system": "x"}]
)
def test_g3_another_job_does_not_mix_with_the_results_there(folder, change):
    folder.write(*({"prompt": f"{i}"} for i in range(60)))
    with pytest.raises(Stopped):
        folder.run(stop_after=20)
    before = (folder.path / "out.jsonl.partial").read_bytes()
    with pytest.raises(ValueError, match=r"the job there was run with another (seed|temperature|chat): .* -> "):
        folder.run(**change)
    assert (folder.path / "out.jsonl.partial").read_bytes() == before


def test_g3_failed_rows_are_retried_on_request(folder):
    folder.write({"prompt": "ok"}, {"prompt": "no"})
    with LLM("fake") as llm:
        llm._assembly.runtime.forced = lambda tokens, data: -1 if tokens[1] == ord("n") + 3 else None
        llm.run_file(folder.input, folder.output, sampling_params=PARAMS)
    assert folder.run()[1]["error"].startswith("non_finite_logits")
    assert folder.run(retry="failed")[1]["error"] == ""


# G4, G5, G10, G12: bad lines and bad requests


BAD = [
    b"{",
    b"[]",
    b"1",
    b'"x"',
    b"null",
    b"{}",
    b"\x00\x00\x00",
    b'{"prompt": "\x00"}',
    b'{"prompt": "\xc3\x28"}',
    b'{"prompt": "a", "x": NaN}',
    b'{"prompt": "a", "x": 1e999}',
    b'{"prompt": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "a", "prompt": "b"}',
    b'{"messages": "hi"}',
    b'{"messages": [1]}',
    b'{"prompt": 5}',
    b'{"prompt": "a", "messages": []}',
    b'{"prompt": "a", "sampling_params": 5}',
    b'{"prompt": "a", "sampling_params": {"max_tokens": "5"}}',
]


def test_g4_a_bad_line_is_a_row_of_the_same_columns_with_its_reason_and_the_job_goes_on(folder, capsys):
    folder.write(b'{"prompt": "first"}', *BAD, b'{"prompt": "last"}')
    code = cli.main(["run", "-m", "fake", "-i", str(folder.input), "-o", str(folder.output), "-q", "--max-tokens", "2"])
    rows = [json.loads(line) for line in folder.output.read_text().splitlines()]
    assert (code, len(rows)) == (3, len(BAD) + 2)
    assert [bool(row["error"]) for row in rows] == [False, *[True] * len(BAD), False]
    names = ["output", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "error", "row"]
    assert all(list(row)[-7:] == names and row["row"] == i for i, row in enumerate(rows))
    assert all(len(row["error"]) < 300 for row in rows)
    assert "19 of 21 rows failed; row 1: invalid_json_line" in capsys.readouterr().err


BAD_ENVELOPES = [
    ({"method": "POST", "url": "/v1/completions", "body": {}}, None, "custom_id must be a string that is not empty"),
    ({**chat("a"), "body": [1]}, "a", "body must be an object"),
    ({**chat("b"), "url": "/v1/embeddings"}, "b", "url must be /v1/chat/completions or /v1/completions"),
    ({key: value for key, value in chat("c").items() if key != "url"}, "c", "url must be"),
    ({**chat("d"), "method": "GET"}, "d", "method must be 'POST'"),
    (b'{"custom_id": "e", "body": {', None, "not JSON"),
]


def test_g4_a_line_that_is_no_request_has_an_error_its_custom_id_if_readable_and_no_response(folder):
    folder.write(chat("first"), *(line for line, _, _ in BAD_ENVELOPES), chat("last"))
    found = folder.run()
    assert [line["custom_id"] for line in found] == ["first", *(name for _, name, _ in BAD_ENVELOPES), "last"]
    for line, (_, _, text) in zip(found[1:-1], BAD_ENVELOPES, strict=True):
        assert line["response"] is None
        assert line["error"]["code"] == "invalid_json_line"
        assert line["error"]["message"].startswith(text)
    assert found[-1]["response"]["status_code"] == 200


def test_g5_a_custom_id_seen_before_is_an_error_near_and_far(folder, monkeypatch):
    monkeypatch.setattr("pagedllm.jobs.keys.MAX_RECENT", 8)
    assert MAX_RECENT > 8
    names = ["a", "b", "a", *(f"id{i}" for i in range(30)), "b", "a", "id3"]
    folder.write(*(chat(name, f"text {i}") for i, name in enumerate(names)))
    found = folder.run()
    assert [line["custom_id"] for line in found] == names
    failed = [i for i, line in enumerate(found) if line["error"] is not None]
    assert failed == [2, 33, 34, 35]
    assert {found[i]["error"]["code"] for i in failed} == {"duplicate_custom_id"}
    assert folder.run() == found


def test_g5_odd_custom_ids_are_kept_as_they_are_and_no_string_is_an_error(folder):
    odd = ["x" * 5000, "two\nlines\u2028", "7", " ", "\x00", "é😀", '"']
    wrong = [7, 7.0, None, "", True, ["a"]]
    folder.write(*map(chat, odd), *map(chat, wrong))
    found = folder.run()
    assert [line["custom_id"] for line in found] == [*odd, *(name if name == "" else None for name in wrong)]
    assert [line["error"] is None for line in found] == [True] * len(odd) + [False] * len(wrong)
    assert folder.output.read_text().count("\n") == len(found) == len(folder.output.read_text().splitlines())


PARAMETERS = [
    ({"max_completion_tokens": 3, "max_tokens": None}, None),  # the alias is mapped
    ({"temprature": 1}, "invalid_parameter"),
    ({"stream": True}, "unsupported"),
    ({"tools": [{"type": "function"}]}, "unsupported"),
    ({"response_format": {"type": "json_object"}}, "unsupported"),
    ({"reasoning_effort": "low"}, "unsupported"),
    ({"n": 2}, None),
    ({"seed": 7}, None),
    ({"user": "me", "store": False}, None),  # harmless
    ({"stream": False, "tools": [], "response_format": {"type": "text"}}, None),  # neutral
    ({"max_tokens": -1}, "invalid_parameter"),
]


def test_g10_no_parameter_is_ignored_that_would_change_the_answer(folder, caplog):
    folder.write(*(chat(str(i), **body) for i, (body, _) in enumerate(PARAMETERS)))
    found = folder.run()
    codes = [line["response"]["body"].get("error", {"code": None})["code"] for line in found]
    assert codes == [code for _, code in PARAMETERS]
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert len(found[6]["response"]["body"]["choices"]) == 2
    told = [record.message for record in caplog.records if "change no answer" in record.message]
    assert told == ["fields of the lines that change no answer here: user, store"]
    assert any("ask for model 'm': fake answered" in record.message for record in caplog.records)


def test_g12_a_line_has_a_response_or_an_error_never_both(folder):
    folder.write(chat("ok"), chat("bad", top_p=7), b"{", chat("ok"))
    for line in folder.run():
        assert list(line) == ["id", "custom_id", "response", "error"]
        assert (line["response"] is None) != (line["error"] is None)
        if line["response"] is not None:
            is_error = "error" in line["response"]["body"]
            assert line["response"]["status_code"] == (400 if is_error else 200)


# G9: torn ends, full disks, places that cannot be written


@pytest.mark.parametrize(
    "tail", [b'{"id": "ab', b"\x00" * 4096, b'{"id": "00112233445566778899aabbccddeeff", "row": 1, "ou']
)
def test_g9_a_torn_last_line_is_cut_off_before_anything_follows(folder, tail):
    folder.write(*({"prompt": f"{i}"} for i in range(60)))
    with pytest.raises(Stopped):
        folder.run(stop_after=20)
    with open(folder.path / "out.jsonl.partial", "ab") as stream:
        stream.write(tail)
    folder.run()
    first = folder.output.read_bytes()
    folder.run(output=folder.path / "whole")
    assert first == (folder.path / "whole").read_bytes()


def test_g9_a_full_disk_ends_the_job_with_whole_lines_and_the_same_command_continues(folder):
    folder.write(*({"prompt": f"{i}"} for i in range(300)))
    command = folder.command("-o", folder.output, "--max-tokens", 3)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    done = subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("pagedllm run -m fake")
    text = (folder.path / "out.jsonl.partial").read_bytes()
    assert text.endswith(b"\n")
    assert 10 < len([json.loads(line) for line in text.splitlines()]) < 300
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert [json.loads(line)["row"] for line in folder.output.read_text().splitlines()] == list(range(300))


def test_g9_a_full_device_ends_with_exit_code_1(folder, capsys):
    folder.write({"prompt": "a"})
    assert cli.main(["run", "-m", "fake", "-i", str(folder.input), "-o", "/dev/full", "--max-tokens", "2"]) == 1
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["missing", "folder", "unwritable", "file as folder"])
def test_g9_an_output_that_cannot_be_written_is_refused_before_the_model_loads(folder, monkeypatch, capsys, what):
    monkeypatch.setattr("pagedllm.llm.assemble", None)
    folder.write({"prompt": "a"})
    output = folder.path / "sub" / "out.jsonl"
    if what == "folder":
        output = folder.path
    elif what == "unwritable":
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: False if mode & os.W_OK else access(path, mode))
        output = folder.output
    elif what == "file as folder":
        output.parent.write_text("")
    assert cli.main(["run", "-m", "fake", "-i", str(folder.input), "-o", str(output)]) == 2
    assert "folder" in capsys.readouterr().err


# G11, G14, G15: order, progress, size


@pytest.mark.parametrize("kind", ["plain", "openai"])
def test_g11_results_stand_in_input_order_each_with_its_own_rows_answer(folder, kind):
    lengths = [1 + 17 * i % 40 for i in range(200)]
    if kind == "openai":
        folder.write(*(chat(f"id{i}", f"{i}", max_tokens=n) for i, n in enumerate(lengths)))
    else:
        folder.write(
            *({"id": f"id{i}", "prompt": f"{i}", "sampling_params": {"max_tokens": n}} for i, n in enumerate(lengths))
        )
    found = folder.run()
    if kind == "openai":
        assert [line["custom_id"] for line in found] == [f"id{i}" for i in range(200)]
        assert [line["response"]["body"]["usage"]["completion_tokens"] for line in found] == lengths
    else:
        assert [row["id"] for row in found] == [f"id{i}" for i in range(200)]
        assert [row["completion_tokens"] for row in found] == lengths


def test_g14_without_a_terminal_lines_tell_done_total_rates_and_failures_now_and_then(folder, monkeypatch, capsys):
    monkeypatch.setattr("pagedllm.jobs.progress.LINE_SECONDS", 0.02)
    folder.write(*({"prompt": f"{i}"} for i in range(2000)), b"{")
    assert cli.main(["run", "-m", "fake", "-i", str(folder.input), "-o", str(folder.output), "--max-tokens", "2"]) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 2,001 rows" in line]
    assert len(lines) > 2
    assert all("tokens/s" in line and "1 failed" in line for line in lines)


def test_g15_a_line_of_50_mb_is_an_error_row_and_takes_no_such_memory(folder):
    with open(folder.input, "wb") as stream:
        stream.write(b'{"prompt": "a"}\n{"prompt": "')
        for _ in range(50):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"prompt": "b"}\n')
    script = SLOW.replace(
        "sys.exit(main())", "main(); import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = folder.command("-o", folder.output, "--max-tokens", 2)
    command[2] = script
    small = folder.path / "small.jsonl"
    small.write_text('{"prompt": "a"}\n')
    peaks = []
    for input in (small, folder.input):
        command[command.index("-i") + 1] = str(input)
        command[command.index("-o") + 1] = str(folder.path / f"out-{input.name}")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    rows = [json.loads(line) for line in (folder.path / "out-in.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == ["", "invalid_json_line: the line has more than 16,777,216 bytes", ""]
    assert peaks[1] - peaks[0] < 45  # MiB: three pieces of 16
