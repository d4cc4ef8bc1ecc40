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
from quickstep.server.fields.decode import decode_values
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.errors import RouteNotFound, json_response
from quickstep.server.options import MAX_STORED_RESPONSE_BYTES, MAX_STORED_RESPONSES
from quickstep.server.responses.request_types import InputItemsQuery
from quickstep.server.responses.response_types import (
    DeletedResponse,
    InputItems,
    ListedItem,
    ResponseObject,
)

_ENCODE = msgspec.json.Encoder().encode


class StoredResponse(msgspec.Struct, frozen=True):
    """A finished response.

    Attributes:
        messages: The conversation for the template, with the response, without the instructions.
        input_items: The items of the request, each with an id.
    """

    response: ResponseObject
    messages: tuple[Mapping[str, Any], ...]
    input_items: tuple[ListedItem, ...]


class ResponseStore:
    """At most `max_responses`, of at most `max_bytes` of JSON in total.

    Each response of a continued conversation counts all of its messages, although they share
    memory.
    """

    def __init__(
        self,
        max_responses: int = MAX_STORED_RESPONSES,
        max_bytes: int = MAX_STORED_RESPONSE_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._num_bytes: Counter[str] = Counter()  # bytes by caller
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """The bytes of all stored responses, as JSON."""
        return self._num_bytes.total()

    def put(self, caller: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone is larger than `max_bytes`."""
        size = len(_ENCODE((stored.response, stored.messages, stored.input_items)))
        if size > self._max_bytes:
            return
        with self._lock:
            self._stored[caller, stored.response.id] = (stored, size)
            self._num_bytes[caller] += size
            while len(self._stored) > self._max_responses:
                counts = Counter(name for name, _ in self._stored)
                self._drop_first(counts.most_common(1)[0][0])
            while self._num_bytes.total() > self._max_bytes:
                self._drop_first(self._num_bytes.most_common(1)[0][0])

    def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """The caller's response, which becomes the most recently used one."""
        key = (caller, response_id)
        with self._lock:
            entry = self._stored.get(key)
            if entry is None:
                return None
            self._stored.move_to_end(key)
            return entry[0]

    def item(self, caller: str, item_id: str) -> dict[str, Any] | None:
        """An item of the caller's responses or of their input, as JSON has it."""
        with self._lock:
            known = [entry for (name, _), (entry, _) in self._stored.items() if name == caller]
        for stored in reversed(known):
            for item in (*stored.response.output, *stored.input_items):
                if item.id == item_id:
                    found: dict[str, Any] = msgspec.to_builtins(item)
                    return found
        return None

    def delete(self, caller: str, response_id: str) -> bool:
        """Delete a response; False if the caller has no such response."""
        with self._lock:
            if (caller, response_id) not in self._stored:
                return False
            self._drop((caller, response_id))
            return True

    def _drop_first(self, caller: str) -> None:
        """Drop the caller's least recently used response."""
        self._drop(next(key for key in self._stored if key[0] == caller))

    def _drop(self, key: tuple[str, str]) -> None:
        _, size = self._stored.pop(key)
        self._num_bytes[key[0]] -= size
        if not self._num_bytes[key[0]]:
            del self._num_bytes[key[0]]


class StoredResponses:
    """The routes of stored responses. Each raises RequestError 404 for an unknown id."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def retrieve(self, request: Request) -> Response:
        """Return a finished response."""
        _no_queries(request, ("include",))
        response = self._stored(request).response
        return await asyncio.to_thread(
            json_response, response
        )  # large responses are encoded in a thread

    async def delete(self, request: Request) -> Response:
        """Delete a response."""
        stored = self._stored(request)
        self._store.delete(caller_of(request), stored.response.id)
        return json_response(DeletedResponse(id=stored.response.id))

    async def input_items(self, request: Request) -> Response:
        """Return the request's items, the last one first unless `order` is `asc`."""
        query = decode_values(_query_of(request), InputItemsQuery)
        items = list(self._stored(request).input_items)
        if query.order == "desc":
            items.reverse()
        start = _index_after(query.after, items)
        page = items[start : start + query.limit]
        listed = InputItems(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=start + query.limit < len(items),
        )
        return await asyncio.to_thread(
            json_response, listed
        )  # large requests are encoded in a thread

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
    """Refuse unsupported query parameters."""
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:64]} is not supported in the query", param=name[:64])


def _query_of(request: Request) -> dict[str, str]:
    """The query parameters; clients write a list as `include[]`."""
    return {name.removesuffix("[]"): text for name, text in request.query_params.items()}


def _index_after(item_id: str | None, items: Sequence[ListedItem]) -> int:
    """The index after the item with this id, 0 without one."""
    if item_id is None:
        return 0
    for index, item in enumerate(items):
        if item.id == item_id:
            return index + 1
    raise RequestError(f"after is {item_id[:64]!r}, which is not an item's id", param="after")
