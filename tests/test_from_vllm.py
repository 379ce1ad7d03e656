"""docs/from_vllm.md, walked: every keyword in it does what its class says, and every keyword of ours is in it.

`python -m tests.test_from_vllm` writes the tables.
"""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pagedllm import LLM, BeamSearchParams, NotSupportedError, SamplingParams
from pagedllm.beam_search_params import RENAMED_BEAM_SEARCH_PARAMS
from pagedllm.keywords import RENAMED_LLM_KEYWORDS, RENAMED_SAMPLING_PARAMS
from pagedllm.vllm_keywords import (
    FOREIGN_BEAM_SEARCH_PARAMS,
    FOREIGN_LLM_KEYWORDS,
    FOREIGN_SAMPLING_PARAMS,
    Foreign,
)

pytestmark = pytest.mark.usefixtures("no_model")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from_vllm.md"
TABLES = re.compile(r"^## (LLM|SamplingParams|BeamSearchParams)\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(\w+)` \| (same|ours|harmless|not here|renamed) \| (.*) \|$", re.MULTILINE)
OURS_LLM = {"device", "kernels", "deterministic", "num_threads", "generation_config", "gguf_file", "chat_template"}
OURS_BEAMS = {"length_penalty", "early_stopping", "stop_token_ids", "skip_special_tokens"}
OWNERS = {
    "LLM": (LLM, FOREIGN_LLM_KEYWORDS, RENAMED_LLM_KEYWORDS, OURS_LLM),
    "SamplingParams": (SamplingParams, FOREIGN_SAMPLING_PARAMS, RENAMED_SAMPLING_PARAMS, set()),
    "BeamSearchParams": (BeamSearchParams, FOREIGN_BEAM_SEARCH_PARAMS, RENAMED_BEAM_SEARCH_PARAMS, OURS_BEAMS),
}
HARMLESS_VALUES = (1, True, 0, False, "auto", "generate", 4, 0.0, None)


def accepted_names(owner: str) -> list[str]:
    names = list(inspect.signature(LLM).parameters) if owner == "LLM" else [f.name for f in fields(OWNERS[owner][0])]
    return [name for name in names if name != "model"]


def foreign_of(owner: str) -> dict[str, Foreign]:
    return dict(OWNERS[owner][1])


def renamed_of(owner: str) -> dict[str, str]:
    return OWNERS[owner][2]


def make(owner: str, **keywords) -> object:
    arguments = {"LLM": ("fake",), "SamplingParams": (), "BeamSearchParams": (2,)}[owner]
    return OWNERS[owner][0](*arguments, **keywords)


def harmless_value(entry: Foreign) -> object:
    return next(value for value in HARMLESS_VALUES if entry.is_harmless(value))


def wanted_rows(owner: str) -> list[tuple[str, str, str]]:
    rows = [(name, "ours" if name in OWNERS[owner][3] else "same", "") for name in accepted_names(owner)]
    for name, entry in foreign_of(owner).items():
        if entry.reason and not entry.way_out:
            rows.append((name, "harmless", entry.reason))
        elif entry.reason:
            rows.append((name, "harmless", f"only {harmless_value(entry)!r}: {entry.reason}; else {entry.way_out}"))
        else:
            rows.append((name, "not here", entry.way_out))
    rows += [(name, "renamed", text) for name, text in renamed_of(owner).items()]
    return rows


def rows_of_page() -> dict[str, list[tuple[str, str, str]]]:
    text = PAGE.read_text(encoding="utf-8")
    return {m[1]: [tuple(row) for row in ROW.findall(m[0])] for m in TABLES.finditer(text)}  # type: ignore[misc]


@pytest.mark.parametrize("owner", OWNERS)
def test_the_page_lists_every_keyword_once(owner):
    assert rows_of_page()[owner] == wanted_rows(owner)
    names = [name for name, _, _ in wanted_rows(owner)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("owner", OWNERS)
def test_harmless_keywords_are_accepted_with_one_notice(owner, caplog):
    for name, kind, _ in rows_of_page()[owner]:
        if kind == "harmless":
            caplog.clear()
            entry = foreign_of(owner)[name]
            make(owner, **{name: harmless_value(entry)})
            texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
            assert texts == [f"{name}={harmless_value(entry)!r} has no effect: {entry.reason}"]


@pytest.mark.parametrize("owner", OWNERS)
def test_what_is_not_here_is_refused_with_the_way_out(owner, caplog):
    for name, entry in foreign_of(owner).items():
        if entry.way_out:
            with pytest.raises(NotSupportedError) as caught:
                make(owner, **{name: "something"})
            assert str(caught.value) == f"{owner}: {name}='something' is not supported: {entry.way_out}"
        if not entry.reason:
            make(owner, **{name: None})
    assert caplog.records == []


@pytest.mark.parametrize("owner", OWNERS)
def test_dead_names_say_what_to_use_and_unknown_ones_the_nearest(owner):
    for name, kind, text in rows_of_page()[owner]:
        if kind == "renamed":
            with pytest.raises(TypeError) as caught:
                make(owner, **{name: 1})
            assert str(caught.value) == f"{owner} has no parameter {name!r}: {text}"
    nearest = {
        "LLM": ("max_modellen", "max_model_len"),
        "SamplingParams": ("temprature", "temperature"),
        "BeamSearchParams": ("beamwidth", "beam_width"),
    }[owner]
    with pytest.raises(TypeError, match=f"did you mean '{nearest[1]}'"):
        make(owner, **{nearest[0]: 1})


def test_score_says_what_it_means_elsewhere(caplog):
    with LLM("fake") as llm, pytest.raises(NotSupportedError, match=r"similarity of texts.*loglikelihood"):
        llm.score("a", "b")


def write_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for owner in OWNERS:
        lines = [f"## {owner}", "| keyword | class | |", "|---|---|---|"]
        lines += [f"| `{name}` | {kind} | {note} |" for name, kind, note in wanted_rows(owner)]
        table = "\n".join(lines) + "\n\n"
        text = TABLES.sub(lambda m, owner=owner, table=table: table if m[1] == owner else m[0], text)
    PAGE.write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_tables()
