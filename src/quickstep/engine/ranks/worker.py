"""The process of a rank: `python -m quickstep.engine.ranks.worker SOCKET_FD PARENT_PID`.

It loads its part of the model and follows rank 0, its parent, until that closes the group or ends.
As the engine's process, it ignores the signals of a terminal, and ends with its parent.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence

from quickstep.engine.assembly import import_loading, open_rank
from quickstep.engine.logs import install
from quickstep.engine.ranks.messages import (
    TO_RANK,
    AdapterHeld,
    DropAdapter,
    HoldAdapter,
    OpenRank,
    RankOpened,
    RankRefused,
    receive,
    send,
)
from quickstep.engine.remote.worker import die_with, leave_signals
from quickstep.errors import EngineError, QuickstepError
from quickstep.ops.table import LoRAPart
from quickstep.runtime.steps.ranked import RankFollower

_LOGGER = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Follow rank 0. Returns the exit code."""
    gc.disable()  # imports and weights stay
    socket_fd, parent_pid = map(int, sys.argv[1:] if argv is None else argv)
    leave_signals()
    die_with(parent_pid)
    connection = socket.socket(fileno=socket_fd)
    import_loading()
    opening = receive(connection, TO_RANK)
    if not isinstance(opening, OpenRank):
        return 1
    install(opening.log)
    try:
        follower = open_rank(opening.config, opening.plan, opening.memory, opening.rank)
        os.close(opening.memory.descriptor)
    except (QuickstepError, MemoryError) as error:
        send(connection, RankRefused(str(error) or "the machine has no memory left"))
        return 1
    gc.freeze()
    gc.enable()
    threading.Thread(target=_listen, args=(connection, follower), daemon=True).start()
    send(connection, RankOpened(follower.fingerprint))
    try:
        follower.run()
    except EngineError as error:
        _LOGGER.error("rank %d ends: %s", opening.rank, error)
        return 1
    return 0


def _listen(connection: socket.socket, follower: RankFollower) -> None:
    """Hold and drop adapters, while steps run, until rank 0 has closed its end: then the process
    ends, also in a native call.
    """
    try:
        while (message := receive(connection, TO_RANK)) is not None:
            if isinstance(message, HoldAdapter):
                modules: list[list[LoRAPart]] = [[] for _ in range(message.num_modules)]
                for part in message.parts:
                    modules[part.module].append(part.part())
                follower.hold(message.number, modules)
                send(connection, AdapterHeld(message.number))
            elif isinstance(message, DropAdapter):
                follower.drop(message.number)
    except BaseException:  # the thread's top: without it, rank 0 would wait
        _LOGGER.exception("a rank ends")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
