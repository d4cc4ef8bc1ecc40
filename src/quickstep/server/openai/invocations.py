"""`/invocations`: SageMaker's one route, for every body that chat, completions or embeddings take.

Which of them answers is told by the field that holds the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.http.body import body_of
from quickstep.server.http.route import ApiRoute
from quickstep.server.openai.request_types import decode

__all__ = ["invocations_route"]

_NOT_GIVEN = msgspec.Raw()


class _Shape(msgspec.Struct, frozen=True):
    """The fields that tell the routes apart."""

    messages: msgspec.Raw = _NOT_GIVEN
    prompt: msgspec.Raw = _NOT_GIVEN
    input: msgspec.Raw = _NOT_GIVEN


def invocations_route(routes: Sequence[ApiRoute]) -> ApiRoute:
    """The route over those of chat, completions and embeddings, in this order."""
    fields = _Shape.__struct_fields__

    async def answer(request: Request) -> Response:
        body = body_of(request)
        shape = decode(body, _Shape)
        for name, route in zip(fields, routes, strict=True):
            if bytes(getattr(shape, name)) not in (b"", b"null"):
                return await route.endpoint(request)
        raise RequestError(
            "the body has none of messages (chat), prompt (completions) and input (embeddings)",
            param=fields[0],
        )

    responses: UnionType = routes[0].response
    for route in routes[1:]:
        responses = responses | route.response
    return ApiRoute(
        "POST",
        "/invocations",
        answer,
        "Chat, completions or embeddings, as the body has messages, prompt or input.",
        requests=tuple(route.request for route in routes if route.request is not None),
        response=responses,
        streams=True,
        events=tuple(event for route in routes for event in route.events),
    )
