"""Requests whose clients say that they may come back: by a conversation's id, as llama.cpp has it,
or by an idempotency key.

The request runs in a task of its own, in any API and with all of its checks; its client reads the
kept stream, as any other reader does. A conversation has one stream, the latest. A repeat of an
idempotency key with the same route and body reads the stream of the first request, which is
generated and charged once; with others it is 422. An error that came before the response began, or
within it, is kept for no repeat: nothing was answered, and the repeat is a new try.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import sha256

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope, Send

from quickstep.errors import RequestError
from quickstep.server.http.body import BodyRoom, body_of, unless_disconnected
from quickstep.server.http.errors import CLIENT_CLOSED
from quickstep.server.http.middleware import key_name, report_ignored
from quickstep.server.http.route import ApiRoute, Endpoint
from quickstep.server.kept_streams.kept_stream import (
    KeptResponse,
    KeptStream,
    KeptStreams,
    StreamName,
    StreamRun,
    never,
)

CONVERSATION_NAME = "conversation"
IDEMPOTENCY_NAME = "idempotency"
RESPONSE_NAME = "response"
CONVERSATION_HEADER = "x-conversation-id"
IDEMPOTENCY_HEADER = "idempotency-key"
_KINDS = {
    CONVERSATION_HEADER.encode(): CONVERSATION_NAME,
    IDEMPOTENCY_HEADER.encode(): IDEMPOTENCY_NAME,
}
_HEADERS = (CONVERSATION_HEADER, IDEMPOTENCY_HEADER)
LAST_EVENT_HEADER = "last-event-id"
_NUMBER_CHARS = 18
_NAME_CHARS = 255  # Stripe's


def requested_names(request: Request) -> tuple[StreamName, ...]:
    """The names that the request's headers give its stream, () for none. Raises RequestError."""
    found = [(name, value) for name, value in request.scope["headers"] if name in _KINDS]
    if not found:
        return ()
    owner = key_name(request)
    names = tuple(
        StreamName(owner, _KINDS[header], checked_name(header.decode(), value.decode("latin-1")))
        for header, value in found
    )
    for name in names:
        if sum(name.kind == other.kind for other in names) > 1:
            header = next(key for key, kind in _KINDS.items() if kind == name.kind).decode()
            raise RequestError(f"the header {header} comes twice; send it once", param=header)
    return names


def checked_name(source: str, text: str) -> str:
    """A name from a header or a path. Raises RequestError."""
    if not 1 <= len(text) <= _NAME_CHARS or not (text.isascii() and text.isprintable()):
        raise RequestError(
            f"{source} has {len(text)} characters, it must be 1 to {_NAME_CHARS} printable ASCII "
            "characters",
            param=source,
        )
    return text


def with_repeats(route: ApiRoute, streams: KeptStreams) -> Endpoint:
    """The route's endpoint, which honours these headers or reports that it ignores them."""
    if route.method != "POST":
        return route.endpoint

    async def answer(request: Request) -> Response:
        names = requested_names(request)
        if names and route.is_repeatable:
            return await kept_response(streams, request, names, route.endpoint)
        report_ignored(request, [header for header in _HEADERS if header in request.headers])
        return await route.endpoint(request)

    return answer


async def kept_response(
    streams: KeptStreams,
    request: Request,
    names: tuple[StreamName, ...],
    answer: Callable[[Request], Awaitable[Response]],
) -> Response:
    """The response to a request, or to the earlier one that it repeats. Raises what `answer`
    raises.
    """
    digest = _digest(request, names)
    # others with these names may come while an earlier one is cancelled
    while (repeated := _repeated(streams, names, digest)) is None:
        earlier = next(filter(None, (streams.find(*name) for name in names)), None)
        if earlier is None:
            break
        await streams.cancel(earlier)
        streams.forget(earlier)
    if repeated is not None:
        return await followed(request, repeated, is_repeat=True)
    run = partial(_run, request.scope, answer)
    stream = streams.start(names, run, request.scope["state"], digest)
    room: BodyRoom = request.scope["state"]["body_room"]
    room.keep()  # until `_run` ends, which the client does not wait for
    return await followed(request, stream)


async def followed(
    request: Request,
    stream: KeptStream,
    offset: Callable[[], int] = lambda: 0,
    is_repeat: bool = False,
) -> Response:
    """A stream from an offset on, as soon as it has begun. Raises the error of one that has not,
    and what `offset` raises.
    """
    try:
        await unless_disconnected(request.receive, stream.begun())
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED)
    return KeptResponse(stream, offset(), is_repeat)


def _digest(request: Request, names: tuple[StreamName, ...]) -> str:
    """Of the route and the body; "" for a request that is never compared with another."""
    if all(name.kind != IDEMPOTENCY_NAME for name in names):
        return ""
    path: str = request.scope["path"]
    return sha256(path.encode() + b"\n" + body_of(request)).hexdigest()


def _repeated(
    streams: KeptStreams, names: tuple[StreamName, ...], digest: str
) -> KeptStream | None:
    """The stream of the earlier request with the same idempotency key. Raises RequestError."""
    key = next((name for name in names if name.kind == IDEMPOTENCY_NAME), None)
    stream = None if key is None else streams.find(*key)
    if stream is None or stream.has_failed:
        return None
    if stream.digest != digest:
        raise RequestError(
            "the Idempotency-Key was used for a request with another route or body; send a new key "
            "with a new request",
            param=IDEMPOTENCY_HEADER,
            status=422,
            code="idempotency_key_reused",
        )
    if stream.num_dropped:
        raise RequestError(
            "the answer to the first request with this Idempotency-Key is too long to be repeated; "
            "send a new key, or have the operator raise --max-kept-stream-bytes",
            param=IDEMPOTENCY_HEADER,
            status=409,
            code="idempotent_answer_lost",
        )
    return stream


def without_client(scope: Scope, response: Response) -> StreamRun:
    """A run of a response whose client never leaves."""

    async def run(send: Send) -> None:
        await response(scope, never, send)

    return run


async def _run(scope: Scope, answer: Callable[[Request], Awaitable[Response]], send: Send) -> None:
    room: BodyRoom = scope["state"]["body_room"]
    try:
        response = await answer(Request(scope, never, send))
    finally:
        room.release()
    await response(scope, never, send)


def offset_of(request: Request, stream: KeptStream, after: int | None = None) -> int:
    """Where a reader continues: after the event with this number, or with the one that the header
    `Last-Event-ID` names. Raises RequestError.
    """
    text = request.headers.get(LAST_EVENT_HEADER)
    if after is not None and text is not None:
        raise RequestError(
            "starting_after and the header Last-Event-ID are given; send one of them",
            param="starting_after",
        )
    if after is None:
        if text is None:
            return stream.checked_offset(0)
        if not text.isdecimal() or len(text) > _NUMBER_CHARS:
            raise RequestError(
                f"the header Last-Event-ID is {text[:64]!r}, it must be the id of an event",
                param=LAST_EVENT_HEADER,
            )
        after = int(text)
    return stream.offset_after(after)
