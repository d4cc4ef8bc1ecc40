"""A tokenizer as llguidance takes it: the bytes of each token, the special ones, and `encode`.

Built from our own tokenizer, so that a token's bytes are what the detokenizer makes of them: markup
such as `<tool_call>` is text where the checkpoint says so. llguidance loads with the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quickstep.engine.tokenizer import Tokenizer
from quickstep.errors import RequestError
from quickstep.runtime.closing import ClosingVocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["closing_vocabulary", "grammar_vocabulary"]


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """The vocabulary up to the width of the logits. Raises RequestError if it has no end token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
    if not ends:
        raise RequestError("grammar is not supported: the model has no end token", param="grammar")
    vocabulary = _Vocabulary(tokenizer, vocab_size, ends)
    native = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=ends)
    vocabulary.encode_greedily = native.greedy_tokenize
    return native


def closing_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> ClosingVocabulary:
    """The same vocabulary, to spell the end of an output with."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    special = {i for i in range(vocab_size) if tokenizer.is_special(i)} | tokenizer.eos_token_ids
    return ClosingVocabulary(tokens, special)


class _Vocabulary:
    """The attributes that llguidance reads. It calls this for text that a grammar leaves no choice
    in, to go on as the model's own tokenizer would.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> None:
        self.eos_token_id = ends[0]
        self.bos_token_id: int | None = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [
            token_id
            for token_id in range(vocab_size)
            if token_id in ends or tokenizer.is_special(token_id)
        ]
        self.encode_greedily: Callable[[str], list[int]] | None = None
        self._tokenizer = tokenizer
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Token ids that spell `text` exactly, none of them special."""
        if not isinstance(text, str):
            raise TypeError("only text can be encoded")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        fits = self._special.isdisjoint(ids) and max(ids, default=0) < len(self.tokens)
        if fits and b"".join(self.tokens[token_id] for token_id in ids) == text.encode():
            return ids
        assert self.encode_greedily is not None, "llguidance encodes nothing while it is built"
        return self.encode_greedily(text)
