"""A mixture of experts as grouped products: all experts of a layer in one launch per matrix.

A plan (`ops.triton.routing`) lists the rows of each expert, which are cut into blocks from the
first one on. A program multiplies one block with one block of its expert's outputs: each sum runs
over blocks of inputs in ascending order, so the bits of a row do not depend on its place or on how
many rows its expert has. Which expert a program has is read from the device, and the grid is the
most blocks there can be: nothing is read back. The matrices of experts stay where they were packed;
a table has their addresses. Without adapters, the product of gates and ups applies the activation.

`_combine_kernel` adds a token's experts in ascending order in fp32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import triton
import triton.language as tl
from msgspec.structs import replace
from torch import Tensor

from quickstep.ops.table import (
    WITHOUT_GATE,
    ExpertLoRA,
    ExpertParts,
    ExpertWeights,
    Routing,
)
from quickstep.ops.triton.elementary import activated, check_activation, gated_activation
from quickstep.ops.triton.elementary import activation as ungated_activation
from quickstep.ops.triton.float8_linear import (
    Float8Weight,
    float8_tile,
    has_float8_cast,
    quantize_to_float8,
    widens_float8,
)
from quickstep.ops.triton.linear import FloatWeight, widens
from quickstep.ops.triton.lora import TritonLoRA
from quickstep.ops.triton.quantized_linear import (
    TritonWeight,
    block_k,
    quantize_tokens,
    quantized_tile,
)
from quickstep.ops.triton.rounding import rounded
from quickstep.ops.triton.routing import RoutingPlan, plan_of
from quickstep.ops.weights import LinearWeight

_BLOCK_N = 64
_BLOCK_K = 64  # of weights in floating point, in every tile
_MOST_BLOCK_K = 128  # of quantized weights
_FLOAT8_BLOCK_T = 32  # for every number of rows
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


class _PackedExperts(msgspec.Struct, frozen=True):
    gate_up: _Matrices
    down_proj: _Matrices


def pack_experts(
    gate_up: tuple[LinearWeight, ...], down_proj: tuple[LinearWeight, ...]
) -> object | None:
    """Tables of the matrices' addresses; None where they are not all of one form."""
    tables = [_matrices(gate_up), _matrices(down_proj)]
    if tables[0] is None or tables[1] is None:
        return None
    return _PackedExperts(tables[0], tables[1])


def _matrices(weights: Sequence[LinearWeight]) -> _Matrices | None:
    rows = [
        [0 if tensor is None else tensor.data_ptr() for tensor in _tensors(weight)]
        for weight in weights
    ]
    forms = {_form(weight) for weight in weights}
    if len(forms) > 1 or any(address % _ALIGNMENT for row in rows for address in row):
        return None
    tensors = [tensor for weight in weights for tensor in _tensors(weight) if tensor is not None]
    device = tensors[0].device
    assert all([tensor.device == device for tensor in tensors]), "kernels read all of them"
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    bias = weights[0].bias
    return _Matrices(table, weights[0], None if bias is None else bias.dtype)


def _tensors(weight: LinearWeight) -> tuple[Tensor | None, ...]:
    data = weight.data
    if isinstance(data, TritonWeight):
        return data.packed, data.scales, data.zeros, data.sub_scales, weight.bias
    if isinstance(data, Float8Weight):
        return data.packed, data.scales, None, None, weight.bias
    assert isinstance(data, FloatWeight)
    return data.values, None, None, None, weight.bias


def _form(weight: LinearWeight) -> tuple[object, ...]:
    """What all experts must have in common."""
    kinds = tuple(
        None if tensor is None else (tensor.dtype, tensor.shape) for tensor in _tensors(weight)
    )
    data = weight.data
    if isinstance(data, TritonWeight):
        return *kinds, data.group_size, data.shared_groups, data.half
    if isinstance(data, Float8Weight):
        return *kinds, data.group_size, "float8"
    return kinds


@triton.jit
def _address(table, expert, FIELD: tl.constexpr, DTYPE: tl.constexpr):
    pointer = tl.load(table + expert * _FIELDS + FIELD).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _block_of(
    starts,
    plan_rows,
    num_experts,
    width,
    PER_TOKEN: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The expert of this program, `num_experts` if it has none; its rows, which of them there are,
    the rows of x that they read, the outputs of the weight, and which of them there are.

    With an activation, a gate and its up are neighbours.
    """
    block = tl.program_id(0)
    numbers = tl.arange(0, BLOCK_E)
    is_expert = numbers < num_experts
    first = tl.load(starts + numbers, mask=is_expert, other=0)
    end = tl.load(starts + numbers + 1, mask=is_expert, other=0)
    blocks = (end - first + (BLOCK_T - 1)) // BLOCK_T
    is_before = is_expert & (tl.cumsum(blocks, 0) <= block)
    expert = tl.sum(is_before.to(tl.int32), 0)
    blocks_before = tl.sum(tl.where(is_before, blocks, 0), 0)
    found = tl.minimum(expert, num_experts - 1)
    places = tl.load(starts + found) + (block - blocks_before) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = (places < tl.load(starts + found + 1)) & (expert < num_experts)
    rows = tl.load(plan_rows + places, mask=is_row, other=0).to(tl.int64)
    sources = rows // PER_TOKEN if GATHER else rows
    index = tl.arange(0, BLOCK_N)
    if ACTIVATION == "":
        outputs = tl.program_id(1).to(tl.int64) * BLOCK_N + index
        is_output = outputs < width
    else:
        of_pair = tl.program_id(1).to(tl.int64) * (BLOCK_N // 2) + index // 2
        outputs = of_pair + (index % 2) * width
        is_output = of_pair < width
    return expert, rows, is_row, sources, outputs, is_output


@triton.jit
def _store_block(
    total,
    table,
    expert,
    out,
    rows,
    is_row,
    outputs,
    is_output,
    width,
    HAS_BIAS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """With the bias, and the activation of what was rounded, as without one it would be stored."""
    if HAS_BIAS:
        bias = _address(table, expert, 4, BIAS)
        added = tl.load(bias + outputs, mask=is_output, other=0.0)
        total += added.to(tl.float32)[None, :]
    if ACTIVATION == "":
        columns = outputs
    else:
        total = rounded(total, out.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.reshape(total, (BLOCK_T, BLOCK_N // 2, 2)))
        total = activated(gate, up, ACTIVATION)
        columns = tl.program_id(1).to(tl.int64) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(
        out + rows[:, None] * width + columns[None, :],
        rounded(total, out.dtype.element_ty),
        mask=is_row[:, None] & (columns < width)[None, :],
    )


@triton.jit
def _float_tile(
    x,
    rows,
    is_row,
    x_stride,
    weight,
    outputs,
    is_output,
    num_inputs,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_T, BLOCK_N] fp32: `rows` of x times `outputs` of the weight [N, C].

    The weight is on the side of the matrix instruction that is always 64 high: instructions for 16
    rows and for 256 add inputs in the same order. WIDEN: multiply in fp32, else in the dtype of
    both.
    """
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        is_input = inputs < num_inputs
        a = tl.load(
            weight + outputs[:, None] * num_inputs + inputs[None, :],
            mask=is_output[:, None] & is_input[None, :],
            other=0.0,
        )
        b = tl.load(
            x + rows[None, :] * x_stride + inputs[:, None],
            mask=is_row[None, :] & is_input[:, None],
            other=0.0,
        )
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    return tl.trans(total)


@triton.jit
def _float_kernel(
    x,
    plan_rows,
    table,
    out,
    starts,
    num_experts,
    width,
    num_inputs,
    x_stride,
    PER_TOKEN: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    expert, rows, is_row, sources, outputs, is_output = _block_of(
        starts,
        plan_rows,
        num_experts,
        width,
        PER_TOKEN,
        GATHER,
        ACTIVATION,
        BLOCK_E,
        BLOCK_T,
        BLOCK_N,
    )
    if expert < num_experts:
        total = _float_tile(
            x,
            sources,
            is_row,
            x_stride,
            _address(table, expert, 0, WEIGHT),
            outputs,
            is_output,
            num_inputs,
            WIDEN,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
        )
        _store_block(
            total,
            table,
            expert,
            out,
            rows,
            is_row,
            outputs,
            is_output,
            width,
            HAS_BIAS,
            BIAS,
            ACTIVATION,
            BLOCK_T,
            BLOCK_N,
        )


@triton.jit
def _quantized_kernel(
    x,
    x_scales,
    plan_rows,
    table,
    out,
    starts,
    num_experts,
    width,
    num_inputs,
    PER_TOKEN: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    expert, rows, is_row, sources, outputs, is_output = _block_of(
        starts,
        plan_rows,
        num_experts,
        width,
        PER_TOKEN,
        GATHER,
        ACTIVATION,
        BLOCK_E,
        BLOCK_T,
        BLOCK_N,
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
            is_output,
            width * 2 if ACTIVATION != "" else width,
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
        _store_block(
            total,
            table,
            expert,
            out,
            rows,
            is_row,
            outputs,
            is_output,
            width,
            HAS_BIAS,
            BIAS,
            ACTIVATION,
            BLOCK_T,
            BLOCK_N,
        )


@triton.jit
def _float8_kernel(
    x,
    x_scales,
    plan_rows,
    table,
    out,
    starts,
    num_experts,
    width,
    num_inputs,
    PER_TOKEN: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    expert, rows, is_row, sources, outputs, is_output = _block_of(
        starts,
        plan_rows,
        num_experts,
        width,
        PER_TOKEN,
        GATHER,
        ACTIVATION,
        BLOCK_E,
        BLOCK_T,
        BLOCK_N,
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
            is_output,
            width * 2 if ACTIVATION != "" else width,
            num_inputs,
            GROUP,
            WIDEN,
            HAS_CAST,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
        )
        _store_block(
            total,
            table,
            expert,
            out,
            rows,
            is_row,
            outputs,
            is_output,
            width,
            HAS_BIAS,
            BIAS,
            ACTIVATION,
            BLOCK_T,
            BLOCK_N,
        )


@triton.jit
def _combine_kernel(
    x,
    chosen,
    weights,
    out,
    num_columns,
    PER_TOKEN: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one token's columns: its rows in ascending order of their experts."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    choices = tl.arange(0, BLOCK_A)
    is_left = choices < PER_TOKEN
    experts = tl.load(chosen + token * PER_TOKEN + choices, mask=is_left, other=0).to(tl.int32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in tl.static_range(PER_TOKEN):
        lowest = tl.min(tl.where(is_left, experts, 0x7FFFFFFF), 0)
        choice = tl.min(tl.where(is_left & (experts == lowest), choices, BLOCK_A), 0)
        is_left = is_left & (choices != choice)
        row = token * PER_TOKEN + choice
        value = tl.load(x + row * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row)
    target = out + token * num_columns + columns
    tl.store(target, rounded(total, out.dtype.element_ty), mask=mask)


def _float_form(x: Tensor, weight: Tensor, rows_per_expert: int) -> dict[str, object]:
    """How a product of floats is compiled, by the rows that an expert has on average."""
    if widens(x, weight.dtype):  # by fused multiply-adds: the tile never changes
        block_t, block_n, num_warps, num_stages = 16, 64, 4, 3
    elif rows_per_expert <= 16:
        block_t, block_n, num_warps, num_stages = 16, 64, 4, 6
    elif rows_per_expert <= 64:
        block_t, block_n, num_warps, num_stages = 64, 64, 4, 4
    else:
        block_t, block_n, num_warps, num_stages = 128, 128, 8, 3  # 96 KiB: all GPUs have them
    return {
        "WEIGHT": _element(weight.dtype),
        "WIDEN": widens(x, weight.dtype),
        "BLOCK_T": block_t,
        "BLOCK_N": block_n,
        "BLOCK_K": _BLOCK_K,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _product(
    x: Tensor,
    matrices: _Matrices,
    plan: RoutingPlan,
    per_token: int,
    *,
    gather: bool = False,
    activation: str = "",
) -> Tensor:
    """X [T, C] where it is gathered, else [R, C], -> [R, N] of the rows' own experts, or
    [R, N / 2] with an activation, of gates and ups.
    """
    weight, num_rows = matrices.form, plan.rows.shape[0]
    num_experts, data = matrices.table.shape[0], weight.data
    width = weight.num_outputs // 2 if activation else weight.num_outputs
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    rows_per_expert = num_rows // num_experts
    kernel: triton.JITFunction
    sources: tuple[Tensor, ...]
    if isinstance(data, TritonWeight):
        kernel, sources = _quantized_kernel, quantize_tokens(x, data)
        form: dict[str, object] = {
            "WEIGHT": _element(data.packed.dtype),
            "GROUP": data.group_size,
            "SHARED": data.shared_groups,
            "HALF": data.half,
            "HAS_ZEROS": data.zeros is not None,
            "HAS_SUB": data.sub_scales is not None,
            # bits do not depend on the tile (`quantized_linear`)
            "BLOCK_T": 16 if rows_per_expert < 32 else 64,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": block_k(data, _MOST_BLOCK_K),
        }
    elif isinstance(data, Float8Weight):
        kernel, sources = _float8_kernel, quantize_to_float8(x, data)
        form = {
            "GROUP": data.group_size,
            "WIDEN": widens_float8(x.dtype, x.device),
            "HAS_CAST": has_float8_cast(x.device),
            "BLOCK_T": _FLOAT8_BLOCK_T,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": _BLOCK_K,
        }
    else:
        assert isinstance(data, FloatWeight)
        x = x if x.stride(-1) == 1 else x.contiguous()
        kernel, sources = _float_kernel, (x,)
        form = _float_form(x, data.values, rows_per_expert)
    block_t, block_n = form["BLOCK_T"], form["BLOCK_N"]
    assert isinstance(block_t, int) and isinstance(block_n, int)
    grid = (
        min(num_rows, num_rows // block_t + num_experts),
        triton.cdiv(width, block_n // 2 if activation else block_n),
    )
    kernel[grid](
        *sources,
        plan.rows,
        matrices.table,
        out,
        plan.starts,
        num_experts,
        width,
        weight.num_inputs,
        *((x.stride(0),) if kernel is _float_kernel else ()),
        PER_TOKEN=per_token,
        GATHER=gather,
        ACTIVATION=activation,
        BIAS=tl.float32 if matrices.bias_dtype is None else _element(matrices.bias_dtype),
        HAS_BIAS=weight.bias is not None,
        BLOCK_E=triton.next_power_of_2(num_experts),
        enable_fp_fusion=False,
        **form,
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
        routing: Routing,
        weights: ExpertWeights,
        activation: str,
        lora: ExpertLoRA | None,
        parts: ExpertParts | None = None,
    ) -> Tensor:
        """X [T, C] -> [T, N]: of ranks, N are this one's outputs."""
        packed = weights.data
        assert isinstance(packed, _PackedExperts)
        if weights.weighs_inputs:
            return self._of_weighted(x, routing, weights, activation, lora, parts)
        has_gate = activation not in WITHOUT_GATE
        if has_gate:
            check_activation(activation)
        num_tokens, num_columns = x.shape[0], packed.down_proj.form.num_outputs
        out = x.new_empty((num_tokens, num_columns))
        if num_tokens == 0:
            return out
        chosen, per_token = routing.chosen, routing.chosen.shape[1]
        num_experts, plan = len(weights.gate_up), routing.plan
        if not isinstance(plan, RoutingPlan):
            plan = plan_of(chosen, num_experts)
        is_changed = lora is not None and self._lora.changes_experts(
            lora.first_module, num_experts, lora.mapping
        )
        if is_changed or not has_gate:
            gate_up = _product(x, packed.gate_up, plan, per_token, gather=True)
            if is_changed and lora is not None:
                self._lora.add_expert_lora_(
                    gate_up, x, chosen, lora.first_module, num_experts, lora.mapping
                )
            middle = (
                gated_activation(gate_up, activation)
                if has_gate
                else ungated_activation(gate_up, None, activation)
            )
        else:
            middle = _product(
                x, packed.gate_up, plan, per_token, gather=True, activation=activation
            )
        if parts is not None:
            middle = parts.ranks.gather(middle, parts.own, packed.down_proj.form.num_inputs)
        output = _product(middle, packed.down_proj, plan, per_token)
        if lora is not None:
            self._lora.add_expert_lora_(
                output, middle, chosen, lora.first_module + 1, num_experts, lora.mapping
            )
        _combine_kernel[(num_tokens, triton.cdiv(num_columns, _COMBINE_BLOCK))](
            output,
            chosen,
            routing.weights,
            out,
            num_columns,
            PER_TOKEN=per_token,
            BLOCK_A=triton.next_power_of_2(per_token),
            BLOCK=_COMBINE_BLOCK,
            enable_fp_fusion=False,
        )
        return out

    def _of_weighted(
        self,
        x: Tensor,
        routing: Routing,
        weights: ExpertWeights,
        activation: str,
        lora: ExpertLoRA | None,
        parts: ExpertParts | None,
    ) -> Tensor:
        """Each expert of a token reads a token of its own, weighted; their outputs are added in the
        order of the experts.
        """
        num_tokens, per_token = routing.chosen.shape
        order = routing.chosen.argsort(dim=1)
        chosen = routing.chosen.gather(1, order).view(-1, 1)
        factors = routing.weights.gather(1, order).view(-1, 1)
        rows = (x.repeat_interleave(per_token, 0).float() * factors).to(x.dtype)
        assert lora is None or per_token == 1, "adapters are of a step's tokens"
        plain, ones = replace(weights, weighs_inputs=False), torch.ones_like(factors)
        outputs = self(rows, Routing(chosen, ones), plain, activation, lora, parts)
        total = outputs.view(num_tokens, per_token, -1).float()
        result = total[:, 0]
        for column in range(1, per_token):
            result = result + total[:, column]
        return result.to(x.dtype)
