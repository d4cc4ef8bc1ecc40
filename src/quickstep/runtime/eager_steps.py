"""A step op by op, through the model's own Python and torch: any model, any device.

Opened by `runtime.capture` for what cannot be captured. Importing this imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.model.checkpoint.torch_weights import with_torch_kv, with_torch_tensors
from quickstep.model.decoder import Decoder
from quickstep.model.interface import ForwardBatch, Model
from quickstep.ops.host_tensor import HostTensor, to_torch
from quickstep.ops.table import KVCache
from quickstep.runtime.batch import build_batch, emitting_tokens
from quickstep.runtime.slots import Slot
from quickstep.types import StepRow

__all__ = ["EagerSteps"]


class EagerSteps:
    """Runs the model's Python. A decoder in memory of ours is seen through tensors of torch."""

    def __init__(self, model: Model, kv: KVCache, block_size: int) -> None:
        self._model = with_torch_tensors(model) if isinstance(model, Decoder) else model
        self._kv = with_torch_kv(kv)
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
            return hidden, torch.empty((0, model.vocab_size), device=model.device.type)
        return hidden, model.logits(hidden[chosen.tokens] if every_token else hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor | HostTensor) -> Tensor:
        """`StepModel.logits`."""
        return self._model.logits(to_torch(hidden))
