"""A driver of `core.resources.kv_tiers` without a disk: what is saved is what the blocks had.

The content of a block is what the executor's double wrote last, so a restore of wrong content is
seen by whatever checks contents.
"""

from __future__ import annotations

from collections.abc import Callable

from quickstep.core.resources.kv_tiers import RestoreOrder, SaveOrder, TierBlock
from quickstep.core.scheduler import Scheduler

ReadBlock = Callable[[int], object]
WriteBlock = Callable[[int, object], None]


class StoredBlocks:
    """Carries orders out at once, when it is called; spans in `broken` cannot be read."""

    def __init__(self, scheduler: Scheduler, read: ReadBlock, write: WriteBlock) -> None:
        assert scheduler.tiers is not None
        self._scheduler = scheduler
        self._tiers = scheduler.tiers
        self._read = read
        self._write = write
        self.spans: dict[str, list[tuple[TierBlock, object]]] = {}
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
            self._scheduler.end_restoring(order.request_id, now)
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
