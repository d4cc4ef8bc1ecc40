"""A forced call: text sampled under its grammar reads back as calls with fitting arguments."""

from __future__ import annotations

import itertools
import json

import pytest
from call_formats import FORMATS, parameters_of
from grammar_sampling import sampled_text
from tiny_checkpoint import write_checkpoint

from quickstep.errors import RequestError
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.tokenizer import Tokenizer
from quickstep.text.tool_calls.call_grammar import call_grammar
from quickstep.text.tool_calls.reader import MessageParser

FUNCTIONS = [
    {"name": "now", "parameters": {"properties": {}, "additionalProperties": False}},
    {
        "name": "find-it",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "maxLength": 9},
                "many": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
                "n": {"enum": [1, None]},
            },
            "required": ["text", "n"],
            "additionalProperties": False,
            "$defs": {"flag": {"type": "boolean"}},
        },
    },
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, 264)


def calls_in(text, known, functions=FUNCTIONS):
    ids = itertools.count()
    parameters = parameters_of(functions)
    parser = MessageParser(known.grammar, lambda: f"call-{next(ids)}", parameters)
    whole = parser.feed(text).followed_by(parser.finish())
    return whole.content, [(call.name, json.loads(call.arguments)) for call in whole.calls]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("one_call", [True, False])
def test_forced_text_reads_back_as_calls(compiler, tokenizer, name, one_call):
    known = FORMATS[name]
    grammar = call_grammar(known.spelling, FUNCTIONS, one_call, special_id=lambda text: None)
    has_one_count = one_call or not known.spelling.repeats
    seen: set[int] = set()
    for seed in range(12):  # half of them, if these have different numbers of calls
        if seed >= 6 and (has_one_count or len(seen) > 1):
            break
        text = sampled_text(compiler, tokenizer, grammar, seed, temperature=30.0)
        content, calls = calls_in(text, known)
        assert content.strip() == "", text
        assert len(calls) == 1 if one_call else calls
        seen.add(len(calls))
        for name, arguments in calls:
            assert name in ("now", "find-it")
            if name == "now":
                assert arguments == {}
                continue
            assert {"text", "n"} <= set(arguments) <= {"text", "many", "n"}
            assert len(arguments["text"]) <= 9
            assert arguments["n"] in (1, None)
            assert set(arguments.get("many", ())) <= {True, False}
    assert has_one_count or len(seen) > 1


def test_optional_keywords_come_with_commas_that_fit(compiler, tokenizer):
    known = FORMATS["pythonic"]
    flag = {"type": "boolean"}
    parameters = {"properties": {"a": flag, "b": flag, "c": flag}, "required": ["b"]}
    function = {"name": "f", "parameters": parameters}
    grammar = call_grammar(known.spelling, [function], True, special_id=lambda text: None)
    seen = set()
    for seed in range(40):
        content, calls = calls_in(sampled_text(compiler, tokenizer, grammar, seed), known)
        assert content == ""
        ((_, arguments),) = calls
        seen.add("".join(arguments))
    assert seen == {"b", "ab", "bc", "abc"}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ({"name": "1st", "parameters": {}}, "begins with no letter"),
        ({"name": "f", "parameters": {"anyOf": [{}]}}, "has anyOf in its parameters"),
        ({"name": "f", "parameters": {"properties": {"a-b": {}}}}, "'a-b'"),
        ({"name": "f", "parameters": {"properties": [1]}}, "no JSON schema"),
        ({"name": "f", "parameters": {"required": 5}}, "no JSON schema"),
        ({"name": "f", "parameters": {"properties": {"from": {}}}}, "'from'"),
    ],
)
def test_what_python_cannot_spell_is_refused_by_name(function, why):
    spelling = FORMATS["pythonic"].spelling
    with pytest.raises(RequestError, match=f"tools has the function {function['name']}.*{why}"):
        call_grammar(spelling, [function], True, special_id=lambda text: None)


def test_special_tokens_replace_the_markers_that_they_are():
    ids = {"[TOOL_CALLS]": 7, "[ARGS]": 8}
    grammar = call_grammar(FORMATS["mistral, named"].spelling, FUNCTIONS[:1], True, ids.get)
    assert '<[7]> "now" <[8]> function_0_arguments' in grammar.text
