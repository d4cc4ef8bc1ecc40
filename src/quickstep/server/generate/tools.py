"""The tools of a request: checked, converted for the chat template, and forced by `tool_choice`.

A refusal names the field by its path. `tool_choice` required or a function's name is enforced by
a grammar, in which all arguments fit. Where the model may choose, `strict` and `allowed_tools` are:
the grammar is then of text or calls, and the arguments of functions that are not strict are any
object. With a grammar
of the answer in addition to tools, a message is such an answer or calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.fields.shared_fields import FunctionTool
from quickstep.server.generate.structured import RequestedGrammar
from quickstep.server.models.served_model import ServedModel
from quickstep.server.options import bounded
from quickstep.text.tool_calls.answer_grammar import NotNestable, answer_grammar
from quickstep.text.tool_calls.call_grammar import call_grammar
from quickstep.text.tool_calls.formats import TOOL_CALL_FORMATS, ToolCallFormat

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


class OfferedTools(msgspec.Struct, frozen=True):
    """The tools in the model's prompt, and the grammar of its message, if it has one.

    Attributes:
        grammar: Of calls where one is forced, of text or calls where functions are strict or only
            some of them may be called.
        one_call: A second call of a message is dropped.
        must_call: The message is nothing but calls.
        functions: What may be called, for a grammar: `parameters` None where they are free.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    grammar: RequestedGrammar | None = None
    one_call: bool = False
    must_call: bool = False
    functions: tuple[Mapping[str, Any], ...] = ()


class Function(msgspec.Struct, frozen=True):
    """A function as a client describes it, whichever API it came through.

    `path` is its place in the body, `parameters_field` the name of its schema there.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None
    strict: bool
    path: str
    parameters_field: str = "parameters"


class ToolChoice(msgspec.Struct, frozen=True):
    """`tool_choice`: `names` are the functions that may be called, None for all."""

    may_call: bool = True
    must_call: bool = False
    names: tuple[str, ...] | None = None


# The strings that `tool_choice` may be on OpenAI's APIs.
CHOICES: Mapping[str, ToolChoice] = MappingProxyType(
    {
        "auto": ToolChoice(),
        "none": ToolChoice(may_call=False),
        "required": ToolChoice(must_call=True),
    }
)


def functions_of(tools: Sequence[dict[str, Any]], reader: FieldReader) -> list[Function]:
    """The functions of `tools` in OpenAI's form. Raises RequestError."""
    functions: list[Function] = []
    for place, tool in enumerate(tools):
        path = f"tools[{place}]"
        if is_left_out(tool, "function", reader):
            continue
        spec = reader.convert(tool, FunctionTool, path).function
        strict, path = bool(spec.strict), f"{path}.function"
        functions.append(Function(spec.name, spec.description, spec.parameters, strict, path))
    return functions


def is_left_out(tool: Mapping[str, Any], known: str, reader: FieldReader) -> bool:
    """Whether a tool is not of the `known` type, one that the client runs; it is then reported.

    It is left out of the prompt: this server runs no tools (web search) and has no tools that take
    free text. A `tool_choice` that demands it finds no such tool.
    """
    kind = tool.get("type", known)
    if kind == known or not isinstance(kind, str):
        return False
    reader.ignore(f"tools[{kind[:64]}]", "the server runs no tools and knows functions only")
    return True


def offer(
    functions: Sequence[Function], choice: ToolChoice, one_call: bool, model: ServedModel
) -> OfferedTools:
    """The tools and what is forced; a choice that forbids calls leaves none of them.

    Raises:
        RequestError: A tool is wrong, the choice cannot be honoured, or the model knows no tools.
    """
    bounded("tools", len(functions), model.server.limits.tools, "entries")
    by_name: dict[str, Mapping[str, Any]] = {}
    for function in functions:
        described = _described(function)
        if function.name in by_name:
            name = f"{function.path}.name"
            raise RequestError(f"{name} {function.name} is listed twice", param=name)
        by_name[function.name] = described
    may_call = _may_callfunctions(by_name, choice)
    if not choice.may_call or not by_name:
        return OfferedTools()
    known = _checked_format(model)
    is_one = choice.must_call and choice.names is not None and len(choice.names) == 1
    one_call = one_call or is_one
    tools = tuple({"type": "function", "function": described} for described in by_name.values())
    strict = frozenset(function.name for function in functions if function.strict)
    loose = tuple(
        described if described["name"] in strict else {**described, "parameters": None}
        for described in may_call
    )
    is_strict = any(described["name"] in strict for described in may_call)
    grammar: RequestedGrammar | None = None
    if choice.must_call:
        spelled = [{**function, "strict": function["name"] in strict} for function in may_call]
        grammar = _forced_calls(spelled, one_call, is_strict, known, model)
    elif is_strict or choice.names is not None:
        calls_or_text = answer_grammar(known.spelling, loose, one_call, _special_ids(model))
        grammar = RequestedGrammar(replace(calls_or_text, strict=is_strict), "tools")
    return OfferedTools(tools, grammar, one_call, choice.must_call, loose)


def with_answer(
    answer: RequestedGrammar, offered: OfferedTools, model: ServedModel
) -> RequestedGrammar:
    """The grammar of a message that is an answer under a grammar, or calls where some are offered.

    Raises:
        RequestError: A call cannot be spelled, or the answer's grammar cannot be part of another.
    """
    known = _checked_format(model) if offered.functions else TOOL_CALL_FORMATS["harmony"]
    try:
        grammar = answer_grammar(
            known.spelling,
            offered.functions,
            offered.one_call,
            _special_ids(model),
            answer.grammar,
        )
    except NotNestable as error:
        raise RequestError(f"{answer.field} {error}", param=answer.field) from None
    has_strict = any(function["parameters"] is not None for function in offered.functions)
    is_strict = answer.grammar.strict or has_strict
    return RequestedGrammar(replace(grammar, strict=is_strict), answer.field)


def _may_callfunctions(
    functions: Mapping[str, Mapping[str, Any]], choice: ToolChoice
) -> Sequence[Mapping[str, Any]]:
    """The functions that may be called.

    Raises:
        RequestError: One is not there, or there is none and a call is forced.
    """
    names = tuple(functions) if choice.names is None else choice.names
    missing = next((name for name in names if name not in functions), None)
    demand = "asks for a call" if choice.must_call else "allows calls"
    if missing is not None:
        raise RequestError(
            f"tool_choice {demand}, but no tool is named {missing[:64]!r}", param="tool_choice"
        )
    if choice.must_call and not names:
        raise RequestError(f"tool_choice {demand}, but tools is empty", param="tool_choice")
    return tuple(functions[name] for name in dict.fromkeys(names))


def _described(function: Function) -> dict[str, Any]:
    """A function as templates read it. Raises RequestError."""
    path = function.path
    if not FUNCTION_NAME.fullmatch(function.name):
        raise RequestError(
            f"{path}.name is {function.name[:64]!r}; it takes 1 to 64 letters, digits, _ and -",
            param=f"{path}.name",
        )
    parameters = function.parameters or _NO_ARGUMENTS
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{path}.{function.parameters_field} describes a {parameters['type']!r}, it must be an "
            "object",
            param=f"{path}.{function.parameters_field}",
        )
    described = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **described, "parameters": parameters}


def tool_choice_of(choice: str | dict[str, Any] | None) -> ToolChoice:
    """OpenAI's `tool_choice`. Raises RequestError."""
    match choice:
        case None:
            return ToolChoice()
        case str() if choice in CHOICES:
            return CHOICES[choice]
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not (
            others or more
        ):
            return ToolChoice(must_call=True, names=(name,))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": list(tools), **others},
            **more,
        } if not (others or more):
            return allowed_tools(mode, tools, _named, "tool_choice.allowed_tools")
        case str():
            received = repr(choice[:64])
        case _:
            received = "an object of another form"
    raise RequestError(
        f"tool_choice is {received}, it must be auto, none, required, "
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}',
        param="tool_choice",
    )


def _named(tool: object) -> str | None:
    """The name of an allowed tool in chat's form."""
    match tool:
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not (
            others or more
        ):
            return name
    return None


def allowed_tools(
    mode: object, tools: Sequence[object], name_of: Callable[[object], str | None], path: str
) -> ToolChoice:
    """A subset of the tools, at `path`, to which calls are restricted; the prompt has them all.

    `name_of` gives a tool's name, None if it has another form. Raises RequestError.
    """
    if mode not in ("auto", "required"):
        raise RequestError(
            f"{path}.mode is {mode!r:.64}, it must be auto or required", param=f"{path}.mode"
        )
    if not tools:
        raise RequestError(
            f"{path}.tools is an empty list; send tool_choice none to forbid calls",
            param=f"{path}.tools",
        )
    names: list[str] = []
    for index, tool in enumerate(tools):
        name = name_of(tool)
        if name is None:
            param = f"{path}.tools[{index}]"
            raise RequestError(f"{param} is not a function with its name", param=param)
        names.append(name)
    return ToolChoice(must_call=mode == "required", names=tuple(names))


def _forced_calls(
    functions: Sequence[Mapping[str, Any]],
    one_call: bool,
    is_strict: bool,
    known: ToolCallFormat,
    model: ServedModel,
) -> RequestedGrammar:
    """The grammar of calls only. Raises RequestError for a function that it cannot spell."""
    loosened: set[str] = set()
    grammar = call_grammar(known.spelling, functions, one_call, _special_ids(model), loosened)
    return RequestedGrammar(
        replace(grammar, strict=is_strict), "tools", loosened=tuple(sorted(loosened))
    )


def _special_ids(model: ServedModel) -> Callable[[str], int | None]:
    """Which token a text is, if that is a special one."""
    tokenizer = model.engine.tokenizer

    def special_id(text: str) -> int | None:
        token_id = tokenizer.token_id(text)
        return token_id if token_id is not None and tokenizer.is_special(token_id) else None

    return special_id


def _checked_format(model: ServedModel) -> ToolCallFormat:
    """How the model writes calls. Raises RequestError if it knows no tools."""
    name = model.engine.model_name
    if not model.formats.renders_tools:
        raise RequestError(
            f"tools is not supported: the chat template of {name} does not show tools",
            param="tools",
        )
    if model.formats.tool_calls is None:
        raise RequestError(
            f"tools is not supported: how {name} writes calls is not known; start the server with "
            "--tool-call-parser",
            param="tools",
        )
    return model.formats.tool_calls
