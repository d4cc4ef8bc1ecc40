"""Which form of `BlockBytes` a cache has. Called when an engine opens that moves KV blocks."""

from __future__ import annotations

from quickstep.ops.table import KVCache
from quickstep.ops.tensors import AnyTensor, HostTensor
from quickstep.runtime.cache.block_bytes import BlockBytes, HostBlockBytes, tensors_of


def open_block_bytes(kv: KVCache) -> BlockBytes:
    """The bytes of the blocks of a cache; for one on a GPU with a new stream of copies."""
    if all(map(_is_on_host, tensors_of(kv))):
        return HostBlockBytes(kv)
    from quickstep.runtime.cache.device_block_bytes import CudaCopies, DeviceBlockBytes

    return DeviceBlockBytes(kv, CudaCopies.open(kv))


def _is_on_host(tensor: AnyTensor) -> bool:
    return isinstance(tensor, HostTensor) or tensor.device.type == "cpu"
