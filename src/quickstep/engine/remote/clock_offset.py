"""The clock of an engine on another host, against ours: `ClockOffset`, and times converted by it.

Monotonic clocks of two hosts have nothing in common. The engine answers each `ReadClock` with its
clock; of several answers, that with the shortest round trip bounds the error best (half of it).
Times of messages are converted where they enter and leave this process (`host`), so everything else
here has one clock. A socket pair needs none of this: its two ends are on one machine.
"""

from __future__ import annotations

from msgspec.structs import replace

from quickstep.engine.remote.messages import FromEngine, Opened, StatsNote, StepNote, TimingsNote
from quickstep.engine.stats import EngineStats
from quickstep.types import SequenceTimings

# Answers between two estimates; the engine's clock is read once a second.
_WINDOW = 30


class ClockOffset:
    """How far the engine's clock is ahead of ours; 0 before the first observation.

    The estimate is that of the shortest round trip so far until `_WINDOW` answers came, and then
    changes with each complete window, since clocks drift.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.round_trip_s = float("inf")  # of the estimate
        self._best: tuple[float, float] | None = None  # round trip and offset of this window
        self._num_observed = 0
        self._is_first_window = True

    def observe(self, sent_s: float, engine_s: float, received_s: float) -> None:
        """The engine read `engine_s` between two times of our clock."""
        found = (received_s - sent_s, engine_s - (sent_s + received_s) / 2)
        self._best = found if self._best is None else min(self._best, found)
        self._num_observed += 1
        is_complete = self._num_observed == _WINDOW
        if self._is_first_window or is_complete:
            self.round_trip_s, self.offset_s = self._best
        if is_complete:
            self._best, self._num_observed, self._is_first_window = None, 0, False


def shifted(message: FromEngine, by_s: float) -> FromEngine:
    """A message with all its times of the engine's clock later by `by_s`."""
    match message:
        case StepNote(sequences=sequences, deltas=deltas, record=record):
            return StepNote(
                tuple(
                    replace(sequence, timings=_shifted_timings(sequence.timings, by_s))
                    for sequence in sequences
                ),
                tuple(
                    (request_id, delta)
                    if delta.timings is None
                    else (request_id, replace(delta, timings=_shifted_timings(delta.timings, by_s)))
                    for request_id, delta in deltas
                ),
                None
                if record is None
                else replace(
                    record,
                    planned_at_s=record.planned_at_s + by_s,
                    committed_at_s=record.committed_at_s + by_s,
                ),
            )
        case StatsNote(stats=stats):
            return replace(message, stats=_shifted_stats(stats, by_s))
        case Opened(stats=stats):
            return replace(message, stats=_shifted_stats(stats, by_s))
        case TimingsNote(timings=timings):
            return replace(
                message,
                timings={index: _shifted_timings(one, by_s) for index, one in timings.items()},
            )
        case _:
            return message


def _shifted_timings(timings: SequenceTimings, by_s: float) -> SequenceTimings:
    return replace(
        timings,
        arrival_s=timings.arrival_s + by_s,
        first_scheduled_s=_later(timings.first_scheduled_s, by_s),
        first_token_s=_later(timings.first_token_s, by_s),
        finished_s=timings.finished_s + by_s,
        activities=tuple((activity, since_s + by_s) for activity, since_s in timings.activities),
    )


def _shifted_stats(stats: EngineStats, by_s: float) -> EngineStats:
    return replace(
        stats,
        now_s=stats.now_s + by_s,
        last_step_s=_later(stats.last_step_s, by_s),
        busy_since_s=_later(stats.busy_since_s, by_s),
    )


def _later(time_s: float | None, by_s: float) -> float | None:
    return None if time_s is None else time_s + by_s
