"""Linear layers, y = x W^T + b, on float and on quantized weights; rows of a table.

Float weights: each output is an exact sum per chunk of inputs, and the chunks are added in order.
Factors are rounded to a few bits below the largest element of their row and chunk, so that BLAS can
add in any order (`exact_math`); the weight once, when it is packed, in its own dtype. It is widened
to fp64 block by block during the product: on one core 0.15 ns an element, against 0.4 ns for
reading it in a one-row product, and no copy of the model is kept.

Quantized weights: the activations are quantized too, and all sums are exact.

    scale[t, g] = max |x[t, g, :]| / 127        quants q = round(x * (127 / max)), half to even
    y[t, n] = sum over g of (sum over i of q (quant - zero)) * scale[t, g] * scales[n, g]

The groups are the weight's; a weight with one scale per output takes a row as one group. Groups of
4 bits share the activations' scale, up to 128 inputs: a small loss next to that of 4 bits, and
one product less per group. A weight with sub-block scales is multiplied by them first, to 8 bits.
Scales and quantized values of activations are computed in float32, as in every implementation; the
rest is float64 over integers, so that the order of products cannot change a bit.

Weights in e4m3: the same with 448 in place of 127, and q rounded to e4m3. Products of two such
numbers are multiples of 2**-18 below 2**18, so that their sums in float64 are exact as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.ops.reference.exact_math import round_rows, sum_bits
from quickstep.ops.tensors import FLOAT8_MAX, AnyTensor, DType, to_float8, to_torch, torch_dtype
from quickstep.ops.weights import LinearWeight, QuantizedWeight

_BLOCK_ELEMENTS = 1 << 18  # of a weight in fp64 at a time: 2 MiB, stays in cache


def _chunk(dtype: torch.dtype) -> int:
    """Channels per exact sum: fp32 factors keep 23 bits, 16-bit ones 21."""
    return 128 if dtype == torch.float32 else 2048


def _round_chunks(x: Tensor, chunk: int) -> list[Tensor]:
    return [round_rows(part.double(), sum_bits(chunk)) for part in torch.split(x, chunk, dim=-1)]


def _row_blocks(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    step = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
    return [(start, min(num_rows, start + step)) for start in range(0, num_rows, step)]


def pack_linear(weight: AnyTensor, bias: AnyTensor | None) -> LinearWeight:
    """Weight [N, C], bias [N] or None. The weight itself is kept where no rounding was needed."""
    weight, bias = to_torch(weight), None if bias is None else to_torch(bias)
    num_outputs, num_inputs = weight.shape
    data = round_weight(weight, weight.dtype)
    nbytes = data.nbytes + (0 if bias is None else bias.nbytes)
    return LinearWeight(data, bias, num_outputs, num_inputs, nbytes)


def round_weight(weight: Tensor, inputs_dtype: torch.dtype) -> Tensor:
    """The weight [N, C] for `exact_product` with inputs of a dtype: itself if unchanged."""
    rounded = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for start, stop in _row_blocks(*weight.shape):
        parts = _round_chunks(weight[start:stop], _chunk(inputs_dtype))
        rounded[start:stop] = torch.cat(parts, dim=-1)
    return weight if weight.is_contiguous() and torch.equal(weight, rounded) else rounded


def exact_product(x: Tensor, weight: Tensor, inputs_dtype: torch.dtype) -> Tensor:
    """X [T, C] and a rounded weight [N, C] -> [T, N] float64, exact per chunk."""
    chunk = _chunk(inputs_dtype)
    return _sum_of_chunks(_round_chunks(x, chunk), weight, chunk)


def _sum_of_chunks(inputs: list[Tensor], weight: Tensor, chunk: int) -> Tensor:
    """Rounded chunks [T, chunk] and a rounded weight [N, C] -> [T, N] float64."""
    wide = torch.split(weight.double(), chunk, dim=-1)
    total = inputs[0] @ wide[0].t()
    for part, block in zip(inputs[1:], wide[1:], strict=True):
        total += part @ block.t()
    return total


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0."""
    data = weight.data
    if isinstance(data, QuantizedWeight):
        return quantized_linear(x, weight)
    assert isinstance(data, Tensor)
    out = x.new_empty(x.shape[0], weight.num_outputs)
    if out.numel() == 0:
        return out
    chunk = _chunk(data.dtype)
    inputs = _round_chunks(x, chunk)
    bias = None if weight.bias is None else weight.bias.double()
    for start, stop in _row_blocks(weight.num_outputs, weight.num_inputs):
        total = _sum_of_chunks(inputs, data[start:stop], chunk)
        if bias is not None:
            total += bias[start:stop]
        out[:, start:stop] = total.float()
    return out


def embedding(
    token_ids: Tensor, weight: AnyTensor | LinearWeight, dtype: DType | torch.dtype
) -> Tensor:
    """token_ids [T], weight [V, C] -> [T, C] in `dtype`, the weight's own where it has one."""
    data = weight.data if isinstance(weight, LinearWeight) else to_torch(weight)
    if isinstance(data, QuantizedWeight):
        return quantized_rows(token_ids, data, torch_dtype(dtype))
    assert isinstance(data, Tensor) and data.dtype == dtype
    return data[token_ids]


_SHARED_INPUTS = 128
_TINY = 1e-30  # 127 over anything smaller overflows, or nearly; such a group counts as zero


def pack_quantized(weight: QuantizedWeight, bias: AnyTensor | None) -> LinearWeight:
    """The quantized values as they are, a byte each; sub-block scales are multiplied in."""
    weight, bias = weight.unpacked(), None if bias is None else to_torch(bias)
    parts = [weight.quants, weight.scales]
    parts += [part for part in (weight.zeros, bias) if part is not None]
    outputs, inputs = weight.quants.shape
    return LinearWeight(weight, bias, outputs, inputs, sum(part.nbytes for part in parts))


def quantize_activations(
    x: Tensor, group_size: int, is_float8: bool = False
) -> tuple[Tensor, Tensor]:
    """X [T, C] -> quantized values [T, G, C / G] (fp32 integers up to 127, or numbers of e4m3) and
    scales [T, G] fp32.

    A group with inf or NaN has quantized values 0 and the scale NaN.
    """
    largest = FLOAT8_MAX if is_float8 else 127.0
    grouped = x.float().reshape(x.shape[0], x.shape[1] // group_size, group_size)
    most = grouped.abs().amax(-1)
    finite = most.isfinite()
    used = finite & (most > _TINY)
    # not largest / most, for which torch multiplies with a rounded reciprocal
    inverse = torch.where(used, torch.full_like(most, largest) / most, 0.0).unsqueeze(-1)
    scaled = torch.where(used.unsqueeze(-1), grouped * inverse, 0.0)
    quants = to_float8(scaled).float() if is_float8 else torch.round(scaled)
    # a division, as above
    scale = torch.div(most, torch.full_like(most, largest))
    scales = torch.where(used, scale, torch.where(finite, 0.0, torch.nan))
    return quants, scales


def quantized_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0."""
    data = weight.data
    assert isinstance(data, QuantizedWeight)
    out = x.new_empty(x.shape[0], weight.num_outputs)
    if out.numel() == 0:
        return out
    shared = shared_groups(data)
    quants, scales = quantize_activations(x, shared * data.group_size, data.is_float8)
    scales = scales.repeat_interleave(shared, 1)
    grouped = quants.reshape(x.shape[0], -1, data.group_size)
    inputs = grouped.double().transpose(0, 1)  # [G, T, C / G]
    sums = inputs.sum(-1).unsqueeze(-1)
    step = max(1, _BLOCK_ELEMENTS // weight.num_inputs)
    for start in range(0, weight.num_outputs, step):
        block = slice(start, start + step)
        held = data.float8_values() if data.is_float8 else data.quants
        dots = inputs @ _grouped(held[block], data.group_size).permute(1, 2, 0)
        middle = 0.0 if data.is_float8 else 2.0 ** (data.bits - 1)
        zeros = middle if data.zeros is None else data.zeros[block].t()[:, None]
        group_scales = data.scales[block].double().t()[:, None]
        if data.has_minimums:
            scaled = dots * group_scales + sums * zeros
        else:
            scaled = (dots - sums * zeros) * group_scales
        total = torch.zeros_like(dots[0])
        for group in range(scaled.shape[0]):
            total += scaled[group] * scales[:, group, None].double()
        if weight.bias is not None:
            total += weight.bias[block].double()
        out[:, block] = total.float()
    return out


def quantized_rows(token_ids: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Rows of the weight [T, C], rounded once to `dtype`."""
    return weight.rows(token_ids).dequantized().to(dtype)


def shared_groups(weight: QuantizedWeight) -> int:
    """Groups in a row that share a scale of activations: a power of two that divides all."""
    num_groups, shared = weight.scales.shape[1], 1
    while (
        weight.bits == 4
        and 2 * shared * weight.group_size <= _SHARED_INPUTS
        and num_groups % (2 * shared) == 0
    ):
        shared *= 2
    return shared


def _grouped(quants: Tensor, group_size: int) -> Tensor:
    return quants.double().reshape(quants.shape[0], quants.shape[1] // group_size, group_size)
