"""The command line: flags, streams, exit codes, interrupts. Over the engine without a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from random import Random

import pytest

from pagedllm import SamplingParams, __version__, cli, flags
from pagedllm.config import EngineConfig
from pagedllm.doctor import Finding
from pagedllm.errors import LibraryError, ModelError
from tests.fake_assembly import slow_program

pytestmark = pytest.mark.usefixtures("no_model")

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ["output", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "error", "row"]
SLOW = slow_program(0.01)


@pytest.fixture
def files(tmp_path):
    input = tmp_path / "in.jsonl"
    input.write_text('{"prompt": "a", "id": 1}\n{"prompt": "b"}\n')
    return input, tmp_path / "out.jsonl"


COMMANDS = (
    ["run"],
    ["status"],
    ["merge"],
    ["export"],
    ["bench"],
    ["bench", "throughput"],
    ["doctor"],
    ["cache"],
    ["cache", "list"],
    ["cache", "clear"],
    ["demo"],
)


def run(*arguments) -> int:
    """The exit code, also where argparse ends."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def run_files(files, *arguments) -> int:
    return run("run", "-m", "fake", "-i", files[0], "-o", files[1], *arguments)


def test_run_writes_results_and_a_summary_on_stderr(files, capsys):
    assert run_files(files, "--max-tokens", 3, "--temperature", 0) == 0
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert [list(row) for row in rows] == [["prompt", "id", *COLUMNS], ["prompt", *COLUMNS]]
    assert [row["completion_tokens"] for row in rows] == [3, 3]
    out, err = capsys.readouterr()
    assert out == ""
    told, *lines = err.splitlines()
    assert told == "pagedllm: rows without sampling_params: sampling by max_tokens=3, temperature=0.0 (given)"
    num_plan_lines = lines.index('first prompt "a"') + 1
    plan, summary = lines[:num_plan_lines], lines[num_plan_lines:]
    assert "rows         2: 0 done before, 0 refused, 0 equal to another, 2 to run" in plan
    assert "time         not measured for so few tokens" in plan
    assert summary[0] == "rows         2: 0 failed, 2 cut by a length"
    assert [line.partition("  ")[0] for line in summary] == [
        "rows",
        "time",
        "tokens",
        "prefix hits",
        "KV cache",
        "preemptions",
        "deterministic yes: the same rows give the same tokens",
        "limited by",
    ]
    assert "peak 2 of 512 blocks of 16 tokens" in err


def test_quiet_says_nothing(files, capsys):
    assert run_files(files, "-q", "--max-tokens", 3) == 0
    assert capsys.readouterr() == ("", "")


def test_results_go_to_stdout_and_nothing_else_does(files, capfd):
    assert run("run", "-m", "fake", "-i", files[0], "-o", "-", "--max-tokens", 3) == 0
    out, err = capfd.readouterr()
    assert [json.loads(line)["row"] for line in out.splitlines()] == [0, 1]
    assert "rows         2" in err


def test_failed_rows_give_exit_code_3(files, capsys):
    files[0].write_text('{"prompt": "a"}\n{\n')
    assert run_files(files, "--max-tokens", 3) == 3
    assert len(files[1].read_text().splitlines()) == 2
    assert "2: 1 failed" in capsys.readouterr().err
    assert run_files(files, "--max-tokens", 3, "-q", "--if-exists", "overwrite") == 3
    assert "1 of 2 rows failed; row 1: invalid_json_line" in capsys.readouterr().err


def test_a_job_whose_first_rows_all_fail_stops_with_exit_code_3(files, capsys):
    files[0].write_text("{\n" * 200)
    assert run_files(files) == 3
    assert "the first 100 rows all failed; row 0: invalid_json_line" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--top-p", "7"], "top_p must be in (0, 1], got 7.0"),
        (["--block-size", "24"], "block_size must be a power of two from 8 to 128, got 24"),
        (["--max-tokens", "x"], "argument --max-tokens: invalid int or none value: 'x'"),
        (["--stop-token-ids", "1,x"], "argument --stop-token-ids: invalid list of ints value: '1,x'"),
        (["--logit-bias", "[1]"], "argument --logit-bias: invalid JSON object value: '[1]'"),
        (["--logprobs", "21"], "logprobs must be at most max_logprobs (20), or -1, got 21"),
        (["--template", "{x} {id}"], "the template's {x} is no column: the columns are prompt, id"),
        (["--template", "x", "--template-file", "y"], "not allowed with argument --template"),
        (["--template-file", "missing"], "pagedllm: error: missing: No such file or directory"),
        (["--keep", "id,nothing"], "keep: 'nothing' is no column: the columns are prompt, id"),
        (["--output-column", "row"], "output_column='row': 'row' is the name of another result column"),
        (["--output-column", "id"], "the field 'id' has the name of a result column"),
        (["--if-exists", "append"], "argument --if-exists: invalid choice: 'append'"),
        (["--retry", "failed", "--if-exists", "fail"], "retry='failed' continues a job"),
        (["--limit", "0"], "limit must be None or an int >= 1, got 0"),
        (["--shard", "3/2"], "shard must be (i, n) with 1 <= i <= n, got (3, 2)"),
        (["--shard", "3"], "argument --shard: invalid I/N value: '3'"),
        (["--max-failed", "200%"], "max_failed must be None, an int >= 0 or a share"),
        (["--max-failed", "x"], "argument --max-failed: invalid N or P% value: 'x'"),
        (["-o", "x.parquet.gz"], "'x.parquet.gz': Parquet is compressed inside: leave .gz out"),
        (["--quux"], "unrecognized arguments: --quux\n"),
        (["--temprature", "1"], "unrecognized arguments: --temprature: did you mean 'temperature'?\n"),
        (["--temperatur", "1"], "unrecognized arguments: --temperatur: did you mean 'temperature'?\n"),
        (["--max-new-tokens=5"], "unrecognized arguments: --max-new-tokens: use max-tokens\n"),
        (["more.jsonl"], "unrecognized arguments: more.jsonl\n"),
        (["-o", ""], "output must name a file, got ''"),
    ],
)
def test_wrong_arguments_are_refused_with_exit_code_2(files, capsys, arguments, text):
    assert run_files(files, *arguments) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert (out, list(files[0].parent.iterdir())) == ("", [files[0]])


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("in.jsonl", b"\x1f\x8b\x08rest", "in.jsonl' is gzip: name it .gz"),
        ("in.jsonl", '{"prompt": "a"}'.encode("utf-16"), "in.jsonl' is UTF-16: convert it to UTF-8"),
        ("in.csv", b"PK\x03\x04rest", "in.csv' is a zip archive or a spreadsheet: export JSON lines or CSV"),
        ("in", b"PAR1rest", "in' is Parquet: name it .parquet"),
        ("in.csv", b"question;id\nwhy?;1\n", "no column is named prompt or messages, and there is no template"),
        ("in.csv", b"question;id\nwhy?;1\n", "to make prompts: the columns are question;id"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_before_the_model_loads(
    files, capsys, monkeypatch, name, content, text
):
    monkeypatch.setattr("pagedllm.llm.assemble", None)
    path = files[0].with_name(name)
    path.write_bytes(content)
    assert run("run", "-m", "fake", "-i", path, "-o", files[1]) == 2
    assert text in capsys.readouterr().err
    assert not files[1].exists()


def test_a_row_without_a_prompt_tells_what_it_has_and_an_array_that_it_is_none(files, capsys):
    files[0].write_text('[\n{"question": "why?"}\n]\n')
    assert run_files(files, "-q") == 3
    first, second, _ = (json.loads(line)["error"] for line in files[1].read_text().splitlines())
    assert first.endswith("; no array over several lines is read, each line is an object")
    assert second.endswith("neither 'prompt' nor 'messages', but 'question': --template makes prompts of columns")


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt, 130), (cli.Terminated, 143)])
def test_an_interrupt_before_the_job_begins_is_one_line(files, capsys, monkeypatch, interrupt, code):
    def open_job(*args, **options):
        raise interrupt

    monkeypatch.setattr("pagedllm.jobs.opening.open_job", open_job)
    assert run_files(files) == code
    assert capsys.readouterr().err == "pagedllm: error: interrupted\n"


def test_files_are_checked_before_the_model_loads(files, capsys, monkeypatch):
    monkeypatch.setattr("pagedllm.llm.assemble", None)
    input, output = files
    output.write_text("old")
    (input.parent / "link").symlink_to(input)
    assert run_files(files) == 2
    assert "not of a job that can be continued" in capsys.readouterr().err
    assert run_files((input, input.parent / "link"), "--if-exists", "overwrite") == 2
    assert "are the same file" in capsys.readouterr().err
    assert run_files((input, input.parent / "missing" / "out")) == 2
    assert "the output's folder does not exist" in capsys.readouterr().err
    assert run_files((input.parent / "missing", input.parent / "out")) == 2
    assert "No such file" in capsys.readouterr().err
    assert output.read_text() == "old"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("x/config.json is missing"), 2),
        (ValueError("max_model_len=9 does not fit"), 2),
        (LibraryError("the kernels x do not exist; build them"), 1),
    ],
)
def test_a_model_that_does_not_load_is_one_line_and_leaves_no_file(files, capsys, monkeypatch, error, code):
    def fail(config):
        raise error

    monkeypatch.setattr("pagedllm.llm.assemble", fail)
    assert run_files(files) == code
    assert capsys.readouterr().err == f"pagedllm: error: {error}\n"
    assert list(files[0].parent.iterdir()) == [files[0]]


def test_a_full_disk_ends_with_exit_code_1_and_says_how_to_start_again(files, capsys):
    assert run("run", "-m", "fake", "-i", files[0], "-o", "/dev/full") == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-3:] == [
        "pagedllm: error: No space left on device",
        "pagedllm: nothing is kept of this run; this starts it again:",
        f"pagedllm run -m fake -i {files[0]} -o /dev/full",
    ]


def test_every_llm_field_has_the_flag_of_its_name_and_its_default():
    args = cli.make_parser([]).parse_args(["run", "-m", "x", "-i", "a", "-o", "b"])
    assert flags.llm_arguments(args) == {
        field.name: "x" if field.name == "model" else field.default for field in fields(EngineConfig)
    }
    assert flags.sampling_arguments(args) == {}


def test_every_sampling_field_has_the_flag_of_its_name():
    values = {
        "n": "1",
        "temperature": "0.5",
        "top_p": "0.5",
        "top_k": "3",
        "min_p": "0.1",
        "presence_penalty": "0.1",
        "frequency_penalty": "0.2",
        "repetition_penalty": "1.1",
        "max_tokens": "none",
        "min_tokens": "2",
        "stop": "x",
        "stop_token_ids": "1,2",
        "include_stop_str_in_output": None,
        "ignore_eos": None,
        "detokenize": None,
        "skip_special_tokens": None,
        "spaces_between_special_tokens": None,
        "logprobs": "3",
        "prompt_logprobs": "3",
        "logit_bias": '{"5": 1}',
        "bad_words": "x",
        "allowed_token_ids": "1",
        "structured_outputs": '{"choice": ["a"]}',
    }
    assert {*values, *flags.NO_SAMPLING_FLAG} == {field.name for field in fields(SamplingParams)}
    arguments = ["run", "-m", "x", "-i", "a", "-o", "b"]
    for name, value in values.items():
        arguments += ["--" + name.replace("_", "-")] + ([] if value is None else [value])
    given = flags.sampling_arguments(cli.make_parser([]).parse_args(arguments))
    assert set(given) == set(values)
    assert (given["max_tokens"], given["stop"], given["stop_token_ids"]) == (None, ["x"], [1, 2])
    assert (given["logit_bias"], given["ignore_eos"], given["temperature"]) == ({"5": 1}, True, 0.5)


def test_flags_may_have_underscores_and_switches_a_no(files):
    assert flags.with_dashes(["--max_tokens=3_0", "-i", "a_b", "--", "--x_y"]) == [
        "--max-tokens=3_0",
        "-i",
        "a_b",
        "--",
        "--x_y",
    ]
    args = cli.make_parser([]).parse_args(["run", "-m", "x", "-i", "a", "-o", "b", "--no-enable-prefix-caching"])
    assert args.enable_prefix_caching is False


def test_help_of_every_command_is_printed(capsys):
    for command in ([], *COMMANDS):
        assert run(*command, "--help") == 0
        assert capsys.readouterr().out.startswith("usage: pagedllm")


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"pagedllm {__version__}\n"


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--top-p", "x"], ["run", "--help"], ["nonsense"]])
def test_version_help_and_wrong_arguments_import_no_torch(arguments):
    script = (
        "import sys\nfrom pagedllm.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_refused_job_imports_no_torch(tmp_path):
    script = "import sys\nfrom pagedllm.cli import main\nprint(main(sys.argv[1:]), 'torch' in sys.modules)"
    arguments = ["run", "-m", "x", "-i", str(tmp_path / "missing"), "-o", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


def test_doctor_prints_findings_and_fails_if_one_does(capsys, monkeypatch):
    findings = [Finding("ok", "torch", "2.13"), Finding("warn", "gguf", "missing", "pip install gguf")]
    monkeypatch.setattr("pagedllm.doctor.examine", lambda model: iter(findings))
    assert run("doctor") == 0
    assert capsys.readouterr().out == "ok    torch         2.13\nwarn  gguf          missing -> pip install gguf\n"
    findings.append(Finding("fail", "kernels", "missing", "build them"))
    assert run("doctor") == 1


def start_slow(tmp_path, *arguments, **options) -> subprocess.Popen:
    """A run of 300 rows at 10 ms a step, 8 at a time."""
    input = tmp_path / "in.jsonl"
    input.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(300)))
    command = [sys.executable, "-c", SLOW, "run", "-m", "fake", "-i", str(input), "--max-tokens", "3", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


def wait_for_rows(path: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no rows came"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_whole_rows_and_says_how_to_continue(tmp_path, number, code):
    process = start_slow(tmp_path, "-o", str(tmp_path / "out.jsonl"))
    partial = tmp_path / "out.jsonl.partial"
    wait_for_rows(partial, 10)
    process.send_signal(number)
    err = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode == code
    rows = [json.loads(line) for line in partial.read_text().splitlines()]
    assert 10 <= len({row["row"] for row in rows}) == len(rows) < 300
    assert err[-2] == f"pagedllm: {len(rows)} results are in {partial}; this continues:"
    assert err[-1].startswith("pagedllm run -m fake -i")
    assert not any("Traceback" in line for line in err)


def run_to_the_end(tmp_path, name: str) -> bytes:
    process = start_slow(tmp_path, "-o", str(tmp_path / name), "-q")
    assert process.communicate(timeout=200)[1] == ""
    assert process.returncode == 0
    return (tmp_path / name).read_bytes()


def kill_again_and_again(tmp_path, num_kills: int, random: Random) -> None:
    """The same command killed at random moments and then let run: the file is that of an uninterrupted run."""
    expected = run_to_the_end(tmp_path, "whole.jsonl")
    num_in_work = 0
    for number in range(num_kills):
        output = tmp_path / f"out{number}.jsonl"
        partial = tmp_path / f"out{number}.jsonl.partial"
        for _ in range(1 + number % 2):
            process = start_slow(tmp_path, "-o", str(output), "-q")
            wait_for_rows(partial, random.randrange(1, 250))
            time.sleep(random.random() * 0.02)
            process.kill()
            process.communicate(timeout=30)
        num_in_work += partial.exists()
        assert run_to_the_end(tmp_path, output.name) == expected
        assert not partial.exists()
    assert num_in_work > 0


def test_killed_at_any_moment_and_run_again_it_is_as_if_nothing_had_happened(tmp_path):
    kill_again_and_again(tmp_path, 2, Random(0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_a_hundred_moments(tmp_path):
    kill_again_and_again(tmp_path, 67, Random(1))  # two thirds of them once, a third twice


def test_a_finished_job_is_not_run_again(files, capsys, monkeypatch):
    assert run_files(files, "--max-tokens", 3) == 0
    capsys.readouterr()
    monkeypatch.setattr("pagedllm.llm.assemble", None)
    assert run_files(files, "--max-tokens", 3) == 0
    assert capsys.readouterr().err == f"pagedllm: nothing to do: {files[1]} has all 2 rows\n"


def test_another_job_at_the_same_place_is_refused(files, capsys):
    assert run_files(files, "--max-tokens", 3) == 0
    assert run_files(files, "--max-tokens", 4, "-q") == 2
    assert "the job there was run with another max_tokens: 3 -> 4; it may grow with --retry cut" in (
        capsys.readouterr().err
    )
    assert run_files(files, "--max-tokens", 4, "-q", "--retry", "cut") == 0
    assert run_files(files, "--max-tokens", 3, "-q", "--if-exists=overwrite") == 0


def test_the_command_that_continues_is_the_same_without_overwrite():
    arguments = ["run", "-m", "x", "--if_exists", "overwrite", "--if-exists=fail", "-o", "y"]
    assert cli.continuing(arguments) == ["run", "-m", "x", "-o", "y"]


def test_failures_within_the_limit_are_no_error(files, capsys):
    files[0].write_text('{"prompt": "a"}\n{\n{"prompt": "b"}\n')
    assert run_files(files, "--max-tokens", 3, "-q", "--max-failed", "1") == 0
    assert run_files(files, "--max-tokens", 3, "-q", "--max-failed", "50%") == 0
    assert run_files(files, "--max-tokens", 3, "-q", "--max-failed", "30%") == 3
    assert run_files(files, "--max-tokens", 3, "-q", "--max-failed", "0", "--if-exists", "overwrite") == 3
    assert "1 rows failed, more than allowed; row 1: invalid_json_line" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly(tmp_path):
    process = start_slow(tmp_path, "-o", "-", "-q", stdout=subprocess.PIPE)
    assert json.loads(process.stdout.readline())["row"] == 0
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 1


def test_rows_come_from_stdin(tmp_path):
    command = [sys.executable, "-c", SLOW, "run", "-m", "fake", "-i", "-", "-o", "-", "-q", "--max-tokens", "2"]
    done = subprocess.run(command, cwd=ROOT, input=b'{"prompt": "a"}\n', capture_output=True, check=True)
    assert json.loads(done.stdout)["completion_tokens"] == 2


def test_python_m_pagedllm_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "pagedllm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pagedllm {__version__}\n"


def test_environment_is_left_alone(files):
    before = dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run_files(files, "-q", "--max-tokens", 1)
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_dev_stdout_is_written_as_it_is():
    command = [
        sys.executable,
        "-c",
        SLOW,
        "run",
        "-m",
        "fake",
        "-i",
        "-",
        "-o",
        "/dev/stdout",
        "-q",
        "--max-tokens",
        "2",
    ]
    done = subprocess.run(command, cwd=ROOT, input=b'{"prompt": "a"}\n', capture_output=True, check=True)
    assert json.loads(done.stdout)["row"] == 0
