"""`AdapterPlaces`: sequences wait for the place of their LoRA adapter in compute memory.

`AdapterResidency` knows which adapters are there and which leaves first. This module knows the
sequences: who waits with which adapter, in the order of service, and who may be preempted for it.
A driver, the engine or a simulation, carries out the loads and evictions that are ordered here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quickstep.core.accounting import AdapterStats
from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.resources.adapter_residency import AdapterResidency, AdapterState, AdapterUse
from quickstep.core.resources.resource import Preempt, Resource
from quickstep.core.sequence import Residency, Sequence
from quickstep.core.service_order import ServiceOrder
from quickstep.core.step import InFlightStep
from quickstep.errors import RequestError
from quickstep.types import Activity, Request


class AdapterPlaces(Resource):
    """The places of one scheduler's adapters; `in_flight` are the steps that it has in flight."""

    activity = Activity.ADAPTER

    def __init__(
        self, residency: AdapterResidency, order: ServiceOrder, in_flight: Iterable[InFlightStep]
    ) -> None:
        self.residency = residency
        self._order = order
        self._in_flight = in_flight
        self._num_live: Counter[str] = Counter()  # sequences of each adapter

    def check_request(self, request: Request) -> None:
        """Raise RequestError if its adapter has no room next to the pinned ones."""
        if request.adapter_id and (why := self.residency.misfit(request.adapter_id)):
            raise RequestError(
                f"the adapter {request.adapter!r} cannot be loaded: {why}", param="model"
            )

    def requested(self, request: Request, now: float) -> None:
        """Count the use: what is named least often is evicted first."""
        if request.adapter_id:
            self.residency.count_use(request.adapter_id, now)
            self._num_live[request.adapter_id] += len(request.indices)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Count it."""
        if adapter_id := sequence.request.adapter_id:
            self._num_live[adapter_id] -= 1
            if not self._num_live[adapter_id]:
                del self._num_live[adapter_id]

    def is_used(self, adapter_id: str) -> bool:
        """Whether sequences or steps in flight use an adapter."""
        return adapter_id in self._num_live or adapter_id in self.in_flight

    def retire(self, adapter_id: str) -> bool:
        """Forget an adapter that no new request will name; False if it is used."""
        is_known = adapter_id in self.residency
        if is_known and self.is_used(adapter_id):
            return False
        self.residency.forget(adapter_id)
        return True

    def key(self, request: Request) -> str:
        """The content id of its adapter."""
        return request.adapter_id

    def is_ready(self, key: str) -> bool:
        """Whether it is in compute memory, and may be used."""
        return self.residency.is_ready(key)

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        """Hold the adapter."""
        self.residency.acquire(sequence.request.adapter_id)

    def release(self, sequence: Sequence) -> None:
        """Do not hold it any more."""
        self.residency.release(sequence.request.adapter_id)

    def lost(self, waiting: WaitingQueue) -> list[tuple[Sequence, str]]:
        """The sequences that wait for an adapter which pinned ones leave no room for, since they
        were pinned after the sequence was added; and why.
        """
        if not self.residency.has_pinned:
            return []
        adapter_ids = [key for key in waiting.parked_by_key if key in self.residency]
        reasons = [(adapter_id, self.residency.misfit(adapter_id)) for adapter_id in adapter_ids]
        return [
            (sequence, f"its adapter cannot be loaded: {why}")
            for adapter_id, why in reasons
            if why
            for sequence in waiting.parked(adapter_id)
        ]

    def prepare(
        self, waiting: WaitingQueue, batch: RunningBatch, now: float, preempt: Preempt
    ) -> None:
        """Begin loads for the sequences that wait for an adapter, in the order of service; preempt
        those that hold a place which the next load may take.
        """
        if not waiting.parked_by_key:
            return
        residency = self.residency
        while (first := waiting.first_parked(residency.is_absent)) is not None:
            is_ordered = residency.order_load(
                first.request.adapter_id,
                now - first.parked_since_s,
                now,
                self._uses(waiting, batch, first),
                self.in_flight,
            )
            if not is_ordered and not self._preempt_draining(batch, first, now, preempt):
                break
        if first is None:
            residency.stop_draining()
        for adapter_id in residency.take_changed():
            waiting.sort_again(adapter_id, now)

    @property
    def in_flight(self) -> set[str]:
        """The adapters of rows in flight."""
        return {entry.row.adapter for step in self._in_flight for entry in step.rows}

    def stats(self, waiting: WaitingQueue, batch: RunningBatch) -> AdapterStats:
        """Counts, and the names in use."""
        residency = self.residency
        return AdapterStats(
            residency.max_loras,
            residency.num_resident,
            residency.num_bytes,
            residency.num_loads,
            residency.num_evictions,
            _adapter_names(batch),
            _adapter_names(waiting),
        )

    def check(self, running: Iterable[Sequence]) -> None:
        """The limits are kept."""
        self.residency.check()

    def _preempt_draining(
        self, batch: RunningBatch, first: Sequence, now: float, preempt: Preempt
    ) -> bool:
        """Preempt what runs with draining adapters, if `first` may have their place."""
        victims = [
            sequence
            for sequence in batch
            if self.residency.state(sequence.request.adapter_id) is AdapterState.DRAINING
            and self._order.may_displace(first, sequence)
        ]
        for victim in victims:
            preempt(victim, now)
        return bool(victims)

    def _uses(
        self, waiting: WaitingQueue, batch: RunningBatch, first: Sequence
    ) -> dict[str, AdapterUse]:
        """What sequences do with the adapters in memory, as far as that matters to one that waits
        for a place.
        """
        uses: dict[str, AdapterUse] = {}
        key, may_displace = self._order.key, self._order.may_displace
        first_key = key(first)
        for adapter_id in self.residency.held:
            other = waiting.first_of(adapter_id)
            if other is not None and key(other) < first_key:
                uses[adapter_id] = AdapterUse.AHEAD
            elif other is not None and not may_displace(first, other):
                uses[adapter_id] = AdapterUse.WANTED
        for sequence in batch:
            adapter_id = sequence.request.adapter_id
            is_free = may_displace(first, sequence)
            use = AdapterUse.PREEMPTIBLE if is_free else AdapterUse.RUNNING
            if use > uses.get(adapter_id, AdapterUse.UNUSED):
                uses[adapter_id] = use
        return uses


def _adapter_names(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(
        sorted({sequence.request.adapter for sequence in sequences if sequence.request.adapter})
    )
