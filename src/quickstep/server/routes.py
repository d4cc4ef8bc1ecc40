"""One way to run any surface: parse, submit, then a JSON answer or server-sent events.

The client's going away is watched in both forms; whatever happens, the generation is closed,
which aborts what still runs and frees its blocks.

    read_body -> Surface.parse -> open_generation -> EventStream | JSON
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from quickstep.server.api_errors import json_response
from quickstep.server.body import ClientDisconnect, read_body, unless_disconnected
from quickstep.server.event_stream import EventStream
from quickstep.server.generation import Generation, open_generation
from quickstep.server.metrics import Metrics, RequestMeter
from quickstep.server.surface import Asked, Head, Served, Surface, Writer

__all__ = ["CALLER", "CLIENT_CLOSED", "GeneratingRoute", "caller_of", "request_id"]

CALLER = "quickstep.caller"  # the ASGI scope's entry for the name of the API key, where one is due
CLIENT_CLOSED = 499  # nginx's; nobody reads it, it stands in the access log


@dataclass(frozen=True, slots=True)
class _Answer:
    """A submitted request and how its answer is written."""

    generation: Generation
    writer: Writer
    meter: RequestMeter

    async def close(self) -> None:
        """Abort what still runs, and count the request. Idempotent."""
        await self.generation.aclose()
        self.meter.close(self.generation)


class GeneratingRoute:
    """The endpoint of one surface."""

    def __init__(self, surface: Surface, served: Served, metrics: Metrics) -> None:
        self._surface = surface
        self._served = served
        self._metrics = metrics

    async def answer(self, request: Request) -> Response:
        """Answer one request. Raises RequestError, EngineError."""
        headers = request_id(request)
        try:
            body = await read_body(request, self._served.limits.body_bytes)
            asked = self._surface.parse(body, self._served, caller_of(request))
            answer = await unless_disconnected(request.receive, self._open(asked))
            if asked.request.stream:
                return EventStream(frames(answer), answer.close, headers)
            return await self._whole(request, answer, headers)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)

    async def _open(self, asked: Asked) -> _Answer:
        meter = self._metrics.meter(asked.request)
        generation = await open_generation(self._served.engine, asked.request, self._served.limits)
        head = Head(created=int(time.time()), fingerprint=meter.fingerprint)
        return _Answer(generation, asked.writer(generation, head), meter)

    async def _whole(
        self, request: Request, answer: _Answer, headers: Mapping[str, str]
    ) -> Response:
        try:
            await unless_disconnected(request.receive, _noted(answer))
        finally:
            await answer.close()
        return json_response(answer.writer.whole(), headers=headers)


async def _noted(answer: _Answer) -> None:
    async with aclosing(answer.generation.deltas()) as deltas:
        async for item in deltas:
            answer.meter.observe(item)
            answer.writer.note(item)


async def frames(answer: _Answer) -> AsyncGenerator[bytes, None]:
    """The frames of a stream, whatever happens."""
    try:
        async with aclosing(_written(answer)) as written:
            async for frame in written:
                yield frame
    except asyncio.CancelledError:
        raise
    except Exception as error:  # the stream's top: its status is sent already
        for frame in answer.writer.failure(error):
            yield frame


async def _written(answer: _Answer) -> AsyncGenerator[bytes, None]:
    writer = answer.writer
    for frame in writer.opening():
        yield frame
    async with aclosing(answer.generation.deltas()) as deltas:
        async for item in deltas:
            answer.meter.observe(item)
            for frame in writer.news(item):
                yield frame
    for frame in writer.ending():
        yield frame


def caller_of(request: Request) -> str:
    """Whose API key the request came with; "" where none is asked for."""
    return str(request.scope.get(CALLER, ""))


def request_id(request: Request) -> dict[str, str]:
    """The client's request id, to be echoed; it is never a key of ours."""
    given = request.headers.get("x-request-id", "")[:128]
    return {"x-request-id": given} if given else {}
