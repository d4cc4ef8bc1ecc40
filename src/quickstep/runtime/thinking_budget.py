"""Ends the reasoning once it has had its tokens: the closing tag is written, token by token.

The reasoning stands at the beginning of the output, opened there or by the prompt, as the parser
of `engine.tool_calls.think` reads it. A function of the output tokens alone, owned by
`SamplingState`. The tags come as token sequences; the engine has made them from texts.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from quickstep.sampling_params import ReasoningTokens

__all__ = ["ThinkingBudget"]

# Tokens of white space that may stand before the opening tag.
_NUM_SPACES = 4


class _Place(enum.Enum):
    BEFORE = "before"
    INSIDE = "inside"
    BEHIND = "behind"


class ThinkingBudget:
    """Counts the tokens between the tags."""

    def __init__(self, budget: int, tags: ReasoningTokens, outputs: Sequence[int]) -> None:
        self._budget = budget
        self._tags = tags
        self._place = _Place.INSIDE if tags.starts_open else _Place.BEFORE
        self._tokens: list[int] = []  # since the beginning, then since the opening tag
        for token_id in outputs:
            self.record(token_id)

    @property
    def forced_token(self) -> int | None:
        """The only token that may follow; None while there is budget, or nothing to close."""
        if self._place is not _Place.INSIDE or len(self._tokens) < self._budget:
            return None
        closing = self._tags.closings[0]
        # the tokens beyond the budget are the tag's; before that, the model may have begun it
        num_written = max(
            length for length in range(len(closing)) if self._ends_in(closing[:length])
        )
        return closing[num_written]

    def record(self, token_id: int) -> None:
        """Take an output token."""
        if self._place is _Place.BEHIND:
            return
        self._tokens.append(token_id)
        if self._place is _Place.INSIDE:
            if any(map(self._ends_in, self._tags.closings)):
                self._place = _Place.BEHIND
        elif any(map(self._ends_in, self._tags.openings)):
            self._place = _Place.INSIDE
            self._tokens.clear()
        elif len(self._tokens) >= _NUM_SPACES + max(map(len, self._tags.openings)):
            self._place = _Place.BEHIND

    def _ends_in(self, token_ids: tuple[int, ...]) -> bool:
        num_ids = len(token_ids)
        return not num_ids or tuple(self._tokens[-num_ids:]) == token_ids
