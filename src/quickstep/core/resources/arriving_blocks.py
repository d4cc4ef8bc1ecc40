"""`ArrivingBlocks`: blocks of a pool that something other than a step fills, in order.

    allocated, held ──> filled, registered ──> released: a cached prefix, as any other

From another engine (`kv_transfers`) or from a tier (`kv_tiers`). Steps that were in flight when the
blocks were allocated may still read and write them: fill them after those have ended.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from quickstep.core.resources.block_pool import BlockKey, ChainRoot, KVBlockPool


class ArrivingBlocks:
    """The leading blocks of `token_ids`: `hits` are cached, the others are allocated here.

    Attributes:
        fresh: The allocated ones, in order.
    """

    def __init__(
        self,
        pool: KVBlockPool,
        root: ChainRoot,
        token_ids: SequenceOf[int],
        digests: list[bytes],
        hits: SequenceOf[int],
    ) -> None:
        self._pool = pool
        self._root = root
        self._token_ids = token_ids
        self._digests = digests
        pool.hold(hits)
        fresh = pool.allocate(len(token_ids) // pool.block_size - len(hits))
        pool.note_held(fresh)
        self.fresh = tuple(fresh)
        self._table = [*hits, *fresh]
        self._keys: list[BlockKey] = [pool.key_of(block_id) for block_id in hits]

    @property
    def num_held(self) -> int:
        """Blocks that no sequence may have before `release`."""
        return len(self._table)

    @property
    def num_filled(self) -> int:
        """Those of `fresh` that have their content."""
        return len(self._keys) - len(self._table) + len(self.fresh)

    def filled(self, num_blocks: int) -> None:
        """The next so many blocks have their content: sequences may use them."""
        num_filled = len(self._keys)
        contents = self._pool.contents(self._token_ids, num_filled, num_filled + num_blocks)
        self._pool.register(self._keys, self._root, self._table, contents, self._digests)

    def release(self) -> None:
        """Nothing writes to them any more: those with content are cached."""
        self._pool.release_held(self._table)
