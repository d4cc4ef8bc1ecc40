"""Ends the reasoning once it has had its tokens: the closing tag is written, token by token.

A function of the output tokens alone, owned by `SamplingState`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quickstep.runtime.constraints.reasoning import Place, ReasoningTracker
from quickstep.sampling_params import ReasoningTokens

__all__ = ["ThinkingBudget"]


class ThinkingBudget:
    """Counts the tokens between the tags."""

    def __init__(self, budget: int, tags: ReasoningTokens, outputs: Sequence[int]) -> None:
        self._budget = budget
        self._reasoning = ReasoningTracker(tags, outputs)

    @property
    def forced_token(self) -> int | None:
        """The only token that may follow; None while there is budget, or nothing to close."""
        reasoning = self._reasoning
        if reasoning.place is not Place.INSIDE or reasoning.num_inside < self._budget:
            return None
        return reasoning.closing_token

    def record(self, token_id: int) -> None:
        """Take an output token."""
        self._reasoning.record(token_id)
