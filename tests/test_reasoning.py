"""Thinking models: what stands between the think tags goes to .reasoning, the rest is the text."""

from __future__ import annotations

import pytest

from pagedllm import LLM, SamplingParams
from pagedllm.reasoning import Thinking, opens_thought
from tests.fake_assembly import EOS, fake_assemble


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning", "answer"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        (False, "\n<think>hm</think>yes", "hm", "yes"),
        (False, "<think>\n\n</think>\n\nyes", "", "yes"),
        (False, "<think>cut he", "cut he", ""),
        (True, "hm\n</think>\n\nyes", "hm", "yes"),
        (True, "cut here", "cut here", ""),
        (False, "no thought", "", "no thought"),
        (False, "the tag <think> opens, </think> closes", "", "the tag <think> opens, </think> closes"),
    ],
)
def test_a_text_is_split_at_the_tags_also_when_cut_or_opened_in_the_prompt(is_open, text, reasoning, answer):
    assert Thinking(is_open).split(text) == (reasoning, answer)


def test_a_prompt_opens_a_thought_by_its_last_word():
    assert opens_thought("[assistant]<think>\n")
    assert not opens_thought("what is <think> for?")
    assert not opens_thought("[assistant]<think></think>\n")


def llm_that_says(monkeypatch, text: str, thinks: bool = True) -> LLM:
    monkeypatch.setattr("pagedllm.llm.assemble", lambda config: fake_assemble(config, thinks=thinks))
    llm = LLM("fake")
    ids = [byte + 3 for byte in text.encode()] + [EOS]
    llm._assembly.runtime.forced = lambda tokens, data: ids[len(tokens) - data.num_prompt_tokens]
    return llm


def test_an_output_of_a_thinking_model_has_both_parts(monkeypatch):
    llm = llm_that_says(monkeypatch, "<think>hm</think>yes")
    (output,) = outputs = llm.chat([{"role": "user", "content": "a"}], SamplingParams(temperature=0))
    assert (output.text, output.outputs[0].reasoning) == ("yes", "hm")
    assert (outputs.to_dicts()[0]["output"], outputs[0].outputs[0].reasoning) == ("yes", "hm")


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_thought_that_the_prompt_opened_is_known(monkeypatch, as_ids):
    llm = llm_that_says(monkeypatch, "hm</think>yes")
    monkeypatch.setattr("pagedllm.request_builder.NUM_LAST_TOKENS", 9)  # this tokenizer's tag is seven tokens
    prompt = "a<think>\n"
    (output,) = llm.generate([[byte + 3 for byte in prompt.encode()] if as_ids else prompt])
    assert (output.text, output.outputs[0].reasoning) == ("yes", "hm")


def test_another_models_tags_are_text(monkeypatch):
    (output,) = outputs = llm_that_says(monkeypatch, "<think>hm</think>yes", thinks=False).generate("a")
    assert (output.text, output.outputs[0].reasoning) == ("<think>hm</think>yes", None)
    assert "reasoning" not in outputs.to_dicts()[0]
