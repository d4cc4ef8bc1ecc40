"""One route of the HTTP API, with all that is known of it: the one list that everything reads.

`app` makes Starlette's routes of it, the gate asks which routes need no key, `/openapi.json` and
the reference page are written from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quickstep.server.http.errors import ErrorShape, openai_shape
from quickstep.server.http.event_stream import SERVER_SENT_EVENTS

__all__ = ["ApiRoute"]


class ApiRoute(msgspec.Struct, frozen=True):
    """A path, its method and its endpoint.

    Attributes:
        summary: One sentence for the reference.
        request: The schema of the JSON body, None for no body.
        response: The schema of the JSON answer with status 200: a struct or a list of them; None
            for an answer that is no JSON.
        streams: The answer may be a stream of server-sent events, or of what `stream_type` says.
        events: The schemas of their data, beside that of an error.
        stream_type: The media type of the stream.
        query: The schema of the query's parameters, None for none.
        request_type: The media type of the body.
        content_type: The media type of an answer that is no JSON.
        is_probe: Answered without an API key: liveness and readiness.
        aliases: Further paths of the same endpoint.
        error_shape: How this surface writes errors.
        requests: Instead of `request`, the schemas of which the body has one.
    """

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    summary: str
    request: type[msgspec.Struct] | None = None
    response: Any = None
    streams: bool = False
    events: tuple[type[msgspec.Struct], ...] = ()
    query: type[msgspec.Struct] | None = None
    request_type: str = "application/json"
    content_type: str = "text/plain"
    is_probe: bool = False
    aliases: tuple[str, ...] = ()
    error_shape: ErrorShape = openai_shape
    requests: tuple[type[msgspec.Struct], ...] = ()
    stream_type: str = SERVER_SENT_EVENTS

    @property
    def paths(self) -> tuple[str, ...]:
        """The path and its aliases."""
        return (self.path, *self.aliases)

    def starlette(self) -> list[Route]:
        """The route of every path."""
        return [Route(path, self.endpoint, methods=[self.method]) for path in self.paths]
