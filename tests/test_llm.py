"""LLM over the real engine and a runner without a model: results, errors, interrupts, locks, notices."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import logging
import pickle
import threading
import weakref
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from pagedllm import LLM, BatchError, PagedLLMError, RequestError, SamplingParams
from pagedllm.config import EngineConfig
from pagedllm.engine.scheduler_output import ModelRunnerOutput
from tests.fake_assembly import END, EOS, VOCAB_SIZE, fake_assemble, runner_of

pytestmark = pytest.mark.usefixtures("no_model")

GREEDY = SamplingParams(temperature=0, max_tokens=5)


def make_llm(monkeypatch, **options) -> LLM:
    monkeypatch.setattr("pagedllm.llm.assemble", lambda config: fake_assemble(config, **options))
    return LLM("fake")


def assert_nothing_left(llm: LLM) -> None:
    pool = llm._assembly.engine.scheduler.kv_cache.pool
    assert not llm._assembly.engine.has_unfinished_requests()
    assert pool.num_free == llm._assembly.num_blocks


def notices(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# What comes back


def test_outputs_are_in_input_order_whatever_their_lengths(llm):
    prompts = [f"prompt {i}" for i in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (i * 7) % 13) for i in range(40)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.index for output in outputs] == list(range(40))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + (i * 7) % 13 for i in range(40)]
    assert_nothing_left(llm)


def test_an_output_tells_prompt_ids_text_and_why_it_ended(llm):
    output = llm.generate("ab", GREEDY)[0]
    completion = output.outputs[0]
    assert output.prompt_token_ids == [0, 100, 101]
    assert len(completion.token_ids) == 5
    assert completion.text == "".join(chr(token_id - 3) for token_id in completion.token_ids) == output.text
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert (output.finished, output.error, output.num_cached_tokens) == (True, None, 0)
    assert (output.metrics.num_prompt_tokens, output.metrics.num_output_tokens) == (3, 5)


@pytest.mark.parametrize("end", [EOS, END])
def test_every_eos_id_ends_the_text_and_is_told(llm, end):
    runner_of(llm).forced = lambda tokens, data: end if len(tokens) == 5 else None
    completion = llm.generate("ab", GREEDY)[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("stop", end, 3)
    assert len(completion.text) == 2


def test_request_ids_are_unique_over_calls(llm):
    ids = [output.request_id for _ in range(3) for output in llm.generate(["a", "b"], GREEDY)]
    assert len(set(ids)) == 6


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


def test_max_tokens_0_gives_an_empty_text(llm):
    output = llm.generate("ab", SamplingParams(max_tokens=0))[0]
    assert (output.text, output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("", "length", [])


def test_max_tokens_none_goes_to_max_model_len(llm):
    output = llm.generate([[5] * 100], SamplingParams(temperature=0, max_tokens=None))[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (28, "length")


def test_no_text_without_detokenize(llm):
    completion = llm.generate("ab", SamplingParams(max_tokens=3, detokenize=False))[0].outputs[0]
    assert completion.text is None
    assert len(completion.token_ids) == 3


def test_logprobs_are_dicts_with_the_sampled_token_first(llm):
    completion = llm.generate("ab", SamplingParams(temperature=0, max_tokens=4, logprobs=2))[0].outputs[0]
    assert len(completion.logprobs) == 4
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entries)) == token_id
        assert (entries[token_id].logprob, entries[token_id].rank) == (-1.0, 3)
        assert entries[token_id].decoded_token == chr(token_id - 3)
        assert set(entries) == {token_id, 100, 101}
    np.testing.assert_array_equal(completion.token_logprobs, np.array([-1.0] * 4, np.float32))
    assert completion.cumulative_logprob == -4.0


def test_no_logprobs_unless_asked(llm):
    completion = llm.generate("ab", GREEDY)[0].outputs[0]
    assert (completion.logprobs, completion.token_logprobs, completion.cumulative_logprob) == (None, None, None)


def test_outputs_pickle_and_hold_no_engine(llm):
    outputs = llm.generate(["ab", "cd"], SamplingParams(temperature=0, max_tokens=3, logprobs=1))
    copy = pickle.loads(pickle.dumps(outputs))
    assert copy.texts == outputs.texts
    assert copy[0].outputs[0].logprobs == outputs[0].outputs[0].logprobs
    engine = weakref.ref(llm._assembly.engine)
    llm.close()
    gc.collect()
    assert engine() is None
    assert outputs[0].outputs[0].logprobs[0]


# Prompts


def test_the_same_text_in_every_form(llm):
    ids = [0, 100, 101]
    forms = ["ab", ["ab"], ("ab",), ids, [ids], tuple(ids), np.array(ids), [np.array(ids)], np.array(["ab"])]
    forms += [iter(["ab"]), {"prompt": "ab"}, [{"prompt_token_ids": ids}], [{"prompt_token_ids": np.array(ids)}]]
    texts = [llm.generate(form, GREEDY).texts for form in forms]
    assert texts == [texts[0]] * len(forms)


def test_metadata_comes_back(llm):
    outputs = llm.generate([{"prompt": "a", "metadata": {"id": 7}}, {"prompt_token_ids": [5], "metadata": "x"}], GREEDY)
    assert [output.metadata for output in outputs] == [{"id": 7}, "x"]


def test_messages_in_a_dict_go_through_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    generated = llm.generate({"messages": messages}, GREEDY)[0]
    assert generated.prompt == "[user]hi[assistant]"
    assert generated.prompt_token_ids[0] != 0  # the template writes BOS, the tokenizer adds none
    assert llm.chat(messages, GREEDY)[0].text == generated.text


def test_chat_takes_one_conversation_or_many(llm):
    one = [{"role": "user", "content": "hi"}]
    assert len(llm.chat(one, GREEDY)) == 1
    assert llm.chat([one, one], GREEDY).texts == llm.chat(one, GREEDY).texts * 2
    assert llm.chat([one], GREEDY, add_generation_prompt=False)[0].prompt == "[user]hi"


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        (None, "prompts must be a str, a list of token ids"),
        (5, "got 5 (int)"),
        (b"ab", "prompts is bytes: decode it first, prompts.decode('utf-8')"),
        ({"a", "b"}, "prompts is a set, which has no order: pass a list"),
        ({"text": ["a"]}, "prompts is a dict of columns: pass one of them, df['column']"),
        ({"prompt": ["a", "b"]}, "prompts is a dict of columns: pass one of them, df['column']"),
    ],
)
def test_what_is_no_list_of_prompts_is_a_type_error(llm, prompts, text):
    with pytest.raises(TypeError) as caught:
        llm.generate(prompts, GREEDY)
    assert text in str(caught.value)


def test_a_table_is_refused_and_its_column_named(llm):
    class DataFrame:
        columns = ("text",)

    with pytest.raises(TypeError, match=r"prompts is a DataFrame: pass one column of it, df\['column'\]"):
        llm.generate(DataFrame(), GREEDY)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (float("nan"), "prompts[1] is nan (float)"),
        (None, "prompts[1] is None (NoneType)"),
        (b"ab", "prompts[1] is bytes: decode it first, .decode('utf-8')"),
        (7, "prompts[1] is 7 (int)"),
        ([{"role": "user", "content": "x"}], "prompts[1] looks like chat messages: call llm.chat(...)"),
        ({"role": "user", "content": "x"}, "prompts[1] looks like chat messages: call llm.chat(...)"),
        (["a", "b"], "prompts[1] must be a list of ints: item 0 is 'a' (str)"),
        ([1, 2.5], "prompts[1] must be a list of ints: item 1 is 2.5 (float)"),
        ([1, True], "prompts[1] must be a list of ints: item 1 is True (bool)"),
        ({"promt": "a"}, "prompts[1] has an unknown key 'promt'"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "must have one of 'prompt', 'prompt_token_ids' and 'messages', got"),
        ({"prompt": 5}, "prompts[1]['prompt'] must be a str, got 5 (int)"),
        ({"messages": "hi"}, "prompts[1]['messages'] must be a list of messages, got 'hi' (str)"),
        ("a\ud800", "prompts[1]: the text holds half a surrogate pair at position 1"),
    ],
)
def test_a_bad_item_is_refused_by_its_place(llm, item, text):
    with pytest.raises(RequestError) as caught:
        llm.generate(["ok", item], GREEDY)
    assert text in str(caught.value)
    assert (caught.value.code, caught.value.index) == ("invalid_parameter", 1)
    assert_nothing_left(llm)


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, None, 5])
def test_chat_takes_nothing_but_conversations(llm, messages):
    with pytest.raises(TypeError, match="messages must be a list of dicts with 'role' and 'content'"):
        llm.chat(messages, GREEDY)


# Errors of prompts


@pytest.mark.parametrize(
    ("prompt", "code", "text"),
    [
        ([5] * 129, "prompt_too_long", "prompts[1]: 129 tokens exceed max_model_len 128 by 1"),
        ([5] * 5000, "prompt_too_long", "prompts[1]: 5,000 tokens exceed max_model_len 128 by 4,872"),
        ([5] * 128, "prompt_too_long", "prompts[1]: 128 tokens fill max_model_len 128: no room for one new token"),
        ([], "empty_prompt", "prompts[1]: the prompt has no tokens, and the tokenizer adds no BOS to start from"),
        ([5, VOCAB_SIZE], "token_out_of_range", f"prompts[1]: token id 259 at position 1 is not in [0, {VOCAB_SIZE})"),
        ([-1], "token_out_of_range", f"prompts[1]: token id -1 at position 0 is not in [0, {VOCAB_SIZE})"),
    ],
)
def test_a_prompt_that_cannot_run_is_an_error_before_any_work(llm, prompt, code, text):
    with pytest.raises(RequestError) as caught:
        llm.generate(["ok", prompt], GREEDY)
    assert (caught.value.code, caught.value.index, str(caught.value)) == (code, 1, text)
    assert runner_of(llm).num_steps == 0
    output = llm.generate(["ok", prompt], GREEDY, on_error="return")[1]
    assert (output.error.code, str(output.error), output.outputs, output.text) == (code, text, [], None)
    assert_nothing_left(llm)


def test_a_prompt_that_fills_max_model_len_runs_with_max_tokens_0(llm):
    assert llm.generate([[5] * 128], SamplingParams(max_tokens=0))[0].text == ""


def test_an_empty_text_runs_where_the_tokenizer_has_a_bos(monkeypatch):
    assert make_llm(monkeypatch).generate("", GREEDY)[0].prompt_token_ids == [0]
    with pytest.raises(RequestError, match=r"prompts\[0\]: the prompt has no tokens"):
        make_llm(monkeypatch, bos_token_id=None).generate("", GREEDY)


def test_several_bad_prompts_are_counted_and_the_first_five_listed(llm):
    prompts = ["ok"] * 5 + [[999]] * 7
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert str(caught.value) == (
        f"prompts[5]: token id 999 at position 0 is not in [0, {VOCAB_SIZE}) "
        "(7 of 12 prompts are refused: 5, 6, 7, 8, 9, ...)"
    )
    assert caught.value.index == 5


def test_on_error_return_answers_the_others(llm):
    outputs = llm.generate(["a", None, "b"], GREEDY, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs.texts[1] is None
    assert outputs[0].text == llm.generate("a", GREEDY)[0].text


def test_a_template_that_refuses_names_the_conversation(llm):
    good, bad = [{"role": "user", "content": "a"}], [{"role": "tool", "content": "b"}]
    with pytest.raises(RequestError) as caught:
        llm.chat([good, bad], GREEDY)
    assert str(caught.value) == "messages[1]: the chat template refuses: no tools here"
    assert (caught.value.code, caught.value.index) == ("template_error", 1)
    assert [o.error is None for o in llm.chat([good, bad], GREEDY, on_error="return")] == [True, False]


def test_contradictory_chat_flags_are_refused(llm):
    with pytest.raises(ValueError, match="continue_final_message=True needs add_generation_prompt=False"):
        llm.chat([{"role": "user", "content": "a"}], continue_final_message=True)


def test_on_error_has_two_values(llm):
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'return', got 'ignore'"):
        llm.generate("a", GREEDY, on_error="ignore")


def test_a_request_that_fails_while_running_costs_no_other_one(llm):
    runner_of(llm).forced = lambda tokens, data: -1 if tokens[1] == 101 and len(tokens) > 3 else None
    with pytest.raises(BatchError) as caught:
        llm.generate(["a", "b", "c"], GREEDY)
    outputs = caught.value.outputs
    assert [output.error and output.error.code for output in outputs] == [None, "non_finite_logits", None]
    assert [len(output.outputs) for output in outputs] == [1, 0, 1]
    assert str(caught.value).startswith("1 of 3 requests failed while running, the first: prompts[1]: ")
    assert pickle.loads(pickle.dumps(caught.value)).outputs.texts == outputs.texts
    assert llm.generate(["a", "b"], GREEDY, on_error="return")[1].error.code == "non_finite_logits"
    assert_nothing_left(llm)


# SamplingParams of a call


def test_one_sampling_params_per_prompt(llm):
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=4)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 4]


def test_a_length_mismatch_names_both_lengths(llm):
    with pytest.raises(ValueError, match="3 sampling_params for 2 prompts: pass one, or one per prompt"):
        llm.generate(["a", "b"], [GREEDY] * 3)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 0.5])
def test_sampling_params_of_another_type_are_a_type_error(llm, params):
    with pytest.raises(TypeError, match="sampling_params must be a SamplingParams or a list of them, got"):
        llm.generate("a", params)


def test_params_are_checked_on_use_and_one_of_a_list_is_its_prompts_error(llm):
    wrong = SamplingParams()
    wrong.top_p = 7
    with pytest.raises(RequestError, match=r"^top_p must be in \(0, 1\], got 7$"):
        llm.generate("a", wrong)
    with pytest.raises(RequestError, match=r"^sampling_params\[1\]: top_p must be in \(0, 1\], got 7$"):
        llm.generate(["a", "b"], [GREEDY, wrong])
    outputs = llm.generate(["a", "b"], [GREEDY, wrong], on_error="return")
    assert [output.error is None for output in outputs] == [True, False]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids must be ids in [0, 259), got 259"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias must be ids in [0, 259), got -1"),
        (SamplingParams(logprobs=21), "logprobs must be at most max_logprobs (20), or -1, got 21"),
    ],
)
def test_ids_and_logprobs_are_checked_against_the_model_before_any_work(llm, params, text):
    with pytest.raises(RequestError) as caught:
        llm.generate("a", params)
    assert str(caught.value) == text
    assert runner_of(llm).num_steps == 0


def test_params_assigned_to_something_unsupported_are_refused_in_their_place(llm):
    params = SamplingParams()
    params.structured_outputs = {"json": "{}"}
    with pytest.raises(RequestError, match=r"sampling_params\[0\]: structured_outputs"):
        llm.generate(["a"], [params])


def test_params_are_never_edited_and_later_edits_change_nothing(llm):
    params = SamplingParams(temperature=0, max_tokens=4, stop=["zz"], stop_token_ids=[5])
    before = params.clone()
    llm.generate(["a", "b"], params)
    assert params == before


def test_priority_needs_its_policy(llm):
    with pytest.raises(ValueError, match="priority needs LLM"):
        llm.generate(["a"], GREEDY, priority=[1])
    with LLM("fake", scheduling_policy="priority") as llm_with_policy:
        with pytest.raises(ValueError, match="1 priorities for 2 prompts"):
            llm_with_policy.generate(["a", "b"], GREEDY, priority=[1])
        assert (
            llm_with_policy.generate(["a", "b"], GREEDY, priority=[1, 0]).texts
            == llm.generate(["a", "b"], GREEDY).texts
        )


# Seeds


def test_two_calls_draw_differently_and_two_llms_agree(llm):
    params = SamplingParams(max_tokens=8)
    calls = [llm.generate(["a", "a"], params).texts for _ in range(2)]
    assert len({text for texts in calls for text in texts}) == 4
    with LLM("fake") as other:
        assert [other.generate(["a", "a"], params).texts for _ in range(2)] == calls
    with LLM("fake", seed=1) as other:
        assert other.generate(["a", "a"], params).texts != calls[0]


def test_a_refused_call_does_not_change_the_draws_of_the_next(llm):
    with pytest.raises(RequestError):
        llm.generate([[999]])
    with LLM("fake") as other:
        assert (
            other.generate("a", SamplingParams(max_tokens=8)).texts
            == llm.generate("a", SamplingParams(max_tokens=8)).texts
        )


def test_reset_seed_gives_what_a_new_llm_with_that_seed_gives(llm):
    params = SamplingParams(max_tokens=8)
    expected = [LLM("fake", seed=5).generate("a", params)[0].text, llm.generate("a", params)[0].text]
    llm.reset_seed(5)
    again = [llm.generate("a", params)[0].text]
    llm.reset_seed(0)
    assert [*again, llm.generate("a", params)[0].text] == expected
    assert expected[0] != expected[1]
    with pytest.raises(ValueError, match="seed must be an int, got '1'"):
        llm.reset_seed("1")


def test_an_own_seed_repeats_itself_anywhere(llm):
    params = SamplingParams(max_tokens=8, seed=5)
    first = llm.generate("a", params)[0].text
    assert llm.generate(["b", "a"], [SamplingParams(max_tokens=8), params])[1].text == first
    assert llm.generate("a", SamplingParams(max_tokens=8, seed=6))[0].text != first


def test_seed_minus_one_is_none(llm):
    texts = llm.generate(["a", "a"], SamplingParams(max_tokens=8, seed=-1)).texts
    assert texts[0] != texts[1]


# Defaults


def test_none_takes_the_generation_config_and_given_params_only_the_eos_ids(monkeypatch):
    llm = make_llm(monkeypatch, generation_config={"temperature": 0.0, "max_new_tokens": 6})
    assert len(llm.generate("a")[0].outputs[0].token_ids) == 6
    assert llm.generate("a").texts == llm.generate("a", SamplingParams(temperature=0, max_tokens=6)).texts
    assert len(llm.generate("a", SamplingParams(max_tokens=None))[0].outputs[0].token_ids) == 126


def test_what_is_in_force_is_told_once_and_again_when_it_changes(monkeypatch, caplog):
    llm = make_llm(monkeypatch, generation_config={"temperature": 0.5, "top_k": 5, "no_repeat_ngram_size": 3})
    for _ in range(2):
        llm.generate([[5]], None)
    for _ in range(2):
        llm.generate([[5]], SamplingParams(max_tokens=0))
    told = [text for text in notices(caplog) if "sampling_params" in text]
    assert told == [
        "sampling_params=None: sampling by temperature=0.5, top_k=5 (generation_config.json), "
        "max_tokens=256 (the default); not applied: no_repeat_ngram_size=3",
        "sampling_params as given; generation_config.json is not applied: temperature=0.5, top_k=5",
    ]


def test_a_generation_config_that_cannot_be_used_says_what_to_do(monkeypatch):
    llm = make_llm(monkeypatch, generation_config={"temperature": 5.0})
    with pytest.raises(
        ValueError, match=r"generation_config.json: temperature must be .* got 5.0; pass sampling_params"
    ):
        llm.generate("a")


def test_cut_outputs_are_counted_in_one_notice(llm, caplog):
    llm.generate(["a"] * 3 + [[5] * 100], SamplingParams(temperature=0))
    llm.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=4)])
    llm.generate(["a", "b"], [SamplingParams(max_tokens=0), SamplingParams(max_tokens=3, ignore_eos=True)])
    assert [text for text in notices(caplog) if "cut" in text] == [
        "4 of 4 outputs were cut at max_model_len=128",
        "2 of 2 outputs were cut at max_tokens=2 to 4: pass max_tokens=... or None",
    ]


def test_outputs_cut_at_the_default_say_so(monkeypatch, caplog):
    monkeypatch.setattr("pagedllm.llm.assemble", fake_assemble)
    with LLM("fake", max_model_len=512) as llm:
        llm.generate(["a", "b"], SamplingParams(temperature=0))
    assert notices(caplog)[-1] == (
        "2 of 2 outputs were cut at max_tokens=256 (the default): pass max_tokens=... or None"
    )


def test_a_second_bos_is_noticed(llm, caplog):
    llm._assembly.builder.tokenizer.encode = lambda text, add_special_tokens=True: [0, 0, 5]
    llm.generate(["a", "b"], GREEDY)
    assert sum("begins with the BOS token" in text for text in notices(caplog)) == 1


# Interrupts, failures, threads, the end


@pytest.mark.parametrize("step", range(8))
def test_an_interrupt_gives_what_there_is_and_the_next_call_is_clean(llm, step):
    expected = llm.generate(["a", "bb", "ccc"], GREEDY).texts

    def interrupt(number, plan):
        if number == base + step:
            raise KeyboardInterrupt

    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 8, 9)]
    base = runner_of(llm).num_steps
    runner_of(llm).script = interrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(["a", "bb", "ccc"], params)
    outputs = caught.value.outputs
    assert [output.finished for output in outputs] == [step >= 2, step >= 8, False]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [min(step, 2), step, step]
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "length" if step >= 2 else "abort",
        "abort",
        "abort",
    ]
    assert [len(output.text) for output in outputs] == [min(step, 2), step, step]
    assert f"{int(step >= 2)} of 3 outputs are finished" in str(caught.value)
    assert "e.outputs" in str(caught.value)
    runner_of(llm).script = lambda number, plan: None
    assert llm.generate(["a", "bb", "ccc"], GREEDY).texts == expected
    assert_nothing_left(llm)


@pytest.mark.parametrize("step", range(4))
def test_a_failing_step_raises_and_the_next_call_is_clean(llm, step):
    expected = llm.generate(["a", "b"], GREEDY).texts
    base = runner_of(llm).num_steps

    def fail(number, plan) -> ModelRunnerOutput | None:
        if number == base + step:
            raise OSError("the device is gone")
        return None

    runner_of(llm).script = fail
    with pytest.raises(OSError, match="the device is gone"):
        llm.generate(["a", "b"], GREEDY)
    runner_of(llm).script = lambda number, plan: None
    assert llm.generate(["a", "b"], GREEDY).texts == expected
    assert_nothing_left(llm)


def test_a_failing_prompt_iterator_and_a_failing_bar_leave_nothing(llm):
    def prompts():
        yield "a"
        raise OSError("disk")

    class Bar:
        def __init__(self, total, desc):
            self.left = 2

        def set_postfix_str(self, text, refresh):
            pass

        def update(self, n):
            self.left -= n
            if not self.left:
                raise OSError("display")

        def close(self):
            pass

    with pytest.raises(OSError, match="disk"):
        llm.generate(prompts(), GREEDY)
    with pytest.raises(OSError, match="display"):
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    assert_nothing_left(llm)
    assert len(llm.generate(["x"], GREEDY)) == 1


def test_a_callable_makes_the_bar_and_sees_every_prompt(llm):
    calls = []

    class Bar:
        def __init__(self, total, desc):
            calls.append((total, desc))

        def set_postfix_str(self, text, refresh):
            calls.append(text.partition(" ")[0])

        def update(self, n):
            calls.append(n)

        def close(self):
            calls.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert calls == [(2, "Processed prompts"), "in", 1, "in", 1, "closed"]


def test_no_bar_and_no_log_line_where_nobody_looks(llm, capsys, caplog):
    caplog.set_level(logging.DEBUG, logger="pagedllm")
    for _ in range(50):
        llm.generate("a", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


def test_the_bar_goes_to_stderr_of_a_terminal(llm, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, stdout = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("pagedllm.progress.DELAY_SECONDS", 0)
    with contextlib.redirect_stdout(stdout):
        llm.generate(["a", "b"], GREEDY)
    assert "Processed prompts: 2/2" in terminal.getvalue()
    assert "cut 100 %" in terminal.getvalue()
    assert stdout.getvalue() == ""


def test_a_call_from_inside_a_call_raises(llm):
    def prompts():
        yield llm.generate("a", GREEDY)[0].text

    with pytest.raises(RuntimeError, match="no call from inside a call"):
        llm.generate(prompts(), GREEDY)
    with pytest.raises(RuntimeError, match="no call from inside a call"):
        llm.generate((llm.close() for _ in range(1)), GREEDY)
    assert len(llm.generate("a", GREEDY)) == 1


def test_threads_wait_in_the_order_they_came(llm):
    started, order = threading.Event(), []
    release = threading.Event()

    def hold(number, plan):
        started.set()
        assert release.wait(10)

    runner_of(llm).script = hold
    threads = []
    for name in ("first", "second", "third"):
        thread = threading.Thread(target=lambda name=name: (llm.generate(name, GREEDY), order.append(name)))
        threads.append(thread)
        thread.start()
        if name == "first":
            assert started.wait(10)
        else:
            while len(llm._lock._queue) < len(threads) - 1:
                pass
    release.set()
    for thread in threads:
        thread.join(10)
    assert order == ["first", "second", "third"]


def test_use_after_a_fork_raises_with_the_process_id(llm, monkeypatch):
    monkeypatch.setattr("pagedllm.call_lock.os.getpid", lambda: 1)
    with pytest.raises(RuntimeError, match=r"belongs to process \d+ and cannot be used in its fork 1"):
        llm.generate("a", GREEDY)
    monkeypatch.undo()


def test_close_frees_the_runtime_once_and_may_be_called_again():
    llm = LLM("fake")
    runner = runner_of(llm)
    llm.close()
    llm.close()
    assert runner.is_closed
    for use in (lambda: llm.generate("a"), lambda: llm.chat([]), lambda: llm.stats, llm.__enter__):
        with pytest.raises(RuntimeError, match="this LLM is closed: make a new one"):
            use()


def test_with_closes_also_after_an_error():
    with pytest.raises(OSError), LLM("fake") as llm:
        raise OSError
    assert llm._assembly is None


def test_two_llms_in_turn_give_what_each_gives_alone():
    with LLM("fake") as one, LLM("fake", block_size=8, max_num_seqs=2) as two:
        alone = one.generate(["a", "b", "c"], GREEDY).texts
        assert [two.generate(p, GREEDY)[0].text for p in "abc"] == alone
        assert one.generate(["a", "b", "c"], GREEDY).texts == alone


# The constructor


def test_keywords_and_defaults_are_those_of_engine_config():
    parameters = dict(inspect.signature(LLM).parameters)
    assert list(parameters) == [field.name for field in fields(EngineConfig)]
    assert parameters.pop("model").kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for field in fields(EngineConfig)[1:]:
        assert parameters[field.name].default == field.default
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    ("keyword", "text"),
    [
        ("max_model_length", "LLM has no parameter 'max_model_length': did you mean 'max_model_len'?"),
        ("torch_dtype", "LLM has no parameter 'torch_dtype': use dtype"),
    ],
)
def test_an_unknown_keyword_names_the_right_one(keyword, text):
    with pytest.raises(TypeError) as caught:
        LLM("fake", **{keyword: 1})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("keyword", "value", "text"),
    [
        ("model", "", "model must be a path, got ''"),
        ("model", None, "model must be a path, got None"),
        ("max_model_len", 0, "max_model_len must be None or an int >= 1, got 0"),
        ("block_size", 24, "block_size must be a power of two from 8 to 128, got 24"),
        ("block_size", 256, "block_size must be a power of two from 8 to 128, got 256"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization must be in (0, 1], got 1.5"),
        ("kv_cache_memory_bytes", -1, "kv_cache_memory_bytes must be None or an int >= 1, got -1"),
        ("max_num_seqs", 2.0, "max_num_seqs must be None or an int >= 1, got 2.0"),
        ("num_threads", True, "num_threads must be None or an int >= 1, got True"),
        ("enable_prefix_caching", 1, "enable_prefix_caching must be a bool, got 1"),
        ("scheduling_policy", "lifo", "scheduling_policy must be one of 'offline', 'fcfs', 'priority', got 'lifo'"),
        ("generation_config", None, "generation_config must be one of 'auto', 'none', got None"),
        ("load_format", "pt", "load_format must be one of 'auto', 'safetensors', 'gguf', got 'pt'"),
        ("deterministic", False, "deterministic=False is refused on a CPU"),
        ("async_scheduling", 1, "async_scheduling must be None or a bool, got 1"),
        ("seed", "1", "seed must be an int, got '1'"),
        ("max_logprobs", -1, "max_logprobs must be an int >= 0, got -1"),
    ],
)
def test_a_wrong_value_is_refused_by_keyword_and_value(keyword, value, text):
    with pytest.raises(ValueError) as caught:
        LLM(**{"model": "fake", keyword: value})
    assert text in str(caught.value)


def test_paths_may_be_path_objects():
    with LLM(Path("models/fake")) as llm:
        assert llm.config.model == "models/fake"


def test_a_long_list_does_not_stand_in_the_engine_before_the_first_step():
    """50,000 prompts would take longer to be added than to be encoded."""
    prompts = [f"{i} {'x' * (i % 7)}" for i in range(300)]
    with LLM("fake", max_num_seqs=8) as llm:
        scheduler = llm._assembly.engine.scheduler
        most = 0

        def watch(step, plan):
            nonlocal most
            most = max(most, len(scheduler.requests))

        llm._assembly.runtime.script = watch
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0))
    assert [output.prompt for output in outputs] == prompts
    assert 8 < most <= 4 * 8


def test_an_engine_emptied_in_a_step_is_an_error_not_an_endless_loop():
    with LLM("fake") as llm:
        engine = llm._assembly.engine
        llm._assembly.runtime.script = lambda step, plan: engine.scheduler and None
        with pytest.raises(PagedLLMError, match="the engine has lost 1 requests: something emptied it"):
            llm.generate("a", SamplingParams(max_tokens=3))


def test_prompts_the_engine_has_not_seen_are_aborted_ones_after_an_interrupt():
    def interrupt(step, plan):
        if step == 2:
            raise KeyboardInterrupt

    with LLM("fake", max_num_seqs=2) as llm:
        llm._assembly.runtime.script = interrupt
        with pytest.raises(KeyboardInterrupt) as caught:
            llm.generate([f"{i}" for i in range(40)], SamplingParams(max_tokens=5, ignore_eos=True))
    outputs = caught.value.outputs
    assert len(outputs) == 40
    assert {(output.outputs[0].finish_reason, output.finished) for output in outputs} == {("abort", False)}
    assert {len(output.text) for output in outputs} == {0, 2}


@pytest.mark.parametrize(
    ("arguments", "num_blocks", "word"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 512}, 512, "max_num_seqs 4"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, 512, "max_num_batched_tokens 8"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 512}, 16, "KV cache (16 blocks)"),
    ],
)
def test_a_long_call_tells_what_limited_it(monkeypatch, caplog, arguments, num_blocks, word):
    monkeypatch.setattr("pagedllm.llm.assemble", lambda config: fake_assemble(config, num_blocks=num_blocks))
    caplog.set_level("INFO", "pagedllm")
    with LLM("fake", **arguments) as llm:
        llm.generate([f"{i:04}{'x' * 20}" for i in range(200)], SamplingParams(max_tokens=6, ignore_eos=True))
        assert llm.stats.num_steps > 0
        (told,) = [record.getMessage() for record in caplog.records if "limited by" in record.getMessage()]
        assert told.startswith("200 prompts in ")
        assert word in told.partition("limited by ")[2].split(";")[0]
        caplog.clear()
        llm.generate("one", SamplingParams(max_tokens=2, ignore_eos=True))
    assert caplog.records == []


def test_a_long_request_submitted_last_does_not_run_alone_at_the_end():
    """Longest first, and a place that gets free is filled in the next step: no sub-batches, no tail."""
    prompts = [f"{i:04}" for i in range(200)] + ["long"]
    limits = [SamplingParams(max_tokens=4, ignore_eos=True)] * 200 + [SamplingParams(max_tokens=110, ignore_eos=True)]
    with LLM("fake", max_num_seqs=8, max_num_batched_tokens=512) as llm:
        running = []
        llm._assembly.runtime.script = lambda step, plan: running.append(len(plan.scheduled))
        outputs = llm.generate(prompts, limits)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 200 + [110]
    assert len(running) <= 110 + 10  # 7 x 110 places beside it hold the 800 short tokens, but for some 30
    assert all(number == 8 for number in running[:100])
