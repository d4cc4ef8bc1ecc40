"""A child process that answers frames: `grammar.trial` and `text.tokenizer_process` use one.

A frame is a length and that many bytes, on the child's standard input and output. The child exits
when its input closes, so it ends with its owner. It may die at any moment; `exchange` reports that.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import weakref
from typing import IO

from quickstep.environment import of_children
from quickstep.errors import EngineError

_LENGTH_BYTES = 4


class WorkerDied(Exception):
    """The process has ended and was reaped; negative codes are signals."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class WorkerProcess:
    """One life of a child that runs the module `arguments[0]` with the other arguments.

    One thread at a time may call `exchange`. Raises EngineError if it cannot be started.
    """

    def __init__(self, *arguments: str) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**of_children(os.environ), "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        except OSError as error:
            raise EngineError(f"the process {arguments[0]} cannot be started: {error}") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # the child may stop reading
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def process_id(self) -> int:
        """The operating system's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a frame and wait for the answer. A child that takes longer is killed.

        Raises:
            WorkerDied: It has ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        deadline_s = time.monotonic() + timeout_s
        try:
            pending = _framed(frame)
            while pending and _is_ready(stdin, select.POLLOUT, deadline_s):
                pending = pending[os.write(stdin.fileno(), pending) :]
            if pending or not _is_ready(stdout, select.POLLIN, deadline_s):
                self._process.kill()
            return read_frame(stdout.fileno())
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            self.end()
            raise WorkerDied(code) from None

    def end(self) -> None:
        """Kill it."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes, which ends an idle child; kill a busy one; reap it."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.kill()
    process.wait()


def _is_ready(pipe: IO[bytes], event: int, deadline_s: float) -> bool:
    """Wait until a pipe can be read or written; False if `deadline_s` comes first."""
    ready = select.poll()  # `select` only works with low file descriptors
    ready.register(pipe, event)
    return bool(ready.poll(max(0.0, deadline_s - time.monotonic()) * 1000))


def _framed(content: bytes) -> memoryview:
    """A length and that many bytes."""
    return memoryview(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


def write_frame(fd: int, content: bytes) -> None:
    """Write a frame, however long that takes."""
    pending = _framed(content)
    while pending:
        pending = pending[os.write(fd, pending) :]


def read_frame(fd: int) -> bytes:
    """The next frame. Raises EOFError if there is none."""
    return _read(fd, int.from_bytes(_read(fd, _LENGTH_BYTES), "big"))


def _read(fd: int, num_bytes: int) -> bytes:
    pieces = []
    while num_bytes:
        piece = os.read(fd, min(num_bytes, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
