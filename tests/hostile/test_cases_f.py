"""CASES (f): notebooks and scripts."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pagedllm import LLM, SamplingParams
from pagedllm.errors import ModelError, NotEnoughMemoryError
from pagedllm.runtime import footprint
from pagedllm.runtime.device import MemoryLimits
from tests.hostile.harness import GREEDY, answers, assert_nothing_left, open_llm

NOISE = """
import logging, sys
how = sys.argv[2]
def configure():
    logging.basicConfig(level=logging.DEBUG, format="ROOT %(name)s %(message)s")
if how == "before":
    configure()
from pagedllm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
with LLM(sys.argv[1], max_model_len=64, kv_cache_memory_bytes=8 << 20, num_threads=1, dtype="float32") as llm:
    print("loaded", file=sys.stderr, flush=True)
    for _ in range(300):
        llm.generate("one", params)
    if how == "after":
        configure()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    llm.generate(["one"] * 300, params)
    llm.generate(["one"] * 3, params, use_tqdm=False)
assert (root.handlers, root.level) == (handlers, level)
assert logging.getLogger("pagedllm").handlers == [] and logging.getLogger("pagedllm").level == logging.NOTSET
"""


@pytest.mark.parametrize("how", ["before", "after"])
def test_f4_no_line_per_request_and_no_handler_whenever_the_root_logger_is_configured(
    folder: Path, how: str, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("w") as stderr:
        done = subprocess.run(
            [sys.executable, "-c", NOISE, str(folder), how], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    before, _, after = (tmp_path / "stderr").read_text().partition("loaded\n")
    assert (done.returncode, done.stdout) == (0, ""), before
    # a long call tells once what limited it; 300 short ones and 3 prompts tell nothing
    assert [line.partition(" in ")[0] for line in after.splitlines()] == ["ROOT pagedllm 300 prompts"]
    if how == "after":
        assert before == ""
    else:
        assert "ROOT pagedllm memory: weights" in before  # the user's own handler hears us


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_f4_the_bar_is_quiet_where_stderr_is_no_terminal(
    llm: LLM, use_tqdm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagedllm.progress.DELAY_SECONDS", 0)
    llm.generate(["one", "two"], GREEDY, use_tqdm=use_tqdm)
    llm.chat([{"role": "user", "content": "one"}], GREEDY, use_tqdm)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("settings", "kind", "cause"),
    [
        ({"model": "/nowhere/model"}, ModelError, "/nowhere/model does not exist: pass the path of a model folder"),
        ({"dtype": "int3"}, ValueError, "dtype must be one of ['auto', 'bf16', 'bfloat16'"),
        ({"kernels": "avx9"}, ValueError, "kernels must be"),
        ({"max_model_len": 1 << 20}, ValueError, "max_model_len must be at most 512, the length in the model's config"),
        (
            {"kv_cache_memory_bytes": 10},
            ValueError,
            "no memory for a KV cache: kv_cache_memory_bytes=10 holds no block",
        ),
    ],
)
def test_f5_the_exception_itself_says_the_cause_in_one_line(
    folder: Path, settings: dict[str, object], kind: type[Exception], cause: str
) -> None:
    with pytest.raises(kind) as caught:
        open_llm(**{"folder": folder, **settings}) if "model" not in settings else LLM(str(settings["model"]))
    assert str(caught.value).startswith(cause)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_f6_a_cell_may_run_again_and_again(folder: Path) -> None:
    expected = None
    for _ in range(3):
        llm = open_llm(folder)  # the one before lives until this one exists
        outputs = answers(llm.generate(["one two", "three"], GREEDY, use_tqdm=False))
        assert expected in (None, outputs)
        expected = outputs
    llm.close()


def test_f6_an_interrupted_cell_runs_again_as_if_nothing_had_happened(llm: LLM) -> None:
    expected = answers(llm.generate(["one two", "three"], GREEDY, use_tqdm=False))

    def interrupt(output: list[int], logits: object) -> object:
        if len(output) == 3:
            raise KeyboardInterrupt
        return logits

    interrupted = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logits_processors=[interrupt])
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(["one two", "three"], interrupted, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in caught.value.outputs] == [3, 3]
    assert_nothing_left(llm)
    assert answers(llm.generate(["one two", "three"], GREEDY, use_tqdm=False)) == expected


def test_f6_out_of_memory_names_the_llm_that_is_still_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(folder)
    monkeypatch.setattr(footprint, "read_memory_limits", lambda: MemoryLimits(1000, 1000, 0))
    with pytest.raises(NotEnoughMemoryError, match=r"an LLM of .*/llama is open in this process: close\(\) it first$"):
        llm = open_llm(folder)
    llm.close()
    page = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
    assert "`llm.close()` first, or `with`" in page.read_text()


def test_f4_the_librarys_logger_is_quiet_about_itself_by_default(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(folder):
        assert [r.message for r in caplog.records if r.name == "pagedllm" and r.levelno >= logging.WARNING] == []
