"""Tables in and out: original types kept, fixed types for the results, and what result files load into."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import json

import pytest

from pagedllm import LLM, NotSupportedError
from pagedllm.jobs import parquet
from pagedllm.jobs.csv_records import TableError, read_records, record

pytestmark = pytest.mark.usefixtures("no_model")

GREEDY = {"temperature": 0, "max_tokens": 3}
COLUMNS = ["output", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "error", "row"]


@pytest.fixture
def run(tmp_path):
    def run(input, output, **options):
        with LLM("fake") as llm:
            run.report = llm.run_file(tmp_path / input, tmp_path / output, **{"sampling_params": GREEDY, **options})
        return tmp_path / output

    return run


def read_parquet(path):
    return pytest.importorskip("pyarrow.parquet").read_table(path)


def write_parquet(table, path):
    pytest.importorskip("pyarrow.parquet").write_table(table, path)


# Records


def test_records_are_read_as_they_stand():
    text = (
        b'\xef\xbb\xbfid,prompt,n\r\n1,"a ""q"" b\nsecond, line",x\r\n\n2,5" pipe,y\n3,z\n4,"tail"x,w\n'
        b'5,"",007\n6,\xff,w\n7,"never closed,1'
    )
    rows = list(read_records(io.BytesIO(text), ","))
    assert [json.loads(row) if row else fault for row, fault in rows] == [
        {"id": "1", "prompt": 'a "q" b\nsecond, line', "n": "x"},
        {"id": "2", "prompt": '5" pipe', "n": "y"},
        "the record has 2 fields, the header 3",
        {"id": "4", "prompt": "tailx", "n": "w"},
        {"id": "5", "prompt": "", "n": "007"},
        "not UTF-8 at byte 2",
        "a quoted field is not closed",
    ]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_records_are_written_so_that_they_are_read_again(delimiter):
    fields = ["plain", 'quo"te', "a,b\tc", "two\nlines", "\r", "", " space ", "é"]
    text = record([f"h{i}" for i in range(8)], delimiter) + record(fields, delimiter)
    ((row, fault),) = read_records(io.BytesIO(text.encode()), delimiter)
    assert (list(json.loads(row).values()), fault) == (fields, "")
    assert record([None, ""], ",") == ',""\n'


def test_a_record_may_be_longer_than_the_csv_modules_limit_but_not_than_a_line_may_be(monkeypatch):
    monkeypatch.setattr("pagedllm.jobs.csv_records.MAX_LINE_BYTES", 300_000)
    text = b'a\n"' + b"x\n" * 100_000 + b'"\n"' + b"x\n" * 200_000 + b'"\nend\n'
    rows = list(read_records(io.BytesIO(text), ","))
    assert [len(row or b"") for row, _ in rows] == [300_000 + len('{"a": ""}'), 0, len('{"a": "end"}')]
    assert rows[1][1] == "the record has more than 300,000 bytes"


@pytest.mark.parametrize(
    ("text", "error"),
    [(b"a,a\n1,2\n", "the header names 'a' twice"), (b"\xff\n1\n", "the header: not UTF-8 at byte 0")],
)
def test_a_header_that_cannot_be_used_is_refused(tmp_path, run, text, error):
    (tmp_path / "in.csv").write_bytes(text)
    with pytest.raises(TableError, match=error):
        run("in.csv", "out.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv"]


# In and out


def test_csv_keeps_every_value_as_text_and_bad_records_are_answered(tmp_path, run):
    (tmp_path / "in.csv").write_text(
        'id,prompt,sampling_params,messages\n007,abc,,\n2,"x, y","{""max_tokens"": 2}",\n'
        '3,,,"[{""role"": ""user"", ""content"": ""hi""}]"\n4,a\n5,a,{,\n'
    )
    lines = run("in.csv", "out.csv").read_text().splitlines()
    assert lines[0] == "id,prompt,sampling_params,messages," + ",".join(COLUMNS)
    assert lines[1].startswith('007,abc,"","",')
    assert [line.split(",")[-1] for line in lines] == ["row", "0", "1", "2", "3", "4"]
    rows = [json.loads(line) for line in run("in.csv", "out.jsonl").read_text().splitlines()]
    assert [row["completion_tokens"] for row in rows] == [3, 2, 3, 0, 0]
    assert rows[3]["error"] == "invalid_json_line: the record has 2 fields, the header 4"
    assert rows[4]["error"].startswith("invalid_parameter: sampling_params: not JSON: Expecting property name")
    assert (rows[0]["id"], rows[1]["sampling_params"], rows[2]["prompt_tokens"]) == ("007", '{"max_tokens": 2}', 19)


def original(pyarrow):
    return pyarrow.table(
        {
            "prompt": ["a", "b", "c", None],
            "time": pyarrow.array([datetime.datetime(2020, 1, 1)] * 4, pyarrow.timestamp("ns", "UTC")),
            "price": pyarrow.array([decimal.Decimal("1.10")] * 4, pyarrow.decimal128(9, 2)),
            "blob": [b"\x00\xff"] * 4,
            "number": pyarrow.array([1.5, None, 2.0, 3.0], pyarrow.float32()),
            "kind": pyarrow.array(["x", "y", "x", "y"]).dictionary_encode(),
            "nested": [{"k": [1, 2]}] * 4,
        }
    )


@pytest.mark.parametrize("order", ["input", "completion"])
def test_parquet_keeps_the_original_types_and_adds_columns_of_fixed_types(tmp_path, run, monkeypatch, order):
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(parquet, "BATCH_ROWS", 2)
    table = original(pyarrow)
    write_parquet(table.slice(0, 3), tmp_path / "in1.parquet")
    write_parquet(table.slice(3), tmp_path / "in2.parquet")
    found = read_parquet(run("in*.parquet", "out.parquet", order=order))
    assert found.schema.names == [*table.schema.names, *COLUMNS]
    assert found.select(table.schema.names).schema.equals(table.schema)
    assert found.sort_by("row").select(table.schema.names).equals(table.combine_chunks())
    types = [str(found.schema.field(name).type) for name in COLUMNS]
    assert types == ["string", "string", "string", "int64", "int64", "string", "int64"]
    errors = found.sort_by("row").column("error").to_pylist()
    assert [bool(error) for error in errors] == [False, False, False, True]


def test_parquet_becomes_json_with_dates_as_text_and_bytes_in_base64(tmp_path, run):
    pyarrow = pytest.importorskip("pyarrow")
    table = original(pyarrow).append_column("nan", pyarrow.array([float("nan"), 1.0, 2.0, 3.0]))
    write_parquet(table, tmp_path / "in.parquet")
    row = json.loads(run("in.parquet", "out.jsonl", keep=["time", "price", "blob", "nan"]).read_text().splitlines()[0])
    assert list(row.values())[:4] == ["2020-01-01T00:00:00+00:00", "1.10", "AP8=", None]


def test_json_lines_become_parquet_with_types_of_all_rows(tmp_path, run, caplog):
    rows = [{"prompt": "a", "num": 1, "mixed": 1, "late": None, "empty": {}}, {"prompt": "b", "num": 1.5, "mixed": "x"}]
    rows.append({"prompt": "c", "late": ["x"], "big": 1 << 80})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{")
    found = read_parquet(run("in.jsonl", "out.parquet"))
    types = {name: str(found.schema.field(name).type) for name in ("prompt", "num", "mixed", "empty", "big")}
    assert types == {"prompt": "string", "num": "double", "mixed": "string", "empty": "string", "big": "string"}
    assert found.column("mixed").to_pylist() == ["1", '"x"', None, None]
    assert found.column("late").to_pylist() == [None, None, ["x"], None]
    assert found.column("output").to_pylist()[3] is None
    assert [record.message for record in caplog.records] == [
        "columns whose values are of several types are written as JSON text: mixed, empty, big"
    ]


def test_a_compressed_output_is_the_same_lines_and_the_same_bytes_each_time(tmp_path, run):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    lines = run("in.jsonl", "out.jsonl").read_bytes()
    first = run("in.jsonl", "a.jsonl.gz").read_bytes()
    assert gzip.decompress(first) == lines
    assert run("in.jsonl", "b.jsonl.gz").read_bytes() == first
    assert gzip.decompress(run("in.jsonl", "c.csv.gz").read_bytes()).startswith(b"prompt,output,")


@pytest.mark.parametrize("output", ["out.csv", "out.parquet", "out.jsonl.gz", "out.tsv"])
def test_a_job_into_any_kind_of_file_is_continued(tmp_path, run, output):
    rows = [{"prompt": f"{i}", "x": "é,\n", "sampling_params": {"temperature": 0.5}} for i in range(6)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run("in.jsonl", output, order="completion")
    rows[2]["prompt"] = "changed"
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    again = run("in.jsonl", output).read_bytes()
    assert (run.report.num_resumed, run.report.num_rows) == (5, 6)
    assert again == run("in.jsonl", "whole." + output.partition(".")[2]).read_bytes()


def test_halves_of_surrogate_pairs_become_replacement_characters_in_tables(tmp_path, run):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "x": "\\ud800"}')
    assert read_parquet(run("in.jsonl", "out.parquet")).column("x").to_pylist() == ["\ufffd"]
    assert "\ufffd" in run("in.jsonl", "out.csv").read_text()


def test_without_pyarrow_parquet_is_refused_with_the_way_out_before_the_model_loads(tmp_path, run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "in.jsonl").write_text("{}")
    with pytest.raises(NotSupportedError, match=r"Parquet needs pyarrow: pip install 'pagedllm\[tables\]'"):
        run("in.jsonl", "out.parquet")


@pytest.mark.parametrize("content", [b"", b"nothing of the kind"])
def test_what_is_no_parquet_file_is_refused_by_name(tmp_path, run, content):
    pytest.importorskip("pyarrow")
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(TableError, match="not a Parquet file that can be read"):
        run("in.parquet", "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet"]


def test_files_of_several_kinds_are_refused(tmp_path, run):
    for name in ("in.a.csv", "in.b.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="are of different kinds"):
        run("in.*", "out.jsonl")


# What loads the results


@pytest.fixture(params=[[], [("logprobs", 1)]], ids=["plain", "logprobs"])
def results(tmp_path, run, request):
    """JSON lines of many rows, whose only error stands in the last one."""
    rows = [json.dumps({"id": i, "prompt": f"{i}", "tags": ["x"] * (i % 2)}) for i in range(3000)]
    (tmp_path / "in.jsonl").write_text("\n".join([*rows, "{"]))
    path = run("in.jsonl", "out.jsonl", sampling_params={**GREEDY, **dict(request.param)})
    assert (run.report.num_failed, run.report.num_rows) == (1, 3001)
    return path


def test_results_load_in_pandas(results):
    frame = pytest.importorskip("pandas").read_json(results, lines=True)
    assert (len(frame), frame["output"].isna().sum(), (frame["error"] != "").sum()) == (3001, 1, 1)


def test_results_load_in_polars(results):
    frame = pytest.importorskip("polars").read_ndjson(results)
    assert (len(frame), frame["output"].null_count(), (frame["error"] != "").sum()) == (3001, 1, 1)


def test_results_load_in_pyarrow(results):
    pytest.importorskip("pyarrow")
    from pyarrow import json as reader

    table = reader.read_json(results)
    assert (len(table), table.column("output").null_count, table.column("row")[-1].as_py()) == (3001, 1, 3000)


def test_results_load_in_datasets(results, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_json(str(results), cache_dir=str(tmp_path / "cache"))
    assert (len(found), found[3000]["output"], found[3000]["row"]) == (3001, None, 3000)
