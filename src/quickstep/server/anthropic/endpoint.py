"""`/v1/messages`: Anthropic's Messages API over the same conversation as chat.

`Messages` is the API, `CountTokens` the route that only counts, `with_checked_betas` adds
the check of the header `anthropic-beta` to both. `http.errors` gives errors Anthropic's format.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType, structs
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.anthropic.request_types import (
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
from quickstep.server.anthropic.response_types import (
    BlockDelta,
    BlockStart,
    BlockStop,
    CacheCreation,
    InputDelta,
    MessageBlock,
    MessageDeltaEvent,
    MessageOutputDetails,
    MessageResponse,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopDetails,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    TokenCount,
    ToolUseContent,
)
from quickstep.server.anthropic.turns import begins_answer, marks_cache, template_messages
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.fields.sampling_fields import SamplingFields
from quickstep.server.generate.conversation import (
    Conversation,
    Effort,
    conversation_request,
    requested_effort,
)
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.generate.generation import Generation, Head, ParsedRequest
from quickstep.server.generate.message import (
    Block,
    BlockChange,
    Blocks,
    Change,
    MessageBlockKind,
    message_reader,
    partial_object,
)
from quickstep.server.generate.prompts import prompts_ids
from quickstep.server.generate.sampling import label
from quickstep.server.generate.structured import RequestedGrammar
from quickstep.server.generate.timings import RequestTimings, requested_timings
from quickstep.server.generate.tools import Function, OfferedTools, ToolChoice, is_left_out, offer
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import anthropic_shape, error_facts, json_response
from quickstep.server.http.event_stream import event_frame
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import Endpoint
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.options import FieldRules
from quickstep.types import Delta, FinishReason, Grammar

_SAME_NAME = ("temperature", "top_k", "top_p")
_STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP_TOKEN: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.DEADLINE: "max_tokens",
    FinishReason.REPETITION: "max_tokens",
    FinishReason.CONTEXT_LIMIT: "model_context_window_exceeded",
}
_BETA_HEADER = "anthropic-beta"
# Betas without a report: what is here without a beta, or permits what a server need not do. Most
# others bring fields of the body, which are checked like any field.
_HARMLESS_BETAS = frozenset(
    {
        # features that are here without a beta
        "messages-2023-12-15",
        "tools-2024-04-04",
        "tools-2024-05-16",
        "prompt-caching-2024-07-31",
        "extended-cache-ttl-2025-04-11",
        "token-counting-2024-11-01",
        "structured-outputs-2025-11-13",
        "effort-2025-11-24",
        "mid-conversation-system-2026-04-07",
        "thinking-token-count-2026-05-13",
        # longer outputs and contexts: the model's own limit applies and is reported
        "max-tokens-3-5-sonnet-2024-07-15",
        "output-128k-2025-02-19",
        "context-1m-2025-08-07",
        # permissions to write calls shorter, to send them sooner, to reason between them
        "token-efficient-tools-2025-02-19",
        "fine-grained-tool-streaming-2025-05-14",
        "interleaved-thinking-2025-05-14",
        # names of clients
        "claude-code-20250219",
        "oauth-2025-04-20",
    }
)


class Messages:
    """Parses the bodies of the API."""

    def parse(self, body: bytes, model: ServedModel, caller: str) -> ParsedRequest:
        """Parse and validate a body. Raises RequestError."""
        reader = FieldReader(model.server.field_rules)
        fields = reader.decode(body, MessagesRequest)
        if fields.temperature is not None and not 0 <= fields.temperature <= 1:
            raise RequestError(
                f"temperature is {fields.temperature:g}, it must be between 0 and 1",
                param="temperature",
            )
        same = {name: getattr(fields, name) for name in _SAME_NAME}
        shared = SamplingFields(
            model=fields.model,
            stop=fields.stop_sequences,
            thinking_budget=_reasoning_budget(fields, model, reader),
            **same,
        )
        request = conversation_request(
            _conversation(fields, model, reader, len(body)),
            shared,
            model,
            own={"max_tokens": fields.max_tokens},
            renamed={"stop": "stop_sequences", "thinking_budget": "thinking.budget_tokens"},
        )
        user = None if fields.metadata is None else fields.metadata.user_id
        return replace(
            request,
            stream=bool(fields.stream),
            request=structs.replace(
                request.request, tenant=label("metadata.user_id", user, model.server.limits)
            ),
            timings=False,
            ignored=reader.ignored,
            writer=partial(_MessagesWriter, model, marks_cache(fields)),
        )


class CountTokens:
    """The route that counts the input of a message."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    async def answer(self, request: Request) -> Response:
        """Return the number of tokens. Raises RequestError."""
        body, caller = body_of(request), caller_of(request)
        model = await self._models.of_body(body, caller)
        reader, lanes = FieldReader(model.server.field_rules), model.server.lanes.of(caller)

        def parse() -> Conversation:
            return _conversation(reader.decode(body, CountTokensRequest), model, reader, len(body))

        conversation = await lanes.do(len(body), parse)
        report_ignored(request, reader.ignored)
        prompts = [conversation.prompt]
        (ids,) = await prompts_ids(model.engine, prompts, lanes, max_len=None)
        return json_response(TokenCount(len(ids)))


def with_checked_betas(endpoint: Endpoint, rules: FieldRules) -> Endpoint:
    """The endpoint after a check of `anthropic-beta`; unknown features are reported as ignored."""

    async def answer(request: Request) -> Response:
        reader = FieldReader(rules)
        for value in request.headers.getlist(_BETA_HEADER):
            for beta in filter(None, map(str.strip, value.split(","))):
                if beta not in _HARMLESS_BETAS:
                    reader.ignore(f"{_BETA_HEADER}={beta[:64]}", "there is no such beta feature")
        report_ignored(request, reader.ignored)
        return await endpoint(request)

    return answer


def _conversation(
    fields: CountTokensRequest, model: ServedModel, reader: FieldReader, num_chars: int
) -> Conversation:
    messages = template_messages(fields, model, reader)
    continued = begins_answer(fields)
    effort = _effort(fields, model, reader)
    return Conversation(
        messages,
        num_chars=num_chars,
        offered=_offered_tools(fields, model, reader),
        grammar=_requested_grammar(fields),
        extra=effort.variables,
        add_generation_prompt=not continued,
        continued=continued,
        effort_budget=effort.budget,
    )


def _offered_tools(
    fields: CountTokensRequest, model: ServedModel, reader: FieldReader
) -> OfferedTools:
    functions = [
        _function(reader.convert(tool, CustomToolSpec, f"tools[{index}]"), f"tools[{index}]")
        for index, tool in enumerate(fields.tools or ())
        if not is_left_out(tool, "custom", reader)
    ]
    match fields.tool_choice:
        case NoChoice():
            return offer(functions, ToolChoice(may_call=False), one_call=False, model=model)
        case AnyTool(name=name):
            choice = ToolChoice(must_call=True, names=(name,))
        case AnyChoice():
            choice = ToolChoice(must_call=True)
        case _:
            choice = ToolChoice()
    requested = fields.tool_choice
    one_call = requested is not None and requested.disable_parallel_tool_use is True
    return offer(functions, choice, one_call, model)


def _function(spec: CustomToolSpec, path: str) -> Function:
    strict = bool(spec.strict)
    return Function(spec.name, spec.description, spec.input_schema, strict, path, "input_schema")


def _requested_grammar(fields: CountTokensRequest) -> RequestedGrammar | None:
    config = fields.output_config
    if config is None or config.format is None:
        return None
    return RequestedGrammar(
        Grammar.of_json_schema(config.format.schema), "output_config.format.schema"
    )


def _effort(fields: CountTokensRequest, model: ServedModel, reader: FieldReader) -> Effort:
    """How the model is to reason; a mode that it does not have is reported."""
    thinking, config = fields.thinking, fields.output_config
    level = None if config is None else config.effort
    effort = requested_effort(level, "output_config.effort", model, reader)
    if thinking is None:
        return effort
    if isinstance(thinking, DisabledThinking):
        return Effort({**effort.variables, "enable_thinking": False})
    if isinstance(thinking, BetweenToolsThinking) or model.formats.reasoning is None:
        kind = thinking.__struct_config__.tag
        reader.ignore("thinking", f"{model.engine.model_name} has no mode {kind}")
        return effort
    return replace(effort, variables={**effort.variables, "enable_thinking": True})


def _reasoning_budget(
    fields: MessagesRequest, model: ServedModel, reader: FieldReader
) -> int | None:
    """The reasoning's token limit; reported if the model has no tags. Raises RequestError."""
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
    reasoning = model.formats.reasoning
    if reasoning is None:
        return None  # `thinking` is reported already
    if not reasoning.opening:
        name = model.engine.model_name
        reader.ignore("thinking.budget_tokens", f"{name} sets no reasoning apart by tags")
        return None
    return budget


class _MessagesWriter:
    """Writes one message, complete or as Anthropic's events."""

    def __init__(
        self, model: ServedModel, marks_cache: bool, generation: Generation, head: Head
    ) -> None:
        self._model = model
        self._generation = generation
        self._block_size = model.engine.block_size if marks_cache else None
        (choice,) = generation.choices
        tokenizer = model.engine.tokenizer
        self._blocks = Blocks(message_reader(generation, choice, tokenizer, "toolu_"))
        self._id = f"msg_{uuid.uuid4().hex[:24]}"

    def opening(self) -> Iterator[bytes]:
        """The events of the empty message."""
        yield _event(MessageStart(self._message()))
        yield _event(Ping())

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """The events for what the delta changes in the blocks."""
        for change in self._blocks.feed(delta):
            yield from _block_events(change)

    def ending(self) -> Iterator[bytes]:
        """The events with the stop reason and the usage."""
        message = self._message()
        stop = StopDetails(message.stop_reason, message.stop_sequence)
        timings = requested_timings(self._generation, self._model)
        yield _event(MessageDeltaEvent(stop, message.usage, timings))
        yield _event(MessageStop())

    def failure(self, error: Exception) -> Iterator[bytes]:
        """An error event."""
        yield event_frame("error", anthropic_shape(error_facts(error))[1])

    def collect(self, delta: Delta) -> None:
        """Add a delta to the blocks, without events."""
        self._blocks.feed(delta)

    def complete(self) -> MessageResponse:
        """The finished message."""
        return self._message(
            [_content(block) for block in self._blocks.blocks],
            requested_timings(self._generation, self._model),
        )

    def _message(
        self,
        content: list[MessageBlock] | None = None,
        timings: RequestTimings | UnsetType = UNSET,
    ) -> MessageResponse:
        reason, sequence = self._stop_reason()
        return MessageResponse(
            id=self._id,
            model=self._generation.request.model,
            content=content or [],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
            quickstep=timings,
        )

    def _stop_reason(self) -> tuple[str | None, str | None]:
        last = self._blocks.last
        if last is None or last.finish_reason is None:
            return None, None
        reason = _STOP_REASONS.get(last.finish_reason, "end_turn")
        if reason == "stop_sequence":
            return reason, str(last.stop_reason)
        return ("tool_use" if self._blocks.has_calls and reason == "end_turn" else reason), None

    def _usage(self) -> MessageUsage:
        usage = self._generation.usage
        num_read, num_written = usage.num_cached_tokens, 0
        if self._block_size is not None:
            # the last token is always computed, so its block is never read
            num_in_full_blocks = (
                (usage.num_prompt_tokens - 1) // self._block_size * self._block_size
            )
            num_written = max(0, num_in_full_blocks - num_read)
        return MessageUsage(
            input_tokens=usage.num_prompt_tokens - num_read - num_written,
            output_tokens=usage.num_output_tokens,
            cache_read_input_tokens=num_read,
            cache_creation_input_tokens=num_written,
            cache_creation=CacheCreation(ephemeral_5m_input_tokens=num_written),
            output_tokens_details=MessageOutputDetails(self._blocks.num_reasoning_tokens),
        )


def _event(event: msgspec.Struct) -> bytes:
    return event_frame(str(event.__struct_config__.tag), event)


def _content(block: Block) -> MessageBlock:
    if block.call is not None:
        return ToolUseContent(block.call.call_id, block.call.name, partial_object(block.text))
    if block.kind is MessageBlockKind.REASONING:
        return ThinkingContent(block.text, _signature(block))
    return TextContent(block.text)


def _signature(block: Block) -> str:
    """A digest of the reasoning. No one verifies it, but clients send back signed blocks only."""
    return hashlib.sha256(block.text.encode()).hexdigest()


def _block_events(change: BlockChange) -> Iterator[bytes]:
    block = change.block
    if change.change is Change.CLOSED and block.kind is MessageBlockKind.REASONING:
        yield _event(BlockDelta(block.index, SignatureDelta(_signature(block))))
    yield _block_event(change)


def _block_event(change: BlockChange) -> bytes:
    block = change.block
    if change.change is Change.OPENED:
        empty: MessageBlock = TextContent("")
        if block.call is not None:
            empty = ToolUseContent(block.call.call_id, block.call.name, {})
        elif block.kind is MessageBlockKind.REASONING:
            empty = ThinkingContent("")
        return _event(BlockStart(block.index, empty))
    if change.change is Change.CLOSED:
        return _event(BlockStop(block.index))
    if block.kind is MessageBlockKind.CALL:
        return _event(BlockDelta(block.index, InputDelta(change.text)))
    if block.kind is MessageBlockKind.REASONING:
        return _event(BlockDelta(block.index, ThinkingDelta(change.text)))
    return _event(BlockDelta(block.index, TextDelta(change.text)))
