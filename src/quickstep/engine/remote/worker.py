"""The engine's process: `python -m quickstep.engine.remote.worker SOCKET_FD PARENT_PID`.

Started by `launch` with its end of a socket pair. It serves the messages on it and exits when the
other end closes, so no engine survives its parent. On Linux the kernel also kills it with its
parent, even in a native call. It ignores SIGINT and SIGTERM: a terminal and a service manager send
them to the process group, and the parent then drains.

Loading the weights takes longest at the start. So this module imports what reads them, looks at the
first message to see which ones, and imports the rest while a thread reads them; without a message
yet, before it comes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from quickstep.errors import EngineError
from quickstep.ops.torch_import import defer_parts_of_torch

if TYPE_CHECKING:
    from quickstep.config import EngineConfig
    from quickstep.engine.engine import Engine
    from quickstep.engine.remote.opening import Open
    from quickstep.engine.remote.service import EngineOpener

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FIRST_BYTES = 64 * 1024  # more than the first message has
# A thread that loads weights comes back for the interpreter's lock after each matrix; at Python's
# own 5 ms it would wait longer for a thread that imports than it works.
_SWITCH_S = 0.0002


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the real engine. Returns the exit code."""
    # Imports only make objects that stay: collecting garbage meanwhile costs a sixth of the time.
    # `EngineService` enables it again.
    gc.disable()
    arguments = sys.argv[1:] if argv is None else argv
    leave_signals()
    die_with(int(arguments[1]))
    sys.setswitchinterval(_SWITCH_S)
    defer_parts_of_torch()  # which most models never import
    return run(arguments, _opener(int(arguments[0])))


def _opener(socket_fd: int) -> EngineOpener:
    """Opens the real engine, and begins before the event loop receives the first message."""
    from concurrent.futures import ThreadPoolExecutor

    from quickstep.engine.assembly import import_loading
    from quickstep.engine.logs import install

    import_loading()
    if not _has_message(socket_fd):  # a standby process, or an owner that is slow: there is time
        _import_rest()
    progress = _LoadProgress()
    thread = ThreadPoolExecutor(1, thread_name_prefix="open")
    first = _first_message(socket_fd)
    if first is None:
        return open_for_prompts
    install(first.log)
    opening = thread.submit(open_for_prompts, first.config, progress)
    opening.add_done_callback(lambda _: progress.has_begun.set())
    progress.has_begun.wait()  # the imports that follow would take the interpreter's lock from it

    def opened(config: EngineConfig, listener: Callable[[int, int], None]) -> Engine:
        assert config == first.config, "the first message is the one that was peeked at"
        progress.listener = listener
        return opening.result()

    return opened


def open_for_prompts(
    config: EngineConfig, progress: Callable[[int, int], None] | None = None
) -> Engine:
    """An engine whose prompts come as tokens; the process ends when one of its ranks does. Raises
    ConfigError.
    """
    from quickstep.engine.assembly import open_engine

    return open_engine(config, progress, with_template=False, on_rank_lost=lambda _: os._exit(1))


def _first_message(socket_fd: int) -> Open | None:
    """Peek at the opening, which stays in the socket; None if something else is first."""
    from quickstep.engine.remote.opening import opening_in

    connection = socket.socket(fileno=socket_fd)
    try:
        return opening_in(connection.recv(_FIRST_BYTES, socket.MSG_PEEK))
    except (EngineError, OSError):
        return None
    finally:
        connection.detach()


def _has_message(socket_fd: int) -> bool:
    """Whether the opening is there, or the other end has closed."""
    return bool(select.select([socket_fd], [], [], 0.0)[0])


def _import_rest() -> None:
    """Import what is imported after the first message otherwise."""
    from quickstep.engine.assembly import import_engine

    import_engine()
    for name in ("uvloop", "quickstep.engine.remote.connection", "quickstep.engine.remote.service"):
        import_module(name)


class _LoadProgress:
    """Passes the progress of loading on to `listener`, once that is set."""

    def __init__(self) -> None:
        from threading import Event

        self.has_begun = Event()
        self.listener: Callable[[int, int], None] | None = None

    def __call__(self, num_bytes: int, total_bytes: int) -> None:
        self.has_begun.set()
        if self.listener is not None:
            self.listener(num_bytes, total_bytes)


def run(argv: Sequence[str], opener: EngineOpener) -> int:
    """Serve the engine that `opener` loads, until it is stopped or the parent ends."""
    socket_fd, parent_pid = (int(argument) for argument in argv)
    leave_signals()
    die_with(parent_pid)
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(socket_fd, opener))


def leave_signals() -> None:
    """Ignore what a terminal and a service manager send to the process group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def die_with(parent_pid: int) -> None:
    """End with the parent; on Linux the kernel does it, even in a native call."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the line above
        os._exit(1)


async def _serve(socket_fd: int, opener: EngineOpener) -> int:
    import logging

    from quickstep.engine.remote.connection import Connection
    from quickstep.engine.remote.service import EngineService

    try:
        connection = await Connection.of_pair(socket.socket(fileno=socket_fd), "the server")
        stopped = await EngineService(connection, opener).run()
    except BaseException:  # the process's top: it ends in any case
        logging.getLogger(__name__).exception("the engine process failed")
        stopped = False
    if not stopped:
        # A thread may still load or run a step; there is no reason to wait for it.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
