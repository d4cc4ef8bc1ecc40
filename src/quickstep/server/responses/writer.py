"""One response, complete or as OpenAI's events.

    created, in_progress, per item: added, part added, deltas, done, part done, item done; completed

Every event has a sequence number. The last one carries the complete response, the same object that
a non-streaming request gets.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from quickstep.server.fields.sampling_fields import TextFormat
from quickstep.server.generate.generation import Generation, Head
from quickstep.server.generate.message import (
    Block,
    BlockChange,
    Blocks,
    Change,
    MessageBlockKind,
    message_reader,
)
from quickstep.server.generate.timings import requested_timings
from quickstep.server.http.errors import error_facts
from quickstep.server.http.event_stream import event_frame
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.choices import token_logprob
from quickstep.server.openai.response_types import TokenLogprob
from quickstep.server.responses.input_items import InputItem, sealed, template_messages
from quickstep.server.responses.request_types import (
    FunctionCallItem,
    MessageItem,
    ReasoningItem,
    ReasoningPart,
    ResponsesRequest,
)
from quickstep.server.responses.response_types import (
    ArgumentsEvent,
    CallOutput,
    IncompleteDetails,
    ItemEvent,
    ItemStatus,
    ListedItem,
    MessageOutput,
    OutputItem,
    OutputTextContent,
    PartEvent,
    ReasoningOutput,
    ReasoningSettings,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseInputDetails,
    ResponseObject,
    ResponseOutputDetails,
    ResponseStatus,
    ResponseUsage,
    StreamEvent,
    TextEvent,
    TextSettings,
)
from quickstep.server.responses.store import StoredResponse
from quickstep.types import Delta, TokenLogprobs

_ITEM_PREFIX = {
    MessageBlockKind.REASONING: "rs_",
    MessageBlockKind.TEXT: "msg_",
    MessageBlockKind.CALL: "fc_",
}
_CONTENT_INDEX = 0  # an item has one part


class ResponseContext(msgspec.Struct, frozen=True):
    """What the writer needs of a request, in addition to its generation.

    Attributes:
        messages: The conversation so far, without the instructions.
        input_items: The request's own items, as `input_items` lists them later.
        seals: Whether reasoning items also carry their text as `encrypted_content`.
        store: Receives a finished response; None if it is not stored.
        begin: Receives a response in the background when it begins.
    """

    fields: ResponsesRequest
    messages: tuple[Mapping[str, Any], ...]
    input_items: tuple[ListedItem, ...]
    seals: bool
    store: Callable[[StoredResponse], None] | None
    begin: Callable[[StoredResponse], None] | None = None


class ResponsesWriter:
    """Writes one response."""

    def __init__(
        self, model: ServedModel, context: ResponseContext, generation: Generation, head: Head
    ) -> None:
        self._model = model
        self._context = context
        self._generation = generation
        self._head = head
        (choice,) = generation.choices
        reader = message_reader(generation, choice, model.engine.tokenizer)
        self._blocks = Blocks(reader, never_empty=True)
        self._with_logprobs = generation.request.sampling.logprobs is not None
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_ids: dict[int, str] = {}
        self._num_events = 0
        self._has_ended = False

    def opening(self) -> Iterator[bytes]:
        """The events with the empty response."""
        response = self._response("in_progress")
        context = self._context
        if context.begin is not None:
            context.begin(StoredResponse(response, context.messages, context.input_items))
        yield _frame(ResponseEvent("response.created", self._number(), response))
        yield _frame(ResponseEvent("response.in_progress", self._number(), response))

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """The events for what the delta changes in the items."""
        for change in self._blocks.feed(delta):
            if change.change is Change.OPENED:
                yield from self._begin_events(change.block)
            elif change.change is Change.GREW:
                yield self._delta_event(change)
            else:
                yield from self._end_events(change.block)

    def ending(self) -> Iterator[bytes]:
        """The event with the complete response."""
        response = self.complete()
        is_complete = response.status == "completed"
        yield _frame(
            ResponseEvent(
                "response.completed" if is_complete else "response.incomplete",
                self._number(),
                response,
            )
        )

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The event with the response so far and its error."""
        facts = error_facts(error)
        code = "server_error" if facts.status >= 500 else "invalid_prompt"
        response = self._response("failed", ResponseError(code, facts.message))
        if self._in_background:
            self._store(response)
        yield _frame(ResponseEvent("response.failed", self._number(), response))

    def collect(self, delta: Delta) -> None:
        """Add a delta to the items, without events."""
        self._blocks.feed(delta)

    def complete(self) -> ResponseObject:
        """The finished response; it is stored here."""
        reason = self._blocks.finish_reason
        is_complete = reason is not None and reason.openai == "stop"
        response = self._response("completed" if is_complete else "incomplete")
        self._store(response)
        return response

    @property
    def response_id(self) -> str:
        """The id of the response."""
        return self._id

    def snapshot(self) -> ResponseObject:
        """The response so far, in progress."""
        output: list[OutputItem] = [
            replace(self._item(block), status="in_progress")
            if self._blocks.is_open(block)
            else self._item(block)
            for block in self._blocks.blocks
        ]
        return replace(self._response("in_progress"), output=output)

    def cancellation(self) -> Iterator[bytes]:
        """The event with what was written before the response was cancelled; it is stored here.
        OpenAI has no event of its own for this end.
        """
        if not self._has_ended:
            response = self._response("cancelled")
            self._store(response)
            yield _frame(ResponseEvent("response.incomplete", self._number(), response))

    @property
    def _in_background(self) -> bool:
        return self._generation.request.in_background

    def _store(self, response: ResponseObject) -> None:
        self._has_ended = True
        if self._context.store is not None:
            output = [_as_input(block) for block in self._blocks.blocks]
            messages = (*self._context.messages, *template_messages(output, self._model))
            self._context.store(StoredResponse(response, messages, self._context.input_items))

    def _begin_events(self, block: Block) -> Iterator[bytes]:
        item = self._item(block, "in_progress")
        yield _frame(ItemEvent("response.output_item.added", self._number(), block.index, item))
        if block.kind is not MessageBlockKind.CALL:
            yield _frame(
                PartEvent(
                    "response.content_part.added",
                    self._number(),
                    self._item_id(block),
                    block.index,
                    _CONTENT_INDEX,
                    self._part(block, "", ()),
                )
            )

    def _delta_event(self, change: BlockChange) -> bytes:
        block, delta = change.block, change.text
        item_id, number = self._item_id(block), self._number()
        if block.kind is MessageBlockKind.CALL:
            return _frame(
                ArgumentsEvent(
                    "response.function_call_arguments.delta",
                    number,
                    item_id,
                    block.index,
                    delta=delta,
                )
            )
        if block.kind is MessageBlockKind.REASONING:
            return _frame(
                TextEvent(
                    "response.reasoning_text.delta",
                    number,
                    item_id,
                    block.index,
                    _CONTENT_INDEX,
                    delta=delta,
                )
            )
        return _frame(
            TextEvent(
                "response.output_text.delta",
                number,
                item_id,
                block.index,
                _CONTENT_INDEX,
                delta=delta,
                logprobs=self._logprobs(change.logprobs),
            )
        )

    def _end_events(self, block: Block) -> Iterator[bytes]:
        item_id, text = self._item_id(block), block.text
        if block.kind is MessageBlockKind.CALL:
            yield _frame(
                ArgumentsEvent(
                    "response.function_call_arguments.done",
                    self._number(),
                    item_id,
                    block.index,
                    name="" if block.call is None else block.call.name,
                    arguments=text,
                )
            )
        else:
            part = self._part(block, text, block.logprobs)
            logprobs = part.logprobs if isinstance(part, OutputTextContent) else UNSET
            is_reasoning = block.kind is MessageBlockKind.REASONING
            yield _frame(
                TextEvent(
                    "response.reasoning_text.done" if is_reasoning else "response.output_text.done",
                    self._number(),
                    item_id,
                    block.index,
                    _CONTENT_INDEX,
                    text=text,
                    logprobs=logprobs,
                )
            )
            yield _frame(
                PartEvent(
                    "response.content_part.done",
                    self._number(),
                    item_id,
                    block.index,
                    _CONTENT_INDEX,
                    part,
                )
            )
        item = self._item(block)
        yield _frame(ItemEvent("response.output_item.done", self._number(), block.index, item))

    def _number(self) -> int:
        """The sequence number of the next event."""
        number = self._num_events
        self._num_events += 1
        return number

    def _item_id(self, block: Block) -> str:
        prefix = _ITEM_PREFIX[block.kind]
        return self._item_ids.setdefault(block.index, f"{prefix}{uuid.uuid4().hex}")

    def _item(self, block: Block, status: ItemStatus | None = None) -> OutputItem:
        """A block as an item; without its text if the status is `in_progress`."""
        has_begun = status is not None
        is_cut = block.cut or self._blocks.is_open(block)
        status = status or ("incomplete" if is_cut else "completed")
        item_id, text = self._item_id(block), "" if has_begun else block.text
        if block.call is not None:
            call = block.call
            return CallOutput(
                id=item_id, call_id=call.call_id, name=call.name, arguments=text, status=status
            )
        if block.kind is MessageBlockKind.REASONING:
            content = [] if has_begun else [ReasoningText(text)]
            seal = sealed(text) if self._context.seals and not has_begun else None
            return ReasoningOutput(
                id=item_id, content=content, encrypted_content=seal, status=status
            )
        parts = [] if has_begun else [OutputTextContent(text, self._logprobs(block.logprobs))]
        return MessageOutput(id=item_id, content=parts, status=status)

    def _part(
        self, block: Block, text: str, logprobs: Sequence[TokenLogprobs]
    ) -> OutputTextContent | ReasoningText:
        if block.kind is MessageBlockKind.REASONING:
            return ReasoningText(text)
        return OutputTextContent(text, self._logprobs(logprobs))

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        if not self._with_logprobs:
            return []
        tokenizer = self._model.engine.tokenizer
        return [token_logprob(tokenizer, each) for each in logprobs]

    def _response(
        self, status: ResponseStatus, error: ResponseError | None = None
    ) -> ResponseObject:
        fields, request = self._context.fields, self._generation.request
        has_begun = status == "in_progress"
        return ResponseObject(
            id=self._id,
            created_at=self._head.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            background=self._in_background,
            frequency_penalty=request.sampling.frequency_penalty,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            max_tool_calls=fields.max_tool_calls,
            metadata=fields.metadata or {},
            model=request.model,
            output=[] if has_begun else [self._item(block) for block in self._blocks.blocks],
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            presence_penalty=request.sampling.presence_penalty,
            previous_response_id=fields.previous_response_id,
            prompt_cache_key=fields.prompt_cache_key,
            reasoning=ReasoningSettings(
                None if fields.reasoning is None else fields.reasoning.effort
            ),
            safety_identifier=fields.safety_identifier,
            store=self._context.store is not None,
            temperature=request.sampling.temperature,
            text=_text_settings(fields),
            tool_choice="auto" if fields.tool_choice is None else fields.tool_choice,
            tools=_function_tools(fields),
            top_logprobs=fields.top_logprobs or 0,
            top_p=request.sampling.top_p,
            usage=None if has_begun else self._usage(),
            user=fields.user,
            seed=self._generation.seed,
            system_fingerprint=self._head.fingerprint,
            quickstep=UNSET if has_begun else requested_timings(self._generation, self._model),
        )

    def _usage(self) -> ResponseUsage:
        usage = self._generation.usage
        return ResponseUsage(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=ResponseInputDetails(usage.num_cached_tokens),
            output_tokens=usage.num_output_tokens,
            output_tokens_details=ResponseOutputDetails(self._blocks.num_reasoning_tokens),
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )


def _frame(event: StreamEvent) -> bytes:
    return event_frame(event.type, event)


def _as_input(block: Block) -> InputItem:
    """A block of the response as an input item of the next request."""
    if block.call is not None:
        call = block.call
        return FunctionCallItem("function_call", call.call_id, call.name, block.text)
    if block.kind is MessageBlockKind.REASONING:
        return ReasoningItem("reasoning", content=[ReasoningPart(block.text)])
    return MessageItem("assistant", block.text)


def _text_settings(fields: ResponsesRequest) -> TextSettings:
    """`text` in the response: the request's settings, or the defaults."""
    if fields.text is None:
        return TextSettings(TextFormat())
    return TextSettings(fields.text.format or TextFormat(), fields.text.verbosity or "medium")


def _function_tools(fields: ResponsesRequest) -> list[dict[str, Any]]:
    """`tools` in the response: the client's functions as it sent them, with the defaults."""
    return [
        {"description": None, "strict": False, "parameters": None, **tool}
        for tool in fields.tools or ()
        if tool.get("type") == "function"
    ]
