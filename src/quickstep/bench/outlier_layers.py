"""Synthetic linear layers whose inputs have a few channels far larger than the rest.

Large models have such channels (LLM.int8(), arXiv:2208.07339: a handful of dimensions, 20 times
and more; SmoothQuant, arXiv:2211.10438: about 100 times), the bundled one does not. Activations
are normal, the same few channels of every token times a factor; weights are Student's t with 5
degrees of freedom: heavier tails than a normal's. Drawn from a seed.

Two errors of a format, both the norm of its output less the exact output:

    output    over the norm of the exact output
    ordinary  over the norm of what the ordinary channels contribute to it: large channels often
              carry nearly the same value for every token, and the others tell the tokens apart
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from quickstep.bench.block_scheme import block_product, rounded_q4_0, rounded_q8_0
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.table import OpTable

__all__ = ["FACTORS", "LayerError", "OutlierLayer", "block_error", "format_error", "random_layer"]

# Times that the large channels are larger; 1 is a layer without any.
FACTORS = (1, 30, 100)

_OUTPUTS, _INPUTS, _TOKENS = 512, 2048, 64
_LARGE_CHANNELS = 6
_FREEDOM = 5


class OutlierLayer(msgspec.Struct, frozen=True):
    """Weights [N, C], activations [T, C], the exact output [T, N] and the ordinary part of it."""

    weight: Tensor
    x: Tensor
    exact: Tensor
    ordinary: Tensor


class LayerError(msgspec.Struct, frozen=True):
    """Relative errors, as the module says."""

    output: float
    ordinary: float


def random_layer(factor: int, seed: int) -> OutlierLayer:
    """A layer whose large channels are `factor` times the others; the seed places them."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(_FREEDOM, (_OUTPUTS, _INPUTS)) / _INPUTS**0.5
    x = rng.standard_normal((_TOKENS, _INPUTS))
    large = rng.choice(_INPUTS, _LARGE_CHANNELS, replace=False)
    x[:, large] *= factor
    weight, x = weight.astype(np.float32), x.astype(np.float32)
    ordinary = x.copy()
    ordinary[:, large] = 0
    wide = weight.astype(np.float64).T
    return OutlierLayer(
        torch.from_numpy(weight),
        torch.from_numpy(x),
        torch.from_numpy(x.astype(np.float64) @ wide),
        torch.from_numpy(ordinary.astype(np.float64) @ wide),
    )


def format_error(
    layer: OutlierLayer, ops: OpTable, dtype: torch.dtype, form: MatrixFormat | None
) -> LayerError:
    """Of weights in quantized values (`form`) or in `dtype`, with activations in `dtype`."""
    weight = layer.weight.to(dtype)
    if form is None:
        packed = ops.pack_linear(weight, None)
    else:
        quantized = ops.quantize(
            weight, form.bits, form.group_size, form.has_zeros, form.has_sub_scales
        )
        packed = ops.pack_quantized(quantized, None)
    return _error(layer, ops.linear(layer.x.to(dtype), packed))


def block_error(layer: OutlierLayer, bits: int) -> LayerError:
    """Of llama.cpp's Q8_0 (8) or Q4_0 (4)."""
    rounded: Callable[..., np.ndarray] = rounded_q8_0 if bits == 8 else rounded_q4_0
    product = block_product(layer.x.numpy(), rounded(layer.weight.numpy()))
    return _error(layer, torch.from_numpy(product))


def _error(layer: OutlierLayer, out: Tensor) -> LayerError:
    wrong = float((out.double() - layer.exact).norm())
    return LayerError(wrong / float(layer.exact.norm()), wrong / float(layer.ordinary.norm()))
