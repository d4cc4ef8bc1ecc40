"""The responses that clients may continue or retrieve: the store, and the routes that read it.

The store is in memory and bounded; when it is full, it evicts the least recently used responses of
the caller that holds most. Any thread may use it. Only the caller that created a response finds it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.errors import RouteNotFound, json_response
from quickstep.server.openai.request_types import decode_values
from quickstep.server.responses.request_types import InputItemsQuery
from quickstep.server.responses.response_types import DeletedResponse, InputItems, ResponseObject

__all__ = ["ResponseStore", "StoredResponse", "StoredResponses"]

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


class StoredResponses:
    """The routes of what is stored. Each raises RequestError 404 for an id it does not have."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def retrieve(self, request: Request) -> Response:
        """A finished response."""
        _no_queries(request, ("include",))
        response = self._stored(request).response
        return await asyncio.to_thread(json_response, response)  # as large as any answer

    async def delete(self, request: Request) -> Response:
        """Forget a response."""
        stored = self._stored(request)
        self._store.delete(caller_of(request), stored.response.id)
        return json_response(DeletedResponse(id=stored.response.id))

    async def input_items(self, request: Request) -> Response:
        """What the response answers, the last item first unless `order` is `asc`."""
        query = decode_values(_named_once(request), InputItemsQuery)
        items = list(self._stored(request).input_items)
        if query.order == "desc":
            items.reverse()
        start = _place_behind(query.after, items)
        page = items[start : start + query.limit]
        listed = InputItems(
            data=[dict(item) for item in page],
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=start + query.limit < len(items),
        )
        return await asyncio.to_thread(json_response, listed)  # as large as any request

    def _stored(self, request: Request) -> StoredResponse:
        response_id: str = request.path_params["response_id"]
        stored = self._store.get(caller_of(request), response_id)
        if stored is None:
            raise RouteNotFound(
                f"response {response_id[:64]!r} is not found",
                param="response_id",
                code="not_found",
            )
        return stored


def _no_queries(request: Request, known: tuple[str, ...]) -> None:
    """Refuse what is asked for in the query and not done. `include` adds what is there already."""
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:64]} is not supported in the query", param=name[:64])


def _named_once(request: Request) -> dict[str, str]:
    """The query; clients write a list as `include[]`."""
    return {name.removesuffix("[]"): text for name, text in request.query_params.items()}


def _place_behind(item_id: str | None, items: Sequence[Mapping[str, Any]]) -> int:
    if item_id is None:
        return 0
    for place, item in enumerate(items):
        if item["id"] == item_id:
            return place + 1
    raise RequestError(f"after is {item_id[:64]!r}, there is no such item", param="after")
