"""A request's body, within its limits of time, size and nesting; and work that is cancelled when
the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from quickstep.errors import RequestError
from quickstep.server.http.time_limits import patient_timeout
from quickstep.server.options import ConnectionOptions, RequestLimits

__all__ = [
    "ClientDisconnect",
    "body_of",
    "check_json",
    "read_body",
    "unless_disconnected",
]

_Result = TypeVar("_Result")
# A client that is mid-upload reads the answer only once it has sent everything, so the rest of a
# body that is too large is dropped; beyond this many limits the connection is simply closed.
_DRAINED_LIMITS = 16
_STRUCTURE = b'"[]{},'
_OTHERS = bytes(sorted(set(range(256)) - set(_STRUCTURE)))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_SLICE_BYTES = 64 * 1024


async def read_body(request: Request, limit: int) -> bytes:
    """The complete body, within the time that the `connections` of the request's state allow.

    Raises:
        RequestError: It has more than `limit` bytes (413), or is not there in time (408).
        ClientDisconnect: The client disconnected.
    """
    connections: ConnectionOptions | None = request.scope.get("state", {}).get("connections")
    upload_s = None if connections is None else connections.upload_s
    try:
        async with patient_timeout(upload_s):
            return await _read(request, limit)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {upload_s:g} s; send it faster", status=408
        ) from None


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
            continue
        chunks.clear()
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


async def unless_disconnected(
    receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, _Result]
) -> _Result:
    """Run `work`; cancel it and raise ClientDisconnect if the client disconnects first.

    The body has to be read already: the next message that `receive` gives is the disconnect.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
