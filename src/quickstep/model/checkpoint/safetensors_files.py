"""The tensors of a checkpoint directory: headers are checked at opening, bytes read on request.

Reads safetensors with plain file reads into the caller's memory: nothing is mapped, so the peak
is one destination and no page of the file stays mapped. Never opens a pickle. Used by the loader
and by sizing.

File layout (https://huggingface.co/docs/safetensors): u64 little-endian header length, JSON
header {name: {dtype, shape, data_offsets}}, then the tensors' bytes one after another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO, RawIOBase
from pathlib import Path
from types import MappingProxyType

import msgspec

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import read_json

# Bits of an element, of every type that the safetensors library reads.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64}
_BITS |= {"U64": 64, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
_MAX_DIMENSIONS, _MAX_SIZE = 32, 2**63
_COMPARED_BYTES = 4 * 2**20  # at a time
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class StoredTensor(msgspec.Struct, frozen=True):
    """The place of one tensor's bytes: `offset` counts from the start of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class TensorFiles(msgspec.Struct, frozen=True):
    """All tensors of a checkpoint by name, and the raw headers (for the fingerprint)."""

    tensors: Mapping[str, StoredTensor]
    headers: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read_into(self, name: str, destination: memoryview, start: int = 0) -> None:
        """Fill `destination` (bytes) with the tensor's bytes from `start`. Raises ConfigError."""
        tensor = self.tensors[name]
        with _opened(tensor.file) as stream:
            _read_at(stream, tensor, start, destination)

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes. Raises ConfigError."""
        a, b = self.tensors[name], self.tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        spans = [
            (start, min(_COMPARED_BYTES, a.nbytes - start))
            for start in range(0, a.nbytes, _COMPARED_BYTES)
        ]
        pairs = zip(self.pieces(name, spans), self.pieces(other, spans), strict=True)
        return all(piece == same for piece, same in pairs)

    def pieces(self, name: str, spans: Iterable[tuple[int, int]]) -> Iterator[bytearray]:
        """The tensor's bytes at each (start, length), the file opened once. Raises ConfigError."""
        tensor = self.tensors[name]
        with _opened(tensor.file) as stream:
            for start, length in spans:
                piece = bytearray(length)
                _read_at(stream, tensor, start, memoryview(piece))
                yield piece


def open_tensor_files(path: str | Path) -> TensorFiles:
    """Read and check the headers of all safetensors files of a checkpoint.

    Raises:
        ConfigError: No safetensors, a missing shard, or a truncated or corrupt file.
    """
    shards = _shards(Path(path))
    tensors: dict[str, StoredTensor] = {}
    headers: list[bytes] = []
    for file in shards.files:
        header = _read_header(file)
        headers.append(header)
        for name, tensor in _parse_header(file, header).items():
            other = tensors.get(name)
            listed = shards.place_of.get(name)
            if other is None or listed == file.name:
                tensors[name] = tensor
            elif listed != other.file.name:
                raise ConfigError(
                    f"tensor {name!r} is both in {other.file} and in {file}, and no index says "
                    "which one counts"
                )
    return TensorFiles(tensors, tuple(headers))


def open_tensor_file(file: Path) -> TensorFiles:
    """Read and check the header of one safetensors file. Raises ConfigError."""
    header = _read_header(file)
    return TensorFiles(_parse_header(file, header), (header,))


def read_span(file: Path, offset: int, destination: memoryview) -> None:
    """Fill `destination` (bytes) with a file's bytes from `offset`. Raises ConfigError."""
    with _opened(file) as stream:
        stream.seek(offset)
        if _fill(stream, destination) < len(destination):
            raise ConfigError(f"{file} ended within a tensor; download the checkpoint again")


@contextmanager
def _opened(file: Path) -> Iterator[FileIO]:
    try:
        with file.open("rb", buffering=0) as stream:
            yield stream
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _read_at(stream: FileIO, tensor: StoredTensor, start: int, destination: memoryview) -> None:
    stream.seek(tensor.offset + start)
    if _fill(stream, destination) < len(destination):
        raise ConfigError(
            f"{tensor.file} ended within tensor {tensor.name!r}; download the checkpoint again"
        )


def _fill(stream: RawIOBase, destination: memoryview) -> int:
    """Read until `destination` is full or the file ends; return the number of bytes read."""
    filled = 0
    while filled < len(destination):
        count = stream.readinto(destination[filled:])
        if not count:
            break
        filled += count
    return filled


class _Shards(msgspec.Struct, frozen=True):
    """The files of a checkpoint; `place_of` is the index: the name of each tensor's file."""

    files: Sequence[Path]
    place_of: Mapping[str, object] = MappingProxyType({})


def _shards(path: Path) -> _Shards:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_shards(index)
    single = path / "model.safetensors"
    files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if files:
        return _Shards(files)
    pickles = [file.name for pattern in _PICKLES for file in sorted(path.glob(pattern))]
    if pickles:
        raise ConfigError(
            f"{path} holds only pickle weights ({pickles[0]}), which can run code when they are "
            "opened and are never loaded; convert them to safetensors (with transformers: "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`)"
        )
    raise ConfigError(f"{path} holds no .safetensors file, so there are no weights to load")


def _indexed_shards(index: Path) -> _Shards:
    try:
        place_of = read_json(index).get("weight_map")
    except ConfigError as error:
        raise ConfigError(f"{index.name} is not a safetensors index: {error}") from None
    if not isinstance(place_of, Mapping) or not place_of:
        raise ConfigError(f"{index} is not a safetensors index: it has no weight_map")
    files = [index.parent / name for name in sorted(set(map(str, place_of.values())))]
    outside = next((file for file in files if file.parent != index.parent), None)
    if outside is not None:
        raise ConfigError(f"{index} names {outside}, outside of the checkpoint's directory")
    missing = next((file for file in files if not file.is_file()), None)
    single = index.parent / "model.safetensors"
    if single.is_file() and not any(file.is_file() for file in files):
        return _Shards([single])  # the index is of an earlier form of the checkpoint
    if missing is not None:
        raise ConfigError(
            f"{missing} is missing, although {index.name} lists it; download the checkpoint again"
        )
    return _Shards(files, place_of)


def _read_header(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _corrupt(file, f"its {size} bytes do not hold its header")
            return stream.read(length)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _parse_header(file: Path, header: bytes) -> dict[str, StoredTensor]:
    try:
        entries = json.loads(header)
        if not isinstance(entries, dict):
            raise ValueError("it is no JSON object")
        entries.pop("__metadata__", None)
        start = 8 + len(header)
        tensors = [_stored(file, start, name, entry) for name, entry in entries.items()]
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"its header is not readable ({error})") from None
    # as the library has them: an empty tensor comes before one that begins at the same place
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            raise _corrupt(file, f"tensor {tensor.name!r} does not follow the one before it")
        end += tensor.nbytes
    size = file.stat().st_size
    if size < end:
        raise _corrupt(file, f"it has {size} bytes and its header describes {end}")
    if size > end:
        raise _corrupt(file, f"{size - end} bytes follow its last tensor")
    return {tensor.name: tensor for tensor in tensors}


def _stored(file: Path, start: int, name: str, entry: object) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name!r} is no JSON object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has no shape or no offsets")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {len(shape)} dimensions")
    if not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in (*shape, *offsets)):
        raise ValueError(f"tensor {name!r} has sizes that are no numbers from 0 to 2^63")
    nbytes = offsets[1] - offsets[0]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ConfigError(
            f"{file} stores tensor {name!r} as {dtype!r:.80}, which is not supported; known are "
            f"{', '.join(_BITS)}"
        )
    if 8 * nbytes != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"tensor {name!r} has {nbytes} bytes for shape {shape} in {dtype}")
    return StoredTensor(name, dtype, tuple(shape), file, start + offsets[0], nbytes)


def _corrupt(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file} is truncated or corrupt: {reason}; download the checkpoint again")
