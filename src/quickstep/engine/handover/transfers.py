"""`EngineTransfers`: the transfers of KV blocks of one engine, between its event loop and the
threads that send and receive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from quickstep.core.resources.block_pool import ChainRoot
from quickstep.core.resources.kv_transfers import KVTransfers, ReceiveOrder, SendOrder
from quickstep.core.scheduler import Scheduler
from quickstep.engine.handover.frames import TransferOffer
from quickstep.engine.handover.receiver import KVReceiver
from quickstep.engine.handover.sender import KVSender
from quickstep.runtime.cache.block_bytes import BlockBytes
from quickstep.types import KVTarget

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")


class EngineTransfers:
    """Owns the threads of one engine. `changed` is called in the event loop when a transfer has
    ended, so that requests may continue.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockBytes,
        fingerprint: str,
        clock: Callable[[], float],
    ) -> None:
        assert scheduler.held.transfers is not None, "`SchedulerConfig.transfers_kv` is set"
        self._scheduler = scheduler
        self._transfers: KVTransfers = scheduler.held.transfers
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: Callable[[], None] = _nothing
        self._is_closed = threading.Event()
        self._unbegun: list[tuple[ReceiveOrder | None, Future[ReceiveOrder | None]]] = []
        self.block_bytes = blocks.num_bytes
        form = blocks.fingerprint(fingerprint)
        self._sender = KVSender(blocks, form, self._sent)
        self._receiver = KVReceiver(blocks, form, self)

    @property
    def address(self) -> KVTarget:
        """Where other engines send blocks."""
        return self._receiver.address

    def start(self, changed: Callable[[], None]) -> None:
        """Serve in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._changed = changed

    def close(self) -> None:
        """End all transfers."""
        self._is_closed.set()
        self._receiver.close()
        self._sender.close()

    def follow_orders(self) -> None:
        """Carry out what the last commit ordered."""
        for order in self._transfers.take_orders():
            self._sender.put(order)
        if self._unbegun:
            self._begin()

    def _begin(self) -> None:
        """Let transfers begin to whose blocks no step in flight writes any more."""
        waiting = self._unbegun
        self._unbegun = []
        for order, answer in waiting:
            if order is None or self._transfers.are_over(order.step_id):
                answer.set_result(order)
            else:
                self._unbegun.append((order, answer))

    # -- in the threads of the sender and of the receiver ------------------------------------------

    def _sent(self, order: SendOrder) -> None:
        self._soon(lambda: self._transfers.sent(order))

    def begin(self, offer: TransferOffer) -> ReceiveOrder | None:
        """`ReceivingEngine.begin`."""
        root = ChainRoot(offer.adapter, offer.cache_salt)
        name, token_ids = offer.request_id, offer.token_ids
        answer: Future[ReceiveOrder | None] = Future()

        def begin() -> None:
            order = self._transfers.begin_receiving(name, root, token_ids)
            self._unbegun.append((order, answer))
            self._begin()

        return self._answer(answer, begin)

    def received(self, request_id: str, num_blocks: int) -> None:
        """`ReceivingEngine.received`."""
        self._soon(lambda: self._transfers.received(request_id, num_blocks))

    def end(self, request_id: str) -> None:
        """`ReceivingEngine.end`."""
        self._soon(lambda: self._end(request_id))

    def _end(self, request_id: str) -> None:
        self._scheduler.arrived(self._transfers.end_receiving(request_id), self._clock())
        self._changed()

    def _soon(self, call: Callable[[], object]) -> None:
        """Let the event loop make a call, after those before it."""
        loop = self._loop
        if loop is None or self._is_closed.is_set():
            return
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: the engine has ended
            self._is_closed.set()

    def _answer(self, answer: Future[_T], call: Callable[[], object]) -> _T | None:
        """What `answer` becomes after a call in the event loop; None if the engine ends."""

        def run() -> None:
            try:
                call()
            except BaseException as error:  # a thread waits for it
                answer.set_exception(error)

        self._soon(run)
        while not self._is_closed.is_set():
            try:
                return answer.result(timeout=0.2)
            except TimeoutError:
                continue
        return None


def _nothing() -> None:
    return
