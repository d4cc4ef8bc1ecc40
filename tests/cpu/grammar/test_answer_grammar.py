"""A strict function that may be called: text stays free, and whatever is a call fits its schema."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from call_formats import FORMATS, parameters_of, written_call
from example_counts import examples
from grammar_sampling import state_for
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import write_checkpoint

from quickstep.runtime.sampling.sampler import Sample, sample_row
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.token_forms import TokenFormFinder
from quickstep.text.tokenizer import Tokenizer
from quickstep.text.tool_calls.answer_grammar import NotNestable, answer_grammar
from quickstep.text.tool_calls.formats import REASONING_FORMATS, message_grammar
from quickstep.text.tool_calls.reader import MessageParser
from quickstep.types import Grammar, SamplingParams

VOCAB_SIZE = 264
LIMIT = 500
STRICT = {
    "name": "find-it",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 5},
            "n": {"enum": [1, None]},
        },
        "required": ["text", "n"],
        "additionalProperties": False,
    },
}
FREE = {"name": "free", "parameters": None}
FUNCTIONS = [STRICT, FREE]
THINK = REASONING_FORMATS["think"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


def grammar_of(known, one_call=False, answer=None):
    return answer_grammar(known.spelling, FUNCTIONS, one_call, lambda text: None, answer)


def wished_text(compiler, tokenizer, grammar, wish, seed=1, inside=False, with_reasoning=True):
    """What a model writes that wants `wish` and takes what it may have instead; None if the limit
    cuts it. A byte that it may not write it wants again behind the one that it was given.
    """
    params = SamplingParams(
        grammar=grammar,
        temperature=0.0,
        max_tokens=LIMIT,
        reasoning_tags=(THINK.opening, THINK.closing) if with_reasoning else None,
        inside_reasoning=inside,
    )
    params = TokenFormFinder(tokenizer, VOCAB_SIZE, 4096, lambda: None).find(params, (1,))
    state = state_for(compiler, tokenizer, params, vocab_size=VOCAB_SIZE)
    (end,) = tokenizer.eos_token_ids
    ids = [tokenizer.encode(char, add_special_tokens=False) for char in wish]  # none is special
    wanted = [*itertools.chain.from_iterable(ids), end]
    tokens = []
    while len(tokens) < LIMIT:
        draw = np.random.default_rng((seed, len(tokens)))
        row = draw.normal(size=VOCAB_SIZE).astype(np.float32)
        row[wanted[0]] = 100.0
        sample = sample_row(row, state)
        assert isinstance(sample, Sample), sample
        state.record(sample.token_id)
        if sample.token_id == end:
            return b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
        tokens.append(sample.token_id)
        if sample.token_id == wanted[0]:
            wanted.pop(0)
    return None


def read(text, known, thoughts=THINK, inside=False):
    ids = itertools.count()
    grammar, parameters = message_grammar(known, thoughts, inside), parameters_of(FUNCTIONS)
    parser = MessageParser(grammar, lambda: f"call-{next(ids)}", parameters)
    return parser.feed(text).followed_by(parser.finish())


def check_calls(message, known):
    for marker in known.spelling.openings:
        assert marker not in message.content, "a call that is none"
    for call in message.calls:
        arguments = json.loads(call.arguments)
        assert call.name in ("find-it", "free")
        if call.name == "find-it":
            assert set(arguments) == {"text", "n"}
            assert len(arguments["text"]) <= 5
            assert arguments["n"] in (1, None)


PIECES = [
    "<think>",
    "</think>",
    "{",
    "[",
    '"name"',
    '"',
    "free",
    "find-it",
    "(",
    "\n",
    " ",
    "a",
    "ü",
]


def wishes(known):
    """Texts at the edges of the format."""
    spelling = known.spelling
    texts = [piece for piece in [*spelling.begin, *spelling.call] if isinstance(piece, str)]
    good = written_call(known, "find-it", '{"text": "a", "n": 1}')
    bad = written_call(known, "find-it", '{"text": "too long", "x": 2}')
    other = written_call(known, "free", '{"x": [1]}')
    markers = [*spelling.openings, *spelling.other_openings]
    pieces = st.sampled_from([*PIECES, *texts, good, bad, other, *markers])
    return st.lists(pieces, max_size=6).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inside", [False, True])
@examples(12)
@given(data=st.data())
def test_whatever_is_written_is_content_or_a_call_that_fits(
    compiler, tokenizer, name, inside, data
):
    known = FORMATS[name]
    wish = data.draw(wishes(known))
    one_call = data.draw(st.booleans())
    grammar, seed = grammar_of(known, one_call), data.draw(st.integers(0, 3))
    in_tags = known.spelling.thoughts is None
    text = wished_text(compiler, tokenizer, grammar, wish, seed, inside and in_tags, in_tags)
    if text is not None:
        message = read(text, known, inside=inside)
        check_calls(message, known)
        assert len(message.calls) <= 1 or not one_call


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arguments", ['{"text": "a", "n": 1}', '{"text": "", "n": null}'])
def test_a_call_that_fits_is_written_as_the_model_wants_it(compiler, tokenizer, name, arguments):
    known = FORMATS[name]
    told = json.loads(arguments)
    before = "" if known.spelling.anchor or known.spelling.thoughts else "Well: "
    wish = before + written_call(known, "find-it", arguments)
    text = wished_text(compiler, tokenizer, grammar_of(known), wish)
    assert text == wish
    message = read(text, known)
    assert message.content.strip() == before.strip()
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [
        ("find-it", told)
    ]


ANSWERS = [
    "",
    'Hello.\nA <tool> is [no] call: {"a": 1}',
    '{"answer": {"name": 3}}',
    "[1, 2]",
    "[see] (this)",
    "  \n<tool_cal",
    "<think>May I <tool_call>{</think>No: 5 < 6",
    "<think>never closed [TOOL_CALLS] {",
]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_without_a_call_is_unchanged(compiler, tokenizer, name, answer):
    known = FORMATS[name]
    assert wished_text(compiler, tokenizer, grammar_of(known), answer) == answer
    inside = answer.removeprefix("<think>")
    if inside != answer:
        grammar = grammar_of(known)
        assert wished_text(compiler, tokenizer, grammar, inside, inside=True) == inside


def test_an_answer_in_channels_is_unchanged(compiler, tokenizer):
    known = FORMATS["harmony"]
    thought = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
    answer = f"{thought}{thought}<|channel|>final<|message|>It is [2]."
    assert wished_text(compiler, tokenizer, grammar_of(known), answer) == answer
    call = '<|channel|>commentary to=functions.free <|constrain|>json<|message|>{"a": 1}'
    assert wished_text(compiler, tokenizer, grammar_of(known), thought + call) == thought + call


def test_several_calls_with_text_between_them(compiler, tokenizer):
    known = FORMATS["hermes"]
    good = written_call(known, "find-it", '{"text": "a", "n": 1}')
    other = written_call(known, "free", '{"x": [1]}')
    wish = f"First {good}, then\n{other}{good} done"
    assert wished_text(compiler, tokenizer, grammar_of(known), wish) == wish
    assert len(read(wish, known).calls) == 3


def test_markers_that_are_special_tokens_end_the_text(compiler, tokenizer):
    known = FORMATS["mistral, named"]
    ids = {"[TOOL_CALLS]": 7, "[ARGS]": 8}
    text = answer_grammar(known.spelling, FUNCTIONS, False, ids.get).text
    assert "answer_opening: TEXT <[7]>" in text
    assert 'function_0: "find-it" <[8]> function_0_arguments' in text


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
STRUCTURED = [
    (Grammar.of_json_schema({**SCHEMA, "additionalProperties": False}), '{"b": 12}'),
    (Grammar.of_json_object(), '{"c": [1, {}]}'),
    (Grammar.of_regex("[a-z]+/[0-9]\\.x"), "ab/7.x"),
    (Grammar.of_choice(['yes "indeed"', "no"]), 'yes "indeed"'),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("answer", "text"), STRUCTURED)
def test_an_answer_under_a_grammar_or_a_call_is_written_as_the_model_wants_it(
    compiler, tokenizer, name, answer, text
):
    known = FORMATS[name]
    grammar = grammar_of(known, answer=answer)
    in_tags = known.spelling.thoughts is None
    thought = "<think>hm</think>"
    wish = thought + text
    if not in_tags:
        thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        wish = f"{thought}<|channel|>final<|message|>{text}"
    assert wished_text(compiler, tokenizer, grammar, wish, with_reasoning=in_tags) == wish
    message = read(wish, known)
    assert (message.content, message.reasoning, message.calls) == (text, "hm", ())
    arguments = '{"text": "a", "n": 1}'
    call = thought + written_call(known, "find-it", arguments)
    assert wished_text(compiler, tokenizer, grammar, call, with_reasoning=in_tags) == call
    (found,) = read(call, known).calls
    assert (found.name, json.loads(found.arguments)) == ("find-it", json.loads(arguments))


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "pythonic"])
@pytest.mark.parametrize("wish", ["Sure, I can", "[1]", '{"b": "x"}', "<tool_call>{no}"])
def test_what_is_neither_a_call_nor_the_answer_is_not_written(compiler, tokenizer, name, wish):
    known = FORMATS[name]
    grammar = grammar_of(known, answer=STRUCTURED[0][0])
    text = wished_text(compiler, tokenizer, grammar, wish)
    assert text is not None
    message = read(text, known)
    check_calls(message, known)
    assert message.calls or set(json.loads(message.content)) == {"b"}


def test_a_grammar_of_rules_cannot_be_part_of_another():
    with pytest.raises(NotNestable, match="lark"):
        grammar_of(FORMATS["hermes"], answer=Grammar.of_lark('start: "x"'))
