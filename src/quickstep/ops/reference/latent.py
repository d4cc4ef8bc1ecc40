"""What attention over latents computes in addition to the other ops: their definition.

A head's part of a product is `linear` of that head alone, so that its sums are exact as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.ops.reference.elementary import rms_norm, rotary
from quickstep.ops.reference.linear import linear, pack_linear
from quickstep.ops.table import LatentOps
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.weights import HeadWeight


def latent_ops() -> LatentOps:
    """`OpTable.latent` of the reference."""
    return LatentOps(pack_heads, latent_keys, latent_queries, latent_values)


def pack_heads(weight: AnyTensor) -> HeadWeight:
    """Weight [H, N, C], a matrix of each head."""
    heads = tuple(pack_linear(head, None) for head in to_torch(weight).unbind(0))
    num_heads, num_outputs, num_inputs = weight.shape
    nbytes = sum(head.nbytes for head in heads)
    return HeadWeight(heads, num_heads, num_outputs, num_inputs, nbytes)


def latent_keys(
    x: Tensor, weight: AnyTensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """X [T, L + D_rot], weight [L] -> [T, 1, L + D_rot]."""
    (size,) = weight.shape
    normed = rms_norm(x[:, :size], weight, eps, 0.0)
    turned = rotary(x[:, size:].unsqueeze(1), cos, sin, interleaved)
    return torch.cat((normed.unsqueeze(1), turned), -1)


def latent_queries(
    q: Tensor, weight: HeadWeight, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """Q [T, H, C + D_rot], weight [H, L, C] -> [T, H, L + D_rot]."""
    of_latent = latent_values(q[..., : weight.num_inputs], weight)
    turned = rotary(q[..., weight.num_inputs :], cos, sin, interleaved)
    return torch.cat((of_latent, turned), -1)


def latent_values(x: Tensor, weight: HeadWeight) -> Tensor:
    """X [T, H, C], weight [H, N, C] -> [T, H, N]."""
    heads = weight.data
    assert isinstance(heads, tuple)
    return torch.stack([linear(x[:, index], head) for index, head in enumerate(heads)], 1)
