"""llama.cpp's routes of conversations' streams: read again from a byte on, list, end.

A stream is that of the latest request with the conversation's id in the header `X-Conversation-Id`.
Only the API key that sent it finds it. A server without keys lists no streams but those that the
client names, since the name is all that keeps one from other clients.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.fields.decode import decode_values
from quickstep.server.fields.field_classes import effect
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import RouteNotFound, json_response
from quickstep.server.http.middleware import key_name, report_ignored
from quickstep.server.http.route import ApiRoute
from quickstep.server.kept_streams.kept_request import (
    CONVERSATION_NAME,
    LAST_EVENT_HEADER,
    checked_name,
    followed,
    offset_of,
)
from quickstep.server.kept_streams.kept_stream import KeptStream, KeptStreams
from quickstep.server.options import FieldRules

_MAX_LOOKUPS = 256
_MAX_OFFSET = 2**53
_VARIANT = "::"  # follows the id in those of llama.cpp's router, before the model


class ConversationQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of a conversation: its id, if the path has none."""

    conv_id: str | None = None


class StreamQuery(ConversationQuery, frozen=True, rename={"start": "from"}):
    """The query of a stream, with the byte to begin with."""

    start: Annotated[int, msgspec.Meta(ge=0, le=_MAX_OFFSET)] | None = None


class StreamsQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of the list of streams."""

    conversation_id: str | None = None


class StreamLookup(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of a search for streams."""

    conversation_ids: Annotated[
        list[str],
        effect("Ids of conversations; those that begin with one and `::` are found as well."),
    ]


class ListedStream(msgspec.Struct, frozen=True):
    """A stream of a conversation: its times in seconds since 1970, `completed_at` 0 while it is
    written, and the bytes written so far.
    """

    conversation_id: str
    is_done: bool
    total_bytes: int
    started_at: int
    completed_at: int


class StreamRoutes:
    """The routes. A stream that is not the caller's is 404."""

    def __init__(self, streams: KeptStreams, rules: FieldRules) -> None:
        self._streams = streams
        self._rules = rules

    def routes(self) -> list[ApiRoute]:
        """Each as a route of the server."""
        return [
            *self._of_one("/v1/stream/{conversation_id:path}"),
            *self._of_one("/v1/stream"),
            ApiRoute(
                "GET",
                "/v1/streams",
                self.list_streams,
                "The conversations whose responses can be read.",
                response=list[ListedStream],
                query=StreamsQuery,
            ),
            ApiRoute(
                "POST",
                "/v1/streams/lookup",
                self.lookup,
                "Those of some conversations.",
                request=StreamLookup,
                response=list[ListedStream],
            ),
        ]

    def _of_one(self, path: str) -> list[ApiRoute]:
        return [
            ApiRoute(
                "GET",
                path,
                self.read,
                "The response to a conversation's latest request, from a byte on.",
                query=StreamQuery,
                response=dict[str, Any],
                streams=True,
            ),
            ApiRoute(
                "DELETE",
                path,
                self.delete,
                "End a conversation's response, and forget it.",
                query=ConversationQuery,
                status=204,
            ),
        ]

    async def read(self, request: Request) -> Response:
        """The response from `from` on, or after the event in `Last-Event-ID`."""
        query = decode_values(request.query_params, StreamQuery)
        name = _id_of(request, query)
        stream = self._streams.find(key_name(request), CONVERSATION_NAME, name)
        if stream is None:
            raise RouteNotFound(
                f"the conversation {name[:64]!r} has no stream that can be read",
                param="conversation_id",
                code="stream_not_found",
            )
        start = query.start
        if start is None:
            return await followed(request, stream, lambda: offset_of(request, stream))
        if LAST_EVENT_HEADER in request.headers:
            raise RequestError(
                "from and the header Last-Event-ID are given; send one of them", param="from"
            )
        return await followed(request, stream, lambda: stream.checked_offset(start))

    async def delete(self, request: Request) -> Response:
        """End the response; the same for one that has ended or never was."""
        query = decode_values(request.query_params, ConversationQuery)
        name = _id_of(request, query)
        stream = self._streams.find(key_name(request), CONVERSATION_NAME, name)
        if stream is not None:
            await self._streams.cancel(stream)
            self._streams.forget(stream)
        return Response(status_code=204)

    async def list_streams(self, request: Request) -> Response:
        """The caller's streams, or the one of a conversation."""
        query = decode_values(request.query_params, StreamsQuery)
        owner = key_name(request)
        if query.conversation_id is None and not owner:
            raise RequestError(
                "a server without API keys lists only the streams that the client names; send "
                "conversation_id",
                param="conversation_id",
            )
        return json_response(
            [
                listed
                for listed in self._listed(owner)
                if query.conversation_id in (None, listed.conversation_id)
            ]
        )

    async def lookup(self, request: Request) -> Response:
        """The caller's streams of some conversations."""
        reader = FieldReader(self._rules)
        wanted = reader.decode(body_of(request), StreamLookup).conversation_ids
        report_ignored(request, reader.ignored)
        if len(wanted) > _MAX_LOOKUPS:
            raise RequestError(
                f"conversation_ids has {len(wanted)} entries, the limit is {_MAX_LOOKUPS}",
                param="conversation_ids",
            )
        ids = set(wanted)
        return json_response(
            [
                listed
                for listed in self._listed(key_name(request))
                if listed.conversation_id in ids
                or listed.conversation_id.partition(_VARIANT)[0] in ids
            ]
        )

    def _listed(self, owner: str) -> list[ListedStream]:
        return [
            _listed(name.name, stream)
            for stream in self._streams.of_owner(owner)
            for name in stream.names
            if name.kind == CONVERSATION_NAME
        ]


def _id_of(request: Request, query: ConversationQuery) -> str:
    """The conversation of a path or a query. Raises RequestError."""
    name = request.path_params.get("conversation_id", query.conv_id)
    if name is None:
        raise RequestError("conv_id is missing", param="conv_id")
    if query.conv_id not in (None, name):
        raise RequestError("conv_id is not the id in the path; send one of them", param="conv_id")
    return checked_name("conversation_id", name)


def _listed(name: str, stream: KeptStream) -> ListedStream:
    return ListedStream(
        name, stream.ended_at is not None, stream.num_bytes, stream.started_at, stream.ended_at or 0
    )
