"""The first message to the engine's process, and how messages are framed.

Separate from `messages`, because both ends need it first: it is sent when the worker has just been
launched, and the worker begins to load when it has imported little more than this.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from quickstep.config import EngineConfig
from quickstep.engine.logs import LogSetup
from quickstep.errors import EngineError

# 4 bytes, big endian, before each frame
LENGTH = struct.Struct(">I")


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoding of all messages: an array that begins with the class's name."""


class Open(WireMessage, frozen=True):
    """Load this model; the first message, sent once."""

    config: EngineConfig
    log: LogSetup


def opening_of(config: EngineConfig, log: LogSetup | None = None) -> Open:
    """The first message. It has no bounds of streams: they are read, and bounded, at this end."""
    return Open(replace(config, streams=None), log or LogSetup())


def framed(messages: Sequence[object]) -> bytes:
    """Messages, encoded or not, as one frame (see `connection`)."""
    content = msgspec.msgpack.encode(messages)
    return LENGTH.pack(len(content)) + content


def opening_frame(config: EngineConfig, log: LogSetup) -> bytes:
    """The frame of `opening_of`."""
    return framed([opening_of(config, log)])


def opening_in(received: bytes) -> Open | None:
    """The opening at the beginning of a connection; None if it has not been received completely.

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
