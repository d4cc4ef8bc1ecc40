"""An executor that computes nothing: a step takes as long as the cost model says.

Called by `sim.simulate`, in place of the runtime's executors. Tokens are all the same, so that only
`max_tokens` (and the context limit) end a sequence.
"""

from __future__ import annotations

import msgspec

from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.types import RowOutput, StepPlan, StepResult, StepRow, TokenLogprobs

__all__ = ["ClockExecutor", "ClockTicket", "VirtualClock"]

_TOKEN_ID = 0


class VirtualClock(msgspec.Struct):
    """Simulated time in seconds. Owned by the simulation's loop."""

    now: float = 0.0


class ClockTicket(msgspec.Struct, frozen=True):
    """A step that ends at `ready_at_s`."""

    clock: VirtualClock
    ready_at_s: float
    outcome: StepResult

    def done(self) -> bool:
        """Whether its time has come."""
        return self.clock.now >= self.ready_at_s

    def result(self) -> StepResult:
        """What the step gave; waiting for it moves the clock."""
        self.clock.now = max(self.clock.now, self.ready_at_s)
        return self.outcome


class ClockExecutor:
    """Runs steps one after the other on a virtual clock."""

    def __init__(self, clock: VirtualClock, cost_model: CostModel) -> None:
        self._clock = clock
        self._cost_model = cost_model
        self._free_at_s = 0.0

    def submit(self, plan: StepPlan) -> ClockTicket:
        """Start the step when those before it are done."""
        seconds = self._cost_model.seconds(StepLoad.of_plan(plan))
        self._free_at_s = max(self._clock.now, self._free_at_s) + seconds
        outputs = tuple(map(_output, plan.rows))
        result = StepResult(plan.step_id, outputs, seconds)
        return ClockTicket(self._clock, self._free_at_s, result)

    def close(self) -> None:
        """Nothing to free."""


def _output(row: StepRow) -> RowOutput:
    """What the row has to give, without content."""
    score = TokenLogprobs(_TOKEN_ID, 0.0, 1)
    return RowOutput(
        token_ids=(_TOKEN_ID,) if row.emits else (),
        prompt_logprobs=(score,) * row.num_scored,
        embedding=() if row.pools else None,
    )
