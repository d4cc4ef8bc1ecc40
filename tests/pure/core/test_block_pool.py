"""The block pool on its own: counts, hits, eviction order, collisions; then random operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scheduler_world import CountingPool, weak_digest

from quickstep.core.resources.block_pool import (
    NO_HITS,
    BlockKey,
    ChainRoot,
    KVBlockPool,
    PrefixHits,
    chain_digest,
    root_digest,
)
from quickstep.errors import ConfigError, OutOfBlocks

BASE = ChainRoot()


def fill(pool: KVBlockPool, tokens: tuple[int, ...], root: ChainRoot = BASE) -> list[int]:
    """Allocate blocks for `tokens` and register the full ones, as a scheduler would."""
    size = pool.block_size
    blocks = pool.allocate(-(-len(tokens) // size))
    pool.register([], root, blocks, pool.contents(tokens, 0, len(tokens) // size), [])
    return blocks


def hits(pool: KVBlockPool, tokens: tuple[int, ...], root: ChainRoot = BASE) -> list[int]:
    digests: list[bytes] = []
    pool.extend_digests(digests, root, tokens, len(tokens) // pool.block_size)
    return list(pool.lookup(root, tokens, digests).block_ids)


def test_allocate_takes_all_or_nothing() -> None:
    pool = KVBlockPool(4, 2)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match=r"2 KV blocks are needed, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert len(pool.allocate(1)) == 1


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 blocks"):
        KVBlockPool(0, 16)


def test_released_full_blocks_are_hit_until_they_are_evicted() -> None:
    pool = KVBlockPool(4, 2)
    blocks = fill(pool, (1, 2, 3, 4, 5))
    pool.release(blocks)
    assert hits(pool, (1, 2, 3, 4, 5, 6)) == blocks[:2]
    pool.allocate(4)
    assert hits(pool, (1, 2, 3, 4)) == []
    assert pool.stats().num_evictions == 2


def test_lookup_changes_nothing() -> None:
    pool = KVBlockPool(4, 2)
    pool.release(fill(pool, (1, 2, 3, 4)))
    before = pool.stats()
    hits(pool, (1, 2, 3, 4))
    assert pool.stats() == before


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = KVBlockPool(4, 1)
    pool.release(fill(pool, (7,)))
    pool.allocate(3)
    assert hits(pool, (7,)) == [0]
    assert pool.stats().num_evictions == 0


def test_the_least_recently_used_chain_goes_first_and_its_tail_before_its_head() -> None:
    pool = KVBlockPool(4, 1)
    old, new = fill(pool, (1, 2)), fill(pool, (3, 4))
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert hits(pool, (1, 2)) == old[:1]
    pool.allocate(1)
    assert hits(pool, (1, 2)) == []
    assert hits(pool, (3, 4)) == new


def test_forgetting_what_is_cached_keeps_the_blocks_of_running_sequences() -> None:
    pool = KVBlockPool(6, 1)
    old, running = fill(pool, (1, 2, 3)), fill(pool, (1, 4))
    pool.release(old)
    assert pool.forget_cached() == 3
    assert pool.forget_cached() == 0
    assert hits(pool, (1, 2, 3)) == []
    assert pool.stats().num_evictions == 0
    pool.check([running])
    pool.release(running)
    pool.check([])


def test_a_shared_block_lives_until_its_last_holder_releases_it() -> None:
    pool = KVBlockPool(2, 1)
    blocks = fill(pool, (1,))
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.stats().num_used == 1
    pool.check([blocks])
    pool.release(blocks)
    assert pool.stats().num_cached == 1
    pool.check([])


def test_adapters_and_tenants_do_not_share() -> None:
    pool = KVBlockPool(8, 1)
    fill(pool, (1,), ChainRoot("poet", "bank"))
    for root in (BASE, ChainRoot("poet"), ChainRoot("", "bank"), ChainRoot("poetb", "ank")):
        assert hits(pool, (1,), root) == []
    assert len(hits(pool, (1,), ChainRoot("poet", "bank"))) == 1


def test_root_digests_keep_adapter_and_salt_apart() -> None:
    assert root_digest(ChainRoot("ab", "c")) != root_digest(ChainRoot("a", "bc"))


def test_chain_digests_depend_on_what_is_before() -> None:
    assert chain_digest(b"x", (1, 2)) != chain_digest(b"y", (1, 2))
    assert chain_digest(b"x", (1, 2)) != chain_digest(b"x", (2, 1))


def test_equal_content_is_indexed_once_and_gives_one_key() -> None:
    pool = KVBlockPool(4, 1)
    first, second = fill(pool, (1, 2)), fill(pool, (1, 2))
    assert hits(pool, (1, 2)) == first
    pool.release(second)
    assert pool.stats().num_cached == 0  # the copies are not registered
    pool.check([first])


def test_a_collision_never_hits_other_tokens() -> None:
    pool = KVBlockPool(8, 1, digest=lambda parent, token_ids: b"same")
    fill(pool, (1,))
    assert hits(pool, (2,)) == []
    assert len(hits(pool, (1,))) == 1
    latest = fill(pool, (2,))
    assert hits(pool, (2,)) == latest  # the latest content has the digest
    assert hits(pool, (1,)) == []


def test_a_block_behind_a_colliding_parent_is_not_hit() -> None:
    digests = {1: b"p", 2: b"p", 9: b"c"}  # the parents 1 and 2 collide
    pool = KVBlockPool(8, 1, digest=lambda parent, token_ids: digests[token_ids[0]])
    fill(pool, (1, 9))
    parent = fill(pool, (2,))
    assert hits(pool, (2, 9)) == parent


def test_forgotten_blocks_miss_and_stay_with_their_holders() -> None:
    pool = KVBlockPool(4, 1)
    held, idle = fill(pool, (1, 2)), fill(pool, (3,))
    pool.release(idle)
    pool.forget([*held, *idle])
    assert hits(pool, (1, 2)) == hits(pool, (3,)) == []
    assert pool.stats().num_cached == 0
    pool.check([held])


def test_num_free_besides_counts_idle_hits_once() -> None:
    pool = KVBlockPool(4, 1)
    held = fill(pool, (1,))
    idle = fill(pool, (2,))
    pool.release(idle)
    assert pool.num_free == 3
    assert pool.num_free_besides([*held, *idle]) == 2


def test_a_lookup_continues_from_what_an_earlier_one_found() -> None:
    pool = CountingPool(8, 2)
    tokens = (1, 2, 3, 4, 5, 6, 7, 8)
    digests: list[bytes] = []
    pool.extend_digests(digests, BASE, tokens, 4)
    first = fill(pool, tokens[:4])
    found = pool.lookup(BASE, tokens, digests)
    assert found.block_ids == tuple(first)
    longer = fill(pool, tokens)  # the same content in its first half, so that stays where it is
    pool.num_read = 0
    found = pool.lookup(BASE, tokens, digests, found)
    assert found.block_ids == (*first, *longer[2:])
    assert pool.num_read == 2
    assert pool.lookup(BASE, tokens, digests[:1], found).block_ids == tuple(first[:1])
    assert pool.lookup(BASE, tokens, digests, found) == found
    assert pool.num_read == 2


def test_a_lookup_compares_again_from_the_first_block_that_lost_its_content() -> None:
    pool = CountingPool(8, 2)
    tokens = (1, 2, 3, 4, 5, 6)
    digests: list[bytes] = []
    pool.extend_digests(digests, BASE, tokens, 3)
    blocks = fill(pool, tokens)
    found = pool.lookup(BASE, tokens, digests)
    pool.forget([blocks[1]])
    found = pool.lookup(BASE, tokens, digests, found)
    assert found.block_ids == (blocks[0],)
    pool.release(blocks)
    fill(pool, (9,) * 16)  # takes every block
    assert pool.lookup(BASE, tokens, digests, found).block_ids == ()


def test_lost_content_is_remembered_for_as_many_losses_as_there_are_blocks() -> None:
    pool = KVBlockPool(2, 1)
    pool.release(fill(pool, (1,)))
    digest = chain_digest(root_digest(BASE), (1,))
    assert not pool.was_cached(digest)
    for token in range(2, 5):  # the third one evicts the first
        pool.release(fill(pool, (token,)))
    assert pool.was_cached(digest)
    pool.release(fill(pool, (5,)))
    assert pool.was_cached(digest)
    pool.release(fill(pool, (1,)))
    assert not pool.was_cached(digest)  # it is again
    for token in range(6, 14):
        pool.release(fill(pool, (token,)))
    assert not pool.was_cached(digest)


def test_a_chain_of_a_million_blocks_is_freed_without_a_recursion() -> None:
    key: BlockKey | ChainRoot = BASE
    for _ in range(1_000_000):
        key = BlockKey(key, (1,), b"")
    del key


def test_check_names_a_leak() -> None:
    pool = KVBlockPool(2, 1)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="block 0 has 1 references, 0 holders have it"):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """Random holders; every hit is compared with what was really put into the block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVBlockPool(6, 2, digest=weak_digest)
        self.tables: list[list[int]] = []
        self.known: dict[tuple[int, ...], PrefixHits] = {}  # of an earlier lookup of the tokens
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple))
    def admit(self, tokens: tuple[int, ...]) -> None:
        digests: list[bytes] = []
        self.pool.extend_digests(digests, BASE, tokens, (len(tokens) - 1) // 2)
        afresh = self.pool.lookup(BASE, tokens, digests)
        known = self.pool.lookup(BASE, tokens, digests, self.known.get(tokens, NO_HITS))
        assert known == afresh
        self.known[tokens] = known
        found = afresh.block_ids
        for index, block_id in enumerate(found):
            assert self.content[block_id] == tokens[: 2 * index + 2]
        needed = -(-len(tokens) // 2) - len(found)
        if needed > self.pool.num_free_besides(found):
            return
        self.pool.acquire(found)
        table = [*found, *self.pool.allocate(needed)]
        keys = [self.pool.key_of(block_id) for block_id in found]
        contents = self.pool.contents(tokens, len(found), len(tokens) // 2)
        self.pool.register(keys, BASE, table, contents, digests)
        assert len(keys) == len(tokens) // 2
        assert len(digests) == max(len(keys), (len(tokens) - 1) // 2)
        for index in range(len(found), len(keys)):
            self.content[table[index]] = tokens[: 2 * index + 2]
        self.tables.append(table)

    @rule(number=st.integers(0, 5))
    def release(self, number: int) -> None:
        if number < len(self.tables):
            self.pool.release(self.tables.pop(number))

    @rule(block_id=st.integers(0, 5))
    def forget(self, block_id: int) -> None:
        self.pool.forget([block_id])

    @invariant()
    def books_agree(self) -> None:
        self.pool.check(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
