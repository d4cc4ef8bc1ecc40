"""An engine that listens, from its model to its end: for `quickstep engine`, and for a process that
launches one on its host (`python -m quickstep.engine.remote.listening`).

The launching process writes a `Listening` to the engine's standard input: no argument, environment
variable or file has the token. The engine answers with `ListensAt` on its standard output once it
listens, and ends when its standard input does, so that it does not survive the launching process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from io import BufferedIOBase
from typing import IO, TYPE_CHECKING, TypeVar

import msgspec

from quickstep.config import EngineConfig
from quickstep.engine.logs import LogSetup
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.remote.connection import MAX_FRAME_BYTES
from quickstep.engine.remote.opening import LENGTH, WireMessage, framed
from quickstep.errors import EngineError, QuickstepError

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine
    from quickstep.engine.remote.hello import Hello

_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
COMMAND = (sys.executable, "-P", "-m", "quickstep.engine.remote.listening")

BinaryFile = IO[bytes] | BufferedIOBase
_Content = TypeVar("_Content", bound=WireMessage)


class Listening(WireMessage, frozen=True):
    """Load this model and listen on a free port of `host` for servers that know the token."""

    config: EngineConfig
    log: LogSetup
    token: str
    host: str


class ListensAt(WireMessage, frozen=True):
    """The engine listens on `port`, or does not, because it was `refused`."""

    port: int = 0
    refused: str = ""


def write_message(file: BinaryFile, message: WireMessage) -> None:
    """Write one frame. Raises OSError."""
    file.write(framed([message]))
    file.flush()


def read_message(file: BinaryFile, kind: type[_Content]) -> _Content:
    """Read one frame. Raises EngineError if the file ends or has something else."""
    length = file.read(LENGTH.size)
    try:
        if len(length) == LENGTH.size:
            kinds = list[kind]  # type: ignore[valid-type]
            num_bytes = LENGTH.unpack(length)[0]
            if num_bytes > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {num_bytes} bytes")
            found: list[_Content] = msgspec.msgpack.decode(file.read(num_bytes), type=kinds)
            (content,) = found
            return content
    except (ValueError, msgspec.DecodeError) as error:
        raise EngineError(f"what was read is no {kind.__name__}: {error}") from error
    raise EngineError("the process ended before it answered")


def load(config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> Engine:
    """The engine, open. Raises ConfigError."""
    from quickstep.engine.remote.worker import open_for_prompts
    from quickstep.ops.torch_import import defer_parts_of_torch

    gc.disable()  # see `engine.remote.worker.main`
    defer_parts_of_torch()
    return open_for_prompts(config, progress)


async def listen(
    engine: Engine,
    sock: socket.socket,
    hello: Hello,
    drain_s: float,
    listens: Callable[[int], None] | None = None,
) -> None:
    """Serve the servers that connect to a bound socket until a signal, or until the engine fails,
    which ends the process. `listens` gets the port.
    """
    from quickstep.engine.remote.host import EngineAddress
    from quickstep.engine.remote.listener import EngineListener
    from quickstep.engine.remote.service import begin_serving
    from quickstep.engine.remote.texts import text_digests

    path = engine.model.path
    assert path is not None, "an engine that was loaded has a checkpoint"
    digests = text_digests(path, engine.tokenizer)
    stopping = _signals()
    await engine.start()
    begin_serving()
    listener = EngineListener(engine, hello, digests)
    await listener.start(sock)
    address = EngineAddress(*sock.getsockname()[:2])
    _LOG.info("%s (%s) listens on %s", engine.model_name, engine.fingerprint, address)
    if listens is not None:
        listens(address.port)
    tasks = OwnedTasks(_LOG)
    failing = tasks.start(engine.wait_until_failed())
    signaled = tasks.start(stopping.acquire())
    await asyncio.wait((failing, signaled), return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        # a thread may still run a step; servers connect again to the process that follows
        _LOG.critical("the engine failed: %s", engine.stats().failure)
        os._exit(1)
    _LOG.info("no new requests, running ones have %g s; again to end them", drain_s)
    draining = tasks.start(listener.stop(drain_s))
    again = tasks.start(stopping.acquire())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await listener.stop(0.0)
    await engine.stop()
    _LOG.info("stopped")


def _signals() -> asyncio.Semaphore:
    """Counts the signals that end the process, each of which releases it once."""
    counted = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, counted.release)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return counted


def main() -> int:
    """Serve the `Listening` of the standard input until that ends. Returns the exit code."""
    import uvloop

    from quickstep.engine.logs import install
    from quickstep.engine.remote.hello import Hello, protocol
    from quickstep.engine.remote.host import EngineAddress
    from quickstep.engine.remote.listener import bind

    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    order = read_message(sys.stdin.buffer, Listening)
    threading.Thread(target=_end_with_input, daemon=True, name="launching-process").start()
    install(order.log)
    try:
        with bind(EngineAddress(order.host, 0), "the engine's host") as sock:
            engine = load(order.config)

            def listens(port: int) -> None:
                write_message(output, ListensAt(port))

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                hello = Hello(protocol(), order.token)
                runner.run(listen(engine, sock, hello, 0.0, listens))
    except QuickstepError as error:
        write_message(output, ListensAt(refused=str(error)))
        return 1
    return 0


def _end_with_input() -> None:
    """End this process, even in a native call, once the standard input has ended."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
