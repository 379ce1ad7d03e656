"""LLM and the command line on a tiny random model: what users see, through the real tokenizer, decoder and kernels."""

from __future__ import annotations

import gc
import json
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedllm import LLM, RequestError, SamplingParams, cli
from pagedllm.errors import ModelError
from tests.tiny import BOS, END, EOS, VOCAB_SIZE, save_tiny_model

PROMPTS = ["the quick brown fox", "one two three", "ジ ünïcödé", " "]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SMALL = {"max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SMALL) as llm:
        yield llm


def test_text_and_its_ids_give_the_same_output(llm: LLM) -> None:
    by_text = llm.generate(PROMPTS, GREEDY)
    by_ids = llm.generate([output.prompt_token_ids for output in by_text], GREEDY)
    assert by_ids.texts == by_text.texts
    assert [output.prompt for output in by_ids] == [None] * 4
    assert [len(output.outputs[0].token_ids) for output in by_text] == [16] * 4


def test_chat_has_exactly_one_bos(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "one two"}], GREEDY)[0]
    assert output.prompt == "<s>[user]one two</s>[assistant]"
    assert output.prompt_token_ids.count(BOS) == 1
    assert output.prompt_token_ids[0] == BOS


def test_chat_goes_on_where_the_last_message_ends(llm: LLM) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two "}]
    output = llm.chat(messages, GREEDY, add_generation_prompt=False, continue_final_message=True)[0]
    assert output.prompt == "<s>[user]one</s>[assistant]two "


def test_a_template_of_the_callers_own(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}{{ mood }}"
    output = llm.chat(
        [{"role": "user", "content": "a"}], GREEDY, chat_template=template, chat_template_kwargs={"mood": "!"}
    )
    assert output[0].prompt == "A!"


def test_a_template_that_fails_quotes_its_reason_and_the_conversation(llm: LLM) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError) as caught:
        llm.chat([{"role": "user", "content": "a"}], chat_template=template)
    assert caught.value.code == "template_error"
    assert str(caught.value) == "messages[0]: chat template: roles must alternate"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ x", "chat template, line 1: unexpected end"),
        ("nowhere.jinja", "chat_template is neither a template nor a readable file: 'nowhere.jinja'"),
        ("", "chat_template is neither a template nor a readable file: ''"),
    ],
)
def test_a_template_that_is_none_is_refused_when_it_is_given(llm: LLM, folder: Path, template: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LLM(folder, chat_template=template, **SMALL)
    with pytest.raises(ValueError, match=text):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template=template)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_alike_in_generate_chat_and_run(llm: LLM, tmp_path: Path, include: bool) -> None:
    messages = [{"role": "user", "content": "one two three"}]
    whole = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0]
    assert whole.text is not None
    stop = whole.text[5:7]
    first = whole.text.find(stop)
    expected = whole.text[: first + 2 * include]
    params = {"temperature": 0, "max_tokens": 24, "stop": stop, "include_stop_str_in_output": include}
    outputs = llm.generate(whole.prompt_token_ids, SamplingParams(**params))
    outputs += llm.chat(messages, SamplingParams(**params))
    (tmp_path / "in").write_text(json.dumps({"messages": messages, "sampling_params": params}))
    llm.run_file(tmp_path / "in", tmp_path / "out")
    row = json.loads((tmp_path / "out").read_text())
    assert [*[output.text for output in outputs], row["output"]] == [expected] * 3
    assert {output.outputs[0].stop_reason for output in outputs} | {row["stop_reason"]} == {stop}


def test_eos_ids_are_the_union_of_config_generation_config_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 9], "max_new_tokens": 3}))
    bias = SamplingParams(temperature=0, logit_bias={9: 100.0}, max_tokens=5)
    with LLM(copy, **SMALL) as llm:
        stopped = llm.generate("one", bias)[0].outputs[0]
        assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", 9, "")
        assert (
            len(
                llm.generate("one", SamplingParams(logit_bias={9: 100.0}, max_tokens=5, ignore_eos=True))[0]
                .outputs[0]
                .token_ids
            )
            == 5
        )
        held = llm.generate("one", SamplingParams(temperature=0, logit_bias={9: 50.0, EOS: 60.0}, min_tokens=4))[0]
        assert len(held.outputs[0].token_ids) == 5
        assert (held.outputs[0].stop_reason, {9, EOS} & set(held.outputs[0].token_ids[:4])) == (EOS, set())
        assert len(llm.generate([[5, 6]])[0].outputs[0].token_ids) <= 3
    with LLM(copy, generation_config="none", **SMALL) as llm:
        assert llm.generate("one", bias)[0].outputs[0].finish_reason == "length"


def test_allowed_ids_and_bias_decide_what_is_sampled(llm: LLM) -> None:
    allowed = SamplingParams(allowed_token_ids=[20, 30], max_tokens=12, ignore_eos=True)
    biased = SamplingParams(logit_bias={40: 100.0}, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(["one", "two"], [allowed, biased])
    assert set(outputs[0].outputs[0].token_ids) <= {20, 30}
    assert outputs[1].outputs[0].token_ids == [40, 40, 40]


def test_logprobs_hold_the_sampled_token_and_the_top(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, logprobs=3, seed=1, ignore_eos=True)
    completion = llm.generate("one", params)[0].outputs[0]
    for position, token_id in enumerate(completion.token_ids):
        entries = completion.logprobs[position]
        assert next(iter(entries)) == token_id
        assert len(entries) in (3, 4)
        assert sorted(entry.rank for entry in entries.values())[:3] == [1, 2, 3]
    whole = llm.generate("one", SamplingParams(max_tokens=1, logprobs=-1))[0].outputs[0]
    assert len(whole.logprobs[0]) == VOCAB_SIZE
    assert sum(2.718281828459045**entry.logprob for entry in whole.logprobs[0].values()) == pytest.approx(1, abs=1e-4)


def test_one_prompt_too_long_costs_the_others_nothing(llm: LLM) -> None:
    prompts = [[5, 6, 7]] * 20
    expected = llm.generate(prompts, GREEDY).texts
    prompts[7] = [5] * 1280
    with pytest.raises(RequestError, match=r"^prompts\[7\]: 1,280 tokens exceed max_model_len 128 by 1,152$"):
        llm.generate(prompts, GREEDY)
    outputs = llm.generate(prompts, GREEDY, on_error="return")
    assert [i for i, output in enumerate(outputs) if output.error] == [7]
    assert outputs.texts[:7] == expected[:7]


def test_sampled_calls_differ_and_a_new_process_would_agree(folder: Path) -> None:
    def texts() -> list[list[str | None]]:
        with LLM(folder, **SMALL) as llm:
            return [llm.generate(["one"] * 3, SamplingParams(max_tokens=12)).texts for _ in range(2)]

    first = texts()
    assert len({text for call in first for text in call}) == 6
    assert texts() == first


def test_two_llms_alternate(folder: Path, llm: LLM) -> None:
    alone = llm.generate(PROMPTS, GREEDY).texts
    with LLM(folder, block_size=64, **SMALL) as other:
        for prompt, text in zip(PROMPTS, alone, strict=True):
            assert other.generate(prompt, GREEDY).texts == llm.generate(prompt, GREEDY).texts == [text]


def test_close_gives_the_runtime_back_though_outputs_live(folder: Path) -> None:
    llm = LLM(folder, **SMALL)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=4, logprobs=1))
    runner = weakref.ref(llm._assembly.runtime.runner)
    llm.close()
    gc.collect()
    assert runner() is None
    assert pickle.loads(pickle.dumps(outputs)).texts == outputs.texts
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("one")


def test_the_callers_torch_state_neither_matters_nor_changes(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY).texts
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.set_default_dtype(torch.float64)
        try:
            assert llm.generate(PROMPTS, GREEDY).texts == expected
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_the_callers_default_device_does_not_matter(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY).texts
    with torch.device("meta"):
        assert llm.generate(PROMPTS, GREEDY).texts == expected


def test_get_tokenizer_is_that_of_transformers_and_gives_our_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    messages = [{"role": "user", "content": "one two"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == llm.chat(messages, GREEDY)[0].prompt_token_ids


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="missing does not exist: pass the path of a model folder or of a GGUF file"):
        LLM(tmp_path / "missing")
    (tmp_path / "in").write_text("{}")
    arguments = ["run", "-m", str(tmp_path / "missing"), "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_run_and_generate_give_the_same_texts(folder: Path, llm: LLM, tmp_path: Path) -> None:
    rows = [{"n": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS * 5)]
    (tmp_path / "in").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    flags = ["--max-model-len", "128", "--kv-cache-memory-bytes", str(8 << 20), "--num-threads", "1"]
    flags += ["--temperature", "0", "--max-tokens", "16", "--ignore-eos"]
    arguments = ["run", "-q", "-m", str(folder), "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *flags]
    assert cli.main(arguments) == 0
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [{"n": row["n"], "prompt": row["prompt"]} for row in results] == rows
    assert [row["output"] for row in results] == llm.generate(PROMPTS * 5, GREEDY).texts
