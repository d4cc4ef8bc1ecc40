"""SentencePiece vocabularies of GGUF files, tokenized without the `tokenizers` library.

The library wants the merges of such a vocabulary, which files do not have: computing and storing
Gemma's half a million takes seconds at every start. `NativePieces` needs none. Its results are the
library's, which is built for what a start does not need.

    added tokens (control, user-defined), the longest at each place, first
    between them: a space in front if the file says so, spaces as U+2581, characters or their bytes
    neighbours are merged while their texts together are a piece: the one with the best score
        first, then the longest left half, the longest right half, the lowest id, the first place
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import AddedToken, models

from quickstep.ops.native.pieces import MAX_TEXT_BYTES, NativePieces

_ID_LIMIT = 1 << 32


class _Encoding(msgspec.Struct, frozen=True):
    """The field of the library's `Encoding` that `Tokenizer` reads."""

    ids: list[int]


class SentencePieces:
    """The methods of the library's `Tokenizer` that ours calls. Any thread may call them.

    Args:
        tokens: The vocabulary.
        special_ids: Control tokens.
        user_defined_ids: Other tokens that are found in texts before anything else.
        before: Token ids in front of a text.
        after: Those at its end.
        normalizer: The library's, for what asks for its properties.
        decoder: The library's.
        build: Makes the library's tokenizer of the same file.
    """

    pre_tokenizer = None

    def __init__(
        self,
        tokens: NativePieces,
        *,
        special_ids: Sequence[int],
        user_defined_ids: Sequence[int],
        before: list[int],
        after: list[int],
        normalizer: Any,
        decoder: Any,
        build: Callable[[], Any],
    ) -> None:
        self.normalizer = normalizer
        self.decoder = decoder
        self._tokens = tokens
        self._special_ids = frozenset(special_ids)
        self._user_defined_ids = user_defined_ids
        self._before, self._after = before, after
        self._build = build

    @cached_property
    def _library(self) -> Any:
        return self._build()

    @property
    def model(self) -> Any:
        """A model of the same kind, without its vocabulary."""
        return models.BPE({}, [], byte_fallback=True)

    def no_truncation(self) -> None:
        """Nothing is truncated."""

    def no_padding(self) -> None:
        """Nothing is padded."""

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """All added tokens are in the vocabulary."""
        return len(self._tokens)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Takes a tenth of a second for 262,144 tokens."""
        tokens = self._tokens
        return {tokens[token_id]: token_id for token_id in range(len(tokens))}

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        tokens, special = self._tokens, self._special_ids
        return {
            i: AddedToken(tokens[i], special=i in special, normalized=False)
            for i in sorted([*special, *self._user_defined_ids])
        }

    def token_to_id(self, text: str) -> int | None:
        """None for what is no token."""
        return self._tokens.find(text)

    def id_to_token(self, token_id: int) -> str | None:
        """None outside the vocabulary. Raises OverflowError if it has no 32 bits."""
        if not 0 <= token_id < _ID_LIMIT:
            raise OverflowError("token ids have 32 bits")
        return self._tokens[token_id] if token_id < len(self._tokens) else None

    def encode(self, text: str, pair: str | None = None, add_special_tokens: bool = True) -> Any:
        """The encoding of a text, or of a pair. Raises TypeError without Unicode."""
        given = text if pair is None else (text, pair)
        [encoding] = self.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        return encoding

    def encode_batch_fast(self, texts: Sequence[Any], add_special_tokens: bool = True) -> Any:
        """Encodings of texts; pairs are the library's. Raises TypeError without Unicode."""
        try:
            contents = [text.encode() for text in texts if isinstance(text, str)]
        except UnicodeEncodeError as error:
            raise TypeError(str(error)) from error
        if len(contents) < len(texts) or any(len(text) > MAX_TEXT_BYTES for text in contents):
            return self._library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        return [_Encoding([*before, *self._tokens.encode(text), *after]) for text in contents]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, of which those outside the vocabulary have none."""
        [text] = self.decode_batch([ids], skip_special_tokens)
        return text

    def decode_batch(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """The texts of token ids, as `decode`."""
        left_out = self._special_ids if skip_special_tokens else frozenset()
        found = []
        for ids in sequences:
            pieces = [self.id_to_token(token_id) for token_id in ids if token_id not in left_out]
            found.append(self.decoder.decode([piece for piece in pieces if piece is not None]))
        return found

    def to_str(self) -> str:
        """The library's tokenizer as JSON."""
        content: str = self._library.to_str()
        return content
