"""The JSON of errors, as types: OpenAI's, and Anthropic's and Ollama's on their own routes."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["ErrorAnswer", "MessagesError", "OllamaError"]


class ErrorFact(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every answer with a status of 400 or above, and the last event of a stream that failed."""

    error: ErrorFact


class MessagesErrorFact(msgspec.Struct, frozen=True):
    """What went wrong; the message begins with the field's name."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True):
    """Every answer of Anthropic's routes with a status of 400 or above."""

    type: Literal["error"]
    error: MessagesErrorFact


class OllamaError(msgspec.Struct, frozen=True):
    """Every answer of Ollama's routes with a status of 400 or above, and the last line of a stream
    that failed.
    """

    error: str
