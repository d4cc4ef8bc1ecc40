"""Where live sequences are: in the waiting queue or in the running batch; and their deadlines.

Both are sorted by rank, which is unique; paused sequences are last. Owned by `core.scheduler`,
which decides who enters and who leaves.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain
from operator import attrgetter
from typing import Protocol

from quickstep.core.sequence import Rank, Residency, Sequence, SequenceState
from quickstep.core.service_order import ServiceOrder, account_of
from quickstep.core.shares import Shares
from quickstep.types import Activity, Request, RequestClass

_rank: Callable[[Sequence], Rank] = attrgetter("rank")


class Gate(Protocol):
    """What a sequence may have to wait for before it can be admitted at all; the wait is
    `activity`.
    """

    activity: Activity

    def key(self, request: Request) -> str:
        """What the sequences of a request need; "" for nothing."""

    def is_ready(self, key: str) -> bool:
        """Whether it is there."""


class WaitingQueue:
    """Sequences that wait to be admitted, for the first time or again after a preemption.

    They wait in the queues that `order` names, each sorted by rank. One that needs what is not
    ready (`gates`) is parked, by the key of that and by queue, where nothing admits it.
    `max_waiting` is what accounts share; sequences that were running may be beyond it.

    Attributes:
        num: How many wait.
        parked_by_key: Those that wait for what has a key, by queue; read only.
    """

    def __init__(
        self,
        order: ServiceOrder,
        gates: SequenceOf[Gate] = (),
        max_waiting: int | None = None,
    ) -> None:
        self._order = order
        self._gates = gates
        self._queues: dict[str, list[Sequence]] = {}
        self.parked_by_key: dict[str, dict[str, list[Sequence]]] = {}
        self._ready: dict[str, list[Sequence]] = {}  # by key: those of the queues that have one
        self.num = 0
        self._shares = Shares(max_waiting)  # of all places, by account
        self._interactive_shares = Shares(max_waiting)  # without those of the class `batch`
        self._known_first: tuple[Sequence | None, int] | None = None
        self._known_version = 0  # of the order

    def __bool__(self) -> bool:
        return bool(self._queues or self.parked_by_key)  # none of them is empty

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._all_queues())

    @property
    def num_active(self) -> int:
        """How many are not paused; they are first in their queues."""
        return sum(map(_num_active, self._all_queues()))

    @property
    def num_interactive(self) -> int:
        """How many are not of the class `batch`."""
        return self._interactive_shares.num_held

    def largest_accounts(self, num_accounts: int) -> tuple[tuple[str, int], ...]:
        """The accounts with the most places, without those of the class `batch`."""
        return self._interactive_shares.most(num_accounts)

    def shares(self, request: Request) -> Shares:
        """The places of the accounts, as they count for a request: those of the class `batch` take
        none from an interactive one.
        """
        is_batch = request.request_class is RequestClass.BATCH
        return self._shares if is_batch else self._interactive_shares

    def first_parked(self, is_wanted: Callable[[str], bool]) -> Sequence | None:
        """The first sequence, in the order of service, that waits for something `is_wanted`."""
        heads = [
            queue[0]
            for key, queues in self.parked_by_key.items()
            if is_wanted(key)
            for queue in queues.values()
        ]
        order_key = self._order.key if self._order.takes_turns else _rank
        first = min(heads, key=order_key, default=None)
        if first is not None and first.is_paused:
            active = [head for head in heads if not head.is_paused]
            return min(active, key=order_key, default=None)
        return first

    def parked(self, key: str) -> tuple[Sequence, ...]:
        """The sequences that wait for something."""
        return tuple(chain.from_iterable(self.parked_by_key.get(key, {}).values()))

    def first_of(self, key: str) -> Sequence | None:
        """The first sequence that waits and needs something, whether that is ready or not."""
        queues = [self._ready.get(key, []), *self.parked_by_key.get(key, {}).values()]
        heads = [queue[0] for queue in queues if queue and not queue[0].is_paused]
        return min(heads, key=self._order.key, default=None)

    def sort_again(self, key: str, now: float) -> None:
        """Something has become ready, or has ceased to be."""
        for sequence in (*self._ready.get(key, ()), *self.parked(key)):
            self.remove(sequence)
            self.push(sequence, now)

    def await_for(
        self, request: Request, begin: Callable[[], None], now: float
    ) -> SequenceOf[Sequence]:
        """After `begin`, the sequences of a request that could have been admitted need what is not
        ready: they are parked. Returns them.
        """
        queue = self._queues.get(self._order.queue_of(request), ())
        sequences = [sequence for sequence in queue if sequence.request is request]
        for sequence in sequences:
            self.remove(sequence)
        begin()
        for sequence in sequences:
            self.push(sequence, now)
        return sequences

    @property
    def num_served(self) -> int:
        """How many are not paused, in the queues that are served now."""
        return self._first[1]

    @property
    def head(self) -> Sequence | None:
        """The sequence that is admitted next; None if there is none that is not paused."""
        return self._first[0]

    @property
    def _first(self) -> tuple[Sequence | None, int]:
        """`head` and `num_served`, kept until a queue or the order of the queues changes: there
        may be a thousand tenants, and each step and each admission asks several times.
        """
        if not self._queues:
            return None, 0
        if self._known_first is None or self._known_version != self._order.version:
            self._known_first = self._find_first()
            self._known_version = self._order.version
        return self._known_first

    def _find_first(self) -> tuple[Sequence | None, int]:
        first: tuple[float, Rank] | None = None
        head, num_served = None, 0
        for rank, queue in self._served():
            num_served += _num_active(queue)
            one = queue[0]
            if not one.is_paused and (first is None or (rank, one.rank) < first):
                first, head = (rank, one.rank), one
        return head, num_served

    def num_before(self, request: Request, rank: Rank) -> int:
        """How many are served before a request with that rank, as far as that is known now: those
        before it in its queue, and of each other queue as many if the queues take turns, else all.
        """
        name = self._order.queue_of(request)
        place = bisect_left(self._queues.get(name, []), rank, key=_rank)
        parked = chain.from_iterable(by_key.values() for by_key in self.parked_by_key.values())
        place += sum(bisect_left(queue, rank, key=_rank) for queue in parked)
        others = [len(queue) for one, queue in self._queues.items() if one != name]
        most = place + 1 if self._order.takes_turns else max(others, default=0)
        return place + sum(min(most, length) for length in others)

    def push(self, sequence: Sequence, now: float) -> None:
        """Insert by rank, which does not change while the sequence waits."""
        sequence.park(*self._missing(sequence.request), now)
        self._known_first = None
        self.num += 1
        for shares in self._shares_of(sequence):
            shares.hold(account_of(sequence.request))
        for queues, name in self._places(sequence):
            insort(queues.setdefault(name, []), sequence, key=_rank)

    def _missing(self, request: Request) -> tuple[str, Activity]:
        """The key of what the sequences of a request have to wait for, and the name of that wait;
        "" for a place in the batch.
        """
        for gate in self._gates:
            key = gate.key(request)
            if key and not gate.is_ready(key):
                return key, gate.activity
        return "", Activity.QUEUE

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be queued."""
        self._known_first = None
        self.num -= 1
        for shares in self._shares_of(sequence):
            shares.give_back(account_of(sequence.request))
        for queues, name in self._places(sequence):
            queue = queues[name]
            index = bisect_left(queue, sequence.rank, key=_rank)
            assert queue[index] is sequence, f"{sequence.sequence_id} is not queued"
            del queue[index]
            if not queue:
                del queues[name]
        key = sequence.parked_key
        if key and not self.parked_by_key[key]:
            del self.parked_by_key[key]

    def _shares_of(self, sequence: Sequence) -> tuple[Shares, ...]:
        """Those in which a sequence counts."""
        if sequence.request.request_class is RequestClass.BATCH:
            return (self._shares,)
        return self._shares, self._interactive_shares

    def _places(self, sequence: Sequence) -> list[tuple[dict[str, list[Sequence]], str]]:
        """The lists that a sequence is in."""
        request = sequence.request
        name = self._order.queue_of(request)
        if sequence.parked_key:
            return [(self.parked_by_key.setdefault(sequence.parked_key, {}), name)]
        places = [(self._queues, name)]
        places += [(self._ready, key) for gate in self._gates if (key := gate.key(request))]
        return places

    def _all_queues(self) -> Iterator[list[Sequence]]:
        parked = chain.from_iterable(by_key.values() for by_key in self.parked_by_key.values())
        return chain(self._queues.values(), parked)

    def set_paused(self, sequence: Sequence, is_paused: bool, now: float) -> None:
        """Pause or resume a queued sequence."""
        self.remove(sequence)
        sequence.set_paused(is_paused, now)
        self.push(sequence, now)

    def relegate(self, sequence: Sequence, now: float) -> None:
        """Put a queued sequence after all others that are not paused."""
        self.remove(sequence)
        sequence.relegate()
        self.push(sequence, now)

    def check(self) -> None:
        """Raise AssertionError unless all wait, in order, and those that are not ready apart."""
        for sequence in self:
            needed = {gate: gate.key(sequence.request) for gate in self._gates}
            missing = {key for gate, key in needed.items() if key and not gate.is_ready(key)}
            key = sequence.parked_key
            is_right = key in missing if key else not missing
            assert is_right, f"{sequence.sequence_id} waits for {key!r}, it lacks {missing}"
        assert self.num == sum(map(len, self._all_queues())), "the count of all is wrong"
        for shares in (self._shares, self._interactive_shares):
            accounts = Counter(
                account_of(sequence.request)
                for sequence in self
                if shares in self._shares_of(sequence)
            )
            assert shares.num_held == accounts.total(), "the count of sequences is wrong"
            assert all(shares.held(name) == num for name, num in accounts.items()), (
                "the counts of accounts are wrong"
            )
        assert not self._queues or self._first == self._find_first(), "the head is another one"
        assert all(self.parked_by_key.values()), "no sequence waits for a key"
        keys = Counter(
            key
            for sequence in self
            if not sequence.parked_key
            for gate in self._gates
            if (key := gate.key(sequence.request))
        )
        num_ready = {key: len(queue) for key, queue in self._ready.items()}
        assert num_ready == keys, "the ready ones differ"
        for queue in (*self._all_queues(), *self._ready.values()):
            assert queue, "a queue is empty"
            for sequence in queue:
                assert sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
            ranks = [sequence.rank for sequence in queue]
            assert ranks == sorted(set(ranks)), "the queue is out of order"

    def _served(self) -> Iterator[tuple[float, list[Sequence]]]:
        for name, queue in self._queues.items():
            rank = self._order.queue_rank(name)
            if rank is not None:
                yield rank, queue


class RunningBatch:
    """Running sequences by rank.

    Attributes:
        prompts: Those of them whose prompt is to be continued, by rank; read only.
    """

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self._running: list[Sequence] = []
        self.prompts: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot, best rank first, so that the loop may preempt sequences."""
        return iter(tuple(self._running))

    def ranked(self) -> list[Sequence]:
        """A list of them, best rank first."""
        return self._running.copy()

    @property
    def num_active(self) -> int:
        """How many are not paused; they are first."""
        running = self._running
        if not running or not running[-1].is_paused:  # the usual case
            return len(running)
        return _num_active(running)

    def num_preemptible(self, may_preempt: Callable[[Sequence], bool]) -> int:
        """How many may be preempted."""
        return sum(map(may_preempt, self._running))

    @property
    def prefilling(self) -> SequenceOf[Sequence]:
        """Those whose prompt is to be continued, by rank, without paused ones."""
        return tuple(self.prompts[: _num_active(self.prompts)])

    @property
    def prefill_start(self) -> int | None:
        """Where the first prompt that is to be continued continues; None if there is none."""
        if not self.prompts or self.prompts[0].is_paused:
            return None
        return self.prompts[0].residency.planned

    def prefill_planned(self, sequence: Sequence) -> None:
        """A part of a prompt was placed in a step."""
        residency = sequence.residency
        if residency.planned >= residency.prefill_end:
            self._remove_prefilling(sequence)

    def victims_for(
        self, sequence: Sequence, fits_without: Callable[[SequenceOf[Sequence]], bool]
    ) -> SequenceOf[Sequence]:
        """The fewest sequences to preempt so that `sequence` fits, last rank first.

        Empty if it fits already, or would not fit even without all those that it may preempt.
        """
        may_preempt = self._order.may_preempt
        first = 0  # only queues that take turns have others preempted than those that rank after it
        if not self._order.takes_turns:
            first = bisect_left(self._running, sequence.rank, key=_rank)
        lower = [
            victim for victim in reversed(self._running[first:]) if may_preempt(sequence, victim)
        ]
        if not lower or not fits_without(lower):
            return ()
        counts = range(len(lower) + 1)
        return next(lower[:num] for num in counts if fits_without(lower[:num]))

    def lowest_victim(self, sequence: Sequence, step_id: int) -> Sequence | None:
        """The last sequence that ranks after `sequence` and has no row in the step."""
        lower = self._running[bisect_left(self._running, sequence.rank, key=_rank) + 1 :]
        free = (victim for victim in reversed(lower) if victim.last_step_id != step_id)
        return next(free, None)

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        """Begin a residency, for which the sequence has all resources."""
        sequence.admit(residency, now)
        self._order.admitted(sequence)
        insort(self._running, sequence, key=_rank)
        insort(self.prompts, sequence, key=_rank)

    def set_paused(self, sequence: Sequence, is_paused: bool, now: float) -> None:
        """Pause or resume a running sequence; it keeps its slot and its blocks."""
        is_prefilling = self._remove_from_order(sequence)
        sequence.set_paused(is_paused, now)
        insort(self._running, sequence, key=_rank)
        if is_prefilling:
            insort(self.prompts, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running sequence, before its resources are released."""
        self._order.left(sequence)
        self._remove_from_order(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Begin to compute all known tokens of a running sequence again."""
        self._remove_prefilling(sequence)
        sequence.residency.restart(len(sequence.token_ids))
        insort(self.prompts, sequence, key=_rank)

    def check(self) -> None:
        """Raise AssertionError unless all run, in order."""
        ranks = [sequence.rank for sequence in self._running]
        assert ranks == sorted(set(ranks)), "the batch is out of order"
        residencies = [(sequence, sequence.residency) for sequence in self._running]
        prefilling = [one for one, stay in residencies if stay.planned < stay.prefill_end]
        assert self.prompts == prefilling, "the prompts that are to be continued differ"
        for sequence, residency in residencies:
            name = sequence.sequence_id
            assert sequence.state is SequenceState.RUNNING, f"{name} runs, it is {sequence.state}"
            assert not residency.invalidated, f"{name} runs on KV of a failed step"
            end = max(len(sequence.token_ids) + residency.pending, residency.drafted_end)
            assert residency.planned <= end, f"{name} is planned past its end"

    def _remove_from_order(self, sequence: Sequence) -> bool:
        """Returns whether its prompt was to be continued."""
        del self._running[bisect_left(self._running, sequence.rank, key=_rank)]
        return self._remove_prefilling(sequence)

    def _remove_prefilling(self, sequence: Sequence) -> bool:
        place = bisect_left(self.prompts, sequence.rank, key=_rank)
        is_there = self.prompts[place : place + 1] == [sequence]
        if is_there:
            del self.prompts[place]
        return is_there


def check_queues(
    batch: RunningBatch,
    waiting: WaitingQueue,
    requests: Iterable[SequenceOf[Sequence]],
    pending: Counter[str],
) -> None:
    """Raise AssertionError unless both queues are in order, have the live sequences of all requests
    between them, and each awaits as many tokens as are in flight (`pending`, by sequence id).
    """
    batch.check()
    waiting.check()
    live: list[str] = []
    for sequences in requests:
        live += [sequence.sequence_id for sequence in sequences]
        is_paused = {sequence.is_paused for sequence in sequences}
        assert len(is_paused) == 1, "a request is partly paused"
    queued = [sequence.sequence_id for sequence in (*batch, *waiting)]
    assert sorted(queued) == sorted(live), "live sequences and those in a queue differ"
    for sequence in (*batch, *waiting):
        name, count = sequence.sequence_id, pending[sequence.sequence_id]
        assert sequence.num_pending == count, (
            f"{name} awaits {sequence.num_pending} tokens, {count} are in flight"
        )


class Due(enum.Enum):
    """What is to be done with a sequence at a time."""

    EXPIRE = "end it with the text so far"
    SHED = "end it unless it has been admitted: it cannot have its first token in time"
    RELEGATE = "serve others first while it waits: it cannot end in time"


class DeadlineQueue:
    """A heap of times at which something is due for live sequences; `relegates` if some are to be
    put after the others. Entries of finished sequences are removed now and then.

    Attributes:
        heap: Its entries; read only, to see whether there is any.
    """

    def __init__(self, relegates: bool = False) -> None:
        self._relegates = relegates
        self.heap: list[tuple[float, int, str, Due, Sequence]] = []
        self._prune_at = 64

    def push(self, sequence: Sequence) -> None:
        """Add a sequence, if it has a deadline."""
        for time_s, due in ((sequence.deadline_s, Due.EXPIRE), (sequence.shed_at_s, Due.SHED)):
            if time_s is not None:
                heapq.heappush(self.heap, (time_s, sequence.arrival, due.name, due, sequence))
        self.push_relegation(sequence)
        if len(self.heap) >= self._prune_at:
            self.heap = [entry for entry in self.heap if _is_live(entry[-1])]
            heapq.heapify(self.heap)
            self._prune_at = max(64, 2 * len(self.heap))

    def push_relegation(self, sequence: Sequence) -> None:
        """A sequence waits, for the first time or again: note when it could not end in time."""
        time_s = sequence.relegate_at_s if self._relegates else None
        if time_s is not None:
            due = Due.RELEGATE
            heapq.heappush(self.heap, (time_s, sequence.arrival, due.name, due, sequence))

    def is_later(self, sequence: Sequence, now: float) -> bool:
        """Whether what was due for a waiting sequence is due later, because it has run since."""
        time_s = sequence.relegate_at_s
        is_later = time_s is not None and time_s > now
        if is_later:
            self.push_relegation(sequence)
        return is_later

    def next_s(self) -> float | None:
        """The earliest time; None without any."""
        return self.heap[0][0] if self.heap else None

    def pop_due(self, now: float) -> Iterator[tuple[Sequence, Due]]:
        """Remove and return what is due for live sequences, earliest first."""
        while self.heap and (self.heap[0][0] <= now or not _is_live(self.heap[0][-1])):
            *_, due, sequence = heapq.heappop(self.heap)
            if _is_live(sequence):
                yield sequence, due


def _num_active(sequences: SequenceOf[Sequence]) -> int:
    if not sequences or not sequences[-1].is_paused:  # paused ones are last
        return len(sequences)
    return bisect_left(sequences, True, key=_is_paused)


def _is_live(sequence: Sequence) -> bool:
    return sequence.state is not SequenceState.FINISHED


def _is_paused(sequence: Sequence) -> bool:
    return sequence.is_paused
