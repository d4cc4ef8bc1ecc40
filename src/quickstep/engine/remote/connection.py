"""A connection between a server's process and an engine's: messages in both directions.

A `Connection` is the same over the socket pair of a child (`child`) and over TCP (`tcp`). On it,
messages are frames of a length and a msgpack list:

    4 bytes, big endian: length | msgpack [message, message, ...]

A frame is at most `MAX_FRAME_BYTES` long: a peer that announces a longer one sends something else,
and its connection is closed. Never pickle.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from quickstep.engine.remote.messages import ENCODER, Message
from quickstep.engine.remote.opening import LENGTH
from quickstep.errors import EngineError

MAX_FRAME_BYTES = 256 * 1024 * 1024
# What a connection's reader buffers before the socket has to wait.
_BUFFER_BYTES = 256 * 1024
# Decoding a frame must not block the reader's loop for long.
_MESSAGES_PER_FRAME = 256
_BYTES_PER_FRAME = 8 * 1024 * 1024  # after which a frame gets no more messages

_Received = TypeVar("_Received")


class Connection:
    """Both directions of a connection, used in one event loop. `peer` names the other end in
    errors and in the log. `sender.run` is a task of the owner, who closes the connection.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.peer = peer
        self.sender = Sender(writer)

    @classmethod
    async def of_pair(cls, sock: socket.socket, peer: str) -> Connection:
        """One end of a socket pair, which this object owns from now on."""
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=_BUFFER_BYTES)
        return cls(reader, writer, peer)

    def messages(
        self, decoder: msgspec.msgpack.Decoder[list[_Received]]
    ) -> AsyncGenerator[_Received, None]:
        """All messages until the other end closes. Raises EngineError for an invalid one."""
        return read_messages(self._reader, decoder, self.peer)

    def close(self) -> None:
        """Close both directions, once what was written is sent; `messages` ends."""
        self._writer.close()

    def abort(self) -> None:
        """Close both directions now: the other end may not read."""
        self._writer.transport.abort()


async def read_messages(
    reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[list[_Received]], peer: str
) -> AsyncGenerator[_Received, None]:
    """All messages until the other end, `peer`, closes. Raises EngineError for an invalid one."""
    while True:
        try:
            # as `read_frame`, without a coroutine of its own for every message
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise _too_long(length, MAX_FRAME_BYTES, peer)
            received = decoder.decode(await reader.readexactly(length))
        except msgspec.DecodeError as error:
            raise EngineError(f"what came from {peer} is no message: {error}") from error
        except (asyncio.IncompleteReadError, OSError):
            return
        for message in received:
            yield message


async def read_frame(reader: asyncio.StreamReader, max_bytes: int, peer: str) -> bytes:
    """The content of the next frame.

    Raises:
        EngineError: The frame is longer than `max_bytes`.
        OSError, asyncio.IncompleteReadError: The connection has ended.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > max_bytes:
        raise _too_long(length, max_bytes, peer)
    return await reader.readexactly(length)


def _too_long(length: int, max_bytes: int, peer: str) -> EngineError:
    return EngineError(
        f"{peer} announced a frame of {length} bytes, the limit is {max_bytes}: it is closed"
    )


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Hand data to a connection. Raises OSError if it is lost, where uvloop's own `write` raises
    RuntimeError and asyncio's says nothing.
    """
    if writer.is_closing():
        raise ConnectionResetError("the connection is lost")
    writer.write(data)


class Sender:
    """The sending half of a connection, used in one event loop. `run` is its task.

    Everything that was put since the last frame is sent in the next one, so a step's deltas for all
    requests are one frame. `put` never waits: while the reader is slow, encoded messages queue up
    here, bounded by what the live requests may still generate, and the engine's loop continues.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pending: deque[msgspec.Raw] = deque()
        self._num_bytes = 0  # of what is pending
        self._has_pending = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """The size of the messages that are not sent yet."""
        return self._num_bytes

    def put(self, message: Message) -> None:
        """Queue a message; it is lost if the other end has closed.

        Raises:
            UnicodeEncodeError: A string contains half a surrogate pair.
            OverflowError: An integer has more than 64 bits.
        """
        encoded = msgspec.Raw(ENCODER.encode(message))
        self._pending.append(encoded)
        self._num_bytes += len(encoded)
        self._has_pending.set()

    async def run(self) -> None:
        """Send messages until cancelled, or until the other end has closed."""
        try:
            while True:
                await self._has_pending.wait()
                self._has_pending.clear()
                await self.flush()
        except OSError:
            return  # the task that reads this connection notices its end

    async def flush(self) -> None:
        """Send all queued messages. Raises OSError."""
        while self._pending:
            messages: list[msgspec.Raw] = []
            num_bytes = 0
            while (
                self._pending
                and len(messages) < _MESSAGES_PER_FRAME
                and num_bytes < _BYTES_PER_FRAME
            ):
                message = self._pending.popleft()
                messages.append(message)
                num_bytes += len(message)
            self._num_bytes -= num_bytes
            content = msgspec.msgpack.encode(messages)
            write(self._writer, LENGTH.pack(len(content)) + content)
            await self._writer.drain()
