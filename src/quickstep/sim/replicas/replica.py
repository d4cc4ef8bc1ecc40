"""One replica of a simulation: an engine with a clock of its own, and its links to the router.

Owned by `sim.replicas.run`, which calls it in the order of events.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.replicas.faults import LinkFault
from quickstep.types import StepRecord

if TYPE_CHECKING:
    from random import Random

# A new engine of a replica, on its clock.
NewEngine = Callable[[VirtualClock], SimulatedEngine]


class Role(enum.Enum):
    """Which phases of a request a replica computes."""

    BOTH = "both"
    PREFILL = "prefill"  # to the first token; one that decodes gets the KV cache
    DECODE = "decode"  # the other tokens, and complete requests


class ReplicaSpec(msgspec.Struct, frozen=True):
    """What a replica is made of, also after a crash."""

    make_engine: NewEngine
    role: Role = Role.BOTH


class ReplicaOptions(msgspec.Struct, frozen=True):
    """Times in seconds between router and replicas.

    Attributes:
        link_s: A message takes so long.
        resend_s: After so long a lost message is sent again.
        detect_s: So long after a crash the router knows.
        report_s: So often a replica reports its state to a router that predicts.
    """

    link_s: float = 0.0005
    resend_s: float = 0.2
    detect_s: float = 1.0
    report_s: float = 0.1


class MessageLink:
    """One direction between router and replica: in order, so nothing overtakes what is late."""

    def __init__(self, options: ReplicaOptions, rng: Random) -> None:
        self._options = options
        self._rng = rng
        self._last_s = 0.0
        self.faults: list[LinkFault] = []

    def arrival_s(self, now: float) -> float:
        """When a message that is sent now arrives."""
        at_s, sent_s = now + self._options.link_s, now
        active = [fault for fault in self.faults if fault.at_s <= now < fault.at_s + fault.for_s]
        at_s += sum(fault.delay_s for fault in active)
        while any(
            fault.at_s <= sent_s < fault.at_s + fault.for_s and self._rng.random() < fault.loss
            for fault in self.faults
        ):
            sent_s += self._options.resend_s
            at_s += self._options.resend_s
        self._last_s = max(self._last_s, at_s)
        return self._last_s


class SimulatedReplica:
    """An engine with its own clock, and what the driver knows about it."""

    def __init__(self, spec: ReplicaSpec, options: ReplicaOptions, rng: Random) -> None:
        self.role = spec.role
        self._make_engine = spec.make_engine
        self.down_link, self.up_link = MessageLink(options, rng), MessageLink(options, rng)
        self.clock = VirtualClock()
        self.offset_s = 0.0  # of its clock
        self.generation = 0
        self.is_up = True
        self.slow_downs: list[float] = []
        self.held: dict[str, int] = {}  # live sequences of each request here
        self.engine = self._make_engine(self.clock)
        self.past_records: list[StepRecord] = []  # of engines that have crashed
        # Its steps until then were put off: its clock is at the end of the last step before them.
        self.quiet_until_s: float | None = None

    @property
    def records(self) -> list[StepRecord]:
        """Its steps so far."""
        return [*self.past_records, *self.engine.records]

    def ended(self, request_id: str) -> None:
        """One of the sequences of a request here has ended."""
        self.held[request_id] -= 1
        if not self.held[request_id]:
            del self.held[request_id]

    def crash(self) -> float:
        """Lose everything; returns the device seconds of the requests that it held."""
        scheduler = self.engine.scheduler
        lost_s = sum(
            output.timings.device_s
            for name in self.held
            for output in scheduler.abort(name, self.clock.now)
            if output.timings is not None
        )
        self.past_records += self.engine.records
        self.is_up = False
        self.generation += 1
        self.held.clear()
        self.engine = self._make_engine(self.clock)
        self._set_pace()
        return lost_s

    def begin_slow_down(self, factor: float) -> None:
        """Slow its steps down; several slow-downs at the same time multiply."""
        self.slow_downs.append(factor)
        self._set_pace()

    def end_slow_down(self, factor: float) -> None:
        """End one that has begun."""
        self.slow_downs.remove(factor)
        self._set_pace()

    def _set_pace(self) -> None:
        self.engine.executor.slowdown = math.prod(self.slow_downs)

    def start_steps(self) -> None:
        """Start the next step, or put it off, with those after it that nothing outside depends on:
        `catch_up` computes them in one go. With its clock off, their times would be rounded twice.
        """
        self.quiet_until_s = None if self.offset_s else self.engine.quiet_until_s()
        if self.quiet_until_s is None:
            self.engine.start_steps()

    def catch_up(self, now: float) -> None:
        """Compute the steps that were put off, and start the one that runs at `now`."""
        if self.quiet_until_s is not None:
            self.quiet_until_s = None
            outputs = self.engine.skip_decodes(now)
            assert not outputs, "a sequence ended in a step that was put off"
            self.engine.start_steps()

    def set_clock(self, now: float) -> float:
        """Set and return its time, at the time `now` of the run."""
        self.catch_up(now)
        due_s = self.engine.next_s()
        times = [self.clock.now, now + self.offset_s]
        if due_s is not None and due_s - self.offset_s <= now:
            times.append(due_s)  # which the sum above may miss by a rounding
        self.clock.now = max(times)
        return self.clock.now

    def next_s(self) -> float | None:
        """When it acts by itself, on the clock of the run."""
        if self.quiet_until_s is not None:
            return self.quiet_until_s
        next_s = self.engine.next_s()
        return None if next_s is None or not self.is_up else next_s - self.offset_s
