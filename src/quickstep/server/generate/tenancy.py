"""Whose a request is: the account that its work is booked on, and the prefix cache that it sees.

Both follow from the API key. What a client writes into the body divides its own key's account and
cache further, and never reaches another key's. Without keys there is one client, and only the
body tells requests apart.
"""

from __future__ import annotations

__all__ = ["cache_salt_of", "tenant_of_key"]


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
