"""The engine's log: one record per step, one per finished sequence, and totals.

Written by the engine's loop only; read by `/metrics`, `/debug/steps`, the cost accounts and the
command line. Ring buffers hold the newest records, totals count everything since the start. With a
path, every record is also appended there as a line of JSON.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

import msgspec

from quickstep.json_line import json_line
from quickstep.types import FinishReason, SequenceTimings, StepRecord

_LOGGER = logging.getLogger(__name__)


class SequenceRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="sequence"):
    """A finished sequence: its request, how it ended, and its timings."""

    request_id: str
    index: int
    tenant: str
    priority: int
    seed: int
    finish_reason: FinishReason
    timings: SequenceTimings
    adapter: str = ""
    endpoint: str = ""
    is_continuation: bool = False

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival to the first token; None if there was none, or another engine had it."""
        first = self.timings.first_token_s
        if first is None or self.timings.num_resumed_tokens:
            return None
        return first - self.timings.arrival_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """(end - first token) / (new output tokens - 1); None below two tokens."""
        first, num_tokens = self.timings.first_token_s, self.timings.num_new_tokens
        if first is None or num_tokens < 2:
            return None
        return (self.timings.finished_s - first) / (num_tokens - 1)

    @property
    def end_to_end_s(self) -> float:
        """From arrival to the end."""
        return self.timings.finished_s - self.timings.arrival_s


class LiveSequence(msgspec.Struct, frozen=True, tag_field="kind", tag="live"):
    """A sequence that has not ended, with its timings so far. Not part of the log: the commands
    that read a log get them in addition.
    """

    request_id: str
    index: int
    timings: SequenceTimings


class StepTotals(msgspec.Struct, frozen=True):
    """Counts since the start. `busy_s` is the sum of the steps' seconds on the device."""

    num_steps: int
    busy_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_finished: Mapping[FinishReason, int]


class StepFollower(Protocol):
    """Receives the records of steps."""

    def add_step(self, record: StepRecord) -> None:
        """A step was committed."""


class SequenceFollower(Protocol):
    """Receives the records of sequences."""

    def add_sequence(self, record: SequenceRecord) -> None:
        """A sequence ended."""


class Follower(StepFollower, SequenceFollower, Protocol):
    """Receives every record that the log receives; a second `StepLog` is one."""


class StepLog:
    """Ring buffers of `capacity` records each. `open` and `close` only matter with a `path`."""

    def __init__(self, capacity: int = 4096, path: Path | None = None) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=capacity)
        self._sequences: deque[SequenceRecord] = deque(maxlen=capacity)
        self._counts: Counter[str] = Counter()
        self._num_finished: Counter[FinishReason] = Counter()
        self._busy_s = 0.0
        self._step_followers: list[StepFollower] = []
        self._sequence_followers: list[SequenceFollower] = []
        self._failed: set[int] = set()  # ids of readers whose first error was logged
        self._path = path
        self._file: IO[str] | None = None

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The newest steps, oldest first."""
        return tuple(self._steps)

    @property
    def sequences(self) -> tuple[SequenceRecord, ...]:
        """The newest finished sequences, oldest first."""
        return tuple(self._sequences)

    @property
    def totals(self) -> StepTotals:
        """Counts since the start."""
        counts = self._counts
        return StepTotals(
            num_steps=counts["steps"],
            busy_s=self._busy_s,
            num_prefill_tokens=counts["prefill_tokens"],
            num_decode_tokens=counts["decode_tokens"],
            num_prompt_tokens=counts["prompt_tokens"],
            num_cached_tokens=counts["cached_tokens"],
            num_output_tokens=counts["output_tokens"],
            num_preemptions=counts["preemptions"],
            num_finished=MappingProxyType(dict(self._num_finished)),
        )

    def follow(self, follower: Follower) -> None:
        """Pass every record on to `follower` from now on, in the engine's loop."""
        self.follow_steps(follower)
        self.follow_sequences(follower)

    def follow_steps(self, follower: StepFollower) -> None:
        """As `follow`, only the records of steps."""
        self._step_followers.append(follower)

    def follow_sequences(self, follower: SequenceFollower) -> None:
        """As `follow`, only the records of sequences."""
        self._sequence_followers.append(follower)

    def unfollow(self, follower: Follower) -> None:
        """End what `follow` began."""
        self._step_followers.remove(follower)
        self._sequence_followers.remove(follower)

    def open(self) -> None:
        """Open the file, if there is a path."""
        if self._path is not None and self._file is None:
            self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def add_step(self, record: StepRecord) -> None:
        """A step was committed."""
        self._steps.append(record)
        self._busy_s += record.seconds
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += record.num_prefill_tokens
        self._counts["decode_tokens"] += record.num_decode_tokens
        self._counts["preemptions"] += record.num_preemptions
        for follower in self._step_followers:
            try:
                follower.add_step(record)
            except Exception:  # what a reader follows never ends because of its errors
                self._log_once(follower)
        if self._file is not None:
            self._write(record)

    def add_sequence(self, record: SequenceRecord) -> None:
        """A sequence ended."""
        timings = record.timings
        self._sequences.append(record)
        self._num_finished[record.finish_reason] += 1
        self._counts["prompt_tokens"] += timings.num_prompt_tokens
        self._counts["cached_tokens"] += timings.num_cached_tokens
        self._counts["output_tokens"] += timings.num_new_tokens
        for follower in self._sequence_followers:
            try:
                follower.add_sequence(record)
            except Exception:
                self._log_once(follower)
        if self._file is not None:
            self._write(record)

    def _log_once(self, reader: object) -> None:
        if id(reader) not in self._failed:
            self._failed.add(id(reader))
            _LOGGER.exception("%r failed; its further errors are not logged", reader)

    def _write(self, record: StepRecord | SequenceRecord) -> None:
        assert self._file is not None
        try:
            self._file.write(json_line(record).decode() + "\n")
        except OSError as error:
            _LOGGER.error("the step log is not written any more: %s", error)
            file, self._file = self._file, None
            with suppress(OSError):  # what it holds cannot be written either
                file.close()
