"""`KVRetention`: prefixes that clients said they would continue soon (`Request.retain_s`).

Their blocks are evicted after all others for so long, but before a sequence has to wait: nothing is
pinned. At most half of the pool is retained, of which each account has its share (`core.shares`);
what is retained for an account whose share is used up is evicted as any other block. A block whose
time is over is evicted first: its client has not come back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.resources.block_pool import BlockKey, KVBlockPool
from quickstep.core.resources.resource import Preempt, Resource
from quickstep.core.sequence import Residency, Sequence
from quickstep.core.service_order import account_of
from quickstep.core.shares import NoRoom, Shares

_MAX_RETAINED = 0.5  # of the pool


class _Retained(msgspec.Struct, frozen=True, eq=False):
    """A block that is retained for an account until a time."""

    key: BlockKey
    account: str
    until_s: float


class KVRetention(Resource):
    """What is retained of one scheduler's pool."""

    def __init__(self, pool: KVBlockPool) -> None:
        self._pool = pool
        self._shares = Shares(int(_MAX_RETAINED * pool.num_blocks))
        self._by_block: dict[int, _Retained] = {}
        # heap of times, places in their chains, and block ids; some are outdated
        self._due: list[tuple[float, int, int]] = []

    def prepare(
        self, waiting: WaitingQueue, batch: RunningBatch, now: float, preempt: Preempt
    ) -> None:
        """End what is due before blocks are evicted for a sequence."""
        self._expire(now)

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        """End what is due before blocks are evicted for it."""
        self._expire(now)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Retain its full blocks, as many from the beginning as its account may."""
        self._expire(now)
        request = sequence.request
        if not request.retain_s:
            return
        account, until_s = account_of(request), now + request.retain_s
        block_ids: list[int] = []
        for index, key in enumerate(sequence.residency.keys):
            block_id = self._pool.block_of(key)
            if block_id is None:
                continue
            self._end(block_id)
            if not self._take(account, request.tenant_weight):
                break
            self._by_block[block_id] = _Retained(key, account, until_s)
            heapq.heappush(self._due, (until_s, index, block_id))
            block_ids.append(block_id)
        for block_id in reversed(block_ids):  # the end of a chain is evicted first
            self._pool.retain(block_id)

    def _take(self, account: str, weight: float) -> bool:
        """Count a block for an account; False if it may have no more."""
        try:
            self._shares.check(account, 1, weight)
        except NoRoom:
            self._forget_evicted()
        try:
            self._shares.take(account, 1, weight)
        except NoRoom:
            return False
        return True

    def _expire(self, now: float) -> None:
        """End what is due; the end of a chain is evicted before its beginning."""
        while self._due and self._due[0][0] <= now:
            until_s, _, block_id = heapq.heappop(self._due)
            retained = self._by_block.get(block_id)
            if retained is not None and retained.until_s == until_s:
                self._end(block_id)

    def _end(self, block_id: int) -> None:
        retained = self._by_block.pop(block_id, None)
        if retained is not None:
            self._shares.give_back(retained.account)
            if self._pool.has_content(block_id, retained.key):
                self._pool.end_retention(block_id)

    def _forget_evicted(self) -> None:
        """Blocks that have lost their content count for no account."""
        for block_id, retained in list(self._by_block.items()):
            if not self._pool.has_content(block_id, retained.key):
                self._end(block_id)

    def check(self, running: Iterable[Sequence]) -> None:
        """The pool retains what has its content still, within the limit."""
        retained = {
            block_id
            for block_id, one in self._by_block.items()
            if self._pool.has_content(block_id, one.key)
        }
        assert retained == self._pool.retained, "the pool retains other blocks"
        assert self._shares.num_held == len(self._by_block), "the shares differ"
        assert len(self._by_block) <= (self._shares.capacity or 0), "too much is retained"
