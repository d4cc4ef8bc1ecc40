"""The process of a rank or stage: `python -m quickstep.engine.ranks.worker SOCKET_FD PARENT_PID`.

It loads its part of the model and follows its parent, until that closes the others or ends.
As the engine's process, it ignores the signals of a terminal, and ends with its parent.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence

from quickstep.engine.assembly import import_loading, open_rank, open_stage
from quickstep.engine.logs import install
from quickstep.engine.ranks.messages import (
    TO_RANK,
    AdapterHeld,
    DropAdapter,
    HoldAdapter,
    OpenRank,
    OpenStage,
    PartOpened,
    PartRefused,
    WireTensor,
    receive,
    send,
)
from quickstep.engine.ranks.processes import ModelProcesses
from quickstep.engine.remote.worker import die_with, leave_signals
from quickstep.errors import EngineError, QuickstepError
from quickstep.model.stages import Stage
from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import FLOAT32, Array, HostTensor
from quickstep.runtime.steps.pipeline import StageFollower, StageLinks
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
    if not isinstance(opening, OpenRank | OpenStage):
        return 1
    install(opening.log)
    processes: ModelProcesses | None = None
    biases: Mapping[int, Array] = {}
    try:
        follower: RankFollower | StageFollower
        if isinstance(opening, OpenRank):
            place = opening.rank, opening.stage, opening.store_path
            follower = open_rank(opening.config, opening.plan, opening.memory, *place)
            os.close(opening.memory.descriptor)
        else:
            links = StageLinks(
                *(socket.socket(fileno=fd) for fd in (opening.before, opening.after))
            )
            number, size = opening.stage, opening.config.load.pipeline_parallel_size
            processes = ModelProcesses(opening.config.load, _end, Stage(number, size))
            follower, biases = open_stage(opening.config, opening.plan, links, processes)
    except (QuickstepError, MemoryError) as error:
        send(connection, PartRefused(str(error) or "the machine has no memory left"))
        if processes is not None:
            processes.close()
        return 1
    gc.freeze()
    gc.enable()
    threading.Thread(target=_listen, args=(connection, follower), daemon=True).start()
    wire = [(number, WireTensor.of(HostTensor(bias, FLOAT32))) for number, bias in biases.items()]
    send(connection, PartOpened(follower.fingerprint, tuple(wire)))
    try:
        follower.run()
    except (EngineError, OSError) as error:
        _LOGGER.error("a process of the model ends: %s", error)
        return 1
    finally:
        if processes is not None:
            processes.close()
    return 0


def _end(_: str) -> None:
    """A rank of this stage is lost, and so is the stage."""
    os._exit(1)


def _listen(connection: socket.socket, follower: RankFollower | StageFollower) -> None:
    """Hold and drop adapters, while steps run, until rank 0 has closed its end: then the process
    ends, also in a native call.
    """
    try:
        while (message := receive(connection, TO_RANK)) is not None:
            if isinstance(message, HoldAdapter):
                modules: list[list[LoRAPart]] = [[] for _ in range(message.num_modules)]
                for part in message.parts:
                    modules[part.module].append(part.part())
                follower.adapters.hold(message.number, modules)
                send(connection, AdapterHeld(message.number))
            elif isinstance(message, DropAdapter):
                follower.adapters.drop(message.number)
    except BaseException:  # the thread's top: without it, rank 0 would wait
        _LOGGER.exception("a rank ends")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
