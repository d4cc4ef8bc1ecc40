"""Steps of an encoder without torch: rows that are complete texts, as `HostTensor`s.

Opened by `runtime.steps.opening` for an encoder on native kernels; with tensors of torch, it runs
through `EagerSteps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from quickstep.errors import EngineError
from quickstep.model.encoders.encoder import Encoder
from quickstep.ops.tensors import FLOAT32, INT64, AnyTensor, HostTensor
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.step_model import EmittingToken
from quickstep.types import StepRow


class TextSteps:
    """Runs an encoder over the texts of a step; see `StepModel`."""

    def __init__(self, model: Encoder) -> None:
        self._model = model
        self._token_ids: HostTensor | None = None
        self._offsets: list[int] = []
        self._ends: list[int] = []

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        tokens = [slot.input_tokens(row) for row, slot in zip(rows, slots, strict=True)]
        token_ids = np.fromiter(chain.from_iterable(tokens), dtype=np.int64)
        vocab_size = self._model.vocab_size
        if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
            raise EngineError(f"a row has token ids outside the model's {vocab_size}")
        self._token_ids = HostTensor(token_ids, INT64)
        self._offsets = list(accumulate(map(len, tokens), initial=0))
        self._ends = [row.end for row in rows]

    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """`StepModel.run`: the hidden states of every token, and no logits."""
        assert self._token_ids is not None, "a step is prepared before it runs"
        if emitting:
            raise EngineError("an encoder generates no tokens")
        hidden = self._model.encode(self._token_ids, self._offsets, self._ends)
        return hidden, HostTensor.empty((0, self._model.vocab_size), FLOAT32)

    def aux_hidden_states(self) -> tuple[AnyTensor, ...]:
        """`StepModel.aux_hidden_states`: there are none."""
        return ()

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """There are none. Raises EngineError."""
        return self._model.logits(hidden)

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing is kept of a token."""
