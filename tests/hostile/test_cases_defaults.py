"""CASES A22 and A25: what is in force where the caller says nothing, and that it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedllm import SamplingParams
from tests.hostile.harness import GREEDY, completion, copied, fixed, open_llm
from tests.tiny import END, EOS

CONFIG = {"temperature": 0.1, "top_k": 5, "max_new_tokens": 7, "eos_token_id": [EOS, END], "do_sample": True}


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


def test_a22_what_the_default_cuts_is_seen_in_the_output_in_files_and_in_one_notice(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(folder, max_model_len=512) as llm:
        endless = SamplingParams(temperature=0, logits_processors=[fixed({9: 5.0})])
        short = SamplingParams(temperature=0, stop_token_ids=[9], logits_processors=[fixed({9: 5.0})])
        outputs = llm.generate(["one"] * 5, [endless] * 3 + [short] * 2, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 3 + ["stop"] * 2
        assert [len(o.outputs[0].token_ids) for o in outputs] == [256] * 3 + [1] * 2
        assert "finish_reason='length'" in repr(outputs[0])
        assert "finish_reason='stop'" in repr(outputs[3])
        assert [row["finish_reason"] for row in outputs.to_dicts()] == ["length"] * 3 + ["stop"] * 2
        notice = "3 of 5 outputs were cut at max_tokens=256 (the default): pass max_tokens=... or None"
        assert messages(caplog) == [notice]
        (tmp_path / "in.jsonl").write_text('{"prompt": "one"}\n')
        report = llm.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sampling_params={"max_tokens": 3})
        row = json.loads((tmp_path / "out.jsonl").read_text())
        assert (row["finish_reason"], row["completion_tokens"], report.num_cut) == ("length", 3, 1)


def test_a25_none_takes_the_checkpoints_values_and_says_so_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(copied(folder, tmp_path / "model", **CONFIG)) as llm:
        explicit = SamplingParams(temperature=0.1, top_k=5, max_tokens=7, seed=3)
        outputs = [llm.generate("one two", use_tqdm=False)[0] for _ in range(3)]
        assert all(len(o.outputs[0].token_ids) <= 7 for o in outputs)
        told = [m for m in messages(caplog) if m.startswith("sampling_params=None")]
        assert told == [
            "sampling_params=None: sampling by temperature=0.1, top_k=5, max_tokens=7 (generation_config.json)"
        ]
        llm.reset_seed(3)
        by_default = llm.generate("one two", use_tqdm=False)[0].outputs[0].token_ids
        llm.reset_seed(3)
        explicit.seed = None
        assert llm.generate("one two", explicit, use_tqdm=False)[0].outputs[0].token_ids == by_default


def test_a25_given_params_are_neutral_where_they_say_nothing_and_explicit_values_always_win(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(folder) as plain, open_llm(copied(folder, tmp_path / "model", **CONFIG)) as llm:
        for params in (
            SamplingParams(max_tokens=20, ignore_eos=True),
            SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True),
        ):
            for engine in (plain, llm):
                engine.reset_seed(5)
            expected = completion(plain.generate("one two", params, use_tqdm=False)).token_ids
            assert completion(llm.generate("one two", params, use_tqdm=False)).token_ids == expected
            assert len(expected) == 20
        assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 0, 20)
    told = [m for m in messages(caplog) if "generation_config.json" in m]
    assert told == [
        "sampling_params as given; generation_config.json is not applied: temperature=0.1, top_k=5, max_tokens=7"
    ]


@pytest.mark.parametrize("params", [None, GREEDY.clone()])
def test_a25_eos_ids_are_kept_whichever_rule_holds(folder: Path, tmp_path: Path, params: SamplingParams | None) -> None:
    for setting, ends in (("auto", True), ("none", False)):
        with open_llm(copied(folder, tmp_path / setting, **CONFIG), generation_config=setting) as llm:
            only_end = SamplingParams(max_tokens=3, allowed_token_ids=[END])
            if params is not None:
                only_end = params.clone()
                only_end.ignore_eos, only_end.max_tokens, only_end.allowed_token_ids = False, 3, [END]
            output = completion(llm.generate("one", only_end, use_tqdm=False))
            assert (output.finish_reason, output.stop_reason) == (("stop", END) if ends else ("length", None))


def test_a25_generation_config_none_ignores_the_file(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(copied(folder, tmp_path / "model", **CONFIG), generation_config="none") as llm:
        llm.generate("one", use_tqdm=False)
    assert messages(caplog)[0] == (
        "sampling_params=None: sampling by temperature=1.0 (the default), max_tokens=256 (the default)"
    )
