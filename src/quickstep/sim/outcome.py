"""What goes into a simulation and what comes out of it: arrivals, endings, the step log.

Made by `sim.simulate` and `sim.replicas`; summarized by `sim.summary`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from quickstep.types import FinishReason, Request, SequenceTimings, StepRecord


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A request and its arrival time. Its output length is `sampling.max_tokens`.

    `cancel_after_s`: The client cancels it so many seconds after its arrival; None never.
    """

    at_s: float
    request: Request
    cancel_after_s: float | None = None


class Ending(msgspec.Struct, frozen=True, gc=False):
    """How one simulated sequence ended."""

    request_id: str
    index: int
    reason: FinishReason
    timings: SequenceTimings
    tenant: str = ""


# Called with the number of sequences that have ended.
Progress = Callable[[int], None]

# What a client does after one of its sequences has ended: its next requests.
Follow = Callable[[Ending], Iterable[Arrival]]


class Handovers(msgspec.Struct, frozen=True):
    """Between engines of different phases (`sim.replicas.handovers`).

    Attributes:
        count: Requests that continued at another engine.
        num_refused: Transfers for which the decode engine had no room.
        num_bytes: Of all transfers, without what was cached there.
        mean_s: From the end of the prefill to the arrival of its last blocks.
        prefill_busy, decode_busy: The part of the time in which a step ran, as a mean over engines.
    """

    count: int
    num_refused: int
    num_bytes: int
    mean_s: float
    prefill_busy: float
    decode_busy: float


class Simulation(msgspec.Struct):
    """The result: endings in their order, the step log, and refused requests with the reason.

    Of several replicas also `num_resent`, how often a request was sent to another replica because
    its own had crashed, and `lost_s`, the device seconds that those requests had received. Of
    disaggregated phases, `handovers`. Of a fallback chain (`sim.fallback`), `fallbacks`: how often
    each step was entered, by its name and the cause.
    """

    endings: list[Ending] = msgspec.field(default_factory=list)
    records: list[StepRecord] = msgspec.field(default_factory=list)
    refused: list[tuple[str, str]] = msgspec.field(default_factory=list)
    finished_s: float = 0.0
    num_replicas: int = 1
    num_resent: int = 0
    lost_s: float = 0.0
    handovers: Handovers | None = None
    fallbacks: dict[tuple[str, str], int] | None = None
