"""Token ids to text, one step at a time, exactly as decoding the whole sequence would.

The deltas of a sequence joined equal `Tokenizer.decode` of its tokens. No delta ends inside a
code point: an incomplete one is held until its last byte arrives, and becomes U+FFFD only where
the whole decode has it. Nothing of the prompt is looked at, so nothing of it can leak (the
library's `DecodeStream(ids=prompt)` can). One per sequence, owned by the engine; linear time.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from quickstep.engine.text.tokenizer import DecoderKind, Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """The text of one sequence, growing.

    `at_text_start` says that no text stands before the first token: some vocabularies
    (SentencePiece) drop the space of a text's first word, which a continuation must keep.
    `shown_special` are special tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        at_text_start: bool = False,
        shown_special: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown_special = frozenset(shown_special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_bytes = tokenizer.kind is DecoderKind.BYTES
        self._at_start = at_text_start
        self._byte_run: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; may be empty."""
        shown = token_ids
        if self._skip_special_tokens:
            is_special = self._tokenizer.is_special
            shown = [i for i in token_ids if not is_special(i) or i in self._shown_special]
        if self._in_bytes:
            added = b"".join(map(self._tokenizer.token_bytes, shown))
            # The library's incremental decoder is written in Python: most tokens can do without.
            is_whole = added.isascii() and not self._utf8.getstate()[0]
            return added.decode("ascii") if is_whole else self._utf8.decode(added)
        return "".join(map(self._feed_piece, shown))

    def finish(self) -> str:
        """The text that was held back, now that no token follows."""
        if self._in_bytes:
            return self._utf8.decode(b"", final=True)
        return self._end_byte_run()

    def _feed_piece(self, token_id: int) -> str:
        """A run of fallback bytes is decoded as a whole: one bad byte spoils all of it there."""
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return ""
        if self._tokenizer.is_byte_piece(piece):
            self._byte_run.append(piece)
            return ""
        before = self._end_byte_run()
        if not self._at_start:
            return before + self._tokenizer.token_bytes(token_id).decode()
        self._at_start = False
        return before + self._tokenizer.decode_pieces((piece,), at_start=True)

    def _end_byte_run(self) -> str:
        if not self._byte_run:
            return ""
        text = self._tokenizer.decode_pieces(self._byte_run, at_start=self._at_start)
        self._byte_run.clear()
        self._at_start = False
        return text
