"""Whose a request is: the account that its work is booked on, the prefix cache that it sees, and
its place in the queue.

All follow from the API key. What a client writes into the body divides its own key's account and
cache further, and never reaches another key's. Without keys there is one client, and only the
body tells requests apart.
"""

from __future__ import annotations

from quickstep.server.api_keys import ApiKeys, PriorityRange

__all__ = ["cache_salt_of", "priority_of_key", "tenant_of_key"]

_WITHIN_BATCH = PriorityRange()


def tenant_of_key(caller: str, label: str) -> str:
    """The account: the key's name, then the client's own label. Names of keys hold no slash."""
    if not caller:
        return label
    return f"{caller}/{label}" if label else caller


def cache_salt_of(caller: str, salt: str, is_shared: bool) -> str:
    """What separates prefix caches. `is_shared` lets keys hit each other's prompts.

    The length in front makes it unambiguous: two keys never get the same salt.
    """
    return salt if is_shared or not caller else f"{len(caller)}:{caller}{salt}"


def priority_of_key(caller: str, priority: int, keys: ApiKeys, added: int = 0) -> int:
    """The priority, if the key may have it. Raises RequestError.

    `added` is for the lines of batches: what they ask for orders them among each other, and takes
    none of them to the front.
    """
    allowed = keys.priorities_of(caller).check(priority)
    if not added:
        return allowed
    return added + max(_WITHIN_BATCH.low, min(allowed, _WITHIN_BATCH.high))
