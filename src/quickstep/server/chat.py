"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quickstep.engine.tool_calls.formats import REASONING_FORMATS
from quickstep.errors import RequestError
from quickstep.server.chat_message import ChatRendering
from quickstep.server.generation import (
    ChatPrompt,
    Generation,
    GenerationRequest,
    OutputReading,
)
from quickstep.server.options import RequestLimits
from quickstep.server.refused import CHAT_REFUSED, refuse
from quickstep.server.sampling import bounded, deadline_of, label, sampling_params
from quickstep.server.schemas import (
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
    decode,
)
from quickstep.server.structured import AskedGrammar, asked_grammar
from quickstep.server.surface import Served, stream_flags
from quickstep.server.tools import OfferedTools, offered_tools

__all__ = ["Chat"]

# What an assistant message may carry only as null: clients send back what they were given.
_NULL_ONLY = ("refusal", "audio", "function_call", "annotations")


class Chat:
    """The chat surface."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def parse(self, body: bytes, served: Served) -> GenerationRequest:
        """Validate a body. Raises RequestError."""
        fields = decode(body, ChatRequest)
        model = served.model(fields.model)
        refuse(fields, CHAT_REFUSED)
        if not fields.messages:
            raise RequestError("messages is an empty list", param="messages")
        messages = tuple(_message(place, item) for place, item in enumerate(fields.messages))
        _check_history(messages, served)
        offered = offered_tools(fields, served)
        asked = _asked(fields, offered, served)
        output = _output(fields, served, bool(offered.tools))
        max_tokens, max_tokens_name = _max_tokens(fields)
        own: dict[str, Any] = {
            "logprobs": _num_logprobs(fields, served.limits),
            "shown_special_token_ids": _markers(output, served),
            "grammar": None if asked is None else asked.grammar,
        }
        if max_tokens is not None or "max_tokens" not in served.engine.default_sampling:
            own["max_tokens"] = max_tokens
        sampling = sampling_params(
            fields,
            served,
            own,
            {"max_tokens": max_tokens_name, "logprobs": "top_logprobs"},
        )
        prompt = ChatPrompt(
            messages,
            num_chars=len(body),
            add_generation_prompt=fields.add_generation_prompt is not False,
            tools=offered.tools,
            extra=fields.chat_template_kwargs or {},
        )
        return GenerationRequest(
            model=model,
            prompts=(prompt,),
            sampling=sampling,
            priority=fields.priority or 0,
            deadline_s=deadline_of(fields),
            tenant=_tenant(fields, served.limits),
            cache_salt=label("cache_salt", fields.cache_salt, served.limits),
            output=output,
            grammar_field="" if asked is None else asked.field,
            echoed=_echoed(fields, served.limits),
            **stream_flags(fields),
        )

    def rendering(self, generation: Generation, served: Served) -> ChatRendering:
        """The renderer of one request."""
        return ChatRendering(generation, served.engine.tokenizer)


def _asked(fields: ChatRequest, offered: OfferedTools, served: Served) -> AskedGrammar | None:
    """The grammar of the message: of the calls that are forced, or of its content."""
    asked = asked_grammar(fields)
    if asked is not None and offered.tools:
        raise RequestError(
            f"{asked.field} cannot go with tools that may be called; send tool_choice none",
            param=asked.field,
        )
    grammar = asked or offered.forced
    if grammar is not None and served.formats.reasoning is REASONING_FORMATS["harmony"]:
        raise RequestError(
            f"{grammar.field} is not supported: {served.engine.model_name} writes its messages "
            "into channels",
            param=grammar.field,
        )
    return grammar


def _output(fields: ChatRequest, served: Served, with_tools: bool) -> OutputReading | None:
    """What to read out of the text; a call is one only if tools were offered."""
    tool_calls = served.formats.tool_calls if with_tools else None
    reasoning = served.formats.reasoning
    if tool_calls is None and reasoning is None:
        return None
    return OutputReading(tool_calls, reasoning, one_call=fields.parallel_tool_calls is False)


def _markers(output: OutputReading | None, served: Served) -> tuple[int, ...]:
    """The formats' markers that are tokens, so that none of them is skipped as special."""
    if output is None:
        return ()
    formats = (output.tool_calls, output.reasoning)
    texts = [marker for known in formats if known is not None for marker in known.markers]
    ids = map(served.engine.tokenizer.token_id, texts)
    return tuple(token_id for token_id in ids if token_id is not None)


def _max_tokens(fields: ChatRequest) -> tuple[int | None, str]:
    """The limit, under the name that the client used. Both names may stand, if they agree."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; send one of them",
            param="max_completion_tokens",
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _num_logprobs(fields: ChatRequest, limits: RequestLimits) -> int | None:
    if not fields.logprobs:
        if fields.top_logprobs is not None:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    bounded("top_logprobs", fields.top_logprobs or 0, limits.logprobs)
    return fields.top_logprobs or 0


def _tenant(fields: ChatRequest, limits: RequestLimits) -> str:
    """`safety_identifier` is OpenAI's new name of `user`; the prompt cache's key is a hint that
    one engine has no use for, since every prefix is in its reach.
    """
    label("prompt_cache_key", fields.prompt_cache_key, limits)
    identifier = label("safety_identifier", fields.safety_identifier, limits)
    return label("user", fields.user, limits) or identifier


def _echoed(fields: ChatRequest, limits: RequestLimits) -> dict[str, Any]:
    """Fields whose effect is to stand in the response."""
    echoed: dict[str, Any] = {}
    if fields.metadata is not None:
        bounded("metadata", len(fields.metadata), limits.metadata, "entries")
        if any(len(key) > 64 or len(value) > 512 for key, value in fields.metadata.items()):
            raise RequestError(
                "metadata has a key above 64 or a value above 512 characters", param="metadata"
            )
        echoed["metadata"] = fields.metadata
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


def _check_history(messages: Sequence[Mapping[str, Any]], served: Served) -> None:
    """Earlier calls must not vanish: the template has to write them."""
    for place, message in enumerate(messages):
        if "tool_calls" in message and not served.formats.renders_calls:
            path = f"messages[{place}].tool_calls"
            name = served.engine.model_name
            raise RequestError(
                f"{path} is not supported: the chat template of {name} does not show calls",
                param=path,
            )


def _plain(role: str, content: Content, name: str | None, path: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": _text(content, f"{path}.content")}
    if name is not None:
        message["name"] = name
    return message


def _assistant(message: AssistantMessage, path: str) -> dict[str, Any]:
    for name in _NULL_ONLY:
        if getattr(message, name):
            raise RequestError(f"{path}.{name} is not supported", param=f"{path}.{name}")
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
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
        if not plain["content"]:  # gpt-oss's name of it, beside calls only
            plain["thinking"] = message.reasoning_content
    return plain


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    """A call; its arguments stay the text that the model wrote, once it is known to be JSON."""
    try:
        msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        place = f"{path}.function.arguments"
        raise RequestError(f"{place} is not the JSON text of an object", param=place) from None
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}


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
