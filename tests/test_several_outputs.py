"""n > 1 and beam_search through LLM, over the real engine and a runner without a model."""

from __future__ import annotations

import logging
import pickle

import pytest

from pagedllm import LLM, BatchError, BeamSearchParams, RequestError, SamplingParams
from tests.fake_assembly import EOS, VOCAB_SIZE, runner_of

pytestmark = pytest.mark.usefixtures("no_model")

SAMPLED = SamplingParams(n=3, max_tokens=6)


def texts(output) -> list[str]:
    return [completion.text for completion in output.outputs]


def notices(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def assert_nothing_left(llm: LLM) -> None:
    engine = llm._assembly.engine
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.kv_cache.pool.num_free == llm._assembly.num_blocks
    assert engine._set_aside == {}


# n


def test_the_first_of_n_is_the_output_of_n_1_and_the_others_differ(llm):
    one = LLM("fake").generate(["ab", "cd"], SamplingParams(max_tokens=6))
    several = llm.generate(["ab", "cd"], SAMPLED)
    assert [output.text for output in several] == [output.text for output in one]
    assert len({text for output in several for text in texts(output)}) == 6
    assert [[c.index for c in output.outputs] for output in several] == [[0, 1, 2]] * 2
    assert_nothing_left(llm)


@pytest.mark.parametrize("n", [1, 2, 8, 9, 40])
def test_any_n_gives_n_outputs_beside_other_prompts(llm, n):
    """Eight at a time."""
    params = [SamplingParams(n=n, max_tokens=4), SamplingParams(temperature=0, max_tokens=4), SamplingParams(n=2)]
    outputs = llm.generate(["ab", "ab", "x"], params)
    assert [len(output.outputs) for output in outputs] == [n, 1, 2]
    assert len(set(texts(outputs[0]))) == n
    assert outputs[0].metrics.num_output_tokens == 4 * n
    assert_nothing_left(llm)


def test_greedy_outputs_are_equal_copies_with_a_notice(llm, caplog):
    params = SamplingParams(n=3, temperature=0, max_tokens=4, logprobs=1)
    output = llm.generate("ab", params)[0]
    assert len(output.outputs) == 3
    assert len(set(texts(output))) == 1
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert output.metrics.num_output_tokens == 4
    assert notices(caplog)[0] == "n=3 with temperature=0: greedy outputs are all equal, each prompt is run once"
    output.outputs[0].token_ids.append(7)
    assert output.outputs[1].token_ids != output.outputs[0].token_ids


def test_each_output_ends_for_itself(llm):
    plain = llm.generate("ab", SamplingParams(n=3, max_tokens=6, seed=5))[0]
    second = plain.outputs[1].token_ids
    runner_of(llm).forced = lambda tokens, data: EOS if tokens[3:] == second[:2] else None
    output = llm.generate("ab", SamplingParams(n=3, max_tokens=6, seed=5))[0]
    assert [c.finish_reason for c in output.outputs] == ["length", "stop", "length"]
    assert [c.stop_reason for c in output.outputs] == [None, EOS, None]
    assert output.outputs[1].token_ids == [*second[:2], EOS]
    assert [output.outputs[i].token_ids for i in (0, 2)] == [plain.outputs[i].token_ids for i in (0, 2)]


def test_stop_strings_cut_each_output_where_it_has_them(llm):
    params = SamplingParams(n=6, max_tokens=40, seed=3)
    plain = texts(llm.generate("ab", params)[0])
    params.stop = ["e"]
    output = llm.generate("ab", params)[0]
    assert texts(output) == [text.split("e")[0] for text in plain]
    assert [c.stop_reason for c in output.outputs] == ["e" if "e" in text else None for text in plain]


def test_the_iterator_and_futures_give_all_outputs(llm):
    expected = [texts(output) for output in LLM("fake").generate(["ab", "cd"], SAMPLED)]
    found = list(llm.generate_iter(["ab", "cd"], SAMPLED, ordered=True))
    assert [texts(output) for output in found] == expected
    assert len(texts(llm.submit("ab", SAMPLED).result(10))) == 3
    assert_nothing_left(llm)


def test_a_dropped_iterator_aborts_all_samples(llm):
    iterator = llm.generate_iter(["ab"] * 5, SamplingParams(n=9, max_tokens=50))
    assert len(next(iterator).outputs) == 9
    iterator.close()
    assert_nothing_left(llm)


def test_an_iterator_goes_on_beside_calls_whose_requests_end_first(llm):
    iterator = llm.generate_iter(["ab"], SamplingParams(n=9, max_tokens=20, seed=1))
    assert len(llm.generate("cd", SAMPLED)[0].outputs) == 3
    assert len(set(texts(next(iterator)))) == 9
    assert_nothing_left(llm)


def test_a_failing_sample_fails_its_prompt_alone(llm):
    good = llm.generate(["ab", "cd"], SamplingParams(n=3, max_tokens=6, seed=5))
    bad = good[0].outputs[2].token_ids
    runner_of(llm).forced = lambda tokens, data: -1 if tokens[3:] == bad[:3] else None
    params = SamplingParams(n=3, max_tokens=6, seed=5)
    outputs = llm.generate(["ab", "cd"], params, on_error="return")
    assert outputs[0].error.code == "non_finite_logits"
    assert (outputs[0].outputs, outputs[0].text) == ([], None)
    assert texts(outputs[1]) == texts(good[1])
    with pytest.raises(BatchError, match="1 of 2 requests failed while running"):
        llm.generate(["ab", "cd"], params)
    assert_nothing_left(llm)


def test_an_interrupt_gives_back_finished_prompts_whole_and_samples_as_far_as_they_came(llm):
    def interrupt(step, plan):
        if step == 4:
            raise KeyboardInterrupt

    runner_of(llm).script = interrupt
    params = [SamplingParams(n=2, max_tokens=2, seed=1), SamplingParams(n=4, max_tokens=9, seed=1)]
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(["ab", "cd"], params)
    done, cut = caught.value.outputs
    assert (done.finished, cut.finished) == (True, False)
    assert [len(c.token_ids) for c in done.outputs] == [2, 2]
    assert [(c.finish_reason, len(c.token_ids)) for c in cut.outputs] == [("abort", 4)] * 4
    assert all(len(c.text) == 4 for c in cut.outputs)
    runner_of(llm).script = lambda step, plan: None
    assert [text[:4] for text in texts(llm.generate("cd", params[1])[0])] == texts(cut)


def test_cuts_are_counted_by_output(llm, caplog):
    llm.generate(["ab", "cd"], SAMPLED)
    assert notices(caplog) == ["6 of 6 outputs were cut at max_tokens=6: pass max_tokens=... or None"]


def test_dicts_have_lists_where_a_prompt_has_several_outputs(llm):
    outputs = llm.generate(["ab", "", "cd"], SAMPLED, on_error="return")
    rows = outputs.to_dicts()
    assert [row["output"] for row in rows] == [texts(output) for output in outputs]
    assert [row["finish_reason"] for row in rows] == [["length"] * 3] * 3
    assert [row["completion_tokens"] for row in rows] == [[6] * 3] * 3
    assert [row["prompt_tokens"] for row in rows] == [3, 1, 3]
    failed = llm.generate(["ab", "x" * 500], SAMPLED, on_error="return").to_dicts()[1]
    assert (failed["output"], failed["finish_reason"], failed["completion_tokens"]) == (
        [None] * 3,
        ["error"] * 3,
        [0] * 3,
    )


def test_outputs_pickle(llm):
    outputs = llm.generate("ab", SAMPLED)
    assert pickle.loads(pickle.dumps(outputs)) == outputs


# Beams


def test_beam_search_gives_the_beams_best_first(llm):
    outputs = llm.beam_search(["ab", "cd", {"prompt": "ab", "metadata": 7}], BeamSearchParams(4, 5))
    assert [len(output.outputs) for output in outputs] == [4] * 3
    assert [output.metadata for output in outputs] == [None, None, 7]
    for output in outputs:
        scores = [completion.score for completion in output.outputs]
        assert scores == sorted(scores, reverse=True)
        assert scores == [c.cumulative_logprob / len(c.token_ids) for c in output.outputs]
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert_nothing_left(llm)


def test_beams_that_cannot_be_are_refused_before_any_work(llm):
    with pytest.raises(TypeError, match="params must be a BeamSearchParams, got SamplingParams"):
        llm.beam_search("ab", SAMPLED)
    with pytest.raises(RequestError, match=r"beam_width must be at most 257, the tokens that a beam can go on with"):
        llm.beam_search("ab", BeamSearchParams(258))
    params = BeamSearchParams(2)
    params.beam_width = 0
    with pytest.raises(RequestError, match="beam_width must be an int >= 1, got 0"):
        llm.beam_search("ab", params)
    with pytest.raises(RequestError, match=rf"stop_token_ids must be ids in \[0, {VOCAB_SIZE}\), got 900"):
        llm.beam_search("ab", BeamSearchParams(2, stop_token_ids=[900]))
    assert runner_of(llm).num_steps == 0


def test_a_beam_wider_than_the_engine_is_that_requests_error(llm):
    (output,) = llm.beam_search("ab", BeamSearchParams(9, 5), on_error="return")
    assert output.error.code == "never_fits"
    assert str(output.error) == "beam_width=9 never fits: max_num_seqs is 8"
    with pytest.raises(BatchError, match=r"prompts\[0\]: beam_width=9 never fits"):
        llm.beam_search("ab", BeamSearchParams(9, 5))


def test_an_interrupted_beam_search_gives_back_the_best_beams_so_far(llm):
    def interrupt(step, plan):
        if step == 3:
            raise KeyboardInterrupt

    runner_of(llm).script = interrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.beam_search("ab", BeamSearchParams(3, 9))
    (output,) = caught.value.outputs
    assert not output.finished
    assert [(c.finish_reason, len(c.token_ids), len(c.text)) for c in output.outputs] == [("abort", 3, 3)] * 3
    assert_nothing_left(llm)


def test_a_beam_search_counts_no_cuts(llm, caplog):
    llm.beam_search("ab", BeamSearchParams(2, 4))
    assert notices(caplog) == []
