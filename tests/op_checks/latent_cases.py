"""Inputs of the ops of attention over latents, of which `cases` makes its cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from op_checks.case_inputs import CaseInputs, label
from quickstep.ops.tensors import store_heads

__all__ = ["keys_inputs", "queries_inputs", "values_inputs", "write_inputs"]

# A name, the inputs with an entry per token, the others.
Inputs = tuple[str, tuple[Tensor, ...], tuple[object, ...]]


def _angles(name: str, num_tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angles = CaseInputs(name, torch.float32).normal(num_tokens, half, scale=40.0)
    return angles.cos(), angles.sin()


def keys_inputs(dtype: torch.dtype) -> Iterator[Inputs]:
    """(x, cos, sin) and (weight, eps, interleaved)."""
    # (T, L, D_rot): as released, vector edges, one token
    for num_tokens, size, rotated in ((9, 512, 64), (21, 77, 6), (1, 16, 2)):
        for interleaved in (False, True):
            name = label("latent_keys", dtype, num_tokens, size, rotated, interleaved)
            source = CaseInputs(name, dtype)
            x = source.normal(num_tokens, size + rotated, scale=3.0)
            angles = _angles(name, num_tokens, rotated // 2)
            yield name, (x, *angles), (source.normal(size), 1e-6, interleaved)


# (T, H, C, N, D_rot): as released, more rows than a chunk, odd sizes, one token
_HEADS = ((5, 16, 128, 512, 64), (300, 2, 64, 48, 8), (37, 3, 77, 33, 6), (1, 1, 32, 16, 2))


def queries_inputs(dtype: torch.dtype) -> Iterator[Inputs]:
    """(q, cos, sin) and (weight [H, N, C], interleaved)."""
    for num_tokens, heads, inputs, outputs, rotated in _HEADS:
        for interleaved in (False, True):
            name = label("latent_queries", dtype, num_tokens, heads, inputs, interleaved)
            source = CaseInputs(name, dtype)
            q = source.normal(num_tokens, heads, inputs + rotated)
            weight = source.normal(heads, outputs, inputs, scale=inputs**-0.5)
            yield name, (q, *_angles(name, num_tokens, rotated // 2)), (weight, interleaved)


def values_inputs(dtype: torch.dtype) -> Iterator[Inputs]:
    """(x,) and (weight [H, C, N],), the other way."""
    for num_tokens, heads, outputs, inputs, _ in _HEADS:
        name = label("latent_values", dtype, num_tokens, heads, inputs)
        source = CaseInputs(name, dtype)
        weight = source.normal(heads, outputs, inputs, scale=inputs**-0.5)
        yield name, (source.normal(num_tokens, heads, inputs),), (weight,)


def write_inputs(dtype: torch.dtype, kv_dtypes: tuple[torch.dtype, ...]) -> Iterator[Inputs]:
    """(k, slots) and (cache,)."""
    for kv_dtype in kv_dtypes:
        name = label("latent_write", dtype, kv_dtype)
        source = CaseInputs(name, dtype)
        slots = source.permutation(5 * 8)[:13]
        cache = store_heads(source.normal(5, 8, 1, 54), kv_dtype)
        yield name, (source.normal(13, 1, 54), slots), (cache,)
