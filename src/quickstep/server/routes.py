"""One way to run any surface: parse, submit, then a JSON answer or server-sent events.

The client's going away is watched in both forms; whatever happens, the generation is closed,
which aborts what still runs and frees its blocks.

    read_body -> Surface.parse -> open_generation -> EventStream | JSON
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.api_errors import error_of, json_response
from quickstep.server.body import ClientDisconnect, read_body, unless_disconnected
from quickstep.server.event_stream import EventStream
from quickstep.server.generation import (
    ChoiceDelta,
    Generation,
    GenerationRequest,
    open_generation,
)
from quickstep.server.metrics import Metrics, RequestMeter
from quickstep.server.surface import Rendering, Served, Surface

__all__ = ["GeneratingRoute"]

_CLIENT_CLOSED = 499  # nginx's; nobody reads it, it stands in the access log
_ENCODE = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Answer:
    """A submitted request and how its answer is written."""

    surface: Surface
    generation: Generation
    rendering: Rendering
    meter: RequestMeter
    response_id: str
    created: int

    def head(self, object_name: str) -> dict[str, Any]:
        """What whole responses and chunks begin with."""
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self.created,
            "model": self.generation.request.model,
            "system_fingerprint": self.meter.fingerprint,
        }

    async def close(self) -> None:
        """Abort what still runs, and count the request. Idempotent."""
        await self.generation.aclose()
        self.meter.close(self.generation)

    def whole(self) -> dict[str, Any]:
        """The response of a finished generation."""
        generation = self.generation
        choices = [
            {
                "index": choice.index,
                **self.rendering.whole(choice),
                "finish_reason": self.rendering.finish_reason(choice),
                "seed": choice.seed,
            }
            for choice in generation.choices
        ]
        return {
            **self.head(self.surface.object_name),
            "choices": choices,
            "usage": generation.usage.as_json(),
            "seed": generation.seed,
            **generation.request.echoed,
        }


class GeneratingRoute:
    """The endpoint of one surface."""

    def __init__(self, surface: Surface, served: Served, metrics: Metrics) -> None:
        self._surface = surface
        self._served = served
        self._metrics = metrics

    async def answer(self, request: Request) -> Response:
        """Answer one request. Raises RequestError, EngineError."""
        headers = _request_id(request)
        try:
            body = await read_body(request, self._served.limits.body_bytes)
            generation_request = self._surface.parse(body, self._served)
            answer = await unless_disconnected(request.receive, self._open(generation_request))
            if generation_request.stream:
                return EventStream(events(answer), answer.close, headers)
            return await self._whole(request, answer, headers)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED)

    async def whole(self, body: bytes, added_priority: int = 0) -> dict[str, Any]:
        """The JSON answer to a body that came some other way than HTTP: a line of a batch.

        `added_priority` lets those who wait go first. Raises RequestError, EngineError.
        """
        request = self._surface.parse(body, self._served)
        if request.stream:
            raise RequestError("stream is not supported in a batch", param="stream")
        answer = await self._open(replace(request, priority=request.priority + added_priority))
        try:
            await _metered(answer)
        finally:
            await answer.close()
        return answer.whole()

    async def _open(self, request: GenerationRequest) -> _Answer:
        meter = self._metrics.meter(request)
        generation = await open_generation(self._served.engine, request)
        return _Answer(
            surface=self._surface,
            generation=generation,
            rendering=self._surface.rendering(generation, self._served),
            meter=meter,
            response_id=self._surface.id_prefix + uuid.uuid4().hex,
            created=int(time.time()),
        )

    async def _whole(
        self, request: Request, answer: _Answer, headers: Mapping[str, str]
    ) -> Response:
        try:
            await unless_disconnected(request.receive, _metered(answer))
        finally:
            await answer.close()
        return json_response(answer.whole(), headers=headers)


async def _metered(answer: _Answer) -> None:
    async with aclosing(answer.generation.deltas()) as deltas:
        async for item in deltas:
            answer.meter.observe(item)


async def events(answer: _Answer) -> AsyncGenerator[bytes, None]:
    """The frames of a stream."""
    try:
        async with aclosing(_chunks(answer)) as chunks:
            async for chunk in chunks:
                yield b"data: " + _ENCODE(chunk) + b"\n\n"
    except asyncio.CancelledError:
        raise
    except Exception as error:  # the stream's top: its status is sent already
        _, body = error_of(error)
        yield b"data: " + _ENCODE(body) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _chunks(answer: _Answer) -> AsyncGenerator[dict[str, Any], None]:
    """Opening words, news, endings, then the usage if asked for."""
    generation, rendering = answer.generation, answer.rendering
    request = generation.request
    chunk = _chunk_writer(answer)
    opening = rendering.opening()
    if opening is not None:
        for choice in generation.choices:
            yield chunk({"index": choice.index, **opening, "finish_reason": None})
    async with aclosing(generation.deltas()) as deltas:
        async for item in deltas:
            answer.meter.observe(item)
            for word in _words(rendering, generation, item):
                yield chunk(word)
    if request.include_usage:
        yield {**chunk(None), "usage": generation.usage.as_json()}


def _words(rendering: Rendering, generation: Generation, item: ChoiceDelta) -> list[dict[str, Any]]:
    """The news of a delta, and its choice's end."""
    choice = generation.choices[item.choice]
    words = []
    news = rendering.news(choice, item.delta)
    if news is not None:
        words.append({"index": choice.index, **news, "finish_reason": None})
    if item.delta.finish_reason is not None:
        reason = rendering.finish_reason(choice)
        ending = {**rendering.ending(), "finish_reason": reason, "seed": choice.seed}
        words.append({"index": choice.index, **ending})
    return words


def _chunk_writer(answer: _Answer) -> Callable[[dict[str, Any] | None], dict[str, Any]]:
    """Writes chunks of one choice (or none) with the shared head."""
    request = answer.generation.request
    head = answer.head(answer.surface.chunk_object_name)
    tail = {"seed": answer.generation.seed, **request.echoed}

    def write(word: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**head, "choices": [] if word is None else [word], **tail}
        if request.continuous_usage:
            chunk["usage"] = answer.generation.usage.as_json()
        elif request.include_usage:
            chunk["usage"] = None
        return chunk

    return write


def _request_id(request: Request) -> dict[str, str]:
    """The client's request id, to be echoed; it is never a key of ours."""
    given = request.headers.get("x-request-id", "")[:128]
    return {"x-request-id": given} if given else {}
