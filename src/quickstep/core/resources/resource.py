"""`Resource`: what a sequence has to hold to run, as the scheduler sees it; and the simplest one.

    a request arrives     check_request, then requested
    a sequence waits      key, is_ready: one that is not ready waits apart and is not the head
    a step is planned     prepare; fits decides admissions, fits_without whom to preempt for them
    it enters, leaves     admit, release; ended once
    it cannot have it     lost

The scheduler asks all resources in one order, so a new one takes part in admission, preemption,
priorities, deadlines and refusals without a line in `scheduler.py`. A resource never ends or
preempts a sequence by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.sequence import Residency, Sequence
from quickstep.types import Activity, Request

# Takes a sequence out of the batch, at a time in seconds; it goes back to the queue.
Preempt = Callable[[Sequence, float], None]


class Resource:
    """A resource of which there is always enough; each kind overrides what differs.

    One object belongs to one scheduler.
    """

    activity = Activity.RESTORE  # what a sequence does that waits until `key` is ready

    def check_request(self, request: Request) -> None:
        """Raise RequestError for a request that could never have it. `SequenceLimits` has checked
        what is known without a scheduler.
        """

    def requested(self, request: Request, now: float) -> None:
        """A request was accepted."""

    def key(self, request: Request) -> str:
        """What of the resource a request needs that may not be there yet; "" for nothing. The keys
        of two resources differ.
        """
        return ""

    def is_ready(self, key: str) -> bool:
        """Whether sequences that need `key` may be admitted."""
        return True

    def prepare(
        self, waiting: WaitingQueue, batch: RunningBatch, now: float, preempt: Preempt
    ) -> None:
        """A step is about to be planned, and sequences wait: begin to get what is not ready. No
        sequence has a row in the step yet, so any may be preempted.
        """

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is enough to admit a sequence now."""
        return True

    def fits_without(self, sequence: Sequence, leaving: SequenceOf[Sequence]) -> bool:
        """Whether there would be enough if `leaving`, which run, were preempted."""
        return True

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        """Give a sequence its part; what the executor has to know is set in `residency`."""

    def release(self, sequence: Sequence) -> None:
        """Take back what a running sequence holds."""

    def ended(self, sequence: Sequence, now: float) -> None:
        """A sequence of an accepted request has ended, in the batch or in the queue."""

    def lost(self, waiting: WaitingQueue) -> list[tuple[Sequence, str]]:
        """The sequences that wait for what they can never get any more, and why. Called while at
        least one is parked.
        """
        return []

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the state agrees with what the running sequences hold."""


class Slots(Resource):
    """The slots of the executor: the number of sequences that run at once.

    Attributes:
        released: Those that were freed since the last plan; read only.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = deque(range(num_slots))
        self.released: list[int] = []

    @property
    def num_free(self) -> int:
        """How many more sequences may run."""
        return len(self._free)

    def fits(self, sequence: Sequence) -> bool:
        """Whether one is free."""
        return bool(self._free)

    def fits_without(self, sequence: Sequence, leaving: SequenceOf[Sequence]) -> bool:
        """Whether one is or becomes free."""
        return bool(self._free or leaving)

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        """Take the one that has been free for longest."""
        residency.slot = self._free.popleft()

    def release(self, sequence: Sequence) -> None:
        """Free it; the executor learns of it with the next step."""
        slot = sequence.residency.slot
        self.released.append(slot)
        self._free.append(slot)

    def take_released(self) -> tuple[int, ...]:
        """The slots that were freed since the last call."""
        released = tuple(self.released)
        self.released.clear()
        return released

    def check(self, running: Iterable[Sequence]) -> None:
        """Every slot is free or held once."""
        held = [sequence.residency.slot for sequence in running]
        assert sorted([*held, *self._free]) == list(range(self._num_slots)), (
            f"slots {held} in use and {list(self._free)} free do not add up"
        )
