"""Starts the engine's process: one call, which needs no event loop and almost no imports.

A command that is going to serve calls it first and sends the worker the model to open, so that the
worker's imports and loading run in parallel with our own imports. The holder of a `Launched` owns
it, until `child.EngineProcess` takes it over; closing `connection` ends the worker.

Launch in a thread that lives as long as the engine: Linux sends a child its parent's death signal
when the thread that made it ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress

import msgspec

from quickstep.environment import of_children
from quickstep.errors import EngineNotStarted

# -P: do not import modules from the working directory
WORKER_COMMAND = (sys.executable, "-P", "-m", "quickstep.engine.remote.worker")

# numpy's threads for matrix products, of which the worker has none: they spin and take memory
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


class Launched(msgspec.Struct):
    """A process that starts up, and our end of its connection. Owned by the caller of `launch`.

    Attributes:
        has_opening: The first message was sent, so the process need not wait for our event loop.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    has_opening: bool = False

    def send_opening(self, frame: bytes) -> None:
        """Send the frame of the first message; it fits into the socket's buffer."""
        self.has_opening = True
        with suppress(ConnectionError):  # reading from the worker will report its end
            self.connection.sendall(frame)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def wait(self) -> int:
        """Wait for the process to end; returns its exit status, negative for a signal."""
        return self.process.wait()

    def end(self) -> None:
        """End the process, if it has not ended. Idempotent."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def launch(
    command: Sequence[str] = WORKER_COMMAND,
    hidden: Collection[str] = (),
    shared: Sequence[int] = (),
) -> Launched:
    """Start `command` with its end of a connection and our process id as arguments.

    Secrets of servers, and the environment variables that `hidden` names, are not passed on. It
    inherits the descriptors `shared`.

    Raises:
        EngineNotStarted: The system does not let us start it.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise EngineNotStarted(f"the engine process cannot be started: {error}") from error
    with theirs:
        kept = of_children(os.environ, hidden)
        environment = {**_ENVIRONMENT, **kept, "PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *shared),
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise EngineNotStarted(f"the engine process cannot be started: {error}") from error
    return Launched(process, ours)
