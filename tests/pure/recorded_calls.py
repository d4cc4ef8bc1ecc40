"""Record the calls of a scheduler and replay them: the same calls give the same plans.

The entries that `RecordingScheduler` writes hold the inputs (requests, results, times) and the
resulting plans. A driver can use it instead of a `Scheduler` without another change. `replay` makes
the same calls on a new scheduler with the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from quickstep.config import SchedulerConfig
from quickstep.core.block_pool import KVBlockPool
from quickstep.core.cost_model import CostModel
from quickstep.core.policies import Policy
from quickstep.core.scheduler import Scheduler
from quickstep.errors import RequestError
from quickstep.types import (
    FinishReason,
    Request,
    SequenceOutput,
    StepOutcome,
    StepPlan,
    StepResult,
)

__all__ = [
    "Aborted",
    "Added",
    "Committed",
    "Entry",
    "Expired",
    "Failed",
    "Paused",
    "Planned",
    "RecordingScheduler",
    "Resumed",
    "replay",
]


class Added(msgspec.Struct, frozen=True):
    """A call of `add`, even if it was refused."""

    request: Request
    now: float


class Aborted(msgspec.Struct, frozen=True):
    """A call of `abort`."""

    request_id: str
    now: float
    reason: FinishReason
    index: int | None


class Expired(msgspec.Struct, frozen=True):
    """A call of `expire`."""

    now: float


class Paused(msgspec.Struct, frozen=True):
    """A call of `pause`."""

    request_id: str
    now: float


class Resumed(msgspec.Struct, frozen=True):
    """A call of `resume`."""

    request_id: str
    now: float


class Planned(msgspec.Struct, frozen=True):
    """A call of `plan` and its result."""

    now: float
    plan: StepPlan | None


class Committed(msgspec.Struct, frozen=True):
    """A call of `commit`."""

    plan: StepPlan
    result: StepResult
    now: float


class Failed(msgspec.Struct, frozen=True):
    """A call of `fail`."""

    plan: StepPlan
    reason: str
    now: float


Entry = Added | Aborted | Expired | Paused | Resumed | Planned | Committed | Failed


class RecordingScheduler(Scheduler):
    """A scheduler that passes each call to `write` first (`plan`: after it, with its result).

    A subclass, because drivers need a `Scheduler`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVBlockPool,
        policy: Policy,
        cost_model: CostModel,
        write: Callable[[Entry], None],
    ) -> None:
        super().__init__(config, pool, policy, cost_model)
        self._write = write

    def add(self, request: Request, now: float) -> None:
        """See `Scheduler.add`."""
        self._write(Added(request, now))
        super().add(request, now)

    def abort(
        self,
        request_id: str,
        now: float,
        reason: FinishReason = FinishReason.ABORTED,
        index: int | None = None,
    ) -> tuple[SequenceOutput, ...]:
        """See `Scheduler.abort`."""
        self._write(Aborted(request_id, now, reason, index))
        return super().abort(request_id, now, reason, index)

    def expire(self, now: float) -> tuple[SequenceOutput, ...]:
        """See `Scheduler.expire`."""
        self._write(Expired(now))
        return super().expire(now)

    def pause(self, request_id: str, now: float) -> None:
        """See `Scheduler.pause`."""
        self._write(Paused(request_id, now))
        super().pause(request_id, now)

    def resume(self, request_id: str, now: float) -> None:
        """See `Scheduler.resume`."""
        self._write(Resumed(request_id, now))
        super().resume(request_id, now)

    def plan(self, now: float) -> StepPlan | None:
        """See `Scheduler.plan`."""
        plan = super().plan(now)
        self._write(Planned(now, plan))
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepOutcome:
        """See `Scheduler.commit`."""
        self._write(Committed(plan, result, now))
        return super().commit(plan, result, now)

    def fail(self, plan: StepPlan, reason: str, now: float) -> tuple[SequenceOutput, ...]:
        """See `Scheduler.fail`."""
        self._write(Failed(plan, reason, now))
        return super().fail(plan, reason, now)


def replay(entries: Iterable[Entry], scheduler: Scheduler) -> list[StepPlan | None]:
    """Repeat recorded calls on a new scheduler; returns its plans, in order."""
    plans: list[StepPlan | None] = []
    for entry in entries:
        match entry:
            case Added(request, now):
                try:
                    scheduler.add(request, now)
                except RequestError:
                    continue  # refused in the recording as well
            case Aborted(request_id, now, reason, index):
                scheduler.abort(request_id, now, reason, index)
            case Expired(now):
                scheduler.expire(now)
            case Paused(request_id, now):
                scheduler.pause(request_id, now)
            case Resumed(request_id, now):
                scheduler.resume(request_id, now)
            case Planned(now, _):
                plans.append(scheduler.plan(now))
            case Committed(plan, result, now):
                scheduler.commit(plan, result, now)
            case Failed(plan, reason_text, now):
                scheduler.fail(plan, reason_text, now)
    return plans
