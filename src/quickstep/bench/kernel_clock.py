"""Seconds that a model has spent computing, so that a step's overhead is the rest of it.

Native kernels count for themselves (`OpTable.kernel_s`). For any other model the time inside
`forward` and `logits` counts as computing, torch's dispatch included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quickstep.model.decoder import Decoder
from quickstep.model.interface import ForwardBatch, KVShape, Model
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import Device

__all__ = ["TimedModel", "with_kernel_clock"]


def with_kernel_clock(
    model: Model, clock: Callable[[], float]
) -> tuple[Model, Callable[[], float], str]:
    """The model to run, its seconds of computing so far, and what those are."""
    counted = model.ops.kernel_s if isinstance(model, Decoder) else None
    if counted is not None:
        return model, counted, "native kernels"
    timed = TimedModel(model, clock)
    return timed, timed.busy_s, "model.forward and model.logits"


class TimedModel:
    """A `Model` that counts the seconds inside its calls; on a GPU it waits for their end."""

    def __init__(self, model: Model, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._busy_s = 0.0

    def busy_s(self) -> float:
        """Seconds inside `forward` and `logits` so far."""
        return self._busy_s

    @property
    def kv_shape(self) -> KVShape:
        """`Model.kv_shape`."""
        return self._model.kv_shape

    @property
    def vocab_size(self) -> int:
        """`Model.vocab_size`."""
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        """`Model.max_model_len`."""
        return self._model.max_model_len

    @property
    def device(self) -> torch.device | Device:
        """`Model.device`."""
        return self._model.device

    @property
    def fingerprint(self) -> str:
        """`Model.fingerprint`."""
        return self._model.fingerprint

    @property
    def exact(self) -> bool:
        """`Model.exact`."""
        return self._model.exact

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """`Model.forward`."""
        started = self._clock()
        hidden = self._model.forward(batch, kv)
        self._count_since(started)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`Model.logits`."""
        started = self._clock()
        logits = self._model.logits(hidden)
        self._count_since(started)
        return logits

    def _count_since(self, started: float) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        self._busy_s += self._clock() - started
