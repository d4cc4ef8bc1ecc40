"""What each format's texts mean: calls, content around them, and what is no call after all."""

from __future__ import annotations

import json

import pytest
from parsed_message import Parsed, new_parser, parse

from quickstep.engine.tool_calls.formats import TOOL_CALL_FORMATS

F, G = ("f", '{"a": 1}'), ("g", "{}")
WEATHER = ("get_weather", '{"city": "São Paulo", "days": [1, 2]}')
BAR = "\uff5c"


def deepseek(text):
    """Its markers, spelled with the wide bar."""
    return text.replace("<|", f"<{BAR}").replace("|>", f"{BAR}>").replace("_", "▁")


V3 = deepseek(
    "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f\n```json\n"
    '{"a": 1}\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>g\n```json\n'
    "{}\n```<|tool_call_end|><|tool_calls_end|>"
)
V31 = deepseek(
    '<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|>'
    "<|tool_call_begin|>g<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>"
)
HARMONY = (
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"a": 1}<|call|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}'
)

MEANT = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>\nDone.',
        "Let me see.\n\n\nDone.",
        [F, G],
    ),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}', "", [G]),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [G]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [F],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\" } ]"}}</tool_call>',
        "",
        [("f", '{"s": "</tool_call> \\" } ]"}')],
    ),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (
        "llama3_json",
        '\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [F, G],
    ),
    (
        "llama3_json",
        '{"type": "function", "name": "f", "parameters": {"a": 1}}\nfine',
        "fine",
        [F],
    ),
    ("llama3_json", 'So:\n<|python_tag|>{"name": "g", "parameters": {}}', "So:", [G]),
    ("pythonic", "[f(a=1), g()]", "", [F, G]),
    ("pythonic", "<|python_start|>[f(a=1,),g( ),]<|python_end|>", "", [F, G]),
    (
        "pythonic",
        "[get_weather(city='São Paulo', days=[1, 2])]",
        "",
        [WEATHER],
    ),
    (
        "pythonic",
        "[f.x(s=\"a\\n'\\u00e9\\x41\\d\", t=True, n=None, d={'k': [-1.5, {}, .5, 1_000]})]",
        "",
        [
            (
                "f.x",
                '{"s": "a\\n\'éA\\\\d", "t": true, "n": null, "d": {"k": [-1.5, {}, 0.5, 1000]}}',
            )
        ],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', "", [F, G]),
    ("mistral", 'x [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "x", [F, G]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": 1}', "", [F]),
    ("mistral", "[TOOL_CALLS]g{}", "", [G]),
    ("deepseek_v3", f"Sure.\n\n{V3}", "Sure.", [F, G]),
    ("deepseek_v3", V31, "", [F, G]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', "", [F, G]),
    ("granite", '<tool_call>[{"name": "g", "arguments": {}}]</tool_call> x', "x", [G]),
    ("granite", ' [{"name": "g", "arguments": {}}]', "", [G]),
    ("harmony", HARMONY, "", [F, G]),
    ("harmony", ' to=functions.f<|channel|>commentary<|message|>{"a": 1}', "", [F]),
    (
        "harmony",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" + HARMONY,
        "Let me see.",
        [F, G],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), MEANT)
def test_calls_are_found_and_the_text_around_them_is_content(name, text, content, calls):
    assert parse(text, name) == Parsed(content, "", tuple(calls))


MALFORMED = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} or so</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}"),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '{"name": "Bob"}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}'),
    ("pythonic", "[f(a=1), g("),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=__import__('os'))]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a='\\ud800')]"),
    ("pythonic", "[f(a=" + "[" * 70 + "]" * 70 + ")]"),
    ("pythonic", "[link](https://example.org)"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{"),
    ("deepseek_v3", V3.replace('{"a": 1}', "{a}").partition("\n<")[0]),
    ("deepseek_v3", V31[:40]),
    ("granite", "<|tool_call|>none"),
    ("granite", '[{"name": "f"'),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_no_call_is_content_to_the_letter(name, text):
    for around in (text, f"so: {text} \n", f"\n {text}"):
        assert parse(around, name) == Parsed(around)


def test_a_malformed_call_does_not_hide_the_next_one():
    good = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert parse(f"<tool_call>{{nope}}</tool_call>\n{good}", "hermes") == Parsed(
        "<tool_call>{nope}</tool_call>", "", (G,)
    )
    assert parse(f"<tool_call>{good}", "hermes") == Parsed("<tool_call>", "", (G,))
    assert parse(f'<tool_call>{{"a": 1}}</tool{good}', "hermes").calls == (G,)


def test_text_is_held_only_while_it_may_be_a_call():
    parser = new_parser("hermes")
    assert parser.feed("a < b").content == "a < b"
    assert parser.feed("<tool").content == ""
    assert parser.feed("box>").content == "<toolbox>"
    assert parser.feed('<tool_call>{"name": ').content == ""
    assert parser.feed("w").content == '<tool_call>{"name": w'
    assert parser.feed("ine").content == "ine"


def test_a_call_comes_as_soon_as_it_is_closed():
    parser = new_parser("hermes")
    assert not parser.feed('<tool_call>{"name": "g", "arguments": {}}</tool_call').calls
    (call,) = parser.feed(">").calls
    assert (call.index, call.call_id, call.name, call.arguments) == (0, "call0", "g", "{}")


THOUGHT = [
    ("<think>\nhm\n</think>\n\nyes", False, Parsed("yes", "hm")),
    ("\n<think>hm</think>yes\n", False, Parsed("yes\n", "hm")),
    ("hm\n</think>\n\nyes", True, Parsed("yes", "hm")),
    ("<think>hm</think>yes", True, Parsed("yes", "hm")),
    ("<think>\n\n</think>\n\nyes", False, Parsed("yes")),
    ("<think>cut off </thi", False, Parsed("", "cut off </thi")),
    ("write <think> first", False, Parsed("write <think> first")),
    (" plain", False, Parsed(" plain")),
    ("", True, Parsed()),
]


@pytest.mark.parametrize(("text", "inside", "meant"), THOUGHT)
def test_reasoning_is_set_apart(text, inside, meant):
    assert parse(text, None, "think", inside) == meant


def test_reasoning_goes_before_calls():
    text = '<think>I call\n<tool_call> it</think>\n<tool_call>{"name": "g"}</tool_call>'
    assert parse(text, "hermes", "think") == Parsed("", "I call\n<tool_call> it", (G,))


def test_mistrals_reasoning_has_tags_of_its_own():
    assert parse("[THINK]a[/THINK]b", "mistral", "mistral") == Parsed("b", "a")


def test_harmonys_channels_are_reasoning_and_content():
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>!<|return|>"
    )
    assert parse(text, None, "harmony") == Parsed("Hi <b>!", "One.\nTwo.")


def test_a_harmony_call_without_tools_is_content():
    parsed = parse(HARMONY, None, "harmony")
    assert not parsed.calls
    assert '{"a": 1}' in parsed.content


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.f <|message|>not json<|call|>",
        "<|channel|>commentary to=python<|message|>print(1)",
        "<|channel|>commentary to=functions.f <|message|>{",
        "<|channel|>analysis\nnothing",
    ],
)
def test_a_harmony_part_that_is_no_call_comes_back_as_content(text):
    assert parse(text, "harmony") == Parsed(text.removesuffix("<|call|>"))


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_plain_text_passes_as_it_is(name):
    text = "  A list: [1, 2], a dict {'a': 1}, a tag <b>.\n\nDone. \n"
    if name == "harmony":
        assert parse(f"<|channel|>final<|message|>{text}", name).content == text.lstrip()
    else:
        assert parse(text, name) == Parsed(text)


def test_pythonic_arguments_are_the_json_of_pythons_values():
    values = {"a": [1, 2.5, -3e-05], "b": {"k": None, "é": True}, "c": "x'\"\\\n\t"}
    text = f"[f({', '.join(f'{key}={value!r}' for key, value in values.items())})]"
    ((name, arguments),) = parse(text, "pythonic").calls
    assert (name, json.loads(arguments)) == ("f", values)
