"""The plan of a job: what is counted, what is measured, what people read, and that a dry run leaves no trace."""

from __future__ import annotations

import json
import os

import pytest

from pagedllm import LLM, SamplingParams
from pagedllm.engine.run_log import Work
from pagedllm.jobs import planned, tokens
from pagedllm.jobs.opening import open_job
from pagedllm.jobs.plan import JobPlan, Speed, duration

pytestmark = pytest.mark.usefixtures("no_model")

GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture
def plan_of(tmp_path):
    def plan_of(rows, output=tmp_path / "out.jsonl", llm_arguments=None, **options):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with LLM("fake", **(llm_arguments or {})) as llm:
            options.setdefault("sampling_params", GREEDY)
            with open_job(tmp_path / "in.jsonl", output, config=llm.config, **options) as job:
                return llm.plan_job(job)

    return plan_of


def test_rows_tokens_and_what_equal_rows_and_prefixes_save_are_counted(plan_of):
    shared = "s" * 31  # with BOS two blocks of 16
    rows = [{"prompt": shared + "a"}, {"prompt": "b"}, {"prompt": shared + "c"}, {"prompt": "b"}, {"prompt": 5}]
    plan = plan_of(rows)
    assert (plan.num_rows, plan.num_done, plan.num_refused, plan.num_equal, plan.num_to_run) == (5, 0, 1, 1, 3)
    assert plan.num_prompt_tokens == 33 + 2 + 33
    assert (plan.num_equal_tokens, plan.num_shared_tokens, plan.num_new_tokens) == (2, 32, 36)
    assert plan.max_output_tokens == 12
    assert plan.is_whole
    assert plan.first_prompt == shared + "a"
    assert plan.speed is not None  # a dry run measures however small the job is
    assert plan.speed.num_running == 3


def test_the_last_token_of_a_prompt_is_computed_though_its_block_is_shared(plan_of):
    """Two prompts of exactly two blocks that are equal, run twice since their params differ."""
    row = {"prompt": "s" * 31}
    assert plan_of([row, {**row, "sampling_params": {"max_tokens": 3}}]).num_shared_tokens == 16


def test_a_dry_run_writes_nothing_and_knows_what_is_done(tmp_path, plan_of):
    rows = [{"prompt": letter} for letter in "abc"]
    plan_of(rows)
    assert os.listdir(tmp_path) == ["in.jsonl"]
    with LLM("fake") as llm:
        llm.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params=GREEDY)
    finished = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    plan = plan_of([*rows, {"prompt": "d"}])
    assert (plan.num_done, plan.num_to_run) == (3, 1)
    (tmp_path / "in.jsonl").write_bytes(finished["in.jsonl"])
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == finished


def test_a_dry_run_refuses_what_a_run_would_refuse(tmp_path, plan_of):
    with LLM("fake") as llm:
        (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
        llm.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params=GREEDY)
    with pytest.raises(ValueError, match="another max_tokens: 4 -> 5"):
        plan_of([{"prompt": "a"}], sampling_params={"temperature": 0, "max_tokens": 5})


def test_a_calibration_changes_no_result(tmp_path, plan_of):
    """Neither seeds nor prefix hits of the job know of it."""
    rows = [{"prompt": "s" * 40 + letter} for letter in "abcdef"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = []
    for plans in (False, True):
        with LLM("fake") as llm, open_job(tmp_path / "in.jsonl", tmp_path / f"{plans}.jsonl", config=llm.config) as job:
            told = []
            report = llm.run_job(job, on_plan=told.append if plans else None)
            results.append((report.num_cached_tokens, (tmp_path / f"{plans}.jsonl").read_bytes()))
    assert results[0] == results[1]
    assert results[0][0] == 5 * 32


def test_the_plan_of_more_rows_than_one_covers_says_so_and_all_of_them_run(tmp_path, plan_of, monkeypatch):
    monkeypatch.setattr(planned, "SCAN_ROWS", 4)
    monkeypatch.setattr(planned, "MAX_ROWS", 8)
    monkeypatch.setattr(tokens, "MEMORY_BYTES", 64)  # token ids of each window go to a file
    rows = [{"prompt": f"{i % 5} {i}"} for i in range(30)]
    plan = plan_of(rows)
    assert (plan.num_rows, plan.is_whole) == (8, False)
    assert "8 in the first window, more follow" in plan.text()
    with LLM("fake") as llm:
        report = llm.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params=GREEDY)
        prompts = [row["prompt"] for row in rows]
        texts = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False).texts
    assert report.num_rows == 30
    assert report.knows_all_rows
    assert report.work == Work(30, report.num_prompt_tokens, 4 * 30)  # of all windows together
    assert report.ended.num_requests == 30
    assert report.seconds_left(30) == 0
    assert [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == texts
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl", "out.jsonl.manifest.json"]


ENGINE = {
    "model": "m",
    "device": "cpu",
    "dtype": "bfloat16",
    "kernels": "avx2",
    "num_threads": 2,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 512,
    "block_size": 16,
}


def test_the_text_for_people():
    plan = JobPlan(
        engine=ENGINE,
        num_rows=1200,
        is_whole=True,
        num_done=100,
        num_refused=1,
        num_equal=99,
        num_to_run=1000,
        num_prompt_tokens=40_000,
        num_equal_tokens=990,
        num_shared_tokens=10_000,
        num_samples=1000,
        max_output_tokens=256_000,
        num_blocks_wanted=11_000,
        num_blocks=1024,
        bytes_per_block=1 << 16,
        first_prompt="<s>hello\n" + "x" * 100,
        speed=Speed(3000.0, 1000.0, 93),
    )
    assert plan.text(12).splitlines() == [
        "model        m",
        "engine       cpu, bfloat16, avx2 kernels, 2 threads, max_num_seqs 128, max_num_batched_tokens 512",
        "rows         1,200: 100 done before, 1 refused, 99 equal to another, 1,000 to run",
        "tokens       in 40,000, out at most 256,000",
        "saved        990 input tokens of equal rows; 10,000 in shared prefixes (25 % of the input)",
        "KV cache     1,024 blocks of 16 tokens (64.0 MiB); all rows at once would take 11,000: about 93 run at a time",
        "time         about 2 min 18 s if outputs take half of their max_tokens, 4 min 26 s if all (measured: in 3,000 "
        "tokens/s, out 1,000 tokens/s with 93 rows at a time)",
        'first prompt "<s>hello\\nxxx" and 97 more characters',
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (12.3, "12 s"), (100, "1 min 40 s"), (7201, "2 h 0 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
