"""`PackedLoading`: the native loading of a model's matrices, from the file of an earlier start.

A start reads, rounds and packs each matrix of a checkpoint; the result depends on the checkpoint,
the options and this version's code only. The first start writes it to a file, after the model is
loaded, in a thread. Later ones map that file: nothing is converted, pages are shared by processes,
and the system may take them back, for they are in the file.

What was mapped has the checksum of what was packed, or is packed again. The checkpoint's files are
identified by their place on the disk, size and time of change, which `identity_of` reads.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.cache_dir import cache_dir
from quickstep.engine.packed_weights.directory import (
    FORMAT,
    PAGE_BYTES,
    PackedDirectory,
    PackedEntry,
    PackedHeader,
)
from quickstep.errors import ConfigError, EngineError, size_text
from quickstep.model.checkpoint.weights import open_checkpoint_files
from quickstep.model.spec import read_config

if TYPE_CHECKING:
    from quickstep.config import LoadConfig
    from quickstep.model.checkpoint.safetensors_files import TensorFiles
    from quickstep.model.checkpoint.source import Checkpoint
    from quickstep.ops.table import LoadLinearOp, OpTable, PackedFiles
    from quickstep.ops.tensors import AnyTensor, DType
    from quickstep.ops.weights import LinearWeight, StoredMatrix

_LOGGER = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parents[2]
# Smaller models are not kept: to map them saves nothing.
_LEAST_BYTES = 64 << 20
# At most so many bytes are packed for one of a file: IQ1 is held in 8 bits.
_MOST_GROWTH = 6
_LAST_PRIORITY = 19
# The code between files and packed weights.
_CODE = ("model", "ops")


class PackedLoading:
    """Loads the matrices of one model, in the order in which they are always loaded.

    Args:
        identity: `identity_of`.
        model: Its name, and how it is held; for people.
        settings: `model.loader.fingerprint_settings`.
    """

    def __init__(
        self,
        directory: PackedDirectory,
        files: PackedFiles,
        load: LoadLinearOp,
        identity: str,
        model: str,
        settings: tuple[str, ...],
    ) -> None:
        assert files.page_bytes == PAGE_BYTES
        self._directory = directory
        self._files = files
        self._load = load
        self._identity = identity
        self._model = model
        self._settings = settings
        self._file = _OpenFile.open(directory, identity)
        self._loaded: list[tuple[LinearWeight, float | None]] = []
        self._num_mapped = 0
        self._is_finished = False

    @staticmethod
    def open(
        load: LoadConfig,
        checkpoint: Checkpoint,
        dtype: DType,
        ops: OpTable,
        part: str,
        fingerprint_settings: tuple[str, ...],
    ) -> PackedLoading | None:
        """For what a process has of a model; None where nothing is kept."""
        root = cache_dir()
        if not load.packed_cache_bytes or root is None:
            return None
        if ops.packed_files is None or ops.load_linear is None:
            return None
        try:
            files = open_checkpoint_files(checkpoint.path)
            if _MOST_GROWTH * files.num_bytes < _LEAST_BYTES:
                return None
            directory = PackedDirectory.open(root, load.packed_cache_bytes)
            rounding = load.quantization or ""
            settings = str(dtype), rounding, ops.packed_files.layout, part
            identity = identity_of(read_config(checkpoint.path), files, settings)
        except (ConfigError, OSError) as error:
            _LOGGER.warning("packed weights are not kept for later starts: %s", error)
            return None
        held = " ".join(filter(None, (checkpoint.name, rounding, part)))
        how = ops.packed_files, ops.load_linear, identity, held, fingerprint_settings
        return PackedLoading(directory, *how)

    @property
    def fingerprint(self) -> str | None:
        """The model's, if an earlier start computed it from the same files with these settings."""
        if self._file is None or self._file.header.settings != self._settings:
            return None
        return self._file.header.fingerprint

    def load_linear(self, matrix: StoredMatrix, bias: AnyTensor | None) -> LinearWeight:
        """`OpTable.load_linear`."""
        if self._is_finished:
            return self._load(matrix, bias)
        weight = self._mapped(matrix)
        if weight is not None:
            self._num_mapped += 1
            return weight
        errors: list[float] = []
        weight = self._load(_noting_error(matrix, errors), bias)
        self._loaded.append((weight, errors[0] if errors else None))
        return weight

    def finish(self, fingerprint: str) -> None:
        """All matrices of the model with this fingerprint are loaded: write them in a thread,
        unless they came from the file.
        """
        self._is_finished = True
        loaded, self._loaded = self._loaded, []
        if self._file is not None:
            self._file.close()
            if self._num_mapped == self._file.num_weights and not loaded:
                _LOGGER.info("weights are mapped from %s", self._file.path)
                return
            self._directory.remove(self._file.path)
            if self._num_mapped:  # the file has changed since it was opened
                return
        if sum(weight.nbytes for weight, _ in loaded) < _LEAST_BYTES:
            return
        header = self._header(
            loaded, fingerprint
        )  # with checksums, while the kernels' threads are idle
        weights = [weight for weight, _ in loaded]
        writing = partial(self._write, header, weights)
        threading.Thread(target=writing, name="packed-weights", daemon=True).start()

    def _mapped(self, matrix: StoredMatrix) -> LinearWeight | None:
        if self._file is None or self._loaded:
            return None
        entry = self._file.next_entry()
        shape = sum(part.num_rows for part in matrix.parts), matrix.num_inputs
        if entry is None or (entry.form.n, entry.form.k) != shape:
            return None
        weight = self._file.weight(self._files, entry)
        if weight is None:
            _LOGGER.warning("%s has changed: the weights are packed again", self._file.path)
        elif matrix.rounding is not None and entry.error is not None:
            matrix.rounding.report_error(entry.error)
        return weight

    def _header(
        self, loaded: Sequence[tuple[LinearWeight, float | None]], fingerprint: str
    ) -> PackedHeader:
        entries, offset = [], 0
        for weight, error in loaded:
            form = self._files.form(weight)
            entries.append(PackedEntry(form, offset, error))
            offset += sum(map(_page_rounded, form.part_bytes))
        named = self._identity, self._model
        return PackedHeader(*named, tuple(entries), offset, fingerprint, self._settings)

    def _write(self, header: PackedHeader, weights: Sequence[LinearWeight]) -> None:
        with suppress(OSError):  # requests come first, where each thread has a priority (Linux)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST_PRIORITY)
        size, path = header.num_bytes, self._directory.file(self._identity)
        try:
            reason = self._directory.make_room(size)
            if reason:
                _LOGGER.info("packed weights are not kept for later starts: %s", reason)
                return
            self._directory.write(header, self._content(weights))
        except OSError as error:
            _LOGGER.warning("packed weights are not kept for later starts: %s", error)
        else:
            _LOGGER.info("packed weights are kept in %s (%s)", path, size_text(size))

    def _content(self, weights: Sequence[LinearWeight]) -> Iterator[memoryview | bytes]:
        for weight in weights:
            for part in self._files.parts(weight):
                yield part
                yield bytes(_page_rounded(len(part)) - len(part))


class _OpenFile:
    """A file that is being mapped."""

    def __init__(self, path: Path, descriptor: int, header: PackedHeader, start: int) -> None:
        self.path = path
        self.header = header
        self.num_weights = len(header.weights)
        self._descriptor = descriptor
        self._entries = iter(header.weights)
        self._start = start

    @staticmethod
    def open(directory: PackedDirectory, identity: str) -> _OpenFile | None:
        """The file of an identity; None if it is not there, or cannot be used."""
        path = directory.file(identity)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            header, start = FORMAT.read_header(descriptor)
            size = os.fstat(descriptor).st_size
            if header.identity != identity:
                raise EngineError(f"it is of {header.identity}")
            if size != start + header.num_bytes:
                raise EngineError(f"it has {size} bytes, not {start + header.num_bytes}")
            os.utime(path)
        except (OSError, EngineError) as error:
            os.close(descriptor)
            _LOGGER.warning("%s is not used: %s", path, error)
            directory.remove(path)
            return None
        return _OpenFile(path, descriptor, header, start)

    def next_entry(self) -> PackedEntry | None:
        """The weight that is loaded next."""
        return next(self._entries, None)

    def weight(self, files: PackedFiles, entry: PackedEntry) -> LinearWeight | None:
        """A weight of the file; None if its bytes have changed."""
        return files.map(entry.form, self._descriptor, self._start + entry.offset)

    def close(self) -> None:
        """What is mapped stays."""
        os.close(self._descriptor)


def identity_of(config: Mapping[str, object], files: TensorFiles, settings: Sequence[str]) -> str:
    """Equal where packed weights are equal: the config, the checkpoint's files as the disk knows
    them, `settings` (dtype, rounding, kernels, part of the model) and the code that packs. Raises
    OSError.
    """
    digest = blake2b(digest_size=16)
    digest.update(json.dumps(config, sort_keys=True).encode())
    digest.update("\0".join((*settings, _code_digest())).encode())
    for header in files.headers:
        digest.update(header)
    for path in sorted({tensor.file for tensor in files.tensors.values()}):
        status = path.stat()
        place = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        digest.update(repr(place).encode())
    return digest.hexdigest()


@cache
def _code_digest() -> str:
    digest = blake2b(digest_size=16)
    for folder in _CODE:
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _noting_error(matrix: StoredMatrix, errors: list[float]) -> StoredMatrix:
    """The matrix; what rounding changes is noted as well as reported."""
    rounding = matrix.rounding
    if rounding is None:
        return matrix

    def report(error: float) -> None:
        errors.append(error)
        rounding.report_error(error)

    return replace(matrix, rounding=replace(rounding, report_error=report))


def _page_rounded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % PAGE_BYTES
