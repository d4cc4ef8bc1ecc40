"""A forced call: whatever is drawn under its grammar reads back as calls with fitting arguments."""

from __future__ import annotations

import itertools
import json

import pytest
from grammar_draws import drawn_text
from tiny_checkpoint import write_checkpoint

from quickstep.engine.grammars import GrammarCompiler
from quickstep.engine.tokenizer import Tokenizer
from quickstep.engine.tool_calls.call_grammar import call_grammar
from quickstep.engine.tool_calls.formats import TOOL_CALL_FORMATS
from quickstep.engine.tool_calls.parser import MessageParser

FUNCTIONS = [
    {"name": "now", "parameters": {"properties": {}, "additionalProperties": False}},
    {
        "name": "find-it",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 9}, "n": {"enum": [1, None]}},
            "required": ["text", "n"],
            "additionalProperties": False,
        },
    },
]
FORCED = [known for known in TOOL_CALL_FORMATS.values() if known.spelling is not None]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, 264)


def calls_in(text, known):
    ids = itertools.count()
    parser = MessageParser(known.grammar, lambda: f"call-{next(ids)}")
    whole = parser.feed(text).followed_by(parser.finish())
    return whole.content, [(call.name, json.loads(call.arguments)) for call in whole.calls]


def test_the_json_formats_can_be_forced():
    assert {known.name for known in FORCED} == {"hermes", "llama3_json"}


@pytest.mark.parametrize("known", FORCED, ids=lambda known: known.name)
@pytest.mark.parametrize("one_call", [True, False])
def test_forced_text_reads_back_as_calls(compiler, tokenizer, known, one_call):
    grammar = call_grammar(known.spelling, FUNCTIONS, one_call, is_special=lambda text: False)
    seen = set()
    for seed in range(12):
        text = drawn_text(compiler, tokenizer, grammar, seed, temperature=30.0)
        content, calls = calls_in(text, known)
        assert content.strip() == ""
        assert len(calls) == 1 if one_call else calls
        seen.add(len(calls))
        for name, arguments in calls:
            assert name in ("now", "find-it")
            assert set(arguments) == (set() if name == "now" else {"text", "n"})
            assert len(arguments.get("text", "")) <= 9
    assert one_call or len(seen) > 1
