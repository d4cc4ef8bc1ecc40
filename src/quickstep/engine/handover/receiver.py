"""Receives the prompt blocks of requests from the engines that compute prompts.

A thread accepts connections, each of which is a transfer with a thread of its own: it gets from
the engine where the blocks go, and writes them there. The engine frees no block of a transfer
before its thread has reported the end, so that nothing is written to a block of another owner.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from typing import Protocol

from quickstep.core.resources.kv_transfers import ReceiveOrder
from quickstep.engine.handover.frames import (
    TOKEN_BYTES,
    TransferOffer,
    TransferReply,
    receive_block,
    receive_count,
    receive_offer,
    send_message,
)
from quickstep.errors import EngineError
from quickstep.runtime.cache.block_bytes import BlockBytes, in_groups
from quickstep.types import KVTarget

_LOGGER = logging.getLogger(__name__)
_OFFER_S = 5.0  # how long a sender may take for its offer


class ReceivingEngine(Protocol):
    """What a receiver needs of its engine, in its threads: `engine.handover.transfers`."""

    def begin(self, offer: TransferOffer) -> ReceiveOrder | None:
        """Where the blocks go; None if there is no room. `end` has to follow an order."""

    def received(self, request_id: str, num_blocks: int) -> None:
        """The next so many blocks are there."""

    def end(self, request_id: str) -> None:
        """Nothing writes to the blocks any more."""


class KVReceiver:
    """The receiving side of an engine: listens on a port of the loopback interface."""

    def __init__(
        self, blocks: BlockBytes, fingerprint: str, engine: ReceivingEngine, host: str = "127.0.0.1"
    ) -> None:
        self._blocks = blocks
        self._fingerprint = fingerprint
        self._engine = engine
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        self._listener = socket.create_server((host, 0))
        self._host = host
        self._port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._changed = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="kv-receiver", daemon=True).start()

    @property
    def address(self) -> KVTarget:
        """Where senders connect."""
        return KVTarget(self._host, self._port, self._token)

    def close(self) -> None:
        """Accept no more, and end what is open."""
        with self._changed:
            self._is_closed = True
            connections = tuple(self._open)
        self._listener.close()
        for connection in connections:
            _shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._serve, args=(connection,), name="kv-transfer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._changed:
            if self._is_closed:
                connection.close()
                return
            self._open.add(connection)
        try:
            with connection:
                connection.settimeout(_OFFER_S)
                offer = receive_offer(connection, self._token)
                connection.settimeout(None)
                self._transfer(connection, offer)
        except (OSError, EngineError) as error:
            _LOGGER.debug("a transfer of KV blocks has ended early: %s", error)
        finally:
            with self._changed:
                self._open.discard(connection)

    def _transfer(self, connection: socket.socket, offer: TransferOffer) -> None:
        refusal = self._refusal(offer)
        order = None if refusal else self._engine.begin(offer)
        if order is None:
            send_message(connection, TransferReply(refusal=refusal or "there is no room for them"))
            return
        try:
            send_message(connection, TransferReply(order.first))
            left = list(order.block_ids)
            while left and (count := receive_count(connection)):
                for group in in_groups(self._blocks, left[:count]):
                    with self._blocks.writing(group) as blocks:
                        for block in blocks:
                            receive_block(connection, block)
                self._engine.received(offer.request_id, min(count, len(left)))
                del left[:count]
        finally:
            self._engine.end(offer.request_id)

    def _refusal(self, offer: TransferOffer) -> str:
        if offer.fingerprint != self._fingerprint:
            return f"they are of {offer.fingerprint}, this engine has {self._fingerprint}"
        if offer.block_bytes != self._blocks.num_bytes:
            return f"they have {offer.block_bytes} bytes, here they have {self._blocks.num_bytes}"
        return ""


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended
