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
from quickstep.text.tool_calls.gemma import GEMMA_MARKERS, GEMMA_SPELLING, gemma4
from quickstep.text.tool_calls.harmony import (
    HARMONY_MARKERS,
    HARMONY_PASSAGE,
    HARMONY_SPELLING,
    harmony,
)
from quickstep.text.tool_calls.json_formats import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    DEEPSEEK_PLAIN,
    GRANITE_MARKERS,
    GRANITE_SPELLING,
    HERMES_MARKERS,
    HERMES_SPELLING,
    KIMI,
    KIMI_SPELLING,
    LLAMA_MARKERS,
    LLAMA_SPELLING,
    MISTRAL_LISTED,
    MISTRAL_MARKERS,
    MISTRAL_NAMED,
    MarkedCalls,
    granite,
    hermes,
    llama3_json,
    marked_calls,
    mistral,
)
from quickstep.text.tool_calls.pythonic import (
    LFM2,
    LFM2_SPELLING,
    PYTHONIC,
    PYTHONIC_SPELLING,
    ListMarkers,
    pythonic,
)
from quickstep.text.tool_calls.reader import Grammar, Markers, Parsing, Reader
from quickstep.text.tool_calls.tagged import (
    DSML,
    DSML_V4,
    GLM,
    MINIMAX,
    QWEN3_CODER,
    SEED_OSS,
    TagWords,
    tag_spelling,
    tagged,
)


class ToolCallFormat(msgspec.Struct, frozen=True):
    """How a model writes calls.

    Attributes:
        markers: Its markers that may be special tokens, which the output then has to keep.
        spelling: How calls are spelled, for a grammar that forces them.
        short_ids: Templates of this family accept only call ids of nine letters and digits.
        numbered_ids: Templates of this family write the id of a call in place of its name:
            `functions.NAME:INDEX`, counted through the conversation.
        families: Models that write calls so, for the documentation.
    """

    name: str
    grammar: Grammar
    markers: tuple[str, ...]
    spelling: CallSpelling
    short_ids: bool = False
    numbered_ids: bool = False
    families: str = ""


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a model marks its reasoning; harmony has markers of its own instead of a pair of tags.

    Attributes:
        passage: A text that opens the reasoning and those that end it, one after the other.
        families: Models that mark their reasoning so, for the documentation.
    """

    name: str
    opening: str
    closing: str
    markers: tuple[str, ...]
    passage: tuple[str, ...]
    families: str = ""


def _between(name: str, opening: str, closing: str, families: str) -> ReasoningFormat:
    return ReasoningFormat(
        name, opening, closing, (opening, closing), (opening, closing), families=families
    )


def _harmony_with_tools(reader: Reader) -> Parsing[None]:
    yield from harmony(reader, with_tools=True)


def _of_tags(name: str, words: TagWords, spelling: CallSpelling, families: str) -> ToolCallFormat:
    return ToolCallFormat(
        name, lambda reader: tagged(reader, words), words.markers, spelling, families=families
    )


def _of_lists(
    name: str, markers: ListMarkers, spelling: CallSpelling, families: str
) -> ToolCallFormat:
    texts = (markers.opening, markers.closing)
    return ToolCallFormat(
        name, lambda reader: pythonic(reader, markers), texts, spelling, families=families
    )


def _of_markers(
    name: str, words: MarkedCalls, spelling: CallSpelling, families: str
) -> ToolCallFormat:
    return ToolCallFormat(
        name,
        lambda reader: marked_calls(reader, words),
        words.markers,
        spelling,
        numbered_ids=words.is_numbered,
        families=families,
    )


_Format = TypeVar("_Format")
_HARMONY = "harmony"
_QWEN_SPELLING = tag_spelling(QWEN3_CODER, per_call=True)
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        known.name: known
        for known in (
            ToolCallFormat(
                *("hermes", hermes, HERMES_MARKERS, HERMES_SPELLING),
                families="Hermes, Qwen 2.5, Qwen3, Granite 4",
            ),
            ToolCallFormat(
                *("llama3_json", llama3_json, LLAMA_MARKERS, LLAMA_SPELLING),
                families="Llama 3.1 to 3.3, Llama 4",
            ),
            _of_lists("pythonic", PYTHONIC, PYTHONIC_SPELLING, "Llama 3.2, Llama 4"),
            ToolCallFormat(
                *("mistral", mistral, MISTRAL_MARKERS, MISTRAL_LISTED),
                short_ids=True,
                families="Mistral, Mistral Small, Magistral, Devstral",
            ),
            _of_markers("deepseek_v3", DEEPSEEK, DEEPSEEK_PLAIN, "DeepSeek V3, R1 and V3.1"),
            ToolCallFormat(
                *("granite", granite, GRANITE_MARKERS, GRANITE_SPELLING),
                families="Granite 3, Phi-4",
            ),
            ToolCallFormat(
                *(_HARMONY, _harmony_with_tools, HARMONY_MARKERS, HARMONY_SPELLING),
                families="gpt-oss",
            ),
            _of_tags(
                "qwen3_coder", QWEN3_CODER, _QWEN_SPELLING, "Qwen3-Coder, Qwen3.5, Nemotron 3"
            ),
            _of_tags("glm45", GLM, tag_spelling(GLM, per_call=True), "GLM 4.5 and later"),
            _of_tags("minimax_m2", MINIMAX, tag_spelling(MINIMAX), "MiniMax M2"),
            _of_tags("deepseek_v32", DSML, tag_spelling(DSML), "DeepSeek V3.2"),
            _of_tags("deepseek_v4", DSML_V4, tag_spelling(DSML_V4), "DeepSeek V4"),
            _of_tags("seed_oss", SEED_OSS, tag_spelling(SEED_OSS, per_call=True), "Seed OSS"),
            _of_markers("kimi_k2", KIMI, KIMI_SPELLING, "Kimi K2"),
            ToolCallFormat(*("gemma4", gemma4, GEMMA_MARKERS, GEMMA_SPELLING), families="Gemma 4"),
            _of_lists("lfm2", LFM2, LFM2_SPELLING, "LFM2"),
        )
    }
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        known.name: known
        for known in (
            _between(
                *("think", "<think>", "</think>"),
                "Qwen3, DeepSeek, GLM, MiniMax, Kimi K2, Nemotron 3, LFM2, and others",
            ),
            _between("mistral", "[THINK]", "[/THINK]", "Magistral, Mistral Small"),
            ReasoningFormat(
                *(_HARMONY, "", "", HARMONY_MARKERS, HARMONY_PASSAGE), families="gpt-oss"
            ),
            _between("seed_oss", "<seed:think>", "</seed:think>", "Seed OSS"),
            ReasoningFormat(
                "gemma4",
                "<|channel>thought",
                "<channel|>",
                ("<|channel>", "<channel|>"),
                ("<|channel>thought", "<channel|>"),
                families="Gemma 4",
            ),
        )
    }
)
# vLLM's names of the same formats
_OTHER_NAMES = {
    "qwen25": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseek_v31": "deepseek_v3",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "minimax": "minimax_m2",
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
    ("\uff5cDSML\uff5c", "deepseek_v32"),
    ("tool▁call▁begin", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    # with the tag of hermes and other contents
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters": dictionary of argument', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
    ("<|python_start|>", "pythonic"),
)
# a family's other generations, and a text by which their templates are recognized
_GENERATION_SIGNS = (
    ("mistral", "[ARGS]", replace(TOOL_CALL_FORMATS["mistral"], spelling=MISTRAL_NAMED)),
    ("deepseek_v3", "```json", replace(TOOL_CALL_FORMATS["deepseek_v3"], spelling=DEEPSEEK_FENCED)),
    (
        "glm45",
        "</arg_key><arg_value>",
        replace(TOOL_CALL_FORMATS["glm45"], spelling=tag_spelling(GLM, line="", per_call=True)),
    ),
    ("deepseek_v32", "tool_calls>", TOOL_CALL_FORMATS["deepseek_v4"]),
)
_REASONING_SIGNS = (
    ("<|channel|>analysis", _HARMONY),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("<|channel>", "gemma4"),
    ("</think>", "think"),
)
_READS_TOOLS = re.compile(r"\{[{%](?:(?![%}]\}).)*\btools\b", re.DOTALL)


def formats_of(template: str) -> OutputFormats:
    """The formats that a chat template's text uses."""
    tool_calls = _first_sign(template, _TOOL_CALL_SIGNS)
    reasoning = _first_sign(template, _REASONING_SIGNS)
    return OutputFormats(
        _generation(tool_calls, template) if tool_calls else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
        renders_tools=_READS_TOOLS.search(template) is not None,
        renders_calls="tool_calls" in template,
    )


def _generation(name: str, template: str) -> ToolCallFormat:
    """The format as this generation of the family's models writes it."""
    for family, sign, known in _GENERATION_SIGNS:
        if family == name and sign in template:
            return known
    return TOOL_CALL_FORMATS[name]


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
    """Read the reasoning, if there is any: `<think>...</think>`, `[THINK]...[/THINK]` and such.

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
