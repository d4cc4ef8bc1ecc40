"""A grammar after the reasoning, which is free: the answer fits the grammar and the limit."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from example_counts import examples
from grammar_sampling import state_for
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from quickstep.runtime.sampling.grammar import GrammarStart
from quickstep.runtime.sampling.reasoning import ReasonedGrammar, ReasoningPlace, ReasoningTracker
from quickstep.runtime.sampling.sampler import Sample, sample_row
from quickstep.sampling_params import ReasoningTokens
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.token_forms import TokenFormFinder
from quickstep.text.tokenizer import Tokenizer
from quickstep.text.tool_calls.formats import REASONING_FORMATS, message_grammar
from quickstep.text.tool_calls.reader import MessageParser
from quickstep.types import Grammar, SamplingParams

VOCAB_SIZE = 264
PROMPT = (1, 2, 3)
TAGS = ("<think>", "</think>")
GRAMMAR = Grammar.of_json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["a", "n"],
        "additionalProperties": False,
    }
)
SHORTEST = 30  # more tokens than the shortest object, the closing tag and the end token take


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


def params_for(tokenizer, max_tokens, is_open, grammar=GRAMMAR, **fields):
    sampling = SamplingParams(
        grammar=grammar,
        reasoning_tags=TAGS,
        inside_reasoning=is_open,
        max_tokens=max_tokens,
        **{"temperature": 0.0, **fields},
    )
    return TokenFormFinder(tokenizer, VOCAB_SIZE, 4096, lambda: None).find(sampling, PROMPT)


def continued(compiler, tokenizer, params, row_at, outputs=(), state=None):
    """The output up to its end or its limit, whose logits at position n are `row_at(n, tokens)`."""
    tokens = list(outputs)
    state = state or state_for(compiler, tokenizer, params, tokens, vocab_size=VOCAB_SIZE)
    while len(tokens) < params.in_tokens.max_tokens:
        sample = sample_row(row_at(len(tokens), tokens), state)
        assert isinstance(sample, Sample), sample
        tokens.append(sample.token_id)
        state.record(sample.token_id)
        if sample.token_id in tokenizer.eos_token_ids:
            break
    return tokens


def wisher(tokenizer, wish):
    """Logits of a model that writes `wish`, and what it may have instead where it may not."""
    (end,) = tokenizer.eos_token_ids
    ids = [tokenizer.encode(char, add_special_tokens=False) for char in wish]
    wanted = [*itertools.chain.from_iterable(ids), end]

    def row_at(position, tokens):
        row = np.random.default_rng(position).normal(size=VOCAB_SIZE).astype(np.float32)
        done = 0
        for token_id in tokens:
            done += done < len(wanted) - 1 and token_id == wanted[done]
        row[wanted[done]] = 100.0
        return row

    return row_at


def text_of(tokenizer, tokens):
    (end,) = tokenizer.eos_token_ids
    return b"".join(tokenizer.token_bytes(i) for i in tokens if i != end).decode(errors="replace")


def read(text, is_open):
    grammar = message_grammar(None, REASONING_FORMATS["think"], is_open)
    parser = MessageParser(grammar, lambda: "call")
    return parser.feed(text).followed_by(parser.finish())


ANSWER = '{"a": "x", "n": 1}'


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning"),
    [
        (True, f"Is it {{1}}? <think>\n</think>{ANSWER}", "Is it {1}? <think>"),
        (True, f"hm</think>\n\n{ANSWER}", "hm"),
        (False, f"<think>hm</think>\n\n{ANSWER}", "hm"),
        (False, f"<think></think>{ANSWER}", ""),
        (False, ANSWER, ""),
    ],
)
def test_a_model_may_reason_before_the_grammar(compiler, tokenizer, is_open, text, reasoning):
    params = params_for(tokenizer, 400, is_open)
    tokens = continued(compiler, tokenizer, params, wisher(tokenizer, text))
    assert text_of(tokenizer, tokens) == text
    message = read(text, is_open)
    assert (message.reasoning, message.content) == (reasoning, ANSWER)


@pytest.mark.parametrize(
    ("is_open", "wish"),
    [
        (True, "hm"),  # no end inside the reasoning
        (True, "hm</think>Sure: {}"),
        (True, "hm</think>\n\n\n\n[]"),
        (False, "Sure."),
        (False, "<thinking about it>"),
        (False, "<think>hm</think>no"),
    ],
)
def test_what_follows_the_reasoning_fits_whatever_the_model_wants(
    compiler, tokenizer, is_open, wish
):
    params = params_for(tokenizer, 300, is_open)
    tokens = continued(compiler, tokenizer, params, wisher(tokenizer, wish))
    message = read(text_of(tokenizer, tokens), is_open)
    assert set(json.loads(message.content)) == {"a", "n"}


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("max_tokens", [*range(SHORTEST, SHORTEST + 30, 3), 90])
def test_the_reasoning_is_closed_in_time_for_the_grammars_end(
    compiler, tokenizer, is_open, max_tokens
):
    params = params_for(tokenizer, max_tokens, is_open)
    wish = ("" if is_open else "<think>") + "and then " * 40
    tokens = continued(compiler, tokenizer, params, wisher(tokenizer, wish))
    assert len(tokens) <= max_tokens
    assert tokens[-1] in tokenizer.eos_token_ids
    message = read(text_of(tokenizer, tokens), is_open)
    assert set(json.loads(message.content)) == {"a", "n"}
    if max_tokens == 90:
        assert message.reasoning.startswith("and then and then")


def test_a_budget_closes_the_reasoning_and_the_grammar_follows(compiler, tokenizer):
    params = params_for(tokenizer, 200, True, thinking_budget=9)
    wish = "and then " * 40
    tokens = continued(compiler, tokenizer, params, wisher(tokenizer, wish))
    message = read(text_of(tokenizer, tokens), True)
    assert message.reasoning == "and then"
    assert set(json.loads(message.content)) == {"a", "n"}


MESSAGE = " Enough, I answer now."


def test_a_budgets_message_is_part_of_the_reasoning(compiler, tokenizer):
    fields = {"thinking_budget": 9, "reasoning_budget_message": MESSAGE}
    params = params_for(tokenizer, 200, True, **fields)
    tokens = continued(compiler, tokenizer, params, wisher(tokenizer, "and then " * 40))
    message = read(text_of(tokenizer, tokens), True)
    assert message.reasoning == f"and then {MESSAGE}".strip()
    assert set(json.loads(message.content)) == {"a", "n"}


@pytest.mark.parametrize("max_tokens", range(SHORTEST, SHORTEST + 60, 5))
def test_a_budgets_message_leaves_the_grammar_its_tokens(compiler, tokenizer, max_tokens):
    fields = {"thinking_budget": 3, "reasoning_budget_message": MESSAGE * 2}
    params = params_for(tokenizer, max_tokens, True, **fields)
    tokens = continued(compiler, tokenizer, params, wisher(tokenizer, "and then " * 40))
    assert len(tokens) <= max_tokens and tokens[-1] in tokenizer.eos_token_ids
    assert set(json.loads(read(text_of(tokenizer, tokens), True).content)) == {"a", "n"}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(SHORTEST, 70), st.data())
def test_an_interrupted_output_continues_as_if_it_had_not_been(
    compiler, tokenizer, seed, is_open, max_tokens, data
):
    fields = {"thinking_budget": 6, "reasoning_budget_message": "Enough."} if seed % 2 else {}
    params = params_for(tokenizer, max_tokens, is_open, temperature=1.0, **fields)
    tag = tokenizer.encode("<think></think>", add_special_tokens=False)

    def row_at(position, tokens):
        row = np.random.default_rng((seed, position)).normal(size=VOCAB_SIZE).astype(np.float32)
        row[tag] += 3.0  # so that tags really come up, whole and in part
        row[tag[position % len(tag)]] += 6.0
        return row

    tokens = continued(compiler, tokenizer, params, row_at)
    place = data.draw(st.integers(0, len(tokens) - 1))
    assert continued(compiler, tokenizer, params, row_at, tokens[:place]) == tokens
    message = read(text_of(tokenizer, tokens), is_open)
    if tokens[-1] in tokenizer.eos_token_ids:
        assert set(json.loads(message.content)) == {"a", "n"}


def test_a_grammar_without_reasoning_begins_with_the_output(compiler, tokenizer):
    sampling = SamplingParams(grammar=GRAMMAR, max_tokens=100, temperature=0.0)
    params = TokenFormFinder(tokenizer, VOCAB_SIZE, 4096, lambda: None).find(sampling, PROMPT)
    tokens = continued(compiler, tokenizer, params, wisher(tokenizer, "<think>hm</think>"))
    assert text_of(tokenizer, tokens).startswith("{")


PIECES = {
    1: b"<think>",
    2: b"</think>",
    3: b"</",
    4: b"think>",
    5: b"think>{",
    6: b">\n\n",
    7: b"hink",
    8: b"\n",
    9: b"</t",
    10: b"a</think>b",
}
TOKENS = ReasoningTokens(b"<think>", b"</think>", (2,), PIECES)


@pytest.mark.parametrize(
    ("outputs", "place"),
    [
        ([], ReasoningPlace.BEFORE),
        ([8, 8], ReasoningPlace.BEFORE),
        ([8, 1], ReasoningPlace.INSIDE),
        ([0, 1], ReasoningPlace.AFTER),
        ([1, 2], ReasoningPlace.GAP),
        ([1, 3, 4], ReasoningPlace.GAP),
        ([1, 3, 3, 4], ReasoningPlace.GAP),
        ([1, 3, 0, 4], ReasoningPlace.INSIDE),
        ([1, 9, 7, 6], ReasoningPlace.AFTER),
        ([1, 9, 7, 0], ReasoningPlace.INSIDE),
        ([1, 2, 8], ReasoningPlace.GAP),
        ([1, 2, 8, 8], ReasoningPlace.AFTER),
        ([1, 2, 0], ReasoningPlace.AFTER),
        ([1, 10], ReasoningPlace.AFTER),
    ],
)
def test_the_tags_are_found_in_the_text_however_it_is_cut_into_tokens(outputs, place):
    assert ReasoningTracker(TOKENS, outputs).place is place


def test_a_token_that_continues_after_the_closing_tag_is_left_out():
    assert ReasoningTracker(TOKENS, [1]).overshooting_ids().tolist() == [10]
    assert ReasoningTracker(TOKENS, [1, 3]).overshooting_ids().tolist() == [5, 10]
    assert ReasoningTracker(replace(TOKENS, starts_open=True)).place is ReasoningPlace.INSIDE


@examples(80)
@given(st.lists(st.sampled_from([*PIECES, 0]), max_size=10), st.booleans())
def test_the_tracker_agrees_with_the_parser_of_the_text(outputs, is_open):
    tracker = ReasoningTracker(replace(TOKENS, starts_open=is_open), outputs)
    text = b"".join(PIECES.get(token_id, b"?") for token_id in outputs).decode()
    body = text.lstrip()
    opened = is_open or body.startswith(TAGS[0])
    inside = body.removeprefix(TAGS[0]) if not is_open else text
    if not opened:
        expected = {ReasoningPlace.BEFORE} if TAGS[0].startswith(body) else {ReasoningPlace.AFTER}
    elif TAGS[1] in inside:
        expected = {ReasoningPlace.GAP, ReasoningPlace.AFTER}
    else:
        expected = {ReasoningPlace.INSIDE}
    assert tracker.place in expected


def test_the_mask_inside_the_reasoning_is_built_once(compiler, tokenizer):
    tags = replace(TOKENS, starts_open=True)
    matcher, closing = compiler.compile(GRAMMAR).matcher, compiler.compile(GRAMMAR).closing
    start = GrammarStart(matcher, closing, np.array([5, 6], dtype=np.int64), VOCAB_SIZE)
    reasoned = ReasonedGrammar(start, tags, 4000)
    masks = []
    for token_id in (0, 3, 0, 9, 0):
        masks.append(reasoned.allowed_bits())
        reasoned.record(token_id)
    free, begun = masks[0], masks[2]
    assert masks[1] is free and masks[2] is not free and masks[3] is free
    assert masks[4] is not begun
    assert not free.flags.writeable
