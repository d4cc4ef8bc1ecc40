"""Clients' files on disk, the input and output of batches. Only its owner can find a file.

    DIRECTORY/file-<32 hex digits>        the content
    DIRECTORY/file-<32 hex digits>.json   owner, name, purpose, times

Ids are random and cannot be guessed; a client's file name is a label and never a path. With
`--files-dir`, files outlive the server; otherwise they are in a private temporary directory that
`close` removes. The caller runs reads and writes of unbounded size in a thread. Bytes are reserved
before they are written, against the server's limit and the owner's; open writers count as files.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from quickstep.errors import ConfigError, RequestError
from quickstep.server.http.errors import RouteNotFound
from quickstep.server.options import FileOptions

__all__ = ["FileStore", "FileWriter", "StoredFile"]

_ID = re.compile(r"file-[0-9a-f]{32}")
_NAME_CHARS = 255
_COPY_BYTES = 1024 * 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f/\\]")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a file. Times are seconds since 1970."""

    id: str
    owner: str
    name: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


class FileStore:
    """All files of one server. `open` it first; only writers use it outside the event loop."""

    def __init__(self, options: FileOptions, now: Callable[[], float] = time.time) -> None:
        self._options = options
        self._now = now
        self._directory = options.directory
        self._is_temporary = options.directory is None
        self._files: dict[str, StoredFile] = {}
        self._lock = threading.Lock()  # writers in any thread reserve bytes
        self._reserved_bytes: Counter[str] = Counter()  # by owner
        self._num_writers: Counter[str] = Counter()

    def open(self) -> None:
        """Load the records of the files in `--files-dir`. Raises ConfigError."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            records = sorted(self._directory.glob("file-*.json"))
            known = [msgspec.json.decode(file.read_bytes(), type=StoredFile) for file in records]
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"--files-dir {self._directory} cannot be used: {error}") from None
        known = [file for file in known if _ID.fullmatch(file.id) and self.path(file).is_file()]
        self._files = {file.id: file for file in sorted(known, key=lambda file: file.created_at)}
        for file in known:
            self._reserved_bytes[file.owner] += file.num_bytes

    def close(self) -> None:
        """Remove a temporary directory."""
        if self._is_temporary and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        self._files.clear()

    @property
    def file_bytes(self) -> int:
        """The size limit of one file."""
        return self._options.file_bytes

    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._now())

    def new(
        self, owner: str, name: str, purpose: str, expires_after_s: int | None = None
    ) -> FileWriter:
        """Create a writer of a new file. Raises RequestError if there are too many files."""
        self._drop_expired()
        num_files = len(self._files) + self._num_writers.total()
        if num_files >= self._options.num_files:
            raise RequestError(
                f"the server holds {num_files} files, which is its limit; delete some",
                status=413,
            )
        num_own = sum(file.owner == owner for file in self._files.values())
        num_own += self._num_writers[owner]
        if owner and num_own >= self._options.files_per_key:
            raise RequestError(
                f"your API key holds {num_own} files, which is its limit; delete some", status=413
            )
        now = self.now()
        file = StoredFile(
            id=f"file-{secrets.token_hex(16)}",
            owner=owner,
            name=_label(name),
            purpose=purpose,
            num_bytes=0,
            created_at=now,
            expires_at=None if expires_after_s is None else now + expires_after_s,
        )
        self._num_writers[owner] += 1
        return FileWriter(self, file)

    def get(self, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
        """A file of this owner. Raises RequestError 404 that names the client's field."""
        self._drop_expired()
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            raise RouteNotFound(
                f"there is no file {file_id[:100]!r}", param=param, code="file_not_found"
            )
        return file

    def files(self, owner: str) -> list[StoredFile]:
        """The files of this owner, oldest first."""
        self._drop_expired()
        return [file for file in self._files.values() if file.owner == owner]

    def delete(self, file: StoredFile) -> None:
        """Delete a file; a reader that has it open can still read it."""
        if self._files.pop(file.id, None) is not None:
            self.release(file.owner, file.num_bytes)
        self.path(file).unlink(missing_ok=True)
        self._record(file).unlink(missing_ok=True)

    def path(self, file: StoredFile) -> Path:
        """The path of the file's content."""
        return self._existing_directory() / file.id

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Reserve bytes that are about to be written. Raises RequestError 413."""
        with self._lock:
            _check_quota(
                "the server's", self._reserved_bytes.total(), num_bytes, self._options.total_bytes
            )
            if owner:
                per_key = self._options.bytes_per_key
                _check_quota("your API key's", self._reserved_bytes[owner], num_bytes, per_key)
            self._reserved_bytes[owner] += num_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        """Give back reserved bytes."""
        with self._lock:
            self._reserved_bytes[owner] -= num_bytes

    def close_writer(self, owner: str) -> None:
        """Count an open writer of the owner less."""
        self._num_writers[owner] -= 1

    def add(self, file: StoredFile) -> None:
        """Add a complete file, so that `get` finds it."""
        with _create(self._record(file)) as record:
            record.write(msgspec.json.encode(file))
        self._files[file.id] = file

    def _record(self, file: StoredFile) -> Path:
        return self._existing_directory() / f"{file.id}.json"

    def _existing_directory(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="quickstep-files-"))
        return self._directory

    def _drop_expired(self) -> None:
        now = self.now()
        for file in list(self._files.values()):
            if file.expires_at is not None and file.expires_at <= now:
                self.delete(file)


def _check_quota(whose: str, reserved: int, num_bytes: int, limit: int) -> None:
    if reserved + num_bytes > limit:
        raise RequestError(
            f"{whose} files would take more than {limit} bytes; delete some",
            status=413,
        )


class FileWriter:
    """Writes a file that becomes visible with `commit`; `discard` removes it. Call one of them."""

    def __init__(self, store: FileStore, file: StoredFile) -> None:
        self._store = store
        self._file = file
        self._content: BinaryIO | None = None
        self._reserved_bytes = 0
        self._is_open = True

    @property
    def is_empty(self) -> bool:
        """Whether no byte was written."""
        return self._reserved_bytes == 0

    def write(self, data: bytes) -> None:
        """Append. Raises RequestError 413 if a limit is reached."""
        self.reserve(len(data))
        content = self._open_file()
        content.write(data)
        content.flush()

    def reserve(self, num_bytes: int) -> None:
        """Reserve more bytes. Raises RequestError 413."""
        self._store.reserve(self._file.owner, num_bytes)
        self._reserved_bytes += num_bytes

    def resize(self, num_bytes: int) -> None:
        """Reserve exactly so many bytes, for a `fill`. Raises RequestError 413."""
        self._store.release(self._file.owner, self._reserved_bytes)
        self._reserved_bytes = 0
        self.reserve(num_bytes)

    def describe(self, name: str, expires_after_s: int | None) -> None:
        """Set what an upload's form says about the file."""
        expires_at = None if expires_after_s is None else self._file.created_at + expires_after_s
        self._file = msgspec.structs.replace(self._file, name=_label(name), expires_at=expires_at)

    def fill(self, source: BinaryIO) -> None:
        """Append all of `source`, whose size was reserved; any thread may call it."""
        shutil.copyfileobj(source, self._open_file(), _COPY_BYTES)

    def commit(self) -> StoredFile:
        """Make the file visible."""
        self._open_file().close()
        file = msgspec.structs.replace(self._file, num_bytes=self._reserved_bytes)
        self._store.add(file)
        self._end()
        return file

    def discard(self) -> None:
        """Remove the file and give back its bytes."""
        self._store.release(self._file.owner, self._reserved_bytes)
        self._reserved_bytes = 0
        self._end()
        if self._content is not None:
            self._content.close()
            self._store.path(self._file).unlink(missing_ok=True)

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._store.close_writer(self._file.owner)

    def _open_file(self) -> BinaryIO:
        if self._content is None:
            self._content = _create(self._store.path(self._file))
        return self._content


def _label(name: str) -> str:
    return _CONTROL.sub("_", name)[:_NAME_CHARS] or "file"


def _create(path: Path) -> BinaryIO:
    """A new file that no other user of the machine may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
