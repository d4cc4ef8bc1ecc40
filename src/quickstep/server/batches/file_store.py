"""Clients' files on disk: input and output of batches, and data of their own.

Only its owner can find a file.

    DIRECTORY/file-<32 hex digits>        the content
    DIRECTORY/file-<32 hex digits>.json   owner, name, purpose, times (with `--files-dir`)

Ids are random and cannot be guessed; a client's file name is a label and never a path. With
`--files-dir`, files outlive the server; otherwise they are in a private temporary directory that
`close` removes, and have no records. The caller runs reads and writes of unbounded size in a
thread. Bytes are reserved before they are written; open writers count as files. Owners share the
server's limits of both (`core.shares`), and each has limits of its own.

A server locks its directory. The record of an upload follows its content; that of a batch's output
is there before it, and is replaced when the content is complete. So whatever ends a
server, the next one keeps the answers that a batch has written so far, removes half an upload, and
reports records that it cannot read.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from quickstep.core.shares import NoRoom, Shares
from quickstep.errors import ConfigError, RequestError
from quickstep.server.http.errors import RouteNotFound, machine_may_be_full
from quickstep.server.options import FileOptions

_LOG = logging.getLogger("quickstep.server")
BATCH = "batch"  # the purpose of input
USER_DATA = "user_data"  # that of what no batch reads
BATCH_OUTPUT = "batch_output"  # the purpose of files of lines, each of which is of use
_ID = re.compile(r"file-[0-9a-f]{32}")
_NAME_CHARS = 255
_COPY_BYTES = 1024 * 1024
_NEW = ".new"  # the suffix of a record that is being written
_CONTROL = re.compile(r"[\x00-\x1f\x7f/\\]")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a file. Times are seconds since 1970. One that is not `is_complete` has yet to
    be written.
    """

    id: str
    owner: str
    name: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None
    is_complete: bool = True


class FileStore:
    """All files of one server. `open` it first; only writers use it outside the event loop."""

    def __init__(
        self,
        options: FileOptions,
        now: Callable[[], float] = time.time,
        weight_of: Callable[[str], float] = lambda owner: 1.0,
    ) -> None:
        self._options = options
        self._now = now
        self._weight_of = weight_of
        self._directory = options.directory
        self._is_temporary = options.directory is None
        self._files: dict[str, StoredFile] = {}
        self._owned: int | None = None  # the descriptor of --files-dir, which is locked
        self._lock = threading.Lock()  # writers in any thread reserve bytes
        self._byte_shares = Shares(options.total_bytes)
        self._file_shares = Shares(options.num_files)  # also of open writers

    def open(self) -> None:
        """Load the records of the files in `--files-dir`. Raises ConfigError."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._own(self._directory)
            known = [self._restored(record) for record in self._directory.glob("file-*.json")]
            self._remove_rest(self._directory)
        except OSError as error:
            raise ConfigError(f"--files-dir {self._directory} cannot be used: {error}") from None
        files = [file for file in known if file is not None]
        self._files = {file.id: file for file in sorted(files, key=lambda file: file.created_at)}
        for file in files:
            self._byte_shares.hold(file.owner, file.num_bytes)
            self._file_shares.hold(file.owner)

    def _own(self, directory: Path) -> None:
        """Lock the directory: another server would remove what this one is writing."""
        self._owned = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--files-dir {directory} is used by another server; give each its own"
            ) from None

    def _restored(self, record: Path) -> StoredFile | None:
        """The file of a record; None if it cannot be used."""
        try:
            file = msgspec.json.decode(record.read_bytes(), type=StoredFile)
        except (OSError, msgspec.MsgspecError) as error:
            _LOG.warning("%s is skipped, it cannot be read: %s", record, error)
            return None
        if not _ID.fullmatch(file.id) or record.stem != file.id or not self.path(file).is_file():
            _LOG.warning("%s is skipped, it has no content", record)
            return None
        if file.is_complete:
            return file
        num_bytes = _cut_to_lines(self.path(file)) if file.purpose == BATCH_OUTPUT else 0
        if not num_bytes:
            record.unlink()
            return None
        _LOG.warning("%s is what a batch had written when its server ended", self.path(file))
        file = msgspec.structs.replace(file, num_bytes=num_bytes, is_complete=True)
        self._write_record(file)
        return file

    def _remove_rest(self, directory: Path) -> None:
        """Remove contents and copies that no record leads to."""
        for path in directory.glob("file-*"):
            is_content = _ID.fullmatch(path.name) is not None
            if path.suffix == _NEW or (is_content and not path.with_suffix(".json").exists()):
                _LOG.warning("removing %s, which an earlier server left unfinished", path)
                path.unlink()

    def close(self) -> None:
        """Remove a temporary directory."""
        if self._is_temporary and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        if self._owned is not None:
            os.close(self._owned)
            self._owned = None
        self._files.clear()

    @property
    def is_temporary(self) -> bool:
        """Whether the files are in a temporary directory of this machine."""
        return self._is_temporary

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
        num_own = self._file_shares.held(owner)
        if owner and num_own >= self._options.files_per_key:
            raise RequestError(
                f"your API key holds {num_own} files, which is its limit; delete some", status=413
            )
        try:
            self._file_shares.take(owner, weight=self._weight_of(owner))
        except NoRoom as refusal:
            whose = "your API key" if refusal.owner else "the server"
            raise RequestError(
                f"{whose} holds {refusal.num_held} files, {refusal.limit}; delete some", status=413
            ) from None
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
            self.release_place(file.owner)
        self.path(file).unlink(missing_ok=True)
        self._record(file).unlink(missing_ok=True)

    def path(self, file: StoredFile) -> Path:
        """The path of the file's content."""
        return self._existing_directory() / file.id

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Reserve bytes that are about to be written. Raises RequestError 413."""
        with self._lock:
            limit, shares = self._options.bytes_per_key, self._byte_shares
            if owner and shares.held(owner) + num_bytes > limit:
                raise RequestError(
                    f"your API key's files would take more than {limit} bytes; delete some",
                    status=413,
                )
            try:
                shares.take(owner, num_bytes, self._weight_of(owner))
            except NoRoom as refusal:
                whose = "your API key's" if refusal.owner else "the server's"
                what = "their share of the server's " if refusal.owner else ""
                raise RequestError(
                    f"{whose} files would take more than {what}{refusal.capacity} bytes; delete "
                    "some",
                    status=413,
                ) from None

    def release(self, owner: str, num_bytes: int) -> None:
        """Give back reserved bytes."""
        with self._lock:
            self._byte_shares.give_back(owner, num_bytes)

    def release_place(self, owner: str) -> None:
        """Count a file of the owner less."""
        self._file_shares.give_back(owner)

    def begin(self, file: StoredFile) -> int:
        """Create an empty file, and the record of a batch's output; returns the file descriptor of
        the content. Raises RequestError: 507 if the disk is full, 503 without a descriptor.
        """
        with machine_may_be_full():
            if file.purpose == BATCH_OUTPUT:
                self._write_record(msgspec.structs.replace(file, is_complete=False))
            try:
                return _create(self.path(file))
            except OSError:
                self._record(file).unlink(missing_ok=True)
                raise

    def complete(self, file: StoredFile) -> None:
        """Write the record of a file whose content is complete; any thread may call it. Raises
        RequestError of an upload: 507 if the disk is full, 503 without a descriptor.
        """
        try:
            with machine_may_be_full():
                self._write_record(file)
        except (OSError, RequestError) as error:
            if file.purpose != BATCH_OUTPUT:
                raise
            # the next server finds the first record, and the content
            _LOG.error("the record of %s cannot be written: %s", self.path(file), error)

    def add(self, file: StoredFile) -> None:
        """Add a complete file, so that `get` finds it."""
        self._files[file.id] = file

    def _write_record(self, file: StoredFile) -> None:
        """Write or replace the record of a file, of which no part is seen, for a later server."""
        if self._is_temporary:
            return
        path = self._record(file)
        new = path.with_suffix(_NEW)
        descriptor = _create(new)
        try:
            _write_all(descriptor, msgspec.json.encode(file))
        except OSError:
            new.unlink()
            raise
        finally:
            os.close(descriptor)
        new.replace(path)

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


class FileWriter:
    """Writes a file that becomes visible with `commit`; `discard` removes it. Call one of them."""

    def __init__(self, store: FileStore, file: StoredFile) -> None:
        self._store = store
        self._file = file
        self._descriptor: int | None = None  # of the content
        self._written_bytes = 0
        self._reserved_bytes = 0
        self._is_open = True
        self._is_complete = False

    @property
    def is_empty(self) -> bool:
        """Whether no byte was written."""
        return self._reserved_bytes == 0

    def write(self, data: bytes) -> None:
        """Append. Raises RequestError, and then leaves the file as it was: 413 if a limit is
        reached, 507 if the disk is full, 503 without a descriptor.
        """
        self.reserve(len(data))
        try:
            with machine_may_be_full():
                _write_all(self._open_content(), data)
        except BaseException:
            if self._descriptor is not None:
                os.ftruncate(self._descriptor, self._written_bytes)
                os.lseek(self._descriptor, 0, os.SEEK_END)
            self._store.release(self._file.owner, len(data))
            self._reserved_bytes -= len(data)
            raise
        self._written_bytes += len(data)

    def reserve(self, num_bytes: int) -> None:
        """Reserve more bytes. Raises RequestError 413."""
        self._store.reserve(self._file.owner, num_bytes)
        self._reserved_bytes += num_bytes

    def resize(self, num_bytes: int) -> None:
        """Reserve exactly so many bytes, for a `fill`. Raises RequestError 413."""
        self._store.release(self._file.owner, self._reserved_bytes)
        self._reserved_bytes = 0
        self.reserve(num_bytes)

    def describe(self, name: str, purpose: str, expires_after_s: int | None) -> None:
        """Set what an upload's form says about the file."""
        expires_at = None if expires_after_s is None else self._file.created_at + expires_after_s
        self._file = msgspec.structs.replace(
            self._file, name=_label(name), purpose=purpose, expires_at=expires_at
        )

    def fill(self, source: BinaryIO) -> None:
        """Append all of `source`, whose size was reserved; any thread may call it. Raises
        RequestError 507 if the disk is full.
        """
        content = self._open_content()
        with machine_may_be_full():
            while data := source.read(_COPY_BYTES):
                _write_all(content, data)

    def complete(self) -> None:
        """Nothing follows: write the record, for which file systems may wait for their disk. Any
        thread may call it.
        """
        content = self._open_content()
        self._file = msgspec.structs.replace(self._file, num_bytes=self._reserved_bytes)
        self._store.complete(self._file)
        os.close(content)
        self._descriptor = None
        self._is_complete = True

    def commit(self) -> StoredFile:
        """Make the file visible; complete it, if it is not."""
        if not self._is_complete:
            self.complete()
        self._store.add(self._file)
        self._is_open = False  # its place is the file's
        return self._file

    def discard(self) -> None:
        """Remove the file and give back its bytes."""
        self._store.release(self._file.owner, self._reserved_bytes)
        self._reserved_bytes = 0
        if self._is_open:
            self._is_open = False
            self._store.release_place(self._file.owner)
        if self._descriptor is not None or self._is_complete:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor, self._is_complete = None, False
            self._store.delete(self._file)

    def _open_content(self) -> int:
        if self._descriptor is None:
            self._descriptor = self._store.begin(self._file)
        return self._descriptor


def _label(name: str) -> str:
    return _CONTROL.sub("_", name)[:_NAME_CHARS] or "file"


def _create(path: Path) -> int:
    """The descriptor of a new file that no other user of the machine may read."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _cut_to_lines(path: Path) -> int:
    """Remove an incomplete last line; returns the bytes that are left."""
    with path.open("r+b") as content:
        num_bytes = 0
        for line in content:
            num_bytes += len(line) if line.endswith(b"\n") else 0
        content.truncate(num_bytes)
    return num_bytes
