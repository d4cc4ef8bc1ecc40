"""Moves of keys and values within the paged KV cache, in all layers with one launch.

What a slot holds is not looked at: a program moves the same bytes of one cache's slots, pair after
pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl

from quickstep.errors import EngineError
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import to_torch

_BLOCK = 2048  # bytes: 16 a thread


@triton.jit(do_not_specialize=["num_moves"])
def _move_kv_kernel(addresses, moves, num_moves, slot_bytes, BLOCK: tl.constexpr):
    """A block of the bytes of one cache's slots."""
    cache = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.uint8))
    cache = tl.multiple_of(cache, 16)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < slot_bytes
    for index in range(0, num_moves):
        source = tl.load(moves + 2 * index) * slot_bytes
        target = tl.load(moves + 2 * index + 1) * slot_bytes
        value = tl.load(cache + source + columns, mask=mask, other=0)
        tl.store(cache + target + columns, value, mask=mask)
        # the next pair may read what other threads have just written
        tl.debug_barrier()


def move_kv(kv: KVCache, moves: Sequence[tuple[int, int]]) -> None:
    """Copy flat KV slots of all layers in order, each pair from its first to its second.

    Raises:
        EngineError: A slot is outside the cache.
    """
    if not moves:
        return
    num_slots = kv.keys[0].shape[0] * kv.keys[0].shape[1]
    if not 0 <= min(map(min, moves)) <= max(map(max, moves)) < num_slots:
        raise EngineError(f"KV is moved to or from a slot outside the cache's {num_slots}")
    for keys, values in kv.by_shape():
        caches = [to_torch(cache) for cache in keys + values]
        assert all(cache.is_contiguous() for cache in caches)
        addresses = [cache.data_ptr() for cache in caches]
        assert not any(address % 16 for address in addresses), "as allocators align tensors"
        # one copy to the device for both
        numbers = torch.tensor([*addresses, *chain.from_iterable(moves)], dtype=torch.int64)
        numbers = numbers.to(caches[0].device)
        slot_bytes = caches[0][0, 0].nbytes
        _move_kv_kernel[(len(caches), triton.cdiv(slot_bytes, _BLOCK))](
            numbers[: len(caches)],
            numbers[len(caches) :],
            len(moves),
            slot_bytes,
            BLOCK=_BLOCK,
        )
