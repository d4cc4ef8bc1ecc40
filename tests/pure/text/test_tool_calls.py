"""What each format's texts mean: calls, content around them, and what is no call after all."""

from __future__ import annotations

import json

import pytest
from parsed_message import Parsed, new_parser, parse

from quickstep.text.tool_calls.formats import TOOL_CALL_FORMATS
from quickstep.text.tool_calls.message_delta import CallDelta

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
    # halves of a character, as JSON writes it
    (
        "pythonic",
        "[f(a='\\ud834\\udd1e', b={'\\ud83d\\ude00': 1}), g()]",
        "",
        [("f", '{"a": "\U0001d11e", "b": {"\U0001f600": 1}}'), G],
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


NO_CALLS = [
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '{"name": "Bob"}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=__import__('os'))]"),
    ("pythonic", "[link](https://example.org)"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS] f x"),
    ("granite", "<|tool_call|>none"),
    ("granite", '[{"name": "f"'),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_letter(name, text):
    for around in (text, f"so: {text} \n", f"\n {text}"):
        assert parse(around, name) == Parsed(around)


def hermes(arguments, behind="}</tool_call>"):
    return f'<tool_call>{{"name": "f", "arguments": {arguments}{behind}'


NESTED = '{"a": ' + "[" * 70 + "]" * 70 + "}"
BEGUN = [
    ("hermes", hermes('{"a": 1}', "</tool_call>"), '{"a": 1}'),
    ("hermes", hermes('{"a": 1', "</tool_call>"), '{"a": 1'),
    ("hermes", hermes("[1]"), "[1]"),
    ("hermes", hermes('"[1]"'), "[1]"),
    ("hermes", hermes('{"a": 01}'), '{"a": 01}'),
    ("hermes", hermes('{"a": NaN}'), '{"a": NaN}'),
    ("hermes", hermes('{"a": "\n"}'), '{"a": "\\n"}'),
    ("hermes", hermes('{"a": "\\x"}'), '{"a": "\\x"}'),
    ("hermes", hermes("{'a': 'b'}"), "{'a': 'b'}"),
    ("hermes", hermes(NESTED), NESTED),
    ("llama3_json", '{"name": "f", "parameters": {"a": 01}}', '{"a": 01}'),
    ("pythonic", "[f(a=1, a=2)]", '{"a": 1, "a": 2}'),
    ("pythonic", "[f(a='\\ud800')]", "{\"a\": '\\ud800')]"),
    ("pythonic", "[f(a=1, b=g(2))]", '{"a": 1, "b": g(2))]'),
    ("mistral", "[TOOL_CALLS]f[ARGS]oops", "oops"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1[TOOL_CALLS]{no}', '{"a": 1'),
    ("deepseek_v3", V31.partition("}")[0] + V31[V31.index("}") + 1 :], '{"a": 1'),
    ("deepseek_v3", V3.replace('{"a": 1}', "oops"), "oops\n"),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1</tool_call>', '{"a": 1'),
    ("harmony", "<|channel|>commentary to=functions.f <|message|>not json<|call|>", "not json"),
    ("harmony", "<|channel|>commentary to=functions.f <|message|>{", "{"),
]


@pytest.mark.parametrize(("name", "text", "arguments"), BEGUN)
def test_a_call_that_has_begun_keeps_its_arguments_as_they_are(name, text, arguments):
    parsed = parse(text, name)
    assert parsed.calls[0] == ("f", arguments)
    assert "<" not in parsed.content


def test_text_behind_a_call_that_broke_off_is_content_and_its_closing_tag_is_not():
    g = hermes("{}", "} or so</tool_call> </tool_call>")
    assert parse(f"a {g}", "hermes") == Parsed("a  or so </tool_call>", "", (("f", "{}"),))
    assert parse(hermes("{}", "}\nfine"), "hermes") == Parsed("fine", "", (("f", "{}"),))


# texts that the limit cut, and what is left of the call
CUT = [
    ("hermes", "<tool_call>", None),
    ("hermes", '<tool_call>{"na', None),
    ("hermes", '<tool_call>{"name": "f', None),
    ("hermes", '<tool_call>{"name": "f"', ""),
    ("hermes", hermes("", ""), ""),
    ("hermes", hermes('{"a": [tr', ""), '{"a": [tr'),
    ("hermes", hermes('{"a": "\\', ""), '{"a": "\\'),
    ("hermes", hermes("{}", "}</tool_ca"), "{}"),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}', '{"a": 1}'),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"na', '{"a": 1}'),
    ("llama3_json", '<|python_tag|>{"name": "f"', None),
    ("pythonic", "[f(a=1), g(", '{"a": 1}'),
    ("pythonic", "[f(a=1, b='x", '{"a": 1, "b": \'x'),
    ("mistral", "[TOOL_CALLS]", None),
    ("mistral", "[TOOL_CALLS]f", None),
    ("mistral", "[TOOL_CALLS]f[AR", ""),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}', "{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{", "{"),
    ("deepseek_v3", V31[:40], None),
    ("deepseek_v3", V31[: V31.index("}")], '{"a": 1'),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a"', '{"a"'),
    ("harmony", "<|channel|>commentary to=functions.f", None),
    ("harmony", '<|channel|>commentary to=functions.f <|message|>{"a', '{"a'),
]


@pytest.mark.parametrize(("name", "text", "arguments"), CUT)
def test_a_call_that_was_cut_has_partial_arguments_and_leaves_no_markup(name, text, arguments):
    calls = () if arguments is None else (("f", arguments),)
    assert parse(text, name) == Parsed("", "", calls)
    if name not in ("llama3_json", "pythonic") or text.startswith("<"):
        assert parse(f"Well.\n{text}", name) == Parsed("Well.", "", calls)


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


def test_a_call_begins_with_its_name_and_its_arguments_come_as_they_are_written():
    parser = new_parser("hermes")
    assert not parser.feed('<tool_call>{"name": "f').parts
    assert parser.feed('"').parts == (CallDelta(0, call_id="call0", name="f"),)
    assert not parser.feed(', "arguments": ').parts
    assert parser.feed('{"a": "x').parts == (CallDelta(0, '{"a": "x'),)
    assert parser.feed(' y"').parts == (CallDelta(0, ' y"'),)
    assert parser.feed("}").parts == (CallDelta(0, "}"),)
    assert parser.feed("}").parts == (CallDelta(0, is_last=True),)
    assert not parser.feed("\n</tool_call>").parts


STREAMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "long', '{"a": "long'),
    ("llama3_json", '{"name": "f", "parameters": {"a": "long', '{"a": "long'),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": "long', '{"a": "long'),
    ("pythonic", "[f(a=1, b='done', c='lo", '{"a": 1, "b": "done", "c": '),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "long', '{"a": "long'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "long', '{"a": "long'),
    ("deepseek_v3", V3[: V3.index("1")], '{"a": '),
    ("deepseek_v3", V31[: V31.index("1")], '{"a": '),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": "long', '{"a": "long'),
    ("granite", '[{"name": "f", "arguments": {"a": "long', '{"a": "long'),
    ("harmony", HARMONY[: HARMONY.index("1")], '{"a": '),
]


@pytest.mark.parametrize(("name", "text", "arguments"), STREAMED)
def test_arguments_come_before_their_end_is_there_in_every_format(name, text, arguments):
    parser = new_parser(name)
    deltas = [parser.feed(char) for char in text]
    first, *later = (part for delta in deltas for part in delta.parts)
    assert first == CallDelta(0, call_id="call0", name="f")
    assert "".join(part.arguments for part in later) == arguments


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
        "<|channel|>commentary to=python<|message|>print(1)",
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


@pytest.mark.parametrize(
    ("format_name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "f", "arguments": " "}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "f", "arguments": "null"}</tool_call>', {}),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"c": "1\n2\t3\r\x01"}}</tool_call>',
            {"c": "1\n2\t3\r\x01"},
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"c\\": \\"1\n2\\"}"}</tool_call>',
            {"c": "1\n2"},
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments":\n{\n"a\n": 1}}</tool_call>', {"a\n": 1}),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"c": "one\ntwo"}', {"c": "one\ntwo"}),
        ("pythonic", '[f(c="one\ntwo")]', {"c": "one\ntwo"}),
        ("pythonic", '[f(c="one" \'two\'\n"")]', {"c": "onetwo"}),
        ("pythonic", '[f(c="""say "hi" """)]', {"c": 'say "hi" '}),
        ("pythonic", "[f(c='''''', d='')]", {"c": "", "d": ""}),
        (
            "pythonic",
            "[f(size=(8, 6), one=(1,), none=(), value=(1), t=('a' 'b'))]",
            {"size": [8, 6], "one": [1], "none": [], "value": 1, "t": "ab"},
        ),
        ("pythonic", "[f(a=[(1, (2,))], b={'k' 'l': (3,)})]", {"a": [[1, [2]]], "b": {"kl": [3]}}),
    ],
)
def test_arguments_are_json_where_the_meaning_is_certain(format_name, text, expected):
    read = parse(text, format_name)
    ((name, arguments),) = read.calls
    assert name == "f"
    assert json.loads(arguments) == expected
    assert not read.content
    for size in range(1, 6):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse(pieces, format_name) == read
