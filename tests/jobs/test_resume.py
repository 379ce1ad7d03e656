"""The same command again: what is kept, what is computed, and that the file is the one an uninterrupted run makes."""

from __future__ import annotations

import json
import random

import pytest

from pagedllm import LLM
from pagedllm.jobs.formats import JobRefused
from pagedllm.jobs.runner import TooManyFailures

pytestmark = pytest.mark.usefixtures("no_model")

SAMPLED = {"max_tokens": 6}


class Stopped(Exception):
    pass


class Folder:
    """A folder with an input; `run` gives the rows of the output."""

    def __init__(self, path):
        self.path, self.input, self.output = path, path / "in.jsonl", path / "out.jsonl"

    def write(self, rows):
        self.input.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))

    def run(self, stop_after=None, output=None, llm=None, sampling_params=SAMPLED, **options):
        """stop_after: an exception in this step."""
        with LLM("fake", **(llm or {})) as engine:
            runner = engine._assembly.runtime

            def script(step, plan):
                if step == stop_after:
                    raise Stopped

            runner.script = script
            output = output or self.output
            self.report = engine.run_file(self.input, output, sampling_params=sampling_params, **options)
            self.num_steps = runner.num_steps
            return output.read_bytes()

    def names(self):
        return sorted(path.name for path in self.path.iterdir())


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def some_rows(num_rows=60):
    """Equal rows, greedy and seeded ones, bad ones and other columns among them."""
    rows = [{"id": i, "prompt": f"p{i % 25}"} for i in range(num_rows)]
    for i in range(0, num_rows, 7):
        rows[i]["sampling_params"] = {"temperature": 0}
    for i in range(0, num_rows, 11):
        rows[i]["sampling_params"] = {"seed": i % 3, "max_tokens": 12}
    rows[5] = b"{"
    rows[9] = {"prompt": "x" * 300}
    return rows


def in_order(text):
    return sorted(text.splitlines(keepends=True), key=lambda line: json.loads(line)["row"])


def test_a_finished_job_leaves_output_and_manifest(folder):
    folder.write(some_rows())
    folder.run()
    assert folder.names() == ["in.jsonl", "out.jsonl", "out.jsonl.manifest.json"]
    manifest = json.loads((folder.path / "out.jsonl.manifest.json").read_text())
    assert (manifest["state"], manifest["rows"], manifest["failed"]) == ("finished", 60, 2)


@pytest.mark.parametrize("order", ["input", "completion"])
def test_stopped_at_any_step_and_again_gives_the_same_bytes(folder, order):
    rows = some_rows()
    folder.write(rows)
    expected = folder.run(output=folder.path / "whole")
    num_steps = folder.num_steps
    for step in range(0, num_steps, 3):
        output = folder.path / f"out{step}"
        with pytest.raises(Stopped):
            folder.run(stop_after=step, output=output)
        assert not output.exists()
        found = folder.run(output=output, order=order)
        assert (found if order == "input" else b"".join(in_order(found))) == expected
        assert (folder.report.num_rows, folder.report.num_failed) == (60, 2)
    assert num_steps > 9


def test_nothing_is_computed_twice(folder):
    folder.write([{"prompt": f"{i}"} for i in range(100)])
    with pytest.raises(Stopped):
        folder.run(stop_after=40)
    done = len((folder.path / "out.jsonl.partial").read_text().splitlines())
    assert 20 < done < 90
    folder.run()
    assert (folder.report.num_resumed, folder.report.num_rows) == (done, 100)
    assert folder.report.num_completion_tokens == 6 * (100 - done)


def test_a_finished_job_is_nothing_to_do(folder):
    folder.write(some_rows())
    before = folder.run()
    folder.run()
    assert (folder.num_steps, folder.report.num_rows, folder.report.num_failed) == (0, 60, 2)
    assert folder.output.read_bytes() == before


def test_rows_are_known_by_their_content_not_by_their_line(folder):
    rows = [{"id": i, "prompt": f"p{i}"} for i in range(40)]
    folder.write(rows)
    with pytest.raises(Stopped):
        folder.run(stop_after=12)
    done = {json.loads(line)["row"] for line in (folder.path / "out.jsonl.partial").read_text().splitlines()}
    kept = [row for row in rows if row["id"] % 5]
    random.Random(1).shuffle(kept)
    kept = [{**row, "more": "x"} for row in kept] + [{"id": 99, "prompt": "new"}]
    kept[3]["prompt"] = "changed"
    folder.write(kept)
    found = folder.run()
    assert folder.report.num_resumed == len(done - {i for i in range(40) if i % 5 == 0} - {kept[3]["id"]})
    assert found == folder.run(output=folder.path / "whole")


def test_an_input_that_changed_after_the_end_costs_its_new_rows_only(folder):
    rows = some_rows()
    folder.write(rows)
    folder.run()
    rows = [*rows[:20], {"prompt": "new"}, *rows[25:]]
    folder.write(rows)
    found = folder.run()
    assert (folder.report.num_rows, folder.report.num_resumed) == (56, 55 - 2)  # two were refused, and are again
    assert found == folder.run(output=folder.path / "whole")
    folder.run()
    assert folder.num_steps == 0


def test_an_output_in_order_of_completion_is_continued_too(folder):
    rows = some_rows()
    folder.write(rows)
    found = folder.run(order="completion").splitlines()
    whole = folder.run(output=folder.path / "whole").splitlines()
    assert sorted(found) == sorted(whole) != found
    folder.write([*rows, {"prompt": "new"}])
    assert sorted(folder.run(order="completion").splitlines()) == sorted(
        folder.run(output=folder.path / "whole2").splitlines()
    )
    assert folder.report.num_resumed == 0


def test_equal_greedy_rows_are_computed_once(folder):
    folder.write([{"id": i, "prompt": "a"} for i in range(50)])
    rows = [json.loads(line) for line in folder.run(sampling_params={"temperature": 0, "max_tokens": 5}).splitlines()]
    assert [row["id"] for row in rows] == [row["row"] for row in rows] == list(range(50))
    assert len({row["output"] for row in rows}) == 1
    assert (folder.report.num_rows, folder.report.num_equal, folder.report.num_completion_tokens) == (50, 49, 5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sampling_params": {"max_tokens": 7}}, "max_tokens: 6 -> 7; it may grow with --retry cut"),
        ({"sampling_params": {"max_tokens": 6, "top_k": 2}}, "top_k: 'unset' -> 2"),
        ({"llm": {"seed": 1}}, "seed: 0 -> 1"),
        ({"llm": {"chat_template": "x"}}, "model: '"),
    ],
)
@pytest.mark.parametrize("is_finished", [False, True])
def test_another_job_is_refused_and_nothing_is_touched(folder, change, text, is_finished):
    folder.write([{"prompt": f"{i}"} for i in range(30)])
    if is_finished:
        folder.run()
    else:
        with pytest.raises(Stopped):
            folder.run(stop_after=9)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(JobRefused, match=f"the job there was run with another {text}"):
        folder.run(**change)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_settings_that_change_no_token_may_change(folder):
    folder.write(some_rows())
    expected = folder.run(output=folder.path / "whole")
    with pytest.raises(Stopped):
        folder.run(stop_after=9, llm={"max_num_seqs": 3, "block_size": 8, "max_num_batched_tokens": 16})
    assert folder.run(llm={"max_num_seqs": 5}) == expected


def test_a_shorter_model_length_runs_the_rows_again_that_it_changes(folder):
    folder.write([{"prompt": "x" * n} for n in (5, 50, 59)])
    params = {"max_tokens": 60, "temperature": 0}
    with pytest.raises(Stopped):
        folder.run(stop_after=130, sampling_params=params, llm={"max_num_seqs": 1})
    assert folder.run(llm={"max_model_len": 100}, sampling_params=params) == folder.run(
        output=folder.path / "whole", llm={"max_model_len": 100}, sampling_params=params
    )


def test_failed_rows_are_run_again_when_asked(folder):
    folder.write([{"prompt": p} for p in "abc"])
    with LLM("fake") as llm:
        llm._assembly.runtime.forced = lambda tokens, data: -1 if tokens[1] == ord("b") + 3 else None
        report = llm.run_file(folder.input, folder.output, sampling_params=SAMPLED)
    assert report.num_failed == 1
    folder.run()
    assert (folder.num_steps, folder.report.num_failed) == (0, 1)
    found = folder.run(retry="failed")
    assert (folder.report.num_resumed, folder.report.num_failed) == (2, 0)
    assert found == folder.run(output=folder.path / "whole")


def test_cut_rows_are_run_again_with_more_tokens(folder):
    folder.write(some_rows())
    folder.run()
    more = {"max_tokens": 20}
    with pytest.raises(Stopped):
        folder.run(retry="cut", sampling_params=more, stop_after=20)
    found = folder.run(retry="cut", sampling_params=more)
    assert folder.report.num_resumed > 5
    assert found == folder.run(output=folder.path / "whole", sampling_params=more)


def test_overwrite_starts_anew_and_the_old_output_stays_until_the_end(folder):
    folder.write([{"prompt": f"{i}"} for i in range(30)])
    old = folder.run()
    with pytest.raises(Stopped):
        folder.run(if_exists="overwrite", llm={"seed": 1}, stop_after=9)
    assert folder.output.read_bytes() == old
    new = folder.run(llm={"seed": 1})
    assert folder.report.num_resumed > 0
    assert new != old
    assert new == folder.run(output=folder.path / "whole", llm={"seed": 1})


def test_shards_together_are_the_whole(folder):
    folder.write([{"prompt": f"p{i % 9}", "sampling_params": {"temperature": 0}} for i in range(30)])
    whole = folder.run(output=folder.path / "whole").splitlines()
    parts = [folder.run(output=folder.path / f"s{i}", shard=(i, 3)).splitlines() for i in (1, 2, 3)]
    assert [parts[i % 3][i // 3] for i in range(30)] == whole


def test_a_limit_may_grow(folder):
    folder.write([{"prompt": f"{i}"} for i in range(30)])
    assert len(folder.run(limit=10).splitlines()) == 10
    whole = folder.run()
    assert folder.report.num_resumed == 10
    assert whole == folder.run(output=folder.path / "whole")


def test_a_job_stops_once_more_rows_failed_than_allowed_and_goes_on_when_more_are(folder):
    folder.write([{"prompt": "a"}] * 10 + [b"{"] * 4 + [{"prompt": "b"}] * 26)
    for limit in (3, 0.05):
        with pytest.raises(TooManyFailures, match="rows failed, more than allowed; row 1"):
            folder.run(max_failed=limit, output=folder.path / f"out{limit}")
    folder.run(max_failed=4, output=folder.path / "out3")
    assert folder.report.num_failed == 4


def test_what_a_pipe_brought_is_kept_until_the_result_is_made(folder, monkeypatch):
    import io

    folder.write(some_rows())
    whole = folder.run(output=folder.path / "whole")
    for stop_after in (12, None):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(folder.input.read_bytes())))
        with LLM("fake") as llm:

            def script(step, plan, stop_after=stop_after):
                if step == stop_after:
                    raise Stopped

            llm._assembly.runtime.script = script
            if stop_after is None:
                report = llm.run_file("-", folder.output, sampling_params=SAMPLED)
            else:
                with pytest.raises(Stopped):
                    llm.run_file("-", folder.output, sampling_params=SAMPLED)
    assert report.num_resumed > 0
    assert folder.output.read_bytes() == whole


@pytest.mark.parametrize("num_rows", [1, 20])
def test_plans_of_small_windows_give_the_same_file(folder, monkeypatch, num_rows):
    folder.write(some_rows())
    whole = folder.run(output=folder.path / "whole")
    monkeypatch.setattr("pagedllm.jobs.planned.SCAN_ROWS", num_rows)
    monkeypatch.setattr("pagedllm.jobs.planned.MAX_ROWS", num_rows)
    assert folder.run() == whole


def test_what_changed_is_counted_once_all_windows_are_read(folder, monkeypatch, caplog):
    caplog.set_level("INFO", "pagedllm")
    monkeypatch.setattr("pagedllm.jobs.planned.SCAN_ROWS", 10)
    monkeypatch.setattr("pagedllm.jobs.planned.MAX_ROWS", 10)
    rows = [{"prompt": f"{i}"} for i in range(40)]
    folder.write(rows)
    folder.run()
    rows[3]["prompt"] = "changed"
    folder.write([*rows[:35], {"prompt": "new"}])
    folder.run()
    told = [record.message for record in caplog.records if record.message.startswith("continuing")]
    assert told[-1] == "continuing: 34 of 36 rows done; in the input since: 2 changed, 4 vanished"
    assert not any("since" in text for text in told[:-1])
