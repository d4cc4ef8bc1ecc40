"""Who may take how much of what all clients share: places in a queue, connections, bytes.

The rule is that of dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", 1998): an owner that holds something may hold at most 8 times what
is free, by its weight, and nothing of the last ninth, which is for owners that hold nothing. So an
owner alone can take nearly all, and however fast some take, there is room for the next one:

    of 9   a holds   b holds   free
              8         0        1     a takes no more
              8         1        0     b had nothing
              6         2        1     a gave back; b takes what a may not take again

The owner "" is everybody: it counts, and only the capacity limits it.

No clock, no thread: the owner of the object locks it if several threads use it.
"""

from __future__ import annotations

import heapq

_SHARE_OF_FREE = 8.0  # for an owner of weight 1


class NoRoom(Exception):
    """An owner may not take so much now.

    Attributes:
        owner: Who wanted it; "" if not its share is used up, but all.
        limit: Which limit that is, in half a sentence.
        num_held: What this owner holds, or all together.
        capacity: What there is.
    """

    def __init__(self, owner: str, num_held: int, capacity: int) -> None:
        whose = f"{owner} holds" if owner else "all hold"
        super().__init__(f"{whose} {num_held} of {capacity}")
        self.owner = owner
        self.limit = f"its share of {capacity}" if owner else "which is the limit"
        self.num_held = num_held
        self.capacity = capacity


def share_allows(
    capacity: int, num_held: int, num_own: int, amount: int = 1, weight: float = 1.0
) -> bool:
    """Whether the share of an owner that holds `num_own` of all `num_held` has so much more."""
    num_free = max(0, capacity - num_held)
    # half at most, so that small capacities are of use to an owner alone
    num_reserved = min(capacity // 2, max(1, round(capacity / (_SHARE_OF_FREE + 1))))
    in_share = num_own + amount <= _SHARE_OF_FREE * weight * num_free
    return in_share and num_free - amount >= num_reserved


class Shares:
    """What each owner holds of a capacity; None for one without limit."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.num_held = 0
        self._held: dict[str, int] = {}

    def held(self, owner: str) -> int:
        """What an owner holds."""
        return self._held.get(owner, 0)

    @property
    def largest(self) -> str:
        """The owner that holds most; "" if there is none."""
        return max(self._held, key=self._held.__getitem__, default="")

    def most(self, num_owners: int) -> tuple[tuple[str, int], ...]:
        """The owners that hold most, and what they hold."""
        return tuple(heapq.nlargest(num_owners, self._held.items(), key=lambda held: held[1]))

    def allows(self, owner: str, amount: int = 1, weight: float = 1.0) -> bool:
        """Whether the share of an owner has so much more. One that holds nothing has its share,
        whether or not there is room.
        """
        num_own = self._held.get(owner, 0)
        if self.capacity is None or not owner or not num_own:
            return True
        return share_allows(self.capacity, self.num_held, num_own, amount, weight)

    def check(self, owner: str, amount: int = 1, weight: float = 1.0) -> None:
        """Raise NoRoom unless an owner may take so much."""
        if self.capacity is None:
            return
        if self.num_held + amount > self.capacity:
            raise NoRoom("", self.num_held, self.capacity)
        if not self.allows(owner, amount, weight):
            raise NoRoom(owner, self._held[owner], self.capacity)

    def take(self, owner: str, amount: int = 1, weight: float = 1.0) -> None:
        """Take so much. Raises NoRoom, and then takes nothing."""
        self.check(owner, amount, weight)
        self.hold(owner, amount)

    def hold(self, owner: str, amount: int = 1) -> None:
        """Count what an owner has already, even if it is beyond the capacity."""
        if amount:
            self.num_held += amount
            self._held[owner] = self._held.get(owner, 0) + amount

    def give_back(self, owner: str, amount: int = 1) -> None:
        """An owner holds so much less."""
        num_left = self._held.get(owner, 0) - amount
        assert num_left >= 0, f"{owner!r} gives back {-num_left} more than it holds"
        self.num_held -= amount
        if num_left:
            self._held[owner] = num_left
        else:
            self._held.pop(owner, None)
