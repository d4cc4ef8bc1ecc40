"""The tools of a chat request: checked, and as the template reads them.

A refusal names the field by its path. Forcing a call (`tool_choice` required or a function's
name) and `strict` need output that a grammar constrains, which is refused until it is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quickstep.errors import RequestError
from quickstep.server.sampling import bounded
from quickstep.server.schemas import ChatRequest, CustomTool, FunctionSpec
from quickstep.server.surface import Served

__all__ = ["offered_tools"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
_NEEDS_GRAMMAR = "it needs structured output, which is not there yet"


def offered_tools(fields: ChatRequest, served: Served) -> tuple[Mapping[str, Any], ...]:
    """The tools that the model is shown: with `tool_choice: "none"` there are none of them.

    Raises:
        RequestError: A tool is wrong, the choice cannot be honoured, or the model knows no tools.
    """
    bounded("tools", len(fields.tools or ()), served.limits.tools, "entries")
    names: set[str] = set()
    tools = []
    for place, tool in enumerate(fields.tools or ()):
        path = f"tools[{place}]"
        if isinstance(tool, CustomTool):
            kind = f"{path}.type"
            raise RequestError(f"{kind} custom is not supported; send function", param=kind)
        tools.append({"type": "function", "function": _function(tool.function, path)})
        if tool.function.name in names:
            name = f"{path}.function.name"
            raise RequestError(f"{name} {tool.function.name} stands there twice", param=name)
        names.add(tool.function.name)
    if not _may_call(fields.tool_choice) or not tools:
        return ()
    _check_model(served)
    return tuple(tools)


def _function(function: FunctionSpec, path: str) -> dict[str, Any]:
    path = f"{path}.function"
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            f"{path}.name is {function.name[:64]!r}; it takes 1 to 64 letters, digits, _ and -",
            param=f"{path}.name",
        )
    if function.strict:
        raise RequestError(
            f"{path}.strict is not supported: {_NEEDS_GRAMMAR}", param=f"{path}.strict"
        )
    parameters = function.parameters or _NO_ARGUMENTS
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{path}.parameters describes a {parameters['type']!r}, it must be an object",
            param=f"{path}.parameters",
        )
    described = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **described, "parameters": parameters}


def _may_call(choice: str | dict[str, Any] | None) -> bool:
    if choice is None or choice in ("auto", "none"):
        return choice != "none"
    if choice == "required" or isinstance(choice, dict):
        shown = choice if isinstance(choice, str) else "of a function"
        raise RequestError(
            f"tool_choice {shown} is not supported: {_NEEDS_GRAMMAR}", param="tool_choice"
        )
    raise RequestError(
        f"tool_choice is {choice[:64]!r}, it must be auto or none", param="tool_choice"
    )


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
