"""`SamplingParams(structured_outputs=...)`: vLLM's form of a grammar."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from quickstep import Grammar, SamplingParams, StructuredOutputsParams
from quickstep.errors import RequestError


@pytest.mark.parametrize(
    ("outputs", "grammar"),
    [
        ({"json": {"type": "integer"}}, Grammar.of_json_schema({"type": "integer"})),
        ({"json": '{"type": "integer"}'}, Grammar.of_json_schema('{"type": "integer"}')),
        ({"json_object": True}, Grammar.of_json_object()),
        ({"regex": "a+"}, Grammar.of_regex("a+")),
        ({"choice": ["a", "b"]}, Grammar.of_choice(["a", "b"])),
        ({"grammar": 'root ::= "a"'}, Grammar.of_gbnf('root ::= "a"')),
        ({"grammar": 'start: "a"'}, Grammar.of_lark('start: "a"')),
    ],
)
def test_they_are_the_grammar(outputs: dict, grammar: Grammar) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**outputs))
    assert params == SamplingParams(grammar=grammar)
    assert replace(params, seed=3) == SamplingParams(grammar=grammar, seed=3)
    sent = msgspec.msgpack.encode(params.grammar)
    assert msgspec.msgpack.decode(sent, type=Grammar) == grammar


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ({}, "structured_outputs has nothing, it takes one of json"),
        ({"regex": "a", "json_object": True}, "structured_outputs has json_object and regex"),
    ],
)
def test_exactly_one_form_is_given(outputs: dict, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        SamplingParams(structured_outputs=StructuredOutputsParams(**outputs))


def test_a_grammar_beside_them_and_other_types_are_refused() -> None:
    regex = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="both given; give one"):
        SamplingParams(grammar=Grammar.of_regex("a"), structured_outputs=regex)
    with pytest.raises(RequestError, match="is a dict, it must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
