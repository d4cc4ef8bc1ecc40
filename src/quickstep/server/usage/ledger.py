"""The ledger: a SQLite file with one row per finished sequence, which `quickstep usage` adds up.

`Ledger` belongs to the server. `add` only queues a row; a thread inserts what has come every half a
second, in one transaction. So a killed process loses at most the last second, and what was
committed is complete: rows are inserted and never changed, and totals are queries. Rows are
numbered by the order in which they were added; run (one start of a server) and number are unique,
so that a transaction that is tried again adds nothing twice. Request ids are not unique: a client
may choose them.

What cannot be written until the end, since another process has the lock, goes into a file next to
the ledger, FILE.unwritten-RUN, whose rows the next `open` inserts. If FILE is moved or deleted
while it is open, a new one is made. Only the owner of the process may read what is created here.

Money is in billionths of a dollar and time in nanoseconds: sums of integers are exact. The file has
the names of API keys, never the keys, and no text of a request.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from glob import escape as glob_escape
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec.structs import astuple

from quickstep.errors import ConfigError

_LOG = logging.getLogger("quickstep.server")
_SCHEMA_VERSION = 1
_APPLICATION_ID = 0x51537553  # "QSuS", by which `file` and this module recognise it
_COMMIT_EVERY_S = 0.5
_BUSY_S = 5.0
_MAX_UNWRITTEN = 100_000  # rows, while the file cannot be written
_UNWRITTEN = ".unwritten-"  # follows the ledger's name, before the run
# of one row; other errors of SQLite are of the file and may pass
_ROW_ERRORS = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.ProgrammingError)
_SCHEMA = f"""
BEGIN;
CREATE TABLE sequences (
    run TEXT NOT NULL,                  -- a random id of this start of the server
    number INTEGER NOT NULL,            -- of the row, from 0
    request_id TEXT NOT NULL,
    sequence_index INTEGER NOT NULL,
    finished_ns INTEGER NOT NULL,       -- since 1970
    key_name TEXT NOT NULL,             -- "" on a server without keys
    model TEXT NOT NULL,
    adapter TEXT NOT NULL,              -- "" for none
    endpoint TEXT NOT NULL,             -- "" if unknown
    finish_reason TEXT NOT NULL,
    num_prompt_tokens INTEGER NOT NULL, -- cached ones included
    num_cached_tokens INTEGER NOT NULL,
    num_output_tokens INTEGER NOT NULL,
    queue_ns INTEGER NOT NULL,
    prefill_ns INTEGER NOT NULL,
    decode_ns INTEGER NOT NULL,
    device_ns INTEGER NOT NULL,
    cost_by_tokens_nusd INTEGER NOT NULL,
    cost_by_device_nusd INTEGER NOT NULL,
    PRIMARY KEY (run, number)
);
CREATE INDEX sequences_by_key ON sequences (key_name, finished_ns);
CREATE INDEX sequences_by_time ON sequences (finished_ns);
CREATE INDEX sequences_by_request ON sequences (request_id);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""

# what totals can be grouped by -> SQL; days and months are UTC
GROUPS = {
    "key": "key_name",
    "model": "model",
    "adapter": "adapter",
    "endpoint": "endpoint",
    "finish_reason": "finish_reason",
    "day": "strftime('%Y-%m-%d', finished_ns / 1000000000, 'unixepoch')",
    "month": "strftime('%Y-%m', finished_ns / 1000000000, 'unixepoch')",
}


class LedgerRow(msgspec.Struct, frozen=True):
    """A finished sequence; the columns of the table after `run` and `number`."""

    request_id: str
    sequence_index: int
    finished_ns: int
    key_name: str
    model: str
    adapter: str
    endpoint: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    device_ns: int
    cost_by_tokens_nusd: int
    cost_by_device_nusd: int


class UsageTotals(msgspec.Struct, frozen=True):
    """Sums over rows. `group` has the values that they share, in the order of the query."""

    group: tuple[str, ...]
    num_sequences: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    device_ns: int
    cost_by_tokens_nusd: int
    cost_by_device_nusd: int


_NumberedRow = tuple[str | int, ...]  # the columns of the table
_TOTALS = "COUNT(*), " + ", ".join(
    f"COALESCE(SUM({name}), 0)" for name in UsageTotals.__struct_fields__[2:]
)
_LAST_ROW = "SELECT COALESCE(MAX(rowid), 0) FROM sequences"
_OF_OTHERS = (
    f"SELECT key_name, {_TOTALS} FROM sequences WHERE rowid > ? AND rowid <= ? AND run != ?"
    " GROUP BY key_name"
)
_INSERT = (
    f"INSERT INTO sequences VALUES ({', '.join('?' * (2 + len(LedgerRow.__struct_fields__)))})"
    " ON CONFLICT DO NOTHING"
)


class Ledger:
    """The server's end of the file. `open` it, `add` rows, `close` it."""

    def __init__(self, path: Path, commit_every_s: float = _COMMIT_EVERY_S) -> None:
        self._path = path
        self._commit_every_s = commit_every_s
        self._run = uuid.uuid4().hex
        self._added: deque[LedgerRow] = deque()
        self._num_taken = 0  # rows taken from `_added` so far (the writer only)
        self._file_id: tuple[int, int] | None = None  # device and inode of the open file
        self._is_missing = False  # and there could be no new one
        self._is_failing = False  # the last commit failed, which the log has said
        self._opened_at_row = 0  # the last row of the file then
        self._of_others: dict[str, UsageTotals] = {}  # by the key's name
        self._of_others_lock = threading.Lock()
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None

    def open(self) -> None:
        """Create the file if there is none, insert what earlier runs could not write, and start
        the writer. Raises ConfigError.
        """
        connection = _open_for_writing(self._path)
        self._file_id = _file_id(self._path)
        self._insert_unwritten(connection)
        (self._opened_at_row,) = connection.execute(_LAST_ROW).fetchone()
        self._writer = threading.Thread(
            target=self._write_until_closed, args=(connection,), name="ledger", daemon=True
        )
        self._writer.start()

    def add(self, row: LedgerRow) -> None:
        """Have a row committed within a second; in any thread."""
        self._added.append(row)

    def close(self) -> None:
        """Commit all rows and end the writer. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._closing.set()
            writer.join()

    def totals(self, key_name: str, since_ns: int) -> UsageTotals:
        """The usage of a key since a time, committed before `open`. Raises ConfigError."""
        totals = usage_totals(
            self._path, since_ns=since_ns, key_name=key_name, last_row=self._opened_at_row
        )
        return totals[0]

    def take_others(self) -> list[UsageTotals]:
        """What other servers have committed since `open`, by key, without what an earlier call
        returned. At most a second old.
        """
        with self._of_others_lock:
            taken, self._of_others = self._of_others, {}
        return list(taken.values())

    def _write_until_closed(self, connection: sqlite3.Connection) -> None:
        rows: list[_NumberedRow] = []  # not committed yet
        last_row = self._opened_at_row
        is_open = True
        while is_open:
            is_open = not self._closing.wait(self._commit_every_s)
            while self._added:
                row = self._added.popleft()
                rows.append((self._run, self._num_taken, *astuple(row)))
                self._num_taken += 1
            if _file_id(self._path) != self._file_id:
                connection, last_row = self._reopened(connection), 0
            if rows and self._commit(connection, rows):
                if self._is_failing:
                    self._is_failing = False
                    _LOG.warning("%d rows were written to %s again", len(rows), self._path)
                rows.clear()
            del rows[:-_MAX_UNWRITTEN]
            if is_open:
                last_row = self._read_others(connection, last_row)
        connection.close()
        if rows:
            self._keep_unwritten(rows)

    def _reopened(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        """A connection to a new file, if the old one was moved or deleted; the old connection if
        there can be none now.
        """
        with suppress(sqlite3.Error):  # what was committed goes where the file is
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        try:
            fresh = _open_for_writing(self._path)
        except ConfigError as error:  # it is tried again
            if not self._is_missing:
                _LOG.error(
                    "%s was moved or deleted, and there can be no new one: %s", self._path, error
                )
            self._is_missing = True
            return connection
        connection.close()
        self._is_missing = False
        self._file_id = _file_id(self._path)
        self._opened_at_row = 0
        _LOG.warning("%s was moved or deleted; usage is recorded in a new one", self._path)
        return fresh

    def _keep_unwritten(self, rows: Sequence[_NumberedRow]) -> None:
        """Write rows that the ledger does not take where the next `open` finds them."""
        path = self._path.with_name(f"{self._path.name}{_UNWRITTEN}{self._run}")
        try:
            with os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(msgspec.msgpack.encode(rows))
        except OSError as error:
            _LOG.error("%d rows for %s are lost: %s", len(rows), self._path, error)
        else:
            _LOG.warning("%d rows are in %s until the next start", len(rows), path)

    def _insert_unwritten(self, connection: sqlite3.Connection) -> None:
        for path in unwritten_files(self._path):
            try:
                rows = msgspec.msgpack.decode(path.read_bytes(), type=list[_NumberedRow])
            except (OSError, msgspec.DecodeError) as error:
                _LOG.error("the rows in %s cannot be read: %s", path, error)
                continue
            if self._commit(connection, rows):
                path.unlink(missing_ok=True)

    def _read_others(self, connection: sqlite3.Connection, last_row: int) -> int:
        """Queue what other runs have committed after a row; returns the last one that is there."""
        try:
            (newest,) = connection.execute(_LAST_ROW).fetchone()
            if newest > last_row:
                found = connection.execute(_OF_OTHERS, (last_row, newest, self._run)).fetchall()
                with self._of_others_lock:
                    for key, *sums in found:
                        known = self._of_others.get(key, UsageTotals((key,), *[0] * len(sums)))
                        both = zip(sums, astuple(known)[1:], strict=True)
                        self._of_others[key] = UsageTotals((key,), *[a + b for a, b in both])
        except sqlite3.Error as error:  # it is tried again
            _LOG.error("%s cannot be read: %s", self._path, error)
            return last_row
        return int(newest)

    def _commit(self, connection: sqlite3.Connection, rows: Sequence[_NumberedRow]) -> bool:
        """Insert the rows in one transaction. Returns False if the file cannot be written now.

        A row that cannot be stored is left out: the halves are tried until it is found.
        """
        try:
            with connection:
                connection.executemany(_INSERT, rows)
            return True
        except Exception as error:
            if isinstance(error, sqlite3.Error) and not isinstance(error, _ROW_ERRORS):
                _LOG.log(
                    logging.DEBUG if self._is_failing else logging.ERROR,
                    "%d rows cannot be written to %s: %s; the last %d are kept and tried again",
                    *(len(rows), self._path, error, _MAX_UNWRITTEN),
                )
                self._is_failing = True
                return False
            if len(rows) == 1:
                _LOG.exception("a row cannot be stored in %s and is lost", self._path)
                return True
        half = len(rows) // 2
        return self._commit(connection, rows[:half]) and self._commit(connection, rows[half:])


def unwritten_files(path: Path) -> list[Path]:
    """The files of rows that servers could not write to the ledger before they ended."""
    return sorted(path.parent.glob(f"{glob_escape(path.name)}{_UNWRITTEN}*"))


def check_ledger(path: Path) -> None:
    """Create the file if there is none. Raises ConfigError if it cannot be used."""
    _open_for_writing(path).close()


def usage_totals(
    path: Path,
    by: Sequence[str] = (),
    *,
    since_ns: int | None = None,
    until_ns: int | None = None,
    key_name: str | None = None,
    last_row: int | None = None,
) -> list[UsageTotals]:
    """Totals of the committed rows for each value of `by` (of GROUPS), sorted; one for no `by`.

    Only what finished at `since_ns` or later and before `until_ns` (nanoseconds since 1970) counts,
    and with `key_name` only what this key has used, and with `last_row` only the file's first rows.

    Raises:
        ConfigError: The file is missing or is no ledger.
    """
    groups = [GROUPS[name] for name in by]
    conditions: dict[str, int | str | None] = {
        "finished_ns >= ?": since_ns,
        "finished_ns < ?": until_ns,
        "key_name = ?": key_name,
        "rowid <= ?": last_row,
    }
    used = {text: value for text, value in conditions.items() if value is not None}
    where = f" WHERE {' AND '.join(used)}" if used else ""
    order = f" GROUP BY {', '.join(groups)} ORDER BY {', '.join(groups)}" if groups else ""
    query = f"SELECT {', '.join([*groups, _TOTALS])} FROM sequences{where}{order}"
    with closing(_open_for_reading(path)) as connection:
        rows = connection.execute(query, tuple(used.values())).fetchall()
    return [UsageTotals(row[: len(groups)], *row[len(groups) :]) for row in rows]


def _open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection to a ledger, which is created if there is no file. Raises ConfigError."""
    with suppress(OSError):  # SQLite says what is wrong
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    connection = _connect(path, "rwc")
    try:
        if not _is_ledger(connection, path):
            connection.executescript(_SCHEMA)
        connection.execute("PRAGMA journal_mode = WAL")
        # a killed process loses nothing that is committed; a power cut may lose the last commits
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error as error:
        connection.close()
        raise ConfigError(f"the usage database {path} cannot be written: {error}") from None
    except ConfigError:
        connection.close()
        raise
    return connection


def _open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection to an existing ledger, which may be in use. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"there is no usage database {path}; `serve --usage-db {path}` makes one")
    connection = _connect(path, "rw")
    try:
        connection.execute("PRAGMA query_only = ON")
        if _is_ledger(connection, path):
            return connection
        problem = f"the usage database {path} is empty"
    except sqlite3.Error as error:
        problem = f"the usage database {path} cannot be read: {error}"
    except ConfigError as error:
        problem = str(error)
    connection.close()
    raise ConfigError(problem)


def _file_id(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        # opened in one thread and then used in another only
        return sqlite3.connect(
            f"file:{quote(str(path))}?mode={mode}",
            timeout=_BUSY_S,
            uri=True,
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise ConfigError(f"the usage database {path} cannot be opened: {error}") from None


def _is_ledger(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has the tables of this version; False for an empty file.

    Raises:
        ConfigError: It is another program's, or a newer version's.
        sqlite3.Error: It is no database.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if num_tables == 0:
        return False
    if application != _APPLICATION_ID:
        raise ConfigError(f"{path} is the database of another program; choose another file")
    if version != _SCHEMA_VERSION:
        raise ConfigError(
            f"the usage database {path} has version {version} of the schema, this Quickstep reads "
            f"version {_SCHEMA_VERSION}; use the Quickstep that wrote it, or another file"
        )
    return True
