"""One life of the engine's process, as its parent sees it: spawn, open, talk, end.

The two ends of a socket pair are the whole connection: it has no name in the file system, so that
nobody else can connect and nothing is left behind. The worker exits when its end closes, and the
kernel ends it with its parent (see `worker`).

Spawn in a thread that lives as long as the engine (see `launch`).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Sequence

from quickstep.engine.remote.launch import WORKER_COMMAND, Launched, launch
from quickstep.engine.remote.messages import (
    FROM_ENGINE,
    FromEngine,
    Loading,
    Open,
    Opened,
    OpenRefused,
    ToEngine,
)
from quickstep.engine.remote.wire import BUFFER_BYTES, Sender, read_messages
from quickstep.errors import ConfigError, EngineError

__all__ = ["WORKER_COMMAND", "EngineProcess", "LoadProgress"]

# (bytes read, bytes in all)
LoadProgress = Callable[[int, int], None]

_REAP_S = 5.0


class EngineProcess:
    """A running worker and the connection to it. Made by `spawn`; `end` it whatever happens."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_told: bool = False,
    ) -> None:
        self._process = process
        self._is_told = is_told
        self._writer = writer
        self._sender = Sender(writer)
        self._sending = asyncio.create_task(self._sender.run(), name="to-engine")
        self._messages = read_messages(reader, FROM_ENGINE)

    @classmethod
    async def spawn(cls, command: Sequence[str] = WORKER_COMMAND) -> EngineProcess:
        """Launch `command`. Raises EngineError if it cannot be started."""
        return await cls.take(launch(command))

    @classmethod
    async def take(cls, launched: Launched) -> EngineProcess:
        """Become the owner of a process that was launched."""
        try:
            reader, writer = await asyncio.open_unix_connection(
                sock=launched.connection, limit=BUFFER_BYTES
            )
        except BaseException:
            launched.connection.close()
            launched.process.kill()
            launched.process.wait()
            raise
        return cls(launched.process, reader, writer, launched.is_told)

    @property
    def process_id(self) -> int:
        """The operating system's id of the worker."""
        return self._process.pid

    @property
    def messages(self) -> AsyncGenerator[FromEngine, None]:
        """What the worker says, until it is gone; one generator for the whole life."""
        return self._messages

    async def open(
        self, opening: Open, progress: LoadProgress | None, silence_s: float | None = None
    ) -> Opened:
        """Have the model loaded. Who launched the process may have told it to already.

        `silence_s` is how long it may say nothing; None for as long as it likes.

        Raises:
            ConfigError: The checkpoint is missing or broken, or does not fit.
            EngineError: The process failed.
        """
        if not self._is_told:
            self.send(opening)
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
                    raise EngineError(f"the engine process said {message} before it had opened")
        how = await self.end()
        raise EngineError(f"the engine process {how} while it loaded the model")

    async def _next(self, silence_s: float | None) -> FromEngine | None:
        """The next message; None after the last one. Raises EngineError if it takes too long."""
        try:
            async with asyncio.timeout(silence_s):
                return await anext(self._messages, None)
        except TimeoutError:
            raise EngineError(
                f"the engine process said nothing for {silence_s:g} s while it loaded the model"
            ) from None

    @property
    def num_unsent_bytes(self) -> int:
        """Size of the messages that the worker has not taken from us."""
        return self._sender.num_bytes

    def send(self, message: ToEngine) -> None:
        """Queue a message; lost if the worker is gone. Raises UnicodeEncodeError."""
        self._sender.put(message)

    def kill(self) -> None:
        """End it now; `messages` ends with it."""
        self._process.kill()

    async def end(self) -> str:
        """Close the connection, wait for the process, kill it if need be; says how it ended.

        There is no process any more when this is over, not even by (repeated) cancellation.
        """
        self._sending.cancel()
        self._writer.close()
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


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
