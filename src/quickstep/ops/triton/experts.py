"""A mixture of experts as grouped products: all experts of a layer in one launch per matrix.

The rows of all tokens are sorted by expert, and each expert's rows are cut into blocks from its
first one on. A program multiplies one block with one block of its expert's outputs: sums run as in
`linear` and `quantized_linear`, so the bits of a row do not depend on its place or on how many rows
its expert has. For weights in floating point the tile shape never changes. Which expert a program
has is read from the device, and the grid is the most blocks there can be: nothing is read back. The
matrices of experts stay where they were packed; a table has their addresses.

`_combine_kernel` adds a token's experts in ascending order in fp32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.table import ExpertLoRA, ExpertWeights, LinearWeight
from quickstep.ops.triton.elementary import gated_activation
from quickstep.ops.triton.float8_linear import (
    Float8Weight,
    float8_tile,
    has_float8_cast,
    quantize_to_float8,
)
from quickstep.ops.triton.linear import product_tile, widens
from quickstep.ops.triton.lora import TritonLoRA
from quickstep.ops.triton.quantized_linear import (
    PackedWeight,
    block_k,
    quantize_tokens,
    quantized_tile,
)
from quickstep.ops.triton.rounding import rounded

__all__ = ["TritonExperts", "pack_experts"]

_BLOCK_N = 64
_BLOCK_K = 64
_MOST_BLOCK_K = 128  # of quantized weights
_BLOCK_T = 32  # of weights in floating point, for every number of rows
_COMBINE_BLOCK = 1024
_ALIGNMENT = 16  # bytes, of every tensor of a weight
# Addresses in the table: the weight, its scales, zeros, sub-block scales, and bias.
_NUM_FIELDS = 5
_FIELDS = tl.constexpr(_NUM_FIELDS)


class _Matrices(msgspec.Struct, frozen=True):
    """One matrix of every expert, all of one form: `form` is one of them, `table` [E, 5] int64."""

    table: Tensor
    form: LinearWeight
    bias_dtype: torch.dtype | None


class _Packed(msgspec.Struct, frozen=True):
    gate_up: _Matrices
    down_proj: _Matrices


def pack_experts(
    gate_up: tuple[LinearWeight, ...], down_proj: tuple[LinearWeight, ...]
) -> object | None:
    """Tables of the matrices' addresses; None where they are not all of one form."""
    tables = [_matrices(gate_up), _matrices(down_proj)]
    if tables[0] is None or tables[1] is None:
        return None
    return _Packed(tables[0], tables[1])


def _matrices(weights: Sequence[LinearWeight]) -> _Matrices | None:
    rows = [[0 if one is None else one.data_ptr() for one in _tensors(one)] for one in weights]
    forms = {_form(one) for one in weights}
    if len(forms) > 1 or any(address % _ALIGNMENT for row in rows for address in row):
        return None
    device = next(one for one in _tensors(weights[0]) if one is not None).device
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    bias = weights[0].bias
    return _Matrices(table, weights[0], None if bias is None else bias.dtype)


def _tensors(weight: LinearWeight) -> tuple[Tensor | None, ...]:
    data = weight.data
    if isinstance(data, PackedWeight):
        return data.packed, data.scales, data.zeros, data.sub_scales, weight.bias
    if isinstance(data, Float8Weight):
        return data.packed, data.scales, None, None, weight.bias
    assert isinstance(data, Tensor)
    return data, None, None, None, weight.bias


def _form(weight: LinearWeight) -> tuple[object, ...]:
    """What all experts must have in common."""
    kinds = tuple(None if one is None else (one.dtype, one.shape) for one in _tensors(weight))
    data = weight.data
    if isinstance(data, PackedWeight):
        return *kinds, data.group_size, data.shared_groups, data.half
    if isinstance(data, Float8Weight):
        return *kinds, data.group_size, "float8"
    return kinds


class _Plan(msgspec.Struct, frozen=True):
    """Rows of tokens sorted by expert, on the device.

    Attributes:
        tokens: [R] int64, the token of each row.
        experts: [R] int64, ascending.
        weights: [R] float32.
        places: [T, A] int64, the rows of each token, ascending.
        starts: [E + 1] int64, the first row of each expert, and the end.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    places: Tensor
    starts: Tensor


def _plan(chosen: Tensor, expert_weights: Tensor, num_experts: int) -> _Plan:
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    experts = flat[order]
    bounds = torch.arange(num_experts + 1, device=flat.device)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=flat.device)
    return _Plan(
        torch.div(order, chosen.shape[1], rounding_mode="floor"),
        experts,
        expert_weights.flatten()[order],
        places.view(chosen.shape).sort(-1).values,
        torch.searchsorted(experts, bounds),
    )


@triton.jit
def _address(table, expert, FIELD: tl.constexpr, DTYPE: tl.constexpr):
    pointer = tl.load(table + expert * _FIELDS + FIELD).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _block_of(
    starts,
    block_ends,
    tokens,
    num_experts,
    GATHER: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The expert of this program, `num_experts` if it has none; its rows, which of them there are,
    the rows of x that they read, and its outputs.
    """
    block = tl.program_id(0)
    numbers = tl.arange(0, BLOCK_E)
    ends = tl.load(block_ends + numbers, mask=numbers < num_experts, other=1 << 62)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    found = tl.minimum(expert, num_experts - 1)
    before = tl.load(block_ends + found - 1, mask=found > 0, other=0)
    first = tl.load(starts + found) + (block - before) * BLOCK_T
    rows = first + tl.arange(0, BLOCK_T)
    is_row = (rows < tl.load(starts + found + 1)) & (expert < num_experts)
    sources = rows
    if GATHER:
        sources = tl.load(tokens + rows, mask=is_row, other=0)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return expert, rows, is_row, sources, outputs


@triton.jit
def _store_block(
    total,
    table,
    expert,
    out,
    rows,
    is_row,
    outputs,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    BIAS: tl.constexpr,
):
    if HAS_BIAS:
        bias = _address(table, expert, 4, BIAS)
        added = tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)
        total += added.to(tl.float32)[None, :]
    tl.store(
        out + rows[:, None] * num_outputs + outputs[None, :],
        rounded(total, out.dtype.element_ty),
        mask=is_row[:, None] & (outputs < num_outputs)[None, :],
    )


@triton.jit
def _float_kernel(
    x,
    tokens,
    table,
    out,
    starts,
    block_ends,
    num_experts,
    num_outputs,
    num_inputs,
    x_stride,
    GATHER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of an expert's rows and outputs. GATHER: x has the tokens, else the rows."""
    expert, rows, is_row, sources, outputs = _block_of(
        starts, block_ends, tokens, num_experts, GATHER, BLOCK_E, BLOCK_T, BLOCK_N
    )
    if expert < num_experts:
        total = product_tile(
            x,
            sources,
            is_row,
            x_stride,
            _address(table, expert, 0, WEIGHT),
            outputs,
            num_outputs,
            num_inputs,
            WIDEN,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
        )
        _store_block(total, table, expert, out, rows, is_row, outputs, num_outputs, HAS_BIAS, BIAS)


@triton.jit
def _quantized_kernel(
    x,
    x_scales,
    tokens,
    table,
    out,
    starts,
    block_ends,
    num_experts,
    num_outputs,
    num_inputs,
    GATHER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUB: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `_float_kernel`, from quantized activations."""
    expert, rows, is_row, sources, outputs = _block_of(
        starts, block_ends, tokens, num_experts, GATHER, BLOCK_E, BLOCK_T, BLOCK_N
    )
    if expert < num_experts:
        total = quantized_tile(
            x,
            x_scales,
            sources,
            is_row,
            _address(table, expert, 0, WEIGHT),
            _address(table, expert, 1, tl.float32),
            _address(table, expert, 2, tl.float32),
            _address(table, expert, 3, tl.int32),
            outputs,
            outputs < num_outputs,
            num_outputs,
            num_inputs,
            GROUP,
            SHARED,
            HALF,
            HAS_ZEROS,
            HAS_SUB,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
        )
        _store_block(total, table, expert, out, rows, is_row, outputs, num_outputs, HAS_BIAS, BIAS)


@triton.jit
def _float8_kernel(
    x,
    x_scales,
    tokens,
    table,
    out,
    starts,
    block_ends,
    num_experts,
    num_outputs,
    num_inputs,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_CAST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `_quantized_kernel`, in e4m3."""
    expert, rows, is_row, sources, outputs = _block_of(
        starts, block_ends, tokens, num_experts, GATHER, BLOCK_E, BLOCK_T, BLOCK_N
    )
    if expert < num_experts:
        total = float8_tile(
            x,
            x_scales,
            sources,
            is_row,
            _address(table, expert, 0, tl.uint8),
            _address(table, expert, 1, tl.float32),
            outputs,
            outputs < num_outputs,
            num_outputs,
            num_inputs,
            GROUP,
            WIDEN,
            HAS_CAST,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
        )
        _store_block(total, table, expert, out, rows, is_row, outputs, num_outputs, HAS_BIAS, BIAS)


@triton.jit
def _combine_kernel(
    x, weights, places, out, num_columns, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of one token's columns: its rows in ascending order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(0, PER_TOKEN):
        row = tl.load(places + token * PER_TOKEN + index)
        value = tl.load(x + row * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row)
    target = out + token * num_columns + columns
    tl.store(target, rounded(total, out.dtype.element_ty), mask=mask)


def _product(x: Tensor, matrices: _Matrices, plan: _Plan, *, gather: bool) -> Tensor:
    """X [T, C] where it is gathered, else [R, C], -> [R, N] of the rows' own experts."""
    weight, num_rows = matrices.form, plan.tokens.shape[0]
    num_experts = matrices.table.shape[0]
    out = torch.empty((num_rows, weight.num_outputs), dtype=x.dtype, device=x.device)
    data = weight.data
    block_t = _BLOCK_T
    if isinstance(data, PackedWeight):
        # bits do not depend on the tile (`quantized_linear`)
        block_t = 16 if num_rows < 32 * num_experts else 64
    block_ends = ((plan.starts.diff() + (block_t - 1)) // block_t).cumsum(0)
    num_blocks = min(num_rows, num_rows // block_t + num_experts)
    grid = (num_blocks, triton.cdiv(weight.num_outputs, _BLOCK_N))
    where = (plan.tokens, matrices.table, out, plan.starts, block_ends, num_experts)
    bias = tl.float32 if matrices.bias_dtype is None else _element(matrices.bias_dtype)
    block_e = triton.next_power_of_2(num_experts)
    if isinstance(data, PackedWeight):
        quants, scales = quantize_tokens(x, data)
        _quantized_kernel[grid](
            quants,
            scales,
            *where,
            weight.num_outputs,
            weight.num_inputs,
            GATHER=gather,
            WEIGHT=_element(data.packed.dtype),
            BIAS=bias,
            HAS_BIAS=weight.bias is not None,
            GROUP=data.group_size,
            SHARED=data.shared_groups,
            HALF=data.half,
            HAS_ZEROS=data.zeros is not None,
            HAS_SUB=data.sub_scales is not None,
            BLOCK_E=block_e,
            BLOCK_T=block_t,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=block_k(data, _MOST_BLOCK_K),
            enable_fp_fusion=False,
        )
        return out
    if isinstance(data, Float8Weight):
        values, scales = quantize_to_float8(x, data)
        _float8_kernel[grid](
            values,
            scales,
            *where,
            weight.num_outputs,
            weight.num_inputs,
            GATHER=gather,
            BIAS=bias,
            HAS_BIAS=weight.bias is not None,
            GROUP=data.group_size,
            WIDEN=x.device.type == "cpu",
            HAS_CAST=has_float8_cast(x.device),
            BLOCK_E=block_e,
            BLOCK_T=block_t,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K,
            enable_fp_fusion=False,
        )
        return out
    assert isinstance(data, Tensor)
    if x.stride(-1) != 1:
        x = x.contiguous()
    _float_kernel[grid](
        x,
        *where,
        weight.num_outputs,
        weight.num_inputs,
        x.stride(0),
        GATHER=gather,
        WEIGHT=_element(data.dtype),
        BIAS=bias,
        HAS_BIAS=weight.bias is not None,
        WIDEN=widens(x, data.dtype),
        BLOCK_E=block_e,
        BLOCK_T=block_t,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
    )
    return out


def _element(dtype: torch.dtype) -> tl.dtype:
    found: tl.dtype = getattr(tl, str(dtype).removeprefix("torch."))
    return found


class TritonExperts:
    """`OpTable.experts`, with the adapters of a `TritonLoRA`."""

    def __init__(self, lora: TritonLoRA) -> None:
        self._lora = lora

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        expert_weights: Tensor,
        weights: ExpertWeights,
        activation: str,
        lora: ExpertLoRA | None,
    ) -> Tensor:
        """X [T, C] -> [T, C]."""
        packed = weights.data
        assert isinstance(packed, _Packed)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_tokens, num_columns = out.shape
        if num_tokens == 0:
            return out
        plan = _plan(chosen, expert_weights, len(weights.gate_up))
        gate_up = _product(x, packed.gate_up, plan, gather=True)
        if lora is not None:
            modules = lora.first_module + 2 * plan.experts
            rows = plan.tokens
            self._lora.add_expert_lora_(gate_up, x[rows], rows, modules, lora.mapping)
        activated = gated_activation(gate_up, activation)
        output = _product(activated, packed.down_proj, plan, gather=False)
        if lora is not None:
            modules = modules + 1
            self._lora.add_expert_lora_(output, activated, rows, modules, lora.mapping)
        _combine_kernel[(num_tokens, triton.cdiv(num_columns, _COMBINE_BLOCK))](
            output,
            plan.weights,
            plan.places,
            out,
            num_columns,
            PER_TOKEN=chosen.shape[1],
            BLOCK=_COMBINE_BLOCK,
            enable_fp_fusion=False,
        )
        return out
