"""What an architecture does with the output projection's product, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _finish_kernel(
    product, out, num_elements, divisor, softcap, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr
):
    """Widened and divided in fp32, then softcap * tanh(logits / softcap) in fp64."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_elements
    value = tl.load(product + places, mask=mask, other=0.0).to(tl.float32)
    value = tl.div_rn(value, tl.zeros((BLOCK,), dtype=tl.float32) + divisor)
    if HAS_SOFTCAP:
        wide = value.to(tl.float64) / softcap
        small = tl.exp(-2.0 * tl.abs(wide))
        bounded = (1.0 - small) / (1.0 + small)
        square = wide * wide
        # near 0 the difference from 1 has few digits left
        series = tl.abs(wide) * (1.0 - square / 3.0 + square * square * (2.0 / 15.0))
        bounded = tl.where(square < 1e-6, series, bounded)
        value = (tl.where(wide < 0, -bounded, bounded) * softcap).to(tl.float32)
    tl.store(out + places, value, mask=mask)


def finished_logits(product: Tensor, divisor: float, softcap: float | None) -> Tensor:
    """[E, V] -> [E, V] fp32, as the reference's."""
    product = product.contiguous()
    out = torch.empty(product.shape, dtype=torch.float32, device=product.device)
    if out.numel():
        _finish_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
            product,
            out,
            out.numel(),
            divisor,
            softcap or 1.0,
            HAS_SOFTCAP=softcap is not None,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
    return out
