"""A job over the real engine and a runner without a model: rows, order, seeds, failures, memory."""

from __future__ import annotations

import itertools
import json

import pytest

from pagedllm import LLM, SamplingParams
from pagedllm.errors import ModelError
from pagedllm.jobs import rows as job_rows
from pagedllm.jobs import stream
from pagedllm.jobs.formats import read_lines
from pagedllm.jobs.opening import open_job
from pagedllm.jobs.runner import TooManyFailures
from pagedllm.jobs.source import Line
from tests.fake_assembly import VOCAB_SIZE, fake_assemble

pytestmark = pytest.mark.usefixtures("no_model")

COLUMNS = ["output", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "error", "row"]
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture
def run(tmp_path):
    """Runs rows (dicts, or lines as bytes) and returns the results."""

    def run(rows, llm=None, **options):
        input, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        input.write_bytes(b"\n".join(lines))
        with llm or LLM("fake") as llm:
            run.report = llm.run_file(input, output, if_exists="overwrite", **options)
        return [json.loads(line) for line in output.read_text().splitlines()]

    return run


def test_a_row_keeps_its_fields_and_gets_the_columns(run):
    (row,) = run([{"id": 7, "prompt": "ab", "z": [1.5, None]}], sampling_params=GREEDY)
    assert list(row) == ["id", "prompt", "z", *COLUMNS]
    assert (row["id"], row["prompt"], row["z"]) == (7, "ab", [1.5, None])
    with LLM("fake") as llm:
        assert row["output"] == llm.generate("ab", SamplingParams(**GREEDY))[0].text
    assert [row[name] for name in COLUMNS[1:]] == ["length", "", 3, 4, "", 0]


def test_every_line_is_answered_in_order_and_bad_ones_have_their_reason(run):
    rows = run(
        [
            {"prompt": "a"},
            b"{",
            {"prompt": "x" * 200},
            {"messages": [{"role": "user", "content": "hi"}]},
            {"messages": [{"role": "tool", "content": "hi"}]},
            {"prompt": "a", "sampling_params": {"temprature": 1}},
            {"prompt": "a", "sampling_params": {"top_p": 7}},
            {"prompt": "a", "sampling_params": {"n": 2}},
            {"prompt": "a", "sampling_params": {"logprobs": 2}},
            {"prompt": "a", "sampling_params": {"stop_token_ids": [VOCAB_SIZE]}},
            {"prompt": "b"},
        ],
        sampling_params=GREEDY,
    )
    assert [row["row"] for row in rows] == list(range(11))
    assert [row["error"] for row in rows] == [
        "",
        "invalid_json_line: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "prompt_too_long: 201 tokens exceed max_model_len 128 by 73",
        "",
        "template_error: the chat template refuses: no tools here",
        "invalid_parameter: sampling_params has no parameter 'temprature': did you mean 'temperature'?",
        "invalid_parameter: top_p must be in (0, 1], got 7",
        "invalid_parameter: n=2 in a row, 1 in the job: all rows of a file have the same columns, pass --n 2",
        "invalid_parameter: logprobs=2 in a row, None in the job: all rows of a file have the same columns, pass "
        "--logprobs 2",
        "invalid_parameter: stop_token_ids must be ids in [0, 259), got 259",
        "",
    ]
    assert {type(row["output"]) for row in rows if not row["error"]} == {str}
    failed = rows[2]
    assert [failed[name] for name in COLUMNS[:5]] == [None, "error", "", 201, 0]
    assert list(rows[1]) == COLUMNS
    assert (run.report.num_rows, run.report.num_failed, run.report.num_cut) == (11, 8, 3)


def test_with_n_four_columns_are_lists_of_n_in_every_row(run):
    rows = [{"prompt": "ab"}, {"prompt": "x" * 200}, {"prompt": "ab", "sampling_params": {"n": 2}}, {"prompt": "cd"}]
    found = run(rows, sampling_params={"n": 3, "max_tokens": 4})
    assert [list(row) for row in found[:1]] == [["prompt", *COLUMNS]]
    assert [len(set(row["output"])) for row in (found[0], found[3])] == [3, 3]
    assert found[0]["finish_reason"] == ["length"] * 3
    failed = [found[1][name] for name in COLUMNS[:5]]
    assert failed == [[None] * 3, ["error"] * 3, [""] * 3, 201, [0] * 3]
    assert found[2]["error"].startswith("invalid_parameter: n=2 in a row, 3 in the job")
    assert found[3]["completion_tokens"] == [4] * 3
    assert run.report.num_completion_tokens == 24
    assert run(rows, sampling_params={"n": 3, "max_tokens": 4}) == found


def test_a_row_that_fails_while_running_costs_no_other(run):
    llm = LLM("fake")
    llm._assembly.runtime.forced = lambda tokens, data: -1 if tokens[1] == ord("b") + 3 else None
    rows = run([{"prompt": p} for p in "abc"], llm, sampling_params=GREEDY)
    assert [row["error"][:17] for row in rows] == ["", "non_finite_logits", ""]


def test_a_stop_by_token_id_writes_its_digits(run):
    llm = LLM("fake")
    llm._assembly.runtime.forced = lambda tokens, data: 1 if len(tokens) == 4 else None
    (row,) = run([{"prompt": "a"}], llm, sampling_params=GREEDY)
    assert (row["finish_reason"], row["stop_reason"], row["completion_tokens"]) == ("stop", "1", 3)


def test_row_parameters_come_before_the_given_ones_and_those_before_the_models(run, monkeypatch):
    config = {"temperature": 0.0, "max_new_tokens": 3}
    monkeypatch.setattr("pagedllm.llm.assemble", lambda c: fake_assemble(c, generation_config=config))
    counts = [
        row["completion_tokens"]
        for row in run([{"prompt": "a"}, {"prompt": "a", "sampling_params": {"max_tokens": 9}}])
    ]
    assert counts == [3, 9]
    assert run([{"prompt": "a"}], sampling_params={"max_tokens": 5})[0]["completion_tokens"] == 5


def test_sampled_rows_depend_on_their_content_and_the_jobs_seed_only(run):
    rows = [{"id": i, "prompt": p, "sampling_params": {"max_tokens": 8}} for i, p in enumerate("abac")]
    first = [row["output"] for row in run(rows)]
    assert len(set(first)) == 4  # equal rows differ
    moved = run([{"prompt": "new"}, *rows[1:], rows[0]])
    assert [row["output"] for row in moved[1:3]] == [first[1], first[0]]  # the first "a" draws as the first "a" did
    assert [row["output"] for row in run(rows, LLM("fake", max_num_seqs=1, block_size=8))] == first
    assert [row["output"] for row in run(rows, LLM("fake", seed=1))] != first


def test_a_seed_of_its_own_repeats_a_row(run):
    rows = [{"prompt": "a", "sampling_params": {"seed": 3}} for _ in range(2)]
    assert len({row["output"] for row in run(rows)}) == 1


def uneven_rows(num_rows):
    return [
        {"prompt": f"{i}", "sampling_params": {"temperature": 0, "max_tokens": 1 + i * 7 % 40}} for i in range(num_rows)
    ]


def test_many_rows_of_uneven_length_stand_in_order(run):
    found = run(uneven_rows(300), LLM("fake", max_num_seqs=4))
    assert [row["prompt"] for row in found] == [str(i) for i in range(300)]
    assert [row["completion_tokens"] for row in found] == [1 + i * 7 % 40 for i in range(300)]


@pytest.fixture
def written(monkeypatch):
    """Lines that a stream got, with /dev/null as the output."""
    lines = []
    monkeypatch.setattr("pagedllm.jobs.files.StreamFile.write", lambda self, line: lines.append(json.loads(line)))
    return lines


@pytest.mark.parametrize("held_bytes", [0, 64 << 20])
def test_a_stream_gets_rows_in_order_through_a_small_window(tmp_path, monkeypatch, written, held_bytes):
    monkeypatch.setattr(stream, "MAX_HELD_BYTES", held_bytes)
    (tmp_path / "in").write_text("\n".join(map(json.dumps, uneven_rows(300))))
    with LLM("fake", max_num_seqs=4) as llm:
        llm.run_file(tmp_path / "in", "/dev/null")
    assert [row["prompt"] for row in written] == [str(i) for i in range(300)]
    assert [row["completion_tokens"] for row in written] == [1 + i * 7 % 40 for i in range(300)]


def test_a_stream_may_get_rows_as_they_are_completed(tmp_path, written):
    (tmp_path / "in").write_text("\n".join(map(json.dumps, uneven_rows(50))))
    with LLM("fake", max_num_seqs=4) as llm:
        llm.run_file(tmp_path / "in", "/dev/null", order="completion")
    indices = [row["row"] for row in written]
    assert sorted(indices) == list(range(50)) != indices


def test_a_stream_is_read_as_there_is_room(tmp_path, written):
    num_read = 0

    class Endless:
        def readline(self, limit):
            nonlocal num_read
            num_read += 1
            return json.dumps({"prompt": str(num_read)}).encode() + b"\n"

    class Stop(Exception):
        pass

    def look(report):
        assert num_read <= 1 + report.num_rows + 8 * stream.SEQS_AHEAD + job_rows.CHUNK_ROWS
        if report.num_rows >= 500:
            raise Stop

    (tmp_path / "in").write_text("{}")
    with LLM("fake") as llm, open_job(tmp_path / "in", "/dev/null", sampling_params=GREEDY) as job:
        job._lines = itertools.starmap(Line, ((i, 0, text) for i, (_, text) in enumerate(read_lines(Endless()))))
        with pytest.raises(Stop):
            llm.run_job(job, look)
        assert not llm._assembly.engine.has_unfinished_requests()
    assert [row["row"] for row in written] == list(range(job.report.num_rows))


def test_an_interrupt_leaves_whole_rows_and_a_clean_engine(tmp_path, run):
    input = tmp_path / "rows"
    input.write_text("\n".join(json.dumps({"prompt": str(i)}) for i in range(50)))

    def interrupt(report):
        if report.num_rows >= 20:
            raise KeyboardInterrupt

    with LLM("fake") as llm:
        with (
            pytest.raises(KeyboardInterrupt) as caught,
            open_job(input, tmp_path / "out", sampling_params=GREEDY) as job,
        ):
            llm.run_job(job, interrupt)
        assert str(caught.value) == f"{job.num_written} results are in {tmp_path}/out.partial: the same call continues"
        lines = (tmp_path / "out.partial").read_text().splitlines()
        assert len({json.loads(line)["row"] for line in lines}) == job.num_written
        assert 20 <= job.num_written < 50
        assert llm._assembly.engine.scheduler.kv_cache.pool.num_free == 512


def test_the_job_stops_when_its_first_100_rows_all_fail(tmp_path, run):
    with pytest.raises(TooManyFailures) as caught:
        run([b"{"] * 250)
    assert str(caught.value).startswith("the first 100 rows all failed; row 0: invalid_json_line: not JSON")
    assert len(run([b"{"] * 99 + [{"prompt": "a"}] + [b"{"] * 150, sampling_params=GREEDY)) == 250


def test_an_empty_input_gives_an_empty_output(run):
    assert run([]) == []
    assert run.report.num_rows == 0


def test_a_clash_of_names_in_the_first_row_is_refused_before_a_model_is_needed(tmp_path):
    (tmp_path / "in").write_text('{"prompt": "a", "error": "x"}')
    text = "the field 'error' has the name of a result column: rename it"
    with pytest.raises(ValueError, match=text), open_job(tmp_path / "in", tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"top_p": 7}, ValueError),
        ({"logprobs": -2}, ValueError),
        ({"logits_processors": [print]}, ValueError),
        ({"prompt_logprobs": 2}, ValueError),
    ],
)
def test_given_parameters_are_checked_before_a_model_is_needed(tmp_path, params, error):
    (tmp_path / "in").write_text("{}")
    with pytest.raises(error), open_job(tmp_path / "in", tmp_path / "out", sampling_params=params):
        pass


def test_the_report_counts_what_the_job_did(run):
    rows = [{"prompt": "x" * 39 + c} for c in "abcd"]
    run(rows, LLM("fake", max_num_seqs=1), sampling_params=GREEDY)
    report = run.report
    assert (report.num_prompt_tokens, report.num_completion_tokens, report.num_cut) == (164, 16, 4)
    assert report.num_cached_tokens == 3 * 32
    assert (report.peak_num_blocks, report.num_blocks, report.block_size) == (3, 512, 16)
    assert report.num_preemptions == 0


def test_a_generation_config_that_cannot_be_used_stops_the_job_before_any_row(run, monkeypatch):
    monkeypatch.setattr("pagedllm.llm.assemble", lambda c: fake_assemble(c, generation_config={"top_p": 3}))
    with pytest.raises(ModelError, match=r"generation_config.json: top_p must be in \(0, 1\], got 3"):
        run([{"prompt": "a"}])
