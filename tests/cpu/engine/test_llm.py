"""`LLM`, the synchronous face: vLLM's names, order, refusals, and an orderly end."""

from __future__ import annotations

import gc
import math
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import partial

import pytest
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from quickstep import LLM, SamplingParams
from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.types import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DEADLINE_S = 60
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), num_threads=1, seed=3) as llm:
        yield llm


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_answers_are_in_the_order_of_the_prompts(llm):
    prompts = [f"prompt {n}" for n in range(7)]
    sampling = [SamplingParams(temperature=0, max_tokens=8 - n) for n in range(7)]
    outputs = llm.generate(prompts, sampling)
    assert [output.prompt for output in outputs] == prompts
    alone = [llm.generate(p, s)[0] for p, s in zip(prompts, sampling, strict=True)]
    assert tokens(outputs) == tokens(alone)
    assert all(output.finished for output in outputs)


def test_eager_steps_answer_as_captured_ones(llm, checkpoint):
    sampling = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=5, logprobs=2)
    with LLM(str(checkpoint), num_threads=1, enforce_eager=True) as eager:
        expected = eager.generate(["one", "another prompt"], sampling)
    found = llm.generate(["one", "another prompt"], sampling)
    assert [one.outputs[0] for one in found] == [one.outputs[0] for one in expected]


def test_text_token_ids_and_mappings_are_the_same_prompt(llm):
    ids = llm.engine.tokenizer.encode("same")
    forms = ["same", ids, {"prompt": "same"}, {"prompt_token_ids": ids}]
    outputs = [llm.generate(form, GREEDY)[0] for form in forms]
    outputs += llm.generate(forms, GREEDY) + llm.generate([ids, tuple(ids)], GREEDY)
    assert len(set(tokens(outputs))) == 1
    assert {output.prompt_token_ids for output in outputs} == {tuple(ids)}
    assert [output.prompt for output in outputs[:4]] == ["same", None, "same", None]


def test_no_prompts_give_no_answers(llm):
    assert llm.generate([]) == []


def test_without_parameters_sixteen_tokens_come_and_the_seed_reproduces_them(llm):
    first = llm.generate("once")[0]
    assert len(first.outputs[0].token_ids) <= 16
    sampling = replace(llm.get_default_sampling_params(), seed=first.metrics.seed)
    assert tokens([first]) == tokens(llm.generate("once", sampling))


def test_without_parameters_those_of_the_generation_config_apply(llm):
    sampling = llm.get_default_sampling_params()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 0)
    seed = llm.chat(USER)[0].metrics.seed
    named, plain = replace(sampling, seed=seed), SamplingParams(seed=seed)
    prompts = [f"prompt {n}" for n in range(8)]
    assert tokens(llm.generate(prompts, named)) != tokens(llm.generate(prompts, plain))


def test_the_tokenizer_is_the_checkpoints(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("some text")
    assert tokenizer.decode(ids) == "some text"
    assert tokens(llm.generate("some text", GREEDY)) == tokens(llm.generate([ids], GREEDY))


def test_the_lowest_priority_is_answered_first(checkpoint):
    with LLM(str(checkpoint), num_threads=1, max_num_seqs=1) as llm:
        outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[2, 0, 1])
        begun = [output.metrics.sequences[0].first_scheduled_s for output in outputs]
        assert sorted(range(3), key=lambda place: begun[place])[-1] == 0
        assert tokens(outputs) == tokens(llm.generate(["a", "b", "c"], GREEDY, priority=1))
        with pytest.raises(RequestError, match="2 priorities for 3 prompts"):
            llm.generate(["a", "b", "c"], GREEDY, priority=[0, 1])


# The public names of vLLM's class, of its releases since 0.9.
VLLM_NAMES = """
    apply_model beam_search chat classify collective_rpc embed encode enqueue finish_weight_update
    from_engine_args generate get_default_sampling_params get_metrics get_tokenizer get_world_size
    init_weight_transfer_engine llm_engine preprocess_chat reset_mm_cache reset_prefix_cache reward
    score set_tokenizer sleep start_profile start_weight_update stop_profile update_weights
    wait_for_completion wake_up
"""


@pytest.mark.parametrize("name", VLLM_NAMES.split())
def test_every_name_of_vllms_class_is_there_or_refused_with_a_sentence(llm, name):
    if name in dir(LLM):
        assert callable(getattr(llm, name))
        return
    for owner in (llm, LLM):
        with pytest.raises(AttributeError, match=f"LLM has no attribute '{name}', unlike vLLM's: "):
            getattr(owner, name)


def test_a_name_that_nobody_has_is_no_attribute(llm):
    with pytest.raises(AttributeError, match=r"LLM has no attribute 'generat'$"):
        llm.generat  # noqa: B018
    assert not hasattr(LLM, "generat")


def test_an_engine_seed_repeats_unseeded_answers(checkpoint, llm):
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)

    def answers(seed):
        with LLM(str(checkpoint), num_threads=1, seed=seed) as fresh:
            return tokens(fresh.generate(["a", "a"], sampling))

    first = answers(5)
    assert first[0] != first[1]
    assert answers(5) == first


def test_logprobs_are_per_token_and_add_up(llm):
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    output = llm.generate("abc", sampling)[0].outputs[0]
    assert len(output.logprobs) == len(output.token_ids) == 4
    chosen = []
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        assert len(position) == 2
        assert position[token_id].rank == 1
        chosen.append(position[token_id].logprob)
    assert output.cumulative_logprob == math.fsum(chosen) < 0
    assert llm.generate("abc", GREEDY)[0].outputs[0].logprobs is None


def test_reasons_are_openais_words_and_the_exact_ones(llm):
    output = llm.generate("abc", GREEDY)[0].outputs[0]
    assert (output.finish_reason, output.ended_by) == ("length", FinishReason.MAX_TOKENS)
    assert output.stop_reason is None
    stop = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[output.token_ids[0]]
    )
    stopped = llm.generate("abc", stop)[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", output.token_ids[0])
    assert stopped.text == ""


def test_chat_is_generate_on_the_rendered_conversation(llm):
    expected = tokens(llm.generate("user: hi\nassistant:", GREEDY))
    assert tokens(llm.chat(USER, GREEDY)) == expected
    assert tokens(llm.chat([USER, USER], GREEDY)) == expected * 2
    opened = llm.chat(USER, GREEDY, add_generation_prompt=False)
    assert tokens(opened) == tokens(llm.generate("user: hi\n", GREEDY))
    begun = [*USER, {"role": "assistant", "content": "So "}]
    continued = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert tokens(continued) == tokens(llm.generate("user: hi\nassistant: So ", GREEDY))
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        llm.chat(begun, GREEDY, continue_final_message=True)
    with pytest.raises(RequestError, match="not a text of the assistant"):
        llm.chat(USER, GREEDY, add_generation_prompt=False, continue_final_message=True)
    with_extra = llm.chat(USER, GREEDY, chat_template_kwargs={"suffix": "?"})
    assert tokens(with_extra) == tokens(llm.generate("user: hi\nassistant:?", GREEDY))
    with_tools = llm.chat(USER, GREEDY, tools=[{"name": "f"}])
    rendered = 'user: hi\n[{"name": "f"}]assistant:'
    assert tokens(with_tools) == tokens(llm.generate(rendered, GREEDY))


def test_a_model_without_a_template_takes_no_conversations(tmp_path):
    path = write_checkpoint(tmp_path / "plain", template=None)
    with LLM(str(path), num_threads=1) as llm, pytest.raises(RequestError, match="completion"):
        llm.chat(USER)


@pytest.mark.parametrize(
    ("prompts", "sampling", "says"),
    [
        (["fine", ""], None, "empty"),
        (["fine", [9999]], None, "9999"),
        ("x" * 999, None, "999 tokens"),
        (["a", "b"], [GREEDY], "1 sampling_params for 2"),
        ("a", {"max_tokens": 3}, "dict"),
        ("a", [3], "must be SamplingParams"),
        ({"text": "a"}, None, "prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, None, "either"),
    ],
)
def test_a_bad_request_serves_none_and_hurts_nothing(llm, prompts, sampling, says):
    with pytest.raises(RequestError, match=says):
        llm.generate(prompts, sampling)
    assert llm.engine.stats().num_requests == 0
    assert len(llm.generate("still here", GREEDY)) == 1


def test_threads_may_share_an_llm(llm):
    prompts = [f"thread {n}" for n in range(6)]
    expected = tokens(llm.generate(prompts, GREEDY))
    calls = [in_thread(partial(llm.generate, prompt, GREEDY)) for prompt in prompts]
    answers = [call.result(DEADLINE_S)[0] for call in calls]
    assert tokens(answers) == expected


def test_nothing_is_printed_where_standard_error_is_no_terminal(llm, capfd):
    llm.generate("quiet", GREEDY)
    assert capfd.readouterr() == ("", "")


def test_an_unknown_option_names_the_nearest(checkpoint):
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(str(checkpoint), max_num_seq=3)


@pytest.mark.parametrize("collects", [True, False])
def test_opening_leaves_garbage_collection_as_it_was(llm, tmp_path, collects):
    assert gc.isenabled()  # `llm` is open
    if not collects:
        gc.disable()
    try:
        with pytest.raises(ConfigError):
            LLM(str(tmp_path))
        assert gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.parametrize("num_frozen", [0, 1])
def test_what_loading_made_waits_for_a_complete_collection(checkpoint, num_frozen):
    """Objects that a caller has frozen stay frozen."""
    gc.unfreeze()
    if num_frozen:
        gc.freeze()
    try:
        with LLM(checkpoint):
            assert num_frozen or len(gc.get_objects(generation=0)) < 5_000
            assert bool(gc.get_freeze_count()) == bool(num_frozen)
            assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_template_that_cannot_be_read_is_refused_by_chat(checkpoint, tmp_path):
    """Other prompts need none."""
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "chat_template.jinja").write_text("{% if")
    with LLM(str(broken)) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=1), use_tqdm=False)
        with pytest.raises(ConfigError, match="the chat template cannot be read at line 1"):
            llm.chat([{"role": "user", "content": "ab"}], use_tqdm=False)


def test_a_closed_llm_says_so(checkpoint):
    llm = LLM(str(checkpoint), num_threads=1)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")


def in_thread(call):
    """Run `call` in a thread that cannot keep the tests from ending; gives its future."""
    future = Future()

    def run():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_closing_answers_those_who_wait_with_what_there_is(checkpoint):
    llm = LLM(str(checkpoint), num_threads=1)
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    waiting = in_thread(lambda: llm.generate(["a"] * 20, endless))
    while not llm.engine.stats().num_requests and not waiting.done():
        pass
    in_thread(llm.close).result(DEADLINE_S)
    ends = {output.outputs[0].ended_by for output in waiting.result(DEADLINE_S)}
    assert ends <= {FinishReason.SHUTDOWN, FinishReason.CONTEXT_LIMIT}


def test_a_call_that_races_with_close_is_answered_or_refused(checkpoint):
    for _ in range(5):
        llm = LLM(str(checkpoint), num_threads=1)
        calls = [in_thread(partial(llm.generate, "a", GREEDY)) for _ in range(8)]
        in_thread(llm.close).result(DEADLINE_S)
        for call in calls:
            try:
                (output,) = call.result(DEADLINE_S)
            except EngineError:
                continue
            assert output.outputs[0].ended_by in {FinishReason.SHUTDOWN, FinishReason.MAX_TOKENS}


def test_a_script_that_never_closes_ends_quietly(checkpoint):
    script = f"from quickstep import LLM; print(len(LLM({str(checkpoint)!r}).generate('a')))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
