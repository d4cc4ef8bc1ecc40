"""`response_format` and `structured_outputs`: which grammar the output has to follow.

A request has one grammar at most. It keeps the name of the client's field, so that an error of the
engine's grammar compiler names that field.
"""

from __future__ import annotations

import msgspec

from quickstep.errors import RequestError
from quickstep.sampling_params import StructuredOutputsParams
from quickstep.server.openai.request_types import (
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StructuredOutputs,
    TextFormat,
)
from quickstep.types import Grammar

__all__ = ["RequestedGrammar", "requested_grammar"]


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the path of the client's field."""

    grammar: Grammar
    field: str


def requested_grammar(fields: SamplingFields) -> RequestedGrammar | None:
    """The requested grammar, or None. Raises RequestError if two fields request one."""
    grammar = _of_response_format(fields)
    outputs = fields.structured_outputs
    if outputs is None:
        return grammar
    if grammar is not None:
        raise RequestError(
            "structured_outputs and response_format both constrain the output; send one of them",
            param="structured_outputs",
        )
    return _of_structured_outputs(outputs)


def _of_response_format(fields: SamplingFields) -> RequestedGrammar | None:
    match fields.response_format:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return RequestedGrammar(Grammar.of_json_object(), "response_format")
        case JsonSchemaFormat(json_schema=spec):
            path = "response_format.json_schema.schema"
            if spec.schema is None:
                raise RequestError(f"{path} is missing", param=path)
            return RequestedGrammar(Grammar.of_json_schema(spec.schema, bool(spec.strict)), path)


def _of_structured_outputs(outputs: StructuredOutputs) -> RequestedGrammar:
    name, grammar = StructuredOutputsParams(
        outputs.json, outputs.regex, outputs.choice, outputs.grammar, outputs.json_object
    ).chosen()
    return RequestedGrammar(grammar, f"structured_outputs.{name}")
