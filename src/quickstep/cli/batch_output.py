"""The output file of `quickstep batch`: what stands in it is done, new answers are appended.

A run that was killed may leave a part of a line at the end; `open` cuts it off, so that its
request is answered again. A second run on the same file is refused while the first one lives.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from quickstep.errors import ConfigError

__all__ = ["BatchOutput"]


class BatchOutput:
    """An open output file. `done` are the custom ids in it; `num_failed` counts their errors."""

    def __init__(self, path: Path, retry_failed: bool) -> None:
        self._path = path
        self._retry_failed = retry_failed
        self._file: BinaryIO | None = None
        self.done: set[str] = set()
        self.num_failed = 0

    def __enter__(self) -> BatchOutput:
        """Open, lock, repair and read it. Raises ConfigError."""
        try:
            self._file = self._path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from None
        try:
            self._lock(self._file)
            self._read(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: bytes) -> None:
        """Append a line that ends with its newline; it stands in the file when this returns."""
        if self._file is None:
            raise RuntimeError("the output is not open")
        self._file.write(line)
        self._file.flush()

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is being written by another run") from None

    def _read(self, file: BinaryIO) -> None:
        """Take in what is done; cut off a broken end and, if asked to, drop the failed lines."""
        kept: list[bytes] = []
        file.seek(0)
        end = 0
        for number, line in enumerate(file, 1):
            entry = _entry(line)
            if entry is None and not line.endswith(b"\n"):
                break  # the last line, of which a part was written
            if entry is None:
                raise ConfigError(
                    f"{self._path} line {number} is no answer of a batch; give another file"
                )
            end += len(line)
            custom_id, succeeded = entry
            if self._retry_failed and not succeeded:
                continue
            self.done.add(custom_id)
            self.num_failed += not succeeded
            if self._retry_failed:
                kept.append(line)
        if self._retry_failed:
            self._replace(file, iter(kept))
            return
        file.truncate(end)
        if end and not _ends_a_line(file):
            file.write(b"\n")  # a whole answer whose newline was not written any more
            file.flush()

    def _replace(self, file: BinaryIO, lines: Iterator[bytes]) -> None:
        """The kept lines instead of all, through a file beside, so that a crash loses nothing."""
        beside = self._path.with_name(self._path.name + ".part")
        with beside.open("wb") as copy:
            for line in lines:
                copy.write(line if line.endswith(b"\n") else line + b"\n")
            copy.flush()
            os.fsync(copy.fileno())
        beside.replace(self._path)
        file.close()
        self._file = self._path.open("a+b")
        self._lock(self._file)


def _entry(line: bytes) -> tuple[str, bool] | None:
    """A line's custom id and whether it has an answer; None if it is none of ours."""
    try:
        entry = json.loads(line)
        response = entry["response"] or {"status_code": 500}
        return str(entry["custom_id"]), int(response["status_code"]) < 400
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
