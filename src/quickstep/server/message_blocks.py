"""A message as a row of blocks: reasoning, text, call, each opened, grown and closed once.

The surfaces that answer with items (`responses`) or content blocks (`anthropic`) share it, and
feed it the same deltas whether they stream or not: what a stream tells adds up to the whole.

    Delta -> MessageReader -> MessageDelta -> BlockNews -> frames
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import field

from quickstep.dataclass import dataclass
from quickstep.engine.stream import Delta
from quickstep.engine.tool_calls.message_delta import CallDelta
from quickstep.server.chat_message import MessageReader
from quickstep.types import FinishReason, TokenLogprobs

__all__ = ["Block", "BlockKind", "BlockNews", "Blocks", "Change"]


class BlockKind(enum.Enum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Change(enum.Enum):
    """What happens to a block; a call is opened, grown and closed in one go."""

    OPENED = "opened"
    GREW = "grew"
    CLOSED = "closed"


@dataclass(slots=True)
class Block:
    """A block, growing. `call` is None unless it is one; its text is then the arguments."""

    index: int
    kind: BlockKind
    call: CallDelta | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockNews:
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
        self.num_reasoning_tokens = 0
        self.last: Delta | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the message calls a function."""
        return self._reader.has_calls

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return None if self.last is None else self.last.finish_reason

    def is_open(self, block: Block) -> bool:
        """Whether more of it may come."""
        return block is self._open

    def feed(self, delta: Delta) -> list[BlockNews]:
        """What a delta changes. The last one closes what is open."""
        self._logprobs.extend(delta.logprobs)
        reason = delta.finish_reason
        said = self._reader.read(delta.text, reason is not None)
        news: list[BlockNews] = []
        if said.reasoning:
            news += self._grow(BlockKind.REASONING, said.reasoning)
        if self._open is not None and self._open.kind is BlockKind.REASONING:
            self.num_reasoning_tokens += len(delta.token_ids)
        if said.content:
            news += self._grow(BlockKind.TEXT, said.content)
        for call in said.calls:
            news += self._call(call)
        if reason is not None:
            self.last = delta
            if self._never_empty and not self.blocks:
                news.append(BlockNews(Change.OPENED, self._add(Block(0, BlockKind.TEXT))))
            news += self._close(cut=reason.openai != "stop")
        return news

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockNews]:
        block = self._open
        if block is None or block.kind is not kind:
            yield from self._close()
            block = self._add(Block(len(self.blocks), kind))
            yield BlockNews(Change.OPENED, block)
        # logprobs of markup and of what was held back in vain belong to no text
        logprobs = tuple(self._logprobs) if kind is BlockKind.TEXT else ()
        self._logprobs.clear()
        block.pieces.append(text)
        block.logprobs.extend(logprobs)
        yield BlockNews(Change.GREW, block, text, logprobs)

    def _call(self, call: CallDelta) -> Iterator[BlockNews]:
        yield from self._close()
        self._logprobs.clear()
        block = self._add(Block(len(self.blocks), BlockKind.CALL, call, [call.arguments]))
        yield BlockNews(Change.OPENED, block)
        yield BlockNews(Change.GREW, block, call.arguments)
        yield from self._close()

    def _add(self, block: Block) -> Block:
        self.blocks.append(block)
        self._open = block
        return block

    def _close(self, cut: bool = False) -> Iterator[BlockNews]:
        block, self._open = self._open, None
        if block is not None:
            block.cut = cut
            yield BlockNews(Change.CLOSED, block)
