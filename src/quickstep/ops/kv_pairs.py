"""KV caches in pairs: the order in which native kernels on CPUs read bfloat16 (`csrc/kv_pairs.h`).

    keys     [B, K, D / 2, S, 2]   a pair is two neighbouring elements of a position
    values   [B, K, S / 2, D, 2]   a pair is an element of two neighbouring positions

Any other cache has a row for each position, [B, S, K, W] (`ops.table.KVCache`). The number of
dimensions says which one a tensor is. A row of the one and of the other hold the same elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quickstep.ops.tensors import BFLOAT16, AnyTensor, DType, head_size_of, host_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_POSITIONS = 16  # kPairPositions: S is a multiple of it
_MAX_HEAD_SIZE = 576  # QS_MAX_HEAD_SIZE


class CacheSizes(NamedTuple):
    """The sizes of a cache in whichever order."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int


def fits_pairs(dtype: DType | torch.dtype, block_size: int, head_size: int) -> bool:
    """Whether keys and values of these sizes may be in pairs."""
    has_pairs = head_size % 2 == 0 and head_size <= _MAX_HEAD_SIZE
    return has_pairs and block_size % _POSITIONS == 0 and host_dtype(dtype) == BFLOAT16


def pair_shapes(sizes: CacheSizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of keys and of values in pairs."""
    blocks, positions, heads, elements = sizes
    keys = (blocks, heads, elements // 2, positions, 2)
    return keys, (blocks, heads, positions // 2, elements, 2)


def in_pairs(cache: AnyTensor) -> bool:
    """Whether keys or values are in pairs."""
    return len(cache.shape) == 5


def sizes_of_keys(keys: AnyTensor) -> CacheSizes:
    """The sizes of a cache whose keys these are."""
    if in_pairs(keys):
        blocks, heads, num_pairs, positions, _ = keys.shape
        return CacheSizes(blocks, positions, heads, 2 * num_pairs)
    blocks, positions, heads, _ = keys.shape
    return CacheSizes(blocks, positions, heads, head_size_of(keys))


def keys_at(cache: Tensor, slots: Tensor) -> Tensor:
    """The keys at flat slots [...]: [..., K, W]."""
    if not in_pairs(cache):
        return cache.view(-1, *cache.shape[2:])[slots]
    positions = cache.shape[3]
    return cache[slots // positions, :, :, slots % positions].flatten(-2)


def values_at(cache: Tensor, slots: Tensor) -> Tensor:
    """The values at flat slots [...]: [..., K, W]."""
    if not in_pairs(cache):
        return cache.view(-1, *cache.shape[2:])[slots]
    positions = 2 * cache.shape[2]
    within = slots % positions
    return cache[slots // positions, :, within // 2, :, within % 2]


def set_keys(cache: Tensor, slots: Tensor, heads: Tensor) -> None:
    """Store heads [..., K, W] as the keys at flat slots [...]."""
    if not in_pairs(cache):
        cache.view(-1, *cache.shape[2:])[slots] = heads
        return
    positions = cache.shape[3]
    cache[slots // positions, :, :, slots % positions] = heads.view(*heads.shape[:-1], -1, 2)


def set_values(cache: Tensor, slots: Tensor, heads: Tensor) -> None:
    """Store heads [..., K, W] as the values at flat slots [...]."""
    if not in_pairs(cache):
        cache.view(-1, *cache.shape[2:])[slots] = heads
        return
    positions = 2 * cache.shape[2]
    within = slots % positions
    cache[slots // positions, :, within // 2, :, within % 2] = heads
