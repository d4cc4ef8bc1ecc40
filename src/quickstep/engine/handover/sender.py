"""Sends the prompt blocks of requests to the engines that continue them.

A thread of its own per engine that computes prompts, so that steps continue meanwhile. The blocks
are held by the scheduler (`core.resources.kv_transfers`) until they are sent.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable

from quickstep.core.resources.kv_transfers import SendOrder
from quickstep.engine.handover.frames import (
    TransferOffer,
    receive_reply,
    send_blocks,
    send_message,
)
from quickstep.errors import EngineError
from quickstep.runtime.cache.block_bytes import BlockBytes, in_groups
from quickstep.types import Request

_LOGGER = logging.getLogger(__name__)
_CONNECT_S = 5.0


class _Transfer:
    """An open connection, and which block is wanted first; `connection` is None once it failed."""

    def __init__(self, connection: socket.socket | None, first: int) -> None:
        self.connection = connection
        self.first = first

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class KVSender:
    """The sending side of an engine. `sent` is called in its thread with each order that is done.

    `fingerprint` is that of the weights and of the KV cache's form.
    """

    def __init__(
        self, blocks: BlockBytes, fingerprint: str, sent: Callable[[SendOrder], None]
    ) -> None:
        self._blocks = blocks
        self._fingerprint = fingerprint
        self._sent = sent
        self._orders: queue.SimpleQueue[SendOrder | None] = queue.SimpleQueue()
        self._transfers: dict[str, _Transfer] = {}  # by request
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    def put(self, order: SendOrder) -> None:
        """Carry an order out, after those before it."""
        self._orders.put(order)

    def close(self) -> None:
        """End the thread; open transfers end early."""
        self._orders.put(None)
        self._thread.join(_CONNECT_S)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._carry_out(order)
            except (OSError, EngineError) as error:
                _LOGGER.warning("KV blocks of %s are not sent: %s", order.request_id, error)
                if (transfer := self._transfers.get(order.request_id)) is not None:
                    transfer.close()
            if order.ends and (transfer := self._transfers.pop(order.request_id, None)) is not None:
                transfer.close()
            self._sent(order)
        for transfer in self._transfers.values():
            transfer.close()

    def _carry_out(self, order: SendOrder) -> None:
        if order.request is not None:
            # without a connection, later orders of the request have nothing to do
            transfer = self._transfers[order.request_id] = _Transfer(None, 0)
            self._open(order, order.request, transfer)
        else:
            found = self._transfers.get(order.request_id)
            if found is None:
                return
            transfer = found
        connection = transfer.connection
        if connection is None:
            return
        skipped = max(0, transfer.first - order.first)
        wanted = order.block_ids[skipped:]
        for group in in_groups(self._blocks, wanted):
            with self._blocks.reading(group) as blocks:
                send_blocks(connection, blocks)
        if order.is_last:
            send_blocks(connection, ())

    def _open(self, order: SendOrder, request: Request, transfer: _Transfer) -> None:
        """Offer the blocks of a request. Raises EngineError and OSError."""
        handover = order.handover
        address = handover.host, handover.port
        connection = socket.create_connection(address, timeout=_CONNECT_S)
        transfer.connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(handover.token.encode("ascii"))
        send_message(
            connection,
            TransferOffer(
                order.request_id,
                self._fingerprint,
                self._blocks.num_bytes,
                request.adapter_id,
                request.cache_salt,
                request.prompt_token_ids,
            ),
        )
        reply = receive_reply(connection)
        connection.settimeout(None)
        if reply.refusal:
            _LOGGER.debug("KV blocks of %s are not wanted: %s", order.request_id, reply.refusal)
            transfer.close()
        transfer.first = reply.first
