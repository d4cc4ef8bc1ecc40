"""The file of a span: consecutive KV blocks of one chain.

A `HeadedFormat` with a `SpanHeader`, and then each block's bytes: K and V of every layer. Blocks of
a file whose bytes have changed, or that a crash has cut off, are computed again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quickstep.core.resources.kv_tiers import Span, TierBlock
from quickstep.engine.headed_file import HeadedFormat
from quickstep.errors import EngineError

SUFFIX = ".kv"


class SpanHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a file says of itself.

    Attributes:
        identity: Of the weights, the kernels and the form of the KV cache.
        block_bytes: Of a block in all layers.
        checksums: crc32 of each block.
    """

    identity: str
    block_bytes: int
    first: int
    blocks: tuple[TierBlock, ...]
    checksums: tuple[int, ...]

    def span(self, name: str) -> Span:
        """The span, for the index."""
        return Span(name, self.first, tuple(block.digest for block in self.blocks))


_FORMAT = HeadedFormat(b"QSKVSPN1", "KV blocks", SpanHeader)


def write_span(path: Path, header: SpanHeader, content: Sequence[memoryview | bytes]) -> None:
    """Write a file, so that it is there completely or not at all; for its owner only, since a
    prompt can be computed from its KV. Raises OSError.
    """
    _FORMAT.write(path, header, content)


def read_header(path: Path, identity: str, block_bytes: int) -> SpanHeader:
    """Raises EngineError for a file that is none, or is of another model; OSError."""
    with path.open("rb", buffering=0) as file:
        header, start = _FORMAT.read_header(file.fileno())
        size = os.fstat(file.fileno()).st_size
    _check(header, identity, block_bytes)
    if size != start + len(header.blocks) * block_bytes:
        raise EngineError(f"it has {size} bytes, not those of {len(header.blocks)} blocks")
    return header


def read_blocks(
    path: Path,
    identity: str,
    block_bytes: int,
    start: int,
    expected: Sequence[TierBlock],
    places: Sequence[Sequence[memoryview]],
) -> None:
    """Read the blocks of a span from its block `start` on into their places, which have the content
    of the file only if this returns.

    Raises:
        EngineError: The file has other blocks there, or has changed.
        OSError: It cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        header, first_byte = _FORMAT.read_header(file.fileno())
        _check(header, identity, block_bytes)
        end = start + len(expected)
        if header.blocks[start:end] != tuple(expected):
            raise EngineError("it has other blocks")
        offset = first_byte + start * block_bytes
        for place, checksum in zip(places, header.checksums[start:end], strict=True):
            num_read = os.preadv(file.fileno(), place, offset)
            if num_read != block_bytes:
                raise EngineError(f"it ends {block_bytes - num_read} bytes early")
            if checksum_of(place) != checksum:
                raise EngineError("a block has changed")
            offset += block_bytes


def checksum_of(parts: Sequence[memoryview | bytes]) -> int:
    """crc32 of a block."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _check(header: SpanHeader, identity: str, block_bytes: int) -> None:
    if header.identity != identity:
        raise EngineError(f"it is of {header.identity}, this engine has {identity}")
    if header.block_bytes != block_bytes:
        raise EngineError(f"its blocks have {header.block_bytes} bytes, here {block_bytes}")
    if len(header.checksums) != len(header.blocks) or not header.blocks:
        raise EngineError("its header is wrong")
