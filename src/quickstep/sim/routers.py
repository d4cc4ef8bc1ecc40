"""Which replica gets a request: what a router may do with what it knows.

Called by `sim.replicas`, in the order of arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from quickstep.types import Request

__all__ = ["ROUTERS", "FewestRequests", "PrefixAffinity", "RoundRobin", "Router"]

_BLOCK_TOKENS = 16
_SPILL = 2.0  # a prefix goes elsewhere if its replica has so many times the mean, and as many more


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, request: Request, loads: Sequence[int | None]) -> int:
        """A replica that is up; `loads` has each one's live requests, None if it is down."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, loads: Sequence[int | None]) -> int:
        """`Router.choose`."""
        while loads[self._next % len(loads)] is None:
            self._next += 1
        self._next += 1
        return (self._next - 1) % len(loads)


class FewestRequests:
    """The one with the fewest live requests; of several, the first."""

    def choose(self, request: Request, loads: Sequence[int | None]) -> int:
        """`Router.choose`."""
        return min((load, index) for index, load in enumerate(loads) if load is not None)[1]


class PrefixAffinity:
    """The replica that last had the longest part of the prompt, if that is half of it at least and
    the replica has not far more requests than the others; else the one with the fewest. As the
    cache-aware router of SGLang.
    """

    def __init__(self) -> None:
        self._replica_of: dict[int, int] = {}  # by the hash of a prompt's first blocks
        self._fewest = FewestRequests()

    def choose(self, request: Request, loads: Sequence[int | None]) -> int:
        """`Router.choose`."""
        keys = list(_prefix_hashes(request.prompt_token_ids))
        chosen = self._with_prefix(keys, loads)
        if chosen is None:
            chosen = self._fewest.choose(request, loads)
        self._replica_of.update(dict.fromkeys(keys, chosen))
        return chosen

    def _with_prefix(self, keys: Sequence[int], loads: Sequence[int | None]) -> int | None:
        up = [load for load in loads if load is not None]
        most = _SPILL * (1 + sum(up) / len(up))
        for key in reversed(keys[len(keys) // 2 :]):
            known = self._replica_of.get(key)
            load = None if known is None else loads[known]
            if load is not None:
                return known if load <= most else None
        return None


def _prefix_hashes(token_ids: Sequence[int]) -> Iterable[int]:
    """Of the first block of a prompt, the first two, and so on."""
    key = 0
    for end in range(_BLOCK_TOKENS, len(token_ids) + 1, _BLOCK_TOKENS):
        key = hash((key, tuple(token_ids[end - _BLOCK_TOKENS : end])))
        yield key


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "fewest-requests": FewestRequests,
    "prefix": PrefixAffinity,
}
