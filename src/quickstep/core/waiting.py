"""Sequences that wait for admission, and sequences that wait for their deadline.

Owned by `core.scheduler`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from quickstep.core.sequence import Sequence, SequenceState

__all__ = ["Deadlines", "WaitingQueue"]


class WaitingQueue:
    """A sorted list by rank, which is unique. Paused ones are last."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def num_active(self) -> int:
        """How many are not paused: those stand first."""
        return bisect_left(self._sequences, True, key=_is_paused)

    @property
    def head(self) -> Sequence | None:
        """Who is admitted next; None if there is nobody, or only paused ones."""
        first = self._sequences[0] if self._sequences else None
        return None if first is None or first.is_paused else first

    def push(self, sequence: Sequence) -> None:
        """Insert by rank, which stays as it is while the sequence waits."""
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be queued."""
        index = bisect_left(self._sequences, sequence.rank, key=_rank)
        assert self._sequences[index] is sequence, f"{sequence.sequence_id} is not queued"
        del self._sequences[index]

    def set_paused(self, sequence: Sequence, is_paused: bool, now: float) -> None:
        """Pause a queued sequence or let it continue."""
        self.remove(sequence)
        sequence.set_paused(is_paused, now)
        self.push(sequence)

    def check(self) -> None:
        """Raise AssertionError unless all wait, in order."""
        for sequence in self._sequences:
            assert sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
        ranks = [sequence.rank for sequence in self._sequences]
        assert ranks == sorted(set(ranks)), "the queue is out of order"


class Deadlines:
    """A heap of live sequences by deadline; what finished before is dropped now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._prune_at = 64

    def push(self, sequence: Sequence) -> None:
        """Watch a sequence, if it has a deadline."""
        deadline_s = sequence.deadline_s
        if deadline_s is None:
            return
        heapq.heappush(self._heap, (deadline_s, sequence.arrival, sequence))
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if _is_live(entry[2])]
            heapq.heapify(self._heap)
            self._prune_at = max(64, 2 * len(self._heap))

    def next_s(self) -> float | None:
        """The earliest deadline that is watched."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Sequence]:
        """Live sequences whose deadline has come, earliest first."""
        due: list[Sequence] = []
        while self._heap and (self._heap[0][0] <= now or not _is_live(self._heap[0][2])):
            sequence = heapq.heappop(self._heap)[2]
            if _is_live(sequence):
                due.append(sequence)
        return due


def _rank(sequence: Sequence) -> tuple[bool, float, int]:
    return sequence.rank


def _is_live(sequence: Sequence) -> bool:
    return sequence.state is not SequenceState.FINISHED


def _is_paused(sequence: Sequence) -> bool:
    return sequence.is_paused
