"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, on every status.

Routes raise `RequestError` (4xx) or `EngineError` (503); `error_response` is the one place that
turns either, and Starlette's own 404 and 405, into a body. A surface with another shape names it
in `ApiRoute.error_shape`; the gate puts it into the request's state. What nobody expected becomes
a 500 that does not show its insides; the trace is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import EngineError, RequestError

__all__ = [
    "ErrorFacts",
    "ErrorShape",
    "GenerationFailed",
    "RouteNotFound",
    "ServerBusy",
    "error_body",
    "error_facts",
    "error_of",
    "error_response",
    "facts_of",
    "json_response",
    "openai_shape",
]

_LOG = logging.getLogger("quickstep.server")

_TYPES: Mapping[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "origin_not_allowed"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    414: ("invalid_request_error", "url_too_long"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "engine_unavailable"),
}
_RETRY = {"retry-after": "1"}


class ErrorFacts(msgspec.Struct, frozen=True):
    """All that an error answer says, whatever its shape; `kind` and `code` are OpenAI's words."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None


ErrorShape = Callable[[ErrorFacts], tuple[int, dict[str, Any]]]  # the status and the body


class GenerationFailed(EngineError):
    """The model failed on one request; the server goes on."""


class ServerBusy(EngineError):
    """Too much waits already; the same request may succeed a little later."""


class RouteNotFound(RequestError):
    """A resource of ours that does not exist; `code` says which kind."""

    def __init__(self, message: str, *, param: str | None, code: str) -> None:
        super().__init__(message, param=param, status=404, code=code)


def openai_shape(facts: ErrorFacts) -> tuple[int, dict[str, Any]]:
    """OpenAI's status and body."""
    error = {
        "message": facts.message,
        "type": facts.kind,
        "param": facts.param,
        "code": facts.code,
    }
    return facts.status, {"error": error}


def facts_of(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> ErrorFacts:
    """An error with the type that its status has, and the code if it has none of its own."""
    kind, code_of_status = _TYPES.get(status, _TYPES[400 if status < 500 else 500])
    return ErrorFacts(status, message, kind, param, code or code_of_status)


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The body of an error answer, and of an error event in a stream, in OpenAI's shape."""
    return openai_shape(facts_of(status, message, param))[1]


def error_facts(error: Exception) -> ErrorFacts:
    """What to say of any exception; logs those that are our fault."""
    if isinstance(error, RequestError):
        return facts_of(error.status, str(error), error.param, error.code)
    if isinstance(error, GenerationFailed):
        _LOG.warning("a request failed: %s", error)
        return facts_of(500, str(error))
    if isinstance(error, ServerBusy):
        _LOG.warning("a request was refused: %s", error)
        return facts_of(503, str(error), code="server_busy")
    if isinstance(error, EngineError):
        _LOG.error("the engine refused a request: %s", error)
        return facts_of(503, str(error))
    _LOG.error("a request failed unexpectedly", exc_info=error)
    return facts_of(500, "the server failed to answer; its log says why")


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of any exception, in OpenAI's shape; logs those that are our fault."""
    return openai_shape(error_facts(error))


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def error_response(request: Request, error: Exception) -> Response:
    """Starlette's exception hook for everything; the gate's as well."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        facts, headers = _of_starlette(request, error), error.headers
    else:
        facts = error_facts(error)
        headers = _RETRY if facts.status in (429, 503) else None
    shape: ErrorShape = request.scope.get("state", {}).get("error_shape", openai_shape)
    status, body = shape(facts)
    return json_response(body, status, headers)


def _of_starlette(request: Request, error: HTTPException) -> ErrorFacts:
    place = f"{request.method} {request.url.path}"
    message = error.detail
    if error.status_code == 404:
        message = f"there is no route {place}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{place} is not allowed; use {allowed}"
    return facts_of(error.status_code, message)
