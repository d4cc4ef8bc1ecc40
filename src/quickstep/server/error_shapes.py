"""The same error in the words of another surface than OpenAI's.

A route names its shape (`ApiRoute.error_shape`), which holds for whatever is wrong with a request
to it, its API key included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quickstep.server.api_errors import ErrorFacts

__all__ = ["OVERLOADED", "anthropic_shape", "ollama_shape"]

OVERLOADED = 529  # Anthropic's number for what others call 503

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_shape(facts: ErrorFacts) -> tuple[int, dict[str, Any]]:
    """Anthropic's status and body, which has no place for the field's name: the message begins
    with it.
    """
    default = "invalid_request_error" if facts.status < 500 else "api_error"
    kind = _TYPES.get(facts.status, default)
    status = OVERLOADED if facts.status == 503 else facts.status
    return status, {"type": "error", "error": {"type": kind, "message": facts.message}}


def ollama_shape(facts: ErrorFacts) -> tuple[int, dict[str, Any]]:
    """The status, and Ollama's body: the message alone."""
    return facts.status, {"error": facts.message}
