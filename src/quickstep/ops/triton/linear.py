"""Batch-invariant product of activations with a float weight, y = x W^T + b.

The weight is the first factor, out^T = W x^T: of a matrix instruction the outputs are the 64 rows,
and the tokens the 16 to 256 columns, so that the tile fits the number of tokens and the instruction
stays of one family. Each output is summed in fp32, in ascending order of the inputs. A weight with
few outputs and many inputs has slices of inputs (`slice_inputs`), each with a sum of its own, which
are then added in ascending order: of a few tokens by several programs, of which the last one to
arrive adds the slices, else by one. Bits depend on neither, nor on the tile (`ops.triton.tiles`).
"""

from __future__ import annotations

import functools

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quickstep.ops.reference.elementary import ACTIVATIONS
from quickstep.ops.reference.linear import embedding as reference_embedding
from quickstep.ops.tensors import AnyTensor, DType, to_torch, torch_dtype
from quickstep.ops.triton.elementary import activated, gated_activation
from quickstep.ops.triton.float8_linear import Float8Weight, float8_linear, float8_rows
from quickstep.ops.triton.quantized_linear import TritonWeight, quantized_linear, quantized_rows
from quickstep.ops.triton.rounding import rounded
from quickstep.ops.triton.tiles import Tile, tile_of
from quickstep.ops.weights import LinearWeight

_SLICE_UNIT = 128  # inputs: a multiple of every `block_k`
_LEAST_SLICE = 448
_PROGRAMS = 144  # about as many as a GPU runs at once: fewer share the slices of an output
_SPLIT_TILES = 64  # blocks of 64 outputs from which on one program has all inputs of an output
_MOST_SPLIT_TILES = _PROGRAMS // 2  # with more, one program has all slices
_LEAST_TMA_TOKENS = 128  # of a tile: with fewer, a program's own loads are as fast
_MOST_GATED_TOKENS = 64
_GROUP = 8  # blocks of tokens that neighbouring programs share weights with


class FloatWeight(msgspec.Struct, frozen=True):
    """A weight [N, C] in slices of `slice_len` inputs, and how many programs of each of its tiles
    have arrived, all 0 between two products: [_MOST_SPLIT_TILES] int32; None of a weight of one
    slice.
    """

    values: Tensor
    slice_len: int
    arrived: Tensor | None


@triton.jit
def _finish(
    total,
    bias,
    out,
    tokens,
    is_token,
    outputs,
    first_output,
    num_outputs,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store `total` [BLOCK_N, BLOCK_T], complete sums; ACTIVATION: of gates and ups, see below."""
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        added = tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)
        total += added.to(tl.float32)[:, None]
    if ACTIVATION != "":
        # as if the product had been stored
        total = rounded(total, dtype).to(tl.float32)
        halves = tl.permute(tl.reshape(total, (2, BLOCK_N // 2, BLOCK_T)), (1, 2, 0))
        gate, up = tl.split(halves)
        num_outputs = num_outputs // 2
        outputs = first_output + tl.arange(0, BLOCK_N // 2)
        total = activated(gate, up, ACTIVATION)
    target = out + tokens[:, None] * num_outputs + outputs[None, :]
    mask = is_token[:, None] & (outputs[None, :] < num_outputs)
    tl.store(target, rounded(tl.trans(total), dtype), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    num_tokens,
    num_outputs,
    num_inputs,
    x_stride,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile [BLOCK_T, BLOCK_N] of the output, or some of its slices.

    Program ids are (tile, part of the slices). TMA: x and the weight are descriptors of their
    tiles. ACTIVATION: half of the tile's outputs are gates and half their ups, and the output is
    the activation. PROGRAMS: those of a tile; above 1, each stores its slices in `partial`
    [tiles, NUM_SLICES, BLOCK_N, BLOCK_T], and the last one to arrive adds them all.
    """
    num_token_blocks = tl.cdiv(num_tokens, BLOCK_T)
    num_output_blocks = tl.cdiv(num_outputs, BLOCK_N)
    tile = tl.program_id(0)
    # neighbours have the same weights
    group_size = GROUP * num_output_blocks
    first_block = tile // group_size * GROUP
    num_in_group = tl.minimum(num_token_blocks - first_block, GROUP)
    token_block = first_block + tile % group_size % num_in_group
    output_block = tile % group_size // num_in_group

    tokens = token_block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    lanes = tl.arange(0, BLOCK_N)
    if ACTIVATION != "":
        first_output = output_block * (BLOCK_N // 2)
        half = num_outputs // 2
        up = tl.where(lanes < BLOCK_N // 2, 0, half - BLOCK_N // 2)
        # past the last gate: another row, whose product is not stored
        outputs = tl.minimum(first_output + lanes + up, num_outputs - 1)
    else:
        first_output = output_block * BLOCK_N
        outputs = first_output + lanes
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)

    num_blocks = tl.cdiv(num_inputs, BLOCK_K)
    per_program: tl.constexpr = NUM_SLICES // PROGRAMS
    part = tl.program_id(1)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    slice_total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    mine = lanes[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    if PROGRAMS > 1:
        slots = partial + tile.to(tl.int64) * (NUM_SLICES * BLOCK_N * BLOCK_T) + mine
    first = part * per_program * SLICE_BLOCKS
    last = tl.minimum(first + per_program * SLICE_BLOCKS, num_blocks)
    if not TMA:
        weight_rows = weight + rows * num_inputs
    for block in range(first, last):
        k = block * BLOCK_K
        if TMA:
            a = weight.load([first_output, k])
            b = tl.trans(x.load([token_block * BLOCK_T, k]))
        else:
            inputs = k + tl.arange(0, BLOCK_K)
            x_mask, w_mask = is_token[None, :], None
            if not EVEN_K:
                x_mask = x_mask & (inputs[:, None] < num_inputs)
                w_mask = inputs[None, :] < num_inputs
            a = tl.load(
                weight_rows[:, None] + inputs[None, :],
                mask=w_mask,
                other=None if EVEN_K else 0.0,
            )
            b = tl.load(x + tokens[None, :] * x_stride + inputs[:, None], mask=x_mask, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        slice_total = tl.dot(a, b, slice_total, input_precision="ieee")
        if NUM_SLICES > 1 and ((block + 1) % SLICE_BLOCKS == 0 or block + 1 == num_blocks):
            if PROGRAMS > 1:
                place = slots + block // SLICE_BLOCKS * (BLOCK_N * BLOCK_T)
                tl.store(place, slice_total, mask=is_token[None, :])
            else:
                total += slice_total
            slice_total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    if NUM_SLICES == 1:
        total = slice_total
    is_last = True
    if PROGRAMS > 1:
        tl.debug_barrier()  # all threads have stored
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PROGRAMS - 1
    if is_last:
        if PROGRAMS > 1:
            tl.store(arrived + tile, 0)
            for number in tl.static_range(NUM_SLICES):
                place = slots + number * (BLOCK_N * BLOCK_T)
                total += tl.load(place, mask=is_token[None, :], other=0.0, cache_modifier=".cg")
        _finish(
            total,
            bias,
            out,
            tokens,
            is_token,
            outputs,
            first_output,
            num_outputs,
            ACTIVATION,
            HAS_BIAS,
            BLOCK_T,
            BLOCK_N,
        )


def slice_inputs(num_outputs: int, num_inputs: int) -> int:
    """Inputs of a slice of a weight [N, C]. They decide the bits: a part of a weight has the slices
    of the complete one.
    """
    num_tiles = triton.cdiv(num_outputs, 64)
    num_slices = 1
    if num_tiles < _SPLIT_TILES:
        num_slices = max(1, min(4, num_inputs // _LEAST_SLICE, _PROGRAMS // num_tiles))
        num_slices = 1 << (num_slices.bit_length() - 1)
    return -(-num_inputs // (num_slices * _SLICE_UNIT)) * _SLICE_UNIT


def widens(x: Tensor, weight_dtype: torch.dtype) -> bool:
    """Whether a product is of fp32 factors: of different dtypes, and where kernels are interpreted,
    as products of bf16 are then not those of a GPU (fp32 ones of bf16 factors are exact).
    """
    return x.device.type == "cpu" or x.dtype == torch.float32 or x.dtype != weight_dtype


def pack_linear(
    weight: AnyTensor, bias: AnyTensor | None, complete_outputs: int | None = None
) -> LinearWeight:
    """Weight [N, C], bias [N] or None; the weight itself if it is contiguous. `complete_outputs`:
    of the matrix of which these outputs are a part (`OpTable.pack_part`).
    """
    data, bias = to_torch(weight).contiguous(), None if bias is None else to_torch(bias)
    num_outputs, num_inputs = data.shape
    nbytes = data.nbytes + (0 if bias is None else bias.nbytes)
    slice_len, arrived = slice_inputs(complete_outputs or num_outputs, num_inputs), None
    if slice_len < num_inputs:
        arrived = torch.zeros(_MOST_SPLIT_TILES, dtype=torch.int32, device=data.device)
    held = FloatWeight(data, slice_len, arrived)
    return LinearWeight(held, bias, num_outputs, num_inputs, nbytes)


def embedding(
    token_ids: Tensor, weight: AnyTensor | LinearWeight, dtype: DType | torch.dtype
) -> Tensor:
    """token_ids [T], weight [V, C] -> [T, C] in `dtype`, the weight's own where it has one."""
    if not isinstance(weight, LinearWeight):
        return reference_embedding(token_ids, weight, dtype)
    if isinstance(weight.data, TritonWeight):
        return quantized_rows(token_ids, weight, torch_dtype(dtype))
    if isinstance(weight.data, Float8Weight):
        return float8_rows(token_ids, weight, torch_dtype(dtype))
    assert isinstance(weight.data, FloatWeight)
    return reference_embedding(token_ids, weight.data.values, dtype)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0."""
    return tiled_linear(x, weight)


def gated_linear(x: Tensor, weight: LinearWeight, kind: str) -> Tensor:
    """`gated_activation` of `linear`, x [T, C] -> [T, N / 2], with its bits."""
    is_small = 0 < x.shape[0] <= _MOST_GATED_TOKENS
    if is_small and isinstance(weight.data, FloatWeight) and kind in ACTIVATIONS:
        return _float_linear(x, weight, None, kind)
    return gated_activation(linear(x, weight), kind)


def tiled_linear(x: Tensor, weight: LinearWeight, tile: Tile | None = None) -> Tensor:
    """`linear`, with a tile other than that of the weight's shape, if given."""
    data = weight.data
    if isinstance(data, TritonWeight):
        return quantized_linear(x, weight, tile)
    if isinstance(data, Float8Weight):
        return float8_linear(x, weight, tile)
    return _float_linear(x, weight, tile, "")


def _float_linear(x: Tensor, weight: LinearWeight, tile: Tile | None, activation: str) -> Tensor:
    data = weight.data
    assert isinstance(data, FloatWeight)
    if x.stride(-1) != 1:
        x = x.contiguous()
    (num_tokens, num_inputs), num_outputs = x.shape, weight.num_outputs
    out = x.new_empty(num_tokens, num_outputs // 2 if activation else num_outputs)
    if out.numel() == 0:
        return out
    is_wide = widens(x, data.values.dtype)
    kind = "float" if data.arrived is None else "sliced float"
    if is_wide and x.device.type == "cuda":
        kind = "float in fp32"
    own_tile, block_k = tile_of(x, kind, num_outputs)
    if tile is not None:
        block_k = tile.block_k or block_k
    tile = tile or own_tile
    num_token_blocks = triton.cdiv(num_tokens, tile.block_t)
    num_tiles = num_token_blocks * triton.cdiv(num_outputs, tile.block_n)
    num_slices = triton.cdiv(num_inputs, data.slice_len)
    programs = 1
    if data.arrived is not None:
        while programs < num_slices and 2 * programs * num_tiles <= _PROGRAMS:
            programs *= 2
    partial = None
    if programs > 1:
        shape = (num_tiles, num_slices, tile.block_n, tile.block_t)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    values = data.values
    inputs: object = x
    factor: object = values
    has_tma = not activation and _has_tma(x, values, tile.block_t)
    if has_tma:
        inputs = TensorDescriptor.from_tensor(x, [tile.block_t, block_k])
        factor = TensorDescriptor.from_tensor(values, [tile.block_n, block_k])
    _linear_kernel[(num_tiles, programs)](
        inputs,
        factor,
        weight.bias,
        out,
        partial,
        data.arrived,
        num_tokens,
        num_outputs,
        num_inputs,
        x.stride(0),
        ACTIVATION=activation,
        HAS_BIAS=weight.bias is not None,
        WIDEN=is_wide,
        TMA=has_tma,
        EVEN_K=num_inputs % block_k == 0,
        NUM_SLICES=num_slices,
        SLICE_BLOCKS=data.slice_len // block_k,
        PROGRAMS=programs,
        GROUP=_GROUP,
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def _has_tma(x: Tensor, weight: Tensor, block_t: int) -> bool:
    """Whether the tensor memory accelerator can load the tiles: bf16 and fp16 in rows of multiples
    of 16 bytes.
    """
    if block_t < _LEAST_TMA_TOKENS or x.dtype.itemsize != 2 or x.dtype != weight.dtype:
        return False
    rows = (x.stride(0), weight.stride(0))
    if any(2 * row % 16 for row in rows) or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    return x.device.type == "cpu" or _has_tma_unit(x.device.index or 0)


@functools.cache
def _has_tma_unit(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9
