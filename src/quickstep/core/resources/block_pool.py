"""The block pool of the paged KV cache: references to each block, and its registered content.

    free ──allocate──> used (ref count > 0) ──release──> free      (content unknown)
                        ^  └──────release──> cached (content registered, ref count 0)
                        └───────acquire────────┘   └──allocate, least recently used first──> used

Ids only, never tensors. Owned and called by `core.scheduler`. Executors run plans in order, so a
block may be released, or registered before it is written, while steps that use it are in flight:
its next holder reads and writes it in a later step. Blocks are never pinned.

Full blocks are identified by a hash chain from the adapter and salt through the token ids. A digest
only finds a candidate block. `BlockKey` decides whether it is a hit: equal token ids under the
*same* parent, so two prefixes share KV only if all tokens before are equal too.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

from quickstep.errors import ConfigError, OutOfBlocks


class PoolStats(msgspec.Struct, frozen=True):
    """Blocks by state (they add up to the pool), and counts since the start."""

    num_free: int
    num_cached: int
    num_used: int
    num_hits: int
    num_evictions: int

    @property
    def num_blocks(self) -> int:
        """All of them."""
        return self.num_free + self.num_cached + self.num_used


class PrefixHits(msgspec.Struct, frozen=True):
    """The result of a lookup and the pool's version at that moment; the next lookup starts here."""

    block_ids: tuple[int, ...]
    version: int


NO_HITS = PrefixHits((), 0)


_DIGEST_BYTES = 16
_NOT_CACHED = object()
_MAX_LOST = 65_536  # digests of lost blocks that are remembered: a few megabytes

# (digest of the parent, token ids of the block) -> digest of the block.
Digest = Callable[[bytes, tuple[int, ...]], bytes]


class ChainRoot(msgspec.Struct, frozen=True):
    """Separates prefix caches: KV depends on the adapter, and tenants may not share blocks."""

    adapter: str = ""
    cache_salt: str = ""


class BlockKey(msgspec.Struct, frozen=True, eq=False):
    """The content of one registered block. Compared by identity: equal keys are one object.

    Not `gc=False`: objects that the collector tracks are freed without a recursion per parent.
    """

    parent: BlockKey | ChainRoot
    token_ids: tuple[int, ...]
    digest: bytes


def _digest_of(root: ChainRoot) -> bytes:
    adapter = root.adapter.encode("utf-8", "surrogatepass")
    salt = root.cache_salt.encode("utf-8", "surrogatepass")
    # The length keeps ("ab", "c") and ("a", "bc") apart.
    prefix = len(adapter).to_bytes(8, "little")
    return blake2b(prefix + adapter + salt, digest_size=_DIGEST_BYTES).digest()


_PLAIN_DIGEST = _digest_of(ChainRoot())


def root_digest(root: ChainRoot) -> bytes:
    """Where the chain of an adapter and salt starts."""
    return _digest_of(root) if root.adapter or root.cache_salt else _PLAIN_DIGEST


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a block of `token_ids` after `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class KVBlockPool:
    """Reference counts, prefix index and eviction order of `num_blocks` KV blocks.

    Attributes:
        retained: Blocks with content that are evicted after all others; read only.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        digest: Digest = chain_digest,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"the KV pool has {num_blocks} blocks of {block_size} tokens, both must be above 0"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._digest = digest
        self._ref_counts = [0] * num_blocks
        self._held: Counter[int] = Counter()  # references of other holders than sequences
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.retained: set[int] = set()
        self._cached_retained: OrderedDict[int, None] = OrderedDict()  # of these; evicted last
        self._version = 0  # how often blocks lost their content's key
        self._unindexed_at = [0] * num_blocks  # the version at which each block last did
        # digests that lost their blocks: the last ones, and those before them
        self._lost: set[bytes] = set()
        self._lost_before: set[bytes] = set()
        self._max_lost = min(num_blocks, _MAX_LOST)
        self._num_hits = 0
        self._num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones that it would evict."""
        return len(self._free) + len(self._cached) + len(self._cached_retained)

    def num_free_besides(self, block_ids: Iterable[int]) -> int:
        """How many blocks `allocate` could give after `block_ids` (hits) have been acquired."""
        return self.num_free - sum(1 for block_id in block_ids if not self._ref_counts[block_id])

    def num_free_without(self, held: Counter[int], block_ids: Iterable[int]) -> int:
        """`num_free_besides(block_ids)`, if the references that `held` counts were released."""
        acquired = set(block_ids)
        num_freed = sum(
            1
            for block_id, count in held.items()
            if count == self._ref_counts[block_id] and block_id not in acquired
        )
        return self.num_free_besides(acquired) + num_freed

    def extend_digests(
        self, digests: list[bytes], root: ChainRoot, token_ids: Sequence[int], num_blocks: int
    ) -> None:
        """Append to `digests` those of the full blocks of `token_ids` up to `num_blocks`."""
        if len(digests) >= num_blocks:
            return
        digest = self._digest
        parent = digests[-1] if digests else root_digest(root)
        for block_tokens in self.contents(token_ids, len(digests), num_blocks):
            parent = digest(parent, block_tokens)
            digests.append(parent)

    def contents(self, token_ids: Sequence[int], first: int, end: int) -> list[tuple[int, ...]]:
        """The token ids of the full blocks of a sequence from the block `first` up to `end`."""
        size = self.block_size
        starts = range(first * size, end * size, size)
        return [tuple(token_ids[start : start + size]) for start in starts]

    def lookup(
        self,
        root: ChainRoot,
        token_ids: Sequence[int],
        digests: Sequence[bytes],
        known: PrefixHits = NO_HITS,
    ) -> PrefixHits:
        """The blocks that hold the longest cached prefix of `token_ids`; at most one a digest.

        `known` is the result of an earlier lookup of the same tokens: blocks that have kept their
        content are still hits and are not compared again. Content that was registered since can
        only make the prefix longer, because equal content is never registered twice.
        """
        hits = list(known.block_ids[: min(self._num_kept(known), len(digests))])
        last_key = self._keys[hits[-1]] if hits else None
        parent: BlockKey | ChainRoot = last_key or root
        for index in range(len(hits), len(digests)):
            digest = digests[index]
            block_id = self._index.get(digest)
            key = None if block_id is None else self._keys[block_id]
            if block_id is None or key is None or key.parent != parent:
                break
            if key.token_ids != self._block_tokens(token_ids, index):
                break
            hits.append(block_id)
            parent = key
        return PrefixHits(tuple(hits), self._version)

    def _num_kept(self, known: PrefixHits) -> int:
        """How many leading blocks of `known` have kept their content."""
        if known.version == self._version:
            return len(known.block_ids)
        unindexed_at = self._unindexed_at
        for index, block_id in enumerate(known.block_ids):
            if unindexed_at[block_id] > known.version:
                return index
        return len(known.block_ids)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a reference to blocks that a lookup found: cached ones become used again."""
        self._refer(block_ids)
        self._num_hits += len(block_ids)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add a reference to blocks with content for something that is no sequence."""
        self._refer(block_ids)
        self._held.update(block_ids)

    def note_held(self, block_ids: Sequence[int]) -> None:
        """Blocks that were allocated are for something that is no sequence."""
        self._held.update(block_ids)

    def release_held(self, block_ids: Sequence[int]) -> None:
        """Remove the reference of something that is no sequence."""
        self._held.subtract(block_ids)
        self.release(block_ids)

    def key_of(self, block_id: int) -> BlockKey:
        """The content of a registered block."""
        key = self._keys[block_id]
        assert key is not None, f"block {block_id} is not registered"
        return key

    def has_content(self, block_id: int, key: BlockKey) -> bool:
        """Whether a block still has this content, and has had it since it was registered."""
        return self._keys[block_id] is key

    def block_of(self, key: BlockKey) -> int | None:
        """The block with this content; None once it has lost it."""
        block_id = self._index.get(key.digest)
        return None if block_id is None or self._keys[block_id] is not key else block_id

    def _refer(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                del self._cached_of(block_id)[block_id]
            self._ref_counts[block_id] += 1

    def _cached_of(self, block_id: int) -> OrderedDict[int, None]:
        """The cached blocks among which one without references is."""
        return self._cached_retained if block_id in self.retained else self._cached

    def retain(self, block_id: int) -> None:
        """Evict a block with content after all others, until `end_retention`."""
        assert self._keys[block_id] is not None, f"block {block_id} is not registered"
        if self._cached.pop(block_id, _NOT_CACHED) is None:
            self._cached_retained[block_id] = None
        self.retained.add(block_id)

    def end_retention(self, block_id: int) -> None:
        """Evict a block that was retained before all others."""
        self.retained.discard(block_id)
        if self._cached_retained.pop(block_id, _NOT_CACHED) is None:
            self._cached[block_id] = None
            self._cached.move_to_end(block_id, last=False)

    def allocate_one(self) -> int:
        """Allocate a block as `allocate` does."""
        if not (self._free or self._cached or self._cached_retained):
            raise OutOfBlocks("a KV block is needed, none is free")
        if self._free:
            block_id = self._free.pop()
        else:
            (block_id,) = self._evict(1)
        self._ref_counts[block_id] = 1
        return block_id

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks of unknown content; evicts cached ones only when none is free.

        Raises:
            OutOfBlocks: Fewer are free; nothing was allocated.
        """
        free, ref_counts = self._free, self._ref_counts
        num_evicted = count - len(free)
        if num_evicted > len(self._cached) + len(self._cached_retained):
            raise OutOfBlocks(f"{count} KV blocks are needed, {self.num_free} are free")
        num_left = max(0, -num_evicted)
        block_ids = free[num_left:]
        block_ids.reverse()  # the last one first
        del free[num_left:]
        if num_evicted > 0:
            block_ids += self._evict(num_evicted)
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one reference from each block."""
        # The tail first: the end of a chain is the least likely to be shared, so evict it first.
        ref_counts, keys, cached = self._ref_counts, self._keys, self._cached
        retained = self.retained
        for block_id in reversed(block_ids):
            count = ref_counts[block_id] = ref_counts[block_id] - 1
            if count:
                continue
            if keys[block_id] is None:
                self._free.append(block_id)
            elif block_id in retained:
                self._cached_retained[block_id] = None
            else:
                cached[block_id] = None

    def register(
        self,
        keys: list[BlockKey],
        root: ChainRoot,
        table: Sequence[int],
        contents: Iterable[tuple[int, ...]],
        digests: list[bytes],
    ) -> None:
        """Index the full used blocks of a table that follow those with `keys`, by their contents;
        append their keys, and their digests if these are not known.

        If the content is indexed already, that block stays and its key is appended. Other content
        under the same digest (a collision, or a chain whose parent was evicted) is replaced.
        """
        index, place = self._index, len(keys)
        parent: BlockKey | ChainRoot = keys[-1] if keys else root
        for token_ids in contents:
            if place == len(digests):
                before = digests[-1] if digests else root_digest(root)
                digests.append(self._digest(before, token_ids))
            digest = digests[place]
            key = self._key_of_content(parent, token_ids, digest) if digest in index else None
            if key is None:
                block_id = table[place]
                self._keys[block_id] = key = BlockKey(parent, token_ids, digest)
                index[digest] = block_id
            keys.append(key)
            parent = key
            place += 1

    def _key_of_content(
        self, parent: BlockKey | ChainRoot, token_ids: tuple[int, ...], digest: bytes
    ) -> BlockKey | None:
        """The key of the block that has this content. Another one with the digest is forgotten."""
        holder = self._index[digest]
        key = self._keys[holder]
        if key is not None and key.parent == parent and key.token_ids == token_ids:
            return key
        self.forget([holder])
        return None

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove blocks from the index: later lookups miss them, their holders keep them."""
        for block_id in block_ids:
            key = self._keys[block_id]
            if key is None:
                continue
            cached = self._cached_of(block_id)
            self._unindex((block_id,))
            if block_id in cached:
                del cached[block_id]
                self._free.append(block_id)

    def was_cached(self, digest: bytes) -> bool:
        """Whether a block with this digest was cached lately, and has lost its content since."""
        was_lost = digest in self._lost or digest in self._lost_before
        return was_lost and digest not in self._index

    def forget_cached(self) -> int:
        """Free every cached block without references; returns how many there were."""
        cached = [*self._cached, *self._cached_retained]
        self.forget(cached)
        return len(cached)

    def stats(self) -> PoolStats:
        """Counts for metrics."""
        num_used = self.num_blocks - self.num_free
        num_cached = len(self._cached) + len(self._cached_retained)
        return PoolStats(len(self._free), num_cached, num_used, self._num_hits, self._num_evictions)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the state agrees with the block tables of all holders."""
        held = +self._held
        for table in tables:
            held.update(table)
            assert len(set(table)) == len(table), f"a block is twice in the table {table}"
        for block_id, count in enumerate(self._ref_counts):
            assert count == held[block_id], (
                f"block {block_id} has {count} references, {held[block_id]} holders have it"
            )
        idle = Counter((*self._free, *self._cached, *self._cached_retained))
        assert all(count == 1 for count in idle.values()), "a block is listed free twice"
        unused = {block_id for block_id, count in enumerate(self._ref_counts) if not count}
        assert set(idle) == unused, "the free lists differ from the unreferenced blocks"
        assert all(self._keys[block_id] is None for block_id in self._free), (
            "a free block is registered"
        )
        indexed = {block_id: key.digest for block_id, key in enumerate(self._keys) if key}
        assert {block_id: digest for digest, block_id in self._index.items()} == indexed, (
            "the index differs from the keys of the blocks"
        )
        cached = {*self._cached, *self._cached_retained}
        assert all(block_id in indexed for block_id in cached), "a cached block has no key"
        assert self.retained <= indexed.keys(), "a retained block has no key"
        assert {*self._cached_retained} == self.retained & cached, "a block is cached elsewhere"

    def _evict(self, count: int) -> list[int]:
        """Take the content of so many cached blocks, least recently used first; of retained ones
        only if there are no others.
        """
        cached = self._cached
        block_ids: list[int] = []
        for _ in range(count):
            block_id, _ = (cached or self._cached_retained).popitem(last=False)
            block_ids.append(block_id)
        self._unindex(block_ids)
        self._num_evictions += count
        return block_ids

    def _unindex(self, block_ids: Sequence[int]) -> None:
        """Blocks with content lose it."""
        keys, index, lost, unindexed_at = self._keys, self._index, self._lost, self._unindexed_at
        self._version = version = self._version + 1
        for block_id in block_ids:
            key = keys[block_id]
            assert key is not None, f"block {block_id} has no content"
            digest = key.digest
            keys[block_id] = None
            unindexed_at[block_id] = version
            del index[digest]
            lost.add(digest)
        if self.retained:
            self.retained.difference_update(block_ids)
        if len(lost) >= self._max_lost:
            self._lost, self._lost_before = set(), lost

    def _block_tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(token_ids[start : start + self.block_size])
