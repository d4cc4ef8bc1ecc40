"""A chat's answer as JSON: content, reasoning and tool calls, read out of the model's text.

`MessageReader` reads one choice's text, for every surface. `ChatRendering` belongs to one request
and holds one reader per choice; `chat` makes it, `choices` calls it. A stream's words add up to
the whole message. Reasoning has two names, since clients read either: `reasoning_content` and
`reasoning`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quickstep.engine.stream import Delta
from quickstep.engine.tool_calls.formats import message_grammar
from quickstep.engine.tool_calls.message_delta import (
    CallDelta,
    ContentDelta,
    FunctionCall,
    MessageDelta,
    MessagePart,
    ReasoningDelta,
)
from quickstep.engine.tool_calls.parser import MessageParser
from quickstep.server.generate.engine_interface import Vocabulary
from quickstep.server.generate.generation import Choice, Generation, opens_reasoning
from quickstep.server.openai.completion_choice import prompt_logprobs_json
from quickstep.types import TokenLogprobs

__all__ = ["ChatRendering", "MessageReader", "logprob_entry", "message_reader"]


class MessageReader:
    """One choice's message as it is read. `parser` is None if all of its text is content."""

    def __init__(self, parser: MessageParser | None, one_call: bool) -> None:
        self._parser = parser
        self._one_call = one_call
        self.has_calls = False

    def read(self, text: str, ended: bool) -> MessageDelta:
        """What becomes certain with `text`, the last of its text if `ended`."""
        if self._parser is None:
            return MessageDelta((ContentDelta(text),) if text else ())
        delta = self._parser.feed(text)
        if ended:
            delta = delta.followed_by(self._parser.finish())
        if self._one_call:
            delta = delta.with_first_call_only()
        self.has_calls |= any(isinstance(part, CallDelta) for part in delta.parts)
        return delta


class ChatRendering:
    """Choices as `{"message", "logprobs"}`, in a stream as `{"delta", "logprobs"}`."""

    def __init__(self, generation: Generation, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._shown = generation.request.shown
        self._messages = [
            message_reader(generation, choice, tokenizer) for choice in generation.choices
        ]

    def opening(self) -> Mapping[str, Any]:
        """The role, before any content."""
        return {"delta": {"role": "assistant", "content": self._shown.before}, "logprobs": None}

    def beside(self) -> Mapping[str, Any]:
        """The one prompt's token ids and scores, where they were asked for."""
        first = self._generation.choices[0]
        beside: dict[str, Any] = {}
        if self._shown.token_ids:
            beside["prompt_token_ids"] = list(self._generation.prompt_token_ids(first))
        num_top = self._shown.prompt_logprobs
        if num_top is not None:
            scores = self._generation.prompt_logprobs(first)
            beside["prompt_logprobs"] = prompt_logprobs_json(scores, num_top, self._tokenizer)
        return beside

    def news(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """What became certain of the message, with the new tokens' logprobs beside the first word.

        A call's first piece has its name and no arguments; those follow in a word of their own.
        """
        ended = delta.finish_reason is not None
        said = self._messages[choice.index].read(delta.text, ended)
        words: list[dict[str, Any]] = []
        for part in said.parts:
            word = _word(part)
            joins = words and {"tool_calls", *words[-1]}.isdisjoint({*word})
            if joins and "tool_calls" not in words[-1]:
                words[-1] |= word
            elif word:
                words.append(word)
        shows_tokens = self._shown.logprobs is not None or self._shown.token_ids
        if not words and shows_tokens and delta.token_ids:
            words.append({"content": ""})
        listed, token_ids = self._listed(delta.logprobs), self._token_ids(delta.token_ids)
        none = None if listed is None else self._listed(())
        return [
            {"delta": word, "logprobs": none if place else listed, **({} if place else token_ids)}
            for place, word in enumerate(words)
        ]

    def ending(self) -> dict[str, Any]:
        """No content."""
        return {"delta": {}, "logprobs": None}

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The whole message."""
        said = self._messages[choice.index].read("".join(choice.text), ended=True)
        content = self._shown.before + said.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message |= _reasoning(said.reasoning)
        if said.calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in said.calls]
        logprobs = self._listed(choice.logprobs)
        return {"message": message, "logprobs": logprobs, **self._token_ids(choice.token_ids)}

    def finish_reason(self, choice: Choice) -> str | None:
        """In OpenAI's words: `tool_calls` where the model stopped after a call."""
        if choice.finish_reason is None:
            return None
        reason = choice.finish_reason.openai
        called = self._messages[choice.index].has_calls
        return "tool_calls" if called and reason == "stop" else reason

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._shown.token_ids else {}

    def _listed(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._shown.logprobs is None:
            return None
        content = [
            {
                **self._entry(item.token_id, item.logprob),
                "top_logprobs": [self._entry(token_id, value) for token_id, value in item.top],
            }
            for item in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        entry = logprob_entry(self._tokenizer, token_id, logprob)
        return {**entry, "token": f"token_id:{token_id}"} if self._shown.tokens_as_ids else entry


def logprob_entry(tokenizer: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    """A token with its logprob, in OpenAI's shape."""
    return {
        "token": tokenizer.decode([token_id], skip_special_tokens=False),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def message_reader(
    generation: Generation, choice: Choice, tokenizer: Vocabulary, call_prefix: str = "call_"
) -> MessageReader:
    """The reader of a choice's message. `call_prefix` begins the ids of its calls, unless the
    model's template takes short ones only.
    """
    output = generation.request.output
    if output is None:
        return MessageReader(None, one_call=False)
    inside = opens_reasoning(output, tokenizer, generation.prompt_token_ids(choice))
    grammar = message_grammar(output.tool_calls, output.reasoning, inside)
    short = output.tool_calls is not None and output.tool_calls.short_ids
    return MessageReader(MessageParser(grammar, _call_ids(short, call_prefix)), output.one_call)


def _call_ids(short: bool, prefix: str) -> Callable[[], str]:
    if short:
        return lambda: uuid.uuid4().hex[:9]
    return lambda: f"{prefix}{uuid.uuid4().hex[:24]}"


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text}


def _call(call: FunctionCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _word(part: MessagePart) -> dict[str, Any]:
    """A stream's word for a part; the last piece of a call may say nothing."""
    match part:
        case ContentDelta(text=text):
            return {"content": text}
        case ReasoningDelta(text=text):
            return _reasoning(text)
        case CallDelta(name="", arguments=""):
            return {}
        case CallDelta(name="", arguments=arguments):
            return {"tool_calls": [{"index": part.index, "function": {"arguments": arguments}}]}
        case CallDelta(call_id=call_id, name=name):
            begun = _call(FunctionCall(call_id, name, ""))
            return {"tool_calls": [{"index": part.index, **begun}]}
