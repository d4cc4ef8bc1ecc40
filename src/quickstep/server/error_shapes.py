"""The same error in the words of the surface it belongs to.

Errors are made in OpenAI's shape (`api_errors`); the routes below `/v1/messages` answer in
Anthropic's: `{"type": "error", "error": {"type", "message"}}`, with its types and statuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["anthropic_error", "shaped"]

_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = 529  # Anthropic's own status of a server that cannot take the request now


def shaped(path: str, status: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body for a route, from OpenAI's."""
    if path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/"):
        return anthropic_error(status, body)
    return status, body


def anthropic_error(status: int, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Anthropic's status and body, from OpenAI's."""
    if status == 503:
        status = _OVERLOADED
    default = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    message = body["error"]["message"]
    return status, {"type": "error", "error": {"type": kind, "message": message}}
