"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, on every status.

Routes raise `RequestError` (4xx) or `EngineError` (503); `error_response` is the one place that
turns either, and Starlette's own 404 and 405, into a body. What nobody expected becomes a 500
that does not show its insides; the trace is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import EngineError, RequestError
from quickstep.server.error_shapes import shaped

__all__ = [
    "GenerationFailed",
    "RouteNotFound",
    "error_body",
    "error_of",
    "error_response",
    "json_response",
]

_LOG = logging.getLogger("quickstep.server")

_TYPES: Mapping[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "engine_unavailable"),
}
_RETRY = {"retry-after": "1"}


class GenerationFailed(EngineError):
    """The model failed on one request; the server goes on."""


class RouteNotFound(RequestError):
    """A resource of ours that does not exist; `code` says which kind."""

    def __init__(self, message: str, *, param: str | None, code: str) -> None:
        super().__init__(message, param=param, status=404)
        self.code = code


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The body of an error answer, and of an error event in a stream."""
    kind, code = _TYPES.get(status, _TYPES[400 if status < 500 else 500])
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of any exception; logs those that are our fault."""
    if isinstance(error, RequestError):
        body = error_body(str(error), error.status, error.param)
        if isinstance(error, RouteNotFound):
            body["error"]["code"] = error.code
        return error.status, body
    if isinstance(error, GenerationFailed):
        _LOG.warning("a request failed: %s", error)
        return 500, error_body(str(error), 500)
    if isinstance(error, EngineError):
        _LOG.error("the engine refused a request: %s", error)
        return 503, error_body(str(error), 503)
    _LOG.error("a request failed unexpectedly", exc_info=error)
    return 500, error_body("the server failed to answer; its log says why", 500)


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def error_response(request: Request, error: Exception) -> Response:
    """Starlette's exception hook for everything."""
    if not isinstance(error, HTTPException):
        status, body = error_of(error)
        headers = _RETRY if status in (429, 503) else None
        status, body = shaped(request.url.path, status, body)
        return json_response(body, status, headers)
    place = f"{request.method} {request.url.path}"
    message = error.detail
    if error.status_code == 404:
        message = f"there is no route {place}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{place} is not allowed; use {allowed}"
    body = error_body(message, error.status_code)
    status, body = shaped(request.url.path, error.status_code, body)
    return json_response(body, status, error.headers)
