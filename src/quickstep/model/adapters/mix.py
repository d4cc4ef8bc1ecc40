"""Several adapters at their scales as one: y += sum over adapters of scale * (B A x + bias).

The rows of all `a` follow each other (its columns, of an embedding, whose `a` is transposed), and
so do the columns of all `b`: one product with the sum of the ranks computes the mix. A kernel part
has one scale, so where they differ the smaller ones are multiplied into `b`, in the model's dtype:
about 2 ** -9 of relative rounding with bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from msgspec.structs import replace

from quickstep.model.adapters.checkpoint import LoRAWeights
from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import FLOAT32, HostTensor, as_float64


def mixed(adapters: Sequence[tuple[LoRAWeights, float]]) -> LoRAWeights:
    """The weights of at least one adapter of a model, each at its scale, none of them 0, and none
    with complete matrices.
    """
    digest = blake2b(digest_size=16)
    for weights, scale in adapters:
        digest.update(f"{weights.content_id} {scale!r} ".encode())
    modules = tuple(
        _module([(weights.modules[number], scale) for weights, scale in adapters])
        for number in range(len(adapters[0][0].modules))
    )
    rank = max((part.rank for parts in modules for part in parts), default=0)
    return LoRAWeights(modules, digest.hexdigest(), rank)


def _module(changes: Sequence[tuple[tuple[LoRAPart, ...], float]]) -> tuple[LoRAPart, ...]:
    """The parts of one matrix, one for each of its projections that an adapter changes."""
    projections: dict[int, list[tuple[LoRAPart, float]]] = {}
    for parts, scale in changes:
        for part in parts:
            projections.setdefault(part.first_output, []).append((part, scale))
    return tuple(_part(projections[first]) for first in sorted(projections))


def _part(changes: Sequence[tuple[LoRAPart, float]]) -> LoRAPart:
    first = changes[0][0]
    biases = [as_float64(part.bias) * scale for part, scale in changes if part.bias is not None]
    bias = HostTensor(sum(biases[1:], biases[0]).astype(np.float32), FLOAT32) if biases else None
    scaled = [(part, scale * part.scale) for part, scale in changes]
    largest = max((scale for _, scale in scaled), key=abs)
    if len(scaled) == 1:
        return replace(first, scale=largest, bias=bias)
    assert isinstance(first.a, HostTensor)
    a = [as_float64(part.a) for part, _ in scaled]
    b = []
    for part, scale in scaled:
        assert part.b is not None, "complete matrices have no scale"
        b.append(as_float64(part.b) * (scale / largest if largest else 0.0))
    tensors = (np.concatenate(a, axis=int(first.is_embedding)), np.concatenate(b, axis=1))
    rows, columns = (HostTensor(tensor.astype(np.float32), FLOAT32) for tensor in tensors)
    dtype = first.a.dtype
    return replace(first, a=rows.to(dtype), b=columns.to(dtype), scale=largest, bias=bias)
