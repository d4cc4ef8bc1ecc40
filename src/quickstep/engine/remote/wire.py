"""Messages over a connected stream socket: frames of a length and a msgpack list of messages.

    4 bytes, big endian: length | msgpack [message, message, ...]

Whatever was put since the last frame goes in the next one, so a step's deltas for all requests
are one frame. `put` never waits: while the reader is slow, encoded messages pile up here, bounded
by what the live requests may still generate; the engine's loop does not notice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from quickstep.engine.remote.messages import Message, encode
from quickstep.engine.remote.opening import LENGTH, framed
from quickstep.errors import EngineError

__all__ = ["BUFFER_BYTES", "Sender", "read_messages"]

# What a connection's reader takes in before it lets the socket wait.
BUFFER_BYTES = 256 * 1024
# Decoding a frame must not hold the reader's loop for long.
_MESSAGES_PER_FRAME = 256

_Received = TypeVar("_Received")


class Sender:
    """The sending half of a connection, used in one event loop. `run` is its task."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pending: deque[msgspec.Raw] = deque()
        self._num_bytes = 0  # of what is pending
        self._news = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Size of what was put and is not sent."""
        return self._num_bytes

    def put(self, message: Message) -> None:
        """Queue a message. Raises UnicodeEncodeError for text that is not Unicode."""
        encoded = encode(message)
        self._pending.append(encoded)
        self._num_bytes += len(encoded)
        self._news.set()

    async def run(self) -> None:
        """Send what is put until cancelled, or until the other end is gone."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                await self.flush()
        except ConnectionError:
            return  # whoever reads this connection sees its end

    async def flush(self) -> None:
        """Send all that was put. Raises ConnectionError."""
        while self._pending:
            count = min(len(self._pending), _MESSAGES_PER_FRAME)
            messages = [self._pending.popleft() for _ in range(count)]
            self._num_bytes -= sum(map(len, messages))
            self._writer.write(framed(messages))
            await self._writer.drain()


async def read_messages(
    reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[list[_Received]]
) -> AsyncGenerator[_Received, None]:
    """All messages until the other end is gone. Raises EngineError for what is none."""
    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            messages = decoder.decode(await reader.readexactly(length))
        except msgspec.DecodeError as error:
            raise EngineError(f"what came from the other process is no message: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        for message in messages:
            yield message
