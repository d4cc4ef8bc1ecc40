"""Act-order: groups that are scattered over a matrix's inputs, as GPTQ's `g_idx` says.

No product here gathers its activations, so such a matrix is dequantised and rounded again, to 8
bits in groups of 32: an error of about 0.4 % of a group's weights, where its own 4 bits cost ten
times that. A `g_idx` in order, as files with static groups have it, changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.reference.quantize import quantize
from quickstep.ops.table import QuantizedWeight

__all__ = ["gathered", "requantized_form", "scattered_order"]

_GROUPS = (32, 16)


def scattered_order(files: TensorFiles, name: str, group_size: int) -> Tensor | None:
    """The group of each input, int64; None where they are in order, or nothing is stored.

    Raises:
        ConfigError: An input belongs to no group.
    """
    stored = files.tensors.get(name)
    if stored is None:
        return None
    if stored.dtype != "I32":
        raise ConfigError(f"{name} is stored as {stored.dtype}, it must be I32")
    content = bytearray(stored.nbytes)
    files.read_into(name, memoryview(content))
    order = torch.frombuffer(content, dtype=torch.int32).long()
    in_order = torch.arange(order.numel()) // group_size
    if torch.equal(order, in_order):
        return None
    if int(order.min()) < 0 or int(order.max()) > int(in_order[-1]):
        raise ConfigError(f"{name} names group {int(order.max())}, the last one is {in_order[-1]}")
    return order


def requantized_form(num_inputs: int) -> MatrixFormat:
    """The form that a matrix with scattered groups is held in."""
    return MatrixFormat(8, next((size for size in _GROUPS if num_inputs % size == 0), None))


def gathered(weight: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    """A matrix whose input c belongs to group order[c], rounded again."""
    order = order.to(weight.quants.device)
    zeros = weight.zeros
    middle = 2 ** (weight.bits - 1) if zeros is None else zeros[:, order]
    whole = (weight.quants.float() - middle) * weight.scales[:, order]
    form = requantized_form(whole.shape[1])
    return quantize(whole, form.bits, form.group_size, form.has_zeros)
