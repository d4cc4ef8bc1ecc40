"""The responses that clients may continue or look up: bounded, in memory, the least used go first.

Owned by the `Responses` surface, used by any thread. A response is found by the caller
who made it and by nobody else. What is dropped is as if it had never been.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from quickstep.dataclass import dataclass
from quickstep.server.response_responses import ResponseObject

__all__ = ["ResponseStore", "StoredResponse"]

_ENCODE = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredResponse:
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
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """Of all that is stored."""
        return self._num_bytes

    def put(self, caller: str, stored: StoredResponse) -> None:
        """Keep a response; one that is larger than everything is not kept."""
        size = len(_ENCODE((stored.response, stored.messages, stored.input_items)))
        if size > self._max_bytes:
            return
        with self._lock:
            self._stored[caller, stored.response.id] = (stored, size)
            self._num_bytes += size
            while self._num_bytes > self._max_bytes or len(self._stored) > self._max_responses:
                _, (_, dropped) = self._stored.popitem(last=False)
                self._num_bytes -= dropped

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
            found = self._stored.pop((caller, response_id), None)
            if found is not None:
                self._num_bytes -= found[1]
            return found is not None
