"""The paged KV cache's tensors: how large they are, and their one allocation.

Called when an engine opens. `core.resources.block_pool` assigns blocks by their ids; here a
block is a slice of tensors that live as long as the runner.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

import numpy as np

from quickstep.model.interface import KVLayout
from quickstep.model.sizing import NO_STATES, StateMemory
from quickstep.ops.kv_pairs import CacheSizes, fits_pairs, pair_shapes
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import (
    FLOAT32,
    AnyTensor,
    Device,
    DType,
    HostTensor,
    torch_device,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch

_LINE_BYTES = 64  # at a multiple of which a tensor begins
_HUGE_PAGE_BYTES = 2 << 20


def kv_bytes(layout: KVLayout, num_blocks: int, block_size: int) -> int:
    """Bytes that `allocate_kv` takes with these arguments."""
    return layout.bytes_per_token * num_blocks * block_size


def allocate_kv(
    layout: KVLayout,
    num_blocks: int,
    block_size: int,
    device: torch.device | Device,
    states: StateMemory = NO_STATES,
) -> KVCache:
    """K and V of each layer, zeroed: attention may load positions that it masks. They are
    [B, S, K, W], or in pairs where the layout has these and their sizes allow them. On a GPU there
    is one block more, to which recorded steps write their padding. Layers that keep a state have
    the slots of `states`.
    """
    num_blocks += device.type != "cpu"
    num_bytes = kv_bytes(layout, num_blocks, block_size)
    num_bytes += states.num_slots * layout.state_bytes(states.num_records)
    memory = _Zeros(num_bytes, 2 * len(layout.sizes) + len(layout.states), device)
    keys: list[AnyTensor] = []
    values: list[AnyTensor | None] = []
    for size, heads in zip(layout.sizes, layout.head_shapes, strict=True):
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((num_blocks, block_size, *heads),) * 2
        if (
            layout.in_pairs
            and size.has_values
            and fits_pairs(layout.dtype, block_size, size.head_size)
        ):
            shapes = pair_shapes(CacheSizes(num_blocks, block_size, *heads))
        keys.append(memory.of(shapes[0], layout.dtype))
        values.append(memory.of(shapes[1], layout.dtype) if size.has_values else None)
    float32 = FLOAT32 if isinstance(layout.dtype, DType) else torch_dtype(FLOAT32)
    kept = tuple(
        memory.of((states.num_slots, size.num_elements(states.num_records)), float32)
        for size in layout.states
    )
    return KVCache(tuple(keys), tuple(values), kept)


class _Zeros:
    """Tensors of zeros; on a CPU all in one memory mapping, on huge pages.

    Blocks are read in any order, and with ordinary pages nearly every one costs a page-table walk.
    A huge page begins at a multiple of its size: a mapping for each tensor would have ordinary
    pages at both ends, and a small one nothing else. Pages are allocated when they are first
    written, so unused blocks take no memory.
    """

    def __init__(self, num_bytes: int, num_tensors: int, device: torch.device | Device) -> None:
        self._device = device
        self._free: memoryview | None = None
        if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
            size = num_bytes + num_tensors * _LINE_BYTES + _HUGE_PAGE_BYTES
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE)
            begin = -_address_of(mapping) % _HUGE_PAGE_BYTES
            self._free = memoryview(mapping)[begin:]

    def of(self, shape: tuple[int, ...], dtype: DType | torch.dtype) -> AnyTensor:
        """The next tensor."""
        if self._free is None:
            if isinstance(dtype, DType):
                return HostTensor(np.zeros(shape, dtype=dtype.storage), dtype)
            import torch

            return torch.zeros(shape, dtype=dtype, device=torch_device(self._device))
        num_bytes = math.prod(shape) * dtype.itemsize
        own, self._free = self._free[:num_bytes], self._free[num_bytes:]
        self._free = self._free[-num_bytes % _LINE_BYTES :]
        if isinstance(dtype, DType):
            return HostTensor(np.frombuffer(own, dtype=dtype.storage).reshape(shape), dtype)
        import torch

        return torch.frombuffer(own, dtype=dtype).view(shape)


def _address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
