"""`KVBlocks`: the block tables of running sequences, in the block pool.

A sequence is admitted when there are blocks for all its known tokens, those of its cached prefix
included, and some more for the running ones to grow. Each further token may need another block; if
none is free, the scheduler preempts a sequence of lower rank. A prompt block is registered for
prefix hits when its computation is planned.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.resources.resource import Resource
from quickstep.core.sequence import Residency, Sequence
from quickstep.types import CacheMiss

# Part of the expected growth that admission leaves free: after a preemption, per step, and ignored.
_FIRST_RESERVE = 0.25
_RESERVE_DECAY = 0.995
_MIN_RESERVE = 0.01


class KVBlocks(Resource):
    """The blocks that sequences hold. `expected_growth` is how many tokens the running sequences
    are expected to add, `num_usable` how many of the blocks of a cached prefix are of use.
    """

    def __init__(
        self,
        pool: KVBlockPool,
        expected_growth: Callable[[], int],
        num_usable: Callable[[SequenceOf[int]], int] = len,
    ) -> None:
        self._pool = pool
        self._num_usable = num_usable
        self._block_size = pool.block_size
        self._expected_growth = expected_growth
        self._num_holders = 0
        self._reserve = 0.0  # part of the expected growth that admission keeps free

    # -- admission --------------------------------------------------------------------------------

    def fits(self, sequence: Sequence) -> bool:
        """Whether there are blocks for all known tokens, and one more for each running sequence or
        the reserve for all of them.
        """
        self._lookup(sequence)
        return self._fits(sequence, (), self._num_reserved())

    def fits_without(self, sequence: Sequence, leaving: SequenceOf[Sequence]) -> bool:
        """The same without `leaving`, and without a reserve: nothing is to grow at their cost."""
        self._lookup(sequence)
        return self._fits(sequence, leaving, 0)

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        """Begin the block table with the cached blocks that `fits` found, and new ones."""
        hits = self._hits(sequence) if self._pool.prefix_caching else ()
        if sequence.num_cached_tokens is None:
            sequence.cache_miss = self._cache_miss(sequence, len(hits))
        self._pool.acquire(hits)
        fresh = self._pool.allocate(self._blocks_for(len(sequence.token_ids)) - len(hits))
        residency.blocks = [*hits, *fresh]
        residency.capacity = len(residency.blocks) * self._block_size
        residency.planned = len(hits) * self._block_size
        residency.registers_at = self._block_size if self._pool.prefix_caching else sys.maxsize
        self._num_holders += 1

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back; those with registered content stay cached."""
        residency = sequence.residency
        self._pool.release(residency.blocks)
        self._num_holders -= 1

    def num_hit_tokens(self, sequence: Sequence) -> int:
        """How many tokens of a sequence that fits are in the prefix cache."""
        return len(self._hits(sequence)) * self._block_size

    def _hits(self, sequence: Sequence) -> tuple[int, ...]:
        """The cached blocks that a sequence begins after."""
        block_ids = sequence.known_hits.block_ids
        return block_ids[: self._num_usable(block_ids)]

    def _num_reserved(self) -> int:
        """Blocks that an admission leaves free for the growth of running sequences.

        None until a sequence was preempted because another one had to grow; then a part of the
        growth that is expected, which decreases while nothing is preempted (as the new-token ratio
        of SGLang). So the batch neither keeps room for outputs that end early, nor evicts the same
        sequences again and again.
        """
        if self._reserve < _MIN_RESERVE:
            return 0
        return int(self._reserve * self._expected_growth()) // self._block_size

    def _fits(self, sequence: Sequence, leaving: SequenceOf[Sequence], num_reserved: int) -> bool:
        pool, hits = self._pool, self._hits(sequence)
        num_growing = max(self._num_holders - len(leaving), num_reserved)
        needed = self._blocks_for(len(sequence.token_ids)) - len(hits) + num_growing
        num_held = sum(len(holder.residency.blocks) for holder in leaving)
        if needed > pool.num_free + num_held:  # the usual case, and cheap to check
            return False
        if not leaving:
            return needed <= pool.num_free_besides(hits)
        held = Counter(block_id for holder in leaving for block_id in holder.residency.blocks)
        return needed <= pool.num_free_without(held, hits)

    def _lookup(self, sequence: Sequence) -> None:
        """Bring the hits of a waiting sequence up to date."""
        if not self._pool.prefix_caching:
            return
        num_blocks = sequence.num_reusable // self._block_size
        tokens, digests = sequence.token_ids, sequence.digests
        self._pool.extend_digests(digests, sequence.root, tokens, num_blocks)
        known = sequence.known_hits
        sequence.known_hits = self._pool.lookup(sequence.root, tokens, digests[:num_blocks], known)

    def _cache_miss(self, sequence: Sequence, num_hits: int) -> CacheMiss:
        """Why a sequence gets no more than `num_hits` blocks from the prefix cache."""
        if not self._pool.prefix_caching:
            return CacheMiss.DISABLED
        if num_hits < len(sequence.known_hits.block_ids):
            return CacheMiss.NO_STATE
        if num_hits < sequence.num_reusable // self._block_size:
            was_cached = self._pool.was_cached(sequence.digests[num_hits])
            return CacheMiss.EVICTED if was_cached else CacheMiss.NOT_CACHED
        if sequence.num_reusable == len(sequence.token_ids) - 1:
            return CacheMiss.LAST_BLOCK
        is_pooled = sequence.request.pooling is not None
        return CacheMiss.POOLING if is_pooled else CacheMiss.PROMPT_LOGPROBS

    # -- growth -----------------------------------------------------------------------------------

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether there are blocks for one more token."""
        residency = sequence.residency
        has_room = residency.planned < residency.capacity  # the usual case
        return has_room or self._growth(residency) <= self._pool.num_free

    def grow(self, sequence: Sequence, num_tokens: int = 1) -> tuple[int, ...]:
        """Extend the block table for the next tokens; returns the new blocks."""
        residency = sequence.residency
        if residency.planned + num_tokens <= residency.capacity:
            return ()
        new_block_ids = self._pool.allocate(self._growth(residency, num_tokens))
        residency.blocks.extend(new_block_ids)
        residency.capacity = len(residency.blocks) * self._block_size
        return tuple(new_block_ids)

    def preempted_to_grow(self) -> None:
        """A sequence was preempted because another one had to grow: keep more free from now on."""
        self._reserve = min(1.0, max(_FIRST_RESERVE, 1.5 * self._reserve))

    def step_ended(self) -> None:
        """Keep a little less free."""
        self._reserve *= _RESERVE_DECAY

    def num_drafts_that_fit(self, sequence: Sequence) -> int:
        """How many tokens fit after the next one, if every other sequence may need a block too."""
        residency, block_size = sequence.residency, self._block_size
        num_spare = max(0, self._pool.num_free - self._num_holders)
        num_held = len(residency.blocks) * block_size - residency.planned
        return max(0, num_held + num_spare * block_size - 1)

    def register(self, sequence: Sequence) -> None:
        """Index the full blocks whose tokens are known and whose computation is planned; there are
        none below `Residency.registers_at`.
        """
        residency, block_size = sequence.residency, self._block_size
        num_full = min(residency.planned, len(sequence.token_ids)) // block_size
        if not self._pool.prefix_caching:
            return
        keys = residency.keys
        contents = self._pool.contents(sequence.token_ids, len(keys), num_full)
        self._pool.register(keys, sequence.root, residency.blocks, contents, sequence.digests)
        residency.registers_at = (len(keys) + 1) * block_size
        if residency.state is not None:
            residency.state.registered(keys)

    def _growth(self, residency: Residency, num_tokens: int = 1) -> int:
        return self._blocks_for(residency.planned + num_tokens) - len(residency.blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # -- checks -----------------------------------------------------------------------------------

    def check_hits(self, sequence: Sequence) -> None:
        """Raise AssertionError unless a lookup finds the same with and without the hits that a
        queued sequence has kept.
        """
        digests = sequence.digests[: sequence.num_reusable // self._block_size]
        query = (sequence.root, sequence.token_ids, digests)
        found, expected = self._pool.lookup(*query, sequence.known_hits), self._pool.lookup(*query)
        assert found == expected, f"{sequence.sequence_id} has kept hits that are no longer cached"

    def check(self, running: Iterable[Sequence]) -> None:
        """The pool agrees with the block tables, and these with the tokens."""
        holders = tuple(running)
        self._pool.check(sequence.residency.blocks for sequence in holders)
        assert self._num_holders == len(holders), "the count of holders is wrong"
        for sequence in holders:
            self._check_table(sequence)

    def _check_table(self, sequence: Sequence) -> None:
        name, residency = sequence.sequence_id, sequence.residency
        needed = max(residency.planned, residency.prefill_end, residency.drafted_end)
        assert len(residency.blocks) == self._blocks_for(needed), (
            f"{name} holds {len(residency.blocks)} blocks for {needed} tokens"
        )
        assert residency.capacity == len(residency.blocks) * self._block_size, f"{name}: capacity"
        num_full = min(residency.planned, len(sequence.token_ids)) // self._block_size
        expected = num_full if self._pool.prefix_caching else 0
        assert len(residency.keys) == expected, f"{name} has {len(residency.keys)} block keys"
