"""Whether a request may queue, and how long it would wait: predicted from the state of the queue.

`AdmissionState` is a frozen copy of what decides. The scheduler makes one for each request with a
deadline; the engine publishes it with its stats, so that a server refuses what cannot be served in
time before it tokenises the prompt. Only the scheduler decides to accept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec

from quickstep.core.service_order import level_of
from quickstep.errors import FirstTokenTooLate, QueueFull
from quickstep.types import Request, RequestClass

__all__ = ["AdmissionState", "LevelCounts", "WaitEstimate"]

LevelCounts = tuple[tuple[int, int], ...]  # a level of priority, and how many sequences have it

_MIN_ADMISSIONS = 8  # before a rate is known
_WAIT_MARGIN = 1.5  # waits vary about their mean
_GAIN = 0.1  # of running means
_DELAY_HALVES_S = 2.0


class AdmissionState(msgspec.Struct, frozen=True):
    """What decides whether a request may queue, at one time.

    Attributes:
        num_waiting: Queued sequences.
        num_interactive: Those of them whose class is not BATCH.
        max_waiting: Queued sequences beyond which requests are refused; None for no limit.
        num_free_slots: How many more sequences may run.
        waiting: How many wait of each level of priority (`service_order.level_of`); None if the
            policy does not serve by level, so that a place in the queue is not known beforehand.
        running: How many run of each level; None likewise.
        prompt_s: Mean predicted time of a prompt.
        slot_s: Predicted time between two ends of sequences in a full batch.
        interval_s: Measured time between two admissions while others waited; None if not known.
        delay_s: How much later a first token comes after the admission than its prompt takes.
    """

    num_waiting: int = 0
    num_interactive: int = 0
    max_waiting: int | None = None
    num_free_slots: int = 1
    waiting: LevelCounts | None = None
    running: LevelCounts | None = None
    prompt_s: float = 0.0
    slot_s: float = 0.0
    interval_s: float | None = None
    delay_s: float = 0.0

    def wait_s(self, num_before: int, num_preemptible: int = 0) -> float:
        """How long a sequence waits after `num_before` others, if it may take the slots of
        `num_preemptible` running ones.

        Before the rate of admissions is known, those that get a free slot wait for the prompts
        before them; after that a sequence is admitted when one ends.
        """
        num_after = num_before + 1 - self.num_free_slots - num_preemptible
        if num_after <= 0 and not num_before:
            return 0.0
        if self.interval_s is not None:
            return _WAIT_MARGIN * (num_before + 1) * self.interval_s
        return num_before * self.prompt_s + max(0, num_after) * self.slot_s

    def check(
        self, request: Request, num_sequences: int, undecided: Mapping[int, int], waited_s: float
    ) -> None:
        """Raise QueueFull or FirstTokenTooLate for a request of so many sequences, which is not
        tokenised yet and came `waited_s` ago. `undecided` are sequences of each level that the
        scheduler has not counted.
        """
        self.check_queue(request, num_sequences)
        level = level_of(request)
        num_undecided = sum(count for one, count in undecided.items() if one <= level)
        self.check_first_token(request, num_undecided, waited_s)

    def check_queue(self, request: Request, num_sequences: int) -> None:
        """Raise QueueFull unless so many sequences of a request may wait.

        Sequences of the class BATCH do not count for an interactive request. An empty queue accepts
        any request, otherwise one with many sequences would never run.
        """
        if self.max_waiting is None:
            return
        is_batch = request.request_class is RequestClass.BATCH
        num_waiting = self.num_waiting if is_batch else self.num_interactive
        if num_waiting and num_waiting + num_sequences > self.max_waiting:
            raise QueueFull(num_waiting, num_sequences, self.max_waiting, self.wait_s(num_waiting))

    def check_first_token(self, request: Request, num_undecided: int, waited_s: float) -> None:
        """Raise FirstTokenTooLate for a request that is not tokenised yet and would miss its
        deadline, `waited_s` after it came and with `num_undecided` other sequences before it that
        the scheduler has not counted.
        """
        deadline_s = request.ttft_deadline_s
        if deadline_s is None or self.waiting is None or self.running is None:
            return
        level = level_of(request)
        num_before = sum(count for one, count in self.waiting if one <= level)
        num_preemptible = sum(count for one, count in self.running if one > level)
        wait_s = self.wait_s(num_before + num_undecided, num_preemptible)
        if waited_s + wait_s + self.delay_s > deadline_s:
            raise FirstTokenTooLate(deadline_s, wait_s, self.delay_s, waited_s)


class WaitEstimate:
    """Measures how sequences are admitted and how long their first tokens take from then on, so
    that predictions are rarely exceeded. One object belongs to one scheduler.

    The rate of the last admissions while others waited has everything in it that limits them:
    computation, slots, blocks. The time after the admission is longer than that of the prompt by
    itself: steps in flight end before, and other rows are in its step.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)
        self._prompt_s = 0.0
        self._delay_s = 0.0
        self._deviation_s = 0.0
        self._measured_s = 0.0  # when the last first token came

    def count_admission(self, now: float, any_left: bool) -> None:
        """A sequence was admitted; without others that wait, there is no queue to measure."""
        if any_left:
            self._times.append(now)
        else:
            self._times.clear()

    def count_prompt(self, prompt_s: float) -> None:
        """A prompt arrived that is predicted to take so long."""
        self._prompt_s += (_GAIN if self._prompt_s else 1.0) * (prompt_s - self._prompt_s)

    def count_first_token(self, delay_s: float, now: float) -> None:
        """A first token came `delay_s` later after the admission than its prompt takes alone."""
        error_s = delay_s - self._delay_s
        self._delay_s += _GAIN * error_s
        self._deviation_s += _GAIN * (abs(error_s) - self._deviation_s)
        self._measured_s = now

    @property
    def prompt_s(self) -> float:
        """The mean predicted time of a prompt."""
        return self._prompt_s

    def interval_s(self, now: float) -> float | None:
        """The mean time between two admissions; None until enough are known."""
        if len(self._times) < _MIN_ADMISSIONS:
            return None
        return (now - self._times[0]) / len(self._times)

    def delay_s(self, now: float) -> float:
        """How much later the first token comes than its prompt takes alone.

        Halved for every two seconds without a first token: a long delay could otherwise have every
        request refused, and then nothing would measure a shorter one.
        """
        age = max(0.0, now - self._measured_s) / _DELAY_HALVES_S
        return max(0.0, self._delay_s + 2.0 * self._deviation_s) * math.exp2(-min(64.0, age))
