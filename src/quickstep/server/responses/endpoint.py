"""`/v1/responses`: OpenAI's Responses API over the same conversation as chat.

`Responses` is the API, `StoredResponses` the routes of what it keeps. Both share one
`ResponseStore`; a response goes there when it is finished, unless the client said `store: false`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import structs
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.generate.adapter import Served, stream_flags
from quickstep.server.generate.conversation import (
    Conversation,
    checked_metadata,
    conversation_request,
    effort_in_template,
    tenant_of,
    verbosity_in_template,
)
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.generate.generation import ParsedRequest
from quickstep.server.generate.sampling import label, num_alternatives
from quickstep.server.http.errors import RouteNotFound, json_response
from quickstep.server.openai.request_types import decode_values
from quickstep.server.options import RequestLimits
from quickstep.server.responses.input_items import (
    listed_items,
    read_items,
    template_messages,
    with_instructions,
)
from quickstep.server.responses.request_types import InputItemsQuery, ResponsesRequest
from quickstep.server.responses.response_types import DeletedResponse, InputItems
from quickstep.server.responses.store import ResponseStore, StoredResponse
from quickstep.server.responses.tools import offered_functions, requested_text_format
from quickstep.server.responses.writer import ResponsesWriter, Turn
from quickstep.server.schema.field_reader import FieldReader

__all__ = ["INCLUDES", "INCLUDES_NOTHING", "Responses", "StoredResponses"]

_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
INCLUDES = (_LOGPROBS, _SEALED)
# of tools and inputs that are not here; clients send them for whatever may come
INCLUDES_NOTHING = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class Responses:
    """The API."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def parse(self, body: bytes, served: Served, caller: str) -> ParsedRequest:
        """Validate. Raises RequestError."""
        reader = FieldReader(served.field_rules)
        fields = reader.decode(body, ResponsesRequest)
        served.model(fields.model)
        limits = served.limits
        items = read_items(fields.input, reader)
        past = self._past(fields, caller)
        messages = (*past, *template_messages(items, served))
        whole = with_instructions(fields.instructions, messages)
        conversation = Conversation(
            whole,
            num_chars=len(body) + sum(len(message.get("content") or "") for message in past),
            offered=offered_functions(fields, served, reader),
            asked=requested_text_format(fields),
            extra={**_told(fields, served, reader), **(fields.chat_template_kwargs or {})},
        )
        own = {
            "max_tokens": fields.max_output_tokens,
            "logprobs": _num_logprobs(fields, served, reader),
        }
        renamed = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        request = conversation_request(conversation, fields, served, own, renamed, "input")
        _check_labels(fields, limits)
        turn = Turn(
            fields,
            messages=messages,
            input_items=listed_items(items),
            seals=_SEALED in (fields.include or ()),
            store=None if fields.store is False else partial(self._store.put, caller),
        )
        return replace(
            request,
            request=structs.replace(
                request.request, tenant=tenant_of(fields.user, fields.safety_identifier, limits)
            ),
            ignored=reader.ignored,
            writer=partial(ResponsesWriter, served, turn),
            **stream_flags(fields, served),
        )

    def _past(self, fields: ResponsesRequest, caller: str) -> Sequence[Mapping[str, Any]]:
        """The messages that the new ones follow. Raises RequestError 400, as OpenAI does."""
        previous = fields.previous_response_id
        if previous is None:
            return ()
        stored = self._store.get(caller, previous)
        if stored is None:
            raise _PreviousNotFound(previous)
        return stored.messages


class _PreviousNotFound(RouteNotFound):
    """A response that cannot be continued: never stored, deleted, or pushed out by others."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"previous_response_id {response_id[:64]!r} is not found",
            param="previous_response_id",
            code="previous_response_not_found",
        )
        self.status = 400


class StoredResponses:
    """The routes of what is stored. Each raises RequestError 404 for an id it does not have."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def retrieve(self, request: Request) -> Response:
        """A finished response."""
        _no_queries(request, ("include",))
        response = self._stored(request).response
        return await asyncio.to_thread(json_response, response)  # as large as any answer

    async def delete(self, request: Request) -> Response:
        """Forget a response."""
        stored = self._stored(request)
        self._store.delete(caller_of(request), stored.response.id)
        return json_response(DeletedResponse(id=stored.response.id))

    async def input_items(self, request: Request) -> Response:
        """What the response answers, the last item first unless `order` is `asc`."""
        query = decode_values(_named_once(request), InputItemsQuery)
        items = list(self._stored(request).input_items)
        if query.order == "desc":
            items.reverse()
        start = _place_behind(query.after, items)
        page = items[start : start + query.limit]
        listed = InputItems(
            data=[dict(item) for item in page],
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=start + query.limit < len(items),
        )
        return await asyncio.to_thread(json_response, listed)  # as large as any request

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


def _no_queries(request: Request, known: tuple[str, ...]) -> None:
    """Refuse what is asked for in the query and not done. `include` adds what is there already."""
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:64]} is not supported in the query", param=name[:64])


def _named_once(request: Request) -> dict[str, str]:
    """The query; clients write a list as `include[]`."""
    return {name.removesuffix("[]"): text for name, text in request.query_params.items()}


def _place_behind(item_id: str | None, items: Sequence[Mapping[str, Any]]) -> int:
    if item_id is None:
        return 0
    for place, item in enumerate(items):
        if item["id"] == item_id:
            return place + 1
    raise RequestError(f"after is {item_id[:64]!r}, there is no such item", param="after")


def _told(fields: ResponsesRequest, served: Served, reader: FieldReader) -> dict[str, Any]:
    """What the template is told of the reasoning and of the answer's length."""
    effort = None if fields.reasoning is None else fields.reasoning.effort
    verbosity = None if fields.text is None else fields.text.verbosity
    return {
        **effort_in_template(effort, "reasoning.effort", served, reader),
        **verbosity_in_template(verbosity, "text.verbosity", served, reader),
    }


def _num_logprobs(fields: ResponsesRequest, served: Served, reader: FieldReader) -> int | None:
    """The alternatives per token; they are given where `include` asks for them."""
    for place, name in enumerate(fields.include or ()):
        path = f"include[{place}]"
        if name in INCLUDES_NOTHING:
            reader.ignore(path, "the answer has no such part")
        elif name not in INCLUDES:
            raise RequestError(f"{path} {name[:64]} is not supported", param=path)
    if _LOGPROBS in (fields.include or ()):
        return num_alternatives("top_logprobs", fields.top_logprobs or 0, served)
    if fields.top_logprobs:
        raise RequestError(f'top_logprobs needs include: ["{_LOGPROBS}"]', param="top_logprobs")
    return None


def _check_labels(fields: ResponsesRequest, limits: RequestLimits) -> None:
    label("prompt_cache_key", fields.prompt_cache_key, limits)
    checked_metadata(fields.metadata or {}, limits)
    if fields.max_tool_calls is not None and fields.max_tool_calls < 1:
        raise RequestError(
            f"max_tool_calls is {fields.max_tool_calls}, it must be at least 1",
            param="max_tool_calls",
        )
