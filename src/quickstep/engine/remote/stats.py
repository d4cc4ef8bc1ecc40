"""What is known of an engine in another process: its last word, and counts over all its lives.

Owned by `RemoteEngine`. Counts only grow, whatever dies; blocks and queues are the living
engine's, and empty while there is none.
"""

from __future__ import annotations

from msgspec.structs import fields, replace

from quickstep.core.accounting import SchedulerStats, Totals
from quickstep.core.block_pool import PoolStats
from quickstep.engine.stats import EngineState, EngineStats
from quickstep.errors import EngineError

__all__ = ["Ledger"]


class Ledger:
    """Takes in each word of the worker's, answers `stats`."""

    def __init__(self) -> None:
        self._last: EngineStats | None = None
        self._past = Totals()

    def update(self, stats: EngineStats) -> None:
        """The worker's newest word."""
        self._last = stats

    def close_life(self) -> str:
        """The worker is gone, and all that it held with it; says why its engine had failed."""
        last = self._known()
        self._past = _sum(self._past, last.scheduler.totals)
        blocks = last.scheduler.blocks
        num_blocks = blocks.num_free + blocks.num_cached + blocks.num_used
        self._last = replace(
            last,
            failure="",
            last_step_s=None,
            num_steps_in_flight=0,
            scheduler=SchedulerStats(
                num_waiting=0,
                num_running=0,
                num_preempted=0,
                num_in_flight=0,
                blocks=PoolStats(num_blocks, 0, 0, 0, 0),
                totals=Totals(),
            ),
        )
        return last.failure

    def stats(
        self,
        state: EngineState,
        failure: str,
        now_s: float,
        busy_since_s: float | None,
        num_requests: int,
        num_restarts: int,
        silent_s: float,
    ) -> EngineStats:
        """This moment: the arguments, and the rest as the worker last said it."""
        last = self._known()
        totals = _sum(self._past, last.scheduler.totals)
        return replace(
            last,
            state=state,
            failure=failure,
            now_s=now_s,
            busy_since_s=busy_since_s,
            num_requests=num_requests,
            scheduler=replace(last.scheduler, totals=totals),
            num_restarts=num_restarts,
            silent_s=silent_s,
        )

    def _known(self) -> EngineStats:
        if self._last is None:
            raise EngineError("the engine is not open")
        return self._last


def _sum(one: Totals, other: Totals) -> Totals:
    names = [field.name for field in fields(Totals)]
    return Totals(**{name: getattr(one, name) + getattr(other, name) for name in names})
