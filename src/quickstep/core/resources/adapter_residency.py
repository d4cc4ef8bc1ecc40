"""Which LoRA adapters are in compute memory, and which are loaded and evicted next.

    absent ──> loading ──> resident ──> absent
                              └──> draining ──┘   sequences that run finish, others wait

Plain data, like the block pool: the scheduler asks whether a sequence's adapter is resident before
it admits the sequence, and a driver carries out the orders (`take_orders`) and reports the result.
The engine loads in threads; tests and `quickstep verify` use a virtual clock.

The adapter that requests have named least often lately is evicted first. Its size does not matter:
a load takes time in proportion to the bytes that the eviction frees. For a place, the sequences
that hold an adapter (`AdapterUse`) are preempted as for a slot; others end before it leaves.

The draining adapters are those that the first waiting load needs, and are chosen anew each time: so
none is drained for a load that has no use for it.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Collection, Mapping

import msgspec

# A use counts half after so many seconds.
_HALF_LIFE_S = 60.0


class AdapterState(enum.Enum):
    """Where an adapter is."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


class AdapterUse(enum.IntEnum):
    """What sequences do with an adapter while another sequence waits for its place: the least used
    leaves first.
    """

    UNUSED = 0
    PREEMPTIBLE = 1  # its sequences run, and may all be preempted for the one that waits
    WANTED = 2  # sequences could be admitted with it at once
    RUNNING = 3  # sequences run that may not be preempted
    AHEAD = 4  # sequences wait with it that are served before the one that waits: it stays


class AdapterOrders(msgspec.Struct, frozen=True):
    """What the driver has to do: free the evicted ones, then load the others."""

    loads: tuple[str, ...] = ()
    evictions: tuple[str, ...] = ()


class _Adapter(msgspec.Struct, eq=False):
    """An adapter; `num_uses` is the decayed number of requests at `used_at_s`."""

    adapter_id: str
    num_bytes: int
    is_pinned: bool = False
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
        self._num_pinned = 0
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
        known ones keep their state, and are pinned or not from now on.
        """
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            adapter = self._adapters[adapter_id] = _Adapter(adapter_id, num_bytes)
        self._num_pinned += is_pinned - adapter.is_pinned
        adapter.is_pinned = is_pinned
        if is_resident and adapter.state is AdapterState.ABSENT:
            self._set_state(adapter, AdapterState.RESIDENT)

    @property
    def has_pinned(self) -> bool:
        """Whether an adapter is pinned."""
        return self._num_pinned > 0

    def misfit(self, adapter_id: str) -> str:
        """Why an adapter cannot be loaded even once everything that may leave has left: how little
        the pinned adapters leave; "" if it can.
        """
        adapter = self._adapters[adapter_id]
        pinned = [
            other for other in self._adapters.values() if other.is_pinned and other is not adapter
        ]
        if len(pinned) >= self.max_loras:
            return f"{len(pinned)} adapters are pinned, which leaves no place; raise --max-loras"
        num_pinned_bytes = sum(adapter.num_bytes for adapter in pinned)
        if self._fit(1, num_pinned_bytes + adapter.num_bytes):
            return ""
        room = (self.max_bytes or 0) - num_pinned_bytes
        return (
            f"it takes {adapter.num_bytes:,} bytes, the pinned ones leave {room:,}; raise "
            "--lora-memory-bytes or pin fewer"
        )

    def forget(self, adapter_id: str) -> None:
        """No sequence will use it again and none does: free it, if it is in memory."""
        adapter = self._adapters.pop(adapter_id, None)
        if adapter is None:
            return
        assert not adapter.num_running, f"{adapter_id} is in use"
        self._num_pinned -= adapter.is_pinned
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

    def is_absent(self, adapter_id: str) -> bool:
        """Whether it is an adapter that is not in memory, not even in part."""
        return adapter_id in self._adapters and adapter_id not in self._held

    def has_place(self, num_bytes: int) -> bool:
        """Whether another adapter fits, without an eviction."""
        return self._fit(self.num_resident + 1, self.num_bytes + num_bytes)

    @property
    def held(self) -> Collection[str]:
        """The adapters in compute memory, those that are being loaded included."""
        return self._held.keys()

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

    def order_load(
        self,
        adapter_id: str,
        waited_s: float,
        now: float,
        uses: Mapping[str, AdapterUse],
        in_flight: Collection[str],
    ) -> bool:
        """Order a load of an absent adapter, and the evictions that make a place for it.

        Returns False if it cannot begin yet; then the adapters that have to leave are draining.
        `waited_s` is how long its first sequence has waited; `uses` is what sequences do with the
        others, those that are not in it are unused; `in_flight` are the adapters of steps that
        still run.
        """
        adapter = self._adapters[adapter_id]
        assert adapter.state is AdapterState.ABSENT, f"{adapter_id} is {adapter.state.value}"
        is_overdue = waited_s > self.max_overtaken_s
        most = AdapterUse.RUNNING if is_overdue else AdapterUse.PREEMPTIBLE
        leaving = self._leaving(adapter, most, now, uses, in_flight)
        if any(other.num_running or other.adapter_id in in_flight for other in leaving):
            self._drain({other.adapter_id for other in leaving})
            return False
        self._drain(set())
        num_left = self.num_resident - len(leaving)
        bytes_left = self.num_bytes - sum(other.num_bytes for other in leaving)
        fits = self._fit(num_left + 1, bytes_left + adapter.num_bytes)
        if self._num_loading >= self.max_loading or not fits:
            return False
        for other in leaving:
            self._changed.append(other.adapter_id)
            self._set_state(other, AdapterState.ABSENT)
            self._evictions.append(other.adapter_id)
        self.num_evictions += len(leaving)
        self._set_state(adapter, AdapterState.LOADING)
        self._num_loading += 1
        self._loads.append(adapter_id)
        return True

    def stop_draining(self) -> None:
        """Nothing waits for a place any more: what is still resident may be used."""
        self._drain(set())

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
        held = [adapter for adapter in adapters if adapter.state is not AdapterState.ABSENT]
        assert sorted(self._held) == sorted(adapter.adapter_id for adapter in held), (
            "the held ones differ"
        )
        assert self._num_bytes == sum(adapter.num_bytes for adapter in held), "their bytes differ"
        assert self.num_resident <= self.max_loras, "too many adapters are in memory"
        assert self.max_bytes is None or self.num_bytes <= self.max_bytes, "they take too much"
        assert self._num_loading == sum(
            adapter.state is AdapterState.LOADING for adapter in adapters
        )
        assert self._num_pinned == sum(adapter.is_pinned for adapter in adapters)
        for adapter in adapters:
            runs = adapter.state in (AdapterState.RESIDENT, AdapterState.DRAINING)
            assert runs or not adapter.num_running, (
                f"{adapter.adapter_id} is {adapter.state.value} and in use"
            )

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

    def _leaving(
        self,
        adapter: _Adapter,
        most: AdapterUse,
        now: float,
        uses: Mapping[str, AdapterUse],
        in_flight: Collection[str],
    ) -> list[_Adapter]:
        """The adapters that have to leave for another one, of those that are used no more than
        `most`; none if it fits next to them, or not even without them.
        """

        def use(one: _Adapter) -> AdapterUse:
            return uses.get(one.adapter_id, AdapterUse.UNUSED)

        in_memory = (AdapterState.RESIDENT, AdapterState.DRAINING)
        others = [
            adapter
            for adapter in self._held.values()
            if adapter.state in in_memory and not adapter.is_pinned and use(adapter) <= most
        ]
        others.sort(key=lambda one: self._value(one, now))
        others.sort(key=lambda one: (use(one), one.adapter_id in in_flight, one.num_running))
        num_loras, num_bytes = self.num_resident + 1, self.num_bytes + adapter.num_bytes
        for num_leaving, one in enumerate(others):
            if self._fit(num_loras, num_bytes):
                return others[:num_leaving]
            num_loras, num_bytes = num_loras - 1, num_bytes - one.num_bytes
        return others if self._fit(num_loras, num_bytes) else []

    def _fit(self, num_loras: int, num_bytes: int) -> bool:
        """Whether so many adapters of so many bytes together may be in memory."""
        has_bytes = self.max_bytes is None or num_bytes <= self.max_bytes
        return has_bytes and num_loras <= self.max_loras

    def _drain(self, adapter_ids: set[str]) -> None:
        """Drain these adapters and no others."""
        for adapter in self._held.values():
            drains = adapter.adapter_id in adapter_ids
            if drains and adapter.state is AdapterState.RESIDENT:
                self._set_state(adapter, AdapterState.DRAINING)
            elif not drains and adapter.state is AdapterState.DRAINING:
                self._set_state(adapter, AdapterState.RESIDENT)
            else:
                continue
            self._changed.append(adapter.adapter_id)
