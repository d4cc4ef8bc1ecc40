"""Reading a request's body within the limit, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from quickstep.errors import RequestError
from quickstep.server.http.time_limits import patient_timeout
from quickstep.server.options import ConnectionOptions

__all__ = ["ClientDisconnect", "read_body", "unless_disconnected"]

_Result = TypeVar("_Result")
# A client that is mid-upload reads the answer only once it has sent everything, so the rest of a
# body that is too large is dropped; beyond this many limits the connection is simply closed.
_DRAINED_LIMITS = 16


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, within the time that the gate's `connections` allow for it.

    Raises:
        RequestError: It has more than `limit` bytes (413), or is not there in time (408).
        ClientDisconnect: The client went away.
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


async def unless_disconnected(
    receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, _Result]
) -> _Result:
    """Run `work`; cancel it and raise ClientDisconnect when the client goes away first.

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
