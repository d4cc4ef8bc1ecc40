"""`response_format` and `structured_outputs`: which grammar the output has to follow.

A request has one grammar at most. It keeps the name of the client's field, so that an error of the
engine's grammar compiler names that field.
"""

from __future__ import annotations

import msgspec

from quickstep.errors import RequestError
from quickstep.sampling_params import StructuredOutputsParams
from quickstep.server.fields.sampling_fields import (
    JsonObjectFormat,
    SamplingFields,
    StructuredOutputs,
    TextFormat,
)
from quickstep.types import Grammar


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the path of the client's field. `loosened`: keywords of its schemas that the
    grammar does not enforce.
    """

    grammar: Grammar
    field: str
    loosened: tuple[str, ...] = ()


def requested_grammar(fields: SamplingFields) -> RequestedGrammar | None:
    """The requested grammar, or None. Raises RequestError if two fields request one."""
    found: list[RequestedGrammar] = []
    if (of_format := _of_response_format(fields)) is not None:
        found.append(of_format)
    if fields.structured_outputs is not None:
        found.append(_of_structured_outputs(fields.structured_outputs))
    # llama.cpp's clients write "" and {} for none
    if fields.grammar:
        found.append(RequestedGrammar(Grammar.of_gbnf(fields.grammar), "grammar"))
    if fields.json_schema:
        found.append(RequestedGrammar(Grammar.of_json_schema(fields.json_schema), "json_schema"))
    if len(found) > 1:
        first, second = (grammar.field.partition(".")[0] for grammar in found[:2])
        raise RequestError(
            f"{second} and {first} both constrain the output; send one of them", param=second
        )
    return found[0] if found else None


def _of_response_format(fields: SamplingFields) -> RequestedGrammar | None:
    form = fields.response_format
    if form is None or isinstance(form, TextFormat):
        return None
    if form.schema is not None:  # as llama.cpp takes it
        return RequestedGrammar(Grammar.of_json_schema(form.schema), "response_format.schema")
    if isinstance(form, JsonObjectFormat):
        return RequestedGrammar(Grammar.of_json_object(), "response_format")
    path = "response_format.json_schema"
    spec = form.json_schema
    if spec is None:
        raise RequestError(f"{path} is missing", param=path)
    path += ".schema"
    if spec.schema is None:
        raise RequestError(f"{path} is missing", param=path)
    return RequestedGrammar(Grammar.of_json_schema(spec.schema, bool(spec.strict)), path)


def _of_structured_outputs(outputs: StructuredOutputs) -> RequestedGrammar:
    name, grammar = StructuredOutputsParams(
        outputs.json, outputs.regex, outputs.choice, outputs.grammar, outputs.json_object
    ).chosen()
    return RequestedGrammar(grammar, f"structured_outputs.{name}")
