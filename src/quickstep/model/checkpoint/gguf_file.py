"""A `.gguf` file: metadata, and the places of its tensors. No torch; nothing is decoded here.

Layout (ggml's docs/gguf.md): `GGUF`, u32 version, u64 tensors, u64 metadata pairs, the pairs, the
tensors' names, dimensions (innermost first), types and offsets, then aligned data. Headers are
walked in mapped memory. The pages of tensors are never touched here: they are read like
safetensors', by offset.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import msgspec

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.gguf_names import gguf_parts
from quickstep.model.checkpoint.safetensors_files import StoredTensor
from quickstep.ops.native.pieces import read_texts, skip_texts

# type -> (elements, bytes) of a block
BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "F32": (1, 4),
        "F16": (1, 2),
        "BF16": (1, 2),
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q5_1": (32, 24),
        "Q8_0": (32, 34),
        "Q4_K": (256, 144),
        "Q5_K": (256, 176),
        "Q6_K": (256, 210),
        "Q2_K": (256, 84),
        "Q3_K": (256, 110),
        "IQ4_NL": (32, 18),
        "IQ4_XS": (256, 136),
        "TQ1_0": (256, 54),
        "TQ2_0": (256, 66),
        "MXFP4": (32, 17),
        "IQ1_S": (256, 50),
        "IQ1_M": (256, 56),
        "IQ2_XXS": (256, 66),
        "IQ2_XS": (256, 74),
        "IQ2_S": (256, 82),
        "IQ3_XXS": (256, 98),
        "IQ3_S": (256, 110),
        "NVFP4": (64, 36),
    }
)
_TYPE_NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K"},
    **{11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
    41: "Q1_0",
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 256  # of a tensor; ggml's own limit is 64
_SPLIT_COUNT, _SPLIT_NUMBER = "split.count", "split.no"
_SPLIT_TENSORS = "split.tensors.count"
_MANY = 1000  # texts: fewer are not worth a call
_ARRAY_CODES = frozenset("BbHhIifQqd")  # of numbers that `array` has with the sizes of files
_OF_VOCABULARY = "tokenizer."
_SETTLED_NS = 2_000_000_000


class TextList(msgspec.Struct, frozen=True):
    """Texts from `start` to `end` of the header, each its size in 8 bytes and UTF-8."""

    count: int
    start: int
    end: int


class GgufFile(msgspec.Struct, frozen=True, eq=False):
    """One file's metadata and tensors by their own names, and where its lists of text are. A long
    list of numbers of a vocabulary is an `array`, other ones are tuples. Equal to itself only:
    `open_gguf` returns the same one again while the file is the same, so what is computed from it
    can be cached.
    """

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]
    header: bytes
    text_lists: Mapping[str, TextList] = MappingProxyType({})

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of text, such as the vocabulary, with replacements of what is no UTF-8."""
        listed = self.text_lists[key]
        content = self.header[listed.start : listed.end]
        if listed.count >= _MANY:
            texts = read_texts(content, listed.count)
            if texts is not None:
                return texts
        found, end, length = [], 0, struct.Struct("<Q").unpack_from
        for _ in range(listed.count):
            start = end + 8
            end = start + length(content, end)[0]
            found.append(content[start:end].decode("utf-8", "replace"))
        return tuple(found)


def open_gguf(path: Path) -> GgufFile:
    """Read a file's header, or those of all its parts, of which `path` may be any.

    Raises:
        ConfigError: Not such a file, of another version, without one of its parts, truncated or
            corrupt.
    """
    parts = gguf_parts(path)
    missing = [part.name for part in parts if not part.exists()]
    if missing and len(parts) > 1:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{path} is one of {len(parts)} parts, and {missing[0]}{more} is missing")
    return _known_file(path, tuple(map(_header_of, parts)))


@lru_cache(maxsize=8)
def _known_file(path: Path, parts: tuple[GgufFile, ...]) -> GgufFile:
    first = parts[0]
    count = first.metadata.get(_SPLIT_COUNT, 0)
    if not isinstance(count, int):
        raise ConfigError(f"{first.path} sets {_SPLIT_COUNT!r} to {count!r:.80}, not to an integer")
    if count not in (0, 1, len(parts)):
        raise ConfigError(
            f"{path} is one of {count} parts, which must be next to each other and be called "
            f"NAME-00001-of-{count:05}.gguf and so on; or merge them (llama-gguf-split --merge)"
        )
    return _joined(parts)


def _joined(parts: Sequence[GgufFile]) -> GgufFile:
    """The first part has the metadata; each has the tensors that it names."""
    first = parts[0]
    tensors = dict(first.tensors)
    for number, part in enumerate(parts[1:], 1):
        found = (part.metadata.get(_SPLIT_COUNT), part.metadata.get(_SPLIT_NUMBER))
        if found != (len(parts), number):
            raise ConfigError(
                f"{part.path} says that it is part {found[1]} of {found[0]}, counted from 0, and "
                f"its name says {number} of {len(parts)}; download the parts again"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ConfigError(
                    f"tensor {name!r} is both in {tensors[name].file} and in {part.path}"
                )
            tensors[name] = tensor
    total = first.metadata.get(_SPLIT_TENSORS, len(tensors))
    if len(parts) > 1 and total != len(tensors):
        raise ConfigError(
            f"{first.path} and its other parts hold {len(tensors)} tensors, its header says {total}"
        )
    header = b"".join(part.header for part in parts)
    tensors_of_all = MappingProxyType(tensors)
    return GgufFile(first.path, first.metadata, tensors_of_all, header, first.text_lists)


def _header_of(path: Path) -> GgufFile:
    """A header, which a start needs about ten times: read once, unless the file has just changed,
    and could change again within one tick of the file system's clock.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if time.time_ns() - found.st_mtime_ns < _SETTLED_NS:
        return _read_header(path)
    return _known_header(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=64)  # parts; only the first one has a vocabulary
def _known_header(path: Path, place_and_time: tuple[int, ...]) -> GgufFile:
    del place_and_time  # a part of the key: a file that is replaced is read again
    return _read_header(path)


def _read_header(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as m:
            return _Header(path, m).read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (struct.error, OverflowError):
        raise ConfigError(
            f"{path} is truncated or corrupt: its header ends after the file; download it again"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is truncated or corrupt: {error}; download it again") from None


class _Header:
    """Walks a header once, front to back."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._at = 0

    def read(self) -> GgufFile:
        if self._content[:4] != _MAGIC:
            raise ConfigError(f"{self._path} is not a GGUF file: it does not start with GGUF")
        self._at = 4
        version = self._int("I")
        if version not in _VERSIONS:
            raise ConfigError(
                f"{self._path} is of GGUF version {version}; little-endian 2 and 3 are supported"
            )
        num_tensors, num_pairs = self._int("Q"), self._int("Q")
        metadata: dict[str, object] = {}
        text_lists: dict[str, TextList] = {}
        for _ in range(num_pairs):
            key = self._text()
            value = self._value(self._int("I"), key.startswith(_OF_VOCABULARY))
            if key in metadata or key in text_lists:
                raise ValueError(f"it has the metadata {key!r:.80} twice")
            if isinstance(value, TextList):
                text_lists[key] = value
            else:
                metadata[key] = value
        described = [self._tensor() for _ in range(num_tensors)]
        header = bytes(self._content[: self._at])
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"it aligns tensors to {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for entry in described:
            if entry[0] in tensors:
                raise ValueError(f"it has the tensor {entry[0]!r} twice")
            tensors[entry[0]] = self._stored(entry, start)
        found = MappingProxyType(metadata), MappingProxyType(tensors)
        return GgufFile(self._path, *found, header, MappingProxyType(text_lists))

    def _numbers(self, code: str, count: int) -> tuple[object, ...]:
        """The next `count` numbers, of a code of the module `struct`."""
        numbers = struct.unpack_from(f"<{count}{code}", self._content, self._at)
        self._at += struct.calcsize(f"<{count}{code}")
        return numbers

    def _int(self, code: str) -> int:
        (value,) = self._numbers(code, 1)
        assert isinstance(value, int)
        return value

    def _text(self, most: int | None = None) -> str:
        length = self._int("Q")
        if most is not None and length > most:
            raise ValueError(f"a tensor's name has {length} bytes")
        start = self._at
        self._at += length
        if self._at > len(self._content):
            raise ValueError(f"it has {len(self._content)} bytes, a text ends at {self._at}")
        return self._content[start : self._at].decode("utf-8", "replace")

    def _array(self, code: str, count: int) -> array[int] | array[float]:
        """The next `count` numbers, without an object for each."""
        numbers = array(code)
        size = count * numbers.itemsize
        content = self._content[self._at : self._at + size]
        if len(content) < size:
            raise ValueError(f"it ends within a list of {count} numbers")
        numbers.frombytes(content)
        if sys.byteorder == "big":
            numbers.byteswap()
        self._at += size
        return numbers

    def _value(self, kind: int, of_vocabulary: bool) -> object:
        if kind in _SCALARS:
            (value,) = self._numbers(_SCALARS[kind], 1)
            return value
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"metadata of the unknown type {kind}")
        inner, count = self._int("I"), self._int("Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            if of_vocabulary and count >= _MANY and code in _ARRAY_CODES:
                return self._array(code, count)
            return self._numbers(code, count)
        if inner != _STRING:
            raise ValueError(f"metadata holds a list of the unsupported type {inner}")
        return self._skip(count)

    def _skip(self, count: int) -> TextList:
        """Past `count` texts; a vocabulary has hundreds of thousands."""
        content, length = self._content, struct.Struct("<Q").unpack_from
        num_left, at = skip_texts(content, self._at, count) if count >= _MANY else (count, self._at)
        for _ in range(num_left):
            at += 8 + length(content, at)[0]
        if at > len(content):
            raise ValueError(f"it has {len(content)} bytes, a text ends at {at}")
        skipped = TextList(count, self._at, at)
        self._at = at
        return skipped

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        name = self._text(_MAX_NAME_BYTES)
        num_dimensions = self._int("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self._int("Q") for _ in range(num_dimensions))[::-1]
        kind, offset = self._int("I"), self._int("Q")
        type_name = _TYPE_NAMES.get(kind, f"type {kind}")
        if type_name not in BLOCKS:
            raise ConfigError(
                f"{self._path} stores {name} as {type_name}; supported are {', '.join(BLOCKS)}"
            )
        return name, shape, type_name, offset

    def _stored(self, entry: tuple[str, tuple[int, ...], str, int], start: int) -> StoredTensor:
        name, shape, kind, offset = entry
        elements, num_bytes = BLOCKS[kind]
        if not shape or 0 in shape or shape[-1] % elements:
            raise ValueError(f"tensor {name!r} of shape {shape} does not fill blocks of {kind}")
        nbytes = math.prod(shape) // elements * num_bytes
        end = start + offset + nbytes
        if end > len(self._content):
            raise ValueError(f"it has {len(self._content)} bytes, tensor {name!r} ends at {end}")
        return StoredTensor(name, kind, shape, self._path, start + offset, nbytes)
