"""Error responses: OpenAI's body on every status, Anthropic's and Ollama's on their own routes.

Routes raise `RequestError` (4xx) or `EngineError` (503). `error_response` turns either, and
Starlette's own 404 and 405, into a response. A route with another body than OpenAI's names it in
`ApiRoute.error_shape`, which holds for whatever is wrong with a request to it, its API key
included; the middleware puts it into the request's state. An error of the system that says that the
machine's disk is full, or that no file descriptor is left, is the same refusal on every route. Any
other unexpected exception becomes a 500 without details; its trace is logged once.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import EngineError, RequestError

_LOG = logging.getLogger("quickstep.server")


class Status(msgspec.Struct, frozen=True):
    """An HTTP status of errors: OpenAI's `type`, the usual `code`, and when it is the answer.

    `is_common` statuses may come from every route.
    """

    kind: str
    code: str | None
    when: str
    is_common: bool = True


class Code(msgspec.Struct, frozen=True):
    """An `error.code` that a program may look for: its status, when it comes, and what helps."""

    status: int
    when: str
    solution: str


_REQUEST, _SERVER = "invalid_request_error", "server_error"
STATUSES: Mapping[int, Status] = {
    400: Status(_REQUEST, None, "The request is wrong; the error names the field."),
    401: Status("authentication_error", "invalid_api_key", "The API key is missing or wrong."),
    403: Status(
        "permission_error",
        "origin_not_allowed",
        "The origin of a web page, or the host, is not allowed, or an admin key is missing.",
    ),
    404: Status(_REQUEST, "not_found", "There is no such route, model or other resource."),
    405: Status(_REQUEST, "method_not_allowed", "The route has other methods."),
    408: Status(
        _REQUEST,
        "request_timeout",
        "The body came too slowly, or an embedding took longer than timeout_s.",
    ),
    409: Status(
        _REQUEST,
        None,
        "Replicas are being changed already, or no other one serves; the response to repeat is "
        "lost; or another request has cancelled this one.",
        False,
    ),
    413: Status(_REQUEST, "request_too_large", "The body is too large."),
    414: Status(_REQUEST, "url_too_long", "The URL is too long."),
    415: Status(
        _REQUEST,
        "unsupported_media_type",
        "The content type is not JSON, or the body is compressed.",
    ),
    416: Status(
        _REQUEST, "range_not_satisfiable", "A `Range` begins after the end of the file.", False
    ),
    422: Status(
        _REQUEST,
        "idempotency_key_reused",
        "The idempotency key was used for another request.",
        False,
    ),
    429: Status(
        "rate_limit_error",
        "rate_limit_exceeded",
        "Too many requests wait, or the key has reached a rate limit or its budget; retry after "
        "the header's seconds.",
    ),
    431: Status(_REQUEST, "headers_too_large", "The headers are too large."),
    500: Status(_SERVER, "internal_error", "The server failed on this request."),
    501: Status(
        _REQUEST,
        "unsupported_transfer_encoding",
        "The body has a transfer coding other than chunked.",
    ),
    503: Status(
        _SERVER,
        "engine_unavailable",
        "The engine takes no requests now, too many connections are open, too much waits to be "
        "read, or the first token would come after ttft_deadline_ms.",
    ),
    507: Status(_SERVER, "internal_error", "The disk for files and batches is full.", False),
}
CODES: Mapping[str, Code] = {
    "context_length_exceeded": Code(
        400,
        "The prompt does not fit the context.",
        "Shorten it; the operator may raise `--max-model-len`.",
    ),
    "admin_key_required": Code(
        403,
        "The route is for operators.",
        "Use a key of `--admin-api-key`; without keys, call from the server's machine.",
    ),
    "model_does_not_fit": Code(
        400,
        "The model can never be in memory with the budget of this server's models.",
        "Raise `--models-memory-bytes`, or lower the model's `kv-cache-memory-bytes`.",
    ),
    "model_not_ready": Code(
        503,
        "The model was not loaded within the request's time limit.",
        "Send it again, or raise `timeout_s`; `POST /v1/models/load` loads it ahead.",
    ),
    "model_not_found": Code(
        404,
        "`model` is no name of a model or an adapter here.",
        "`GET /v1/models` lists the names.",
    ),
    "not_found": Code(
        404,
        "There is no such route or response.",
        "`/docs` lists the routes; `--max-stored-responses` limits the responses that are kept.",
    ),
    "previous_response_not_found": Code(
        404,
        "`previous_response_id` is not stored here.",
        "Send the conversation so far as `input`.",
    ),
    "not_supported": Code(
        501,
        "This server, or its model, has not what the route needs.",
        "Start it with the flag that the message names.",
    ),
    "stream_not_found": Code(
        404,
        "The conversation has no stream of this key, or not any more.",
        "Send the request with the header `X-Conversation-Id`, and read it within "
        "`--kept-stream-s` after its end.",
    ),
    "stream_offset_lost": Code(
        400,
        "The stream is longer than what is kept of it, and its beginning is lost.",
        "Read sooner, or raise `--max-kept-stream-bytes`.",
    ),
    "idempotency_key_reused": Code(
        422,
        "The idempotency key was used for a request with another route or body.",
        "Send a new key with a new request.",
    ),
    "idempotent_answer_lost": Code(
        409,
        "The answer to the first request with this idempotency key is too long to be repeated.",
        "Send a new key, or raise `--max-kept-stream-bytes`.",
    ),
    "file_not_found": Code(
        404, "There is no such file of this key.", "`GET /v1/files` lists them."
    ),
    "batch_not_found": Code(
        404, "There is no such batch of this key.", "`GET /v1/batches` lists them."
    ),
    "request_not_found": Code(
        404,
        "The log of steps does not have the request (any more).",
        "Look sooner; the log keeps the latest requests only.",
    ),
    "page_file_not_found": Code(
        404, "The page at `/` has no such file.", "Reload the page; its files may have changed."
    ),
    "replica_not_found": Code(
        404, "There is no replica with this number.", "`GET /health` lists them."
    ),
    "rate_limit_exceeded": Code(
        429,
        "The queue or the key's share of it is full, too many grammars wait, or the key has "
        "reached a limit per minute.",
        "Send the request again after the seconds of `Retry-After`.",
    ),
    "insufficient_quota": Code(
        429,
        "The key has spent its budget.",
        "Wait for the reset that the message names, or have the operator raise the budget.",
    ),
    "deadline_unreachable": Code(
        503,
        "The first token cannot come within `ttft_deadline_ms`.",
        "Send the request again later, or with a longer deadline.",
    ),
    "engine_unavailable": Code(
        503,
        "The engine restarts, has failed or shuts down.",
        "Send the request again after the seconds of `Retry-After`.",
    ),
    "server_busy": Code(
        503,
        "Too much waits to be read, tokenized or compiled.",
        "Send the request again after the seconds of `Retry-After`.",
    ),
    "too_many_connections": Code(
        503,
        "The server, or this client, has too many open connections.",
        "Close some, or raise `--max-connections`.",
    ),
    "too_many_open_files": Code(
        503,
        "The server has no file descriptor left.",
        "Send the request again after the seconds of `Retry-After`; the operator raises "
        "`ulimit -n`.",
    ),
    "insufficient_storage": Code(
        507, "The disk for files and batches is full.", "The operator makes room."
    ),
}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_MESSAGE_CHARS = 4096
CLIENT_CLOSED = 499  # nginx's number; it is for the access log, the client is gone
OVERLOADED = 529  # Anthropic's number for what others call 503
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorFacts(msgspec.Struct, frozen=True):
    """The content of an error response of any shape; `kind` is OpenAI's `type`."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every answer with a status of 400 or above, and the last event of a stream that failed."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; the message begins with the field's name."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True):
    """Every answer of Anthropic's routes with a status of 400 or above."""

    type: Literal["error"]
    error: MessagesErrorDetail


class OllamaError(msgspec.Struct, frozen=True):
    """Every answer of Ollama's routes with a status of 400 or above, and the last line of a stream
    that failed.
    """

    error: str


ErrorBody = ErrorAnswer | MessagesError | OllamaError
ErrorShape = Callable[[ErrorFacts], tuple[int, ErrorBody]]  # the status and the body


class GenerationFailed(EngineError):
    """The model failed on one request; the server continues. `engine.stream` has logged it."""


class ServerBusy(EngineError):
    """A queue is full; the same request may succeed a little later."""


class RouteNotFound(RequestError):
    """A resource that does not exist; `code` is its kind."""

    def __init__(self, message: str, *, param: str | None, code: str) -> None:
        super().__init__(message, param=param, status=404, code=code)


def openai_shape(facts: ErrorFacts) -> tuple[int, ErrorAnswer]:
    """OpenAI's status and body."""
    error = ErrorDetail(facts.message, facts.kind, facts.param, facts.code)
    return facts.status, ErrorAnswer(error)


def anthropic_shape(facts: ErrorFacts) -> tuple[int, MessagesError]:
    """Anthropic's status and body, which has no place for the field's name: the message begins
    with it.
    """
    default = "invalid_request_error" if facts.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(facts.status, default)
    status = OVERLOADED if facts.status == 503 else facts.status
    return status, MessagesError("error", MessagesErrorDetail(kind, facts.message))


def ollama_shape(facts: ErrorFacts) -> tuple[int, OllamaError]:
    """The status, and Ollama's body, which is only the message."""
    return facts.status, OllamaError(facts.message)


def facts_of(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> ErrorFacts:
    """An error with the type of its status, and the code of its status unless it has its own."""
    if len(message) > _MESSAGE_CHARS:  # it quotes the request
        message = f"{message[:_MESSAGE_CHARS]} ..."
    usual = STATUSES.get(status, STATUSES[400 if status < 500 else 500])
    return ErrorFacts(status, message, usual.kind, param, code or usual.code)


def error_body(message: str, status: int, param: str | None = None) -> ErrorAnswer:
    """The body of an error answer, and of an error event in a stream, in OpenAI's shape."""
    return openai_shape(facts_of(status, message, param))[1]


def error_facts(error: Exception) -> ErrorFacts:
    """The error response to any exception; logs those that the server caused."""
    if isinstance(error, RequestError):
        return facts_of(error.status, str(error), error.param, error.code)
    if isinstance(error, GenerationFailed):  # the stream has logged it, with its id
        return facts_of(500, str(error))
    if isinstance(error, ServerBusy):
        _LOG.warning("a request was refused: %s", error)
        return facts_of(503, str(error), code="server_busy")
    if isinstance(error, EngineError):
        _LOG.error("the engine refused a request: %s", error)
        return facts_of(503, str(error))
    refusal = _refusal_of(error)
    if refusal is not None:
        _LOG.warning("a request was refused: %s: %s", refusal, error)
        return error_facts(refusal)
    _LOG.error("a request failed unexpectedly", exc_info=error)
    return facts_of(500, "the server failed to answer; its log says why")


def _refusal_of(error: Exception) -> RequestError | None:
    """What a client reads of a machine that has run out of something; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _DISK_FULL:
        return RequestError(
            "the server's disk is full; send it again once its operator has made room",
            status=507,
            code="insufficient_storage",
        )
    if number in _NO_DESCRIPTOR:
        return RequestError(
            "the server has too many open files; send it again a little later",
            status=503,
            code="too_many_open_files",
        )
    return None


@contextmanager
def machine_may_be_full() -> Iterator[None]:
    """Raise RequestError in place of an OSError: 507 of a full disk, 503 without a descriptor."""
    try:
        yield
    except OSError as error:
        refusal = _refusal_of(error)
        if refusal is None:
            raise
        raise refusal from error


def error_of(error: Exception) -> tuple[int, ErrorAnswer]:
    """Status and body of any exception, in OpenAI's shape; logs those that the server caused."""
    return openai_shape(error_facts(error))


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def error_response(request: Request, error: Exception) -> Response:
    """The response to any exception; Starlette and `AccessMiddleware` call it."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        facts, headers = _of_starlette(request, error), error.headers
    else:
        facts = error_facts(error)
        headers = _retry(error) if facts.status in (429, 503) else None
    shape: ErrorShape = request.scope.get("state", {}).get("error_shape", openai_shape)
    status, body = shape(facts)
    return json_response(body, status, headers)


def _retry(error: Exception) -> Mapping[str, str]:
    """When the same request may succeed, in seconds rounded up; 1 if that is unknown."""
    wait_s = error.retry_after_s if isinstance(error, RequestError) else None
    return {"retry-after": str(max(1, math.ceil(wait_s or 0.0)))}


def _of_starlette(request: Request, error: HTTPException) -> ErrorFacts:
    place = f"{request.method} {request.url.path}"
    message = error.detail
    if error.status_code == 404:
        message = f"there is no route {place}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{place} is not allowed; use {allowed}"
    return facts_of(error.status_code, message)
