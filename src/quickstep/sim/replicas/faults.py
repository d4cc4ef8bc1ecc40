"""What goes wrong in a simulation of several replicas, and when.

Faults are data, made before the run (`random_faults`): the same list replays exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from random import Random


class Crash(msgspec.Struct, frozen=True):
    """A replica loses everything that it holds, and serves again after `down_s`."""

    at_s: float
    replica: int
    down_s: float


class SlowDown(msgspec.Struct, frozen=True):
    """Steps of a replica that begin within `for_s` take `factor` times as long."""

    at_s: float
    replica: int
    for_s: float
    factor: float


class LinkFault(msgspec.Struct, frozen=True):
    """Messages to and from a replica that are sent within `for_s` are late or lost.

    Attributes:
        delay_s: What each takes longer.
        loss: The probability that one is lost; its sender sends it again, and those that follow
            wait.
    """

    at_s: float
    replica: int
    for_s: float
    delay_s: float = 0.0
    loss: float = 0.0


class ClockJump(msgspec.Struct, frozen=True):
    """The clock of a replica jumps forward, as after its machine was suspended. It is monotonic:
    it never jumps back.
    """

    at_s: float
    replica: int
    seconds: float


class CancelStorm(msgspec.Struct, frozen=True):
    """Clients cancel each live request with the probability `part`, all at once."""

    at_s: float
    part: float


Fault = Crash | SlowDown | LinkFault | ClockJump | CancelStorm


def random_faults(
    rng: Random, num_replicas: int, until_s: float, num_faults: int
) -> tuple[Fault, ...]:
    """Faults of all kinds at random times before `until_s`, in their order."""
    faults = [_random_fault(rng, num_replicas, until_s) for _ in range(num_faults)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _random_fault(rng: Random, num_replicas: int, until_s: float) -> Fault:
    at_s, replica = rng.uniform(0.0, until_s), rng.randrange(num_replicas)
    lasts_s = rng.uniform(0.0, until_s / 4)
    match rng.randrange(5):
        case 0:
            return Crash(at_s, replica, lasts_s)
        case 1:
            return SlowDown(at_s, replica, lasts_s, rng.uniform(1.5, 20.0))
        case 2:
            delay_s = rng.choice((0.0, rng.uniform(0.0, until_s / 10)))
            return LinkFault(at_s, replica, lasts_s, delay_s, rng.choice((0.0, 0.3, 0.9)))
        case 3:
            return ClockJump(at_s, replica, lasts_s)
        case _:
            return CancelStorm(at_s, rng.choice((0.1, 0.5, 1.0)))
