"""Stop strings over streamed text: found across deltas, never shown in part.

A text is cut at the first stop that completes in it; of several completing at the same character
the one that began earliest counts, of equal ones the first listed. The result does not depend on
how the text was split into deltas. Text that may be the beginning of a stop is held back until
it is known. One per sequence, owned by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["StopMatch", "StopStrings"]


class StopMatch(msgspec.Struct, frozen=True):
    """What `feed` found: the text that may be shown now, and the stop that ended it, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Watches one text for `stops`."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> StopMatch:
        """Add `text`; with `may_stop` False a stop that completes in it is plain text.

        After a match the text is over: everything behind the stop is dropped.
        """
        num_seen = len(self._held)
        pending = self._held + text
        if may_stop and text:
            found = self._first_match(pending, num_seen)
            if found is not None:
                start, stop = found
                self._held = ""
                end = start + len(stop) if self._include_in_output else start
                return StopMatch(pending[:end], stop)
        keep = self._num_undecided(pending)
        self._held = pending[len(pending) - keep :]
        return StopMatch(pending[: len(pending) - keep])

    def finish(self) -> str:
        """The text held back, now that none follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str, num_seen: int) -> tuple[int, str] | None:
        """Start and stop of the match ending first after `num_seen` characters."""
        best: tuple[int, int, int] | None = None
        for order, stop in enumerate(self._stops):
            start = pending.find(stop, max(0, num_seen - len(stop) + 1))
            if start >= 0:
                match = (start + len(stop), start, order)
                best = match if best is None else min(best, match)
        return None if best is None else (best[1], self._stops[best[2]])

    def _num_undecided(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest
