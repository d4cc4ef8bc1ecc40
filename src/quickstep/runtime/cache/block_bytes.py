"""The bytes of KV blocks, for those that move them while steps continue: `engine.handover` between
engines, `engine.kv_files` to a disk and back. Called in threads of theirs.

A cache on the host is read and written in place. For one on a device, `device_block_bytes` copies
to and from memory on the host. Which blocks may be moved when is decided by the scheduler's
resources: a block is read while it is cached, and whether it kept its content is confirmed after
the copy; it is written while it is held, and used once it was reported as filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Protocol

from quickstep.ops.table import KVCache
from quickstep.ops.tensors import AnyTensor, to_numpy

_BYTES_AT_ONCE = 16 << 20

# A block in each layer, K then V if it has one.
BlockParts = list[memoryview]


class BlockBytes(Protocol):
    """The bytes of the blocks of a cache. Any number of threads may use it at a time."""

    @property
    def num_bytes(self) -> int:
        """Of one block."""

    def fingerprint(self, of_model: str) -> str:
        """A digest over the model's fingerprint and the shape of a block in each layer: an engine
        that has the same may read the blocks.
        """

    def reading(self, block_ids: Sequence[int]) -> AbstractContextManager[list[BlockParts]]:
        """The blocks, at most `num_at_once`, with what all steps that were submitted and are over
        have written to them; to be read within the context. Raises EngineError if they cannot be
        copied.
        """

    def writing(self, block_ids: Sequence[int]) -> AbstractContextManager[list[BlockParts]]:
        """Where the content of blocks goes, at most `num_at_once`. They have it when the context
        has ended, and no step has to wait; after an exception they may have any content. Raises
        EngineError, at its end, if they cannot be copied.
        """


def num_at_once(num_bytes: int) -> int:
    """Most blocks of this size for one `reading` or `writing`."""
    return max(1, _BYTES_AT_ONCE // num_bytes)


def in_groups(blocks: BlockBytes, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """The blocks in order, as many as `blocks` takes at once."""
    size = num_at_once(blocks.num_bytes)
    return (block_ids[start : start + size] for start in range(0, len(block_ids), size))


def tensors_of(kv: KVCache) -> list[AnyTensor]:
    """K and V of each layer."""
    pairs = zip(kv.keys, kv.values, strict=True)
    return [tensor for pair in pairs for tensor in pair if tensor is not None]


class BlockForm:
    """What is the same of `BlockBytes` wherever the blocks are: `parts` has the shape and the dtype
    of a block in each layer, `num_bytes` are those of all.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], object]], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._form = repr([(tuple(shape), str(dtype)) for shape, dtype in parts])

    def fingerprint(self, of_model: str) -> str:
        """`BlockBytes.fingerprint`."""
        return blake2b(f"{of_model}\0{self._form}".encode(), digest_size=16).hexdigest()


class HostBlockBytes(BlockForm):
    """`BlockBytes` of a cache on the host: the cache's own memory, without a copy."""

    def __init__(self, kv: KVCache) -> None:
        arrays = list(map(to_numpy, tensors_of(kv)))
        self._layers = [array.reshape(array.shape[0], -1).view("u1") for array in arrays]
        num_bytes = sum(layer.shape[1] for layer in self._layers)
        super().__init__([(array.shape[1:], array.dtype) for array in arrays], num_bytes)

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[list[BlockParts]]:
        """`BlockBytes.reading`."""
        yield self._places(block_ids)

    @contextmanager
    def writing(self, block_ids: Sequence[int]) -> Iterator[list[BlockParts]]:
        """`BlockBytes.writing`."""
        yield self._places(block_ids)

    def _places(self, block_ids: Sequence[int]) -> list[BlockParts]:
        assert len(block_ids) <= num_at_once(self.num_bytes), "more blocks than are moved at once"
        return [
            [memoryview(layer[block_id].data) for layer in self._layers] for block_id in block_ids
        ]
