"""What passes between rank 0 and another rank beside their steps, on a socket pair.

    ToRank     OpenRank, once
    FromRank   RankOpened or RankRefused, once

Steps go through shared memory (`ops.native.ranks`). A connection that closes means that the process
at its other end has ended.
"""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from quickstep.config import EngineConfig
from quickstep.engine.logs import LogSetup
from quickstep.engine.remote.opening import LENGTH, WireMessage, framed
from quickstep.model.sizing import MemoryPlan
from quickstep.ops.native.ranks import RankMemory

_Message = TypeVar("_Message")


class OpenRank(WireMessage, frozen=True):
    """Load this rank's part of the model; `plan` is that of all ranks."""

    config: EngineConfig
    plan: MemoryPlan
    memory: RankMemory
    rank: int
    log: LogSetup


class RankOpened(WireMessage, frozen=True):
    """The rank waits for steps."""


class RankRefused(WireMessage, frozen=True):
    """The rank cannot load its part, and ends."""

    reason: str


TO_RANK = msgspec.msgpack.Decoder(list[OpenRank])
FROM_RANK = msgspec.msgpack.Decoder(list[RankOpened | RankRefused])


def send(connection: socket.socket, message: WireMessage) -> None:
    """Send a message. Raises OSError."""
    connection.sendall(framed([message]))


def receive(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[list[_Message]]
) -> _Message | None:
    """Wait for a message: `TO_RANK` or `FROM_RANK`. None once the other end has closed.

    Raises:
        OSError: The connection failed.
        msgspec.DecodeError: It is another message.
    """
    head = _read(connection, LENGTH.size)
    content = None if head is None else _read(connection, LENGTH.unpack(head)[0])
    return None if content is None else decoder.decode(content)[0]


def _read(connection: socket.socket, num_bytes: int) -> bytes | None:
    found = bytearray()
    while len(found) < num_bytes:
        received = connection.recv(num_bytes - len(found))
        if not received:
            return None
        found += received
    return bytes(found)
