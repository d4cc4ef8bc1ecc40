"""Schemas of parameters in formats that are no JSON: what is sampled is read back and fits."""

from __future__ import annotations

import json

import jsonschema_rs
import numpy as np
import pytest
from call_formats import FORMATS, parameters_of, written_call
from grammar_sampling import sampled_text, state_for
from tiny_checkpoint import write_checkpoint

from quickstep.errors import RequestError
from quickstep.runtime.sampling.sampler import sample_row
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.tokenizer import Tokenizer
from quickstep.text.tool_calls.call_grammar import call_grammar
from quickstep.text.tool_calls.reader import MessageParser
from quickstep.types import SamplingParams

NAMES = [
    *("qwen3_coder", "glm45", "glm45, in a line", "minimax_m2", "deepseek_v32", "seed_oss"),
    "gemma4",
]
DEFS = {
    "color": {"enum": ["red", 'dark "blue"', "<b>"]},
    "node": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
}
SCHEMAS = [
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]+/$"},
    {"type": "string", "pattern": "b", "maxLength": 4},
    {"enum": ["a", "true", "1", " x"]},
    {"enum": ["a", "1", 2, None, True]},
    {"const": "<a></a>"},
    {"$ref": "#/$defs/color"},
    {"type": ["string", "null"], "maxLength": 2},
    {"anyOf": [{"type": "string", "pattern": "^[0-9]$"}, {"type": "null"}]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"anyOf": [{"type": "array", "items": {"enum": [1]}}, {"type": "string", "maxLength": 3}]},
    {"type": ["boolean", "string"], "maxLength": 5},
    {"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/color"}]},
    {"allOf": [{"$ref": "#/$defs/color"}]},
    {"type": "integer", "minimum": 3, "maximum": 12},
    {"type": ["integer", "null"], "minimum": -3, "maximum": 3},
    {"type": "boolean", "description": "a switch", "default": True},
    {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 0},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {"$ref": "#/$defs/node"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, 264)


def function_of(schema, **more):
    parameters = {
        "type": "object",
        "properties": {"first": schema, "then": {"type": "integer"}},
        "required": ["first"],
        "additionalProperties": False,
        "$defs": DEFS,
    }
    return {"name": "f", "parameters": parameters, **more}


def calls_of(text, known, function):
    parser = MessageParser(known.grammar, lambda: "id", parameters_of([function]))
    message = parser.feed(text).followed_by(parser.finish())
    assert not message.content.strip(), text
    return [json.loads(call.arguments) for call in message.calls]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_sampled_arguments_fit_their_schema(compiler, tokenizer, name, schema):
    known, function = FORMATS[name], function_of(schema)
    grammar = call_grammar(known.spelling, [function], True, special_id=lambda text: None)
    for seed in range(2):
        text = sampled_text(compiler, tokenizer, grammar, seed, temperature=30.0)
        (arguments,) = calls_of(text, known, function)
        jsonschema_rs.validate(function["parameters"], arguments)


STRING = {"type": "string"}
ITEMS = {"type": "array", "items": STRING}
WISHES = [
    (STRING, 'a < b && </b>\n<parameter>\t"it\'s" \\n é😀'),
    (STRING, ""),
    (STRING, "5"),
    (STRING, "[1]"),
    ({"anyOf": [STRING, ITEMS]}, ["a", "</b>"]),
    ({"anyOf": [STRING, ITEMS]}, "5 items"),
    ({"anyOf": [STRING, {"type": "null"}]}, None),
    ({"anyOf": [STRING, {"type": "null"}]}, "a\nb"),
    ({"type": ["number", "null"]}, -1.5e-07),
    ({"type": ["number", "null"]}, None),
    ({"type": "integer"}, 123456789012345678901234567890),
    ({}, {"a": [1, None, {"b": "</x>"}]}),
    ({}, "plain text"),
    ({}, 12),
    (True, False),
    ({"type": "object"}, {"k": "v"}),
    ({"$ref": "#/$defs/node"}, {"next": {"next": None}}),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("schema", "value"), WISHES, ids=json.dumps)
def test_a_fitting_call_is_allowed_and_read_back(compiler, tokenizer, name, schema, value):
    known, function = FORMATS[name], function_of(schema)
    grammar = call_grammar(known.spelling, [function], True, special_id=lambda text: None)
    arguments = {"first": value, "then": 3}
    text = written_call(known, "f", json.dumps(arguments))
    assert calls_of(text, known, function) == [arguments]
    if schema in ({"type": "object"}, True, {}) and isinstance(value, dict):
        return  # JSON has a space after a colon there, these samples do not
    state = state_for(compiler, tokenizer, SamplingParams(grammar=grammar, temperature=0.0))
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        row = np.zeros(264, dtype=np.float32)
        row[token_id] = 100.0
        assert sample_row(row, state).token_id == token_id
        state.record(token_id)


REFUSED = [
    ({"type": "string", "format": "date"}, "has format"),
    ({"type": "string", "pattern": "(?=a)(?i)b"}, "has the pattern"),
    ({"anyOf": [STRING, {"type": "integer", "minimum": 3}]}, "has minimum"),
    ({"anyOf": [STRING], "maxLength": 3}, "has maxLength next to anyOf"),
    ({"allOf": [STRING, {"maxLength": 3}]}, "has allOf"),
    ({"maxLength": 3}, "has maxLength for values of any type"),
]


# these mark strings, so that the other values of a union are told apart
MARK_STRINGS = ("gemma4", "deepseek_v32")


@pytest.mark.parametrize(
    ("name", "schema", "why"),
    [
        (name, schema, why)
        for name in NAMES
        for schema, why in REFUSED
        if name not in MARK_STRINGS or "minimum" not in why
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_if_it_is_strict(name, schema, why):
    spelling = FORMATS[name].spelling
    with pytest.raises(RequestError, match=f"tools has the function f.*{why}"):
        call_grammar(spelling, [function_of(schema)], True, special_id=lambda text: None)
    loose = function_of(schema, strict=False)
    assert call_grammar(spelling, [loose], True, special_id=lambda text: None).text


def test_tags_and_quotes_that_are_special_tokens_are_written_by_their_ids(compiler, tokenizer):
    ids = {"<arg_key>": 7, "</arg_value>": 8, '<|"|>': 9}
    function = function_of(STRING)
    text = call_grammar(FORMATS["glm45"].spelling, [function], True, special_id=ids.get).text
    assert 'FUNCTION_0_TEXT_0 <[8]> "\\n"' in text
    text = call_grammar(FORMATS["gemma4"].spelling, [function], True, special_id=ids.get).text
    assert "<[9]> FUNCTION_0_TEXT_0 <[9]>" in text
