"""The output projection on libquickstep: a product of any weight, then its finish in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from quickstep.ops.native_library import raise_for_status
from quickstep.ops.native_packed import DTYPES
from quickstep.ops.reference.logits import finished_logits
from quickstep.ops.table import LinearWeight

__all__ = ["NativeLogits"]


class NativeLogits:
    """`OpTable.logits` over the `linear` of the same context."""

    def __init__(
        self, library: ctypes.CDLL, context: int, linear: Callable[[Tensor, LinearWeight], Tensor]
    ) -> None:
        self._finish = library.qs_finish_logits
        self._context = context
        self._linear = linear

    def logits(
        self, hidden: Tensor, weight: LinearWeight, divisor: float, softcap: float | None
    ) -> Tensor:
        """`OpTable.logits`."""
        product = self._linear(hidden, weight)
        dtype = DTYPES.get(product.dtype)
        if dtype is None:
            return finished_logits(product, divisor, softcap)
        out = torch.empty(product.shape, dtype=torch.float32)
        status = self._finish(
            self._context,
            dtype,
            product.data_ptr(),
            product.numel(),
            divisor,
            softcap or 0.0,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "logits")
        return out
