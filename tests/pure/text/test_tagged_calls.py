"""Calls of tags and braces as models write them, and the values that their texts mean."""

from __future__ import annotations

import json

import pytest
from parsed_message import Parsed, new_parser, parse

from quickstep.text.tool_calls.message_delta import CallDelta
from quickstep.text.tool_calls.parameter_types import json_of_value, parameter_schema, value_types

BAR = "\uff5c"
SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}},
}
QWEN = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
DSML = (
    f'<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="f">\n'
    f"{{}}</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>"
)
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"


def dsml(name, said, value):
    return (
        f'<{BAR}DSML{BAR}parameter name="{name}" string="{said}">{value}'
        f"</{BAR}DSML{BAR}parameter>\n"
    )


def qwen(name, value):
    return f"<parameter={name}>\n{value}\n</parameter>\n"


MEANT = [
    ("qwen3_coder", QWEN.format(qwen("s", "a") + qwen("n", "1")), [{"s": "a", "n": 1}]),
    ("qwen3_coder", QWEN.format(""), [{}]),
    ("qwen3_coder", "<tool_call><function=f></function></tool_call>", [{}]),
    ("qwen3_coder", "<function=f>\n" + qwen("n", "1") + "</function>", [{"n": 1}]),
    ("qwen3_coder", "<function=f>\n" + qwen("n", "1") + "</function>\n</tool_call>", [{"n": 1}]),
    ("qwen3_coder", QWEN.format("<parameter=n>1</parameter>"), [{"n": 1}]),
    ("qwen3_coder", QWEN.format(qwen("s", "")), [{"s": ""}]),
    ("qwen3_coder", QWEN.format(qwen("s", "\n a \n")), [{"s": "\n a \n"}]),
    ("qwen3_coder", QWEN.format('<parameter="s">\na\n</parameter>\n'), [{"s": "a"}]),
    ("qwen3_coder", QWEN.replace("=f>", '="f">').format(qwen("b", "True")), [{"b": True}]),
    ("qwen3_coder", QWEN.format(qwen("s", '"a"')), [{"s": '"a"'}]),
    (
        "qwen3_coder",
        QWEN.format(qwen("s", "</parameter>\n</b> <parameter>\n</function>")),
        [{"s": "</parameter>\n</b> <parameter>\n</function>"}],
    ),
    # the end of a value is missing, but not that of the block
    ("qwen3_coder", QWEN.format("<parameter=s>\na\n"), [{"s": "a"}]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n" + qwen("n", "1") + "</tool_call>", [{"n": 1}]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n</function>\n<function=f>\n</function>\n</tool_call>",
        [{}, {}],
    ),
    ("seed_oss", QWEN.replace("tool_call", "seed:tool_call").format(qwen("n", "2")), [{"n": 2}]),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\n</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value> 7 </arg_value>\n</tool_call>\n<tool_call>f</tool_call>",
        [{"s": "a\n", "n": 7}, {}],
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>b</arg_key><arg_value>false</arg_value></tool_call>",
        [{"b": False}],
    ),
    ("glm45", "<tool_call>f\n", [None]),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a <b> "c"</parameter>\n'
        "</invoke>\n<invoke name='f'>\n</invoke>\n</minimax:tool_call>",
        [{"s": 'a <b> "c"'}, {}],
    ),
    (
        "deepseek_v32",
        DSML.format(dsml("s", "true", "1") + dsml("n", "false", "1") + dsml("x", "true", "2")),
        [{"s": "1", "n": 1, "x": "2"}],
    ),
    (
        "kimi_k2",
        KIMI.format(
            '<|tool_call_begin|>functions.f:0 <|tool_call_argument_begin|> {"n": 1}'
            "<|tool_call_end|>\n<|tool_call_begin|>f<|tool_call_argument_begin|>"
            "<|tool_call_end|>"
        ),
        [{"n": 1}, {}],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{s:<|"|>a "b", {c}\\<|"|>,l:[1,-2.5,<|"|>x<|"|>],o:{k:null},'
        '"q":"é\\n",e:[],w:plain text}<tool_call|>',
        [
            {
                "s": 'a "b", {c}\\',
                "l": [1, -2.5, "x"],
                "o": {"k": None},
                "q": "é\n",
                "e": [],
                "w": "plain text",
            }
        ],
    ),
    (
        "gemma4",
        "<|tool_call>call:f{}<tool_call|><|tool_call>call:f{n:1}<tool_call|>",
        [{}, {"n": 1}],
    ),
    ("lfm2", "<|tool_call_start|>[f(s='a', n=1), f()]<|tool_call_end|>", [{"s": "a", "n": 1}, {}]),
]


@pytest.mark.parametrize(("name", "text", "meant"), MEANT)
def test_calls_mean_what_the_schema_says(name, text, meant):
    parsed = parse(f"So:\n{text}", name, parameters={"f": SCHEMA})
    assert parsed.content == "So:"
    assert [called for called, _ in parsed.calls] == ["f"] * len(meant)
    arguments = [json.loads(text) if text else None for _, text in parsed.calls]
    assert arguments == meant
    pieces = [f"So:\n{text}"[at : at + 1] for at in range(len(text) + 4)]
    assert parse(pieces, name, parameters={"f": SCHEMA}) == parsed


NO_CALLS = [
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("qwen3_coder", "<tool_call>f</tool_call>"),
    ("qwen3_coder", "<function=a b c>"),
    ("qwen3_coder", "a <function> of x"),
    ("glm45", "<tool_call> is a tag</tool_call>"),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>'),
    ("minimax_m2", "<invoke name='f'>"),
    ("minimax_m2", "<minimax:tool_call>f</minimax:tool_call>"),
    ("kimi_k2", "<|tool_calls_section_begin|>nothing"),
    ("kimi_k2", "functions.f:0 {}"),
    ("gemma4", "<|tool_call>f{}"),
    ("gemma4", "call:f{}"),
    ("lfm2", "[f(a=1)]"),
    ("lfm2", "<|tool_call_start|>nothing"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_letter(name, text):
    for around in (text, f"so: {text} \n", f"\n {text}"):
        assert parse(around, name) == Parsed(around)


def test_strings_come_as_they_are_written_and_other_values_once_they_are_complete():
    parser = new_parser("qwen3_coder", parameters={"f": SCHEMA})
    assert parser.feed("<tool_call>\n<function=f>").parts == (
        CallDelta(0, call_id="call0", name="f"),
    )
    assert parser.feed("\n<parameter=s>").parts == (CallDelta(0, '{"s": "'),)
    assert parser.feed("\nab\n").parts == (CallDelta(0, "ab"),)
    assert parser.feed("c</par").parts == (CallDelta(0, "\\nc"),)
    assert parser.feed("t>").parts == (CallDelta(0, "</part>"),)
    assert not parser.feed("\n</parameter>\n").parts
    assert parser.feed("<parameter=n>\n12").parts == (CallDelta(0, '"'),)
    assert not parser.feed("3\n</parameter>").parts
    assert parser.feed("</function>").parts == (CallDelta(0, ', "n": 123}', is_last=True),)


REASONING = [
    ("seed_oss", "<seed:think>hm</seed:think>yes", Parsed("yes", "hm")),
    ("gemma4", "<|channel>thought\nhm\n<channel|>yes", Parsed("yes", "hm")),
    ("gemma4", "<|channel>thought\n<channel|>yes", Parsed("yes")),
    ("gemma4", "yes", Parsed("yes")),
]


@pytest.mark.parametrize(("name", "text", "meant"), REASONING)
def test_reasoning_of_these_families_is_set_apart(name, text, meant):
    assert parse(text, None, name) == meant
    assert parse(list(text), None, name) == meant


ROOT = {
    "$defs": {
        "count": {"type": "integer"},
        "either": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "boolean"}]},
    }
}
REF = {"$ref": "#/$defs/either"}
VALUES = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "true", "true"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, " 5\n", 5),
    ({"type": "integer"}, "5.0", 5.0),
    ({"type": "integer"}, "5.5", "5.5"),
    ({"type": "integer"}, "many", "many"),
    ({"type": "integer"}, "", ""),
    ({"type": "integer"}, "1" * 40, int("1" * 40)),
    ({"type": "number"}, "5.5", 5.5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": ["boolean", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "a", "a"),
    ({"type": ["string", "integer"]}, "12", 12),
    ({"type": ["string", "integer"]}, "012", "012"),
    ({"type": "array"}, "[1, 2]", [1, 2]),
    ({"type": "array"}, "['a', True, None]", ["a", True, None]),
    ({"type": "array"}, "(1, 2)", [1, 2]),
    ({"type": "array"}, "[1, 2", "[1, 2"),
    ({"type": "object"}, '{"a": 1}', {"a": 1}),
    ({"type": "object"}, "{'a': {'b': \"it's\"}}", {"a": {"b": "it's"}}),
    ({"type": "object"}, "[1]", "[1]"),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "['a']", "['a']"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, "1"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"const": True}, "True", True),
    (REF, "3", 3),
    (REF, "None", None),
    ({"allOf": [REF]}, "3", 3),
    ({"$ref": "#/$defs/circle"}, "True", True),
    ({"$ref": "#/$defs/missing"}, "3", 3),
    ({}, "3", 3),
    ({}, "True", "True"),
    ({}, "true", True),
    ({}, "some text", "some text"),
    ({}, '{"a": [1]}', {"a": [1]}),
    (True, "null", None),
    ({"type": "nonsense"}, "3", "3"),
    ({"type": 3, "anyOf": 4, "enum": 5, "$ref": 6, "allOf": {}}, "3", 3),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_text_is_a_value_of_the_types_that_the_schema_allows(schema, text, value):
    assert json.loads(json_of_value(text, schema, ROOT)) == value


def test_an_integer_keeps_its_digits():
    assert json_of_value("1357924680135792469", {"type": "integer"}, {}) == "1357924680135792469"


def test_a_parameter_is_found_where_the_schema_declares_it():
    parameters = {
        "allOf": [{"properties": {"a": {"type": "integer"}}}, {"$ref": "#/$defs/b"}],
        "$defs": {"b": {"properties": {"b": {"type": "boolean"}}}},
        "additionalProperties": {"type": "null"},
        "properties": {"c": False},
    }
    kinds = {
        name: value_types(parameter_schema(parameters, name), parameters)
        for name in ("a", "b", "x")
    }
    assert kinds["x"] == {"null"}
    assert "integer" in kinds["a"]
    assert "boolean" in kinds["b"]
    assert parameter_schema({"properties": [1]}, "a") is True
    assert parameter_schema({}, "a") is True


def test_schemas_that_refer_to_each_other_many_times_are_read_once_each():
    names = [f"s{place}" for place in range(200)]
    defs = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 8}
        for name, after in zip(names, [*names[1:], "end"], strict=True)
    }
    root = {"$defs": {**defs, "end": {"type": "integer"}}}
    assert value_types({"$ref": "#/$defs/s0"}, root) == {"integer"}
