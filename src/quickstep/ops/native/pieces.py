"""Lists of texts in GGUF files, and texts as the ids of SentencePiece's: `csrc/pieces.cpp`.

Used by `text.sentence_pieces`, which says what the ids are, and by `model.checkpoint.gguf_file`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from array import array
from collections.abc import Sequence

from quickstep.ops.native.library import (
    UNSUPPORTED_PIECES,
    PiecesCall,
    library_path,
    open_library,
    raise_for_status,
)

MAX_TEXT_BYTES = 1 << 28
_PART_BYTES = 1 << 20


class NativePieces:
    """A vocabulary in native memory. Any thread may read it."""

    def __init__(self, library: ctypes.CDLL, handle: int, num_tokens: int) -> None:
        self._library = library
        self._handle = handle
        finalizer = weakref.finalize(self, library.qs_pieces_destroy, handle)
        finalizer.atexit = False
        starts = ctypes.c_void_p()
        texts = library.qs_pieces_texts(handle, ctypes.byref(starts))
        self._starts = (ctypes.c_int64 * (num_tokens + 1)).from_address(starts.value or 0)
        self._texts = memoryview((ctypes.c_ubyte * self._starts[num_tokens]).from_address(texts))
        self._num_tokens = num_tokens

    @classmethod
    def open(
        cls, texts: bytes, scores: Sequence[float], kinds: Sequence[int], adds_space: bool
    ) -> NativePieces | None:
        """`texts` as a GGUF file stores them. None without the native library, or for a vocabulary
        that it does not read (`qs_pieces_create`).
        """
        try:
            library = open_library(library_path())
            score_array, kind_array = array("f", scores), array("i", kinds)
        except (OSError, TypeError, OverflowError):
            return None
        if math.isnan(sum(score_array)):
            return None
        is_single = isinstance(scores, array) and scores.typecode == score_array.typecode
        if not is_single and tuple(score_array) != tuple(scores):
            return None
        call = PiecesCall(
            texts=texts,
            num_bytes=len(texts),
            num_tokens=len(score_array),
            scores=score_array.buffer_info()[0],
            kinds=kind_array.buffer_info()[0],
            adds_space=adds_space,
        )
        handle = ctypes.c_void_p()
        status = library.qs_pieces_create(ctypes.byref(call), ctypes.byref(handle))
        if status == UNSUPPORTED_PIECES:
            return None
        raise_for_status(status, "reading a vocabulary")
        assert handle.value is not None
        return cls(library, handle.value, len(score_array))

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, token_id: int) -> str:
        """The text of a token from 0 to `len(self) - 1`."""
        return str(self._texts[self._starts[token_id] : self._starts[token_id + 1]], "utf-8")

    def find(self, text: str) -> int | None:
        """The id of the token that is exactly `text`."""
        content = text.encode("utf-8", "surrogatepass")
        found: int = self._library.qs_pieces_find(self._handle, content, len(content))
        return None if found < 0 else found

    def encode(self, content: bytes) -> list[int]:
        """The ids of a text in UTF-8, of at most `MAX_TEXT_BYTES`. Raises MemoryError."""
        capacity, num_ids = len(content) + 1, ctypes.c_int64()
        while True:
            ids = array("i", bytes(4 * capacity))
            address, _ = ids.buffer_info()
            status = self._library.qs_pieces_encode(
                self._handle, content, len(content), address, capacity, ctypes.byref(num_ids)
            )
            raise_for_status(status, "tokenizing")
            if num_ids.value <= capacity:
                return ids[: num_ids.value].tolist()
            capacity = num_ids.value


def skip_texts(content: mmap.mmap, start: int, count: int) -> tuple[int, int]:
    """How many of the `count` texts that begin at `start` are left, and where these begin: all are
    left without the native library, and some if one is very long or the file ends.
    """
    try:
        library = open_library(library_path())
    except OSError:
        return count, start
    end = ctypes.c_int64()
    while count > 0:
        part = content[start : start + _PART_BYTES]
        num_passed = library.qs_skip_texts(part, len(part), count, ctypes.byref(end))
        if num_passed == 0:
            break
        count -= num_passed
        start += end.value
    return count, start


def read_texts(content: bytes, count: int) -> tuple[str, ...] | None:
    """`count` texts as a GGUF file lists them, with replacements of what is no UTF-8; None without
    the native library, where one contains a zero, or where the content ends before.
    """
    try:
        library = open_library(library_path())
    except OSError:
        return None
    joined = ctypes.create_string_buffer(max(1, len(content)))
    size = library.qs_join_texts(content, len(content), count, joined)
    if size < 1:
        return None
    return tuple(joined.raw[: size - 1].decode("utf-8", "replace").split("\0"))
