"""The responses that clients may continue or look up: bounded, in memory, the least used go first,
of the caller who holds most.

Owned by the `Responses` API, used by any thread. A response is found by the caller
who made it and by nobody else. What is dropped is as if it had never been.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from quickstep.server.responses.response_types import ResponseObject

__all__ = ["ResponseStore", "StoredResponse"]

_ENCODE = msgspec.json.Encoder().encode


class StoredResponse(msgspec.Struct, frozen=True):
    """A finished response.

    Attributes:
        messages: The conversation for the template, the answer included, instructions not.
        input_items: What the request gave, each with an id.
    """

    response: ResponseObject
    messages: tuple[Mapping[str, Any], ...]
    input_items: tuple[Mapping[str, Any], ...]


class ResponseStore:
    """At most `max_responses` of `max_bytes` together, as they would be in JSON.

    A continued conversation counts whole again, although memory holds its beginning once.
    """

    def __init__(self, max_responses: int = 4096, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._held: Counter[str] = Counter()  # bytes by caller
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """Of all that is stored."""
        return self._held.total()

    def put(self, caller: str, stored: StoredResponse) -> None:
        """Keep a response; one that is larger than everything is not kept."""
        size = len(_ENCODE((stored.response, stored.messages, stored.input_items)))
        if size > self._max_bytes:
            return
        with self._lock:
            self._stored[caller, stored.response.id] = (stored, size)
            self._held[caller] += size
            while len(self._stored) > self._max_responses:
                counts = Counter(name for name, _ in self._stored)
                self._drop_first(counts.most_common(1)[0][0])
            while self._held.total() > self._max_bytes:
                self._drop_first(self._held.most_common(1)[0][0])

    def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """The caller's response; it is used now."""
        key = (caller, response_id)
        with self._lock:
            found = self._stored.get(key)
            if found is None:
                return None
            self._stored.move_to_end(key)
            return found[0]

    def delete(self, caller: str, response_id: str) -> bool:
        """Whether there was such a response."""
        with self._lock:
            if (caller, response_id) not in self._stored:
                return False
            self._drop((caller, response_id))
            return True

    def _drop_first(self, caller: str) -> None:
        """The one of a caller that was used longest ago."""
        self._drop(next(key for key in self._stored if key[0] == caller))

    def _drop(self, key: tuple[str, str]) -> None:
        _, size = self._stored.pop(key)
        self._held[key[0]] -= size
        if not self._held[key[0]]:
            del self._held[key[0]]
