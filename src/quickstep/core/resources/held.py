"""`HeldResources`: all kinds of resources of one scheduler, which it asks as if they were one.

Which kinds there are follows from the configuration and is decided here only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import CostModel
from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.resources.adapter_places import AdapterPlaces
from quickstep.core.resources.adapter_residency import AdapterResidency
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.resources.kv_blocks import KVBlocks
from quickstep.core.resources.kv_retention import KVRetention
from quickstep.core.resources.kv_tiers import KVTiers
from quickstep.core.resources.kv_transfers import KVTransfers
from quickstep.core.resources.resource import Preempt, Resource, Slots
from quickstep.core.resources.state_slots import StateSlots
from quickstep.core.sequence import Residency, Sequence
from quickstep.core.service_order import ServiceOrder
from quickstep.core.step import StepsInFlight
from quickstep.types import Request


class HeldResources:
    """What the sequences of one scheduler have to hold to run.

    `max_blocks` is how many blocks the longest sequence has; `expected_growth` how many tokens the
    running sequences are expected to add; `more` are kinds that the configuration does not name.

    Attributes:
        slots, blocks: Of each running sequence.
        adapters, transfers, tiers: None where the configuration has none.
        gates: Those that a sequence may have to wait for although there is enough of them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVBlockPool,
        order: ServiceOrder,
        cost_model: CostModel,
        in_flight: StepsInFlight,
        max_blocks: int,
        expected_growth: Callable[[], int],
        more: Iterable[Resource] = (),
    ) -> None:
        self.slots = Slots(config.max_num_seqs)
        self.adapters: AdapterPlaces | None = None
        if config.max_loras is not None:
            places = AdapterResidency(config.max_loras, config.lora_bytes)
            self.adapters = AdapterPlaces(places, order, in_flight)
        self.transfers: KVTransfers | None = None
        if config.transfers_kv:
            self.transfers = KVTransfers(pool, max_blocks, in_flight)
        self.tiers: KVTiers | None = None
        if config.kv_tier is not None:
            self.tiers = KVTiers(pool, cost_model, config.kv_tier, in_flight)
        states: StateSlots | None = None
        if config.num_state_slots:
            states = StateSlots(pool, config.num_state_slots, config.state_interval, in_flight)
        num_usable = len if states is None else states.num_usable
        self.blocks = KVBlocks(pool, expected_growth, num_usable)
        gates = (self.adapters, *more, self.transfers, self.tiers)
        self.gates = tuple([gate for gate in gates if gate is not None])
        last = () if states is None else (states,)
        self._all = (self.slots, KVRetention(pool), *self.gates, self.blocks, *last)

    @property
    def is_moving_blocks(self) -> bool:
        """Whether KV blocks are on their way from or to engines or files, which ends whether steps
        run or not.
        """
        tiers = self.tiers
        if tiers is not None and (tiers.is_saving or tiers.is_restoring):
            return True
        return self.transfers is not None and self.transfers.are_open

    def check_request(self, request: Request) -> None:
        """Raise RequestError for a request that could never have one of them."""
        for resource in self._all:
            resource.check_request(request)

    def requested(self, request: Request, now: float) -> None:
        """A request was accepted."""
        for resource in self._all:
            resource.requested(request, now)

    def prepare(
        self, waiting: WaitingQueue, batch: RunningBatch, now: float, preempt: Preempt
    ) -> None:
        """A step is about to be planned, and sequences wait."""
        for resource in self._all:
            resource.prepare(waiting, batch, now, preempt)

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is enough of all to admit a sequence now."""
        return all(resource.fits(sequence) for resource in self._all)

    def fits_without(self, sequence: Sequence, leaving: SequenceOf[Sequence]) -> bool:
        """Whether there would be enough if `leaving`, which run, were preempted."""
        return all(resource.fits_without(sequence, leaving) for resource in self._all)

    def admit(self, sequence: Sequence, now: float) -> Residency:
        """Give a sequence its part of each; returns what it holds."""
        residency = Residency(prefill_end=len(sequence.token_ids))
        for resource in self._all:
            resource.admit(sequence, residency, now)
        return residency

    def release(self, sequence: Sequence) -> None:
        """Take back what a running sequence holds."""
        for resource in self._all:
            resource.release(sequence)

    def ended(self, sequence: Sequence, now: float) -> None:
        """A sequence of an accepted request has ended, in the batch or in the queue."""
        for resource in self._all:
            resource.ended(sequence, now)

    def lost(self, waiting: WaitingQueue) -> list[tuple[Sequence, str]]:
        """The sequences that wait for what they cannot get any more, and why."""
        return [lost for resource in self._all for lost in resource.lost(waiting)]

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the states agree with what the running sequences hold."""
        for resource in self._all:
            resource.check(running)
