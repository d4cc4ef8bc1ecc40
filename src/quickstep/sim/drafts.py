"""Draft tokens of simulated steps: how many are accepted by chance, and how long proposing takes.

The scheduler decides how many drafts it asks for, as in the engine. `SimulatedDrafts` answers: a
draft is accepted with a fixed probability after those before it were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.types import Phase, RowOutput, StepPlan, StepRow

if TYPE_CHECKING:
    from random import Random

__all__ = ["SimulatedDrafts"]


class SimulatedDrafts:
    """The drafts of one engine. `cost_model` predicts the steps of the draft model."""

    def __init__(self, acceptance: float, rng: Random, cost_model: CostModel) -> None:
        self._acceptance = acceptance
        self._rng = rng
        self._cost_model = cost_model

    def output(self, row: StepRow, token_id: int) -> RowOutput:
        """The accepted drafts and one token more; as many new drafts as the row asks for."""
        num_accepted = 0
        while num_accepted < row.num_drafts and self._rng.random() < self._acceptance:
            num_accepted += 1
        token_ids = (token_id,) * (1 + num_accepted) if row.emits else ()
        return RowOutput(token_ids, draft_token_ids=(token_id,) * row.num_next_drafts)

    def seconds(self, plan: StepPlan) -> float:
        """Of the draft model after a step: it computes the prompts too, then one token after the
        other for the rows that ask for so many.
        """
        load = StepLoad()
        for row in plan.rows:
            if row.phase is Phase.PREFILL:
                load += StepLoad.of_span(row.start, row.num_tokens)
        seconds = 0.0
        for place in range(max((row.num_next_drafts for row in plan.rows), default=0)):
            proposing = [row for row in plan.rows if row.num_next_drafts > place]
            load = sum((StepLoad.of_span(row.end + place, 1) for row in proposing), start=load)
            seconds += self._cost_model.seconds(load)
            load = StepLoad()
        return seconds + (self._cost_model.seconds(load) if load.num_rows else 0.0)
