"""Templates of today's families: their formats are recognized, and past calls are written as the
model writes them, so that the format's reader finds the same calls.
"""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from tool_templates import TOOL_TEMPLATES

from quickstep.text.chat_template import ChatTemplate
from quickstep.text.tool_calls.formats import formats_of, message_grammar
from quickstep.text.tool_calls.reader import MessageParser

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": ["integer", "null"]},
        "flag": {"type": "boolean"},
        "items": {"type": "array", "items": {}},
        "more": {"$ref": "#/$defs/more"},
    },
    "$defs": {"more": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": "find_it", "parameters": PARAMETERS}}]
CALLS = [
    {"text": 'a < b\n</p> "it\'s"', "n": 3, "flag": True, "items": [1, "x", None], "more": {}},
    {"text": "", "n": None, "flag": False, "items": [], "more": {"k": {"é": [1.5]}}},
    {},
]


def rendered(family, **message):
    template, *_ = TOOL_TEMPLATES[family]
    chat = ChatTemplate({"default": template}, {"bos_token": "<bos>"}, lambda: datetime(2026, 1, 2))
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", **message}]
    before = chat.render(messages[:1], TOOLS, add_generation_prompt=False)
    text = chat.render(messages, TOOLS, add_generation_prompt=False)
    assert text.startswith(before)
    return text.removeprefix(before)


def read(family, text):
    template, *_ = TOOL_TEMPLATES[family]
    formats = formats_of(template)
    grammar = message_grammar(formats.tool_calls, formats.reasoning, inside_reasoning=False)
    parser = MessageParser(grammar, lambda: "id", {"find_it": PARAMETERS})
    return parser.feed(text).followed_by(parser.finish())


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
def test_the_formats_of_a_family_are_recognized(family):
    template, tool_calls, reasoning = TOOL_TEMPLATES[family]
    formats = formats_of(template)
    assert formats.tool_calls.name == tool_calls
    assert (formats.reasoning.name if formats.reasoning else None) == reasoning
    assert formats.renders_tools
    assert formats.renders_calls


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
def test_past_calls_are_written_as_the_reader_finds_them(family):
    calls = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": "find_it", "arguments": json.dumps(arguments)},
        }
        for place, arguments in enumerate(CALLS)
    ]
    text = rendered(family, content=None, tool_calls=calls)
    found = read(family, text).calls
    assert [(call.name, json.loads(call.arguments)) for call in found] == [
        ("find_it", arguments) for arguments in CALLS
    ]


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
@pytest.mark.parametrize("arguments", ['{"text": "Ber', "[1]", "null", ""])
def test_a_past_call_that_was_cut_renders(family, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "find_it", "arguments": arguments}}
    assert "find_it" in rendered(family, content="", tool_calls=[call])


def test_ids_of_past_calls_are_numbered_where_the_template_writes_them_for_the_names():
    template, *_ = TOOL_TEMPLATES["Kimi K2"]
    chat = ChatTemplate({"default": template}, {}, lambda: datetime(2026, 1, 2))

    def call(call_id, name):
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call("x", "f"), call("y", "g")]},
        {"role": "tool", "tool_call_id": "y", "content": "Y"},
        {"role": "tool", "tool_call_id": "x", "content": "X"},
        {"role": "assistant", "content": None, "tool_calls": [call("z", "f")]},
        {"role": "tool", "tool_call_id": "z", "content": "Z"},
        {"role": "tool", "tool_call_id": "unknown", "content": "U"},
    ]
    text = chat.render(messages, TOOLS)
    ids = [part.partition("<|tool_call_argument_begin|>")[0] for part in text.split("call_begin|>")]
    assert ids[1:] == ["functions.f:0", "functions.g:1", "functions.f:2"]
    results = [part.partition("<|im_end|>")[0] for part in text.split("## Return of ")]
    assert results[1:] == ["functions.g:1\nY", "functions.f:0\nX", "functions.f:2\nZ", "unknown\nU"]
