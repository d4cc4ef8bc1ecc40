"""Where a sequence is with its reasoning: before it, inside it or behind it.

The reasoning is at the beginning of the output between two tags, opened there or by the prompt, as
the parser of `engine.tool_calls.formats` reads it out of the text. A function of the output tokens
alone. The tags are looked for in the tokens' bytes, since a tag shares tokens with its neighbours
in many ways. Owned by whatever follows the reasoning: a budget of tokens, a grammar behind it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quickstep.sampling_params import ReasoningTokens

__all__ = ["EMPTY_LINES", "Place", "ReasoningTracker", "ThinkingBudget"]

_SPACE = b" \t\n\r"
_NEW_LINES = (b"\n", b"\n\n")
EMPTY_LINES = 2  # ends of lines that may stand between the closing tag and the answer


class Place(enum.Enum):
    """Of the next token. GAP: nothing but ends of lines has followed the closing tag."""

    BEFORE = "before"
    INSIDE = "inside"
    GAP = "gap"
    BEHIND = "behind"


class ReasoningTracker:
    """Follows the output tokens of one sequence."""

    def __init__(self, tags: ReasoningTokens, outputs: Sequence[int] = ()) -> None:
        self._tags = tags
        self.place = Place.INSIDE if tags.starts_open else Place.BEFORE
        self.has_begun = tags.starts_open  # whether there is any reasoning
        self.num_inside = 0  # tokens since the opening tag
        self._num_matched = 0  # bytes of the tag that is looked for, at the end of the text
        self._num_lines = EMPTY_LINES
        self._overshooting: dict[int, npt.NDArray[np.int64]] = {}  # by the bytes matched
        self._last: list[int] = []  # the last tokens inside, as many as the closing tag has
        for token_id in outputs:
            self.record(token_id)

    @property
    def closing_token(self) -> int:
        """The next token of the closing tag, of which the output may have written some."""
        closing = self._tags.closing_ids
        written = max(
            n for n in range(len(closing)) if self._last[len(self._last) - n :] == [*closing[:n]]
        )
        return closing[written]

    @property
    def num_to_close(self) -> int:
        """Tokens that the closing tag takes, from its beginning."""
        return len(self._tags.closing_ids)

    def record(self, token_id: int) -> None:
        """Take an output token."""
        if self.place is Place.BEHIND:
            return
        text = self._tags.pieces.get(token_id)
        if self.place is Place.GAP:
            self._num_lines -= len(text) if text in _NEW_LINES else EMPTY_LINES
            if self._num_lines <= 0:
                self.place = Place.BEHIND
        elif self.place is Place.BEFORE:
            self._seek_opening(text)
        else:
            self.num_inside += 1
            self._last = [*self._last, token_id][-len(self._tags.closing_ids) :]
            self._seek_closing(text)

    def opening_ids(self) -> npt.NDArray[np.int64]:
        """Tokens that begin or continue the opening tag."""
        rest = self._tags.opening[self._num_matched :]
        pieces = self._tags.pieces.items()
        return _ids(token_id for token_id, text in pieces if rest.startswith(text))

    def overshooting_ids(self) -> npt.NDArray[np.int64]:
        """Tokens in which text follows the closing tag: that would belong to no grammar."""
        known = self._overshooting.get(self._num_matched)
        if known is None:
            closing = self._tags.closing
            begun = closing[: self._num_matched]
            known = _ids(
                token_id
                for token_id, text in self._tags.pieces.items()
                if (begun + text).partition(closing)[2].strip(_SPACE)
            )
            self._overshooting[self._num_matched] = known
        return known

    def empty_line_ids(self) -> npt.NDArray[np.int64]:
        """Tokens that may stand between the closing tag and the answer: layout, no content."""
        lines = _NEW_LINES[: self._num_lines]
        pieces = self._tags.pieces.items()
        return _ids(token_id for token_id, text in pieces if text in lines)

    def _seek_opening(self, text: bytes | None) -> None:
        opening = self._tags.opening
        if text is None:
            self.place = Place.BEHIND
            return
        seen = opening[: self._num_matched] + text
        if not self._num_matched:
            seen = seen.lstrip(_SPACE)
        if seen.startswith(opening):
            self.place = Place.INSIDE
            self.has_begun = True
            self._num_matched = 0
            self._seek_closing(seen[len(opening) :])
        elif opening.startswith(seen):
            self._num_matched = len(seen)
        else:
            self.place = Place.BEHIND

    def _seek_closing(self, text: bytes | None) -> None:
        if text is None:
            self._num_matched = 0
            return
        closing = self._tags.closing
        seen = closing[: self._num_matched] + text
        if closing in seen:
            is_at_end = seen.endswith(closing)
            self.place = Place.GAP if is_at_end else Place.BEHIND
            return
        longest = min(len(seen), len(closing) - 1)
        self._num_matched = next(n for n in range(longest, -1, -1) if seen.endswith(closing[:n]))


def _ids(token_ids: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(sorted(token_ids), dtype=np.int64)


class ThinkingBudget:
    """Ends the reasoning once it has had its tokens: the closing tag is written, token by token."""

    def __init__(self, budget: int, tags: ReasoningTokens, outputs: Sequence[int]) -> None:
        self._budget = budget
        self._reasoning = ReasoningTracker(tags, outputs)

    @property
    def forced_token(self) -> int | None:
        """The only token that may follow; None while there is budget, or nothing to close."""
        reasoning = self._reasoning
        if reasoning.place is not Place.INSIDE or reasoning.num_inside < self._budget:
            return None
        return reasoning.closing_token

    def record(self, token_id: int) -> None:
        """Take an output token."""
        self._reasoning.record(token_id)
