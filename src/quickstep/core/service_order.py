"""Which sequence is served first, and which may be preempted for it.

A sequence gets its rank when it arrives, in seconds, lower first; it ages by itself, because ranks
are compared with those of later arrivals. An order may also keep a queue for each tenant or length
and choose between the queues each time, by what their sequences have received.

    ServiceOrder    arrival
    PriorityOrder   arrival + level * aging_s + shortest_first * predicted seconds
    DeadlineOrder   the deadline
    FairOrder       the tenant that has received the fewest device seconds for its weight
    LengthOrder     groups of prompts of about the same length

The scheduler reports what happens to a sequence (`added`, `admitted`, `charged`, `left`, `ended`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from quickstep.core.sequence import TICKS_PER_S, Rank, Sequence
from quickstep.types import Request, RequestClass

# How many levels of priority the class `batch` is below `interactive`.
_BATCH_LEVELS = 1000
# A request without a deadline is ordered as if it had one this long after its arrival.
_NO_DEADLINE_S = 60.0
# Idle tenants are remembered while they have received more than others, up to so many.
_MAX_IDLE_TENANTS = 1024
_SHARED_S = 10.0  # after requests of two tenants


def level_of(request: Request) -> int:
    """The priority with the class of the request: lower first."""
    is_batch = request.request_class is RequestClass.BATCH
    return request.priority + (_BATCH_LEVELS if is_batch else 0)


def account_of(request: Request) -> str:
    """The part of the tenant that a client cannot choose: the name of its API key."""
    return request.tenant.partition("/")[0]


class ServiceOrder:
    """First come, first served, without regard to priorities; other orders override what differs.
    One object belongs to one scheduler.

    `relegates`: a waiting sequence that cannot end in time any more is put after the others.
    `version` changes whenever `queue_rank` may have changed.
    """

    relegates = False
    takes_turns = False  # its queues do, in place of one after the other
    version = 0

    def level(self, request: Request) -> int | None:
        """What decides between requests before their arrival does: lower first. None if more than
        that decides.
        """
        return 0

    def rank(self, request: Request, arrival_s: float, service_s: float) -> float:
        """The rank of an arriving sequence, in seconds: lower is first. `service_s` is what it is
        predicted to take by itself.
        """
        return arrival_s

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `running` may be preempted to admit `waiting`, which it otherwise ranks after."""
        return running.is_paused

    def may_displace(self, waiting: Sequence, other: Sequence) -> bool:
        """Whether `other`, which runs or could be admitted, may lose the place of its adapter to
        `waiting`. Then all sequences with that adapter lose it: so only for what lasts, and not
        because of turns, which would alternate.
        """
        return self.may_preempt(waiting, other)

    def queue_of(self, request: Request) -> str:
        """The name of the queue in which a request waits; within a queue the rank decides."""
        return ""

    def queue_rank(self, name: str) -> float | None:
        """Which queue is first: the lowest; None for one that is not served now."""
        return 0.0

    def key(self, sequence: Sequence) -> tuple[float, Rank]:
        """By what waiting and running sequences are compared: their queue, then their rank."""
        return self.queue_rank(self.queue_of(sequence.request)) or 0.0, sequence.rank

    def over_share(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The sequences of tenants that hold more than their part of the batch."""
        return []

    def is_shared(self, now: float) -> bool:
        """Whether several tenants have sent requests lately whom this order serves alike."""
        return False

    def is_crowding(self, request: Request) -> bool:
        """Whether a request's tenant has at least its part of all requests."""
        return True

    def added(self, sequence: Sequence) -> None:
        """A sequence was queued for the first time."""

    def admitted(self, sequence: Sequence) -> None:
        """A sequence entered the batch."""

    def charged(self, sequence: Sequence, seconds: float) -> None:
        """A sequence received device seconds; reported only if the queues take turns."""

    def left(self, sequence: Sequence) -> None:
        """A sequence left the batch: it was preempted, or is about to end."""

    def ended(self, sequence: Sequence) -> None:
        """A sequence ended, from the batch or from a queue."""


class PriorityOrder(ServiceOrder):
    """By priority and class, with age: one level for every `aging_s` seconds since the arrival.

    At any time t the order by level - (t - arrival_s) / aging_s is the order by arrival_s + level *
    aging_s: t cancels out. Within a level, `shortest_first` puts a request back by so many seconds
    for each second that it is predicted to take: a short one overtakes a long one, and a long one
    waits at most for the short ones that arrive within that time.
    """

    def __init__(self, aging_s: float, shortest_first: float = 0.0) -> None:
        self._aging_s = aging_s
        self._shortest_first = shortest_first

    def level(self, request: Request) -> int | None:
        """The priority with the class."""
        return level_of(request)

    def rank(self, request: Request, arrival_s: float, service_s: float) -> float:
        """The arrival, put back by level and predicted length."""
        return arrival_s + level_of(request) * self._aging_s + self._shortest_first * service_s

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """A paused one, and one of a lower level whose age does not compensate for it.

        Sequences of the same level do not preempt each other: they would only take turns.
        """
        if running.rank <= waiting.rank:  # the usual case
            return running.is_paused
        return running.is_paused or level_of(running.request) > level_of(waiting.request)


class DeadlineOrder(PriorityOrder):
    """The earliest deadline first; without one, as if it were a minute after the arrival.

    If deadlines can be met by serving one sequence after the other, this order meets them all
    (Jackson 1955, for work that is there at the same time). Under overload it would serve what is
    lost already: so a waiting sequence that has no slack left is put after the others. Its slack is
    the time to its deadline minus the predicted time to meet it. A level of priority moves the
    deadline by `aging_s`.
    """

    relegates = True

    def level(self, request: Request) -> int | None:
        """None: deadlines decide."""
        return None

    def rank(self, request: Request, arrival_s: float, service_s: float) -> float:
        """The deadline, moved by the level."""
        limits = (request.ttft_deadline_s, request.timeout_s)
        limit_s = min((limit for limit in limits if limit is not None), default=_NO_DEADLINE_S)
        return arrival_s + limit_s + level_of(request) * self._aging_s

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """A paused one, and one without a deadline for one with an earlier deadline."""
        has_deadline = waiting.request.timeout_s or waiting.request.ttft_deadline_s
        is_free = not (running.request.timeout_s or running.request.ttft_deadline_s)
        return running.is_paused or bool(has_deadline and is_free and running.rank > waiting.rank)


class _Tenant(msgspec.Struct):
    """What a tenant has received, in device seconds divided by its weight.

    `reserved_s` is what its running sequences are predicted to receive in addition; without it one
    tenant would fill all free slots before anything is charged.
    """

    weight: float
    virtual_s: float
    reserved_s: float = 0.0
    num_live: int = 0
    num_running: int = 0

    @property
    def is_light(self) -> bool:
        """Whether none of its requests wait."""
        return self.num_running == self.num_live


class FairOrder(PriorityOrder):
    """The tenant first that has received the fewest device seconds for its weight.

    As in Virtual Token Counter (Sheng et al. 2023, arXiv:2401.00588), with attributed device
    seconds instead of tokens: a tenant that returns gets no credit for the time in which it had no
    requests, and what it received while it was alone is no debt: when nothing is left, all begin
    with what the last one has received. Within a tenant, priorities decide. A tenant without a
    sequence in the batch may take a slot from another one, and steps are kept short for a tenant
    that uses less than its part.
    """

    def __init__(self, aging_s: float) -> None:
        super().__init__(aging_s)
        self._tenants: dict[str, _Tenant] = {}
        self._reserved_s: dict[str, float] = {}  # by sequence id
        self._floor_s = 0.0
        self._num_live = 0
        self._live_weight = 0.0  # of the tenants with requests
        self._last_tenant: str | None = None
        self._shared_until_s = -math.inf

    takes_turns = True

    def level(self, request: Request) -> int | None:
        """None: what tenants have received decides."""
        return None

    def queue_of(self, request: Request) -> str:
        """The account."""
        return account_of(request)

    def queue_rank(self, name: str) -> float:
        """What the tenant has received and will have received from its running sequences."""
        tenant = self._tenants[name]
        return tenant.virtual_s + tenant.reserved_s

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Also one of another tenant, if that has received more and this one has no sequence in the
        batch. Anything less is evened out by the next admissions, without computing anything twice.
        """
        mine, other = self._of(waiting), self._of(running)
        if mine is other:
            return super().may_preempt(waiting, running)
        is_owed = not mine.num_running and mine.virtual_s < other.virtual_s
        return running.is_paused or (is_owed and other.num_running > 1)

    def may_displace(self, waiting: Sequence, other: Sequence) -> bool:
        """Within a tenant, by priority."""
        if self._of(waiting) is self._of(other):
            return super().may_preempt(waiting, other)
        return other.is_paused

    def over_share(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The sequences of tenants with more rows than their weight gives them, if there is a light
        tenant with fewer.
        """
        tenants = [tenant for tenant in self._tenants.values() if tenant.num_running]
        if len(tenants) < 2:
            return []
        even = sum(tenant.num_running for tenant in tenants) / sum(
            tenant.weight for tenant in tenants
        )
        if not any(
            tenant.is_light and tenant.num_running <= even * tenant.weight for tenant in tenants
        ):
            return []
        return [
            sequence
            for sequence in running
            if (of := self._of(sequence)).num_running > even * of.weight
        ]

    def is_shared(self, now: float) -> bool:
        """Whether several tenants have sent requests in the last seconds."""
        return now < self._shared_until_s

    def is_crowding(self, request: Request) -> bool:
        """Whether a request's tenant has at least its part of all requests, by weight; one alone is
        taken to be one of two.
        """
        tenant = self._tenants[self.queue_of(request)]
        weight = max(self._live_weight, 2.0 * tenant.weight)
        return tenant.num_live * weight >= self._num_live * tenant.weight

    def added(self, sequence: Sequence) -> None:
        """Count it; a tenant that was idle begins with what the others have received at least."""
        self.version += 1
        name, weight = self.queue_of(sequence.request), sequence.request.tenant_weight
        tenant = self._tenants.get(name)
        if tenant is None or not tenant.num_live:
            live = [tenant.virtual_s for tenant in self._tenants.values() if tenant.num_live]
            self._floor_s = max(self._floor_s, min(live, default=self._floor_s))
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[name] = _Tenant(weight, self._floor_s)
        elif not tenant.num_live:
            tenant.virtual_s = max(tenant.virtual_s, self._floor_s)
        if self._last_tenant not in (None, name) or tenant.num_live < self._num_live:
            self._shared_until_s = sequence.arrival_s + _SHARED_S
        self._last_tenant = name
        self._live_weight += weight - (tenant.weight if tenant.num_live else 0.0)
        tenant.weight = weight
        tenant.num_live += 1
        self._num_live += 1

    def admitted(self, sequence: Sequence) -> None:
        """Reserve what it is predicted to be charged."""
        self.version += 1
        tenant = self._of(sequence)
        charged_s = sequence.charges.device_ticks / TICKS_PER_S
        left_s = max(0.0, sequence.prediction.charge_s - charged_s) / tenant.weight
        self._reserved_s[sequence.sequence_id] = left_s
        tenant.reserved_s += left_s
        tenant.num_running += 1

    def charged(self, sequence: Sequence, seconds: float) -> None:
        """Count it, from what is reserved if something is."""
        self.version += 1
        tenant = self._of(sequence)
        weighted_s = seconds / tenant.weight
        tenant.virtual_s += weighted_s
        reserved_s = self._reserved_s.get(sequence.sequence_id, 0.0)
        if reserved_s:
            used_s = min(reserved_s, weighted_s)
            self._reserved_s[sequence.sequence_id] = reserved_s - used_s
            tenant.reserved_s = max(0.0, tenant.reserved_s - used_s)

    def left(self, sequence: Sequence) -> None:
        """Release what is still reserved."""
        self.version += 1
        tenant = self._of(sequence)
        tenant.num_running -= 1
        reserved_s = self._reserved_s.pop(sequence.sequence_id)
        tenant.reserved_s = max(0.0, tenant.reserved_s - reserved_s) if tenant.num_running else 0.0

    def ended(self, sequence: Sequence) -> None:
        """Count it; the last one is where all begin that come next."""
        tenant = self._of(sequence)
        tenant.num_live -= 1
        self._num_live -= 1
        if not tenant.num_live:
            self._live_weight -= tenant.weight
        if not self._num_live:
            self._live_weight = 0.0  # without the errors of sums
            self._floor_s = max(self._floor_s, tenant.virtual_s)

    def _of(self, sequence: Sequence) -> _Tenant:
        return self._tenants[self.queue_of(sequence.request)]

    def _forget_idle(self) -> None:
        """Forget tenants without requests that have received no more than the others; of too many
        others, those that have received the least.
        """
        idle = [name for name, tenant in self._tenants.items() if not tenant.num_live]
        idle.sort(key=lambda name: self._tenants[name].virtual_s)
        num_excess = len(idle) - _MAX_IDLE_TENANTS
        for place, name in enumerate(idle):
            if place < num_excess or self._tenants[name].virtual_s <= self._floor_s:
                del self._tenants[name]


class LengthOrder(ServiceOrder):
    """Groups of prompts whose lengths differ by less than a factor of two.

    `group` is the one of the batch that is being filled.
    """

    _group: str | None = None

    @property
    def group(self) -> str | None:
        """The group that is admitted; None if the oldest request decides."""
        return self._group

    @group.setter
    def group(self, name: str | None) -> None:
        self.version += name != self._group
        self._group = name

    def level(self, request: Request) -> int | None:
        """None: the group that is being admitted decides."""
        return None

    def queue_of(self, request: Request) -> str:
        """The power of two that the length of the prompt is below."""
        return str(len(request.prompt_token_ids).bit_length())

    def queue_rank(self, name: str) -> float | None:
        """Only the group that is being admitted."""
        return 0.0 if self.group in (None, name) else None

    def admitted(self, sequence: Sequence) -> None:
        """The others of the batch have to be of its group."""
        self.group = self.queue_of(sequence.request)
