"""The message in a choice's text: content, reasoning and tool calls, and the blocks made of them.

`MessageReader` parses one choice's text, for every API. `Blocks` is for the APIs that respond with
items (`responses`) or content blocks (`anthropic`): a sequence of blocks, each opened, grown and
closed once. They get the same deltas whether the response streams or not, so a stream's events add
up to the complete message.

    Delta -> MessageReader -> MessageDelta -> Blocks -> BlockChange -> frames
"""

from __future__ import annotations

import enum
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from quickstep.engine.interface import Vocabulary
from quickstep.server.generate.generation import Choice, Generation, opens_reasoning
from quickstep.text.tool_calls.formats import message_grammar
from quickstep.text.tool_calls.message_delta import (
    CallDelta,
    ContentDelta,
    MessageDelta,
    ReasoningDelta,
)
from quickstep.text.tool_calls.reader import MessageParser
from quickstep.types import Delta, FinishReason, TokenLogprobs

# brackets, strings and other values of a JSON text
_JSON_PIECES = re.compile(r'[][{},]|"(?:[^"\\]|\\.)*+"|[^][{},:"\s]++', re.DOTALL)
_MAX_CUTS = 8  # after a cut there is at most a key, a colon and an incomplete value


class MessageReader:
    """Parses one choice's message. `parser` is None if all of its text is content, `in_reasoning`
    tells that the prompt has opened the reasoning.

    `num_reasoning_tokens` counts from the first token of the reasoning to its closing tag.
    """

    def __init__(
        self, parser: MessageParser | None, one_call: bool, in_reasoning: bool = False
    ) -> None:
        self._parser = parser
        self._one_call = one_call
        self._in_reasoning = in_reasoning
        self.has_calls = False
        self.num_reasoning_tokens = 0

    def read(self, delta: Delta) -> MessageDelta:
        """The parts of the message that the delta completes."""
        text = delta.text
        if self._parser is None:
            return MessageDelta((ContentDelta(text),) if text else ())
        message = self._parser.feed(text)
        if self._in_reasoning or any(isinstance(part, ReasoningDelta) for part in message.parts):
            self.num_reasoning_tokens += len(delta.token_ids)
        if text:
            self._in_reasoning = self._parser.in_reasoning
        if delta.finish_reason is not None:
            message = message.followed_by(self._parser.finish())
        if self._one_call:
            message = message.with_first_call_only()
        self.has_calls |= any(isinstance(part, CallDelta) for part in message.parts)
        return message


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
    parser = MessageParser(grammar, _call_ids(short, call_prefix), output.parameters)
    return MessageReader(parser, output.one_call, in_reasoning=inside)


def _call_ids(short: bool, prefix: str) -> Callable[[], str]:
    if short:
        return lambda: uuid.uuid4().hex[:9]
    return lambda: f"{prefix}{uuid.uuid4().hex[:24]}"


class MessageBlockKind(enum.Enum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Change(enum.Enum):
    """The kind of a change to a block."""

    OPENED = "opened"
    GREW = "grew"
    CLOSED = "closed"


class Block(msgspec.Struct):
    """A block, growing. `call` has the id and the name of one; its text is then the arguments.

    `cut`: its end is missing.
    """

    index: int
    kind: MessageBlockKind
    call: CallDelta | None = None
    pieces: list[str] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class BlockChange(msgspec.Struct, frozen=True):
    """One change; `text` and `logprobs` are what is new."""

    change: Change
    block: Block
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Blocks:
    """One choice's blocks. Feed it every delta in order.

    `never_empty`: a message without any block ends with an empty one of text.
    """

    def __init__(self, reader: MessageReader, never_empty: bool = False) -> None:
        self._reader = reader
        self._never_empty = never_empty
        self._open: Block | None = None
        self._logprobs: list[TokenLogprobs] = []
        self.blocks: list[Block] = []
        self.last: Delta | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the message calls a function."""
        return self._reader.has_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._reader.num_reasoning_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the message ended; None while it is generated."""
        return None if self.last is None else self.last.finish_reason

    def is_open(self, block: Block) -> bool:
        """Whether the block may still grow."""
        return block is self._open

    def feed(self, delta: Delta) -> list[BlockChange]:
        """The changes that a delta makes. The last delta closes the open block."""
        self._logprobs.extend(delta.logprobs)
        reason = delta.finish_reason
        message = self._reader.read(delta)
        changes: list[BlockChange] = []
        for part in message.parts:
            match part:
                case ReasoningDelta(text=text):
                    changes += self._grow(MessageBlockKind.REASONING, text)
                case ContentDelta(text=text):
                    changes += self._grow(MessageBlockKind.TEXT, text)
                case CallDelta():
                    changes += self._call(part)
        if reason is not None:
            self.last = delta
            if self._never_empty and not self.blocks:
                changes.append(
                    BlockChange(Change.OPENED, self._add(Block(0, MessageBlockKind.TEXT)))
                )
            changes += self._close(cut=reason.openai != "stop")
        return changes

    def _grow(self, kind: MessageBlockKind, text: str) -> Iterator[BlockChange]:
        block = self._open
        if block is None or block.kind is not kind:
            yield from self._close()
            block = self._add(Block(len(self.blocks), kind))
            yield BlockChange(Change.OPENED, block)
        # logprobs of markup and of what was held back in vain belong to no text
        logprobs = tuple(self._logprobs) if kind is MessageBlockKind.TEXT else ()
        self._logprobs.clear()
        block.pieces.append(text)
        block.logprobs.extend(logprobs)
        yield BlockChange(Change.GREW, block, text, logprobs)

    def _call(self, piece: CallDelta) -> Iterator[BlockChange]:
        """A piece of a call, whose pieces follow each other."""
        self._logprobs.clear()
        if piece.name:
            yield from self._close()
            block = self._add(Block(len(self.blocks), MessageBlockKind.CALL, piece))
            yield BlockChange(Change.OPENED, block)
        if piece.arguments:
            block = self.blocks[-1]
            block.pieces.append(piece.arguments)
            yield BlockChange(Change.GREW, block, piece.arguments)
        if piece.is_last:
            yield from self._close(cut=_object(self.blocks[-1].text) is None)

    def _add(self, block: Block) -> Block:
        self.blocks.append(block)
        self._open = block
        return block

    def _close(self, cut: bool = False) -> Iterator[BlockChange]:
        block, self._open = self._open, None
        if block is not None:
            block.cut = cut
            yield BlockChange(Change.CLOSED, block)


def partial_object(text: str) -> dict[str, Any]:
    """The members of an object that a text is the JSON of, or its beginning: those that are there.

    An answer whose schema has an object has no other place for arguments that the limit cut.
    """
    complete = _object(text)
    if complete is not None:
        return complete
    for end, closing in reversed(_ends_of_values(text)):
        partial = _object(text[:end] + closing)
        if partial is not None:
            return partial
    return {}


def _ends_of_values(text: str) -> list[tuple[int, str]]:
    """The last places where a text can be cut off, and the brackets that are open there."""
    places: deque[tuple[int, str]] = deque(maxlen=_MAX_CUTS)
    closing: list[str] = []
    for found in _JSON_PIECES.finditer(text):
        piece = found.group()
        if piece in ("{", "["):
            closing.append("}" if piece == "{" else "]")
        elif piece in ("}", "]") and closing:
            closing.pop()
        if closing and piece != ",":
            places.append((found.end(), "".join(reversed(closing))))
    return list(places)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
