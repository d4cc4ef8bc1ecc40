"""One engine process, as its parent sees it: start, open, send and receive, end.

The connection is a socket pair: it has no name in the file system, so that no other process can
connect and no file remains. The worker exits when the connection closes, and the kernel ends it
with its parent (see `worker`).

Launch in a thread that lives as long as the engine (see `launch`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
from collections.abc import Sequence

from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.remote.connection import Connection
from quickstep.engine.remote.launch import WORKER_COMMAND, Launched, launch
from quickstep.engine.remote.messages import (
    FROM_ENGINE,
    FromEngine,
    Loading,
    Opened,
    OpenRefused,
)
from quickstep.engine.remote.opening import Open
from quickstep.engine.remote.supervisor import LoadProgress
from quickstep.errors import ConfigError, EngineDied, EngineError

_LOGGER = logging.getLogger(__name__)
_REAP_S = 5.0


class EngineProcess:
    """A running worker and the connection to it. Made by `take`; `end` it in any case.

    `sender` queues messages for the worker. `messages` are the worker's, until it ends.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: Connection,
        opening: Open,
        has_opening: bool = False,
    ) -> None:
        self._process = process
        self._opening = opening
        self._has_opening = has_opening
        self._connection = connection
        self.sender = connection.sender
        self._tasks = OwnedTasks(_LOGGER)
        self._tasks.start(self.sender.run(), "to-engine")
        self.messages = connection.messages(FROM_ENGINE)

    @classmethod
    async def take(cls, launched: Launched, opening: Open) -> EngineProcess:
        """Become the owner of a process that was launched."""
        try:
            connection = await Connection.of_pair(launched.connection, "the engine process")
        except BaseException:
            launched.connection.close()
            launched.process.kill()
            launched.process.wait()
            raise
        return cls(launched.process, connection, opening, launched.has_opening)

    @property
    def name(self) -> str:
        """For the log."""
        return f"the engine process {self._process.pid}"

    @property
    def address(self) -> str:
        """It is on this machine."""
        return ""

    @property
    def process_id(self) -> int:
        """The operating system's id of the worker."""
        return self._process.pid

    async def open(self, progress: LoadProgress | None, silence_s: float | None = None) -> Opened:
        """Have the model loaded; the opening is sent unless it was sent when launching.

        `silence_s` is the longest time between two messages; None for any time.

        Raises:
            ConfigError: The checkpoint is missing or broken, or does not fit.
            EngineDied: The process ended, and did not say why.
            EngineError: The process failed.
        """
        if not self._has_opening:
            self.sender.put(self._opening)
        while (message := await self._next(silence_s)) is not None:
            match message:
                case Loading(num_bytes=num_bytes, total_bytes=total_bytes):
                    if progress is not None:
                        progress(num_bytes, total_bytes)
                case Opened():
                    return message
                case OpenRefused(message=reason, is_config=is_config):
                    raise ConfigError(reason) if is_config else EngineError(reason)
                case _:
                    raise EngineError(f"the engine process sent {message} before it had opened")
        how = await self.end()
        raise EngineDied(f"{how} while it loaded the model")

    async def _next(self, silence_s: float | None) -> FromEngine | None:
        """The next message; None after the last one. Raises EngineError if it takes too long."""
        try:
            async with asyncio.timeout(silence_s):
                return await anext(self.messages, None)
        except TimeoutError:
            raise EngineError(
                f"the engine process sent nothing for {silence_s:g} s while it loaded the model"
            ) from None

    def kill(self) -> None:
        """End it now; `messages` ends with it."""
        self._process.kill()

    async def end(self) -> str:
        """Close the connection, wait for the process, kill it if needed. Returns how it ended.

        The process has ended when this returns, even if it was cancelled (repeatedly).
        """
        self._tasks.cancel()
        self._connection.close()
        reaping = asyncio.ensure_future(asyncio.to_thread(self._reap))
        cancelled = False
        while not reaping.done():
            try:
                await asyncio.shield(reaping)
            except asyncio.CancelledError:
                self._process.kill()
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return _how(reaping.result())

    def _reap(self) -> int:
        try:
            return self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class StandbyProcess:
    """A worker that has imported what an engine needs and waits for a model: without weights, KV
    cache and kernels' threads. The engines of a server share it; what wakes first takes it. Owned
    by the server, which ends it.
    """

    def __init__(self, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._command = tuple(command)
        self._launched: Launched | None = None
        self._is_ended = False

    def prepare(self) -> None:
        """Start a process if none waits. Without one, the next engine to wake starts its own."""
        if self._is_ended or (self._launched is not None and self._launched.is_alive):
            return
        self._drop()
        try:
            self._launched = launch(self._command)
        except EngineError as error:
            _LOGGER.warning("no process waits for the next model: %s", error)

    def take(self) -> Launched | None:
        """The process that waits, for the caller to own; None if there is none."""
        launched, self._launched = self._launched, None
        if launched is None or launched.is_alive:
            return launched
        launched.end()
        return None

    def end(self) -> None:
        """End the process that waits; none is started any more."""
        self._is_ended = True
        self._drop()

    def _drop(self) -> None:
        if (launched := self._launched) is not None:
            self._launched = None
            launched.end()


class ProcessLauncher:
    """Starts the processes of one engine, one after the other; the first, `launched`, may have been
    started, and `standby` may have one for any of them.
    """

    def __init__(
        self,
        opening: Open,
        command: Sequence[str],
        launched: Launched | None = None,
        standby: StandbyProcess | None = None,
    ) -> None:
        self._opening = opening
        self._command = tuple(command)
        self._launched = launched
        self._standby = standby

    async def start(self) -> EngineProcess:
        """The next process. Raises EngineError if it cannot be started."""
        launched, self._launched = self._launched, None
        if launched is None and self._standby is not None:
            launched = self._standby.take()
        if launched is None:
            launched = launch(self._command)
        return await EngineProcess.take(launched, self._opening)


def _how(code: int) -> str:
    if code >= 0:
        return f"the engine process exited with code {code}"
    try:
        return f"the engine process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"the engine process was ended by signal {-code}"
