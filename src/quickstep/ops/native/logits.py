"""The output projection on libquickstep: a product of any weight, then its finish in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from quickstep.ops.dtypes import FLOAT32, of_kind
from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.packed import kernel_dtype
from quickstep.ops.table import LinearWeight

if TYPE_CHECKING:
    from torch import Tensor

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
        dtype = kernel_dtype(product.dtype)
        if dtype is None:
            from quickstep.ops.reference.logits import finished_logits

            return finished_logits(product, divisor, softcap)
        out = product.new_empty(product.shape, dtype=of_kind(FLOAT32, product.dtype))
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
