"""A chat's messages: content, reasoning and tool calls, read out of the model's text.

`MessageReader` reads one choice's text, for every API. `ChatRendering` belongs to one request and
has one reader per choice; `chat` makes it, `choices` calls it. A stream's deltas add up to the
complete message. Reasoning has two names, since clients read either: `reasoning_content` and
`reasoning`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

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
from quickstep.engine.tool_calls.reader import MessageParser
from quickstep.server.generate.engine_interface import Vocabulary
from quickstep.server.generate.generation import Choice, Generation, opens_reasoning
from quickstep.server.openai.completion_choice import ranked_logprobs
from quickstep.server.openai.response_types import (
    AnsweredFunction,
    AnsweredMessage,
    AnsweredToolCall,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    StreamedFunction,
    StreamedToolCall,
    TokenLogprob,
    TopLogprob,
)
from quickstep.types import TokenLogprobs

__all__ = ["ChatRendering", "MessageReader", "message_reader", "token_logprob"]

_EMPTY = ChatDelta()


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
    """Writes a chat's choices, complete or as a stream's deltas."""

    def __init__(self, generation: Generation, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._shown = generation.request.shown
        self._messages = [
            message_reader(generation, choice, tokenizer) for choice in generation.choices
        ]

    def opening(self, choice: Choice) -> ChatChunkChoice:
        """The role, before any content."""
        delta = ChatDelta(role="assistant", content=self._shown.before)
        return ChatChunkChoice(index=choice.index, delta=delta, logprobs=None, finish_reason=None)

    def prompt_fields(self) -> Mapping[str, Any]:
        """The one prompt's token ids and logprobs, where the client wants them."""
        first = self._generation.choices[0]
        fields: dict[str, Any] = {}
        if self._shown.token_ids:
            fields["prompt_token_ids"] = list(self._generation.prompt_token_ids(first))
        num_top = self._shown.prompt_logprobs
        if num_top is not None:
            scores = self._generation.prompt_logprobs(first)
            fields["prompt_logprobs"] = ranked_logprobs(scores, num_top, self._tokenizer)
        return fields

    def deltas(self, choice: Choice, delta: Delta) -> list[ChatChunkChoice]:
        """What became certain of the message; the new tokens' logprobs are in the first chunk.

        A call's first piece has its name and no arguments; those follow in a chunk of their own.
        """
        ended = delta.finish_reason is not None
        read = self._messages[choice.index].read(delta.text, ended)
        deltas = _chat_deltas(read.parts)
        shows_tokens = self._shown.logprobs is not None or self._shown.token_ids
        if not deltas and shows_tokens and delta.token_ids:
            deltas.append(ChatDelta(content=""))
        return [
            ChatChunkChoice(
                index=choice.index,
                delta=part,
                logprobs=self._listed(() if place else delta.logprobs),
                token_ids=UNSET if place else self._token_ids(delta.token_ids),
                finish_reason=None,
            )
            for place, part in enumerate(deltas)
        ]

    def ending(self, choice: Choice) -> ChatChunkChoice:
        """The finish reason, without content."""
        return ChatChunkChoice(
            index=choice.index,
            delta=_EMPTY,
            logprobs=None,
            finish_reason=self._finish_reason(choice),
            stop_reason=choice.stop_reason,
            seed=choice.seed,
        )

    def complete(self, choice: Choice, index: int) -> ChatChoice:
        """The complete message."""
        read = self._messages[choice.index].read("".join(choice.text), ended=True)
        content: str | None = self._shown.before + read.content
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
        if choice.finish_reason is None:
            return None
        reason = choice.finish_reason.openai
        called = self._messages[choice.index].has_calls
        return "tool_calls" if called and reason == "stop" else reason

    def _token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._shown.token_ids else UNSET

    def _listed(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._shown.logprobs is None:
            return None
        as_ids = self._shown.tokens_as_ids
        return ChatLogprobs(
            [token_logprob(self._tokenizer, each, as_ids) for each in logprobs], None
        )


def token_logprob(
    tokenizer: Vocabulary, logprobs: TokenLogprobs, as_ids: bool = False
) -> TokenLogprob:
    """A token with its logprob and the likeliest alternatives, in OpenAI's shape. With `as_ids`,
    tokens are named by their ids.
    """
    top = [_top_logprob(tokenizer, *each, as_ids) for each in logprobs.top]
    chosen = _top_logprob(tokenizer, logprobs.token_id, logprobs.logprob, as_ids)
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def _top_logprob(
    tokenizer: Vocabulary, token_id: int, logprob: float, as_id: bool = False
) -> TopLogprob:
    """A token with its logprob, in OpenAI's shape."""
    name = (
        f"token_id:{token_id}" if as_id else tokenizer.decode([token_id], skip_special_tokens=False)
    )
    return TopLogprob(name, logprob, list(tokenizer.token_bytes(token_id)))


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
