"""The formats of tool calls and reasoning by name, and which ones a chat template uses.

`formats_of` reads the template's text: it contains a format's markers, since the template has to
write earlier calls the way the model does. `--tool-call-parser` and `--reasoning-parser` override
the choice with a name (vLLM's names are known as well), or with `none`. `message_grammar` combines
reasoning and calls into the grammar of a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError, RequestError
from quickstep.text.tool_calls.call_grammar import CallSpelling
from quickstep.text.tool_calls.harmony import (
    HARMONY_MARKERS,
    HARMONY_PASSAGE,
    HARMONY_SPELLING,
    harmony,
)
from quickstep.text.tool_calls.json_formats import (
    DEEPSEEK_FENCED,
    DEEPSEEK_MARKERS,
    DEEPSEEK_PLAIN,
    GRANITE_MARKERS,
    GRANITE_SPELLING,
    HERMES_MARKERS,
    HERMES_SPELLING,
    LLAMA_MARKERS,
    LLAMA_SPELLING,
    MISTRAL_LISTED,
    MISTRAL_MARKERS,
    MISTRAL_NAMED,
    deepseek,
    granite,
    hermes,
    llama3_json,
    mistral,
)
from quickstep.text.tool_calls.pythonic import PYTHONIC_MARKERS, PYTHONIC_SPELLING, pythonic
from quickstep.text.tool_calls.reader import Grammar, Markers, Parsing, Reader


class ToolCallFormat(msgspec.Struct, frozen=True):
    """How a model writes calls.

    Attributes:
        markers: Its markers that may be special tokens, which the output then has to keep.
        spelling: How calls are spelled, for a grammar that forces them.
        short_ids: Templates of this family accept only call ids of nine letters and digits.
    """

    name: str
    grammar: Grammar
    markers: tuple[str, ...]
    spelling: CallSpelling
    short_ids: bool = False


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a model marks its reasoning; harmony has markers of its own instead of a pair of tags.

    Attributes:
        passage: A text that opens the reasoning and those that end it, one after the other.
    """

    name: str
    opening: str
    closing: str
    markers: tuple[str, ...]
    passage: tuple[str, ...]


def _tags(name: str, opening: str, closing: str) -> ReasoningFormat:
    return ReasoningFormat(name, opening, closing, (opening, closing), (opening, closing))


def _harmony_with_tools(reader: Reader) -> Parsing[None]:
    yield from harmony(reader, with_tools=True)


_Format = TypeVar("_Format")
_HARMONY = "harmony"
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        known.name: known
        for known in (
            ToolCallFormat("hermes", hermes, HERMES_MARKERS, HERMES_SPELLING),
            ToolCallFormat("llama3_json", llama3_json, LLAMA_MARKERS, LLAMA_SPELLING),
            ToolCallFormat("pythonic", pythonic, PYTHONIC_MARKERS, PYTHONIC_SPELLING),
            ToolCallFormat("mistral", mistral, MISTRAL_MARKERS, MISTRAL_LISTED, short_ids=True),
            ToolCallFormat("deepseek_v3", deepseek, DEEPSEEK_MARKERS, DEEPSEEK_PLAIN),
            ToolCallFormat("granite", granite, GRANITE_MARKERS, GRANITE_SPELLING),
            ToolCallFormat(_HARMONY, _harmony_with_tools, HARMONY_MARKERS, HARMONY_SPELLING),
        )
    }
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "think": _tags("think", "<think>", "</think>"),
        "mistral": _tags("mistral", "[THINK]", "[/THINK]"),
        _HARMONY: ReasoningFormat(_HARMONY, "", "", HARMONY_MARKERS, HARMONY_PASSAGE),
    }
)
# vLLM's names of the same formats
_OTHER_NAMES = {
    "qwen25": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseek_v31": "deepseek_v3",
    "deepseek_r1": "think",
    "qwen3": "think",
    "openai": _HARMONY,
    "openai_gptoss": _HARMONY,
}


class OutputFormats(msgspec.Struct, frozen=True):
    """The formats to parse in a model's output; None where it has none.

    `renders_tools`: the template writes tools into the prompt. `renders_calls`: it writes the calls
    of earlier messages.
    """

    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None
    renders_tools: bool = False
    renders_calls: bool = False


# in this order: the first whose text is in the template
_TOOL_CALL_SIGNS = (
    ("<|channel|>commentary", _HARMONY),
    ("tool▁call▁begin", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters": dictionary of argument', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
    ("<|python_start|>", "pythonic"),
)
# a family's other spelling, and a text by which its templates are recognized
_SPELLING_SIGNS = (
    ("mistral", "[ARGS]", MISTRAL_NAMED),
    ("deepseek_v3", "```json", DEEPSEEK_FENCED),
)
# formats with the same tag and other contents (Qwen3-Coder, GLM)
_NOT_HERMES = ("<function=", "<arg_key>")
_REASONING_SIGNS = (
    ("<|channel|>analysis", _HARMONY),
    ("[THINK]", "mistral"),
    ("</think>", "think"),
)
_READS_TOOLS = re.compile(r"\{[{%](?:(?![%}]\}).)*\btools\b", re.DOTALL)


def formats_of(template: str) -> OutputFormats:
    """The formats that a chat template's text uses."""
    tool_calls = _first_sign(template, _TOOL_CALL_SIGNS)
    if tool_calls == "hermes" and any(sign in template for sign in _NOT_HERMES):
        tool_calls = None
    reasoning = _first_sign(template, _REASONING_SIGNS)
    return OutputFormats(
        _spelled(TOOL_CALL_FORMATS[tool_calls], template) if tool_calls else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
        renders_tools=_READS_TOOLS.search(template) is not None,
        renders_calls="tool_calls" in template,
    )


def _spelled(known: ToolCallFormat, template: str) -> ToolCallFormat:
    """The format, spelled as this generation of the family's models writes it."""
    for name, sign, spelling in _SPELLING_SIGNS:
        if known.name == name and sign in template:
            return replace(known, spelling=spelling)
    return known


def tool_call_format(name: str) -> ToolCallFormat | None:
    """The format of that name, None for `none`. Raises ConfigError."""
    return None if name == "none" else _named(name, TOOL_CALL_FORMATS, "--tool-call-parser")


def reasoning_format(name: str) -> ReasoningFormat | None:
    """The format of that name, None for `none`. Raises ConfigError."""
    return None if name == "none" else _named(name, REASONING_FORMATS, "--reasoning-parser")


def message_grammar(
    tool_calls: ToolCallFormat | None, reasoning: ReasoningFormat | None, inside_reasoning: bool
) -> Grammar:
    """The grammar of a message: its reasoning, then its calls.

    `inside_reasoning`: the prompt ends inside the reasoning. Harmony has one grammar for both.
    """
    if _HARMONY in (tool_calls and tool_calls.name, reasoning and reasoning.name):
        with_tools = tool_calls is not None
        return lambda reader: harmony(reader, with_tools)
    if reasoning is None:
        return tool_calls.grammar if tool_calls else Reader.content_to_end
    opening, closing = reasoning.opening, Markers(reasoning.closing)

    def grammar(reader: Reader) -> Parsing[None]:
        yield from _reasoning(reader, opening, closing, inside_reasoning)
        yield from tool_calls.grammar(reader) if tool_calls else reader.content_to_end()

    return grammar


def _reasoning(
    reader: Reader, opening: str, closing: Markers, inside_reasoning: bool
) -> Parsing[None]:
    """Read the reasoning, if there is any: `<think>...</think>` or `[THINK]...[/THINK]`.

    It is at the beginning of the message only, so that an answer may mention the tag.
    """
    yield from reader.space()
    has_opening = yield from reader.literal(opening)
    if not has_opening and not inside_reasoning:
        reader.reject()
        return
    reader.drop()
    reader.reasoning.cut()
    reader.in_reasoning = True
    found = yield from reader.text_until(reader.reasoning, closing)
    reader.in_reasoning = False
    if found is not None:
        reader.drop()
        reader.reasoning.cut()


def _first_sign(template: str, signs: tuple[tuple[str, str], ...]) -> str | None:
    return next((name for sign, name in signs if sign in template), None)


def _named(name: str, formats: Mapping[str, _Format], flag: str) -> _Format:
    known = formats.get(_OTHER_NAMES.get(name, name))
    if known is None:
        names = ", ".join([*formats, "none"])
        raise ConfigError(f"{flag} is {name!r}; known are {names}")
    return known


def check_reasoning_tags(tags: tuple[str, str] | None, model_name: str) -> tuple[str, str]:
    """The tags that the reasoning is between. Raises RequestError if there are none."""
    if tags is None or not all(tags):
        raise RequestError(
            f"thinking_budget is not supported: {model_name} sets no reasoning apart by tags",
            param="thinking_budget",
        )
    return tags


def check_budget_message(message: str, closing: str) -> None:
    """Raise RequestError for a message that ends the reasoning by itself."""
    if closing in message:
        raise RequestError(
            f"reasoning_budget_message contains {closing}, which is written after it; leave the tag"
            " out",
            param="reasoning_budget_message",
        )
