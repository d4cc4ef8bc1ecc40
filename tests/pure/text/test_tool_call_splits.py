"""Any split of a text gives the same message, in linear work, and nothing gets lost."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise

import msgspec
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from parsed_message import new_parser, parse

from quickstep.text.tool_calls.formats import TOOL_CALL_FORMATS
from quickstep.text.tool_calls.json_formats import KIMI
from quickstep.text.tool_calls.message_delta import joined
from quickstep.text.tool_calls.tagged import DSML, DSML_V4, GLM, MINIMAX, QWEN3_CODER, SEED_OSS

BAR = "\uff5c"
CALL = '{"name": "f", "arguments": {"a": "}é\\"\\n{[😀", "b": [1, {"c": null}]}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")
ARGUMENTS = '{"a": {"b": "</x> \\" } \\u00e9"}}'
# the words that a format's texts are made of: its markers, its calls, and parts of both
WORDS = {
    "hermes": ("<tool_call>", "</tool_call>", "<tool_c", CALL, CALL[:30], CALL[30:]),
    "llama3_json": ("<|python_tag|>", "<|python_end|>", ";", LLAMA_CALL, LLAMA_CALL[:30], '{"x'),
    "pythonic": (
        *("[f(a=1, b='\\'x', c=[{'k': None}]), g()]", "[f(", "a=", '"é\\n"', "-1_0.", ")]", ", "),
        *("<|python_start|>", "<|python_end|>", "[f(a="),
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", CALL, "]", ",", "f", ARGUMENTS),
    "deepseek_v3": (
        *(f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁call▁begin{BAR}>"),
        *(f"<{BAR}tool▁calls▁end{BAR}>", f"<{BAR}tool▁call▁end{BAR}>"),
        *(f"function<{BAR}tool▁sep{BAR}>f\n```json\n", f"f<{BAR}tool▁sep{BAR}>"),
        *(ARGUMENTS, "\n```", f"<{BAR}tool▁call"),
    ),
    "granite": ("<|tool_call|>", "<tool_call>", "[", CALL, "]", ", ", "</tool_call>", "<|tool"),
    "harmony": (
        *("<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
        *("<|constrain|>", "commentary", "analysis", "final", " to=functions.f ", ARGUMENTS),
    ),
}
TAGGED = {
    name: msgspec.structs.asdict(words)
    for name, words in (
        ("qwen3_coder", QWEN3_CODER),
        ("glm45", GLM),
        ("minimax_m2", MINIMAX),
        ("deepseek_v32", DSML),
        ("deepseek_v4", DSML_V4),
        ("seed_oss", SEED_OSS),
    )
}
for name, texts in TAGGED.items():
    WORDS[name] = (
        *(text for text in texts.values() if isinstance(text, str) and text),
        *("f", '"f"', "k", "\n", "1", "True", '[{"a": "</x>"}]'),
    )
WORDS["kimi_k2"] = (*KIMI.markers, "functions.f:0", "f", ARGUMENTS, "<|tool_call")
WORDS["gemma4"] = (
    *("<|tool_call>", "<tool_call|>", "call:f{", "k:", '<|"|>', '"', "{", "}", "[", "]", ","),
    *("1", "true", "x y", '<|tool_call>call:f{k:<|"|>é"\n<|"|>,n:[1,{a:null}]}<tool_call|>'),
)
WORDS["lfm2"] = tuple(
    word.replace("python_start", "tool_call_start").replace("python_end", "tool_call_end")
    for word in WORDS["pythonic"]
)
ANYWHERE = (" ", "\n", "x", "<", "[", "{", "}", '"', "é😀", "<think>", "</think>")


def words_of(name):
    words = st.sampled_from((*WORDS[name] * 3, *ANYWHERE))
    return st.lists(words, max_size=12).map("".join)


@st.composite
def texts_and_cuts(draw, name):
    text = draw(words_of(name))
    text = text[: len(text) - draw(st.integers(0, 20))]
    return text, draw(st.lists(st.integers(0, len(text)), max_size=12))


def split(text, cuts):
    edges = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@examples(60)
@given(data=st.data())
def test_any_split_gives_what_the_whole_text_gives(name, data):
    text, cuts = data.draw(texts_and_cuts(name))
    reasoning = data.draw(st.sampled_from([None, "think"]))
    inside = data.draw(st.booleans())
    whole = parse(text, name, reasoning, inside)
    assert parse(split(text, cuts), name, reasoning, inside) == whole
    assert parse(list(text), name, reasoning, inside) == whole


@pytest.mark.parametrize("name", sorted(set(TOOL_CALL_FORMATS) - {"harmony"}))
@examples(60)
@given(data=st.data())
def test_without_a_call_nothing_is_lost(name, data):
    text, cuts = data.draw(texts_and_cuts(name))
    text += "~\n~"  # so that the end cuts no markup
    parsed = parse(split(text, cuts), name)
    if not parsed.calls:
        assert parsed.content == text


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@examples(60)
@given(data=st.data())
def test_each_piece_is_what_comes_next_of_the_message(name, data):
    text, cuts = data.draw(texts_and_cuts(name))
    parser = new_parser(name)
    deltas = [*map(parser.feed, split(text, cuts)), parser.finish()]
    whole = new_parser(name)
    parts = whole.feed(text).followed_by(whole.finish()).parts
    assert joined(part for delta in deltas for part in delta.parts) == parts


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab}é", max_size=3), inner),
    max_leaves=8,
)  # fmt: skip
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
calls = st.lists(
    st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3
)


def schemas_of(calls):
    """The schemas of functions that are called so."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    kinds |= {list: "array", dict: "object"}
    return {
        f: {"properties": {key: {"type": kinds[type(value)]} for key, value in args.items()}}
        for f, args in calls
    }


def with_own_names(calls):
    """The calls with a function each, since a parameter has one type."""
    return [
        (f"{f}_{place}", {k: v for k, v in args.items() if k.isidentifier()})
        for place, (f, args) in enumerate(calls)
    ]


def tags(name, calls):
    """The calls in a format of tags."""
    words = TAGGED[name]
    quote = '"' if words["call"].endswith("name=") else ""
    line = "\n" if words["has_lines"] else ""
    blocks = []
    for f, args in calls:
        parts = [words["call"], quote, f, quote, words["name_end"], "\n"]
        for key, value in args.items():
            text = value if isinstance(value, str) else json.dumps(value)
            said = (
                f' string="{str(isinstance(value, str)).lower()}"' if words["says_strings"] else ""
            )
            parts += [words["key"], quote, key, quote, said, words["key_end"], words["value"]]
            parts += [line, text, line, words["value_end"], "\n"]
        blocks.append("".join([*parts, words["call_end"]]))
    if name in ("minimax_m2", "deepseek_v32", "deepseek_v4"):
        blocks = ["\n".join(blocks)]
    return "\n".join(
        f"{words['opening']}\n"[: None if words["call"] else -1] + block + f"\n{words['closing']}"
        for block in blocks
    )


def braces(value):
    """A value in Gemma's syntax."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(braces, value))}]"
        case dict():
            members = (f"{braces(k)}:{braces(v)}" for k, v in value.items())
            return f"{{{','.join(members)}}}"
    return json.dumps(value)


def written(name, calls, indent):
    """The calls as a model of that format writes them."""
    if name in TAGGED:
        return tags(name, calls)
    key = "parameters" if name == "llama3_json" else "arguments"
    objects = [json.dumps({"name": f, key: args}, indent=indent) for f, args in calls]
    pairs = [(f, json.dumps(args, indent=indent, ensure_ascii=False)) for f, args in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "llama3_json":
            return "<|python_tag|>" + "; ".join(objects)
        case "pythonic":
            texts = (", ".join(f"{k}={v!r}" for k, v in args.items()) for _, args in calls)
            return f"[{', '.join(f'{c[0]}({t})' for c, t in zip(calls, texts, strict=True))}]"
        case "mistral":
            return "".join(f"[TOOL_CALLS]{f}[ARGS]{args}" for f, args in pairs)
        case "deepseek_v3":
            bodies = (f"function<|tool_sep|>{f}\n```json\n{args}\n```" for f, args in pairs)
            parts = (f"<|tool_call_begin|>{body}<|tool_call_end|>" for body in bodies)
            text = "<|tool_calls_begin|>" + "\n".join(parts) + "<|tool_calls_end|>"
            for marker in ("calls_begin", "call_begin", "calls_end", "call_end", "sep"):
                wide = f"<{BAR}tool_{marker}{BAR}>".replace("_", "▁")
                text = text.replace(f"<|tool_{marker}|>", wide)
            return text
        case "kimi_k2":
            bodies = (
                f"{KIMI.call}functions.{f}:{place}{KIMI.separator}{args}{KIMI.call_end}"
                for place, (f, args) in enumerate(pairs)
            )
            return f"{KIMI.begin}{''.join(bodies)}{KIMI.end}"
        case "gemma4":
            return "".join(f"<|tool_call>call:{f}{braces(a)}<tool_call|>" for f, a in calls)
        case "lfm2":
            return f"<|tool_call_start|>{written('pythonic', calls, indent)}<|tool_call_end|>"
        case "granite":
            return f"<|tool_call|>[{', '.join(objects)}]"
        case _:
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{f} <|constrain|>json<|message|>{args}<|call|>"
                for f, args in pairs
            )


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@examples(60)
@given(calls, st.sampled_from([None, 1]), st.integers(1, 9))
def test_written_calls_are_read_back(name, calls, indent, step):
    calls = with_own_names(calls)
    text = written(name, calls, indent)
    deltas = [text[at : at + step] for at in range(0, len(text), step)]
    parsed = parse(deltas, name, parameters=schemas_of(calls))
    assert [(f, json.loads(args)) for f, args in parsed.calls] == calls
    assert parsed.content == ""


# but for those that are another format with other words
READERS = sorted(set(TOOL_CALL_FORMATS) - {"seed_oss", "deepseek_v4"})


@pytest.mark.parametrize("name", READERS)
@examples(10)  # the work is the square of the text's length
@given(calls, st.sampled_from([None, 1]), st.sampled_from(["", "Well then.\n"]))
def test_calls_cut_anywhere_are_a_beginning_of_the_calls_and_leave_no_markup(
    name, calls, indent, before
):
    calls = with_own_names(calls)
    schemas = schemas_of(calls)
    if name == "pythonic":
        before = ""
    text = written(name, calls, indent)
    if name == "harmony":
        before = before and f"<|channel|>final<|message|>{before}<|end|><|start|>assistant"
    whole = parse(before + text, name, parameters=schemas)
    for end in range(len(before) + 1, len(before + text)):
        cut = parse((before + text)[:end], name, parameters=schemas)
        *done, last = cut.calls or [None]
        assert list(whole.calls[: len(done)]) == done
        if last is not None:
            function, arguments = whole.calls[len(done)]
            assert last[0] == function
            assert name in ("pythonic", "lfm2") or arguments.startswith(last[1])
        # a marker that has just begun is none yet, nor is it clear what a list without one is
        unopened = cut.content.removeprefix(whole.content).strip()
        markers = TOOL_CALL_FORMATS[name].markers
        begins_marker = any(marker.startswith(unopened) for marker in markers)
        assert begins_marker or (name == "pythonic" and last is None)


NUM_LONG = 1 << 18  # characters, where the square of them would take hours
ADVERSARIAL = {
    "hermes": ("<tool_call", "<tool_call>", "<tool_call>{", '<tool_call>{"name":', " \n"),
    "llama3_json": ("{", "<|python_tag|>{", '{"name": "\\n', "<|python_tag|"),
    "pythonic": ("[f(a=", "[", "<|python_start|>[f(a='", "<|python_start|>[f(), "),
    "mistral": ("[TOOL_CALLS", "[TOOL_CALLS][", "[TOOL_CALLS]f", '[TOOL_CALLS]f[ARGS]{"'),
    "deepseek_v3": (f"<{BAR}tool▁calls▁begin{BAR}", f"<{BAR}tool▁call▁begin{BAR}>f"),
    "granite": ("[", "<|tool_call|>[", '<tool_call>[{"name": "f"}, '),
    "harmony": ("<|channel|>", "<|channel|>analysis", "<|start|>assistant<|message|", "<|channel"),
}
ADVERSARIAL |= {
    "qwen3_coder": (
        *("<function=", "<function=f>", "<function=f><parameter=a></parameter>\n<"),
        "<function=f><parameter=a></function>",
    ),
    "glm45": ("<tool_call>f", "<tool_call>f<arg_key"),
    "minimax_m2": ("<minimax:tool_call", '<minimax:tool_call><invoke name="f"'),
    "kimi_k2": (KIMI.begin, f"{KIMI.call}f{KIMI.separator}"),
    "gemma4": ("<|tool_call>call:f{", "<|tool_call>call:f{a:[", '<|tool_call>call:f{a:<|"|>'),
}
CALLED = re.compile(r"f\(|ARGS|\"f\"|f>|f\n|call:f|f<\||>f<")  # words that begin calls
ATTACKS = [(name, word) for name, words in ADVERSARIAL.items() for word in words]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "word"), ATTACKS)
def test_a_long_text_of_almost_markers_goes_through_whole(name, word):
    text = word * (NUM_LONG // len(word)) + "~\n~"
    parsed = parse(text, name)
    if name != "harmony" and not parsed.calls:
        assert parsed.content == text
    assert (not parsed.calls) or CALLED.search(word)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "head", "body"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\n"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "1, "),
        ("hermes", '<tool_call>{"arguments": {"a": [', "1, "),
        ("pythonic", "[f(a='", "\\'"),
        ("hermes", "", "\n "),
        ("qwen3_coder", '<function=f><parameter=a>1</parameter><parameter=b>"a": ', "</param"),
        ("qwen3_coder", "<function=f", " "),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="k', "' "),
        ("deepseek_v32", f'{DSML.opening}{DSML.call}"f">{DSML.key}"k"', " string="),
    ],
)
def test_a_long_text_in_small_deltas_comes_out(name, head, body):
    text = head + body * (NUM_LONG // len(body)) + "~"
    deltas = [text[at : at + 64] for at in range(0, len(text), 64)]
    parsed = parse(deltas, name)
    ((_, arguments),) = parsed.calls or [("", "")]
    assert text == parsed.content or arguments.endswith(text.partition('"a": ')[2][1:][-1000:])


def num_calls(name, text):
    """Python calls made while `text` is parsed a few characters at a time."""
    parser = new_parser(name)
    count = 0

    def count_calls(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        for at in range(0, len(text), 5):
            parser.feed(text[at : at + 5])
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("name", "word"), ATTACKS)
def test_twice_the_text_is_twice_the_work(name, word):
    once, twice = (num_calls(name, word * (size // len(word))) for size in (4000, 8000))
    assert twice < 2.2 * once


class CountedText(str):
    """Text that counts the characters that slices of it copy."""

    __slots__ = ()
    num_copied = 0

    def __getitem__(self, key):
        part = super().__getitem__(key)
        CountedText.num_copied += len(part)
        return CountedText(part)

    def __radd__(self, before):
        return CountedText(before + str(self))


def num_copied(name, text):
    """Characters copied while `text` is parsed as one delta."""
    parser = new_parser(name)
    CountedText.num_copied = 0
    parser.feed(CountedText(text))
    parser.finish()
    return CountedText.num_copied


@pytest.mark.parametrize(("name", "word"), ATTACKS)
def test_twice_the_text_is_twice_as_much_copied(name, word):
    once, twice = (num_copied(name, word * (size // len(word))) for size in (4000, 8000))
    assert 0 < twice < 2.2 * once
