"""Writes of keys and values to the paged KV cache, rounded to its dtype, int8 per token and head.

The bits are the reference's (`ops.tensors.store_heads`): IEEE operations in fp32 only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.paged_attention import write_kv as _reference_write
from quickstep.ops.tensors import SCALE_BYTES, AnyTensor, bytes_of_float8, is_int4, to_torch
from quickstep.ops.triton.rounding import (
    float8_bits,
    rounded,
    rounded_quotient,
    rounded_to_float8,
    rounded_to_integer,
)

_LEAST = tl.constexpr(1e-30)  # as in `ops.tensors`: a head below it is stored as zero


@triton.jit
def store_head(value, cache, scales, offset, channels, mask, width, INT8: tl.constexpr):
    """One head of one token, [P, N] in fp32 and 0 outside of `mask`, at element `offset` of the
    cache; an int8 scale follows the values.
    """
    if INT8:
        offset = offset // 4 * 4  # as it is: stores of 4 bytes need to know
        is_finite = tl.max(tl.max(tl.where((value - value) == 0.0, 0, 1), 1), 0) == 0
        most = tl.max(tl.max(tl.abs(value), 1), 0)
        is_used = is_finite & (most >= _LEAST)
        divisor = tl.where(is_used, most, 1.0)
        near = rounded_to_integer(value * rounded_quotient(127.0, divisor))
        tl.store(cache + offset + channels, tl.where(is_used, near, 0.0).to(tl.int8), mask=mask)
        scale = tl.where(is_used, rounded_quotient(divisor, 127.0), 0.0)
        tl.store(scales + (offset + width - 4) // 4, tl.where(is_finite, scale, float("nan")))
    elif cache.dtype.element_ty == tl.uint8:
        bounded = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
        bounded = tl.where((value - value) == 0.0, bounded, float("nan"))
        tl.store(cache + offset + channels, float8_bits(rounded_to_float8(bounded)), mask=mask)
    else:
        tl.store(cache + offset + channels, rounded(value, cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kv_kernel(
    k,
    v,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    num_heads,
    head_size,
    width,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    INT8: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The key and the value of one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channels = tl.arange(0, BLOCK_D)[None, :]
    mask = channels < head_size
    offset = (tl.load(slots + token) * num_heads + head) * width
    source = k + token * k_token_stride + head * k_head_stride
    key = tl.load(source + channels, mask=mask, other=0.0).to(tl.float32)
    store_head(key, keys, key_scales, offset, channels, mask, width, INT8)
    source = v + token * v_token_stride + head * v_head_stride
    value = tl.load(source + channels, mask=mask, other=0.0).to(tl.float32)
    store_head(value, values, value_scales, offset, channels, mask, width, INT8)


def has_kernels(cache: AnyTensor) -> bool:
    """Whether the kernels can write and read it: not int4, nor int8 heads whose width is no
    multiple of 4, whose scales are not aligned.
    """
    cache = to_torch(cache)
    if is_int4(cache.dtype):
        return False
    return cache.dtype != torch.int8 or cache.shape[3] % SCALE_BYTES == 0


def scales_of(cache: Tensor) -> Tensor:
    """An int8 cache as float32, for its scales; others as they are."""
    return cache.flatten().view(torch.float32) if cache.dtype == torch.int8 else cache


def write_kv(
    k: Tensor, v: Tensor, k_cache: AnyTensor, v_cache: AnyTensor, slot_mapping: Tensor
) -> None:
    """k, v [T, K, D] into k_cache, v_cache [B, S, K, W] at the flat slots slot_mapping [T]."""
    keys, values = (bytes_of_float8(to_torch(cache)) for cache in (k_cache, v_cache))
    assert keys.is_contiguous() and values.is_contiguous()
    is_int8 = keys.dtype == torch.int8
    if not has_kernels(k_cache):
        return _reference_write(k, v, k_cache, v_cache, slot_mapping)
    if k.numel() == 0:
        return None
    k, v = (heads if heads.stride(-1) == 1 else heads.contiguous() for heads in (k, v))
    num_tokens, num_heads, head_size = k.shape
    _write_kv_kernel[(num_tokens, num_heads)](
        k,
        v,
        keys,
        values,
        scales_of(keys),
        scales_of(values),
        slot_mapping,
        num_heads,
        head_size,
        keys.shape[3],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        INT8=is_int8,
        BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=1,  # a thread has several channels, which it reads and writes at once
        enable_fp_fusion=False,
    )
    return None
