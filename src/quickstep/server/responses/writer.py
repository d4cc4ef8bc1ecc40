"""One response, whole or as OpenAI's events.

    created, in_progress, per item: added, part added, deltas, done, part done, item done; completed

Every event has a sequence number. The last one carries the whole response, which is the same that
a request without a stream is answered with.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from quickstep.server.generate.adapter import Served
from quickstep.server.generate.generation import ChoiceDelta, Generation, Head
from quickstep.server.generate.message import (
    Block,
    BlockChange,
    BlockKind,
    Blocks,
    Change,
    message_reader,
)
from quickstep.server.http.errors import error_facts
from quickstep.server.http.event_stream import event_frame
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
    ItemEvent,
    MessageOutput,
    OutputItem,
    OutputText,
    PartEvent,
    ReasoningOutput,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    TextEvent,
)
from quickstep.server.responses.store import StoredResponse
from quickstep.types import TokenLogprobs

__all__ = ["ResponsesWriter", "Turn"]

# OpenAI's word for every end that came too early: it has none for a deadline
_INCOMPLETE = {"reason": "max_output_tokens"}
_ITEM_PREFIX = {BlockKind.REASONING: "rs_", BlockKind.TEXT: "msg_", BlockKind.CALL: "fc_"}
_Status = str


class Turn(msgspec.Struct, frozen=True):
    """What was asked, and what becomes of the answer.

    Attributes:
        messages: The conversation so far, instructions not included.
        input_items: The request's own items, as they are listed later.
        seals: Reasoning items carry their text as `encrypted_content` too.
        store: Where a finished response goes, None for nowhere.
    """

    fields: ResponsesRequest
    messages: tuple[Mapping[str, Any], ...]
    input_items: tuple[Mapping[str, Any], ...]
    seals: bool
    store: Callable[[StoredResponse], None] | None


class ResponsesWriter:
    """Writes one response."""

    def __init__(self, served: Served, turn: Turn, generation: Generation, head: Head) -> None:
        self._served = served
        self._turn = turn
        self._generation = generation
        self._head = head
        (choice,) = generation.choices
        reader = message_reader(generation, choice, served.engine.tokenizer)
        self._blocks = Blocks(reader, never_empty=True)
        self._with_logprobs = generation.request.sampling.logprobs is not None
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_ids: dict[int, str] = {}
        self._sequence_number = 0

    def opening(self) -> Iterator[bytes]:
        """The empty response."""
        for name in ("created", "in_progress"):
            yield self._event(
                ResponseEvent, f"response.{name}", response=self._response("in_progress")
            )

    def delta(self, item: ChoiceDelta) -> Iterator[bytes]:
        """What the delta changes of the items."""
        for news in self._blocks.feed(item.delta):
            if news.change is Change.OPENED:
                yield from self._opened(news.block)
            elif news.change is Change.GREW:
                yield self._grew(news)
            else:
                yield from self._closed(news.block)

    def ending(self) -> Iterator[bytes]:
        """The whole response."""
        response = self.complete()
        yield self._event(ResponseEvent, f"response.{response.status}", response=response)

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The response so far, with the error in it."""
        facts = error_facts(error)
        code = "server_error" if facts.status >= 500 else "invalid_prompt"
        told = {"code": code, "message": facts.message}
        yield self._event(ResponseEvent, "response.failed", response=self._response("failed", told))

    def collect(self, item: ChoiceDelta) -> None:
        """The same items, without events."""
        self._blocks.feed(item.delta)

    def complete(self) -> ResponseObject:
        """The finished response, which is stored now."""
        reason = self._blocks.finish_reason
        done = reason is not None and reason.openai == "stop"
        response = self._response("completed" if done else "incomplete")
        if self._turn.store is not None:
            said = template_messages(self._said(), self._served)
            messages = (*self._turn.messages, *said)
            self._turn.store(StoredResponse(response, messages, self._turn.input_items))
        return response

    def _said(self) -> list[InputItem]:
        """The answer as input items of the next request."""
        return [_as_input(block) for block in self._blocks.blocks]

    def _opened(self, block: Block) -> Iterator[bytes]:
        place = {"output_index": block.index}
        yield self._event(
            ItemEvent, "response.output_item.added", **place, item=self._item(block, "in_progress")
        )
        if block.kind is not BlockKind.CALL:
            part = self._part(block, "", ())
            yield self._event(
                PartEvent, "response.content_part.added", **self._place(block), part=part
            )

    def _grew(self, news: BlockChange) -> bytes:
        block, delta = news.block, news.text
        if block.kind is BlockKind.CALL:
            place = {"item_id": self._item_id(block), "output_index": block.index}
            return self._event(
                ArgumentsEvent, "response.function_call_arguments.delta", **place, delta=delta
            )
        place = self._place(block)
        if block.kind is BlockKind.REASONING:
            return self._event(TextEvent, "response.reasoning_text.delta", **place, delta=delta)
        listed = self._listed(news.logprobs)
        return self._event(
            TextEvent, "response.output_text.delta", **place, delta=delta, logprobs=listed
        )

    def _closed(self, block: Block) -> Iterator[bytes]:
        if block.kind is BlockKind.CALL:
            name = "" if block.call is None else block.call.name
            yield self._event(
                ArgumentsEvent,
                "response.function_call_arguments.done",
                item_id=self._item_id(block),
                output_index=block.index,
                name=name,
                arguments=block.text,
            )
        else:
            place, text = self._place(block), block.text
            if block.kind is BlockKind.REASONING:
                yield self._event(TextEvent, "response.reasoning_text.done", **place, text=text)
            else:
                listed = self._listed(block.logprobs)
                yield self._event(
                    TextEvent, "response.output_text.done", **place, text=text, logprobs=listed
                )
            part = self._part(block, text, block.logprobs)
            yield self._event(PartEvent, "response.content_part.done", **place, part=part)
        yield self._event(
            ItemEvent, "response.output_item.done", output_index=block.index, item=self._item(block)
        )

    def _event(
        self, event: Callable[..., msgspec.Struct], name: str, /, **content: object
    ) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return event_frame(name, event(type=name, sequence_number=number, **content))

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}

    def _item_id(self, block: Block) -> str:
        prefix = _ITEM_PREFIX[block.kind]
        return self._item_ids.setdefault(block.index, f"{prefix}{uuid.uuid4().hex}")

    def _item(self, block: Block, status: _Status | None = None) -> OutputItem:
        """A block as an item; without its text where it has just begun."""
        begun = status is not None
        is_cut = block.cut or self._blocks.is_open(block)
        status = status or ("incomplete" if is_cut else "completed")
        item_id, text = self._item_id(block), "" if begun else block.text
        if block.call is not None:
            call = block.call
            return CallOutput(
                id=item_id, call_id=call.call_id, name=call.name, arguments=text, status=status
            )
        if block.kind is BlockKind.REASONING:
            content = [] if begun else [ReasoningText(text)]
            seal = sealed(text) if self._turn.seals and not begun else None
            return ReasoningOutput(
                id=item_id, content=content, encrypted_content=seal, status=status
            )
        parts = [] if begun else [OutputText(text, self._listed(block.logprobs))]
        return MessageOutput(id=item_id, content=parts, status=status)

    def _part(
        self, block: Block, text: str, logprobs: tuple[TokenLogprobs, ...] | list[TokenLogprobs]
    ) -> OutputText | ReasoningText:
        if block.kind is BlockKind.REASONING:
            return ReasoningText(text)
        return OutputText(text, self._listed(logprobs))

    def _listed(
        self, logprobs: tuple[TokenLogprobs, ...] | list[TokenLogprobs]
    ) -> list[TokenLogprob]:
        if not self._with_logprobs:
            return []
        tokenizer = self._served.engine.tokenizer
        return [token_logprob(tokenizer, each) for each in logprobs]

    def _response(self, status: Any, error: dict[str, Any] | None = None) -> ResponseObject:
        fields, request = self._turn.fields, self._generation.request
        begun = status == "in_progress"
        effort = None if fields.reasoning is None else fields.reasoning.effort
        return ResponseObject(
            id=self._id,
            created_at=self._head.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            frequency_penalty=request.sampling.frequency_penalty,
            incomplete_details=_INCOMPLETE if status == "incomplete" else None,
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            max_tool_calls=fields.max_tool_calls,
            metadata=fields.metadata or {},
            model=request.model,
            output=[] if begun else [self._item(block) for block in self._blocks.blocks],
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            presence_penalty=request.sampling.presence_penalty,
            previous_response_id=fields.previous_response_id,
            prompt_cache_key=fields.prompt_cache_key,
            reasoning={"effort": effort, "summary": None},
            safety_identifier=fields.safety_identifier,
            store=self._turn.store is not None,
            temperature=request.sampling.temperature,
            text=_listed_text(fields),
            tool_choice="auto" if fields.tool_choice is None else fields.tool_choice,
            tools=_listed_tools(fields),
            top_logprobs=fields.top_logprobs or 0,
            top_p=request.sampling.top_p,
            usage=None if begun else self._usage(),
            user=fields.user,
            seed=self._generation.seed,
            system_fingerprint=self._head.fingerprint,
        )

    def _usage(self) -> ResponseUsage:
        usage = self._generation.usage
        return ResponseUsage(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details={
                "cached_tokens": usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            output_tokens=usage.num_output_tokens,
            output_tokens_details={"reasoning_tokens": self._blocks.num_reasoning_tokens},
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )


def _as_input(block: Block) -> InputItem:
    if block.call is not None:
        call = block.call
        return FunctionCallItem("function_call", call.call_id, call.name, block.text)
    if block.kind is BlockKind.REASONING:
        return ReasoningItem("reasoning", content=[ReasoningPart(block.text)])
    return MessageItem("assistant", block.text)


def _listed_text(fields: ResponsesRequest) -> dict[str, Any]:
    """`text` as the response repeats it."""
    form = None if fields.text is None else fields.text.format
    verbosity = None if fields.text is None else fields.text.verbosity
    return {"format": form or {"type": "text"}, "verbosity": verbosity or "medium"}


def _listed_tools(fields: ResponsesRequest) -> list[dict[str, Any]]:
    """The functions as the response repeats them, with what holds where the client was silent."""
    return [
        {"description": None, "strict": False, "parameters": None, **tool}
        for tool in fields.tools or ()
        if tool.get("type") == "function"
    ]
