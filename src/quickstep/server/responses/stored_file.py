"""The SQLite file of stored responses, so that they outlive the server.

`ResponseStore` holds every response in memory and reads the file once, when the server starts; the
file follows it. Changes wait in memory, the latest of each response, and a thread writes what has
come in one transaction: nothing waits for the disk, except the deletion that a client requests. A
killed process loses at most the last moments, and what was committed is complete.

A file that cannot be written any more (the disk is full) is given up, once in the log; responses
are then stored in memory only. Only the owner of the process may read the file, one server at a
time may use it, and deleted texts are overwritten. It has the names of API keys, never the keys.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from quickstep.errors import ConfigError

_LOG = logging.getLogger("quickstep.server")
_APPLICATION_ID = 0x51537352  # "QSsR", by which `file` and this module recognise it
_SCHEMA_VERSION = 1
_BUSY_S = 1.0
_SCHEMA = f"""
BEGIN;
CREATE TABLE responses (
    key_name TEXT NOT NULL,     -- "" on a server without keys
    id TEXT NOT NULL,
    stored_at INTEGER NOT NULL, -- in seconds since 1970
    content BLOB NOT NULL,      -- JSON: the response, its messages, the items of its input
    PRIMARY KEY (key_name, id)
);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""
_PUT = "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)"
_DELETE = "DELETE FROM responses WHERE key_name = ? AND id = ?"
_ALL = "SELECT key_name, id, stored_at, content FROM responses ORDER BY stored_at, rowid"


class StoredRow(msgspec.Struct, frozen=True):
    """A response as the file has it."""

    key_name: str
    response_id: str
    stored_at: int
    content: bytes


class ResponseFile:
    """The file. Any thread may change it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: dict[tuple[str, str], StoredRow | None] = {}  # None: to be deleted
        self._is_writing = False
        self._is_closing = False
        self._is_off = False
        self._retries = False  # what could not be written
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None

    def open(self) -> list[StoredRow]:
        """Create the file if there is none, and start the writer; returns all rows, the oldest
        first. Raises ConfigError.
        """
        connection = _open(self._path)
        try:
            rows = [StoredRow(*row) for row in connection.execute(_ALL)]
        except sqlite3.Error as error:
            connection.close()
            raise ConfigError(f"--response-store {self._path} cannot be read: {error}") from None
        self._writer = threading.Thread(
            target=self._write_until_closed, args=(connection,), name="responses", daemon=True
        )
        self._writer.start()
        return rows

    def put(self, key_name: str, response_id: str, stored_at: int, content: bytes) -> None:
        """Have a row written, unless the file was given up."""
        row = StoredRow(key_name, response_id, stored_at, content)
        with self._changed:
            if not self._is_off:
                self._pending[row.key_name, row.response_id] = row
                self._changed.notify_all()

    def delete(self, key_name: str, response_id: str) -> None:
        """Have a row deleted."""
        with self._changed:
            self._pending[key_name, response_id] = None
            self._retries = True
            self._changed.notify_all()

    def flush(self) -> bool:
        """Wait until all changes so far are written; False if they cannot be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing and not self._has_work)
            return not self._pending

    @property
    def _has_work(self) -> bool:
        return bool(self._pending) and (self._retries or not self._is_off)

    def close(self) -> None:
        """Write all changes and end the writer. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        writer.join()

    def _write_until_closed(self, connection: sqlite3.Connection) -> None:
        is_closing = False
        while not is_closing:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work or self._is_closing)
                changes, self._pending = self._pending, {}
                is_closing, self._is_writing = self._is_closing, True
                self._retries = False
            error = _written(connection, changes)
            with self._changed:
                self._is_writing = False
                if error is not None:
                    self._give_up(changes, error)
                self._changed.notify_all()
        connection.close()

    def _give_up(
        self, changes: dict[tuple[str, str], StoredRow | None], error: sqlite3.Error
    ) -> None:
        if not self._is_off:
            self._is_off = True
            _LOG.error(
                "--response-store %s cannot be written: %s; responses are stored in memory only "
                "until the next start",
                *(self._path, error),
            )
        deletions = {key: None for key, row in changes.items() if row is None}
        self._pending = {**deletions, **self._pending}


def check_response_file(path: Path) -> None:
    """Create the file if there is none. Raises ConfigError if it cannot be used."""
    _open(path).close()


def _written(
    connection: sqlite3.Connection, changes: dict[tuple[str, str], StoredRow | None]
) -> sqlite3.Error | None:
    """Commit the changes; returns why that cannot be done."""
    try:
        with connection:
            for key, row in changes.items():
                if row is None:
                    connection.execute(_DELETE, key)
                else:
                    connection.execute(_PUT, (*key, row.stored_at, row.content))
        if None in changes.values():
            # so that the log of writes has no deleted text
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        return error
    return None


def _open(path: Path) -> sqlite3.Connection:
    """A connection to the file, which is created if there is none. Raises ConfigError."""
    with suppress(OSError):  # SQLite says what is wrong
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    try:
        if path.stat().st_uid != os.geteuid():
            raise ConfigError(f"--response-store {path} belongs to another user")
        path.chmod(0o600)
        # opened in one thread and then used in another only
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw", timeout=_BUSY_S, uri=True, check_same_thread=False
        )
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"--response-store {path} cannot be opened: {error}") from None
    try:
        _prepare(connection, path)
    except sqlite3.Error as error:
        connection.close()
        locked = error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        problem = "is used by another server" if locked else f"cannot be used: {error}"
        raise ConfigError(f"--response-store {path} {problem}") from None
    except ConfigError:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Lock the file, check it, and make its table. Raises ConfigError, sqlite3.Error."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if num_tables and application != _APPLICATION_ID:
        raise ConfigError(
            f"--response-store {path} is the database of another program; choose another file"
        )
    if num_tables and version != _SCHEMA_VERSION:
        raise ConfigError(
            f"--response-store {path} has version {version} of the schema, this Quickstep reads "
            f"version {_SCHEMA_VERSION}; use the Quickstep that wrote it, or another file"
        )
    (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        problem = " ".join(state.split())
        raise ConfigError(f"--response-store {path} is damaged ({problem}); choose another file")
    connection.execute("PRAGMA secure_delete = ON")
    if not num_tables:
        connection.execute("PRAGMA auto_vacuum = FULL")
    connection.execute("PRAGMA journal_mode = WAL")
    # a killed process loses nothing that is committed; a power cut may lose the last commits
    connection.execute("PRAGMA synchronous = NORMAL")
    if not num_tables:
        connection.executescript(_SCHEMA)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("COMMIT")
