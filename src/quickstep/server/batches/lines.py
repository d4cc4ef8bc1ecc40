"""Lines of OpenAI's batch files: a request a line in, an answer a line out.

    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "1", "response": {"status_code", "request_id", "body"},
     "error": null}

`quickstep batch` and `/v1/batches` read and write the same lines and answer them in the same way:
by the APIs' own routes (`Endpoint`), so that a line has the bits of the served request.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any, BinaryIO, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.errors import EngineError, RequestError
from quickstep.server.generate.adapter import Answered
from quickstep.server.http.body import check_json_depth
from quickstep.server.http.errors import GenerationFailed, error_of
from quickstep.server.openai.request_types import decode
from quickstep.server.options import RequestLimits

__all__ = [
    "BatchLine",
    "Endpoint",
    "LineAnswer",
    "LineFault",
    "Submitter",
    "answer_line",
    "expired_line",
    "is_passing",
    "numbered_lines",
    "read_line",
]

_ENCODE = msgspec.json.Encoder().encode
_LIMITS = RequestLimits()
_CUSTOM_ID_CHARS = 512
_ENVELOPE_BYTES = 8 * 1024  # of a line around its body: the id, each character escaped, and the url
_BLANK = b" \t\r\n"


class Endpoint(Protocol):
    """A route without HTTP: `GeneratingRoute.whole` is one."""

    async def __call__(self, body: bytes, caller: str = "", added_priority: int = 0) -> Answered:
        """The JSON answer to a body. Raises RequestError, EngineError."""


class _LineFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct, frozen=True):
    """The response to a line; `ignored` are the fields of its body that have no effect."""

    status_code: int
    request_id: str
    body: object
    ignored: tuple[str, ...] | UnsetType = UNSET


class LineError(msgspec.Struct, frozen=True):
    """Why a line has no response."""

    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True):
    """A line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class Submitter(msgspec.Struct, frozen=True):
    """Whose lines they are, and what their own priority is raised by (lower goes first)."""

    caller: str = ""
    added_priority: int = 0


class BatchLine(msgspec.Struct, frozen=True):
    """A request; `body` is the JSON text of an object. Lines count from 1."""

    number: int
    custom_id: str
    url: str
    body: bytes


class LineFault(RequestError):
    """A line that is no request, so that its whole file is refused."""

    def __init__(self, number: int, message: str, param: str | None, code: str) -> None:
        super().__init__(message, param=param, code=code)
        self.number = number


class LineAnswer(msgspec.Struct, frozen=True):
    """What became of a line; `ignored` are the fields of its body that have no effect."""

    custom_id: str
    status: int
    body: object
    ignored: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether the line has an answer and not an error."""
        return self.status < 400

    @property
    def usage(self) -> Mapping[str, Any]:
        """The answer's `usage`, {} if it has none."""
        if isinstance(self.body, dict):
            usage = self.body.get("usage")
        else:
            usage = getattr(self.body, "usage", None)
        usage = msgspec.to_builtins(usage)
        return usage if isinstance(usage, dict) else {}

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, under the API's name."""
        usage = self.usage
        return int(usage.get("completion_tokens", usage.get("output_tokens", 0)) or 0)

    def text(self) -> bytes:
        """The line, with its end."""
        request_id = f"req_{secrets.token_hex(12)}"
        response = LineResponse(self.status, request_id, self.body, self.ignored or UNSET)
        return _written(self.custom_id, response, None)


def numbered_lines(file: BinaryIO, limits: RequestLimits) -> Iterator[tuple[int, bytes]]:
    """Lines from 1, without the blank ones; of one that is too long, only so much that
    `read_line` sees it.
    """
    longest = limits.body_bytes + _ENVELOPE_BYTES
    for number in itertools.count(1):
        text = file.readline(longest + 1)
        if not text:
            return
        end = text
        while len(end) > longest and not end.endswith(b"\n"):
            end = file.readline(longest + 1)
        stripped = text.strip(_BLANK)
        if stripped:
            yield number, stripped


def read_line(
    number: int, text: bytes, urls: Collection[str], limits: RequestLimits = _LIMITS
) -> BatchLine:
    """A line of an input file, whose url must be one of `urls`, and whose body is as large and as
    deep as that of a request over HTTP may be. Raises LineFault.
    """
    if len(text) > limits.body_bytes + _ENVELOPE_BYTES:
        raise _too_large(number, f"more than {limits.body_bytes} bytes", limits)
    try:
        check_json_depth(text, limits.json_depth + 1)
        fields = decode(text, _LineFields)
    except RequestError as error:
        code = "invalid_json_line" if error.param is None else "invalid_request"
        message = str(error).replace("the body", "the text", 1)
        raise LineFault(number, f"line {number}: {message}", error.param, code) from None
    if not 0 < len(fields.custom_id) <= _CUSTOM_ID_CHARS:
        raise LineFault(
            number,
            f"line {number}: custom_id has {len(fields.custom_id)} characters, it must have 1 to "
            f"{_CUSTOM_ID_CHARS}",
            "custom_id",
            "invalid_custom_id",
        )
    if fields.url not in urls:
        raise LineFault(
            number,
            f"line {number}: url is {fields.url[:100]!r}, it must be {' or '.join(sorted(urls))}",
            "url",
            "invalid_url",
        )
    body = bytes(fields.body)
    if len(body) > limits.body_bytes:
        raise _too_large(number, f"{len(body)} bytes", limits)
    if not body.startswith(b"{"):
        raise LineFault(number, f"line {number}: body is not an object", "body", "invalid_body")
    return BatchLine(number, fields.custom_id, fields.url, body)


def _too_large(number: int, size: str, limits: RequestLimits) -> LineFault:
    message = f"line {number}: body has {size}, the limit is {limits.body_bytes}"
    return LineFault(number, message, "body", "request_too_large")


async def answer_line(endpoint: Endpoint, line: BatchLine, asked_by: Submitter) -> LineAnswer:
    """The line's answer; what the API refuses, or the model fails at, is an answer too.

    Raises:
        EngineError: The engine takes no requests now; the line may be tried again.
        RequestError: 429, the engine's queue is full; the same.
    """
    try:
        answered = await endpoint(line.body, asked_by.caller, asked_by.added_priority)
    except Exception as error:  # a batch's top: whatever fails, fails one line
        if is_passing(error):
            raise
        status, refusal = error_of(error)
        return LineAnswer(line.custom_id, status, refusal)
    return LineAnswer(line.custom_id, 200, answered.body, answered.ignored)


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, RequestError):
        return error.status == 429
    return isinstance(error, EngineError) and not isinstance(error, GenerationFailed)


def expired_line(custom_id: str) -> bytes:
    """The line of the error file for a request that the batch's window left no time for."""
    error = LineError(
        "batch_expired",
        "this request could not be executed before the completion window expired",
    )
    return _written(custom_id, None, error)


def _written(custom_id: str, response: LineResponse | None, error: LineError | None) -> bytes:
    line = OutputLine(f"batch_req_{secrets.token_hex(12)}", custom_id, response, error)
    return _ENCODE(line) + b"\n"
