"""Batch-invariant product of activations with a float weight, y = x W^T + b.

Each output is summed in fp32 over blocks of inputs in ascending order, by one program: no split
over K. The tile is that of the weight's shape (`ops.triton.tiles`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.linear import embedding as reference_embedding
from quickstep.ops.table import LinearWeight
from quickstep.ops.tensors import AnyTensor, DType, to_torch, torch_dtype
from quickstep.ops.triton.float8_linear import Float8Weight, float8_linear, float8_rows
from quickstep.ops.triton.quantized_linear import PackedWeight, quantized_linear, quantized_rows
from quickstep.ops.triton.rounding import rounded
from quickstep.ops.triton.tiles import Tile, tile_of

__all__ = ["embedding", "linear", "pack_linear", "product_tile", "tiled_linear", "widens"]


@triton.jit
def product_tile(
    x,
    rows,
    is_row,
    x_stride,
    weight,
    outputs,
    num_outputs,
    num_inputs,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_T, BLOCK_N] fp32: `rows` of x times `outputs` of the weight [N, C].

    WIDEN: multiply in fp32, else in the dtype of both.
    """
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        x_mask = is_row[:, None] & (inputs[None, :] < num_inputs)
        w_mask = (inputs[:, None] < num_inputs) & (outputs[None, :] < num_outputs)
        a = tl.load(x + rows[:, None] * x_stride + inputs[None, :], mask=x_mask, other=0.0)
        b = tl.load(
            weight + outputs[None, :] * num_inputs + inputs[:, None], mask=w_mask, other=0.0
        )
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total += tl.dot(a, b, input_precision="ieee")
    return total


@triton.jit
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    num_tokens,
    num_outputs,
    num_inputs,
    x_stride,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile [BLOCK_T, BLOCK_N] of the output."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = product_tile(
        x,
        tokens,
        tokens < num_tokens,
        x_stride,
        weight,
        outputs,
        num_outputs,
        num_inputs,
        WIDEN,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_BIAS:
        added = tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)
        total += added.to(tl.float32)[None, :]
    mask = (tokens[:, None] < num_tokens) & (outputs[None, :] < num_outputs)
    tl.store(
        out + tokens[:, None] * num_outputs + outputs[None, :],
        rounded(total, out.dtype.element_ty),
        mask=mask,
    )


def widens(x: Tensor, weight_dtype: torch.dtype) -> bool:
    """Whether a product is of fp32 factors: of different dtypes, and where kernels are interpreted,
    as products of bf16 are then not those of a GPU (fp32 ones of bf16 factors are exact).
    """
    return x.device.type == "cpu" or x.dtype == torch.float32 or x.dtype != weight_dtype


def pack_linear(weight: AnyTensor, bias: AnyTensor | None) -> LinearWeight:
    """Weight [N, C], bias [N] or None; the weight itself if it is contiguous."""
    data, bias = to_torch(weight).contiguous(), None if bias is None else to_torch(bias)
    num_outputs, num_inputs = data.shape
    nbytes = data.nbytes + (0 if bias is None else bias.nbytes)
    return LinearWeight(data, bias, num_outputs, num_inputs, nbytes)


def embedding(
    token_ids: Tensor, weight: AnyTensor | LinearWeight, dtype: DType | torch.dtype
) -> Tensor:
    """token_ids [T], weight [V, C] -> [T, C] in `dtype`, the weight's own where it has one."""
    if isinstance(weight, LinearWeight) and isinstance(weight.data, PackedWeight):
        return quantized_rows(token_ids, weight, torch_dtype(dtype))
    if isinstance(weight, LinearWeight) and isinstance(weight.data, Float8Weight):
        return float8_rows(token_ids, weight, torch_dtype(dtype))
    return reference_embedding(token_ids, weight, dtype)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0."""
    return tiled_linear(x, weight)


def tiled_linear(x: Tensor, weight: LinearWeight, tile: Tile | None = None) -> Tensor:
    """`linear`, with a tile other than that of the weight's shape, if given."""
    data = weight.data
    if isinstance(data, PackedWeight):
        return quantized_linear(x, weight, tile)
    if isinstance(data, Float8Weight):
        return float8_linear(x, weight, tile)
    assert isinstance(data, Tensor)
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_tokens, num_outputs = x.shape[0], weight.num_outputs
    out = x.new_empty(num_tokens, num_outputs)
    if out.numel() == 0:
        return out
    own_tile, block_k = tile_of(x, "float", num_outputs)
    tile = tile or own_tile
    grid = (triton.cdiv(num_tokens, tile.block_t), triton.cdiv(num_outputs, tile.block_n))
    _linear_kernel[grid](
        x,
        data,
        weight.bias,
        out,
        num_tokens,
        num_outputs,
        weight.num_inputs,
        x.stride(0),
        HAS_BIAS=weight.bias is not None,
        WIDEN=widens(x, data.dtype),
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
