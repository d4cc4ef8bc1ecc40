"""Texts that know where their tokens repeat, and the drafts of suffix decoding from them.

Used by `runtime.speculation.suffix`, which says what a draft is; `csrc/suffix.cpp` computes it, for
all sequences of a step in one call.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from quickstep.errors import ConfigError
from quickstep.ops.native.backend import native_status
from quickstep.ops.native.library import (
    SuffixCall,
    library_path,
    open_library,
    raise_for_status,
)

_SEPARATOR = -1  # QS_TEXT_SEPARATOR


class SuffixTask(msgspec.Struct, frozen=True):
    """A sequence that wants up to `num_drafts`. `own` is its text, to which `new_token_ids` are
    appended first; `recent` are outputs of other sequences.
    """

    own: NativeText
    recent: NativeText | None
    new_token_ids: Sequence[int]
    num_drafts: int


class SuffixDrafts:
    """Computes drafts. The limits are the arguments of `SuffixProposer`.

    Raises ConfigError where the native library is missing.
    """

    def __init__(
        self, max_match: int, max_spec_factor: float, min_prob: float, max_indexed: int
    ) -> None:
        status = native_status()
        if not status.available:
            raise ConfigError(f"suffix decoding needs the native library: {status.reason}")
        self._library = open_library(library_path())
        self._call = SuffixCall(
            max_match=max_match,
            max_indexed=max_indexed,
            max_spec_factor=max_spec_factor,
            min_prob=min_prob,
        )

    def text(self) -> NativeText:
        """A text without tokens."""
        return NativeText(self._library)

    def propose(self, tasks: Sequence[SuffixTask]) -> list[tuple[int, ...]]:
        """A draft for each task, () where nothing repeats. Raises MemoryError."""
        fields: list[int] = []  # of each `qs_suffix_task`
        new_token_ids: list[int] = []
        num_drafts = 0
        for task in tasks:
            recent = 0 if task.recent is None else task.recent.handle
            fields += (task.own.handle, recent, len(task.new_token_ids), task.num_drafts)
            new_token_ids += task.new_token_ids
            num_drafts += task.num_drafts
        task_array, token_ids = array("q", fields), array("i", new_token_ids)
        num_found = array("q", bytes(8 * len(tasks)))
        draft_ids = array("i", bytes(4 * num_drafts))
        call = self._call
        call.num_tasks = len(tasks)
        call.tasks, _ = task_array.buffer_info()
        call.new_token_ids, _ = token_ids.buffer_info()
        call.num_found, _ = num_found.buffer_info()
        call.draft_ids, _ = draft_ids.buffer_info()
        raise_for_status(self._library.qs_suffix_propose(ctypes.byref(call)), "suffix decoding")
        ends = accumulate(num_found, initial=0)
        return [tuple(draft_ids[start:end]) for start, end in pairwise(ends)]


class NativeText:
    """Tokens, and where each pair of them occurs. Pairs are indexed by `SuffixDrafts.propose`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        handle = ctypes.c_void_p()
        raise_for_status(library.qs_text_create(ctypes.byref(handle)), "creating a text")
        assert handle.value is not None
        self.handle = handle.value
        finalizer = weakref.finalize(self, library.qs_text_destroy, handle.value)
        finalizer.atexit = False

    def __len__(self) -> int:
        size: int = self._library.qs_text_size(self.handle)
        return size

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Raises MemoryError."""
        data = array("i", token_ids)
        address, size = data.buffer_info()
        status = self._library.qs_text_append(self.handle, address, size)
        raise_for_status(status, "appending to a text")

    def append_separator(self) -> None:
        """Append the end of an output, beyond which no draft goes. Raises MemoryError."""
        self.append((_SEPARATOR,))

    def append_end(self, other: NativeText, first: int) -> None:
        """Append the tokens of another text from number `first` on. Raises MemoryError."""
        status = self._library.qs_text_append_end(self.handle, other.handle, first)
        raise_for_status(status, "appending to a text")
