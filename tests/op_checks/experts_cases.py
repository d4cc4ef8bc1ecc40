"""Inputs of a mixture of experts: weights of every form, experts without tokens, and adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from op_checks.case_inputs import CaseInputs, label
from op_checks.quantized_cases import Inputs, float8_weight, quantized_weight, sub_block_weight
from quickstep.ops.table import LoRAPart
from quickstep.ops.weights import QuantizedWeight

__all__ = ["Matrix", "experts_inputs", "experts_lora_inputs"]

Matrix = tuple["Tensor | QuantizedWeight", "Tensor | None"]

# (T, hidden, width, experts, experts per token, form, has biases)
_SHAPES = (
    (1, 32, 48, 4, 2, "float", False),
    (5, 64, 32, 2, 1, "float", True),
    (19, 77, 33, 8, 3, "float", True),
    (70, 128, 96, 4, 4, "float", False),
    (0, 32, 32, 4, 2, "float", False),
    (7, 64, 32, 4, 2, "int8", True),
    (21, 256, 128, 3, 2, "int8", False),
    (6, 64, 32, 3, 2, "int4", False),
    (5, 64, 64, 2, 1, "multiplied", False),
    (6, 64, 32, 3, 2, "float8", True),
)
# without a gate, of weighted inputs
_UNGATED = ((1, 32, 48, 4, 2, "float", False), (13, 64, 32, 3, 2, "int8", True))


def experts_inputs(dtype: torch.dtype) -> Iterator[Inputs]:
    """Tokens (x, experts, weights), fixed (activation, (gate_up, down_proj of each expert))."""
    for shape in _SHAPES:
        name = label("experts", dtype, *shape)
        source = CaseInputs(name, dtype)
        activation = "clamped_swiglu" if shape[-1] else "silu"
        tokens = _tokens(source, *shape[:2], *shape[3:5])
        yield Inputs(name, tokens, (activation, _all(source, shape)))
    for shape in _UNGATED:
        name = label("experts", dtype, "relu2", *shape)
        source = CaseInputs(name, dtype)
        x, chosen, weights = _tokens(source, *shape[:2], *shape[3:5])
        signs = weights.round() * 2 - 1
        yield Inputs(name, (x, chosen, signs), ("relu2", _all(source, shape, is_gated=False)))


def experts_lora_inputs(dtype: torch.dtype) -> Iterator[Inputs]:
    """As `experts_inputs`, with the adapter of each token, and the parts by matrix."""
    for shape in (_SHAPES[1], _SHAPES[2], _SHAPES[5]):
        name = label("experts_lora", dtype, *shape)
        source = CaseInputs(name, dtype)
        num_tokens, hidden, width, num_experts = shape[:4]
        ids = torch.arange(num_tokens) * 7 % 3 - 1
        matrices = _all(source, shape)
        adapters = []
        for rank in (4, 19):
            modules: list[tuple[LoRAPart, ...]] = []
            for expert in range(num_experts):
                # the first expert has no adapter on its first matrix
                first = () if expert == 0 else (_part(source, rank, hidden, width, width),)
                modules += [first, (_part(source, rank, width, hidden, 0),)]
            adapters.append(tuple(modules))
        tokens = _tokens(source, *shape[:2], *shape[3:5])
        yield Inputs(name, (*tokens, ids), ("silu", matrices, tuple(adapters)))


def _tokens(
    source: CaseInputs, num_tokens: int, hidden: int, num_experts: int, per_token: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Different experts of each token in any order, never the last one if that is possible."""
    usable = max(per_token, num_experts - 1)
    chosen = [source.permutation(usable)[:per_token] for _ in range(num_tokens)]
    experts = torch.stack(chosen) if chosen else torch.zeros(0, per_token, dtype=torch.int64)
    weights = source.normal(num_tokens, per_token).float().softmax(-1)
    return source.normal(num_tokens, hidden), experts, weights


def _all(
    source: CaseInputs,
    shape: tuple[int, int, int, int, int, str, bool],
    *,
    is_gated: bool = True,
) -> tuple[tuple[Matrix, ...], tuple[Matrix, ...]]:
    _, hidden, width, num_experts, _, form, has_biases = shape
    first = 2 * width if is_gated else width
    return (
        tuple(_matrix(source, first, hidden, form, has_biases) for _ in range(num_experts)),
        tuple(_matrix(source, hidden, width, form, has_biases) for _ in range(num_experts)),
    )


def _matrix(source: CaseInputs, outputs: int, inputs: int, form: str, has_bias: bool) -> Matrix:
    bias = source.normal(outputs) if has_bias else None
    if form == "float":
        return source.normal(outputs, inputs, scale=inputs**-0.5), bias
    if form == "float8":
        return float8_weight(source, (outputs, inputs), 32), bias
    if form == "multiplied":
        return sub_block_weight(source, (outputs, inputs), 32), bias
    bits = 4 if form == "int4" else 8
    return quantized_weight(source, (outputs, inputs), bits, 32, zeros=bits == 4), bias


def _part(source: CaseInputs, rank: int, inputs: int, outputs: int, first: int) -> LoRAPart:
    a = source.normal(rank, inputs, scale=inputs**-0.5)
    return LoRAPart(a, source.normal(outputs, rank, scale=rank**-0.5), first, 0.5)
