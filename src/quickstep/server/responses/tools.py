"""`tools`, `tool_choice` and `text.format` of the Responses API, in neutral words."""

from __future__ import annotations

from typing import Any

from quickstep.errors import RequestError
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.structured import RequestedGrammar, requested_grammar
from quickstep.server.generate.tools import (
    CHOICES,
    Function,
    OfferedTools,
    ToolChoice,
    is_left_out,
    offer,
)
from quickstep.server.openai.request_types import JsonObjectFormat
from quickstep.server.responses.request_types import (
    FunctionToolSpec,
    ResponsesRequest,
    SchemaFormat,
)
from quickstep.server.schema.field_reader import FieldReader
from quickstep.types import Grammar

__all__ = ["listed_text", "listed_tools", "offered_functions", "requested_text_format"]


def offered_functions(
    fields: ResponsesRequest, served: Served, reader: FieldReader
) -> OfferedTools:
    """The tools and what is forced. Raises RequestError."""
    functions = []
    for place, tool in enumerate(fields.tools or ()):
        path = f"tools[{place}]"
        if is_left_out(tool, "function", reader):
            continue
        spec = reader.convert(tool, FunctionToolSpec, path)
        described, strict = spec.description, bool(spec.strict)
        functions.append(Function(spec.name, described, spec.parameters, strict, path))
    choice = _choice(fields.tool_choice)
    return offer(functions, choice, fields.parallel_tool_calls is False, served)


def listed_tools(fields: ResponsesRequest) -> list[dict[str, Any]]:
    """The functions as the response repeats them, with what holds where the client was silent."""
    return [
        {"description": None, "strict": False, "parameters": None, **tool}
        for tool in fields.tools or ()
        if tool.get("type") == "function"
    ]


def requested_text_format(fields: ResponsesRequest) -> RequestedGrammar | None:
    """The grammar of the answer. Raises RequestError."""
    asked = requested_grammar(fields)
    form = None if fields.text is None else fields.text.format
    if not isinstance(form, JsonObjectFormat | SchemaFormat):
        return asked
    if asked is not None:
        raise RequestError(
            "structured_outputs and text.format both constrain the output; send one of them",
            param="structured_outputs",
        )
    if isinstance(form, JsonObjectFormat):
        return RequestedGrammar(Grammar.of_json_object(), "text.format")
    return RequestedGrammar(Grammar.of_json_schema(form.schema), "text.format.schema")


def listed_text(fields: ResponsesRequest) -> dict[str, Any]:
    """`text` as the response repeats it."""
    form = None if fields.text is None else fields.text.format
    verbosity = None if fields.text is None else fields.text.verbosity
    return {"format": form or {"type": "text"}, "verbosity": verbosity or "medium"}


def _choice(choice: str | dict[str, Any] | None) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice()
        case str() if choice in CHOICES:
            return CHOICES[choice]
        case {"type": "function", "name": str(name), **more} if not more:
            return ToolChoice(must_call=True, names=(name,))
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools), **more} if not more:
            return _allowed(mode, tools)
        case str():
            shown = repr(choice[:64])
        case _:
            shown = "an object of another form"
    raise RequestError(
        f"tool_choice is {shown}, it must be auto, none, required, "
        '{"type": "function", "name": ...} or {"type": "allowed_tools", ...}',
        param="tool_choice",
    )


def _allowed(mode: object, tools: list[Any]) -> ToolChoice:
    """Some of the tools; only a forced call can be kept to them."""
    if mode != "required":
        raise RequestError(
            f"tool_choice.mode is {mode!r:.64}, only required is supported; leave out the other "
            "tools",
            param="tool_choice.mode",
        )
    names = []
    for place, tool in enumerate(tools):
        match tool:
            case {"type": "function", "name": str(name), **more} if not more:
                names.append(name)
            case _:
                path = f"tool_choice.tools[{place}]"
                raise RequestError(f'{path} is not {{"type": "function", "name": ...}}', param=path)
    return ToolChoice(must_call=True, names=tuple(names))
