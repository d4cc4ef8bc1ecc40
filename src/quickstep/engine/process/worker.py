"""The engine's process: `python -m quickstep.engine.process.worker SOCKET_FD PARENT_PID`.

Started by `child.EngineProcess` with its end of a socket pair. It serves what comes over it and
exits when the other end is gone: whatever becomes of the parent, no engine is left behind. On
Linux the kernel also kills it with its parent, even in the middle of a native call. SIGINT and
SIGTERM are the parent's to answer: a terminal and a service manager send them to the whole group,
and the parent then drains.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quickstep.deferred import defer
from quickstep.ops.torch_import import defer_parts_of_torch

if TYPE_CHECKING:
    from quickstep.config import EngineConfig
    from quickstep.engine.engine import Engine
    from quickstep.engine.process.service import EngineOpener

__all__ = ["main", "run"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A thread that loads weights comes back for the interpreter's lock after each matrix; at Python's
# own 5 ms it would wait longer for a thread that imports than it works.
_SWITCH_S = 0.0002
# The front door of `tokenizers` imports its ready-made tokenizers; the other is docstrings.
_NOT_NEEDED = ("tokenizers", "numpy._core._add_newdocs")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the real engine. Returns the exit code."""
    # Importing makes nothing but objects that stay: collecting garbage in between costs a sixth of
    # the time. `EngineService` turns it on again.
    gc.disable()
    arguments = sys.argv[1:] if argv is None else argv
    _die_with(int(arguments[1]))
    sys.setswitchinterval(_SWITCH_S)
    defer_parts_of_torch()  # of an import that most models never come to
    defer(_NOT_NEEDED)
    return run(arguments, _open)


def _open(config: EngineConfig, progress: Callable[[int, int], None]) -> Engine:
    """The real engine, in a thread: its imports wait for no message, nor the messages for them."""
    from quickstep.engine.assembly import open_engine

    return open_engine(config, progress, with_template=False)


def run(argv: Sequence[str], opener: EngineOpener) -> int:
    """Serve the engine that `opener` loads, until told to stop or the parent is gone."""
    socket_fd, parent_pid = (int(argument) for argument in argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent_pid)
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(socket_fd, opener))


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before the line above
        os._exit(1)


async def _serve(socket_fd: int, opener: EngineOpener) -> int:
    from quickstep.engine.process.service import EngineService

    try:
        service = await EngineService.connect(socket.socket(fileno=socket_fd), opener)
        stopped = await service.run()
    except Exception:
        logging.getLogger(__name__).exception("the engine process failed")
        stopped = False
    if not stopped:
        # A thread may be loading or stepping, and nobody is left to wait for it.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
