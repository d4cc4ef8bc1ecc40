"""Logits: the output projection, its adapters, and what an architecture does with the result."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quickstep.ops.reference.exact_math import tanh
from quickstep.ops.table import LoRAMapping
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.weights import LinearWeight


class Logits:
    """`OpTable.logits` of an implementation's `linear` and `add_lora_`, and of what it does with
    the product: `finish` is `finished_logits`, or another of its arguments and results.
    """

    def __init__(
        self,
        linear: Callable[[Tensor, LinearWeight], Tensor],
        add_lora_: Callable[[Tensor, Tensor, int, LoRAMapping], None],
        finish: Callable[[Tensor, float, float | None], Tensor] | None = None,
    ) -> None:
        self._linear = linear
        self._add_lora_ = add_lora_
        self._finish = finish or finished_logits

    def __call__(
        self,
        hidden: AnyTensor,
        weight: LinearWeight,
        divisor: float,
        softcap: float | None,
        lora: tuple[int, LoRAMapping] | None,
    ) -> Tensor:
        """Hidden states [E, C] -> [E, V] fp32."""
        x = to_torch(hidden)
        product = self._linear(x, weight)
        if lora is not None:
            self._add_lora_(product, x, *lora)
        return self._finish(product, divisor, softcap)


def finished_logits(product: Tensor, divisor: float, softcap: float | None) -> Tensor:
    """[E, V] -> [E, V] fp32: widened, divided, then softcap * tanh(logits / softcap) in fp64."""
    wide = product.float()
    if divisor != 1.0:
        wide = wide / divisor
    if softcap is None:
        return wide
    # row by row: the fp64 scratch is a few times V, and not E times that
    for row in wide:
        row.copy_(tanh(row.double() / softcap) * softcap)
    return wide
