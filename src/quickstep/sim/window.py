"""The requests of a simulation that count, and when enough of them are known to end it.

A load is there only after as many sessions have begun as end. So sessions begin for a multiple of
their mean duration and some seconds more (`requests_for_load`), and the requests of the last part
are counted (`window_of_load`). Nothing that happens after they have ended has an effect on them,
and once too many are late, no others can make up for them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from quickstep.sim.summary import Targets, in_time

if TYPE_CHECKING:
    from quickstep.sim.outcome import Ending

_WARMUP_SESSIONS = 2.0  # mean durations of a session that are not counted
_WARMUP = 0.2  # part of the time that is not counted in any case
_LEAST_COUNTED_S = 10.0


def requests_for_load(rate: float, mean_turns: float, session_s: float) -> int:
    """How many requests it takes until the load of `rate` sessions per second is there and has been
    counted for a while. A session has `mean_turns` requests and thinks for `session_s` in between.
    """
    counted_s = max(_LEAST_COUNTED_S, 0.5 * session_s)
    duration_s = (_WARMUP_SESSIONS * session_s + counted_s) / (1.0 - _WARMUP)
    return math.ceil(rate * mean_turns * duration_s)


def window_of_load(
    rate: float, num_requests: int, mean_turns: float, session_s: float
) -> tuple[float, float]:
    """From when to when the requests of a simulation count that arrive meanwhile."""
    end_s = num_requests / mean_turns / rate
    return max(_WARMUP * end_s, _WARMUP_SESSIONS * session_s), end_s


class CountedWindow(msgspec.Struct):
    """Requests that arrive from `start_s` to `end_s`, of which the part `attainment` has to meet
    the targets. Owned by a simulation, which reports what happens to sequences.

    Attributes:
        max_sequences: At most so many are sent in the simulation.
        gives_up: Whether the simulation ends as soon as the part is too small.
        is_missed: Whether so many are late that the part is too small, whatever the others do.
    """

    start_s: float
    end_s: float
    targets: Targets
    attainment: float
    max_sequences: int
    gives_up: bool = True
    is_missed: bool = False
    _num_open: int = 0  # that arrived up to `end_s` and have not ended
    _num_before: int = 0  # that arrived before `start_s`
    _num_refused: int = 0
    _num_late: int = 0

    def arrived(self, at_s: float, num_sequences: int) -> None:
        """A request has arrived."""
        if at_s <= self.end_s:
            self._num_open += num_sequences
        if at_s < self.start_s:
            self._num_before += num_sequences

    def refused(self, at_s: float, num_sequences: int) -> None:
        """A request that has arrived is refused; it counts, whenever that was."""
        if at_s <= self.end_s:
            self._num_open -= num_sequences
        self._num_refused += num_sequences

    def ended(self, ending: Ending) -> None:
        """A sequence has ended."""
        arrival_s = ending.timings.arrival_s
        if arrival_s > self.end_s:
            return
        self._num_open -= 1
        if arrival_s >= self.start_s and in_time(ending, self.targets) is False:
            self._num_late += 1
            # all others may count, and be in time, but those that came before the window
            most = self.max_sequences - self._num_before + self._num_refused
            self.is_missed = (most - self._num_late) / most < self.attainment

    def is_over(self, now: float) -> bool:
        """Whether the rest of the simulation changes nothing."""
        if self.is_missed and self.gives_up:
            return True
        return now > self.end_s and not self._num_open
