"""`KVTransfers`: blocks on their way from one engine's pool to another's.

    one engine: a step has computed prompt blocks ──> held, sent, released
    another:    blocks are allocated ──> filled, registered ──> released: cached, as any prefix

A request with a `KVTarget` is computed up to its first token by one engine, which sends its prompt
blocks to the engine that continues it. There, the request waits while its blocks arrive, and is
then admitted as any other, with a prefix hit. What arrives is only ever a cached prefix: if a
transfer is refused, or ends early, the rest is computed, with the same bits.

A transfer belongs to its connection: it begins and ends with it, and no time-out frees blocks that
are still read or written. A driver carries out what is ordered here.

A prefix may come from a file too, and go to one (`engine.kv_files.slot_files`): it arrives as one
of another engine does, and is copied while it is cached, which `has_content` confirms.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import msgspec

from quickstep.core.resources.arriving_blocks import ArrivingBlocks
from quickstep.core.resources.block_pool import BlockKey, ChainRoot, KVBlockPool
from quickstep.core.resources.resource import Resource
from quickstep.core.sequence import Residency, Sequence, SequenceState
from quickstep.core.step import FlightRow, StepsInFlight
from quickstep.types import KVTarget, Request

# Of the pool: what engines that receive too slowly keep of it.
_MAX_SENDING = 0.5
_KEY_PREFIX = "kv of "


class SendOrder(msgspec.Struct, frozen=True):
    """What to do for a transfer; then call `sent`. With a `request`, offer its prompt: it is about
    to be computed. With blocks, send them, from the prompt's block `first` on; with `is_last` they
    are the last ones, and the transfer ends. With neither, it ends early.
    """

    request_id: str
    handover: KVTarget
    first: int = 0
    block_ids: tuple[int, ...] = ()
    is_last: bool = False
    request: Request | None = None

    @property
    def ends(self) -> bool:
        """Whether nothing follows."""
        return self.is_last or (self.request is None and not self.block_ids)


class ReceiveOrder(msgspec.Struct, frozen=True):
    """Where the prompt blocks of a request go, from block `first` on; the ones before are here.
    Steps before `step_id` may still write to them (`KVTransfers.are_over`): those of a sequence
    that was aborted meanwhile.
    """

    first: int
    block_ids: tuple[int, ...]
    step_id: int = 0


class CachedPrefix(msgspec.Struct, frozen=True):
    """The blocks with the longest cached prefix of some tokens, and their content, which steps
    before `step_id` may still write (`KVTransfers.are_over`).
    """

    block_ids: tuple[int, ...]
    content: tuple[BlockKey, ...]
    step_id: int


class _Sending(msgspec.Struct):
    """How far the blocks of a request are ordered; `is_over` if no more will be."""

    num_ordered: int
    is_over: bool = False


class KVTransfers(Resource):
    """The transfers of one scheduler's pool. `num_kept` is how many blocks must be left to
    sequences: enough for the longest. `steps` are the scheduler's.
    """

    def __init__(self, pool: KVBlockPool, num_kept: int, steps: StepsInFlight) -> None:
        self._pool = pool
        self._num_kept = num_kept
        self._steps = steps
        self._receiving: dict[str, ArrivingBlocks] = {}  # by request
        self._sending: dict[str, _Sending] = {}  # by request
        self._num_sending = 0  # blocks that are held
        self._orders: list[SendOrder] = []

    @property
    def are_open(self) -> bool:
        """Whether blocks are held that no sequence may have."""
        return bool(self._receiving or self._num_sending)

    # -- copying ----------------------------------------------------------------------------------

    def cached_prefix(self, root: ChainRoot, token_ids: SequenceOf[int]) -> CachedPrefix:
        """The full blocks of `token_ids` that are cached, from the first one on. Nothing is held:
        `has_content` tells whether a copy is one of them.
        """
        pool = self._pool
        digests: list[bytes] = []
        pool.extend_digests(digests, root, token_ids, len(token_ids) // pool.block_size)
        hits = pool.lookup(root, token_ids, digests).block_ids
        return CachedPrefix(hits, tuple(map(pool.key_of, hits)), self._steps.next_id)

    def has_content(self, prefix: CachedPrefix) -> bool:
        """Whether the blocks have kept their content until now."""
        return all(map(self._pool.has_content, prefix.block_ids, prefix.content))

    # -- receiving --------------------------------------------------------------------------------

    def begin_receiving(
        self,
        request_id: str,
        root: ChainRoot,
        token_ids: tuple[int, ...],
        leaves_longest: bool = True,
    ) -> ReceiveOrder | None:
        """Allocate what is not cached of a prompt's blocks; None if there is no room, or a transfer
        for the request already. `end_receiving` has to follow an order. `leaves_longest`: the
        longest sequence has to find room meanwhile, since the end depends on another engine.
        """
        pool = self._pool
        if request_id in self._receiving or not pool.prefix_caching:
            return None
        num_blocks = len(token_ids) // pool.block_size
        digests: list[bytes] = []
        pool.extend_digests(digests, root, token_ids, num_blocks)
        hits = pool.lookup(root, token_ids, digests).block_ids
        num_missing = num_blocks - len(hits)
        num_receiving = sum(arriving.num_held for arriving in self._receiving.values())
        num_held = num_receiving + self._num_sending
        if num_missing > pool.num_free_besides(hits):
            return None
        if leaves_longest and num_held + num_blocks > pool.num_blocks - self._num_kept:
            return None
        prompt_blocks = token_ids[: num_blocks * pool.block_size]
        arriving = ArrivingBlocks(pool, root, prompt_blocks, digests, hits)
        self._receiving[request_id] = arriving
        return ReceiveOrder(len(hits), arriving.fresh, self._steps.next_id)

    def are_over(self, step_id: int) -> bool:
        """Whether no step before this one is in flight, which might write to blocks."""
        return self._steps.are_over_before(step_id)

    def received(self, request_id: str, num_blocks: int) -> None:
        """The next so many blocks have their content: sequences may use them."""
        self._receiving[request_id].filled(num_blocks)

    def end_receiving(self, request_id: str) -> str:
        """Nothing writes to the blocks of a request any more: those with content are cached.
        Returns the key of the sequences that wait for it, which `Scheduler.arrived` takes.
        """
        self._receiving.pop(request_id).release()
        return _KEY_PREFIX + request_id

    def key(self, request: Request) -> str:
        """The transfer of its blocks, if there is one."""
        request_id = request.request_id
        return _KEY_PREFIX + request_id if request_id in self._receiving else ""

    def is_ready(self, key: str) -> bool:
        """Whether it is over."""
        return key.removeprefix(_KEY_PREFIX) not in self._receiving

    # -- sending ----------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        """Offer its prompt to the engine that continues it, which then knows of the transfer before
        the request comes.
        """
        request, name = sequence.request, sequence.request.request_id
        if request.handover is None or sequence.index != request.indices[0]:
            return
        if name not in self._sending:
            self._sending[name] = _Sending(0)
            self._orders.append(SendOrder(name, request.handover, request=request))

    def computed(self, entry: FlightRow) -> None:
        """A row of a sequence is computed: order the prompt blocks that are complete with it."""
        sequence, end = entry.sequence, entry.row.end
        request, handover = sequence.request, sequence.request.handover
        if handover is None or sequence.index != request.indices[0]:
            return
        if sequence.residency is not entry.residency:
            return  # it was preempted meanwhile
        if sequence.state is not SequenceState.RUNNING:
            return
        name, size = request.request_id, self._pool.block_size
        num_all = sequence.prompt_len // size
        sending = self._sending[name]
        if sending.is_over:
            return
        num_full, first = min(end // size, num_all), sending.num_ordered
        is_last = num_full == num_all
        if num_full == first and not is_last:
            return
        block_ids = tuple(sequence.residency.blocks[first:num_full])
        if self._num_sending + len(block_ids) > _MAX_SENDING * self._pool.num_blocks:
            self._stop_sending(name, handover, sending)
            return
        self._pool.hold(block_ids)
        self._num_sending += len(block_ids)
        sending.num_ordered, sending.is_over = num_full, is_last
        self._orders.append(SendOrder(name, handover, first, block_ids, is_last))

    def _stop_sending(self, name: str, handover: KVTarget, sending: _Sending) -> None:
        if not sending.is_over:
            self._orders.append(SendOrder(name, handover))
        sending.is_over = True

    def sent(self, order: SendOrder) -> None:
        """The blocks of an order are sent, or never will be."""
        self._num_sending -= len(order.block_ids)
        self._pool.release_held(order.block_ids)

    def take_orders(self) -> SequenceOf[SendOrder]:
        """What was ordered since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def ended(self, sequence: Sequence, now: float) -> None:
        """Its request may have been aborted while its blocks were sent."""
        request = sequence.request
        if request.handover is None or sequence.index != request.indices[0]:
            return
        sending = self._sending.pop(request.request_id, None)
        if sending is not None:
            self._stop_sending(request.request_id, request.handover, sending)
