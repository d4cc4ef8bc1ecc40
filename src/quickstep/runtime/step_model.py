"""How the rows of a step are computed: the face of both ways, and the way op by op.

`runtime.runner` prepares the rows, which may find that one cannot go on, and then runs them.
`runtime.capture` is the other way: one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from quickstep.model.interface import ForwardBatch, Model
from quickstep.ops.table import KVCache
from quickstep.runtime.batch import build_batch, emitting_tokens
from quickstep.runtime.slots import Slot
from quickstep.types import StepRow

__all__ = ["EagerSteps", "StepModel"]


class StepModel(Protocol):
    """A model with its KV, a step at a time."""

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """Take a step's rows. Raises EngineError when they contradict their blocks or tokens."""

    def run(self, emitting: Sequence[int], every_token: bool) -> tuple[Tensor, Tensor]:
        """Compute the prepared rows: final hidden states, and fp32 logits [E, V] of the last tokens
        of the rows named. The hidden states are of every token [T, C], or of those alone [E, C].
        Both stand until the next `prepare`.
        """


class EagerSteps:
    """Runs the model's Python, op by op: any model, any device."""

    def __init__(self, model: Model, kv: KVCache, block_size: int) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._batch: ForwardBatch | None = None

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        model = self._model
        self._batch = build_batch(rows, slots, self._block_size, model.vocab_size, model.device)

    @torch.inference_mode()
    def run(self, emitting: Sequence[int], every_token: bool) -> tuple[Tensor, Tensor]:
        """`StepModel.run`."""
        assert self._batch is not None, "a step is prepared before it runs"
        model, batch, self._batch = self._model, self._batch, None
        chosen = emitting_tokens(batch.layout, emitting)
        if not every_token:
            batch = replace(batch, emitting=chosen)
        hidden = model.forward(batch, self._kv)
        if not emitting:
            return hidden, torch.empty((0, model.vocab_size), device=model.device)
        return hidden, model.logits(hidden[chosen.tokens] if every_token else hidden)
