"""Identities of full KV blocks: a hash chain from the adapter and salt through the token ids.

A digest finds a candidate block; it never decides. A hit is decided by `BlockKey`: equal token
ids under the *same* parent, so two prefixes share KV only if every token before is equal too.
Used by `core.block_pool`, which owns the keys, and by `core.scheduler`, which keeps digests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

__all__ = ["BlockKey", "ChainRoot", "Digest", "chain_digest", "root_digest"]

_DIGEST_BYTES = 16

# (digest of the parent, token ids of the block) -> digest of the block.
Digest = Callable[[bytes, Sequence[int]], bytes]


class ChainRoot(msgspec.Struct, frozen=True):
    """What separates prefix caches: KV depends on the adapter, and tenants may not share."""

    adapter: str = ""
    cache_salt: str = ""


class BlockKey(msgspec.Struct, frozen=True, eq=False):
    """The content of one registered block. Compared by identity: two equal keys are one object."""

    parent: BlockKey | ChainRoot
    token_ids: tuple[int, ...]
    digest: bytes


def root_digest(root: ChainRoot) -> bytes:
    """Where the chain of an adapter and salt starts."""
    adapter = root.adapter.encode("utf-8", "surrogatepass")
    salt = root.cache_salt.encode("utf-8", "surrogatepass")
    # The length keeps ("ab", "c") and ("a", "bc") apart.
    prefix = len(adapter).to_bytes(8, "little")
    return blake2b(prefix + adapter + salt, digest_size=_DIGEST_BYTES).digest()


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a block of `token_ids` behind `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()
