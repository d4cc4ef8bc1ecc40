"""`/v1/messages`: Anthropic's Messages API over the same conversation as chat.

`Messages` is the surface, `CountTokens` the route that only counts. Errors take Anthropic's shape
in `error_shapes`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.anthropic_messages import begins_answer, template_messages
from quickstep.server.anthropic_schema import (
    MESSAGES_REFUSED,
    AnyChoice,
    AnyTool,
    BetweenToolsThinking,
    CountTokensRequest,
    CustomToolSpec,
    DisabledThinking,
    EnabledThinking,
    MessagesRequest,
    NoChoice,
)
from quickstep.server.api_errors import error_facts, json_response
from quickstep.server.chat_message import message_reader
from quickstep.server.conversation import Conversation, conversation_request, told_effort
from quickstep.server.error_shapes import anthropic_shape
from quickstep.server.frames import event_frame
from quickstep.server.generation import ChoiceDelta, Generation
from quickstep.server.message_blocks import (
    Block,
    BlockKind,
    BlockNews,
    Blocks,
    Change,
    partial_object,
)
from quickstep.server.prompts import prompts_ids
from quickstep.server.refused import Refusal, refuse
from quickstep.server.response_messages import (
    MessageBlock,
    MessageResponse,
    MessageUsage,
    TextContent,
    ThinkingContent,
    TokenCount,
    ToolUseContent,
)
from quickstep.server.routes import request_id
from quickstep.server.sampling import label
from quickstep.server.schemas import SamplingFields, converted, decode
from quickstep.server.structured import AskedGrammar
from quickstep.server.surface import Asked, Head, Served
from quickstep.server.tools import Function, OfferedTools, ToolChoice, offer
from quickstep.types import FinishReason, Grammar

__all__ = ["TOOL_REFUSED", "CountTokens", "Messages"]

_SAME_NAME = ("temperature", "top_k", "top_p")
_STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP_TOKEN: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.DEADLINE: "max_tokens",
    FinishReason.CONTEXT_LIMIT: "model_context_window_exceeded",
}
TOOL_REFUSED: Mapping[str, Refusal] = {
    "allowed_callers": Refusal((["direct"],), "only the model calls"),
    "defer_loading": Refusal((False,), "every tool is shown"),
    "eager_input_streaming": Refusal((False,), "a call is sent once it is known to be one"),
    "input_examples": Refusal(([],), "templates have no place for examples"),
}


class Messages:
    """The surface."""

    def parse(self, body: bytes, served: Served, caller: str) -> Asked:
        """Validate. Raises RequestError."""
        fields = decode(body, MessagesRequest)
        served.model(fields.model)
        refuse(fields, MESSAGES_REFUSED)
        if fields.temperature is not None and not 0 <= fields.temperature <= 1:
            raise RequestError(
                f"temperature is {fields.temperature:g}, it must be between 0 and 1",
                param="temperature",
            )
        same = {name: getattr(fields, name) for name in _SAME_NAME}
        shared = SamplingFields(
            model=fields.model, stop=fields.stop_sequences, thinking_budget=_budget(fields), **same
        )
        request = conversation_request(
            _conversation(fields, served, len(body)),
            shared,
            served,
            own={"max_tokens": fields.max_tokens},
            renamed={"stop": "stop_sequences", "thinking_budget": "thinking.budget_tokens"},
        )
        user = None if fields.metadata is None else fields.metadata.user_id
        request = replace(
            request,
            stream=bool(fields.stream),
            tenant=label("metadata.user_id", user, served.limits),
        )
        return Asked(request, partial(_MessagesWriter, served))


class CountTokens:
    """The route that counts the input of a message."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def answer(self, request: Request) -> Response:
        """The count. Raises RequestError."""
        body = await request.body()
        served = self._served
        conversation = await served.lanes.parse(len(body), lambda: self._asked(body))
        prompts = [conversation.prompt]
        (ids,) = await prompts_ids(served.engine, prompts, served.lanes, max_len=None)
        return json_response(TokenCount(len(ids)), headers=request_id(request))

    def _asked(self, body: bytes) -> Conversation:
        fields = decode(body, CountTokensRequest)
        self._served.model(fields.model)
        refuse(fields, {name: MESSAGES_REFUSED[name] for name in _refused_of(CountTokensRequest)})
        return _conversation(fields, self._served, len(body))


def _refused_of(schema: type[msgspec.Struct]) -> list[str]:
    return [name for name in MESSAGES_REFUSED if name in schema.__struct_fields__]


def _conversation(fields: CountTokensRequest, served: Served, num_chars: int) -> Conversation:
    messages = template_messages(fields, served)
    continued = begins_answer(fields)
    return Conversation(
        messages,
        num_chars=num_chars,
        offered=_offered(fields, served),
        asked=_asked(fields),
        extra=_thinking(fields, served),
        add_generation_prompt=not continued,
        continued=continued,
    )


def _offered(fields: CountTokensRequest, served: Served) -> OfferedTools:
    functions = [_function(tool, f"tools[{at}]") for at, tool in enumerate(fields.tools or ())]
    match fields.tool_choice:
        case NoChoice():
            return offer(functions, ToolChoice(may_call=False), one_call=False, served=served)
        case AnyTool(name=name):
            choice = ToolChoice(must_call=True, names=(name,))
        case AnyChoice():
            choice = ToolChoice(must_call=True)
        case _:
            choice = ToolChoice()
    told = fields.tool_choice
    one_call = told is not None and told.disable_parallel_tool_use is True
    return offer(functions, choice, one_call, served)


def _function(tool: dict[str, Any], path: str) -> Function:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        place = f"{path}.type"
        shown = repr(kind)[:64]
        raise RequestError(
            f"{place} is {shown}: the server runs no tools, send custom", param=place
        )
    spec = converted(tool, CustomToolSpec, path)
    for name, refusal in TOOL_REFUSED.items():
        if not refusal.allows(getattr(spec, name)):
            place = f"{path}.{name}"
            raise RequestError(f"{place} is not supported: {refusal.why}", param=place)
    strict = bool(spec.strict)
    return Function(spec.name, spec.description, spec.input_schema, strict, path, "input_schema")


def _asked(fields: CountTokensRequest) -> AskedGrammar | None:
    config = fields.output_config
    if config is None or config.format is None:
        return None
    return AskedGrammar(Grammar.of_json_schema(config.format.schema), "output_config.format.schema")


def _thinking(fields: CountTokensRequest, served: Served) -> Mapping[str, Any]:
    """What the template is told of the reasoning. Raises RequestError."""
    thinking, config = fields.thinking, fields.output_config
    effort = None if config is None else config.effort
    if thinking is None:
        return told_effort(effort, "output_config.effort", served)
    if effort is not None:
        raise RequestError(
            "output_config.effort and thinking both say how to reason; send one of them",
            param="output_config.effort",
        )
    if isinstance(thinking, DisabledThinking):
        return {"enable_thinking": False}
    if isinstance(thinking, BetweenToolsThinking) or served.formats.reasoning is None:
        kind = thinking.__struct_config__.tag
        raise RequestError(
            f"thinking.type {kind} is not supported: {served.engine.model_name} has no such mode",
            param="thinking.type",
        )
    if thinking.display == "omitted":
        raise RequestError(
            "thinking.display omitted is not supported: the reasoning is shown",
            param="thinking.display",
        )
    return {"enable_thinking": True}


def _budget(fields: MessagesRequest) -> int | None:
    """The tokens of the reasoning. Raises RequestError."""
    thinking = fields.thinking
    if not isinstance(thinking, EnabledThinking):
        return None
    budget = thinking.budget_tokens
    if not 1 <= budget < fields.max_tokens:
        raise RequestError(
            f"thinking.budget_tokens is {budget}, it must be between 1 and max_tokens - 1 "
            f"({fields.max_tokens - 1})",
            param="thinking.budget_tokens",
        )
    return budget


class _MessagesWriter:
    """One message, whole or as Anthropic's events."""

    def __init__(self, served: Served, generation: Generation, head: Head) -> None:
        self._generation = generation
        (choice,) = generation.choices
        tokenizer = served.engine.tokenizer
        self._blocks = Blocks(message_reader(generation, choice, tokenizer, "toolu_"))
        self._id = f"msg_{uuid.uuid4().hex[:24]}"

    def opening(self) -> Iterator[bytes]:
        """The empty message."""
        yield _event("message_start", message=self._message())
        yield _event("ping")

    def news(self, item: ChoiceDelta) -> Iterator[bytes]:
        """What the delta changes of the blocks."""
        for news in self._blocks.feed(item.delta):
            yield _block_event(news)

    def ending(self) -> Iterator[bytes]:
        """Why it ended, and the usage."""
        message = self._message()
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield _event("message_delta", delta=delta, usage=message.usage)
        yield _event("message_stop")

    def failure(self, error: Exception) -> Iterator[bytes]:
        """An error event."""
        yield event_frame("error", anthropic_shape(error_facts(error))[1])

    def note(self, item: ChoiceDelta) -> None:
        """The same blocks, without events."""
        self._blocks.feed(item.delta)

    def whole(self) -> MessageResponse:
        """The finished message."""
        return self._message([_content(block) for block in self._blocks.blocks])

    def _message(self, content: list[MessageBlock] | None = None) -> MessageResponse:
        reason, sequence = self._stop()
        return MessageResponse(
            id=self._id,
            model=self._generation.request.model,
            content=content or [],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _stop(self) -> tuple[str | None, str | None]:
        last = self._blocks.last
        if last is None or last.finish_reason is None:
            return None, None
        reason = _STOP_REASONS.get(last.finish_reason, "end_turn")
        if reason == "stop_sequence":
            return reason, str(last.stop_reason)
        return ("tool_use" if self._blocks.has_calls and reason == "end_turn" else reason), None

    def _usage(self) -> MessageUsage:
        usage = self._generation.usage
        return MessageUsage(
            input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
            output_tokens=usage.num_output_tokens,
            cache_read_input_tokens=usage.num_cached_tokens,
            output_tokens_details={"thinking_tokens": self._blocks.num_reasoning_tokens},
        )


def _event(name: str, /, **content: object) -> bytes:
    return event_frame(name, {"type": name, **content})


def _content(block: Block) -> MessageBlock:
    if block.call is not None:
        return ToolUseContent(block.call.call_id, block.call.name, partial_object(block.text))
    if block.kind is BlockKind.REASONING:
        return ThinkingContent(block.text)
    return TextContent(block.text)


def _block_event(news: BlockNews) -> bytes:
    block = news.block
    if news.change is Change.OPENED:
        empty: MessageBlock = TextContent("")
        if block.call is not None:
            empty = ToolUseContent(block.call.call_id, block.call.name, {})
        elif block.kind is BlockKind.REASONING:
            empty = ThinkingContent("")
        return _event("content_block_start", index=block.index, content_block=empty)
    if news.change is Change.CLOSED:
        return _event("content_block_stop", index=block.index)
    if block.kind is BlockKind.CALL:
        delta = {"type": "input_json_delta", "partial_json": news.text}
    elif block.kind is BlockKind.REASONING:
        delta = {"type": "thinking_delta", "thinking": news.text}
    else:
        delta = {"type": "text_delta", "text": news.text}
    return _event("content_block_delta", index=block.index, delta=delta)
