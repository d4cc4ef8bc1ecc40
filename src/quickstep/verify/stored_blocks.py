"""A driver of `core.resources.kv_tiers` without a disk: saved blocks are kept in memory.

For `verify.run`, where a block's content is its bytes, and for tests whose executor has no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from quickstep.core.resources.kv_tiers import RestoreOrder, SaveOrder, TierBlock
from quickstep.core.scheduler import Scheduler

_Content = TypeVar("_Content")


class StoredBlocks(Generic[_Content]):
    """Carries orders out at once, when it is called.

    Attributes:
        spans: The blocks of each span, with their content.
        broken: Names of spans that cannot be read.
        restored: The restores that were carried out.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        read: Callable[[int], _Content],
        write: Callable[[int, _Content], None],
    ) -> None:
        assert scheduler.held.tiers is not None, "`SchedulerConfig.kv_tier` is set"
        self._scheduler = scheduler
        self._tiers = scheduler.held.tiers
        self._read = read
        self._write = write
        self.spans: dict[str, list[tuple[TierBlock, _Content]]] = {}
        self.broken: set[str] = set()
        self.restored: list[RestoreOrder] = []

    def save_one(self) -> SaveOrder | None:
        """Save what is ordered first."""
        order = self._tiers.take_save()
        if order is None:
            return None
        for name in order.removed:
            del self.spans[name]
        is_saved = self._tiers.confirm(order)
        if is_saved:
            contents = map(self._read, order.block_ids)
            self.spans[order.span.name] = list(zip(order.blocks, contents, strict=True))
        self._tiers.saved(order, is_saved)
        return order

    def save_all(self) -> int:
        """Save until nothing is ordered; returns how many spans."""
        num = 0
        while self.save_one() is not None:
            num += 1
        return num

    def restore_all(self, now: float) -> int:
        """Restore what is ordered; returns for how many requests."""
        orders = self._tiers.take_restores()
        for order in orders:
            self._restore(order)
            self._scheduler.arrived(self._tiers.end_restoring(order.request_id), now)
        self.restored += orders
        return len(orders)

    def _restore(self, order: RestoreOrder) -> None:
        for piece in order.pieces:
            span = self.spans.get(piece.name)
            if span is None or piece.name in self.broken:
                self._tiers.forget_span(piece.name)
                return
            found = span[piece.start : piece.start + len(piece.blocks)]
            if [block for block, _ in found] != list(piece.blocks):  # the digests collide
                self._tiers.forget_span(piece.name)
                return
            for block_id, (_, content) in zip(piece.block_ids, found, strict=True):
                self._write(block_id, content)
            self._tiers.restored(order.request_id, len(found))
