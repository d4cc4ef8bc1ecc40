"""`tools`, `tool_choice` and `text.format` of the Responses API, in neutral words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quickstep.errors import RequestError
from quickstep.server.refused import Refusal
from quickstep.server.responses_schema import FunctionToolSpec, ResponsesRequest, SchemaFormat
from quickstep.server.schemas import JsonObjectFormat, converted
from quickstep.server.structured import AskedGrammar, asked_grammar
from quickstep.server.surface import Served
from quickstep.server.tools import CHOICES, Function, OfferedTools, ToolChoice, offer
from quickstep.types import Grammar

__all__ = ["TOOL_REFUSED", "asked_text", "listed_text", "listed_tools", "offered_functions"]

TOOL_REFUSED: Mapping[str, Refusal] = {
    "allowed_callers": Refusal((["direct"],), "only the model calls"),
    "defer_loading": Refusal((False,), "every tool is shown"),
    "output_schema": Refusal((), "what a function gives back is not checked"),
}


def offered_functions(fields: ResponsesRequest, served: Served) -> OfferedTools:
    """The tools and what is forced. Raises RequestError."""
    functions = []
    for place, tool in enumerate(fields.tools or ()):
        path = f"tools[{place}]"
        spec = _spec(tool, path)
        described, strict = spec.description, bool(spec.strict)
        functions.append(Function(spec.name, described, spec.parameters, strict, path))
    choice = _choice(fields.tool_choice)
    return offer(functions, choice, fields.parallel_tool_calls is False, served)


def listed_tools(fields: ResponsesRequest) -> list[dict[str, Any]]:
    """The tools as the response repeats them, with what holds where the client was silent."""
    return [{"strict": False, "parameters": None, **tool} for tool in fields.tools or ()]


def asked_text(fields: ResponsesRequest) -> AskedGrammar | None:
    """The grammar of the answer. Raises RequestError."""
    asked = asked_grammar(fields)
    text = fields.text
    if text is not None and text.verbosity not in (None, "medium"):
        raise RequestError(
            "text.verbosity is not supported: the model has no verbosity setting",
            param="text.verbosity",
        )
    form = None if text is None else text.format
    if not isinstance(form, JsonObjectFormat | SchemaFormat):
        return asked
    if asked is not None:
        raise RequestError(
            "structured_outputs and text.format both constrain the output; send one of them",
            param="structured_outputs",
        )
    if isinstance(form, JsonObjectFormat):
        return AskedGrammar(Grammar.of_json_object(), "text.format")
    return AskedGrammar(Grammar.of_json_schema(form.schema), "text.format.schema")


def listed_text(fields: ResponsesRequest) -> dict[str, Any]:
    """`text` as the response repeats it."""
    form = None if fields.text is None else fields.text.format
    return {"format": form or {"type": "text"}, "verbosity": "medium"}


def _spec(tool: dict[str, Any], path: str) -> FunctionToolSpec:
    if tool.get("type") != "function":
        kind = f"{path}.type"
        shown = str(tool.get("type"))[:64]
        raise RequestError(
            f"{kind} {shown} is not supported: the server runs no tools, send function", param=kind
        )
    spec = converted(tool, FunctionToolSpec, path)
    for name, refusal in TOOL_REFUSED.items():
        if not refusal.allows(getattr(spec, name)):
            place = f"{path}.{name}"
            raise RequestError(f"{place} is not supported: {refusal.why}", param=place)
    return spec


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
