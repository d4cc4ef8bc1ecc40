"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.server.generate.adapter import Served, stream_flags
from quickstep.server.generate.conversation import (
    Conversation,
    check_continues,
    check_shows_calls,
    checked_metadata,
    conversation_request,
    effort_in_template,
    past_call,
    tenant_of,
    verbosity_in_template,
)
from quickstep.server.generate.generation import Generation, ParsedRequest
from quickstep.server.generate.sampling import label, num_alternatives
from quickstep.server.generate.structured import requested_grammar
from quickstep.server.generate.tools import offered_tools
from quickstep.server.openai.chat_message import ChatRendering
from quickstep.server.openai.choices import ChoicesWriter
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
from quickstep.server.openai.requested_output import (
    beam_params,
    own_values,
    requested_output,
    truncation_of,
)
from quickstep.server.openai.response_types import ChatCompletion, ChatCompletionChunk
from quickstep.server.options import RequestLimits
from quickstep.server.schema.field_reader import FieldReader

__all__ = ["Chat"]


class Chat:
    """The adapter of chat."""

    id_prefix = "chatcmpl-"
    response = partial(ChatCompletion, object="chat.completion")
    chunk = partial(ChatCompletionChunk, object="chat.completion.chunk")

    def parse(self, body: bytes, served: Served, caller: str = "") -> ParsedRequest:
        """Validate a body. Raises RequestError."""
        reader = FieldReader(served.field_rules)
        fields = reader.decode(body, ChatRequest)
        model = served.model(fields.model)
        if not fields.messages:
            raise RequestError("messages is an empty list", param="messages")
        messages = tuple(_message(place, item) for place, item in enumerate(fields.messages))
        for place, message in enumerate(messages):
            if "tool_calls" in message:
                check_shows_calls(served, f"messages[{place}].tool_calls")
        told = {
            **effort_in_template(fields.reasoning_effort, "reasoning_effort", served, reader),
            **verbosity_in_template(fields.verbosity, "verbosity", served, reader),
        }
        conversation = Conversation(
            messages,
            num_chars=len(body),
            offered=offered_tools(fields, served, reader),
            asked=requested_grammar(fields),
            add_generation_prompt=_opens_message(fields, messages),
            continued=bool(fields.continue_final_message),
            extra={**told, **(fields.chat_template_kwargs or {})},
        )
        max_tokens, max_tokens_name = _max_tokens(fields)
        shown = requested_output(fields, served, _num_logprobs(fields, served))
        shown = replace(shown, before=_echo(fields, messages[-1], reader))
        own = {**own_values(fields, served, shown), "max_tokens": max_tokens}
        renamed = {"max_tokens": max_tokens_name, "logprobs": "top_logprobs"}
        request = conversation_request(conversation, fields, served, own, renamed)
        return replace(
            request,
            model=model,
            request=structs.replace(
                request.request,
                tenant=tenant_of(fields.user, fields.safety_identifier, served.limits),
            ),
            echoed=_echoed(fields, served.limits),
            shown=shown,
            beams=beam_params(fields, served, request.sampling),
            truncate_prompt_tokens=truncation_of(
                fields.truncate_prompt_tokens, "truncate_prompt_tokens", max_tokens, served
            ),
            ignored=reader.ignored,
            writer=partial(ChoicesWriter, self, served),
            **stream_flags(fields, served),
        )

    def rendering(self, generation: Generation, served: Served) -> ChatRendering:
        """The renderer of one request."""
        return ChatRendering(generation, served.engine.tokenizer)


def _opens_message(fields: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the template opens a message, instead of going on with the last one."""
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
    """The limit, under the name that the client used. Both names may stand, if they agree."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; send one of them",
            param="max_completion_tokens",
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _echo(fields: ChatRequest, last: Mapping[str, Any], reader: FieldReader) -> str:
    """What `echo` puts before the answer: the last message, if it is the assistant's."""
    if not fields.echo:
        return ""
    if last["role"] != "assistant":
        reader.ignore("echo", "the last message is not the assistant's")
        return ""
    return last["content"] or ""


def _num_logprobs(fields: ChatRequest, served: Served) -> int | None:
    if not fields.logprobs:
        if fields.top_logprobs is not None:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return num_alternatives("top_logprobs", fields.top_logprobs or 0, served)


def _echoed(fields: ChatRequest, limits: RequestLimits) -> dict[str, Any]:
    """Fields whose effect is to stand in the response."""
    # a hint that one engine has no use for, since every prefix is in its reach
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
    message: dict[str, Any] = {"role": role, "content": _text(content, f"{path}.content")}
    if name is not None:
        message["name"] = name
    return message


def _assistant(message: AssistantMessage, path: str) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{path}.content is missing", param=f"{path}.content")
    plain = _plain("assistant", message.content or "", message.name, path)
    if message.content is None:
        plain["content"] = None
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    reasoning = (
        message.reasoning if message.reasoning_content is None else message.reasoning_content
    )
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
        if not plain["content"]:  # gpt-oss's name of it, beside calls only
            plain["thinking"] = reasoning
    return plain


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    if call.type != "function":
        kind = f"{path}.type"
        raise RequestError(f"{kind} {call.type[:64]} is not supported; send function", param=kind)
    function = call.function
    return past_call(call.id, function.name, function.arguments)


def _text(content: Content, path: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            kind = part.__struct_config__.tag
            place = f"{path}[{index}]"
            raise RequestError(f"{place} is of type {kind}, the model reads text only", param=place)
    return "\n".join(texts)
