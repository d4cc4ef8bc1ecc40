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
        keys.append(_zeros(shapes[0], layout.dtype, device))
        values.append(_zeros(shapes[1], layout.dtype, device) if size.has_values else None)
    float32 = FLOAT32 if isinstance(layout.dtype, DType) else torch_dtype(FLOAT32)
    kept = tuple(
        _zeros((states.num_slots, size.num_elements(states.num_records)), float32, device)
        for size in layout.states
    )
    return KVCache(tuple(keys), tuple(values), kept)


def _zeros(
    size: tuple[int, ...], dtype: DType | torch.dtype, device: torch.device | Device
) -> AnyTensor:
    """Zeros; on a CPU in a memory mapping of their own, on ordinary pages.

    Pages are allocated when they are first written, so unused blocks take no memory. On huge pages
    the first token would take 2 MB in each tensor, which takes longer than all that it computes
    (SmolLM2: 0.1 s), and steps with long contexts are as fast (benchmarks/results, 2026-11-29).
    """
    if device.type != "cpu" or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        if isinstance(dtype, DType):
            zeros = np.zeros(size, dtype=dtype.storage)
            return HostTensor(zeros, dtype)
        import torch

        return torch.zeros(size, dtype=dtype, device=torch_device(device))
    num_bytes = math.prod(size) * dtype.itemsize
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    if isinstance(dtype, DType):
        elements = np.frombuffer(mapping, dtype=dtype.storage).reshape(size)
        return HostTensor(elements, dtype)
    import torch

    return torch.frombuffer(mapping, dtype=dtype).view(size)
