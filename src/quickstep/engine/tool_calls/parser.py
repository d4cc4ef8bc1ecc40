"""One message's parser: text deltas in, message deltas out.

    text ----> MessageParser ----> content, reasoning, tool calls
                    |
              grammar over a Reader (reasoning first, then the format of the calls)

The server makes one per choice. Whatever the text, it never raises; any split of the text gives
the same message.
"""

from __future__ import annotations

from collections.abc import Callable

from quickstep.engine.tool_calls.message_delta import MessageDelta
from quickstep.engine.tool_calls.reader import Grammar, Reader

__all__ = ["MessageParser"]


class MessageParser:
    """Owns the reader of one message. `new_call_id` names each call that is found."""

    def __init__(self, grammar: Grammar, new_call_id: Callable[[], str]) -> None:
        self._reader = Reader(new_call_id)
        self._parsing = grammar(self._reader)

    def feed(self, text: str) -> MessageDelta:
        """What becomes certain with `text`."""
        if text:
            self._reader.push(text)
            next(self._parsing, None)
        return self._reader.drain()

    def finish(self) -> MessageDelta:
        """What was held back, now that no text follows."""
        self._reader.end()
        next(self._parsing, None)
        self._reader.content.end()
        self._reader.reasoning.end()
        return self._reader.drain()
