"""`PackedDirectory`: files of packed weights, one for each part of a model that a process has.

A file has a `PackedHeader`, and then the parts of each weight (`ops.table.PackedFiles`), each at a
page. Its name is its identity (`packed_weights.loading`). Files are written under another name
and renamed, and removed by name only: a process that has mapped one keeps its bytes.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from quickstep.engine.headed_file import HeadedFormat
from quickstep.engine.private_directory import private_directory
from quickstep.errors import ConfigError, EngineError, size_text
from quickstep.ops.weights import PackedForm

_LOGGER = logging.getLogger(__name__)
SUFFIX = ".packed"
PAGE_BYTES = 4096
# Of the disk that stays free.
_FREE_PART = 0.1


class PackedEntry(msgspec.Struct, frozen=True, array_like=True):
    """A weight in a file.

    Attributes:
        offset: Of its first part in the content.
        error: What rounding changed (`Rounding.report_error`); None where nothing was rounded.
    """

    form: PackedForm
    offset: int
    error: float | None


class PackedHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a file says of itself.

    Attributes:
        identity: Equal for what has equal bytes.
        model: Its name, and how it is held; for people.
        weights: In the order in which they are loaded.
        num_bytes: Of the content.
        fingerprint: The model's, which takes longer to compute than to read.
        settings: Those of the fingerprint (`model.loader.fingerprint_settings`).
    """

    identity: str
    model: str
    weights: tuple[PackedEntry, ...]
    num_bytes: int
    fingerprint: str
    settings: tuple[str, ...]


FORMAT = HeadedFormat(b"QSPACKD2", "packed weights", PackedHeader, PAGE_BYTES)


class PackedFileInfo(msgspec.Struct, frozen=True):
    """A file as `quickstep cache ls` shows it; `used_s` is when it was used last, since 1970."""

    path: Path
    model: str
    num_bytes: int
    used_s: float


class PackedDirectory:
    """The files in one directory, `max_bytes` together. `open` makes one."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    @staticmethod
    def open(root: Path, max_bytes: int) -> PackedDirectory:
        """Of a cache directory. Raises ConfigError if it cannot be used."""
        path = root / "packed"
        try:
            private_directory(path, f"the cache directory is {root}", "weights that are computed")
        except OSError as error:
            raise ConfigError(f"the cache directory {path} cannot be used: {error}") from None
        return PackedDirectory(path, max_bytes)

    def file(self, identity: str) -> Path:
        """Where the weights of an identity are, if they are there."""
        return self.path / (identity + SUFFIX)

    def files(self) -> list[PackedFileInfo]:
        """The files, least recently used first. One that cannot be read has no model."""
        found = []
        for path in self._paths(SUFFIX):
            try:
                status = path.stat()
                found.append(PackedFileInfo(path, _model_of(path), status.st_size, status.st_mtime))
            except FileNotFoundError:  # another process has removed it
                continue
        return sorted(found, key=lambda info: (info.used_s, info.path))

    def make_room(self, num_bytes: int) -> str:
        """Remove the least recently used files until there is room for so many bytes; why there can
        be none, or "".
        """
        if num_bytes > self._max_bytes:
            return (
                f"it takes {size_text(num_bytes)}, and --packed-cache-bytes is "
                f"{size_text(self._max_bytes)}"
            )
        self.prune(self._max_bytes - num_bytes)
        disk = shutil.disk_usage(self.path)
        if disk.free - num_bytes < _FREE_PART * disk.total:
            return f"{size_text(disk.free)} of the disk are free"
        return ""

    def prune(self, num_bytes: int) -> list[PackedFileInfo]:
        """Remove the least recently used files until so many bytes are left; which they were."""
        self._remove_unfinished()
        files = self.files()
        total, removed = sum(info.num_bytes for info in files), []
        for info in files:
            if total <= num_bytes:
                break
            self.remove(info.path)
            removed.append(info)
            total -= info.num_bytes
        return removed

    def remove(self, path: Path) -> None:
        """Remove a file; a process that has mapped it keeps its bytes."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _LOGGER.warning("%s is not removed: %s", path, error)

    def write(self, header: PackedHeader, content: Iterator[memoryview | bytes]) -> None:
        """Write the file of an identity. Raises OSError."""
        FORMAT.write(self.file(header.identity), header, content)

    def _remove_unfinished(self) -> None:
        """Files of processes that have ended while they wrote."""
        for path in self._paths(".tmp"):
            pid = path.suffixes[-2].removeprefix(".") if len(path.suffixes) > 1 else ""
            if not pid.isdecimal() or not Path(f"/proc/{pid}").exists():
                self.remove(path)

    def _paths(self, suffix: str) -> Sequence[Path]:
        with os.scandir(self.path) as entries:
            return [
                self.path / entry.name
                for entry in entries
                if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False)
            ]


def _model_of(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return FORMAT.read_header(file.fileno())[0].model
    except (OSError, EngineError):
        return ""
