"""Which LoRA adapters are in compute memory, and which are loaded and evicted next.

    absent ──> loading ──> resident ──> absent
                              └──> draining ──┘   sequences that run finish, others wait

Plain data, like the block pool: the scheduler asks whether a sequence's adapter is resident before
it admits the sequence, and a driver carries out the orders (`take_orders`) and reports the result.
The engine loads in threads; tests and `quickstep verify` use a virtual clock.

The adapter that requests have named least often lately is evicted first. Its size does not matter:
a load takes time in proportion to the bytes that the eviction frees. An adapter of a running
sequence is never evicted, one of waiting sequences only if another adapter has waited for too long.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable, Collection

import msgspec

__all__ = ["AdapterOrders", "AdapterResidency", "AdapterState"]

# A use counts half after so many seconds.
_HALF_LIFE_S = 60.0


class AdapterState(enum.Enum):
    """Where an adapter is."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


class AdapterOrders(msgspec.Struct, frozen=True):
    """What the driver has to do: free the evicted ones, then load the others."""

    loads: tuple[str, ...] = ()
    evictions: tuple[str, ...] = ()


class _Adapter(msgspec.Struct, eq=False):
    """An adapter; `num_uses` is the decayed number of requests at `used_at_s`."""

    adapter_id: str
    num_bytes: int
    is_pinned: bool
    is_kept: bool = False
    state: AdapterState = AdapterState.ABSENT
    num_running: int = 0
    num_uses: float = 0.0
    used_at_s: float = 0.0


class AdapterResidency:
    """The adapters of an engine, by content id.

    Attributes:
        max_overtaken_s: How long sequences may wait for an adapter for which there is no place,
            while others with resident adapters are admitted before them. Then an adapter is
            drained: nothing with it is admitted until it is evicted.
        max_loading: Loads at the same time.
    """

    def __init__(
        self,
        max_loras: int,
        max_bytes: int | None = None,
        max_overtaken_s: float = 1.0,
        max_loading: int = 2,
    ) -> None:
        self.max_loras = max_loras
        self.max_bytes = max_bytes
        self.max_overtaken_s = max_overtaken_s
        self.max_loading = max_loading
        self.num_loads = 0
        self.num_evictions = 0
        self._adapters: dict[str, _Adapter] = {}
        self._held: dict[str, _Adapter] = {}  # those in memory, loading ones included
        self._num_bytes = 0  # of those
        self._num_loading = 0
        self._loads: list[str] = []
        self._evictions: list[str] = []
        self._changed: list[str] = []  # adapters that became ready, or ceased to be, by an order

    def register(
        self,
        adapter_id: str,
        num_bytes: int,
        *,
        is_pinned: bool = False,
        is_resident: bool = False,
    ) -> None:
        """Let sequences use an adapter of this size, which is in memory already if `is_resident`;
        known ones keep their state.
        """
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            adapter = self._adapters[adapter_id] = _Adapter(adapter_id, num_bytes, is_pinned)
        adapter.is_pinned = adapter.is_pinned or is_pinned
        adapter.is_kept = False
        if is_resident and adapter.state is AdapterState.ABSENT:
            self._set_state(adapter, AdapterState.RESIDENT)

    def keep(self, adapter_id: str) -> None:
        """Do not evict it any more: it may not be there to load again."""
        self._adapters[adapter_id].is_kept = True

    def forget(self, adapter_id: str) -> None:
        """No sequence will use it again and none does: free it, if it is in memory."""
        adapter = self._adapters.pop(adapter_id, None)
        if adapter is None:
            return
        assert not adapter.num_running, f"{adapter_id} is in use"
        if adapter.state is AdapterState.LOADING:
            self._num_loading -= 1
        if adapter.state is not AdapterState.ABSENT:
            self._set_state(adapter, AdapterState.ABSENT)
            self._evictions.append(adapter_id)

    def __contains__(self, adapter_id: object) -> bool:
        return adapter_id in self._adapters

    def state(self, adapter_id: str) -> AdapterState:
        """Where an adapter is."""
        adapter = self._adapters.get(adapter_id)
        return AdapterState.ABSENT if adapter is None else adapter.state

    def is_ready(self, adapter_id: str) -> bool:
        """Whether sequences with this adapter ("" for none) may be admitted."""
        return not adapter_id or self.state(adapter_id) is AdapterState.RESIDENT

    def has_place(self, num_bytes: int) -> bool:
        """Whether another adapter fits, without an eviction."""
        fits = self.max_bytes is None or self._num_bytes + num_bytes <= self.max_bytes
        return fits and len(self._held) < self.max_loras

    @property
    def num_resident(self) -> int:
        """Adapters in compute memory, those that are being loaded included."""
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return self._num_bytes

    def count_use(self, adapter_id: str, now: float) -> None:
        """A request with the adapter has arrived."""
        adapter = self._adapters[adapter_id]
        adapter.num_uses = self._uses(adapter, now) + 1.0
        adapter.used_at_s = now

    def acquire(self, adapter_id: str) -> None:
        """A sequence with the adapter enters the batch."""
        if adapter_id:
            self._adapters[adapter_id].num_running += 1

    def release(self, adapter_id: str) -> None:
        """It leaves the batch."""
        if adapter_id:
            self._adapters[adapter_id].num_running -= 1

    def finish_load(self, adapter_id: str) -> bool:
        """A load has ended well; False if nothing wants it any more (then the driver frees it)."""
        adapter = self._adapters.get(adapter_id)
        if adapter is None or adapter.state is not AdapterState.LOADING:
            return False
        self._num_loading -= 1
        self.num_loads += 1
        self._set_state(adapter, AdapterState.RESIDENT)
        return True

    def fail_load(self, adapter_id: str) -> None:
        """A load has failed."""
        adapter = self._adapters.get(adapter_id)
        if adapter is not None and adapter.state is AdapterState.LOADING:
            self._num_loading -= 1
            self._set_state(adapter, AdapterState.ABSENT)

    @property
    def may_begin_load(self) -> bool:
        """Whether one more load may begin, if there is a place."""
        return self._num_loading < self.max_loading

    def order_load(
        self,
        adapter_id: str,
        waited_s: float,
        now: float,
        is_wanted: Callable[[str], bool],
        in_flight: Collection[str],
    ) -> bool:
        """Order a load of an absent adapter, and the evictions that make a place for it.

        Returns False if there is no place yet. `is_wanted`: sequences wait that could use an
        adapter at once. `in_flight`: adapters of steps that still run.
        """
        adapter = self._adapters[adapter_id]
        assert adapter.state is AdapterState.ABSENT, f"{adapter_id} is {adapter.state.value}"
        is_overdue = waited_s > self.max_overtaken_s
        leaving: list[_Adapter] = []
        for one in sorted(self._evictable(in_flight), key=lambda one: self._value(one, now)):
            if self._fits(adapter, leaving):
                break
            if one.state is AdapterState.DRAINING or is_overdue or not is_wanted(one.adapter_id):
                leaving.append(one)
        if not self._fits(adapter, leaving):
            if is_overdue:
                self._drain(adapter, leaving, now)
            return False
        for one in leaving:
            if one.state is AdapterState.RESIDENT:
                self._changed.append(one.adapter_id)
            self._set_state(one, AdapterState.ABSENT)
            self._evictions.append(one.adapter_id)
        self.num_evictions += len(leaving)
        self.stop_draining()
        self._set_state(adapter, AdapterState.LOADING)
        self._num_loading += 1
        self._loads.append(adapter_id)
        return True

    def stop_draining(self) -> None:
        """Nothing waits for a place any more: what is still resident may be used."""
        for one in self._held.values():
            if one.state is AdapterState.DRAINING:
                one.state = AdapterState.RESIDENT
                self._changed.append(one.adapter_id)

    def take_changed(self) -> list[str]:
        """The adapters for which orders changed `is_ready` since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def take_orders(self) -> AdapterOrders | None:
        """What was ordered since the last call; None for nothing, the usual case."""
        if not self._loads and not self._evictions:
            return None
        orders = AdapterOrders(tuple(self._loads), tuple(self._evictions))
        self._loads.clear()
        self._evictions.clear()
        return orders

    def check(self) -> None:
        """Raise AssertionError unless the limits are kept."""
        adapters = self._adapters.values()
        held = [one for one in adapters if one.state is not AdapterState.ABSENT]
        assert sorted(self._held) == sorted(one.adapter_id for one in held), "the held ones differ"
        assert self._num_bytes == sum(one.num_bytes for one in held), "their bytes differ"
        assert self.num_resident <= self.max_loras, "too many adapters are in memory"
        assert self.max_bytes is None or self.num_bytes <= self.max_bytes, "they take too much"
        assert self._num_loading == sum(one.state is AdapterState.LOADING for one in adapters)
        for one in adapters:
            runs = one.state in (AdapterState.RESIDENT, AdapterState.DRAINING)
            assert runs or not one.num_running, f"{one.adapter_id} is {one.state.value} and in use"

    def _uses(self, adapter: _Adapter, now: float) -> float:
        age_s = max(0.0, now - adapter.used_at_s)
        return float(adapter.num_uses * 0.5 ** (age_s / _HALF_LIFE_S))

    def _value(self, adapter: _Adapter, now: float) -> tuple[int, float]:
        """Its recent uses as a power of two, the lowest evicted first. Among equals the most
        recently used is evicted: adapters that are used in turn are then not all evicted just
        before their next use, as with eviction of the least recently used.
        """
        num_uses = max(self._uses(adapter, now), sys.float_info.min)
        return math.floor(math.log2(num_uses)), -adapter.used_at_s

    def _set_state(self, adapter: _Adapter, state: AdapterState) -> None:
        if state is AdapterState.ABSENT:
            del self._held[adapter.adapter_id]
            self._num_bytes -= adapter.num_bytes
        elif adapter.state is AdapterState.ABSENT:
            self._held[adapter.adapter_id] = adapter
            self._num_bytes += adapter.num_bytes
        adapter.state = state

    def _may_leave(self, adapter: _Adapter) -> bool:
        in_memory = adapter.state in (AdapterState.RESIDENT, AdapterState.DRAINING)
        return in_memory and not adapter.is_pinned and not adapter.is_kept

    def _evictable(self, in_flight: Collection[str]) -> list[_Adapter]:
        return [
            one
            for one in self._held.values()
            if self._may_leave(one) and not one.num_running and one.adapter_id not in in_flight
        ]

    def _fits(self, adapter: _Adapter, leaving: list[_Adapter]) -> bool:
        if self.num_resident - len(leaving) + 1 > self.max_loras:
            return False
        num_bytes = self.num_bytes - sum(one.num_bytes for one in leaving) + adapter.num_bytes
        return self.max_bytes is None or num_bytes <= self.max_bytes

    def _drain(self, adapter: _Adapter, leaving: list[_Adapter], now: float) -> None:
        """Drain as many adapters as the load needs: those with the fewest running sequences."""
        going = leaving + [one for one in self._held.values() if one.state is AdapterState.DRAINING]
        others = [one for one in self._held.values() if self._may_leave(one)]
        for one in sorted(others, key=lambda one: (one.num_running, self._value(one, now))):
            if self._fits(adapter, going):
                return
            if one not in going:
                one.state = AdapterState.DRAINING
                self._changed.append(one.adapter_id)
                going.append(one)
