"""Low-rank adapters next to a linear layer: y += scale * B (A x), for tokens grouped by adapter.

As in `linear`, sums are exact per chunk of inputs, so that a token's bits depend on that token and
its adapter only. A x is rounded to float32 and multiplied by the scale there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.ops.reference.linear import exact_product, round_weight
from quickstep.ops.table import LoRAAdapter, LoRAMapping, LoRAPart
from quickstep.ops.tensors import to_torch

__all__ = ["add_lora_", "pack_lora"]

_Parts = tuple[tuple[LoRAPart, ...], ...]


def pack_lora(modules: Sequence[Sequence[LoRAPart]]) -> LoRAAdapter:
    """The parts of each matrix, rounded for exact sums."""
    packed = tuple(tuple(map(_rounded, parts)) for parts in modules)
    nbytes = sum(part.a.nbytes + part.b.nbytes for parts in packed for part in parts)
    return LoRAAdapter(packed, nbytes)


def _rounded(part: LoRAPart) -> LoRAPart:
    a, b = to_torch(part.a), to_torch(part.b)
    # the inputs of b are float32
    rounded_b = round_weight(b, torch.float32)
    return replace(part, a=a if part.is_embedding else round_weight(a, a.dtype), b=rounded_b)


def add_lora_(y: Tensor, x: Tensor, module: int, mapping: LoRAMapping) -> None:
    """Y [T, N] += scale * B (A x), x [T, C] or token ids [T]."""
    for adapter, members in mapping.groups:
        tokens = to_torch(members)
        modules = adapter.data
        assert isinstance(modules, tuple)
        for part in modules[module]:
            a, b = to_torch(part.a), to_torch(part.b)
            if part.is_embedding:
                low = a[x[tokens]].float() * part.scale
            else:
                low = exact_product(x[tokens], a, a.dtype).float() * part.scale
            columns = slice(part.first_output, part.first_output + b.shape[0])
            change = exact_product(low, b, torch.float32)
            total = y[tokens, columns].double() + change
            y[tokens, columns] = total.float().to(y.dtype)
