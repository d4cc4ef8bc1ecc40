"""A grammar's matcher, by llguidance: its vocabulary and its compilation.

The same for the process that tries grammars out and for the engine's. The vocabulary is built from
our own tokenizer, so that a token's bytes are those that the detokenizer gives: markup such as
`<tool_call>` is text where the checkpoint says so. llguidance is imported by the first call, never
with this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.runtime.sampling.closing_search import byte_tokens
from quickstep.text.grammar.source import GrammarLimits, GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quickstep.text.tokenizer import Tokenizer


class TextEncoder(Protocol):
    """The model's own tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""


class GrammarVocabulary(msgspec.Struct, frozen=True):
    """Plain data: the bytes of each token, the tokens that are no text, and the end tokens."""

    tokens: list[bytes]
    special_token_ids: list[int]
    end_token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> GrammarVocabulary:
        """The first `vocab_size` tokens. Raises RequestError if there is no end token."""
        ends = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        if not ends:
            raise RequestError(
                "grammar is not supported: the model has no end token", param="grammar"
            )
        special = [i for i in range(vocab_size) if i in ends or tokenizer.is_special(i)]
        return cls([tokenizer.token_bytes(i) for i in range(vocab_size)], special, ends)


def grammar_vocabulary(
    vocabulary: GrammarVocabulary, encoder: TextEncoder | None, slices: list[str] | None = None
) -> LLTokenizer:
    """The vocabulary for llguidance; without an encoder it tokenizes text greedily.

    `slices` are patterns whose tokens it handles together; None for its own, which suit most
    grammars.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    callback = _Vocabulary(vocabulary, encoder)
    native = LLTokenizer(
        TokenizerWrapper(callback),
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.end_token_ids,
        slices=slices,
    )
    callback.encode_greedily = native.greedy_tokenize
    return native


def byte_vocabulary(vocabulary: GrammarVocabulary) -> LLTokenizer:
    """The vocabulary of `closing_search`: bytes, and the special tokens of `vocabulary`."""
    tokens = byte_tokens(vocabulary.tokens, vocabulary.special_token_ids)
    return grammar_vocabulary(replace(vocabulary, tokens=tokens), None, slices=[])


class _Vocabulary:
    """The attributes that llguidance reads. It calls the object to tokenize forced text, so that
    the text continues as the model's own tokenizer would write it.
    """

    def __init__(self, vocabulary: GrammarVocabulary, encoder: TextEncoder | None) -> None:
        self.eos_token_id = vocabulary.end_token_ids[0]
        self.bos_token_id: int | None = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self.encode_greedily: Callable[[str], list[int]] | None = None
        self._encoder = encoder
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Token ids that spell `text` exactly, none of them special."""
        if not isinstance(text, str):
            raise TypeError("only text can be encoded")
        if self._encoder is not None:
            ids = self._encoder.encode(text, add_special_tokens=False)
            fits = self._special.isdisjoint(ids) and max(ids, default=0) < len(self.tokens)
            if fits and b"".join(self.tokens[token_id] for token_id in ids) == text.encode():
                return ids
        assert self.encode_greedily is not None, "llguidance encodes nothing while it is built"
        return self.encode_greedily(text)


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

    from quickstep.text.grammar.json_schema import (
        ESCAPES_BY_NUMBER,
        ONE_LINE,
        has_escapes_by_number,
    )

    one_line: Any = {**ONE_LINE}
    strict: Any = {**ONE_LINE, "lenient": False}
    if has_escapes_by_number(source.text):
        strict |= ESCAPES_BY_NUMBER
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
    """llguidance's message in one line: the error itself, without its context."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("error: ")]
    reason = named[0].removeprefix("error: ") if named else lines[0] if lines else "unknown"
    if reason == "NoExtensionBias":  # llguidance's name for it
        return "it refers to itself without an end"
    return reason.replace("Unimplemented keys", "unsupported keywords")[:300]
