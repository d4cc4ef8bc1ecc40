"""A request's body, within its limits of time, size and nesting; and work that is cancelled when
the client disconnects.

Bodies that are being received share a number of bytes (`Reception`), by the clients' keys, or by
their addresses if the server has no keys. A body without room is refused before it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from quickstep.core.shares import NoRoom, Shares
from quickstep.errors import RequestError
from quickstep.server.http.connection_limit import client_of_host
from quickstep.server.http.errors import ServerBusy
from quickstep.server.http.time_limits import patient_timeout
from quickstep.server.options import ConnectionOptions, RequestLimits

_Result = TypeVar("_Result")
# A client that is mid-upload reads the answer only once it has sent everything, so the rest of a
# body that is too large is dropped; beyond this many limits the connection is simply closed.
_DRAINED_LIMITS = 16
_STRUCTURE = b'"[]{},'
_OTHERS = bytes(sorted(set(range(256)) - set(_STRUCTURE)))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_SLICE_BYTES = 64 * 1024


class Reception:
    """The bytes of all bodies that are being received or wait to be parsed."""

    def __init__(
        self, max_bytes: int, weight_of: Callable[[str], float] = lambda api_key_name: 1.0
    ) -> None:
        self._shares = Shares(max_bytes)
        self._weight_of = weight_of

    def room(self, request: Request) -> BodyRoom:
        """Room for the body of a request, none yet."""
        key = request.scope["state"]["api_key_name"]
        address = client_of_host(request.client.host) if request.client is not None else ""
        return BodyRoom(self._shares, key or address, self._weight_of(key), bool(key))


class BodyRoom:
    """What one body has of the shared bytes. `release` it once the body is parsed."""

    def __init__(self, shares: Shares, owner: str, weight: float, has_key: bool) -> None:
        self._shares = shares
        self._owner = owner
        self._weight = weight
        self._has_key = has_key
        self._num_bytes = 0
        self._is_kept = False

    def reserve(self, num_bytes: int) -> None:
        """Have room for at least so many bytes. Raises ServerBusy."""
        num_more = num_bytes - self._num_bytes
        if num_more <= 0:
            return
        try:
            self._shares.take(self._owner, num_more, self._weight)
        except NoRoom as refusal:
            whose, limit = "", f"the limit is {refusal.capacity}"
            if refusal.owner:
                whose = " of your API key" if self._has_key else " of your address"
                limit = f"beyond its share of {refusal.capacity}"
            raise ServerBusy(
                f"{refusal.num_held} bytes of request bodies{whose} are being received and this "
                f"one has {num_more} more, {limit}; send the request again later, or have the "
                "operator raise --max-reception-bytes"
            ) from None
        self._num_bytes = num_bytes

    def keep(self) -> None:
        """Have the room until `release`, also after the response."""
        self._is_kept = True

    def leave(self) -> None:
        """The response has ended: give the room back, unless it is kept."""
        if not self._is_kept:
            self.release()

    def release(self) -> None:
        """Give all of it back. Idempotent."""
        self._shares.give_back(self._owner, self._num_bytes)
        self._num_bytes = 0


async def read_body(request: Request, limit: int, room: BodyRoom) -> bytes:
    """The complete body, within the time that the `connections` of the request's state allow. Its
    bytes are reserved in `room`, which the caller releases.

    Raises:
        RequestError: It has more than `limit` bytes (413), or is not there in time (408).
        ServerBusy: There is no room for it; nothing of an announced length was read.
        ClientDisconnect: The client disconnected.
    """
    connections: ConnectionOptions | None = request.scope.get("state", {}).get("connections")
    upload_s = None if connections is None else connections.upload_s
    try:
        async with patient_timeout(upload_s):
            return await _read(request, limit, room)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {upload_s:g} s; send it faster", status=408
        ) from None


async def _read(request: Request, limit: int, room: BodyRoom) -> bytes:
    chunks: list[bytes] = []
    size = 0
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) <= limit:
        room.reserve(int(announced))
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            room.reserve(size)
            chunks.append(chunk)
            continue
        chunks.clear()
        room.release()
        if size > limit * _DRAINED_LIMITS:
            break
    if size > limit:
        raise RequestError(
            f"the body is larger than {limit} bytes; send a shorter request", status=413
        )
    return b"".join(chunks)


def check_json(body: bytes, limits: RequestLimits, num_outer: int = 0) -> None:
    """Raise RequestError if the JSON of `body` is nested too deeply, or has too many values.

    `num_outer` more levels are allowed, for objects around the body proper.

    Decoding is one call in which no other thread runs: 40 ms for a million numbers, 0.7 s for as
    many small lists, which the garbage collector looks through meanwhile. So nothing is built of
    the body first, and each pass over it is a short call of the interpreter's own C code:

        [{"a\\"]": 1}, []]   escapes out         [{"a]": 1}, []]
                             structure only      [{"]"},[]]
                             strings out         [{},[]]
                             one kind, no comma  [[][]]
                             each `[]` removed   [], then nothing: two levels

    The result for malformed text does not matter: the decoder refuses it afterwards.
    """
    depth = limits.json_depth + num_outer
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers <= depth and body.count(b",") < limits.json_values:
        return
    if b"\\" in body:
        # backslashes are in strings only, and pair from the left
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    body = _without_strings(body.translate(_ONE_KIND, _OTHERS))
    if body.count(b",") >= limits.json_values:
        raise RequestError(f"the body's JSON has more than {limits.json_values} values")
    body = body.replace(b",", b"")
    if body.count(b"[") > limits.json_containers:
        raise RequestError(
            f"the body's JSON has more than {limits.json_containers} objects and lists"
        )
    for _ in range(depth):
        shorter = body.replace(b"[]", b"")
        if len(shorter) == len(body):
            break
        body = shorter
    if b"[]" in body or body.count(b"[") > depth:
        raise RequestError(f"the body's JSON is nested more than {depth} levels deep")


def _without_strings(text: bytes) -> bytes:
    """`text` without what is between quotes, in slices: other threads run between them."""
    parts: list[bytes] = []
    is_inside = False
    for start in range(0, len(text), _SLICE_BYTES):
        pieces = text[start : start + _SLICE_BYTES].split(b'"')
        parts += pieces[is_inside::2]
        is_inside ^= len(pieces) % 2 == 0
    return b"".join(parts)


def body_of(request: Request) -> bytes:
    """The body, which was read and checked before the endpoint was called (see `route`)."""
    body: bytes = request.scope["state"]["body"]
    return body


def body_parsed(request: Request) -> None:
    """The body is parsed: its room is for others now, however long the response takes. Without this
    call it is released after the response.
    """
    room: BodyRoom | None = request.scope["state"].get("body_room")
    if room is not None:
        room.release()


async def unless_disconnected(
    receive: Callable[[], Awaitable[Any]],
    work: Coroutine[Any, Any, _Result],
    close: Callable[[_Result], Awaitable[None]] | None = None,
) -> _Result:
    """Run `work`; cancel it and raise ClientDisconnect if the client disconnects first.

    The body has to be read already: the next message that `receive` gives is the disconnect. A
    result that comes as this is cancelled cannot be returned: it is passed to `close`.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        watching.cancel()
        await asyncio.wait({watching})
    except BaseException:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
        if close is not None and not working.cancelled() and working.exception() is None:
            await close(working.result())
        raise
    return working.result()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
