"""From Ollama's bodies to the internal request: prompt, output format, sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import structs
from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.fields.sampling_fields import SamplingFields
from quickstep.server.generate.conversation import (
    Conversation,
    Effort,
    check_shows_calls,
    conversation_request,
    past_call,
    requested_effort,
)
from quickstep.server.generate.generation import ParsedRequest
from quickstep.server.generate.prompts import InfillPrompt, TextPrompt, infill_markers
from quickstep.server.generate.sampling import num_alternatives, sampling_params
from quickstep.server.generate.structured import RequestedGrammar
from quickstep.server.generate.tools import ToolChoice, functions_of, offer
from quickstep.server.llama_cpp.request import switched_off_penalties
from quickstep.server.models.served_model import ServedModel
from quickstep.server.ollama.request_types import (
    OllamaChatRequest,
    OllamaGenerateFields,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from quickstep.types import Grammar, Request

_SAME_NAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "stop"),
    *("presence_penalty", "frequency_penalty"),
)
_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"options.{name}" for name in (*_SAME_NAME, "seed")},
        "repetition_penalty": "options.repeat_penalty",
        "max_tokens": "options.num_predict",
        "logprobs": "top_logprobs",
    }
)
_NO_OPTIONS = OllamaOptions()
_RANDOM_SEED = -1
_EFFORTS = ("low", "medium", "high")
LATEST = ":latest"  # the tag of a name without one


def known_model(name: str, model: ServedModel) -> str:
    """The model's own name for a client's name, which may have the tag."""
    plain = name.removesuffix(LATEST)
    return plain if plain in model else name


def chat_request(
    fields: OllamaChatRequest, model: ServedModel, reader: FieldReader, num_chars: int
) -> ParsedRequest:
    """The next message of a conversation. Raises RequestError."""
    messages = _messages(fields.messages or (), model)
    functions = functions_of(fields.tools or (), reader)
    continued = _begins_answer(messages)
    effort = _effort(fields, model, reader)
    conversation = Conversation(
        messages,
        num_chars=num_chars,
        offered=offer(functions, ToolChoice(), one_call=False, model=model),
        grammar=_requested_grammar(fields),
        extra=effort.variables,
        effort_budget=effort.budget,
        add_generation_prompt=not continued,
        continued=continued,
    )
    return _of_conversation(conversation, fields, model, "messages")


def generate_request(
    fields: OllamaGenerateRequest, model: ServedModel, reader: FieldReader
) -> ParsedRequest:
    """The response to one prompt, or with `raw` its continuation. Raises RequestError."""
    prompt = fields.prompt or ""
    if fields.raw and fields.system:
        raise RequestError("system cannot go with raw: true", param="system")
    if fields.suffix:
        if fields.system:
            raise RequestError("system cannot go with suffix", param="system")
        markers = infill_markers(model.engine.tokenizer)
        return _of_text(InfillPrompt(prompt, fields.suffix, markers), fields, model)
    if fields.raw or model.engine.chat_template is None:
        text = f"{fields.system}\n\n{prompt}" if fields.system else prompt
        return _of_text(TextPrompt(text), fields, model)
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    effort = _effort(fields, model, reader)
    conversation = Conversation(
        (*system, {"role": "user", "content": prompt}),
        num_chars=len(prompt) + len(fields.system or ""),
        grammar=_requested_grammar(fields),
        extra=effort.variables,
        effort_budget=effort.budget,
    )
    return _of_conversation(conversation, fields, model, "prompt")


def _of_conversation(
    conversation: Conversation, fields: OllamaGenerateFields, model: ServedModel, prompt_field: str
) -> ParsedRequest:
    own = _own(fields, model)
    request = conversation_request(
        conversation, _shared(fields, model), model, own, _RENAMED, prompt_field
    )
    return _finished(request, fields)


def _of_text(
    prompt: TextPrompt | InfillPrompt, fields: OllamaGenerateFields, model: ServedModel
) -> ParsedRequest:
    requested = _requested_grammar(fields)
    own = _own(fields, model)
    if own["max_tokens"] is None and "max_tokens" in model.engine.default_sampling:
        del own["max_tokens"]
    own["grammar"] = None if requested is None else requested.grammar
    shared = _shared(fields, model)
    request = ParsedRequest(
        model=fields.model,
        prompts=(prompt,),
        request=Request(sampling=sampling_params(shared, model, own, _RENAMED)),
        grammar_field="" if requested is None else requested.field,
    )
    return _finished(request, fields)


def _finished(request: ParsedRequest, fields: OllamaGenerateFields) -> ParsedRequest:
    """Set the client's name of the model, the penalties, and streaming, which is the default."""
    options = fields.options or _NO_OPTIONS
    off: dict[str, Any] = dict(switched_off_penalties(options, "options.repeat_last_n"))
    own = structs.replace(request.request, sampling=replace(request.sampling, **off))
    stream = fields.stream is not False
    return replace(request, model=fields.model, request=own, stream=stream)


def _shared(fields: OllamaGenerateFields, model: ServedModel) -> SamplingFields:
    options = fields.options or _NO_OPTIONS
    same = {name: getattr(options, name) for name in _SAME_NAME}
    return SamplingFields(
        model=known_model(fields.model, model),
        repetition_penalty=options.repeat_penalty,
        seed=None if options.seed == _RANDOM_SEED else options.seed,
        **same,
    )


def _own(fields: OllamaGenerateFields, model: ServedModel) -> dict[str, Any]:
    """The token limit and the logprobs; a limit of -2, -1 or 0 means the end of the context."""
    options = fields.options or _NO_OPTIONS
    num_predict = options.num_predict
    if num_predict is not None and num_predict < -2:
        raise RequestError(
            f"options.num_predict is {num_predict}, it must be at least -2",
            param="options.num_predict",
        )
    own: dict[str, Any] = {
        "max_tokens": num_predict if num_predict is not None and num_predict > 0 else None
    }
    if fields.logprobs:
        own["logprobs"] = num_alternatives("top_logprobs", fields.top_logprobs or 0, model)
    elif fields.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return own


def _requested_grammar(fields: OllamaGenerateFields) -> RequestedGrammar | None:
    if not isinstance(fields.format, dict):
        return RequestedGrammar(Grammar.of_json_object(), "format") if fields.format else None
    return RequestedGrammar(Grammar.of_json_schema(fields.format), "format")


def _effort(fields: OllamaGenerateFields, model: ServedModel, reader: FieldReader) -> Effort:
    """How the model is to reason; `think` is reported if it does not."""
    think = fields.think
    if isinstance(think, str):
        if think not in _EFFORTS:
            raise RequestError(
                f"think is {think[:64]!r}, it must be true, false, low, medium or high",
                param="think",
            )
        return requested_effort(think, "think", model, reader)
    if think is None:
        return Effort()
    if think and model.formats.reasoning is None:
        reader.ignore("think", f"{model.engine.model_name} does not reason")
        return Effort()
    return Effort({"enable_thinking": think})


def _begins_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the response, as in Ollama's templates."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _messages(items: Sequence[OllamaMessage], model: ServedModel) -> tuple[Mapping[str, Any], ...]:
    """The messages for the chat template. Calls without an id get one, which their results name."""
    messages: list[Mapping[str, Any]] = []
    unanswered: list[tuple[str, str]] = []  # ids and names of calls
    for index, message in enumerate(items):
        path = f"messages[{index}]"
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "tool" or message.tool_name or message.tool_call_id:
            plain |= _result(message, unanswered)
        elif message.content is None and not (message.tool_calls or message.thinking):
            raise RequestError(f"{path}.content is missing", param=f"{path}.content")
        if message.tool_calls:
            check_shows_calls(model, f"{path}.tool_calls")
            calls = [
                # nine digits: templates of some families take no other length
                (call.id or f"{index:05}{number:04}"[-9:], call.function)
                for number, call in enumerate(message.tool_calls)
            ]
            plain["tool_calls"] = [
                past_call(call_id, function.name, _json(function.arguments))
                for call_id, function in calls
            ]
            unanswered = [(call_id, function.name) for call_id, function in calls]
        if message.thinking:
            plain["reasoning_content"] = message.thinking
            if not plain["content"]:  # gpt-oss's name of it, next to calls only
                plain["thinking"] = message.thinking
        messages.append(plain)
    return tuple(messages)


def _result(message: OllamaMessage, unanswered: list[tuple[str, str]]) -> dict[str, str]:
    """Which call a tool's result belongs to: the one of its id, else the next of its name."""
    call_id, name = message.tool_call_id, message.tool_name
    for at, (known_id, known_name) in enumerate(unanswered):
        if call_id == known_id or (call_id is None and name in (None, known_name)):
            del unanswered[at]
            return {"tool_call_id": known_id, "name": name or known_name}
    named = {} if name is None else {"name": name}
    return {"tool_call_id": call_id or "", **named}


def _json(arguments: Mapping[str, Any]) -> str:
    return msgspec.json.encode(arguments).decode()
