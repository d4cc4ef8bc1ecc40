"""`/v1/responses`: OpenAI's Responses API, from a body to a request.

`ResponsesWriter` writes the response. It is stored when it is complete, unless the client sent
`store: false`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.fields.sampling_fields import JsonObjectFormat
from quickstep.server.generate.api import response_flags
from quickstep.server.generate.conversation import (
    Conversation,
    checked_metadata,
    conversation_request,
    requested_effort,
    tenant_of,
    verbosity_in_template,
)
from quickstep.server.generate.generation import ParsedRequest
from quickstep.server.generate.sampling import label, num_alternatives
from quickstep.server.generate.structured import RequestedGrammar, requested_grammar
from quickstep.server.generate.tools import (
    CHOICES,
    Function,
    OfferedTools,
    ToolChoice,
    allowed_tools,
    is_left_out,
    offer,
)
from quickstep.server.http.errors import RouteNotFound
from quickstep.server.models.served_model import ServedModel
from quickstep.server.options import RequestLimits
from quickstep.server.responses.input_items import (
    listed_items,
    read_items,
    template_messages,
    with_instructions,
)
from quickstep.server.responses.request_types import (
    FunctionToolSpec,
    ResponsesRequest,
    SchemaFormat,
)
from quickstep.server.responses.store import ResponseStore
from quickstep.server.responses.writer import ResponseContext, ResponsesWriter
from quickstep.text.message_content import text_of
from quickstep.types import Grammar

_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
INCLUDES = (_LOGPROBS, _SEALED)
# parts of tools and inputs that this server does not have; clients include them by default
INCLUDES_NOTHING = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class Responses:
    """Parses the bodies of the API."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def parse(self, body: bytes, model: ServedModel, caller: str) -> ParsedRequest:
        """Parse and validate a body. Raises RequestError."""
        reader = FieldReader(model.server.field_rules)
        fields = reader.decode(body, ResponsesRequest)
        limits = model.server.limits
        items = read_items(fields.input, reader, partial(self._store.item, caller))
        past = self._previous_messages(fields, caller)
        messages = (*past, *template_messages(items, model))
        level = None if fields.reasoning is None else fields.reasoning.effort
        effort = requested_effort(level, "reasoning.effort", model, reader)
        verbosity = None if fields.text is None else fields.text.verbosity
        conversation = Conversation(
            with_instructions(fields.instructions, messages),
            num_chars=len(body) + sum(len(text_of(message["content"])) for message in past),
            offered=_offered_functions(fields, model, reader),
            grammar=_requested_text_format(fields),
            extra={
                **effort.variables,
                **verbosity_in_template(verbosity, "text.verbosity", model, reader),
                **(fields.chat_template_kwargs or {}),
            },
            effort_budget=effort.budget,
        )
        own = {
            "max_tokens": fields.max_output_tokens,
            "logprobs": _num_logprobs(fields, model, reader),
        }
        renamed = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        request = conversation_request(conversation, fields, model, own, renamed, "input")
        _check_labels(fields, limits)
        context = ResponseContext(
            fields,
            messages=messages,
            input_items=listed_items(items),
            seals=_SEALED in (fields.include or ()),
            store=None if fields.store is False else partial(self._store.put, caller),
            begin=partial(self._store.begin, caller) if fields.background else None,
        )
        return replace(
            request,
            request=structs.replace(
                request.request, tenant=tenant_of(fields.user, fields.safety_identifier, limits)
            ),
            adapter=None if fields.lora is None else model.adapters.mix(fields.lora),
            ignored=reader.ignored,
            in_background=bool(fields.background),
            writer=partial(ResponsesWriter, model, context),
            **response_flags(fields, model),
        )

    def _previous_messages(
        self, fields: ResponsesRequest, caller: str
    ) -> Sequence[Mapping[str, Any]]:
        """The messages of `previous_response_id`. Raises RequestError 400, like OpenAI."""
        previous = fields.previous_response_id
        if previous is None:
            return ()
        stored = self._store.get(caller, previous)
        if stored is None:
            raise _PreviousNotFound(previous)
        status = stored.response.status
        if status not in ("completed", "incomplete"):
            raise RequestError(
                f"previous_response_id {previous[:64]!r} is a response with the status {status}, "
                "which cannot be continued",
                param="previous_response_id",
            )
        return stored.messages


class _PreviousNotFound(RouteNotFound):
    """A response that cannot be continued: never stored, deleted or evicted."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"previous_response_id {response_id[:64]!r} is not found",
            param="previous_response_id",
            code="previous_response_not_found",
        )
        self.status = 400


def _num_logprobs(fields: ResponsesRequest, model: ServedModel, reader: FieldReader) -> int | None:
    """The alternatives per token, None if `include` does not have logprobs."""
    for index, name in enumerate(fields.include or ()):
        path = f"include[{index}]"
        if name in INCLUDES_NOTHING:
            reader.ignore(path, "the response has no such part")
        elif name not in INCLUDES:
            raise RequestError(f"{path} {name[:64]} is not supported", param=path)
    if _LOGPROBS in (fields.include or ()):
        return num_alternatives("top_logprobs", fields.top_logprobs or 0, model)
    if fields.top_logprobs:
        raise RequestError(f'top_logprobs needs include: ["{_LOGPROBS}"]', param="top_logprobs")
    return None


def _check_labels(fields: ResponsesRequest, limits: RequestLimits) -> None:
    label("prompt_cache_key", fields.prompt_cache_key, limits)
    checked_metadata(fields.metadata or {}, limits)
    if fields.background and fields.store is False:
        raise RequestError(
            "background: true needs store: true: the response is fetched when it has ended",
            param="background",
        )
    if fields.max_tool_calls is not None and fields.max_tool_calls < 1:
        raise RequestError(
            f"max_tool_calls is {fields.max_tool_calls}, it must be at least 1",
            param="max_tool_calls",
        )


def _offered_functions(
    fields: ResponsesRequest, model: ServedModel, reader: FieldReader
) -> OfferedTools:
    """The functions of `tools`, and the tool choice. Raises RequestError."""
    functions = []
    for index, tool in enumerate(fields.tools or ()):
        path = f"tools[{index}]"
        if is_left_out(tool, "function", reader):
            continue
        spec = reader.convert(tool, FunctionToolSpec, path)
        functions.append(
            Function(spec.name, spec.description, spec.parameters, bool(spec.strict), path)
        )
    choice = _choice(fields.tool_choice)
    return offer(functions, choice, fields.parallel_tool_calls is False, model)


def _named(tool: object) -> str | None:
    """The name of an allowed tool in the form of this API."""
    match tool:
        case {"type": "function", "name": str(name), **more} if not more:
            return name
    return None


def _choice(choice: str | dict[str, Any] | None) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice()
        case str() if choice in CHOICES:
            return CHOICES[choice]
        case {"type": "function", "name": str(name), **more} if not more:
            return ToolChoice(must_call=True, names=(name,))
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools), **more} if not more:
            return allowed_tools(mode, tools, _named, "tool_choice")
        case str():
            description = repr(choice[:64])
        case _:
            description = "an object of another form"
    raise RequestError(
        f"tool_choice is {description}, it must be auto, none, required, "
        '{"type": "function", "name": ...} or {"type": "allowed_tools", ...}',
        param="tool_choice",
    )


def _requested_text_format(fields: ResponsesRequest) -> RequestedGrammar | None:
    """The grammar that `text.format` or `structured_outputs` requests. Raises RequestError."""
    requested = requested_grammar(fields)
    form = None if fields.text is None else fields.text.format
    if not isinstance(form, JsonObjectFormat | SchemaFormat):
        return requested
    if requested is not None:
        raise RequestError(
            f"{requested.field.partition('.')[0]} and text.format both constrain the output; send "
            "one of them",
            param=requested.field.partition(".")[0],
        )
    if form.schema is None:
        return RequestedGrammar(Grammar.of_json_object(), "text.format")
    is_strict = isinstance(form, SchemaFormat) and bool(form.strict)
    grammar = Grammar.of_json_schema(form.schema, is_strict)
    return RequestedGrammar(grammar, "text.format.schema")
