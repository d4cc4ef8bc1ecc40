"""Grammar to matcher, by llguidance: the same for the trial's process and for the engine's.

llguidance is imported by the first call, never with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quickstep.engine.grammar.json_spacing import ONE_LINE
from quickstep.engine.grammar.source import GrammarLimits, GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Refusal", "build_matcher", "reason_of"]


class Refusal(Exception):
    """Why a grammar is refused, as a sentence without its subject."""


def build_matcher(
    source: GrammarSource, vocabulary: LLTokenizer, limits: GrammarLimits
) -> LLMatcher:
    """A matcher at the grammar's start, its first mask known. Raises Refusal."""
    from llguidance import LLMatcher, LLParserLimits

    bounds = LLParserLimits(
        initial_lexer_fuel=limits.compile_fuel,
        step_lexer_fuel=limits.step_fuel,
        max_lexer_states=limits.lexer_states,
        max_grammar_size=limits.symbols,
        verbose_errors=False,
    )
    matcher = LLMatcher(vocabulary, _native(source), log_level=0, limits=bounds)
    # copies begin with the first mask known, and what has none is refused here
    allows_text = any(matcher.compute_bitmask())
    if matcher.is_error():
        raise Refusal(f"cannot be enforced: {reason_of(matcher.get_error())}")
    if not allows_text:
        raise Refusal("allows no text at all")
    return matcher


def _native(source: GrammarSource) -> str:
    from llguidance import LLMatcher

    one_line: Any = {**ONE_LINE}
    strict: Any = {**ONE_LINE, "lenient": False}
    match source.form:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(source.text, overrides=strict)
        case "json_object":
            return LLMatcher.grammar_from_json_schema(source.text, overrides=one_line)
        case "regex":
            return LLMatcher.grammar_from_regex(source.text)
        case "lark":
            return LLMatcher.grammar_from_lark(source.text)


def reason_of(error: str) -> str:
    """llguidance's message in one line: of a regular expression, what is wrong with it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("error: ")]
    reason = named[0].removeprefix("error: ") if named else lines[0] if lines else "unknown"
    if reason == "NoExtensionBias":  # llguidance's word for it
        return "it refers to itself without an end"
    return reason.replace("Unimplemented keys", "unsupported keywords")[:300]
