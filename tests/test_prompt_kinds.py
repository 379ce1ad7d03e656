"""What the libraries of tables give as prompts: taken where it is one column, refused by name where it is a table."""

from __future__ import annotations

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from pagedllm import RequestError, SamplingParams

pytestmark = pytest.mark.usefixtures("no_model")

GREEDY = SamplingParams(temperature=0, max_tokens=3)
TEXTS = ["ab", "cd", "e"]


COLUMNS = {
    "pandas": lambda: pd.DataFrame({"text": TEXTS}, index=[7, 7, 9])["text"],
    "pandas object": lambda: pd.Series(TEXTS, dtype=object),
    "polars": lambda: pl.DataFrame({"text": TEXTS})["text"],
    "numpy": lambda: np.array(TEXTS),
    "pyarrow": lambda: pa.array(TEXTS),
    "pyarrow chunked": lambda: pa.table({"text": TEXTS})["text"],
    "datasets": lambda: datasets.Dataset.from_dict({"text": TEXTS})["text"],
    "generator": lambda: (text for text in TEXTS),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_of_any_library_is_a_list_of_prompts(llm, kind):
    expected = llm.generate(TEXTS, GREEDY)
    assert llm.generate(COLUMNS[kind](), GREEDY).texts == expected.texts
    outputs = list(llm.generate_iter(COLUMNS[kind](), GREEDY, ordered=True))
    assert [output.prompt for output in outputs] == TEXTS
    assert [output.text for output in outputs] == expected.texts


TABLES = {
    "pandas": (lambda: pd.DataFrame({"text": TEXTS}), "prompts is a DataFrame: pass one column of it, df['column']"),
    "polars": (lambda: pl.DataFrame({"text": TEXTS}), "prompts is a DataFrame: pass one column of it, df['column']"),
    "pyarrow": (lambda: pa.table({"text": TEXTS}), "prompts is a Table: pass one column of it, df['column']"),
    "datasets": (
        lambda: datasets.Dataset.from_dict({"text": TEXTS}),
        "prompts is a Dataset: pass one column of it, df['column']",
    ),
    "dict": (lambda: {"text": TEXTS}, "prompts is a dict of columns: pass one of them, df['column']"),
    "bytes": (lambda: b"ab", "prompts is bytes: decode it first, prompts.decode('utf-8')"),
    "set": (lambda: {"ab"}, "prompts is a set, which has no order: pass a list"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_refused_by_name(llm, kind):
    make, text = TABLES[kind]
    for call in (llm.generate, llm.generate_iter):
        with pytest.raises(TypeError) as caught:
            call(make(), GREEDY)
        assert str(caught.value) == text


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (pd.Series(["a", None], dtype=object), "None (NoneType)"),
        (pd.Series(["a", float("nan")], dtype=object), "nan (float)"),
        (pd.Series(["a", pd.NA], dtype="string"), "<NA> (NAType)"),
        (pl.Series(["a", None]), "None (NoneType)"),
        (pa.array(["a", None]), "None (NoneType)"),
    ],
    ids=["pandas None", "pandas nan", "pandas NA", "polars", "pyarrow"],
)
def test_a_missing_value_is_refused_by_its_place(llm, column, shown):
    with pytest.raises(RequestError) as caught:
        llm.generate(column, GREEDY)
    assert str(caught.value).startswith(f"prompts[1] is {shown}, not a str")
    assert caught.value.index == 1


def test_messages_in_generate_point_to_chat(llm):
    messages = [{"role": "user", "content": "hi"}]
    for prompts in (messages, [messages]):
        with pytest.raises(RequestError, match=r"^prompts\[0\] looks like chat messages: call llm\.chat\(\.\.\.\)$"):
            llm.generate(prompts, GREEDY)


def test_outputs_become_a_pandas_frame_with_the_row_schema(llm):
    frame = llm.generate(["ab", None], GREEDY, on_error="return").to_pandas()
    assert list(frame.columns) == [
        "prompt",
        "output",
        "finish_reason",
        "stop_reason",
        "prompt_tokens",
        "completion_tokens",
        "error",
        "row",
    ]
    assert frame["prompt_tokens"].tolist() == [3, 0]
    assert frame["finish_reason"].tolist() == ["length", "error"]
    assert frame["error"][1].startswith("invalid_parameter: prompts[1] is None")


def test_the_notebook_view_escapes_and_shows_20_rows(llm):
    html = llm.generate(["<script>alert('&')</script>"] * 23, GREEDY)._repr_html_()
    assert html.count("<tr>") == 21
    assert "<script>" not in html
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in html
    assert html.endswith("</table><p>3 more</p>")
    assert "more" not in llm.generate(["a"] * 20, GREEDY)._repr_html_()
