"""Grammars of requests: bounded, checked, compiled once and kept for the next request.

    Grammar --bounds--> llguidance's form --compile--> matcher, copied for each sequence

`submit` refuses what cannot be compiled; the server calls `prepare` before it, which does the same
in a thread. The runner takes its matchers from `new_matcher`. llguidance works within limits of
time and memory, but in this process, so what is known to exhaust its stack (long chains of rules
or references) is refused by counting first. It is loaded by the first grammar, never at import.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quickstep.engine.grammar_vocabulary import closing_vocabulary, grammar_vocabulary
from quickstep.engine.tokenizer import Tokenizer
from quickstep.errors import RequestError
from quickstep.runtime.closing import ClosingVocabulary
from quickstep.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["GrammarCompiler", "GrammarLimits", "check_grammar", "prepare_grammar"]

_SCHEMA_IN_LARK = re.compile(r"%json\s*")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds on one grammar, and on the compiled ones that are kept.

    Attributes:
        text_bytes: UTF-8 of a schema, a Lark grammar, or all choices.
        regex_bytes: UTF-8 of a regular expression.
        depth: Nested objects and lists of a schema.
        reference_levels: Sum of the depths of all `$ref`s: llguidance follows chains of them on
            its stack, which 8 MB of it do up to about 3,000.
        lines: Lines of a Lark grammar, hence rules, which may chain in the same way.
        groups: Opening brackets of a Lark grammar, its schemas left out.
        choices: Texts to choose from.
        compile_fuel: llguidance's measure of work to compile; 300,000 stay below 0.5 s.
        step_fuel: The same per token; 50,000 stay below 50 ms.
        lexer_states: States of a sequence's lexer, at most about 2 kB each.
        symbols: Size of a compiled grammar.
        kept: Compiled grammars, the last used ones.
    """

    text_bytes: int = 64 * 1024
    regex_bytes: int = 2 * 1024
    depth: int = 32
    reference_levels: int = 1024
    lines: int = 512
    groups: int = 512
    choices: int = 1024
    compile_fuel: int = 300_000
    step_fuel: int = 50_000
    lexer_states: int = 50_000
    symbols: int = 100_000
    kept: int = 64


class GrammarCompiler:
    """One model's compiler; any thread may call it. `vocab_size` is the width of the logits."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, limits: GrammarLimits | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits or GrammarLimits()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        # its thread starts with the first grammar; one, so that no client can keep all cores busy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quickstep-grammar")

    @property
    def num_kept(self) -> int:
        """Compiled grammars that the next request finds."""
        return len(self._compiled)

    async def prepare(self, grammar: Grammar) -> None:
        """Compile in a thread. Raises RequestError."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.compile, grammar)

    def compile(self, grammar: Grammar) -> None:
        """Have the grammar ready. Raises RequestError that says what is wrong with it."""
        self._prototype(grammar)

    def new_matcher(self, grammar: Grammar) -> tuple[LLMatcher, ClosingVocabulary]:
        """A matcher at the grammar's start, which shares no state. Raises RequestError."""
        prototype = self._prototype(grammar)
        return prototype.deep_copy(), self._closing_vocabulary

    def _prototype(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > self._limits.kept:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        source = _source(grammar, self._limits)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=self._parser_limits)
        assert self._closing_vocabulary is not None, "it is built here, off the engine's threads"
        # copies begin with the first mask known, and what has none is refused here
        allows_text = any(matcher.compute_bitmask())
        if not matcher.is_error() and not allows_text:
            raise RequestError("grammar allows no text at all", param="grammar")
        if matcher.is_error():
            raise RequestError(
                f"grammar cannot be enforced: {_reason(matcher.get_error())}", param="grammar"
            )
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The vocabulary as llguidance reads it: a large one takes a moment."""
        return grammar_vocabulary(self._tokenizer, self._vocab_size)

    @cached_property
    def _closing_vocabulary(self) -> ClosingVocabulary:
        """What the endings of grammars are spelled with."""
        return closing_vocabulary(self._tokenizer, self._vocab_size)

    @cached_property
    def _parser_limits(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(
            initial_lexer_fuel=self._limits.compile_fuel,
            step_lexer_fuel=self._limits.step_fuel,
            max_lexer_states=self._limits.lexer_states,
            max_grammar_size=self._limits.symbols,
            verbose_errors=False,
        )


def check_grammar(grammar: Grammar | None, compiler: GrammarCompiler | None) -> None:
    """Compile a request's grammar, if it has one. Raises RequestError."""
    if grammar is not None:
        _required(compiler).compile(grammar)


async def prepare_grammar(grammar: Grammar | None, compiler: GrammarCompiler | None) -> None:
    """The same in a thread. Raises RequestError."""
    if grammar is not None:
        await _required(compiler).prepare(grammar)


def _required(compiler: GrammarCompiler | None) -> GrammarCompiler:
    if compiler is None:
        raise RequestError("grammar is not supported by this engine", param="grammar")
    return compiler


def _source(grammar: Grammar, limits: GrammarLimits) -> str:
    """The grammar in llguidance's form, within the limits. Raises RequestError."""
    from llguidance import LLMatcher

    text = grammar.text
    is_regex = grammar.kind == "regex"
    _bound(_num_bytes(text), limits.regex_bytes if is_regex else limits.text_bytes, "bytes")
    match grammar.kind:
        case "json_schema":
            schema = _schema(text, limits)
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_flexible": False, "lenient": False}
            )
        case "json_object":
            return LLMatcher.grammar_from_json_schema(
                '{"type": "object"}', overrides={"whitespace_flexible": False}
            )
        case "regex":
            if not text:
                raise RequestError("grammar is an empty regular expression", param="grammar")
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(text, limits))
        case "lark":
            _check_lark(text, limits)
            return LLMatcher.grammar_from_lark(text)


def _schema(text: str, limits: GrammarLimits) -> str:
    """The schema's text as we read it, so that nothing hides in its spelling."""
    schema = _parsed(text)
    if not isinstance(schema, dict):
        raise RequestError("grammar is no JSON schema: it must be an object", param="grammar")
    if "x-guidance" in schema:
        raise RequestError("grammar has the unknown key x-guidance", param="grammar")
    _bound(_reference_levels(schema, limits), limits.reference_levels, "levels of $ref")
    return json.dumps(schema, ensure_ascii=False)


def _reference_levels(schema: object, limits: GrammarLimits) -> int:
    """The sum of the depths of all `$ref`s. Raises RequestError for a schema that is too deep."""
    levels = 0
    for value, depth in _values(schema):
        _bound(depth, limits.depth, "levels")
        levels += depth if isinstance(value, dict) and "$ref" in value else 0
    return levels


def _check_lark(text: str, limits: GrammarLimits) -> None:
    """Lines, brackets and schemas within the limits. Raises RequestError."""
    _bound(text.count("\n") + 1, limits.lines, "lines")
    levels = num_groups = end = 0
    for found in _SCHEMA_IN_LARK.finditer(text):
        if found.start() < end:
            continue
        num_groups += sum(map(text[end : found.start()].count, "([{"))
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise RequestError("grammar has a %json without a schema", param="grammar") from None
        levels += _reference_levels(schema, limits)
    num_groups += sum(map(text[end:].count, "([{"))
    _bound(num_groups, limits.groups, "brackets")
    _bound(levels, limits.reference_levels, "levels of $ref")


def _choice(text: str, limits: GrammarLimits) -> str:
    """A Lark grammar of the choices. JSON's strings are Lark's."""
    choices = _parsed(text)
    if not isinstance(choices, list) or not all(isinstance(item, str) for item in choices):
        raise RequestError("grammar is no choice: it must be a list of texts", param="grammar")
    if not choices or not all(choices):
        raise RequestError("grammar has an empty choice", param="grammar")
    _bound(len(choices), limits.choices, "choices")
    return "start: " + " | ".join(json.dumps(item, ensure_ascii=False) for item in choices)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"grammar is not valid JSON: {error}", param="grammar") from None


def _values(value: object) -> Iterator[tuple[object, int]]:
    """Every value in a JSON value with its depth, without recursion."""
    pending = [(value, 1)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        if isinstance(value, dict):
            pending += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            pending += [(item, depth + 1) for item in value]


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(
            "grammar is not valid Unicode: it holds half a surrogate pair", param="grammar"
        ) from None


def _bound(value: int, limit: int, unit: str) -> None:
    if value > limit:
        raise RequestError(f"grammar has {value} {unit}, the limit is {limit}", param="grammar")


def _reason(error: str) -> str:
    """llguidance's message in one line: of a regular expression, what is wrong with it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("error: ")]
    reason = named[0].removeprefix("error: ") if named else lines[0] if lines else "unknown"
    return reason.replace("Unimplemented keys", "unsupported keywords")[:300]
