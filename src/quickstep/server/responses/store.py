"""The responses that clients may continue or retrieve: the store, and the routes that read it.

The store is in memory and bounded in number, bytes and age; when it is full, it evicts the least
recently used responses of the caller that holds most. A file follows it if the operator has named
one (`stored_file`). Any thread may use it. Only the caller that created a response finds it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import ConfigError, RequestError
from quickstep.server.fields.decode import decode_values
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.generate.generation import BackgroundWriter
from quickstep.server.http.errors import RouteNotFound, json_response
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.kept_streams.kept_request import RESPONSE_NAME, followed, offset_of
from quickstep.server.kept_streams.kept_stream import KeptStream, KeptStreams
from quickstep.server.options import (
    MAX_STORED_RESPONSE_AGE_S,
    MAX_STORED_RESPONSE_BYTES,
    MAX_STORED_RESPONSES,
)
from quickstep.server.responses.request_types import InputItemsQuery, RetrieveQuery
from quickstep.server.responses.response_types import (
    DeletedResponse,
    InputItems,
    ListedItem,
    ResponseError,
    ResponseObject,
)

if TYPE_CHECKING:
    from quickstep.server.responses.stored_file import ResponseFile

_SWEEP_EVERY_S = 60.0
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


_Content = tuple[ResponseObject, tuple[dict[str, Any], ...], tuple[ListedItem, ...]]


class _Entry(msgspec.Struct, frozen=True):
    stored: StoredResponse
    num_bytes: int
    stored_at: float


class ResponseStore:
    """At most `max_responses`, of at most `max_bytes` of JSON in total, each for `max_age_s`.

    Each response of a continued conversation counts all of its messages, although they share
    memory.

    Args:
        path: The file that follows the store; None for none.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        max_responses: int = MAX_STORED_RESPONSES,
        max_bytes: int = MAX_STORED_RESPONSE_BYTES,
        max_age_s: float = MAX_STORED_RESPONSE_AGE_S,
        path: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._path = path
        self._clock = clock
        self._file: ResponseFile | None = None
        self._swept_at = clock()
        self._stored: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._num_bytes: Counter[str] = Counter()  # bytes by caller
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """The bytes of all stored responses, as JSON."""
        return self._num_bytes.total()

    @property
    def has_file(self) -> bool:
        """Whether `open` and `close` read and write a file."""
        return self._path is not None

    def open(self) -> None:
        """Read the file, if there is one. Raises ConfigError."""
        if self._path is None:
            return
        # few servers have one, and SQLite takes time to import
        from quickstep.server.responses.stored_file import ResponseFile

        self._file = ResponseFile(self._path)
        for row in self._file.open():
            try:
                content = msgspec.json.decode(row.content, type=_Content)
            except msgspec.MsgspecError as error:
                self.close()
                raise ConfigError(
                    f"--response-store {self._path} has a response that cannot be read "
                    f"({row.response_id}: {error}); choose another file"
                ) from None
            stored = _interrupted(StoredResponse(*content))
            with self._lock:
                entry = _Entry(stored, len(row.content), row.stored_at)
                self._insert((row.key_name, row.response_id), entry)
        with self._lock:
            self._drop_expired()

    def close(self) -> None:
        """Write what the file does not have yet. Idempotent."""
        if self._file is not None:
            self._file.close()

    async def flush(self) -> bool:
        """Wait until the file has all changes so far; False if it cannot be written."""
        return self._file is None or await asyncio.to_thread(self._file.flush)

    def begin(self, caller: str, stored: StoredResponse) -> None:
        """A response begins that its client will look for: if the server ends before it, the next
        one has it as failed.
        """
        self.put(caller, stored)

    def put(self, caller: str, stored: StoredResponse) -> None:
        """Store a response in the place of the earlier one with its id, unless it is larger than
        `max_bytes`.
        """
        content = _content(stored)
        now, key = self._clock(), (caller, stored.response.id)
        with self._lock:
            if key in self._stored:
                self._forget(key)
            if len(content) > self._max_bytes:
                if self._file is not None:
                    self._file.delete(*key)
                return
            if self._file is not None:
                self._file.put(*key, int(now), content)
            self._insert(key, _Entry(stored, len(content), now))
            if now - self._swept_at > _SWEEP_EVERY_S:
                self._drop_expired()

    def get(self, caller: str, response_id: str) -> StoredResponse | None:
        """The caller's response, which becomes the most recently used one."""
        key = (caller, response_id)
        with self._lock:
            entry = self._stored.get(key)
            if entry is None or self._has_expired(entry):
                return None
            self._stored.move_to_end(key)
            return entry.stored

    def num_bytes_of(self, caller: str, response_id: str) -> int:
        """The bytes of a stored response as JSON, with its input; 0 if there is none."""
        with self._lock:
            entry = self._stored.get((caller, response_id))
            return 0 if entry is None else entry.num_bytes

    def item(self, caller: str, item_id: str) -> dict[str, Any] | None:
        """An item of the caller's responses or of their input, as JSON has it."""
        with self._lock:
            known = [
                entry.stored
                for (name, _), entry in self._stored.items()
                if name == caller and not self._has_expired(entry)
            ]
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

    def _insert(self, key: tuple[str, str], entry: _Entry) -> None:
        self._stored[key] = entry
        self._num_bytes[key[0]] += entry.num_bytes
        while len(self._stored) > self._max_responses:
            counts = Counter(name for name, _ in self._stored)
            self._drop_first(counts.most_common(1)[0][0])
        while self._num_bytes.total() > self._max_bytes:
            self._drop_first(self._num_bytes.most_common(1)[0][0])

    def _has_expired(self, entry: _Entry) -> bool:
        return self._clock() - entry.stored_at > self._max_age_s

    def _drop_expired(self) -> None:
        self._swept_at = self._clock()
        for key in [key for key, entry in self._stored.items() if self._has_expired(entry)]:
            self._drop(key)

    def _drop_first(self, caller: str) -> None:
        """Drop the caller's least recently used response."""
        self._drop(next(key for key in self._stored if key[0] == caller))

    def _drop(self, key: tuple[str, str]) -> None:
        self._forget(key)
        if self._file is not None:
            self._file.delete(*key)

    def _forget(self, key: tuple[str, str]) -> None:
        """Have it no longer in memory."""
        self._num_bytes[key[0]] -= self._stored.pop(key).num_bytes
        if not self._num_bytes[key[0]]:
            del self._num_bytes[key[0]]


def _content(stored: StoredResponse) -> bytes:
    return _ENCODE((stored.response, stored.messages, stored.input_items))


def _interrupted(stored: StoredResponse) -> StoredResponse:
    """A response as it is after the end of its server: one that was in progress has failed."""
    if stored.response.status != "in_progress":
        return stored
    error = ResponseError("server_error", "the server ended before the response; send it again")
    return replace(stored, response=replace(stored.response, status="failed", error=error))


class StoredResponses:
    """The routes of stored responses, and of those that run in the background. Each raises
    RequestError 404 for an unknown id.
    """

    def __init__(self, store: ResponseStore, streams: KeptStreams, lanes: WorkLanes) -> None:
        self._store = store
        self._streams = streams
        self._lanes = lanes

    async def retrieve(self, request: Request) -> Response:
        """Return a finished response, or the present state or the events of a running one."""
        query = decode_values(_query_of(request), RetrieveQuery)
        if query.stream:
            return await self._events(request, query)
        if query.starting_after is not None:
            raise RequestError("starting_after needs stream=true", param="starting_after")
        return await self._encoded(request, self._response(request))

    async def cancel(self, request: Request) -> Response:
        """End a response in the background; one that has ended stays as it is."""
        stream = self._stream(request)
        if stream is not None:
            await self._streams.cancel(stream)
        response = self._stored(request).response
        if not response.background:
            raise RequestError(
                f"response {response.id!r} does not run in the background; only responses with "
                "background: true can be cancelled",
                param="response_id",
            )
        return await self._encoded(request, response)

    async def delete(self, request: Request) -> Response:
        """Delete a response; a running one is cancelled."""
        stream = self._stream(request)
        if stream is not None:
            await self._streams.cancel(stream)
            self._streams.forget(stream)
        stored = self._stored(request)
        self._store.delete(caller_of(request), stored.response.id)
        if not await self._store.flush():
            raise RequestError(
                "the response is deleted from memory, but its file cannot be written; delete it "
                "again after the next start",
                status=507,
                code="insufficient_storage",
            )
        return json_response(DeletedResponse(id=stored.response.id))

    async def _events(self, request: Request, query: RetrieveQuery) -> Response:
        stream = self._stream(request)
        if stream is None:
            response_id = self._stored(request).response.id
            raise RequestError(
                f"response {response_id!r} has no events to read: those of a response with "
                "background: true are kept until some time after its end (--kept-stream-s)",
                param="stream",
            )
        return await followed(
            request, stream, lambda: offset_of(request, stream, query.starting_after)
        )

    def _stream(self, request: Request) -> KeptStream | None:
        response_id: str = request.path_params["response_id"]
        return self._streams.find(caller_of(request), RESPONSE_NAME, response_id)

    def _response(self, request: Request) -> ResponseObject:
        stream = self._stream(request)
        if stream is not None and isinstance(stream.source, BackgroundWriter):
            snapshot = stream.source.snapshot()
            assert isinstance(snapshot, ResponseObject), "only this API has responses"
            return snapshot
        return self._stored(request).response

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
        return await self._encoded(request, listed)

    async def _encoded(self, request: Request, content: msgspec.Struct) -> Response:
        """The JSON of a response or of its input; of a large one in a lane."""
        caller, response_id = caller_of(request), request.path_params["response_id"]
        size = self._store.num_bytes_of(caller, response_id)
        return await self._lanes.of(caller).do(size, lambda: json_response(content))

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
