"""How the rows of a step are computed: the face of both ways.

`runtime.runner` prepares the rows, which may find that one cannot go on, and then runs them.
`runtime.capture` is the way in one native call, `runtime.eager_steps` the way op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quickstep.ops.host_tensor import AnyTensor
from quickstep.runtime.slots import Slot
from quickstep.types import StepRow

__all__ = ["StepModel"]


class StepModel(Protocol):
    """A model with its KV, a step at a time."""

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """Take a step's rows. Raises EngineError when they contradict their blocks or tokens."""

    def run(self, emitting: Sequence[int]) -> tuple[AnyTensor, AnyTensor]:
        """Compute the prepared rows: hidden states [T, C], and fp32 logits [E, V] of the last
        tokens of the rows named. Both stand until the next `prepare`; they are torch's where the
        step ran op by op.
        """

    def logits(self, hidden: AnyTensor) -> AnyTensor:
        """Logits [E, V] fp32 of some of the hidden states [E, C] that `run` gave."""
