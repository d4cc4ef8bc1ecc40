"""The tools of a chat request: checked, as the template reads them, and forced where asked.

A refusal names the field by its path. `tool_choice` required or a function's name is enforced by
a grammar, which also makes `strict` true; where the model may choose, `strict` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quickstep.engine.tool_calls.call_grammar import call_grammar
from quickstep.errors import RequestError
from quickstep.server.sampling import bounded
from quickstep.server.schemas import ChatRequest, CustomTool, FunctionSpec
from quickstep.server.structured import AskedGrammar
from quickstep.server.surface import Served

__all__ = ["FUNCTION_NAME", "OfferedTools", "offered_tools"]

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that the model is shown, and the grammar of the calls that it has to make."""

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: AskedGrammar | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """`tool_choice`: `name` is the one function that has to be called."""

    may_call: bool = True
    must_call: bool = False
    name: str | None = None


def offered_tools(fields: ChatRequest, served: Served) -> OfferedTools:
    """The tools and what is forced: with `tool_choice: "none"` there are none of them.

    Raises:
        RequestError: A tool is wrong, the choice cannot be honoured, or the model knows no tools.
    """
    bounded("tools", len(fields.tools or ()), served.limits.tools, "entries")
    choice = _choice(fields.tool_choice)
    functions: dict[str, Mapping[str, Any]] = {}
    for place, tool in enumerate(fields.tools or ()):
        path = f"tools[{place}]"
        if isinstance(tool, CustomTool):
            kind = f"{path}.type"
            raise RequestError(f"{kind} custom is not supported; send function", param=kind)
        function = _function(tool.function, path, choice.must_call)
        if tool.function.name in functions:
            name = f"{path}.function.name"
            raise RequestError(f"{name} {tool.function.name} stands there twice", param=name)
        functions[tool.function.name] = function
    forced = _forced_functions(functions, choice) if choice.must_call else ()
    if not choice.may_call or not functions:
        return OfferedTools()
    _check_model(served)
    one_call = choice.name is not None or fields.parallel_tool_calls is False
    tools = tuple({"type": "function", "function": function} for function in functions.values())
    return OfferedTools(tools, _grammar(forced, one_call, served) if forced else None)


def _forced_functions(
    functions: Mapping[str, Mapping[str, Any]], choice: _Choice
) -> Sequence[Mapping[str, Any]]:
    """The functions of which one has to be called. Raises RequestError if there is none."""
    name = choice.name
    if name is None and functions:
        return tuple(functions.values())
    if name is not None and name in functions:
        return (functions[name],)
    missing = "tools is empty" if name is None else f"no tool is named {name[:64]!r}"
    raise RequestError(f"tool_choice asks for a call, but {missing}", param="tool_choice")


def _function(function: FunctionSpec, path: str, must_call: bool) -> dict[str, Any]:
    path = f"{path}.function"
    if not FUNCTION_NAME.fullmatch(function.name):
        raise RequestError(
            f"{path}.name is {function.name[:64]!r}; it takes 1 to 64 letters, digits, _ and -",
            param=f"{path}.name",
        )
    if function.strict and not must_call:
        raise RequestError(
            f"{path}.strict is not supported where the model may choose to call; send tool_choice "
            "required or the function's name",
            param=f"{path}.strict",
        )
    parameters = function.parameters or _NO_ARGUMENTS
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{path}.parameters describes a {parameters['type']!r}, it must be an object",
            param=f"{path}.parameters",
        )
    described = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **described, "parameters": parameters}


def _choice(choice: str | dict[str, Any] | None) -> _Choice:
    match choice:
        case None | "auto":
            return _Choice()
        case "none":
            return _Choice(may_call=False)
        case "required":
            return _Choice(must_call=True)
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not (
            others or more
        ):
            return _Choice(must_call=True, name=name)
        case str():
            shown = repr(choice[:64])
        case _:
            shown = "an object of another form"
    raise RequestError(
        f"tool_choice is {shown}, it must be auto, none, required or "
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _grammar(
    functions: Sequence[Mapping[str, Any]], one_call: bool, served: Served
) -> AskedGrammar:
    """The grammar of the calls. Raises RequestError for a format that cannot be forced."""
    known = served.formats.tool_calls
    if known is None or known.spelling is None:
        name = "this model" if known is None else known.name
        raise RequestError(
            f"tool_choice cannot be enforced for the format of calls {name}; send auto",
            param="tool_choice",
        )
    tokenizer = served.engine.tokenizer

    def is_special(text: str) -> bool:
        token_id = tokenizer.token_id(text)
        return token_id is not None and tokenizer.is_special(token_id)

    return AskedGrammar(call_grammar(known.spelling, functions, one_call, is_special), "tools")


def _check_model(served: Served) -> None:
    name = served.engine.model_name
    if not served.formats.renders_tools:
        raise RequestError(
            f"tools is not supported: the chat template of {name} does not show tools",
            param="tools",
        )
    if served.formats.tool_calls is None:
        raise RequestError(
            f"tools is not supported: how {name} writes calls is not known; start the server with "
            "--tool-call-parser",
            param="tools",
        )
