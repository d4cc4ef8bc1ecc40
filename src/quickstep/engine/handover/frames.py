"""What engines send to each other: the KV blocks of a prompt, over a connection of its own.

    sender:    32 bytes token | length, msgpack TransferOffer
    receiver:  length, msgpack TransferReply
    sender:    int64 count, then each block's bytes: K and V of every layer (count 0: all are sent)
               | uint32 crc32 of them
               ... until all are sent, or the connection closes early

Both engines are of one installation and have the same weights, which the offer says. Bytes go from
the sender's KV cache to the receiver's, on CPUs without a copy in between.
"""

from __future__ import annotations

import hmac
import socket
import struct
import zlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from quickstep.errors import EngineError

TOKEN_BYTES = 32
_MAX_MESSAGE_BYTES = 64 << 20  # tokens of the longest prompts, in msgpack
_LENGTH = struct.Struct("!I")
_COUNT = struct.Struct("!q")
_CHECKSUM = struct.Struct("!I")
_M = TypeVar("_M")


class TransferOffer(msgspec.Struct, frozen=True, array_like=True):
    """The first block of a request's prompt is computed; the others follow.

    Attributes:
        fingerprint: Of the weights and the form of the KV cache.
        block_bytes: Of a block in all layers.
    """

    request_id: str
    fingerprint: str
    block_bytes: int
    adapter: str
    cache_salt: str
    token_ids: tuple[int, ...]


class TransferReply(msgspec.Struct, frozen=True, array_like=True):
    """From which block on the receiver wants them; `refusal` says why it wants none."""

    first: int = 0
    refusal: str = ""


_OFFER = msgspec.msgpack.Decoder(TransferOffer)
_REPLY = msgspec.msgpack.Decoder(TransferReply)


def send_message(connection: socket.socket, message: TransferOffer | TransferReply) -> None:
    """Raises OSError."""
    content = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive_offer(connection: socket.socket, token: str) -> TransferOffer:
    """Wait for a sender that knows the token, and its offer. Raises EngineError and OSError."""
    found = bytearray(TOKEN_BYTES)
    receive_into(connection, memoryview(found))
    if not hmac.compare_digest(bytes(found), token.encode("ascii")):
        raise EngineError("a sender of KV blocks has another token")
    return _decoded(connection, _OFFER)


def receive_reply(connection: socket.socket) -> TransferReply:
    """Wait for the answer to an offer. Raises EngineError and OSError."""
    return _decoded(connection, _REPLY)


def _decoded(connection: socket.socket, decoder: msgspec.msgpack.Decoder[_M]) -> _M:
    head = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_MESSAGE_BYTES:
        raise EngineError(f"a message of {length} bytes about KV blocks is too long")
    content = bytearray(length)
    receive_into(connection, memoryview(content))
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as error:
        raise EngineError(f"a message about KV blocks is none: {error}") from error


def send_blocks(connection: socket.socket, blocks: Sequence[Sequence[memoryview]]) -> None:
    """Send blocks; none means that all are sent. Raises OSError."""
    connection.sendall(_COUNT.pack(len(blocks)))
    for block in blocks:
        checksum = 0
        for part in block:
            connection.sendall(part)
            checksum = zlib.crc32(part, checksum)
        connection.sendall(_CHECKSUM.pack(checksum))


def receive_count(connection: socket.socket) -> int:
    """How many blocks follow; 0 if all are sent. Raises EngineError once the sender has closed."""
    head = bytearray(_COUNT.size)
    receive_into(connection, memoryview(head))
    return int(_COUNT.unpack(head)[0])


def receive_block(connection: socket.socket, block: Sequence[memoryview]) -> None:
    """Read a block into its place. Raises EngineError and OSError."""
    checksum = 0
    for part in block:
        receive_into(connection, part)
        checksum = zlib.crc32(part, checksum)
    tail = bytearray(_CHECKSUM.size)
    receive_into(connection, memoryview(tail))
    if _CHECKSUM.unpack(tail)[0] != checksum:
        raise EngineError("a KV block has changed on its way")


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill a view. Raises EngineError when the other end closes before."""
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EngineError("the other end of a transfer of KV blocks has closed")
        view = view[received:]
