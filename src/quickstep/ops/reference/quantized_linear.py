"""Linear layers on quantized weights: the activations are quantised too, and sums are exact.

    scale[t, g] = max |x[t, g, :]| / 127        quants q = round(x * (127 / max)), half to even
    y[t, n] = sum over g of (sum over i of q (quant - zero)) * scale[t, g] * scales[n, g]

A group is the weight's; a weight with one scale per output takes a whole row as one group. Groups
of 4 bits share the activations' scale, up to 128 inputs: little beside what 4 bits lose, and one
product less per group. A weight with sub-block scales is that of 8 bits which has them multiplied
in. Scale and quantized values of activations are computed in float32, as every implementation does;
the rest is float64 over integers, so that no product's order can show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.ops.table import LinearWeight, QuantizedWeight

__all__ = ["pack_quantized", "quantize_activations", "quantized_linear", "quantized_rows"]

_BLOCK_ELEMENTS = 1 << 18  # of quantized values in fp64 at a time: 2 MiB, stays in cache
_SHARED_INPUTS = 128
_TINY = 1e-30  # 127 over anything smaller overflows, or nearly; such a group counts as zero


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None) -> LinearWeight:
    """The quantized values as they are, a byte each; sub-block scales are multiplied in."""
    weight = weight.unpacked()
    parts = [weight.quants, weight.scales]
    parts += [part for part in (weight.zeros, bias) if part is not None]
    outputs, inputs = weight.quants.shape
    return LinearWeight(weight, bias, outputs, inputs, sum(part.nbytes for part in parts))


def quantize_activations(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """X [T, C] -> quantized values [T, G, C / G] (fp32 integers up to 127) and scales [T, G] fp32.

    A group with inf or NaN has quantized values 0 and the scale NaN.
    """
    grouped = x.float().reshape(x.shape[0], x.shape[1] // group_size, group_size)
    most = grouped.abs().amax(-1)
    finite = most.isfinite()
    used = finite & (most > _TINY)
    # not 127.0 / most, for which torch multiplies with a rounded reciprocal
    inverse = torch.where(used, torch.full_like(most, 127.0) / most, 0.0).unsqueeze(-1)
    quants = torch.where(used.unsqueeze(-1), torch.round(grouped * inverse), 0.0)
    scales = torch.where(used, most / 127.0, torch.where(finite, 0.0, torch.nan))
    return quants, scales


def quantized_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0."""
    data = weight.data
    assert isinstance(data, QuantizedWeight)
    out = x.new_empty(x.shape[0], weight.num_outputs)
    if out.numel() == 0:
        return out
    shared = _shared_groups(data)
    quants, scales = quantize_activations(x, shared * data.group_size)
    scales = scales.repeat_interleave(shared, 1)
    grouped = quants.reshape(x.shape[0], -1, data.group_size)
    inputs = grouped.double().transpose(0, 1)  # [G, T, C / G]
    sums = inputs.sum(-1).unsqueeze(-1)
    step = max(1, _BLOCK_ELEMENTS // weight.num_inputs)
    for start in range(0, weight.num_outputs, step):
        block = slice(start, start + step)
        dots = inputs @ _grouped(data.quants[block], data.group_size).permute(1, 2, 0)
        zeros = 2.0 ** (data.bits - 1) if data.zeros is None else data.zeros[block].t()[:, None]
        scaled = (dots - sums * zeros) * data.scales[block].double().t()[:, None]
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


def _shared_groups(weight: QuantizedWeight) -> int:
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
