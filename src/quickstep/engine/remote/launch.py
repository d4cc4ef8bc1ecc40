"""Starting the engine's process: one call, which needs no event loop and hardly an import.

A command that is going to serve launches it first of all and tells it what to open, so that the
worker's imports, then its loading, and our own imports run side by side. Whoever has a `Launched`
owns it: `child.EngineProcess` takes it over; closing `connection` ends a worker that nobody took.

Launch in a thread that lives as long as the engine: Linux sends a child its parent's death signal
when the thread that made it ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from quickstep.errors import EngineError

__all__ = ["WORKER_COMMAND", "Launched", "launch"]

# -P: whatever lies in the working directory is no module of ours
WORKER_COMMAND = (sys.executable, "-P", "-m", "quickstep.engine.remote.worker")

# numpy's threads for matrix products, of which the worker has none: they spin and take memory
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


class Launched(msgspec.Struct):
    """A process that starts up, and our end of its connection. Owned by whoever launched it.

    Attributes:
        is_told: It has its first message, so that it need not wait for our event loop.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    is_told: bool = False

    def tell(self, frame: bytes) -> None:
        """Send the frame of the first message; it is short enough for the socket to hold."""
        self.is_told = True
        with suppress(ConnectionError):  # a worker that is gone is found to be when it is read
            self.connection.sendall(frame)

    def end(self) -> None:
        """End the process, if it has not ended. Idempotent."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def launch(command: Sequence[str] = WORKER_COMMAND, hidden: Sequence[str] = ()) -> Launched:
    """Start `command` with its end of a connection and our process id as arguments.

    It does not get the environment's variables that `hidden` names.

    Raises:
        EngineError: The process cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        environment = {**_ENVIRONMENT, **kept, "PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"the engine process cannot be started: {error}") from error
    return Launched(process, ours)
