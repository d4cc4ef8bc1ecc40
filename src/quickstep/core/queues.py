"""Where live sequences are: in the waiting queue or in the running batch; and their deadlines.

Both are sorted by rank, which is unique; paused sequences are last. Owned by `core.scheduler`,
which decides who enters and who leaves. The batch also owns the slots and calls the block pool. A
prompt block is registered for prefix hits when its computation is planned.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from quickstep.core.block_pool import KVBlockPool
from quickstep.core.sequence import Residency, Sequence, SequenceState

__all__ = ["Deadlines", "RunningBatch", "WaitingQueue"]


class WaitingQueue:
    """Sequences that wait to be admitted, for the first time or again after a preemption."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def num_active(self) -> int:
        """How many are not paused; they are first."""
        return bisect_left(self._sequences, True, key=_is_paused)

    @property
    def head(self) -> Sequence | None:
        """The sequence that is admitted next; None if there is none that is not paused."""
        first = self._sequences[0] if self._sequences else None
        return None if first is None or first.is_paused else first

    def push(self, sequence: Sequence) -> None:
        """Insert by rank, which does not change while the sequence waits."""
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be queued."""
        index = bisect_left(self._sequences, sequence.rank, key=_rank)
        assert self._sequences[index] is sequence, f"{sequence.sequence_id} is not queued"
        del self._sequences[index]

    def set_paused(self, sequence: Sequence, is_paused: bool, now: float) -> None:
        """Pause or resume a queued sequence."""
        self.remove(sequence)
        sequence.set_paused(is_paused, now)
        self.push(sequence)

    def check(self) -> None:
        """Raise AssertionError unless all wait, in order."""
        for sequence in self._sequences:
            assert sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
        ranks = [sequence.rank for sequence in self._sequences]
        assert ranks == sorted(set(ranks)), "the queue is out of order"


class RunningBatch:
    """Running sequences by rank, in `num_slots` slots, with block tables in `pool`."""

    def __init__(self, pool: KVBlockPool, num_slots: int) -> None:
        self._pool = pool
        self._num_slots = num_slots
        self._running: list[Sequence] = []
        self._free_slots = deque(range(num_slots))
        self._released_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot, best rank first, so that the loop may preempt sequences."""
        return iter(tuple(self._running))

    @property
    def num_active(self) -> int:
        """How many are not paused; they are first."""
        return bisect_left(self._running, True, key=_is_paused)

    @property
    def has_prefill(self) -> bool:
        """Whether a prompt of a running sequence is to be continued."""
        for one in self._running:  # `num_prefill_left` written out: every step calls this
            residency = one.residency
            if residency and residency.planned < residency.prefill_end and not one.is_paused:
                return True
        return False

    def hits_if_it_fits(self, sequence: Sequence) -> tuple[int, ...] | None:
        """The cached blocks that `sequence` would start from; None if it does not fit now.

        It fits if there are blocks for all its known tokens, and one more for each running sequence
        to grow.
        """
        if not self._free_slots:
            return None
        hits = self._lookup(sequence)
        return hits if self._fits(sequence, hits, ()) else None

    def victims_for(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """The fewest sequences to preempt so that `sequence` fits, last rank first.

        Empty if it fits already, or would not fit even without all those that it may preempt.
        """
        lower: list[Sequence] = []
        for candidate in reversed(self._running):
            if candidate.rank < sequence.rank:
                break
            if sequence.may_preempt(candidate):
                lower.append(candidate)
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
        return next((one for one in reversed(lower) if not has_row(one)), None)

    def admit(self, sequence: Sequence, hits: tuple[int, ...], now: float) -> Residency:
        """Assign a slot, the cached blocks `hits`, and new blocks for all other known tokens."""
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
        insort(self._running, sequence, key=_rank)
        return residency

    def set_paused(self, sequence: Sequence, is_paused: bool, now: float) -> None:
        """Pause or resume a running sequence; it keeps its slot and its blocks."""
        self._remove_from_order(sequence)
        sequence.set_paused(is_paused, now)
        insort(self._running, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a running sequence."""
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

    def grow(self, sequence: Sequence) -> tuple[int, ...]:
        """Extend the block table for one more token; returns the new blocks."""
        if self._fits_into_blocks(sequence):
            return ()
        growth = self._growth(sequence)
        new_block_ids = self._pool.allocate(growth)
        sequence.resident.blocks.extend(new_block_ids)
        return tuple(new_block_ids)

    def register(self, sequence: Sequence) -> None:
        """Index the full blocks whose tokens are known and whose computation is planned."""
        residency, block_size = sequence.resident, self._pool.block_size
        num_full = min(residency.planned, len(sequence.token_ids)) // block_size
        if not self._pool.prefix_caching or len(residency.keys) >= num_full:
            return
        tokens, digests = sequence.token_ids, sequence.digests
        self._pool.extend_digests(digests, sequence.root, tokens, num_full)
        for index in range(len(residency.keys), num_full):
            parent = residency.keys[-1] if residency.keys else sequence.root
            block_tokens = tuple(tokens[index * block_size : (index + 1) * block_size])
            block_id = residency.blocks[index]
            key = self._pool.register(block_id, parent, block_tokens, digests[index])
            residency.keys.append(key)

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
        for sequence in self._running:
            self._check_resident(sequence)

    def _check_resident(self, sequence: Sequence) -> None:
        name, residency = sequence.sequence_id, sequence.resident
        known = len(sequence.token_ids)
        assert sequence.state is SequenceState.RUNNING, f"{name} runs, it is {sequence.state}"
        assert not residency.invalidated, f"{name} runs on KV of a failed step"
        assert residency.planned <= known + residency.pending, f"{name} is planned past its end"
        needed = max(residency.planned, residency.prefill_end)
        assert len(residency.blocks) == self._blocks_for(needed), (
            f"{name} holds {len(residency.blocks)} blocks for {needed} tokens"
        )
        num_full = min(residency.planned, known) // self._pool.block_size
        expected = num_full if self._pool.prefix_caching else 0
        assert len(residency.keys) == expected, f"{name} has {len(residency.keys)} block keys"

    def _remove_from_order(self, sequence: Sequence) -> None:
        del self._running[bisect_left(self._running, sequence.rank, key=_rank)]

    def _fits(
        self, sequence: Sequence, hits: tuple[int, ...], leaving: SequenceOf[Sequence]
    ) -> bool:
        """Whether `sequence` would get a slot and blocks after its `hits`, without `leaving`."""
        if not self._free_slots and not leaving:
            return False
        num_left = len(self._running) - len(leaving)
        needed = self._blocks_for(len(sequence.token_ids)) - len(hits) + num_left
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

    def _fits_into_blocks(self, sequence: Sequence) -> bool:
        """Whether one more token needs no more blocks, which is the usual case."""
        residency = sequence.resident
        return residency.planned < len(residency.blocks) * self._pool.block_size

    def _growth(self, sequence: Sequence) -> int:
        residency = sequence.resident
        return self._blocks_for(residency.planned + 1) - len(residency.blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)


class Deadlines:
    """A heap of live sequences by deadline; finished ones are removed now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._prune_at = 64

    def push(self, sequence: Sequence) -> None:
        """Add a sequence, if it has a deadline."""
        deadline_s = sequence.deadline_s
        if deadline_s is None:
            return
        heapq.heappush(self._heap, (deadline_s, sequence.arrival, sequence))
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if _is_live(entry[2])]
            heapq.heapify(self._heap)
            self._prune_at = max(64, 2 * len(self._heap))

    def next_s(self) -> float | None:
        """The earliest deadline; None without any."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Sequence]:
        """Remove and return the live sequences whose deadline has passed, earliest first."""
        due: list[Sequence] = []
        while self._heap and (self._heap[0][0] <= now or not _is_live(self._heap[0][2])):
            sequence = heapq.heappop(self._heap)[2]
            if _is_live(sequence):
                due.append(sequence)
        return due


def _rank(sequence: Sequence) -> tuple[bool, float, int]:
    return sequence.rank


def _is_live(sequence: Sequence) -> bool:
    return sequence.state is not SequenceState.FINISHED


def _is_paused(sequence: Sequence) -> bool:
    return sequence.is_paused
