"""--retry cut: rows that a length ended go on where they stopped, and the result is that of a longer run."""

from __future__ import annotations

import json

import pytest

from pagedllm import LLM
from tests.fake_assembly import fake_assemble
from tests.hostile.harness import open_llm
from tests.tiny import save_tiny_model

ROWS = [
    {"prompt": "hello"},
    {"prompt": "hello", "sampling_params": {"temperature": 1.0}},
    {"prompt": "b", "sampling_params": {"repetition_penalty": 1.5, "frequency_penalty": 1, "temperature": 0.7}},
    {"prompt": "c", "sampling_params": {"min_tokens": 7, "stop": ["e", "th"], "temperature": 1.5}},
    {"prompt": "d", "sampling_params": {"stop": ["zq", "a"], "include_stop_str_in_output": True, "seed": 4}},
    {"prompt": "e", "sampling_params": {"max_tokens": 3}},
    {"prompt": "f", "sampling_params": {"bad_words": ["e"], "logit_bias": {"70": 5.0}}},
]


class Stopped(Exception):
    pass


def texts(path):
    return [json.loads(line)["output"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 2, "block_size": 8, "max_num_batched_tokens": 8}], ids=str)
def test_cut_rows_go_on_to_just_what_a_longer_run_gives(tmp_path, sizes):
    folder = save_tiny_model(tmp_path / "model")
    (tmp_path / "in").write_text("\n".join(map(json.dumps, ROWS * 3)))
    with open_llm(folder, **sizes) as llm:

        def run(output, num_tokens, **options):
            params = {"max_tokens": num_tokens, "temperature": 0}
            return llm.run_file(tmp_path / "in", tmp_path / output, sampling_params=params, **options)

        run("out", 9)
        first = texts(tmp_path / "out")
        report = run("out", 24, retry="cut")
        whole = run("whole", 24)
        assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
        assert report.num_rows == whole.num_rows == 21
        assert any(len(a) < len(b) and b.startswith(a) for a, b in zip(first, texts(tmp_path / "out"), strict=True))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs eight greedy rows at once; gives the steps that it took."""
    variants = {}

    def assemble(config):
        assembly = fake_assemble(config)
        assembly.builder.rope_variant = lambda num_tokens: variants.get(num_tokens, 0)
        return assembly

    monkeypatch.setattr("pagedllm.llm.assemble", assemble)
    (tmp_path / "in").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(8)))

    def run(num_tokens, output="out", stop_after=None, params=None, **options):
        def script(step, plan):
            if step == stop_after:
                raise Stopped

        with LLM("fake", max_num_seqs=16, max_num_batched_tokens=1024) as llm:
            llm._assembly.runtime.script = script
            given = {"temperature": 0, "max_tokens": num_tokens, **(params or {})}
            try:
                llm.run_file(tmp_path / "in", tmp_path / output, sampling_params=given, **options)
            except Stopped:
                assert stop_after is not None
            return llm._assembly.runtime.num_steps

    run.variants = variants
    return run


@pytest.mark.parametrize("output", ["out", "out.csv", "out.parquet"])
def test_cut_rows_of_a_finished_job_compute_what_is_new_only(tmp_path, run, output):
    assert run(30, output) == 30
    assert run(34, output, retry="cut") == 4
    whole = "whole." + output.partition(".")[2]
    assert run(34, whole) == 34
    assert (tmp_path / output).read_bytes() == (tmp_path / whole).read_bytes()


def test_cut_rows_of_a_stopped_job_go_on_too(tmp_path, run):
    run(30)
    run(50, retry="cut", stop_after=10)
    assert "out.partial" in {path.name for path in tmp_path.iterdir()}
    assert run(50, retry="cut") == 20
    run(50, "whole")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_row_whose_rope_variant_would_change_starts_anew(run):
    assert run(30) == 30
    run.variants.update({3 + 34: 1})  # BOS, p and a digit, and the tokens to come
    assert run(34, retry="cut") == 34


@pytest.mark.parametrize("params", [{"logprobs": 1}, {"n": 2, "temperature": 1}])
def test_rows_with_logprobs_or_several_outputs_start_anew(tmp_path, run, params):
    run(10, params=params)
    assert run(12, retry="cut", params=params) == 12
    run(12, "whole", params=params)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_beyond_what_the_manifest_keeps_rows_start_anew_with_the_same_result(tmp_path, run, monkeypatch):
    monkeypatch.setattr("pagedllm.jobs.recovery.MAX_CUT_BYTES", 200)
    run(30)
    assert run(34, retry="cut") == 34
    run(34, "whole")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
