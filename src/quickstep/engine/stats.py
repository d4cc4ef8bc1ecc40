"""How an engine is doing, for `/health` and `/metrics`: frozen values, made when asked."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from quickstep.core.accounting import SchedulerStats

__all__ = ["EngineState", "EngineStats"]


class EngineState(enum.Enum):
    """The life of an engine, in order; FAILED when its loop broke."""

    NEW = "not started"
    RUNNING = "running"
    DRAINING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of an engine.

    Attributes:
        failure: Why the engine failed, "" if it did not.
        now_s: The engine's clock; `last_step_s` is when the last step was committed on it.
        num_steps_in_flight: Steps submitted and not committed.
        num_requests: Requests whose streams have not ended.
        scheduler: Waiting, running, blocks (`core.accounting.SchedulerStats`).
    """

    state: EngineState
    failure: str
    now_s: float
    last_step_s: float | None
    num_steps_in_flight: int
    num_requests: int
    scheduler: SchedulerStats

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting for something."""
        return self.num_requests > 0

    @property
    def since_step_s(self) -> float | None:
        """Seconds since a step finished; with work to do, a large value means trouble."""
        return None if self.last_step_s is None else self.now_s - self.last_step_s
