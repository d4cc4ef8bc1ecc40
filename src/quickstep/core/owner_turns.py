"""Whose turn it is: items that wait, one owner after the other, the one served least first.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each owner's next item has a tag, the cost of
all that the owner was served, but at least the tag of what was served last. The least tag comes
first. So an owner that comes anew is served before those who have many items waiting, and what it
did not use before is no credit:

    a is served, a a a wait     b comes: b a a a     it comes again after its turn: a b a a

No clock, no thread: the owner of the object locks it if several threads use it.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_MAX_REMEMBERED = 1024  # tags of owners that wait for nothing


class OwnerTurns(Generic[_Item]):
    """Items that wait, by owner. An item's cost is in any unit that is the same for all."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[_Item, float]]] = {}
        self._order: list[tuple[float, int, str]] = []  # a heap: the tag of each owner that waits
        self._tags: dict[str, float] = {}  # of the owner's next item
        self._now = 0.0  # the tag of what was served last
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def next_owner(self) -> str:
        """Whose turn it is. Raises IndexError if nothing waits."""
        return self._order[0][2]

    def waiting_of(self, owner: str) -> tuple[_Item, ...]:
        """The items of an owner, in the order of their turns."""
        return tuple([item for item, _ in self._queues.get(owner, ())])

    def serve(self, owner: str, cost: float = 1.0) -> None:
        """Count an item that is served without having waited."""
        self._now = max(self._now, self._tags.get(owner, 0.0))
        self._count(owner, cost)

    def push(self, owner: str, item: _Item, cost: float = 1.0) -> None:
        """Let an item wait."""
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = deque()
            self._order_by_tag(owner)
        queue.append((item, cost))

    def pop(self) -> tuple[str, _Item]:
        """Take the item whose turn it is, with its owner. Raises IndexError if none waits."""
        tag, _, owner = heapq.heappop(self._order)
        queue = self._queues[owner]
        self._now = max(self._now, tag)
        item, cost = queue.popleft()
        self._count(owner, cost)
        if queue:
            self._order_by_tag(owner)
        else:
            del self._queues[owner]
        return owner, item

    def drop(self, owner: str, item: _Item) -> bool:
        """Drop an item. Returns whether it waited."""
        queue = self._queues.get(owner, deque())
        place = next((place for place, entry in enumerate(queue) if entry[0] is item), None)
        if place is None:
            return False
        del queue[place]
        if not queue:
            del self._queues[owner]
            self._order = [entry for entry in self._order if entry[2] != owner]
            heapq.heapify(self._order)
        return True

    def _order_by_tag(self, owner: str) -> None:
        tag = max(self._now, self._tags.get(owner, 0.0))
        heapq.heappush(self._order, (tag, next(self._numbers), owner))

    def _count(self, owner: str, cost: float) -> None:
        self._tags[owner] = max(self._now, self._tags.get(owner, 0.0)) + cost
        if len(self._tags) > _MAX_REMEMBERED:  # those that are past mean nothing
            self._tags = {name: tag for name, tag in self._tags.items() if tag > self._now}
