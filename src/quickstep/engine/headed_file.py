"""Files with a checksummed header, which are there completely or not at all.

    8 bytes magic and version | uint32 length, uint32 crc32 of the header | msgpack header | content

A file is written under another name and renamed, without a sync: one that a crash has cut off
fails its checksums. The content has checksums in the header.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from quickstep.errors import EngineError

_HEAD = struct.Struct("!8sII")
_MAX_HEADER_BYTES = 16 << 20
_FIRST_READ = 4096  # holds most headers
_PIECE_BYTES = 16 << 20  # of a write, so that the interpreter's other threads run in between

_Header = TypeVar("_Header", bound=msgspec.Struct)


class HeadedFormat(Generic[_Header]):
    """A kind of such files.

    Args:
        magic: Of 8 bytes, with the version.
        noun: What a file has, for errors.
        header: The type of the header.
        page_bytes: The content begins at a multiple of it.
    """

    def __init__(self, magic: bytes, noun: str, header: type[_Header], page_bytes: int = 1) -> None:
        assert len(magic) == 8
        self._magic = magic
        self._noun = noun
        self._page_bytes = page_bytes
        self._decode = msgspec.msgpack.Decoder(header).decode

    def write(self, path: Path, header: _Header, content: Iterable[memoryview | bytes]) -> None:
        """Write a file that only its owner may read. Raises OSError."""
        encoded = msgspec.msgpack.encode(header)
        head = _HEAD.pack(self._magic, len(encoded), zlib.crc32(encoded))
        padding = bytes(-(len(head) + len(encoded)) % self._page_bytes)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for part in (head + encoded + padding, *content):
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view[:_PIECE_BYTES]) :]
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def read_header(self, descriptor: int) -> tuple[_Header, int]:
        """The header of an open file, and where its content begins.

        Raises:
            EngineError: It is no such file, or its header has changed.
            OSError: It cannot be read.
        """
        found = os.pread(descriptor, _FIRST_READ, 0)
        if len(found) < _HEAD.size:
            raise EngineError("it is too short")
        magic, length, checksum = _HEAD.unpack_from(found)
        if magic != self._magic:
            raise EngineError(f"it is no file of {self._noun}, or of another version")
        if length > _MAX_HEADER_BYTES:
            raise EngineError(f"its header has {length} bytes")
        end = _HEAD.size + length
        if len(found) < end:
            found += os.pread(descriptor, end - len(found), len(found))
        encoded = found[_HEAD.size : end]
        if len(encoded) != length or zlib.crc32(encoded) != checksum:
            raise EngineError("its header has changed")
        try:
            return self._decode(encoded), end + -end % self._page_bytes
        except msgspec.DecodeError as error:
            raise EngineError(f"its header is none: {error}") from error
