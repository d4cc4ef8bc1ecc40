"""The first message to the engine's process, and how messages are framed.

Apart from `messages`, because both ends need it before anything else: it goes out when the worker
has just been launched, and the worker begins to load when it has hardly imported more than this.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from quickstep.config import EngineConfig
from quickstep.engine.logs import LogSetup
from quickstep.errors import EngineError

__all__ = ["LENGTH", "Open", "WireMessage", "framed", "opening_frame", "opening_in", "opening_of"]

# 4 bytes, big endian, before each frame
LENGTH = struct.Struct(">I")


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoding that all messages have: an array that begins with the class's name."""


class Open(WireMessage, frozen=True):
    """Load this model; the first message, sent once."""

    config: EngineConfig
    log: LogSetup


def opening_of(config: EngineConfig, log: LogSetup | None = None) -> Open:
    """The first message. Who reads the streams is at this end, and so is the bound on them."""
    return Open(replace(config, streams=None), log or LogSetup())


def framed(messages: Sequence[object]) -> bytes:
    """Messages, encoded or not, as one frame of the connection (see `wire`)."""
    content = msgspec.msgpack.encode(messages)
    return LENGTH.pack(len(content)) + content


def opening_frame(config: EngineConfig, log: LogSetup) -> bytes:
    """The frame of `opening_of`."""
    return framed([opening_of(config, log)])


def opening_in(received: bytes) -> Open | None:
    """The opening that a connection begins with; None if that is not all there yet.

    Raises:
        EngineError: It begins with something else.
    """
    if len(received) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(received)
    content = received[LENGTH.size : LENGTH.size + length]
    if len(content) < length:
        return None
    try:
        return msgspec.msgpack.decode(content, type=list[Open])[0]
    except msgspec.DecodeError as error:
        raise EngineError(f"the first message is no opening: {error}") from error
