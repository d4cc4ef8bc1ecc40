"""`/v1/chat/completions`: a conversation in, the assistant's next message out.

`Chat` parses a body, `ChatWriter` writes one request's response: the model's text is split into
content, reasoning and tool calls, and a stream's deltas add up to the complete message. Reasoning
has two names, since clients read either: `reasoning_content` and `reasoning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, structs
from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import reports_progress, response_flags
from quickstep.server.generate.conversation import (
    Conversation,
    check_continues,
    check_shows_calls,
    checked_metadata,
    conversation_request,
    past_call,
    requested_effort,
    tenant_of,
    verbosity_in_template,
)
from quickstep.server.generate.generation import (
    Choice,
    Generation,
    Head,
    ParsedRequest,
)
from quickstep.server.generate.message import message_reader
from quickstep.server.generate.sampling import label, num_alternatives
from quickstep.server.generate.structured import requested_grammar
from quickstep.server.generate.tools import functions_of, offer, tool_choice_of
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.choices import (
    Envelope,
    beam_params,
    failure_frames,
    own_values,
    ranked_logprobs,
    requested_output,
    token_logprob,
    truncation_of,
)
from quickstep.server.openai.request_types import (
    AssistantMessage,
    ChatRequest,
    Content,
    DeveloperMessage,
    FunctionMessage,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from quickstep.server.openai.response_types import (
    AnsweredFunction,
    AnsweredMessage,
    AnsweredToolCall,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    StreamedFunction,
    StreamedToolCall,
)
from quickstep.server.options import RequestLimits
from quickstep.text.message_content import Content as TemplateContent
from quickstep.text.message_content import text_of, text_part
from quickstep.text.tool_calls.message_delta import (
    CallDelta,
    ContentDelta,
    FunctionCall,
    MessageDelta,
    MessagePart,
    ReasoningDelta,
)
from quickstep.types import Delta, TokenLogprobs

_EMPTY = ChatDelta()


class Chat:
    """The API of chat."""

    def parse(self, body: bytes, model: ServedModel, caller: str = "") -> ParsedRequest:
        """Validate a body. Raises RequestError."""
        reader = FieldReader(model.server.field_rules)
        fields = reader.decode(body, ChatRequest)
        if not fields.messages:
            raise RequestError("messages is an empty list", param="messages")
        messages = tuple(_message(place, item) for place, item in enumerate(fields.messages))
        for place, message in enumerate(messages):
            if "tool_calls" in message:
                check_shows_calls(model, f"messages[{place}].tool_calls")
        effort = requested_effort(fields.reasoning_effort, "reasoning_effort", model, reader)
        levels = {
            **effort.variables,
            **verbosity_in_template(fields.verbosity, "verbosity", model, reader),
        }
        conversation = Conversation(
            messages,
            num_chars=len(body),
            offered=offer(
                functions_of(fields.tools or (), reader),
                tool_choice_of(fields.tool_choice),
                fields.parallel_tool_calls is False,
                model,
            ),
            grammar=requested_grammar(fields),
            add_generation_prompt=_opens_message(fields, messages),
            continued=bool(fields.continue_final_message),
            extra={**levels, **(fields.chat_template_kwargs or {})},
            effort_budget=effort.budget,
        )
        max_tokens, max_tokens_name = _max_tokens(fields)
        requested = requested_output(fields, model, _num_logprobs(fields, model))
        requested = replace(requested, before=_echo(fields, messages[-1], reader))
        own = {**own_values(fields, model, requested), "max_tokens": max_tokens}
        renamed = {"max_tokens": max_tokens_name, "logprobs": "top_logprobs"}
        request = conversation_request(conversation, fields, model, own, renamed)
        return replace(
            request,
            model=model.name_or_default(fields.model),
            request=structs.replace(
                request.request,
                tenant=tenant_of(fields.user, fields.safety_identifier, model.server.limits),
                reports_progress=reports_progress(fields, reader),
            ),
            echoed=_echoed(fields, model.server.limits),
            requested_output=requested,
            beams=beam_params(fields, model, request.sampling),
            truncation=truncation_of(fields, max_tokens, model),
            adapter=None if fields.lora is None else model.adapters.mix(fields.lora),
            ignored=reader.ignored,
            writer=partial(ChatWriter, model),
            **response_flags(fields, model),
        )


def _opens_message(fields: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the template opens a message, instead of continuing the last one."""
    if not fields.continue_final_message:
        return fields.add_generation_prompt is not False
    if fields.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; send one of them",
            param="continue_final_message",
        )
    check_continues(messages[-1], f"messages[{len(messages) - 1}]")
    return False


def _max_tokens(fields: ChatRequest) -> tuple[int | None, str]:
    """The limit, and the name that the client used. Both names may be sent if they agree."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; send one of them",
            param="max_completion_tokens",
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _echo(fields: ChatRequest, last: Mapping[str, Any], reader: FieldReader) -> str:
    """The text that `echo` puts before the response: the last message, if it is the assistant's."""
    if not fields.echo:
        return ""
    if last["role"] != "assistant":
        reader.ignore("echo", "the last message is not the assistant's")
        return ""
    return text_of(last["content"])


def _num_logprobs(fields: ChatRequest, model: ServedModel) -> int | None:
    if not fields.logprobs:
        if fields.top_logprobs is not None:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return num_alternatives("top_logprobs", fields.top_logprobs or 0, model)


def _echoed(fields: ChatRequest, limits: RequestLimits) -> dict[str, Any]:
    """Fields that the response repeats."""
    # checked only: one engine can hit every cached prefix without a key
    label("prompt_cache_key", fields.prompt_cache_key, limits)
    echoed: dict[str, Any] = {}
    if fields.metadata is not None:
        echoed["metadata"] = checked_metadata(fields.metadata, limits)
    if fields.service_tier is not None:
        echoed["service_tier"] = "default"
    return echoed


def _message(place: int, message: Message) -> Mapping[str, Any]:
    """One message as the template reads it. Raises RequestError with its path."""
    path = f"messages[{place}]"
    match message:
        case SystemMessage() | DeveloperMessage():
            return _plain("system", message.content, message.name, path)
        case UserMessage():
            return _plain("user", message.content, message.name, path)
        case ToolMessage():
            plain = _plain("tool", message.content, message.name, path)
            return {**plain, "tool_call_id": message.tool_call_id}
        case AssistantMessage():
            return _assistant(message, path)
        case FunctionMessage():
            raise RequestError(
                f"{path}.role function is not supported; send role tool", param=f"{path}.role"
            )


def _plain(role: str, content: Content, name: str | None, path: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": _content(content, f"{path}.content")}
    if name is not None:
        message["name"] = name
    return message


def _assistant(message: AssistantMessage, path: str) -> dict[str, Any]:
    reasoning = (
        message.reasoning if message.reasoning_content is None else message.reasoning_content
    )
    if message.content is None and not message.tool_calls and reasoning is None:
        raise RequestError(f"{path}.content is missing", param=f"{path}.content")
    plain = _plain("assistant", message.content or "", message.name, path)
    if message.content is None and message.tool_calls:
        plain["content"] = None
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
        if not text_of(plain["content"]):  # gpt-oss's name of it, used with calls only
            plain["thinking"] = reasoning
    return plain


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    if call.type != "function":
        kind = f"{path}.type"
        raise RequestError(f"{kind} {call.type[:64]} is not supported; send function", param=kind)
    function = call.function
    return past_call(call.id, function.name, function.arguments)


def _content(content: Content, path: str) -> TemplateContent:
    if isinstance(content, str):
        return content
    parts: list[Mapping[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            parts.append(text_part(part.text))
        elif isinstance(part, RefusalPart):
            parts.append(text_part(part.refusal))
        else:
            kind = part.__struct_config__.tag
            place = f"{path}[{index}]"
            raise RequestError(f"{place} is of type {kind}, the model reads text only", param=place)
    return parts


class ChatWriter:
    """The `Writer` of one chat request."""

    def __init__(self, model: ServedModel, generation: Generation, head: Head) -> None:
        tokenizer = model.engine.tokenizer
        self._tokenizer = tokenizer
        self._generation = generation
        self._envelope = Envelope(
            model,
            generation,
            head,
            id_prefix="chatcmpl-",
            new_response=partial(ChatCompletion, object="chat.completion"),
            new_chunk=partial(ChatCompletionChunk, object="chat.completion.chunk"),
            num_reasoning_tokens=self._num_reasoning_tokens,
        )
        self._requested = generation.request.requested_output
        self._messages = [
            message_reader(generation, choice, tokenizer) for choice in generation.choices
        ]
        self._collected: list[list[MessagePart]] = [[] for _ in generation.choices]

    def _num_reasoning_tokens(self) -> int:
        return sum(message.num_reasoning_tokens for message in self._messages)

    def opening(self) -> Iterator[bytes]:
        """The role of each choice, before any content."""
        delta = ChatDelta(role="assistant", content=self._requested.before)
        for choice in self._generation.choices:
            opening = ChatChunkChoice(
                index=choice.index, delta=delta, logprobs=None, finish_reason=None
            )
            fields = {} if choice.index else self._prompt_fields()
            yield self._envelope.chunk([opening], **fields)

    def _prompt_fields(self) -> Mapping[str, Any]:
        """The prompt's token ids and logprobs, if the client requested them."""
        first = self._generation.choices[0]
        fields: dict[str, Any] = {}
        if self._requested.token_ids:
            fields["prompt_token_ids"] = list(self._generation.prompt_token_ids(first))
        num_top = self._requested.prompt_logprobs
        if num_top is not None:
            scores = self._generation.prompt_logprobs(first)
            fields["prompt_logprobs"] = ranked_logprobs(scores, num_top, self._tokenizer)
        return fields

    def delta(self, delta: Delta) -> list[bytes]:
        """The new parts of the message, and its end; the new tokens' logprobs are in the first
        chunk. A call's first piece has its name and no arguments; those follow in a chunk of their
        own.
        """
        choice = self._generation.choices[delta.index]
        frames: list[bytes] = []
        if delta.progress is not None:
            new_choice = partial(ChatChunkChoice, delta=_EMPTY)
            frames.append(self._envelope.progress(choice, delta.progress, new_choice))
        parts = self._messages[choice.index].read(delta).parts
        if len(parts) == 1 and isinstance(parts[0], ContentDelta):  # the usual case
            deltas = [ChatDelta(content=parts[0].text)]
        else:
            deltas = _chat_deltas(parts)
        has_logprobs, has_ids = self._requested.logprobs is not None, self._requested.token_ids
        if not deltas and (has_logprobs or has_ids) and delta.token_ids:
            deltas.append(ChatDelta(content=""))
        for place, part in enumerate(deltas):  # once a token, so it calls little
            chunk = ChatChunkChoice(
                index=choice.index,
                delta=part,
                logprobs=self._listed(() if place else delta.logprobs) if has_logprobs else None,
                token_ids=list(delta.token_ids) if has_ids and not place else UNSET,
                finish_reason=None,
                draft=True if delta.is_draft and self._envelope.marks_drafts else UNSET,
            )
            frames.append(self._envelope.chunk([chunk]))
        if delta.finish_reason is not None:
            frames.append(self._envelope.chunk([self._end(choice)]))
        return frames

    def ending(self) -> Iterator[bytes]:
        """Usage and timings if the client requested them, then `[DONE]`."""
        return self._envelope.ending()

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as an event of the stream."""
        return failure_frames(error)

    def _end(self, choice: Choice) -> ChatChunkChoice:
        """The finish reason, without content."""
        return ChatChunkChoice(
            index=choice.index,
            delta=_EMPTY,
            logprobs=None,
            token_ids=self._token_ids(()),
            finish_reason=self._finish_reason(choice),
            stop_reason=choice.stop_reason,
            seed=choice.seed,
        )

    def collect(self, delta: Delta) -> None:
        """Keep the new parts of the message."""
        self._collected[delta.index] += self._messages[delta.index].read(delta).parts

    def complete(self) -> msgspec.Struct:
        """The complete messages."""
        return self._envelope.response(self._complete, **self._prompt_fields())

    def _complete(self, choice: Choice, index: int) -> ChatChoice:
        read = MessageDelta(tuple(self._collected[choice.index]))
        content: str | None = self._requested.before + read.content
        calls: list[AnsweredToolCall] | UnsetType = UNSET
        if read.calls:
            content = content or None
            calls = [_call(call) for call in read.calls]
        reasoning = read.reasoning or UNSET
        return ChatChoice(
            index=index,
            message=AnsweredMessage("assistant", content, None, reasoning, reasoning, calls),
            logprobs=self._listed(choice.logprobs),
            token_ids=self._token_ids(choice.token_ids),
            finish_reason=self._finish_reason(choice),
            stop_reason=choice.stop_reason,
            seed=choice.seed,
        )

    def _finish_reason(self, choice: Choice) -> Any:
        """In OpenAI's terms: `tool_calls` where the model stopped after a call."""
        reason = self._generation.finish_reason(choice)
        called = self._messages[choice.index].has_calls
        return "tool_calls" if called and reason == "stop" else reason

    def _token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._requested.token_ids else UNSET

    def _listed(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._requested.logprobs is None:
            return None
        as_ids = self._requested.tokens_as_ids
        return ChatLogprobs(
            [token_logprob(self._tokenizer, each, as_ids) for each in logprobs], None
        )


def _call(call: FunctionCall) -> AnsweredToolCall:
    return AnsweredToolCall(call.call_id, "function", AnsweredFunction(call.name, call.arguments))


def _chat_deltas(parts: Sequence[MessagePart]) -> list[ChatDelta]:
    """The deltas of a message's parts: one for text and reasoning, one for each piece of a call."""
    deltas: list[ChatDelta] = []
    for part in parts:
        delta = _chat_delta(part)
        if delta is None:
            continue
        joined = _joined(deltas[-1], delta) if deltas else None
        if joined is None:
            deltas.append(delta)
        else:
            deltas[-1] = joined
    return deltas


def _joined(first: ChatDelta, then: ChatDelta) -> ChatDelta | None:
    """Both in one, if one is text and the other reasoning."""
    if first.tool_calls or then.tool_calls:
        return None
    texts, thoughts = (first, then) if first.reasoning is UNSET else (then, first)
    if texts.reasoning is not UNSET or thoughts.content is not UNSET:
        return None
    return ChatDelta(
        content=texts.content, reasoning_content=thoughts.reasoning, reasoning=thoughts.reasoning
    )


def _chat_delta(part: MessagePart) -> ChatDelta | None:
    """The delta of a part; the last piece of a call may have none."""
    match part:
        case ContentDelta(text=text):
            return ChatDelta(content=text)
        case ReasoningDelta(text=text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case CallDelta(name="", arguments=""):
            return None
        case CallDelta(name="", arguments=arguments):
            function = StreamedFunction(arguments=arguments)
            return ChatDelta(tool_calls=[StreamedToolCall(index=part.index, function=function)])
        case CallDelta(call_id=call_id, name=name):
            call = StreamedToolCall(
                index=part.index, id=call_id, type="function", function=StreamedFunction(name, "")
            )
            return ChatDelta(tool_calls=[call])
