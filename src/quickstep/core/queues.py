"""Where live sequences are: in the waiting queue or in the running batch; and their deadlines.

Both are sorted by rank, which is unique; paused sequences are last. Owned by `core.scheduler`,
which decides who enters and who leaves. The batch also owns the slots and calls the block pool. A
prompt block is registered for prefix hits when its computation is planned.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain

from quickstep.core.block_pool import KVBlockPool
from quickstep.core.sequence import Rank, Residency, Sequence, SequenceState
from quickstep.core.service_order import ServiceOrder, account_of
from quickstep.core.shares import Shares
from quickstep.types import CacheMiss, Request, RequestClass

__all__ = ["Deadlines", "Due", "RunningBatch", "WaitingQueue"]


class WaitingQueue:
    """Sequences that wait to be admitted, for the first time or again after a preemption.

    They wait in the queues that `order` names, each sorted by rank; those whose adapter is not
    ready (`is_ready`) are parked, by adapter and queue, where nothing admits them. `max_waiting` is
    what accounts share; sequences that were running may be beyond it.
    """

    def __init__(
        self,
        order: ServiceOrder,
        is_ready: Callable[[str], bool] | None = None,
        max_waiting: int | None = None,
    ) -> None:
        self._order = order
        self._is_ready = is_ready
        self._queues: dict[str, list[Sequence]] = {}
        self._parked: dict[str, dict[str, list[Sequence]]] = {}  # by adapter
        self._ready: dict[str, list[Sequence]] = {}  # by adapter: those of the queues that have one
        self._shares = Shares(max_waiting)  # of all places, by account
        self._interactive_shares = Shares(max_waiting)  # without those of the class `batch`
        self._known_first: tuple[Sequence | None, int] | None = None
        self._known_version = 0  # of the order

    def __bool__(self) -> bool:
        return bool(self._queues or self._parked)  # none of them is empty

    def __len__(self) -> int:
        return self._shares.num_held

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

    def shares(self, request: Request) -> Shares:
        """The places of the accounts, as they count for a request: those of the class `batch` take
        none from an interactive one.
        """
        is_batch = request.request_class is RequestClass.BATCH
        return self._shares if is_batch else self._interactive_shares

    @property
    def parked_adapters(self) -> Collection[str]:
        """The adapters that sequences wait for."""
        return self._parked.keys()

    def first_parked(self, besides: Collection[str]) -> Sequence | None:
        """The first sequence, in the order of service, that waits for an adapter other than
        these.
        """
        heads = [
            queue[0]
            for name, of_adapter in self._parked.items()
            if name not in besides
            for queue in of_adapter.values()
        ]
        key = self._order.key if self._order.takes_turns else _rank
        first = min(heads, key=key, default=None)
        if first is not None and first.is_paused:
            return min([head for head in heads if not head.is_paused], key=key, default=None)
        return first

    def parked(self, adapter_id: str) -> tuple[Sequence, ...]:
        """The sequences that wait for an adapter."""
        return tuple(chain.from_iterable(self._parked.get(adapter_id, {}).values()))

    def first_of_adapter(self, adapter_id: str) -> Sequence | None:
        """The first sequence that waits with an adapter, whether it may be admitted or not."""
        queues = [self._ready.get(adapter_id, []), *self._parked.get(adapter_id, {}).values()]
        heads = [queue[0] for queue in queues if queue and not queue[0].is_paused]
        return min(heads, key=self._order.key, default=None)

    def sort_again(self, adapter_id: str, now: float) -> None:
        """An adapter has become ready, or has ceased to be."""
        for sequence in (*self._ready.get(adapter_id, ()), *self.parked(adapter_id)):
            self.remove(sequence)
            self.push(sequence, now)

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
        parked = chain.from_iterable(by_key.values() for by_key in self._parked.values())
        place += sum(bisect_left(queue, rank, key=_rank) for queue in parked)
        others = [len(queue) for one, queue in self._queues.items() if one != name]
        most = place + 1 if self._order.takes_turns else max(others, default=0)
        return place + sum(min(most, length) for length in others)

    def push(self, sequence: Sequence, now: float) -> None:
        """Insert by rank, which does not change while the sequence waits."""
        is_ready = self._is_ready is None or self._is_ready(sequence.request.adapter_id)
        sequence.await_adapter(not is_ready, now)
        self._known_first = None
        for shares in self._shares_of(sequence):
            shares.hold(account_of(sequence.request))
        for queues, name in self._places(sequence):
            insort(queues.setdefault(name, []), sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be queued."""
        self._known_first = None
        for shares in self._shares_of(sequence):
            shares.give_back(account_of(sequence.request))
        for queues, name in self._places(sequence):
            queue = queues[name]
            index = bisect_left(queue, sequence.rank, key=_rank)
            assert queue[index] is sequence, f"{sequence.sequence_id} is not queued"
            del queue[index]
            if not queue:
                del queues[name]
        adapter_id = sequence.request.adapter_id
        if sequence.awaits_adapter and not self._parked[adapter_id]:
            del self._parked[adapter_id]

    def _shares_of(self, sequence: Sequence) -> tuple[Shares, ...]:
        """Those in which a sequence counts."""
        if sequence.request.request_class is RequestClass.BATCH:
            return (self._shares,)
        return self._shares, self._interactive_shares

    def _places(self, sequence: Sequence) -> list[tuple[dict[str, list[Sequence]], str]]:
        """The lists that a sequence is in."""
        adapter_id, name = sequence.request.adapter_id, self._order.queue_of(sequence.request)
        if sequence.awaits_adapter:
            return [(self._parked.setdefault(adapter_id, {}), name)]
        places = [(self._queues, name)]
        if adapter_id and self._is_ready is not None:
            places.append((self._ready, adapter_id))
        return places

    def _all_queues(self) -> Iterator[list[Sequence]]:
        parked = chain.from_iterable(by_key.values() for by_key in self._parked.values())
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
        """Raise AssertionError unless all wait, in order, those whose adapter is ready apart."""
        for one in self:
            is_ready = self._is_ready is None or self._is_ready(one.request.adapter_id)
            assert one.awaits_adapter != is_ready, f"{one.sequence_id} is in the wrong queue"
        assert len(self) == sum(map(len, self._all_queues())), "the count of all is wrong"
        for shares in (self._shares, self._interactive_shares):
            accounts = Counter(
                account_of(one.request) for one in self if shares in self._shares_of(one)
            )
            assert shares.num_held == accounts.total(), "the count of sequences is wrong"
            assert all(shares.held(name) == num for name, num in accounts.items()), (
                "the counts of accounts are wrong"
            )
        assert not self._queues or self._first == self._find_first(), "the head is another one"
        assert all(self._parked.values()), "an adapter is waited for by no sequence"
        with_adapter = [one for one in self if one.request.adapter_id and not one.awaits_adapter]
        num_ready = sum(map(len, self._ready.values()))
        assert self._is_ready is None or num_ready == len(with_adapter), "the ready ones differ"
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
    """Running sequences by rank, in `num_slots` slots, with block tables in `pool`."""

    def __init__(self, pool: KVBlockPool, num_slots: int, order: ServiceOrder) -> None:
        self._pool = pool
        self._block_size = pool.block_size
        self._order = order
        self._num_slots = num_slots
        self._running: list[Sequence] = []
        self._prefilling: list[Sequence] = []  # those with a prompt that is to be continued
        self._free_slots = deque(range(num_slots))
        self._released_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot, best rank first, so that the loop may preempt sequences."""
        return iter(tuple(self._running))

    @property
    def num_free_slots(self) -> int:
        """How many more sequences there may be."""
        return len(self._free_slots)

    @property
    def num_active(self) -> int:
        """How many are not paused; they are first."""
        return _num_active(self._running)

    def num_preemptible(self, may_preempt: Callable[[Sequence], bool]) -> int:
        """How many may be preempted."""
        return sum(map(may_preempt, self._running))

    @property
    def prefilling(self) -> SequenceOf[Sequence]:
        """Those whose prompt is to be continued, by rank, without paused ones."""
        return tuple(self._prefilling[: _num_active(self._prefilling)])

    @property
    def prefill_start(self) -> int | None:
        """Where the first prompt that is to be continued continues; None if there is none."""
        if not self._prefilling or self._prefilling[0].is_paused:
            return None
        return self._prefilling[0].resident.planned

    def prefill_planned(self, sequence: Sequence) -> None:
        """A part of a prompt was placed in a step."""
        residency = sequence.resident
        if residency.planned >= residency.prefill_end:
            self._remove_prefilling(sequence)

    def hits_if_it_fits(self, sequence: Sequence, num_reserved: int = 0) -> tuple[int, ...] | None:
        """The cached blocks that `sequence` would start from; None if it does not fit now.

        It fits if there are blocks for all its known tokens, and one more for each running sequence
        to grow, or `num_reserved` for all of them.
        """
        if not self._free_slots:
            return None
        hits = self._lookup(sequence)
        return hits if self._fits(sequence, hits, (), num_reserved) else None

    def victims_for(self, sequence: Sequence) -> tuple[Sequence, ...]:
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
        hits = self._lookup(sequence) if lower else ()
        if not lower or not self._fits(sequence, hits, lower):
            return ()
        counts = range(len(lower) + 1)
        return tuple(next(lower[:num] for num in counts if self._fits(sequence, hits, lower[:num])))

    def lowest_victim(
        self, sequence: Sequence, has_row: Callable[[Sequence], bool]
    ) -> Sequence | None:
        """The last sequence that ranks after `sequence` and has no row in the step."""
        lower = self._running[bisect_left(self._running, sequence.rank, key=_rank) + 1 :]
        return next((victim for victim in reversed(lower) if not has_row(victim)), None)

    def admit(self, sequence: Sequence, hits: tuple[int, ...], now: float) -> Residency:
        """Assign a slot, the cached blocks `hits`, and new blocks for all other known tokens."""
        if sequence.num_cached_tokens is None:
            sequence.cache_miss = self._cache_miss(sequence, len(hits))
        self._pool.acquire(hits)
        num_tokens = len(sequence.token_ids)
        fresh = self._pool.allocate(self._blocks_for(num_tokens) - len(hits))
        residency = Residency(
            slot=self._free_slots.popleft(),
            blocks=[*hits, *fresh],
            prefill_end=num_tokens,
            planned=len(hits) * self._pool.block_size,
        )
        sequence.admit(residency, now)
        self._order.admitted(sequence)
        insort(self._running, sequence, key=_rank)
        insort(self._prefilling, sequence, key=_rank)
        return residency

    def set_paused(self, sequence: Sequence, is_paused: bool, now: float) -> None:
        """Pause or resume a running sequence; it keeps its slot and its blocks."""
        is_prefilling = self._remove_from_order(sequence)
        sequence.set_paused(is_paused, now)
        insort(self._running, sequence, key=_rank)
        if is_prefilling:
            insort(self._prefilling, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a running sequence."""
        self._order.left(sequence)
        self._remove_from_order(sequence)
        residency = sequence.resident
        self._pool.release(residency.blocks)
        self._released_slots.append(residency.slot)
        self._free_slots.append(residency.slot)

    def take_released_slots(self) -> tuple[int, ...]:
        """The slots that were freed since the last call."""
        released = tuple(self._released_slots)
        self._released_slots.clear()
        return released

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether there are blocks for one more token."""
        return self._fits_into_blocks(sequence) or self._growth(sequence) <= self._pool.num_free

    def num_drafts_that_fit(self, sequence: Sequence) -> int:
        """How many tokens fit after the next one, if every other sequence may need a block too."""
        residency, block_size = sequence.resident, self._pool.block_size
        num_spare = max(0, self._pool.num_free - len(self._running))
        num_held = len(residency.blocks) * block_size - residency.planned
        return max(0, num_held + num_spare * block_size - 1)

    def grow(self, sequence: Sequence, num_tokens: int = 1) -> tuple[int, ...]:
        """Extend the block table for the next tokens; returns the new blocks."""
        residency = sequence.resident
        if residency.planned + num_tokens <= len(residency.blocks) * self._block_size:
            return ()
        growth = self._growth(sequence, num_tokens)
        new_block_ids = self._pool.allocate(growth)
        sequence.resident.blocks.extend(new_block_ids)
        return tuple(new_block_ids)

    def restart(self, sequence: Sequence) -> tuple[int, ...]:
        """Begin to compute all known tokens again; returns the new blocks for the last one."""
        new_block_ids = self.grow(sequence)
        self._remove_prefilling(sequence)
        sequence.resident.restart(len(sequence.token_ids))
        insort(self._prefilling, sequence, key=_rank)
        return new_block_ids

    def register(self, sequence: Sequence) -> None:
        """Index the full blocks whose tokens are known and whose computation is planned."""
        residency, block_size = sequence.resident, self._block_size
        if residency.planned < (len(residency.keys) + 1) * block_size:  # the usual case
            return
        num_full = min(residency.planned, len(sequence.token_ids)) // block_size
        if not self._pool.prefix_caching or len(residency.keys) >= num_full:
            return
        register_next, keys, blocks = self._pool.register_next, residency.keys, residency.blocks
        root, token_ids, digests = sequence.root, sequence.token_ids, sequence.digests
        for start in range(len(keys) * block_size, num_full * block_size, block_size):
            block_tokens = tuple(token_ids[start : start + block_size])
            register_next(keys, root, blocks, block_tokens, digests)

    def check_hits(self, sequence: Sequence) -> None:
        """Raise AssertionError unless a lookup finds the same with and without the hits that a
        queued sequence has kept.
        """
        digests = sequence.digests[: sequence.num_reusable // self._pool.block_size]
        query = (sequence.root, sequence.token_ids, digests)
        found, expected = self._pool.lookup(*query, sequence.known_hits), self._pool.lookup(*query)
        assert found == expected, f"{sequence.sequence_id} has kept hits that are no longer cached"

    def check(self) -> None:
        """Raise AssertionError unless slots, block tables and the pool agree."""
        self._pool.check(sequence.resident.blocks for sequence in self._running)
        slots = [sequence.resident.slot for sequence in self._running]
        assert sorted([*slots, *self._free_slots]) == list(range(self._num_slots)), (
            f"slots {slots} in use and {list(self._free_slots)} free do not add up"
        )
        ranks = [sequence.rank for sequence in self._running]
        assert ranks == sorted(set(ranks)), "the batch is out of order"
        residencies = [(one, one.resident) for one in self._running]
        prefilling = [one for one, stay in residencies if stay.planned < stay.prefill_end]
        assert self._prefilling == prefilling, "the prompts that are to be continued differ"
        for sequence in self._running:
            self._check_resident(sequence)

    def _check_resident(self, sequence: Sequence) -> None:
        name, residency = sequence.sequence_id, sequence.resident
        known = len(sequence.token_ids)
        assert sequence.state is SequenceState.RUNNING, f"{name} runs, it is {sequence.state}"
        assert not residency.invalidated, f"{name} runs on KV of a failed step"
        end = max(known + residency.pending, residency.drafted_end)
        assert residency.planned <= end, f"{name} is planned past its end"
        needed = max(residency.planned, residency.prefill_end, residency.drafted_end)
        assert len(residency.blocks) == self._blocks_for(needed), (
            f"{name} holds {len(residency.blocks)} blocks for {needed} tokens"
        )
        num_full = min(residency.planned, known) // self._pool.block_size
        expected = num_full if self._pool.prefix_caching else 0
        assert len(residency.keys) == expected, f"{name} has {len(residency.keys)} block keys"

    def _remove_from_order(self, sequence: Sequence) -> bool:
        """Returns whether its prompt was to be continued."""
        del self._running[bisect_left(self._running, sequence.rank, key=_rank)]
        return self._remove_prefilling(sequence)

    def _remove_prefilling(self, sequence: Sequence) -> bool:
        place = bisect_left(self._prefilling, sequence.rank, key=_rank)
        is_there = self._prefilling[place : place + 1] == [sequence]
        if is_there:
            del self._prefilling[place]
        return is_there

    def _fits(
        self,
        sequence: Sequence,
        hits: tuple[int, ...],
        leaving: SequenceOf[Sequence],
        num_reserved: int = 0,
    ) -> bool:
        """Whether `sequence` would get a slot and blocks after its `hits`, without `leaving`."""
        if not self._free_slots and not leaving:
            return False
        num_left = len(self._running) - len(leaving)
        num_growing = max(num_left, num_reserved)
        needed = self._blocks_for(len(sequence.token_ids)) - len(hits) + num_growing
        num_held = sum(len(one.resident.blocks) for one in leaving)
        if needed > self._pool.num_free + num_held:  # the usual case, and cheap to check
            return False
        held = Counter(block_id for one in leaving for block_id in one.resident.blocks)
        return needed <= self._pool.num_free_without(held, hits)

    def _lookup(self, sequence: Sequence) -> tuple[int, ...]:
        if not self._pool.prefix_caching:
            return ()
        num_blocks = sequence.num_reusable // self._pool.block_size
        tokens, digests = sequence.token_ids, sequence.digests
        self._pool.extend_digests(digests, sequence.root, tokens, num_blocks)
        known = sequence.known_hits
        sequence.known_hits = self._pool.lookup(sequence.root, tokens, digests[:num_blocks], known)
        return sequence.known_hits.block_ids

    def _cache_miss(self, sequence: Sequence, num_hits: int) -> CacheMiss:
        """Why a sequence gets no more than `num_hits` blocks from the prefix cache."""
        if not self._pool.prefix_caching:
            return CacheMiss.DISABLED
        if num_hits < sequence.num_reusable // self._pool.block_size:
            was_cached = self._pool.was_cached(sequence.digests[num_hits])
            return CacheMiss.EVICTED if was_cached else CacheMiss.NOT_CACHED
        if sequence.num_reusable == len(sequence.token_ids) - 1:
            return CacheMiss.LAST_BLOCK
        is_pooled = sequence.request.pooling is not None
        return CacheMiss.POOLING if is_pooled else CacheMiss.PROMPT_LOGPROBS

    def _fits_into_blocks(self, sequence: Sequence) -> bool:
        """Whether one more token needs no more blocks, which is the usual case."""
        residency = sequence.resident
        return residency.planned < len(residency.blocks) * self._block_size

    def _growth(self, sequence: Sequence, num_tokens: int = 1) -> int:
        residency = sequence.resident
        return self._blocks_for(residency.planned + num_tokens) - len(residency.blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


class Due(enum.Enum):
    """What is to be done with a sequence at a time."""

    EXPIRE = "end it with the text so far"
    SHED = "end it unless it has been admitted: it cannot have its first token in time"
    RELEGATE = "serve others first while it waits: it cannot end in time"


class Deadlines:
    """A heap of times at which something is due for live sequences; `relegates` if some are to be
    put after the others. Entries of finished sequences are removed now and then.
    """

    def __init__(self, relegates: bool = False) -> None:
        self._relegates = relegates
        self._heap: list[tuple[float, int, str, Due, Sequence]] = []
        self._prune_at = 64

    def push(self, sequence: Sequence) -> None:
        """Add a sequence, if it has a deadline."""
        relegate_at_s = sequence.relegate_at_s if self._relegates else None
        times = (
            (sequence.deadline_s, Due.EXPIRE),
            (sequence.shed_at_s, Due.SHED),
            (relegate_at_s, Due.RELEGATE),
        )
        for time_s, due in times:
            if time_s is not None:
                heapq.heappush(self._heap, (time_s, sequence.arrival, due.name, due, sequence))
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if _is_live(entry[-1])]
            heapq.heapify(self._heap)
            self._prune_at = max(64, 2 * len(self._heap))

    def next_s(self) -> float | None:
        """The earliest time; None without any."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Iterator[tuple[Sequence, Due]]:
        """Remove and return what is due for live sequences, earliest first."""
        while self._heap and (self._heap[0][0] <= now or not _is_live(self._heap[0][-1])):
            *_, due, sequence = heapq.heappop(self._heap)
            if _is_live(sequence):
                yield sequence, due


def _num_active(sequences: SequenceOf[Sequence]) -> int:
    if not sequences or not sequences[-1].is_paused:  # paused ones are last
        return len(sequences)
    return bisect_left(sequences, True, key=_is_paused)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _is_live(sequence: Sequence) -> bool:
    return sequence.state is not SequenceState.FINISHED


def _is_paused(sequence: Sequence) -> bool:
    return sequence.is_paused
