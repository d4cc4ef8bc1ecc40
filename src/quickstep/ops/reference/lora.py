"""Low-rank adapters next to a linear layer: y += scale * B (A x) + bias, by adapter.

As in `linear`, sums are exact per chunk of inputs, so that a token's bits depend on that token and
its adapter only. A x is rounded to float32 and multiplied by the scale there. int8 weights need no
rounding for exact sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.ops.reference.linear import exact_product, round_weight
from quickstep.ops.table import LoRAAdapter, LoRAMapping, LoRAPart
from quickstep.ops.tensors import to_torch

_Parts = tuple[tuple[LoRAPart, ...], ...]


def pack_lora(modules: Sequence[Sequence[LoRAPart]]) -> LoRAAdapter:
    """The parts of each matrix, rounded for exact sums."""
    packed = tuple(tuple(map(_rounded, parts)) for parts in modules)
    nbytes = sum(tensor.nbytes for parts in packed for part in parts for tensor in part.tensors)
    return LoRAAdapter(packed, nbytes)


def _rounded(part: LoRAPart) -> LoRAPart:
    a, b = to_torch(part.a), None if part.b is None else to_torch(part.b)
    if part.rank_scales is not None or not part.rank:
        return replace(part, a=a, b=b)
    if not part.is_embedding:
        a = round_weight(a, a.dtype)
    # the inputs of b are float32
    return replace(part, a=a, b=None if b is None else round_weight(b, torch.float32))


def add_lora_(y: Tensor, x: Tensor, module: int, mapping: LoRAMapping) -> None:
    """Y [T, N] += scale * B (A x) + bias, x [T, C] or token ids [T]."""
    for adapter, members in mapping.groups:
        tokens = to_torch(members)
        modules = adapter.data
        assert isinstance(modules, tuple)
        for part in modules[module]:
            columns = slice(part.first_output, part.first_output + part.num_outputs)
            total = low = _low(part, x[tokens])
            if part.b is not None:
                total = y[tokens, columns].double()
                if part.rank:
                    total += exact_product(low, to_torch(part.b), torch.float32)
            total = total.double()
            if part.bias is not None:
                total += to_torch(part.bias).double()
            y[tokens, columns] = total.float().to(y.dtype)


def _low(part: LoRAPart, x: Tensor) -> Tensor:
    """Scale * A x, [T, rank] float32."""
    a = to_torch(part.a)
    if not part.rank:
        return a.new_zeros((x.shape[0], 0), dtype=torch.float32)
    low = a[x].float() if part.is_embedding else exact_product(x, a, x.dtype).float()
    if part.rank_scales is not None:
        low *= to_torch(part.rank_scales)
    return low * part.scale


def among(lora: LoRAMapping, tokens: Tensor) -> LoRAMapping:
    """The same adapters for some of the tokens, numbered by their place among these."""
    groups = []
    for adapter, members in lora.groups:
        places = torch.isin(tokens, to_torch(members)).nonzero().flatten()
        if places.numel():
            groups.append((adapter, places))
    return LoRAMapping(tuple(groups))
