"""The engine's log: one record per step, one per finished sequence, totals, and observations.

Written by the engine's loop only; read by `/metrics`, `/debug/steps`, the cost accounts and the
command line. Ring buffers hold the newest records, totals count everything since the start. With a
path, every record is also appended there as a line of JSON.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

import msgspec

from quickstep.types import FinishReason, SequenceTimings, StepRecord

__all__ = [
    "Follower",
    "LiveSequence",
    "Observer",
    "Quantity",
    "SequenceRecord",
    "StepLog",
    "StepTotals",
]

_LOGGER = logging.getLogger(__name__)


class Quantity(enum.Enum):
    """Observed times in seconds: one value per sequence, for INTER_TOKEN one per gap."""

    QUEUE = "queue"
    TIME_TO_FIRST_TOKEN = "time_to_first_token"
    INTER_TOKEN = "inter_token"
    TIME_PER_OUTPUT_TOKEN = "time_per_output_token"
    END_TO_END = "end_to_end"


Observer = Callable[[Quantity, float], None]


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
        """From arrival to the first token; None if there was none."""
        first = self.timings.first_token_s
        return None if first is None else first - self.timings.arrival_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """(end - first token) / (output tokens - 1); None below two tokens."""
        first, num_tokens = self.timings.first_token_s, self.timings.num_output_tokens
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


class Follower(Protocol):
    """Receives every record that the log receives; a second `StepLog` is one."""

    def add_step(self, record: StepRecord) -> None:
        """A step was committed."""

    def add_gap(self, seconds: float) -> None:
        """A sequence's tokens came `seconds` after its previous ones."""

    def add_sequence(self, record: SequenceRecord) -> None:
        """A sequence ended."""


class StepLog:
    """Ring buffers of `capacity` records each. `open` and `close` only matter with a `path`."""

    def __init__(self, capacity: int = 4096, path: Path | None = None) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=capacity)
        self._sequences: deque[SequenceRecord] = deque(maxlen=capacity)
        self._counts: Counter[str] = Counter()
        self._num_finished: Counter[FinishReason] = Counter()
        self._busy_s = 0.0
        self._observers: list[Observer] = []
        self._followers: list[Follower] = []
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

    def subscribe(self, observer: Observer) -> None:
        """Call `observer` for every observation from now on, in the engine's loop."""
        self._observers.append(observer)

    def follow(self, follower: Follower) -> None:
        """Pass every record on to `follower` from now on, in the engine's loop."""
        self._followers.append(follower)

    def unfollow(self, follower: Follower) -> None:
        """End what `follow` began; nothing for one that failed and was dropped."""
        if follower in self._followers:
            self._followers.remove(follower)

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
        self._pass_on(lambda follower: follower.add_step(record))
        self._write(record)

    def add_gap(self, seconds: float) -> None:
        """A sequence's tokens came `seconds` after its previous ones."""
        self._pass_on(lambda follower: follower.add_gap(seconds))
        self._observe(Quantity.INTER_TOKEN, seconds)

    def add_sequence(self, record: SequenceRecord) -> None:
        """A sequence ended."""
        timings = record.timings
        self._sequences.append(record)
        self._num_finished[record.finish_reason] += 1
        self._counts["prompt_tokens"] += timings.num_prompt_tokens
        self._counts["cached_tokens"] += timings.num_cached_tokens
        self._counts["output_tokens"] += timings.num_output_tokens
        self._observe(Quantity.QUEUE, timings.queue_s)
        self._observe(Quantity.TIME_TO_FIRST_TOKEN, record.time_to_first_token_s)
        self._observe(Quantity.TIME_PER_OUTPUT_TOKEN, record.time_per_output_token_s)
        self._observe(Quantity.END_TO_END, record.end_to_end_s)
        self._pass_on(lambda follower: follower.add_sequence(record))
        self._write(record)

    def _observe(self, quantity: Quantity, value: float | None) -> None:
        if value is None:
            return
        for observer in tuple(self._observers):
            try:
                observer(quantity, value)
            except Exception:  # a hook must not end what it observes
                self._observers.remove(observer)
                _LOGGER.exception("%r failed and observes no more", observer)

    def _pass_on(self, pass_to: Callable[[Follower], None]) -> None:
        for follower in tuple(self._followers):
            try:
                pass_to(follower)
            except Exception:  # a hook must not end what it observes
                self.unfollow(follower)
                _LOGGER.exception("%r failed and follows the step log no more", follower)

    def _write(self, record: StepRecord | SequenceRecord) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(record).decode() + "\n")
        except OSError as error:
            _LOGGER.error("the step log %s ends here: %s", self._path, error)
            file, self._file = self._file, None
            with suppress(OSError):  # it writes what is left
                file.close()
