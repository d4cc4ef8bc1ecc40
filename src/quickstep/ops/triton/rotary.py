"""Rotary embedding of heads, by itself and with the write of keys and values to the cache.

One program computes one head of a token with one IEEE operation after another, without fused
multiply-adds: the bits are the same in both kernels, and those of `rotary` and then `write_kv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.paged_attention import write_kv as _reference_write
from quickstep.ops.tensors import AnyTensor, bytes_of_float8, to_torch
from quickstep.ops.triton.rounding import rounded
from quickstep.ops.triton.write_kv import has_kernels, scales_of, store_head


@triton.jit
def _channels(head_size, half, HALVES: tl.constexpr, BLOCK: tl.constexpr):
    """The channels [P, BLOCK] of a head, and which of them it has. HALVES: one half in each of two
    rows, so that a channel's partner is at the same place of the other row.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    if HALVES:
        rows = tl.arange(0, 2)[:, None]
        channels = rows * half + columns
        mask = (columns < half) & (rows < 2)
    else:
        channels = columns
        mask = columns < head_size
    return channels, mask


@triton.jit
def _rotated_head(
    source,
    cos,
    sin,
    channels,
    mask,
    half,
    INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A head in fp32, its first 2 * half channels rotated by this token's cos and sin [half]."""
    is_turned = channels < 2 * half
    if HALVES:
        rows = tl.arange(0, 2)[:, None]
        is_first = rows == 0
        pair = tl.arange(0, BLOCK)[None, :]
        other = (1 - rows) * half + pair
        is_turned = pair < half
    elif INTERLEAVED:
        pair = channels // 2
        is_first = channels % 2 == 0
        other = tl.where(is_first, channels + 1, channels - 1)
    else:
        is_first = channels < half
        pair = tl.where(is_first, channels, channels - half)
        other = tl.where(is_first, channels + half, channels - half)
    value = tl.load(source + channels, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(source + other, mask=is_turned, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=is_turned, other=1.0).to(tl.float32)
    s = tl.load(sin + pair, mask=is_turned, other=0.0).to(tl.float32)
    along, across = value * c, partner * s
    turned = tl.where(is_first, along - across, along + across)
    return tl.where(is_turned, turned, value)


@triton.jit
def _rotary_kernel(
    x,
    cos,
    sin,
    out,
    num_heads,
    head_size,
    half,
    x_token_stride,
    x_head_stride,
    INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channels, mask = _channels(head_size, half, HALVES, BLOCK)
    source = x + token * x_token_stride + head * x_head_stride
    place = token * half
    value = _rotated_head(
        source, cos + place, sin + place, channels, mask, half, INTERLEAVED, HALVES, BLOCK
    )
    target = out + (token * num_heads + head) * head_size + channels
    tl.store(target, rounded(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_write_kv_kernel(
    q,
    k,
    v,
    cos,
    sin,
    out,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    num_heads,
    num_kv_heads,
    head_size,
    half,
    width,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of q of one token, or one KV head of k and v."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channels, mask = _channels(head_size, half, HALVES, BLOCK)
    place = token * half
    if head < num_heads:
        source = q + token * q_token_stride + head * q_head_stride
        value = _rotated_head(
            source, cos + place, sin + place, channels, mask, half, INTERLEAVED, HALVES, BLOCK
        )
        target = out + (token * num_heads + head) * head_size + channels
        tl.store(target, rounded(value, out.dtype.element_ty), mask=mask)
    else:
        kv_head = head - num_heads
        offset = (tl.load(slots + token) * num_kv_heads + kv_head) * width
        source = k + token * k_token_stride + kv_head * k_head_stride
        key = _rotated_head(
            source, cos + place, sin + place, channels, mask, half, INTERLEAVED, HALVES, BLOCK
        )
        # as a tensor between the two ops would hold it
        key = rounded(key, k.dtype.element_ty).to(tl.float32)
        store_head(key, keys, key_scales, offset, channels, mask, width, INT8)
        source = v + token * v_token_stride + kv_head * v_head_stride
        held = tl.load(source + channels, mask=mask, other=0.0).to(tl.float32)
        store_head(held, values, value_scales, offset, channels, mask, width, INT8)


def _block(head_size: int, half: int, interleaved: bool) -> dict[str, int]:
    """How a program has the channels of a head, whose first 2 * half are rotated."""
    has_halves = not interleaved and 2 * half == head_size
    block = triton.next_power_of_2(half if has_halves else head_size)
    return {"INTERLEAVED": interleaved, "HALVES": has_halves, "BLOCK": block}


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """X [T, H, D], cos and sin [T, D_rot / 2] -> [T, H, D]; channels from D_rot on are kept."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_tokens, num_heads, head_size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotary_kernel[(num_tokens, num_heads)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            num_heads,
            head_size,
            cos.shape[-1],
            x.stride(0),
            x.stride(1),
            **_block(head_size, cos.shape[-1], interleaved),
            num_warps=1,  # a thread has several channels, which it reads and writes at once
            enable_fp_fusion=False,
        )
    return out


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    k_cache: AnyTensor,
    v_cache: AnyTensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Q [T, H, D], k and v [T, K, D], cos and sin [T, D_rot / 2] -> rotated q [T, H, D]."""
    keys, values = (bytes_of_float8(to_torch(cache)) for cache in (k_cache, v_cache))
    assert keys.is_contiguous() and values.is_contiguous() and q.dtype == k.dtype == v.dtype
    if not has_kernels(k_cache):
        rotated = rotary(k, cos, sin, interleaved)
        _reference_write(rotated, v, k_cache, v_cache, slot_mapping)
        return rotary(q, cos, sin, interleaved)
    q, k, v = (heads if heads.stride(-1) == 1 else heads.contiguous() for heads in (q, k, v))
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens:
        _rotary_write_kv_kernel[(num_tokens, num_heads + num_kv_heads)](
            q,
            k,
            v,
            cos.contiguous(),
            sin.contiguous(),
            out,
            keys,
            values,
            scales_of(keys),
            scales_of(values),
            slot_mapping,
            num_heads,
            num_kv_heads,
            head_size,
            cos.shape[-1],
            keys.shape[3],
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            INT8=keys.dtype == torch.int8,
            **_block(head_size, cos.shape[-1], interleaved),
            num_warps=1,  # a thread has several channels, which it reads and writes at once
            enable_fp_fusion=False,
        )
    return out
