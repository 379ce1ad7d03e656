"""The promises of the command line, one test each, over the engine without a model: rows in, rows out, again and again.

Flags, streams and signals are in test_cli.py, OpenAI lines in jobs/test_openai.py, tables in jobs/test_tables.py.
"""

from __future__ import annotations

import json
import re
from datetime import datetime

import pytest

from pagedllm import SamplingParams, __version__, cli
from pagedllm.jobs.rows import RowReader
from tests.fake_assembly import FakeTokenizer, fake_assemble

pytestmark = pytest.mark.usefixtures("no_model")

COLUMNS = ["output", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "error", "row"]
GREEDY = ["--temperature", "0", "--max-tokens", "4"]


@pytest.fixture
def chat_model(monkeypatch):
    monkeypatch.setattr(FakeTokenizer, "chat_template", "{{ messages }}")


@pytest.fixture
def sent(monkeypatch):
    """The texts that became requests, in the order they did."""
    texts = []
    build = RowReader.build

    def spy(self, index, token_ids, *rest):
        texts.append(FakeTokenizer().decode(token_ids))
        return build(self, index, token_ids, *rest)

    monkeypatch.setattr(RowReader, "build", spy)
    return texts


class Job:
    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *rows):
        self.input.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))

    def __call__(self, *arguments, output=None, model="fake"):
        """The exit code; leaves `rows` of OUT and `err`, the lines of stderr."""
        self.output = output or self.output
        self.capsys.readouterr()
        try:
            code = cli.main(["run", "-m", model, "-i", str(self.input), "-o", str(self.output), *map(str, arguments)])
        except SystemExit as end:
            code = end.code
        self.err = self.capsys.readouterr().err.splitlines()
        exists = self.output.exists()
        self.rows = [json.loads(line) for line in self.output.read_text().splitlines()] if exists else []
        return code

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def job(tmp_path, capsys):
    return Job(tmp_path, capsys)


# Flags


@pytest.mark.parametrize(
    ("flag", "value", "field"),
    [
        ("--temperature", "3", "temperature"),
        ("--top-p", "0", "top_p"),
        ("--top-k", "-2", "top_k"),
        ("--min-p", "2", "min_p"),
        ("--presence-penalty", "3", "presence_penalty"),
        ("--frequency-penalty", "-3", "frequency_penalty"),
        ("--repetition-penalty", "0", "repetition_penalty"),
        ("--max-tokens", "-1", "max_tokens"),
        ("--min-tokens", "-1", "min_tokens"),
        ("--stop", "", "stop"),
        ("--logprobs", "-2", "logprobs"),
        ("--bad-words", "", "bad_words"),
        ("--n", "0", "n"),
    ],
)
def test_a_sampling_flag_has_the_same_check_as_the_field(job, flag, value, field):
    job.write({"prompt": "a"})
    assert job(f"{flag}={value}") == 2
    number = float if field.endswith(("p", "penalty", "temperature")) else int
    given = [value] if field in ("stop", "bad_words") else number(value)
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: given})
    assert job.err[-1] == f"pagedllm: error: {caught.value}"


def test_seed_is_the_jobs_and_a_rows_own_stands_in_its_sampling_params(job):
    job.write({"prompt": "a"}, {"prompt": "a", "sampling_params": {"seed": 7}})
    first, second = [(job("--seed", seed, output=job.folder / str(seed)), job.rows)[1] for seed in (1, 2)]
    assert first[0]["output"] != second[0]["output"]
    assert first[1]["output"] == second[1]["output"]


# Plain rows in


def test_only_prompt_messages_and_sampling_params_are_read_and_every_other_field_survives(job):
    text = '{"a": 1.10, "temperature": 9,  "prompt":"x", "b": {"c": [1e2, null]}, "d": "\\u00e9"}'
    job.write(text)
    assert job(*GREEDY) == 0
    assert job.output.read_text().startswith(text[:-1] + ', "output": ')


def test_an_unknown_key_in_sampling_params_is_an_error_row_with_the_nearest_name(job):
    job.write({"prompt": "a", "sampling_params": {"temprature": 1}}, {"prompt": "a"})
    assert job(*GREEDY) == 3
    assert job.rows[0]["error"].endswith("has no parameter 'temprature': did you mean 'temperature'?")


def test_one_notice_tells_of_columns_that_bear_a_parameters_name(job):
    job.write({"prompt": "a", "seed": 3, "top_k": 1}, {"prompt": "b", "seed": 4})
    assert job(*GREEDY, "-q") == 0
    text = "columns named top_k, seed are data: a row's own parameters stand in its sampling_params"
    assert job.err == [f"pagedllm: {text}"]


def test_prompt_is_sent_as_it_is_and_messages_go_through_the_template(job, sent):
    job.write({"prompt": "[user]x"}, {"messages": [{"role": "user", "content": "x"}]})
    assert job(*GREEDY) == 0
    assert sorted(sent) == ["[user]x", "[user]x[assistant]"]


@pytest.mark.parametrize("flags", [["--chat"], ["--system", "S"], ["--system-file", "system.txt"]])
def test_chat_and_what_implies_it_make_each_prompt_one_user_message(job, sent, monkeypatch, flags):
    monkeypatch.chdir(job.folder)
    (job.folder / "system.txt").write_text("S\n")
    job.write(
        {"prompt": "x"},
        {"messages": [{"role": "user", "content": "y"}]},
        {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "z"}]},
    )
    assert job(*GREEDY, *flags) == 0
    system = "" if flags == ["--chat"] else "[system]S"
    expected = [f"{system}[user]x[assistant]", f"{system}[user]y[assistant]", "[system]own[user]z[assistant]"]
    assert sorted(sent) == sorted(expected)
    assert [row.get("prompt") for row in job.rows] == ["x", None, None]


def test_the_plan_shows_the_first_final_prompt(job):
    job.write({"prompt": "x"})
    assert job(*GREEDY, "--system", "S") == 0
    assert 'first prompt "[system]S[user]x[assistant]"' in job.err


def test_a_hint_comes_when_a_chat_model_gets_plain_text(job, chat_model):
    hint = "pagedllm: the model has a chat template, and `prompt` is sent as it is: --chat makes it a user message"
    job.write({"prompt": "x"}, {"prompt": "y"})
    assert job(*GREEDY) == 0
    assert job.err.count(hint) == 1
    for flags in (["--chat"], ["-q"]):
        assert job(*GREEDY, *flags, output=job.folder / flags[0]) == 0
        assert hint not in job.err


@pytest.mark.parametrize("flag", ["--template", "--template-file"])
def test_a_template_replaces_exactly_the_columns_that_exist(job, sent, flag):
    text = '{"q": "{name}"} {} {1} {a b}: {list}{n}, {{name}}'
    (job.folder / "t").write_text(text + "\n")
    job.write({"prompt": "data", "name": "{n} Ä", "a b": 1.5, "list": [1, "x"], "n": True})
    assert job(*GREEDY, flag, text if flag == "--template" else job.folder / "t") == 0
    (prompt,) = sent
    assert prompt.encode("latin-1").decode() == '{"q": "{n} Ä"} {} {1} 1.5: [1, "x"]true, {{n} Ä}'


def test_a_word_of_the_template_that_is_no_column_is_refused_at_the_start_with_the_columns_listed(job, monkeypatch):
    monkeypatch.setattr("pagedllm.llm.assemble", None)
    job.write("{", {"id": 1, "text": "x"})
    assert job("--template", "{txt}") == 2
    assert job.err == ["pagedllm: error: the template's {txt} is no column: the columns are id, text"]
    assert job.names() == ["in.jsonl"]


def test_a_row_that_lacks_a_column_of_the_template_is_an_error_row(job):
    job.write({"x": "a"}, {"x": None}, {"y": 1})
    assert job(*GREEDY, "--template", "<{x}>") == 3
    assert [row["error"] for row in job.rows] == [
        "",
        "invalid_parameter: the template's column 'x' is null",
        "invalid_parameter: the template's column 'x' is not in the row",
    ]


# Plain rows out


def test_the_inputs_fields_come_in_order_then_always_the_same_columns_of_one_type_each(job):
    job.write({"b": 1, "prompt": "x", "a": 2}, {"prompt": "y" * 500}, "{")
    assert job(*GREEDY) == 3
    assert [list(row) for row in job.rows] == [["b", "prompt", "a", *COLUMNS], ["prompt", *COLUMNS], COLUMNS]
    types = [{name: type(row[name]) for name in COLUMNS} for row in job.rows]
    assert types[0] == {**dict.fromkeys(COLUMNS, str), "prompt_tokens": int, "completion_tokens": int, "row": int}
    assert types[1] == types[2] == {**types[0], "output": type(None)}
    assert [row["error"].partition(": ")[0] for row in job.rows] == ["", "prompt_too_long", "invalid_json_line"]


def test_prompt_logprobs_have_no_column_and_are_refused(job):
    job.write({"prompt": "a", "sampling_params": {"prompt_logprobs": 1}}, {"prompt": "b"})
    assert job(*GREEDY, "--prompt-logprobs", 1) == 2
    assert "prompt_logprobs" in job.err[-1]
    assert job(*GREEDY) == 3
    assert [row["error"].partition(":")[0] for row in job.rows] == ["unsupported", ""]


def test_row_counts_in_the_whole_input_also_under_shard_and_limit(job):
    job.write(*({"prompt": str(i)} for i in range(9)))
    assert job(*GREEDY, "--limit", 7, "--shard", "2/3") == 0
    assert [(row["prompt"], row["row"]) for row in job.rows] == [("1", 1), ("4", 4)]


def test_with_n_four_columns_are_lists_of_n_in_every_row(job):
    rows = [{"prompt": "a"}, {"prompt": "b", "sampling_params": {"n": 2}}, "{", {"prompt": "c" * 300}]
    job.write(*rows, {"prompt": "d", "sampling_params": {"n": 3, "stop": "e"}})
    assert job("--n", 3, "--max-tokens", 5) == 3
    lists = ("output", "finish_reason", "stop_reason", "completion_tokens")
    assert [list(row)[-7:] for row in job.rows] == [COLUMNS] * 5
    assert all(type(row[name]) is list and len(row[name]) == 3 for row in job.rows for name in lists)
    assert len(set(job.rows[0]["output"])) == 3
    assert job.rows[0]["completion_tokens"] == [5, 5, 5]
    assert job.rows[1]["error"].startswith("invalid_parameter: n=2 in a row, 3 in the job")
    assert [job.rows[3][name] for name in lists] == [[None] * 3, ["error"] * 3, [""] * 3, [0] * 3]
    assert [type(row[name]) for row in job.rows for name in ("prompt_tokens", "error", "row")] == [int, str, int] * 5
    first, flags = job.output.read_bytes(), ("--n", 3, "--max-tokens", 5)
    job.write(*rows)
    assert job(*flags) == 3
    assert "pagedllm: continuing: 1 of 4 rows done; in the input since: 1 vanished" in job.err
    assert job.output.read_bytes() == b"".join(first.splitlines(keepends=True)[:4])
    assert job(*flags, "--logprobs", 1, output=job.folder / "other") == 3
    assert [[len(ids) for ids in row["token_ids"]] for row in job.rows] == [[5] * 3, [0] * 3, [0] * 3, [0] * 3]


def test_logprobs_add_three_columns_that_are_all_valid_json(job):
    job.write({"prompt": "a", "id": 1}, {"prompt": "b", "sampling_params": {"logprobs": 1}}, "{")
    assert job(*GREEDY, "--logprobs", 2) == 3
    row, other, unreadable = job.rows
    assert list(row) == ["prompt", "id", *COLUMNS[:-1], "token_ids", "token_logprobs", "top_logprobs", "row"]
    assert [len(row[name]) for name in ("token_ids", "token_logprobs", "top_logprobs")] == [4, 4, 4]
    assert row["token_logprobs"] == [-1.0] * 4
    sampled = {"token_id": row["token_ids"][0], "token": row["output"][0], "logprob": -1.0, "rank": 3}
    others = [{"token_id": 100, "token": "a", "logprob": -2.0, "rank": 1}]
    others.append({"token_id": 101, "token": "b", "logprob": -3.0, "rank": 2})
    assert row["top_logprobs"][0] == [*others, sampled]
    assert other["error"].startswith("invalid_parameter: logprobs=1 in a row, 2 in the job")
    assert [unreadable[name] for name in ("token_ids", "token_logprobs", "top_logprobs")] == [[], [], []]


def test_an_infinite_logprob_is_null(job, monkeypatch):
    import numpy as np

    from pagedllm.request import TokenLogprobs
    from tests.fake_assembly import FakeRunner

    entry = TokenLogprobs(np.array([100, 101], np.int32), np.array([0, -np.inf], np.float32), 1)
    monkeypatch.setattr(FakeRunner, "logprobs", lambda self, ids, data: (entry,) * len(ids))
    monkeypatch.setattr(FakeRunner, "next_token", lambda *a: 100)
    job.write({"prompt": "a"})
    assert job(*GREEDY, "--logprobs", 1) == 0
    assert [top["logprob"] for top in job.rows[0]["top_logprobs"][0]] == [0.0, None]
    assert "Infinity" not in job.output.read_text()


@pytest.mark.parametrize(("keep", "names"), [("all", ["id", "prompt", "x"]), ("none", []), ("x,id", ["id", "x"])])
def test_keep_says_which_columns_of_the_input_stay_each_as_it_was(job, keep, names):
    text = '{ "id" : 1.10,"prompt": "a,}", "x" :{"prompt": [1,  2]} }'
    job.write(text, "{}", {"prompt": "b"})
    assert job(*GREEDY, "--keep", keep) == 3
    assert list(job.rows[0]) == [*names, *COLUMNS]
    line = job.output.read_text().splitlines()[0]
    assert ("x" not in names) or '"x" :{"prompt": [1,  2]}' in line
    assert ("id" not in names) or '"id" : 1.10' in line
    assert list(job.rows[1]) == COLUMNS


def test_the_results_columns_have_the_names_that_are_asked_for(job):
    job.write({"prompt": "a", "output": "mine", "row": 5})
    assert job(*GREEDY, "--output-column", "answer", "--output-prefix", "llm_") == 0
    assert list(job.rows[0]) == ["prompt", "output", "row", "answer", *("llm_" + name for name in COLUMNS[1:])]
    assert (job.rows[0]["output"], job.rows[0]["row"], job.rows[0]["llm_row"]) == ("mine", 5, 0)


def test_a_name_clash_is_refused_before_the_model_loads_and_avoided_by_keep(job, monkeypatch):
    job.write({"prompt": "a", "token_ids": 1, "llm_row": 2})
    assert job(*GREEDY) == 0
    monkeypatch.setattr("pagedllm.llm.assemble", None)
    for flags in (["--logprobs", 1], ["--output-prefix", "llm_"]):
        assert job(*GREEDY, *flags, output=job.folder / "other") == 2
        assert re.search("the field '(token_ids|llm_row)' has the name of a result column", job.err[-1])
    monkeypatch.setattr("pagedllm.llm.assemble", fake_assemble)
    assert job(*GREEDY, "--logprobs", 1, "--keep", "prompt", output=job.folder / "other") == 0


def test_nothing_in_a_row_depends_on_when_or_how_it_ran(job):
    job.write(*({"prompt": f"{i % 7}"} for i in range(40)))
    assert job("--max-tokens", 5) == 0
    first = job.output.read_bytes()
    flags = ["--max-num-seqs", 2, "--block-size", 8, "--max-num-batched-tokens", 9, "--scheduling-policy", "fcfs"]
    assert job("--max-tokens", 5, *flags, "--no-enable-prefix-caching", output=job.folder / "other") == 0
    assert job.output.read_bytes() == first


def test_strftime_now_in_templates_is_frozen_at_the_jobs_start(job, sent, monkeypatch):
    def dated(self, messages, **options):
        return options["clock"]().strftime("%Y-%m-%d") + messages[0]["content"]

    monkeypatch.setattr(FakeTokenizer, "apply_chat_template", dated)
    monkeypatch.setattr("pagedllm.jobs.runner.time.time", lambda: datetime(2024, 2, 29, 23).timestamp())
    rows = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(3)]
    job.write(*rows)
    assert job(*GREEDY) == 0
    monkeypatch.setattr("pagedllm.jobs.runner.time.time", lambda: datetime(2024, 3, 5).timestamp())
    job.write(*rows, {"messages": [{"role": "user", "content": "new"}]})
    assert job(*GREEDY) == 0
    assert sorted(sent) == ["2024-02-290", "2024-02-291", "2024-02-292", "2024-02-29new"]


# Again and again


def test_if_exists_resume_starts_continues_or_has_nothing_to_do(job):
    job.write(*({"prompt": str(i)} for i in range(6)))
    assert job(*GREEDY, "--limit", 4) == 0
    assert not any("continuing" in line for line in job.err)
    assert job(*GREEDY) == 0
    assert "pagedllm: continuing: 4 of 6 rows done; in the input since: 2 new" in job.err
    assert job(*GREEDY) == 0
    assert job.err == [f"pagedllm: nothing to do: {job.output} has all 6 rows"]
    assert job(*GREEDY, "--if-exists", "fail") == 2
    assert "the output exists" in job.err[-1]


def test_a_foreign_file_is_refused_and_overwritten_on_request_only(job):
    job.write({"prompt": "a"})
    job.output.write_text('"mine"\n')
    assert job(*GREEDY) == 2
    assert "this file is not of a job that can be continued" in job.err[-1]
    assert job.output.read_text() == '"mine"\n'
    assert job(*GREEDY, "--if-exists", "overwrite") == 0
    assert job.rows[0]["prompt"] == "a"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--seed", 1], "seed: 0 -> 1"),
        (["--top-k", 3], "top_k: 'unset' -> 3"),
        (["--max-tokens", 9], "max_tokens: 4 -> 9; it may grow with --retry cut"),
        (["--chat"], "chat: False -> True"),
        (["--shard", "2/3"], "shard: [1, 1] -> [2, 3]"),
        (["--template", "{prompt}!"], "template: None -> '{prompt}!'"),
        (["--chat-template", "x"], "model: "),
    ],
)
def test_a_binding_setting_that_differs_refuses_with_old_and_new(job, flags, text):
    job.write({"prompt": "a"}, {"prompt": "b"})
    assert job(*GREEDY, "--limit", 1) == 0
    before = job.output.read_bytes()
    assert job(*GREEDY, *flags) == 2
    assert f"the job there was run with another {text}" in job.err[-1]
    assert job.output.read_bytes() == before


def test_threads_sizes_and_paths_are_only_recorded(job):
    job.write({"prompt": "a"}, {"prompt": "b"})
    assert job(*GREEDY, "--limit", 1) == 0
    job.input = job.input.rename(job.folder / "renamed.jsonl")
    assert job(*GREEDY, "--num-threads", 1, "--max-num-seqs", 3, "--block-size", 32) == 0
    assert "pagedllm: continuing: 1 of 2 rows done; in the input since: 1 new" in job.err
    manifest = json.loads((job.folder / "out.jsonl.manifest.json").read_text())
    assert manifest["engine"] == {"num_threads": 1, "max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": 32}
    assert (manifest["pagedllm"], manifest["input_path"]) == (__version__, str(job.input))


def test_new_rows_are_added_changed_ones_redone_and_vanished_ones_dropped_each_counted(job):
    job.write(*({"prompt": str(i)} for i in range(10)))
    assert job(*GREEDY) == 0
    rows = [{"prompt": str(i)} for i in range(10)]
    rows[2] = {"prompt": "changed"}
    job.write(*rows[:8], {"prompt": "new"}, {"prompt": "newer"}, {"prompt": "newest"})
    assert job(*GREEDY) == 0
    assert "pagedllm: continuing: 7 of 11 rows done; in the input since: 1 new, 3 changed" in job.err
    job.write(*rows[3:8])
    assert job(*GREEDY) == 0
    assert "pagedllm: continuing: 5 of 5 rows done; in the input since: 6 vanished" in job.err
    assert [row["prompt"] for row in job.rows] == list("34567")


def test_another_form_of_the_results_is_written_without_computing(job, sent):
    job.write({"prompt": "a", "x": 1}, {"prompt": "b", "x": 2})
    assert job(*GREEDY) == 0
    forms = (["--keep", "x"], ["--keep", "none", "--output-prefix", "p_"], [])
    found = [(job(*GREEDY, *flags), list(job.rows[0]))[1] for flags in forms]
    assert found == [["x", *COLUMNS], ["p_" + name for name in COLUMNS], ["prompt", "x", *COLUMNS]]
    assert sorted(sent) == ["a", "b"]


def test_partial_and_manifest_are_the_only_files_beside_out(job, monkeypatch):
    job.write(*({"prompt": str(i)} for i in range(40)))
    assert job(*GREEDY, "--max-failed", 0) == 0
    assert job.names() == ["in.jsonl", "out.jsonl", "out.jsonl.manifest.json"]
    job.write(*({"prompt": str(i)} for i in range(40)), *["{"] * 2)
    assert job(*GREEDY, "--max-failed", 0, output=job.folder / "other") == 3
    assert {"other.partial", "other.manifest.json"} <= set(job.names())


def test_retry_failed_runs_failed_rows_and_no_others(job, sent, monkeypatch):
    from tests.fake_assembly import FakeRunner

    next_token = FakeRunner.next_token
    monkeypatch.setattr(FakeRunner, "next_token", lambda *a: -1 if len(a[1]) == 3 else next_token(*a))
    job.write({"prompt": "a"}, {"prompt": "bc"}, {"prompt": "d" * 300})
    assert job(*GREEDY) == 3
    monkeypatch.setattr(FakeRunner, "next_token", next_token)
    sent.clear()
    assert job(*GREEDY, "--retry", "failed") == 3
    assert [row["error"].partition(":")[0] for row in job.rows] == ["", "", "prompt_too_long"]
    assert sorted(sent) == ["a", "bc"]


def test_order_input_is_the_default_and_completion_is_as_they_end(job):
    job.write(*({"prompt": str(i), "sampling_params": {"max_tokens": 12 - i}} for i in range(10)))
    assert job() == 0
    assert [row["row"] for row in job.rows] == list(range(10))
    assert job("--order", "completion", "--max-num-seqs", 16, output=job.folder / "other") == 0
    assert [row["row"] for row in job.rows] == list(range(9, -1, -1))


def test_shards_and_merge_give_the_whole(job):
    job.write(*({"prompt": str(i)} for i in range(11)))
    whole = (job(*GREEDY, "--output-prefix", "p_"), job.output.read_bytes())[1]
    shards = [job.folder / f"s{i}" for i in (1, 2, 3)]
    for i, shard in enumerate(shards, start=1):
        assert job(*GREEDY, "--output-prefix", "p_", "--shard", f"{i}/3", output=shard) == 0
    assert cli.main(["merge", *map(str, reversed(shards)), "-o", str(job.folder / "merged")]) == 0
    assert (job.folder / "merged").read_bytes() == whole


@pytest.mark.parametrize("is_finished", [False, True])
def test_dry_run_tells_the_plan_and_writes_nothing(job, is_finished):
    job.write({"prompt": "a"}, {"prompt": "a"}, "{", {"prompt": "b"})
    if is_finished:
        assert job(*GREEDY, "--limit", 2) == 0
    before = {path.name: path.read_bytes() for path in job.folder.iterdir()}
    assert job(*GREEDY, "--dry-run") == 0
    done = (
        "2 done before, 1 refused, 0 equal to another, 1 to run"
        if is_finished
        else ("0 done before, 1 refused, 1 equal to another, 2 to run")
    )
    assert f"rows         4: {done}" in job.err
    assert {path.name: path.read_bytes() for path in job.folder.iterdir()} == before


# Exit codes


@pytest.mark.parametrize(
    ("num_failed", "flags", "code", "num_rows"),
    [
        (0, [], 0, 200),
        (2, [], 3, 200),
        (2, ["--max-failed", "2"], 0, 200),
        (2, ["--max-failed", "1%"], 0, 200),
        (3, ["--max-failed", "2"], 3, None),
        (3, ["--max-failed", "1%"], 3, None),
        (100, [], 3, None),
        (100, ["--max-failed", "100"], 3, None),
        (100, ["--max-failed", "100%"], 0, 200),
    ],
)
def test_exit_codes_of_failed_rows(job, num_failed, flags, code, num_rows):
    job.write(*["{"] * num_failed, *({"prompt": str(i)} for i in range(200 - num_failed)))
    assert job(*GREEDY, *flags) == code
    assert (len(job.rows) or None) == num_rows
    if num_rows is None:
        assert job.err[-1].startswith("pagedllm run -m fake -i")
        assert any("row 0: invalid_json_line: not JSON" in line for line in job.err)


def test_parameters_that_the_model_cannot_have_are_refused_before_any_work(job):
    job.write({"prompt": "a"})
    assert job("--stop-token-ids", 259) == 2
    assert job.err[-1] == "pagedllm: error: stop_token_ids must be ids in [0, 259), got 259"
    assert job.names() == ["in.jsonl"]
