"""The texts of all tokens in one string, so that a search is one native pass over it.

A Python loop over a large vocabulary takes a tenth of a second and more, which is too long for an
event loop, and for a thread that holds the interpreter's lock. Used by `token_forms` only, and a
module of its own because it imports NumPy, which is imported by the first request that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]

_BETWEEN = b"\xff"  # around every token; no text that is searched has it, as UTF-8 does not
_SPACE = b" \t\n\r"


class TokenTexts:
    """A vocabulary's texts by token id."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._joined = _BETWEEN + _BETWEEN.join(tokens) + _BETWEEN
        self._bytes = np.frombuffer(self._joined, dtype=np.uint8)
        self._lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        self._starts = 1 + np.concatenate(([0], np.cumsum(self._lengths + 1)[:-1]))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def containing(self, text: bytes) -> Ids:
        """The tokens that contain `text`, in order."""
        places = np.flatnonzero(self._bytes == text[0])
        for offset, byte in enumerate(text[1:], 1):
            # a match never ends after the last separator
            places = places[self._bytes[np.minimum(places + offset, self._bytes.size - 1)] == byte]
        return self._ids_at(places)

    def flags(self, found: Iterable[Ids]) -> bytes:
        """A byte for each token, 1 if it is among the found ones."""
        flags = np.zeros(len(self), dtype=np.bool_)
        for token_ids in found:
            flags[token_ids] = True
        return flags.tobytes()

    def within(self, *tags: bytes) -> Ids:
        """The tokens that may contain a part of a tag, with or without neighbours, or are blank.

        A token contains the tag, ends in its beginning, begins with its end, or is inside it. A raw
        byte of a token may equal the separator: then an extra token is found, which does no harm.
        """
        texts: set[bytes] = set()
        for tag in tags:
            size = len(tag)
            texts.add(tag)
            texts |= {tag[:end] + _BETWEEN for end in range(1, size)}
            texts |= {_BETWEEN + tag[start:] for start in range(1, size)}
            spans = ((start, end) for start in range(1, size) for end in range(start + 1, size))
            texts |= {_BETWEEN + tag[start:end] + _BETWEEN for start, end in spans}
        found = [self._ids_at(np.array(self._places(text), dtype=np.int64)) for text in texts]
        return np.unique(np.concatenate([self._blank(), *found]))

    def _blank(self) -> Ids:
        """The tokens of white space only."""
        is_space = np.isin(self._bytes, np.frombuffer(_SPACE, dtype=np.uint8))
        num_before = np.concatenate(([0], np.cumsum(is_space)))
        num_spaces = num_before[self._starts + self._lengths] - num_before[self._starts]
        return np.flatnonzero((num_spaces == self._lengths) & (self._lengths > 0))

    def _places(self, text: bytes) -> list[int]:
        """Where a rare text is, as places inside its token."""
        found: list[int] = []
        place = self._joined.find(text)
        while place >= 0:
            # a separator at the beginning is the one before the token
            found.append(place + text.startswith(_BETWEEN))
            place = self._joined.find(text, place + 1)
        return found

    def _ids_at(self, places: Ids) -> Ids:
        """The tokens at ascending places, each once."""
        token_ids: Ids = np.searchsorted(self._starts, places, side="right") - 1
        found: Ids = token_ids[np.diff(token_ids, prepend=-1) != 0]
        return found
