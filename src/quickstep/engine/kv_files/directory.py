"""`KVDirectory`: the files of one model in the directory of `--kv-cache-dir`.

Each model has a directory in it, named after the weights, the kernels and the form of the KV cache,
that only its owner may read. The first process that opens it writes there; others only read, which
a lock ensures that ends with the process.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from quickstep.core.resources.kv_tiers import RestorePiece, SaveOrder, Span
from quickstep.engine.kv_files.span_file import (
    SUFFIX,
    SpanHeader,
    checksum_of,
    read_blocks,
    read_header,
    write_span,
)
from quickstep.engine.private_directory import private_directory
from quickstep.errors import ConfigError, EngineError
from quickstep.version import __version__

_LOGGER = logging.getLogger(__name__)


_LIBRARIES = Path(__file__).parents[2] / "_native"


def identity_of(fingerprint: str, block_size: int, block_bytes: int) -> str:
    """What has to be equal for blocks to be used again: then the same bits follow from them. The
    kernels are this version's, of the library that is installed.
    """
    text = f"{fingerprint}\0{block_size}\0{block_bytes}\0{__version__}"
    digest = blake2b(text.encode(), digest_size=16)
    for library in sorted(_LIBRARIES.glob("*.so")):
        digest.update(library.read_bytes())
    return digest.hexdigest()


class KVDirectory:
    """The files of one model. One thread at a time uses it; `open` makes one.

    Attributes:
        path: Of the directory.
        may_write: False if another process writes there.
    """

    def __init__(self, path: Path, identity: str, block_bytes: int, lock: int | None) -> None:
        self.path = path
        self._identity = identity
        self._block_bytes = block_bytes
        self._lock = lock
        self.may_write = lock is not None

    @staticmethod
    def open(root: Path, identity: str, block_bytes: int) -> KVDirectory:
        """Make the directory if it is not there. Raises ConfigError if it cannot be used."""
        path = root / identity
        try:
            content = "what prompts can be computed from"
            private_directory(path, f"--kv-cache-dir is {root}", content)
            lock = _lock(path)
        except OSError as error:
            raise ConfigError(f"--kv-cache-dir is {root}, which cannot be used: {error}") from None
        if lock is None:
            _LOGGER.warning("another process writes to %s: KV blocks are only read there", path)
        return KVDirectory(path, identity, block_bytes, lock)

    def close(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def spans(self) -> list[Span]:
        """What earlier processes have left, least recently used first. Files that cannot be used
        are removed, and those that were not completed.
        """
        spans = []
        for path in self._files():
            if path.suffix == SUFFIX:
                try:
                    header = read_header(path, self._identity, self._block_bytes)
                except (OSError, EngineError) as error:
                    _LOGGER.warning("%s is not used: %s", path, error)
                else:
                    spans.append(header.span(path.stem))
                    continue
            if self.may_write:
                path.unlink(missing_ok=True)
        return spans

    def _files(self) -> Iterator[Path]:
        """Files of spans, complete or not, in the order of their last use."""
        found = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.endswith((SUFFIX, ".tmp")) and entry.is_file(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        return (self.path / name for _, name in sorted(found))

    def write(self, order: SaveOrder, content: Sequence[Sequence[bytes]]) -> None:
        """Write a span with its blocks' bytes. Raises OSError."""
        checksums = tuple(map(checksum_of, content))
        span = order.span
        header = SpanHeader(self._identity, self._block_bytes, span.first, order.blocks, checksums)
        parts = [part for block in content for part in block]
        write_span(self._file(span.name), header, parts)

    def read(self, piece: RestorePiece, places: Sequence[Sequence[memoryview]]) -> None:
        """Read blocks into their places; they count as used now. Raises EngineError, OSError."""
        path = self._file(piece.name)
        identity = self._identity, self._block_bytes
        read_blocks(path, *identity, piece.start, piece.blocks, places)
        if self.may_write:
            os.utime(path)

    def remove(self, names: Sequence[str]) -> None:
        """Remove the files of spans; one that is not there or cannot be removed is left."""
        if not self.may_write:
            return
        for name in names:
            try:
                self._file(name).unlink(missing_ok=True)
            except OSError as error:
                _LOGGER.warning("%s is not removed: %s", self._file(name), error)

    def _file(self, name: str) -> Path:
        return self.path / (name + SUFFIX)


def _lock(path: Path) -> int | None:
    """The lock of a directory; None if another process has it. Raises OSError."""
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
