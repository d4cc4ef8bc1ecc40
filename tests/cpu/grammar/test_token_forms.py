"""Texts of parameters in token ids, and what they do to the output of a whole engine."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

import quickstep
from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.outputs import collect
from quickstep.errors import RequestError
from quickstep.runtime.sampling.reasoning import ReasoningPlace, ReasoningTracker
from quickstep.text.token_forms import TokenFormFinder
from quickstep.text.token_texts import TokenTexts
from quickstep.text.tokenizer import Tokenizer
from quickstep.text.tool_calls.formats import REASONING_FORMATS
from quickstep.types import Grammar, SamplingParams

DEMO = Path(quickstep.__file__).parent / "bundled" / "demo"
TOKENIZER = Tokenizer.open(DEMO)
FINDER = TokenFormFinder(TOKENIZER, 4096, 512, lambda: REASONING_FORMATS["think"])
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
)


def ids_of(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def forms(prompt=(1,), **params):
    found = FINDER.find(SamplingParams(**params), prompt).in_tokens
    assert found is not None
    return found


def test_a_bad_word_is_banned_with_and_without_a_space():
    found = forms(bad_words=["import", " os.path"]).bad_words
    assert set(found) == {ids_of(t) for t in ("import", " import", " os.path")}


def test_breakers_are_all_tokens_that_hold_one_and_long_ones_in_a_row():
    found = forms(dry_multiplier=1.0, dry_sequence_breakers=["\n", "zqx zqx"])
    single = {i for i, is_breaker in enumerate(found.dry_breaker_flags) if is_breaker}
    assert single == {i for i in range(4096) if b"\n" in TOKENIZER.token_bytes(i)}
    assert ids_of("zqx zqx") in found.dry_breakers


@pytest.mark.parametrize(
    "params",
    [
        {"dry_multiplier": 1.0, "dry_sequence_breakers": ["e", "a"]},
        {"thinking_budget": 3},
        {"grammar": Grammar.of_json_object(), "reasoning_tags": ("<think>", "</think>")},
    ],
)
def test_the_vocabulary_is_looked_through_once_and_in_a_thread(params, monkeypatch):
    threads = []
    for name in ("__init__", "containing", "within"):
        method = getattr(TokenTexts, name)

        def noted(self, *args, method=method):
            threads.append(threading.current_thread())
            return method(self, *args)

        monkeypatch.setattr(TokenTexts, name, noted)
    finder = TokenFormFinder(TOKENIZER, 4096, 512, lambda: REASONING_FORMATS["think"])
    sampling = SamplingParams(**params)
    assert not finder.knows(sampling)
    asyncio.run(finder.prepare(sampling))
    assert finder.knows(sampling)
    num_looks = len(threads)
    assert num_looks >= 2 and threading.current_thread() not in threads
    assert finder.find(sampling, (1,)).in_tokens is not None
    assert len(threads) == num_looks


def test_a_breaker_that_most_tokens_hold_costs_an_admission_no_more_than_a_rare_one():
    found = forms(dry_multiplier=1.0, dry_sequence_breakers=["e", "t", "a", " "])
    assert sum(found.dry_breaker_flags) > 1000
    assert len(found.dry_breaker_flags) == 4096
    assert len(found.dry_breakers) <= 8


def test_requests_without_texts_stay_as_they_are():
    plain = SamplingParams(temperature=0.5)
    assert FINDER.find(plain, (1,)) is plain


def test_the_room_for_output_is_the_contexts():
    grammar = Grammar.of_json_object()
    assert forms(range(500), grammar=grammar, max_tokens=None).max_tokens == 12
    assert forms(range(500), grammar=grammar, max_tokens=5).max_tokens == 5


@pytest.mark.parametrize(
    ("text", "is_open"), [("<think>\n", True), ("<think>", True), ("<think>\n\n</think>", False)]
)
def test_the_prompts_end_shows_whether_the_reasoning_is_open(text, is_open):
    found = forms(ids_of("hello" + text), thinking_budget=3).reasoning
    assert found is not None and found.starts_open is is_open
    assert found.closing_ids == ids_of("</think>")
    for beside in ("so.</think>\n\n", "\n</think>Yes", "</think> "):
        tracker = ReasoningTracker(replace(found, starts_open=True), ids_of("It is " + beside))
        assert tracker.place in (ReasoningPlace.GAP, ReasoningPlace.AFTER)


def test_a_grammar_follows_reasoning_unless_the_prompt_has_closed_it():
    fields = {"grammar": Grammar.of_json_object(), "reasoning_tags": ("<think>", "</think>")}
    for text, is_open in (("hello", False), ("<think>\n", True)):
        found = forms(ids_of(text), **fields).reasoning
        assert found is not None and found.starts_open is is_open
    assert forms(ids_of("hello<think> It"), **fields, inside_reasoning=True).reasoning.starts_open
    assert forms(ids_of("<think>\n\n</think>\n\n"), **fields).reasoning is None
    assert forms(ids_of("<think>\n"), grammar=Grammar.of_json_object()).reasoning is None


def test_a_message_at_the_end_of_the_budget_has_tokens_and_no_tag():
    tags = {"thinking_budget": 3, "reasoning_tags": ("<think>", "</think>")}
    found = forms(**tags, reasoning_budget_message="\nEnough.\n").reasoning
    assert found.message_ids == ids_of("\nEnough.\n")
    assert forms(**tags).reasoning.message_ids == ()
    with pytest.raises(RequestError, match="contains </think>, which is written after it"):
        forms(**tags, reasoning_budget_message="Enough.\n</think>\n\n")


def test_a_budget_needs_reasoning():
    finder = TokenFormFinder(TOKENIZER, 4096, 512, lambda: None)
    with pytest.raises(RequestError, match="thinking_budget is not supported"):
        finder.find(SamplingParams(thinking_budget=3), (1,))
    tags = SamplingParams(thinking_budget=3, reasoning_tags=("<a>", "</a>"))
    assert finder.find(tags, (1,)).in_tokens is not None


def test_bad_words_that_leave_nothing_are_refused():
    with pytest.raises(RequestError, match="allowed_token_ids"):
        forms(bad_words=["import"], allowed_token_ids=ids_of("import"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "thinks", THINKING_TEMPLATE)


def answers(checkpoint, groups, **pool):
    """The texts of (prompt, params), each group at once."""

    async def whole():
        engine = open_engine(
            EngineConfig(
                load=LoadConfig(model=str(checkpoint), num_threads=1),
                cache=CacheConfig(block_size=4, num_blocks=pool.get("num_blocks", 512)),
                scheduler=SchedulerConfig(pipeline_depth=pool.get("depth", 1)),
            )
        )
        await engine.start()
        try:
            found = []
            for group in groups:
                streams = [(engine.generate(*item), *item) for item in group]
                for stream, prompt, params in streams:
                    output = await collect(stream, prompt, params, engine.tokenizer)
                    found.append((output.outputs[0].token_ids, output.outputs[0].text))
            return found, engine.stats().scheduler.totals.num_preemptions
        finally:
            await engine.stop()

    return asyncio.run(whole())


def all_kinds():
    texts = ["say it <think>", "say it again", "a<think>\n", "b b b b b"]
    params = [
        SamplingParams(thinking_budget=5, temperature=1.0, seed=1, max_tokens=40),
        SamplingParams(bad_words=["a", "bc", "e"], temperature=2.0, seed=2, max_tokens=40),
        SamplingParams(dry_multiplier=5.0, dry_allowed_length=1, seed=3, max_tokens=40),
        SamplingParams(xtc_probability=0.5, xtc_threshold=0.02, typical_p=0.9, seed=4),
    ]
    return [(text, param) for param in params for text in texts]


def test_a_budget_ends_the_reasoning_and_bad_words_do_not_come(checkpoint):
    found, _ = answers(checkpoint, [all_kinds()])
    closing = Tokenizer.open(checkpoint).encode("</think>")
    for (prompt, params), (token_ids, text) in zip(all_kinds(), found, strict=True):
        if params.thinking_budget is not None and prompt.rstrip().endswith("<think>"):
            assert list(token_ids[5:13]) == closing
        if params.bad_words:
            assert not any(word in text for word in params.bad_words)


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_and_beside_others_the_bits_are_those_of_a_run_alone(checkpoint, depth):
    kinds = all_kinds()
    alone, _ = answers(checkpoint, [[kind] for kind in kinds])
    starved, num_preemptions = answers(checkpoint, [kinds], num_blocks=66, depth=depth)
    assert num_preemptions > 0
    assert starved == alone
