"""Server-sent events as bytes: what surfaces write and `event_stream` sends."""

from __future__ import annotations

import msgspec

__all__ = ["DONE", "data_frame", "event_frame"]

_ENCODE = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def data_frame(content: object) -> bytes:
    """An event without a name, as OpenAI's chat and completions send them."""
    return b"data: " + _ENCODE(content) + b"\n\n"


def event_frame(name: str, content: object) -> bytes:
    """An event with a name, as OpenAI's responses and Anthropic send them."""
    return b"event: " + name.encode() + b"\ndata: " + _ENCODE(content) + b"\n\n"
