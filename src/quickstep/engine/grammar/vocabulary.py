"""A tokenizer as llguidance takes it: the bytes of each token, the special ones, and `encode`.

Built from our own tokenizer, so that a token's bytes are what the detokenizer makes of them: markup
such as `<tool_call>` is text where the checkpoint says so. llguidance loads with the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.runtime.sampling.closing_search import byte_tokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from quickstep.engine.text.tokenizer import Tokenizer

__all__ = ["GrammarVocabulary", "TextEncoder", "byte_vocabulary", "grammar_vocabulary"]


class TextEncoder(Protocol):
    """The model's own way to write a text in tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""


class GrammarVocabulary(msgspec.Struct, frozen=True):
    """Plain data: the bytes of each token, the tokens that are no text, and the end tokens."""

    tokens: list[bytes]
    special_token_ids: list[int]
    end_token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> GrammarVocabulary:
        """Up to the width of the logits. Raises RequestError if there is no end token."""
        ends = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        if not ends:
            raise RequestError(
                "grammar is not supported: the model has no end token", param="grammar"
            )
        special = [i for i in range(vocab_size) if i in ends or tokenizer.is_special(i)]
        return cls([tokenizer.token_bytes(i) for i in range(vocab_size)], special, ends)


def grammar_vocabulary(
    words: GrammarVocabulary, encoder: TextEncoder | None, slices: list[str] | None = None
) -> LLTokenizer:
    """The vocabulary for llguidance, which without an encoder writes text greedily.

    `slices` are patterns whose tokens it treats together; None for those that suit most grammars.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Vocabulary(words, encoder)
    native = LLTokenizer(
        TokenizerWrapper(vocabulary),
        n_vocab=len(words.tokens),
        eos_token=words.end_token_ids,
        slices=slices,
    )
    vocabulary.encode_greedily = native.greedy_tokenize
    return native


def byte_vocabulary(words: GrammarVocabulary) -> LLTokenizer:
    """The vocabulary of `closing_search`: bytes, and the special tokens of `words`."""
    tokens = byte_tokens(words.tokens, words.special_token_ids)
    return grammar_vocabulary(replace(words, tokens=tokens), None, slices=[])


class _Vocabulary:
    """The attributes that llguidance reads. It calls this for text that a grammar leaves no choice
    in, to continue as the model's own tokenizer would.
    """

    def __init__(self, words: GrammarVocabulary, encoder: TextEncoder | None) -> None:
        self.eos_token_id = words.end_token_ids[0]
        self.bos_token_id: int | None = None
        self.tokens = words.tokens
        self.special_token_ids = words.special_token_ids
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
