"""A conversation, independent of the API: chat, responses, messages and Ollama build one.

Each API reads its own schema into a `Conversation`; from here on there is one way: what the
template is given, which grammar the message has to follow, what to read out of its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.fields.sampling_fields import SamplingFields
from quickstep.server.fields.shared_fields import EFFORT_BUDGETS
from quickstep.server.generate.generation import OutputReading, ParsedRequest
from quickstep.server.generate.prompts import ChatPrompt
from quickstep.server.generate.sampling import engine_request, label, sampling_params
from quickstep.server.generate.structured import RequestedGrammar
from quickstep.server.generate.tools import OfferedTools, with_answer
from quickstep.server.models.served_model import ServedModel
from quickstep.server.options import RequestLimits, bounded
from quickstep.text.message_content import text_of
from quickstep.text.tool_calls.formats import REASONING_FORMATS


class Effort(msgspec.Struct, frozen=True):
    """What a level of reasoning effort means for a model.

    Attributes:
        variables: Of the template.
        budget: Reasoning tokens, for requests that give no budget; None for no limit.
    """

    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    budget: int | None = None


class Conversation(msgspec.Struct, frozen=True):
    """What the model is to answer, and in which form.

    Attributes:
        messages: As chat templates read them.
        num_chars: About how large they are.
        grammar: The grammar of the answer's content.
        extra: Further names for the template.
        continued: The last message is the beginning of the answer.
        effort_budget: The budget of the requested effort; see `Effort`.
    """

    messages: tuple[Mapping[str, Any], ...]
    num_chars: int
    offered: OfferedTools = msgspec.field(default_factory=OfferedTools)
    grammar: RequestedGrammar | None = None
    add_generation_prompt: bool = True
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    continued: bool = False
    effort_budget: int | None = None

    @property
    def prompt(self) -> ChatPrompt:
        """For the template."""
        return ChatPrompt(
            self.messages,
            num_chars=self.num_chars,
            add_generation_prompt=self.add_generation_prompt,
            tools=self.offered.tools,
            extra=self.extra,
            continue_final_message=self.continued,
        )


def conversation_request(
    conversation: Conversation,
    fields: SamplingFields,
    model: ServedModel,
    own: Mapping[str, Any],
    renamed: Mapping[str, str],
    prompt_field: str = "messages",
) -> ParsedRequest:
    """The internal request. Raises RequestError that names the client's field.

    `own` is what the API resolved by itself: `max_tokens` (None for not given) and `logprobs`;
    `renamed` maps its names to the client's, `prompt_field` is the field of the conversation.
    """
    grammar = _grammar(conversation, model)
    output = _output(conversation, model)
    values = dict(own)
    if values["max_tokens"] is None and "max_tokens" in model.engine.default_sampling:
        del values["max_tokens"]
    values["shown_special_token_ids"] = _markers(output, model)
    values["grammar"] = None if grammar is None else grammar.grammar
    reasoning = model.formats.reasoning
    budget = conversation.effort_budget
    if reasoning is not None and reasoning.opening:
        if grammar is not None:
            values["reasoning_tags"] = (reasoning.opening, reasoning.closing)
        if budget is None:
            budget = model.server.answers.thinking_budget
    values["inside_reasoning"] = output is not None and output.inside_reasoning
    if fields.stop and output is not None and output.reasoning is not None:
        values["stop_after_reasoning"] = output.reasoning.passage
    return ParsedRequest(
        model=model.name_or_default(fields.model),
        prompts=(conversation.prompt,),
        request=engine_request(
            fields,
            sampling_params(fields, model, values, renamed, budget),
            model.server.limits,
        ),
        output=output,
        prompt_field=prompt_field,
        grammar_field="" if grammar is None else grammar.field,
        loosened=() if grammar is None else grammar.loosened,
    )


def check_shows_calls(model: ServedModel, path: str) -> None:
    """Earlier calls, at `path`, must not vanish: the template has to write them."""
    if not model.formats.renders_calls:
        name = model.engine.model_name
        raise RequestError(
            f"{path} is not supported: the chat template of {name} does not show calls", param=path
        )


def past_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """An earlier call for the template; its arguments stay the text that the model wrote, be it the
    JSON of an object or not: a call may have been cut.
    """
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def requested_effort(
    effort: str | None, path: str, model: ServedModel, reader: FieldReader
) -> Effort:
    """What the reasoning effort at `path` means; a level that the model does not have is reported.

    gpt-oss has three levels, and some templates read any. For others a level is a budget.
    """
    reasoning = model.formats.reasoning
    is_harmony = reasoning is REASONING_FORMATS["harmony"]
    if effort is None:
        return Effort()
    if effort == "none" and not is_harmony:
        return Effort() if reasoning is None else Effort({"enable_thinking": False})
    if is_harmony:
        is_known = effort in ("low", "medium", "high")
    else:
        is_known = _template_reads("reasoning_effort", model)
    if is_known:
        return Effort({"reasoning_effort": effort})
    if reasoning is not None and reasoning.opening and effort in EFFORT_BUDGETS:
        return Effort(budget=EFFORT_BUDGETS[effort])
    reader.ignore(path, f"{model.engine.model_name} has no level {effort[:64]}")
    return Effort()


def verbosity_in_template(
    verbosity: str | None, path: str, model: ServedModel, reader: FieldReader
) -> Mapping[str, Any]:
    """The template's variables for the verbosity; reported if the template reads none."""
    if verbosity is None:
        return {}
    if _template_reads("verbosity", model):
        return {"verbosity": verbosity}
    if verbosity != "medium":
        reader.ignore(path, "the model has no verbosity setting")
    return {}


def _template_reads(name: str, model: ServedModel) -> bool:
    template = model.engine.chat_template
    return template is not None and name in template.source


def tenant_of(user: str | None, safety_identifier: str | None, limits: RequestLimits) -> str:
    """The client's own label of the account, below its API key; `safety_identifier` is OpenAI's new
    name of `user`.
    """
    identifier = label("safety_identifier", safety_identifier, limits)
    return label("user", user, limits) or identifier


def checked_metadata(metadata: dict[str, str], limits: RequestLimits) -> dict[str, str]:
    """OpenAI's `metadata`, within its bounds. Raises RequestError."""
    bounded("metadata", len(metadata), limits.metadata, "entries")
    if any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise RequestError(
            "metadata has a key above 64 or a value above 512 characters", param="metadata"
        )
    return metadata


def _grammar(conversation: Conversation, model: ServedModel) -> RequestedGrammar | None:
    """The grammar of the message after its reasoning: of its calls, of its content, or of both."""
    grammar, offered = conversation.grammar, conversation.offered
    if grammar is None or offered.must_call:
        return offered.grammar
    in_channels = model.formats.reasoning is REASONING_FORMATS["harmony"]
    return with_answer(grammar, offered, model) if offered.tools or in_channels else grammar


def check_continues(message: Mapping[str, Any], path: str) -> None:
    """Raise RequestError unless `message`, which is at `path`, is a text that can continue."""
    if message["role"] != "assistant":
        raise RequestError(
            f"{path} is no message of the assistant, only such a one can be continued", param=path
        )
    if message.get("tool_calls"):
        raise RequestError(f"{path} calls a tool, it cannot be continued", param=path)


def _output(conversation: Conversation, model: ServedModel) -> OutputReading | None:
    """What to read out of the text; a call is one only if tools were offered."""
    offered = conversation.offered
    tool_calls = model.formats.tool_calls if offered.tools else None
    reasoning = model.formats.reasoning
    if tool_calls is None and reasoning is None:
        return None
    begun = text_of(conversation.messages[-1]["content"]) if conversation.continued else ""
    inside = False
    if reasoning is not None and reasoning.opening:
        inside = begun.rfind(reasoning.opening) > begun.rfind(reasoning.closing)
    functions = (tool["function"] for tool in offered.tools)
    return OutputReading(
        tool_calls,
        reasoning,
        one_call=offered.one_call,
        inside_reasoning=inside,
        parameters={function["name"]: function["parameters"] for function in functions},
    )


def _markers(output: OutputReading | None, model: ServedModel) -> tuple[int, ...]:
    """The formats' markers that are tokens, so that none of them is skipped as special."""
    if output is None:
        return ()
    formats = (output.tool_calls, output.reasoning)
    texts = [marker for known in formats if known is not None for marker in known.markers]
    ids = map(model.engine.tokenizer.token_id, texts)
    return tuple(token_id for token_id in ids if token_id is not None)
