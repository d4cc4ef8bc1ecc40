"""The file of a span: consecutive KV blocks of one chain.

    8 bytes magic and version | uint32 length, uint32 crc32 of the header | msgpack SpanHeader
    then each block's bytes: K and V of every layer

A file is written under another name and renamed, without a sync: one that a crash has cut off, or
whose bytes have changed, fails its checksums, and its blocks are computed again.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quickstep.core.resources.kv_tiers import Span, TierBlock
from quickstep.errors import EngineError

SUFFIX = ".kv"
_MAGIC = b"QSKVSPN1"
_HEAD = struct.Struct("!8sII")
_MAX_HEADER_BYTES = 16 << 20
_FIRST_READ = 4096  # holds most headers


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


_HEADER = msgspec.msgpack.Decoder(SpanHeader)


def write_span(path: Path, header: SpanHeader, content: Sequence[memoryview | bytes]) -> None:
    """Write a file, so that it is there completely or not at all. Raises OSError."""
    encoded = msgspec.msgpack.encode(header)
    head = _HEAD.pack(_MAGIC, len(encoded), zlib.crc32(encoded))
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        # for its owner only: a prompt can be computed from its KV
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for part in (head + encoded, *content):
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read_header(path: Path, identity: str, block_bytes: int) -> SpanHeader:
    """Raises EngineError for a file that is none, or is of another model; OSError."""
    with path.open("rb", buffering=0) as file:
        header, start = _read_header(file.fileno())
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
        header, first_byte = _read_header(file.fileno())
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


def _read_header(descriptor: int) -> tuple[SpanHeader, int]:
    """The header, and where the blocks begin."""
    found = os.pread(descriptor, _FIRST_READ, 0)
    if len(found) < _HEAD.size:
        raise EngineError("it is too short")
    magic, length, checksum = _HEAD.unpack_from(found)
    if magic != _MAGIC:
        raise EngineError("it is no file of KV blocks, or of another version")
    if length > _MAX_HEADER_BYTES:
        raise EngineError(f"its header has {length} bytes")
    end = _HEAD.size + length
    if len(found) < end:
        found += os.pread(descriptor, end - len(found), len(found))
    encoded = found[_HEAD.size : end]
    if len(encoded) != length or zlib.crc32(encoded) != checksum:
        raise EngineError("its header has changed")
    try:
        return _HEADER.decode(encoded), end
    except msgspec.DecodeError as error:
        raise EngineError(f"its header is none: {error}") from error
