"""The bytes of KV blocks on the host, for those that move them: `engine.handover` between engines,
`engine.kv_files` to a disk and back.
"""

from __future__ import annotations

from hashlib import blake2b

from quickstep.errors import EngineError
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import Array, HostTensor, to_numpy


class BlockBytes:
    """The bytes of blocks in a KV cache on the host."""

    def __init__(self, kv: KVCache) -> None:
        pairs = zip(kv.keys, kv.values, strict=True)
        arrays: list[Array] = []
        for tensor in (tensor for pair in pairs for tensor in pair if tensor is not None):
            if not isinstance(tensor, HostTensor) and tensor.device.type != "cpu":
                raise EngineError("KV blocks are moved on CPUs only")
            arrays.append(to_numpy(tensor))
        self._form = repr([(array.shape[1:], str(array.dtype)) for array in arrays])
        self._layers = [array.reshape(array.shape[0], -1).view("u1") for array in arrays]

    @property
    def num_bytes(self) -> int:
        """Of one block."""
        return sum(layer.shape[1] for layer in self._layers)

    def fingerprint(self, of_model: str) -> str:
        """A digest over the model's fingerprint and the shape of a block in each layer: an engine
        that has the same may read the blocks.
        """
        return blake2b(f"{of_model}\0{self._form}".encode(), digest_size=16).hexdigest()

    def of(self, block_id: int) -> list[memoryview]:
        """The block in each layer, K then V if it has one, to be read or written."""
        return [memoryview(layer[block_id].data) for layer in self._layers]
