"""Lines of OpenAI's batch files: a request per line in, a response per line out.

    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "1", "response": {"status_code", "request_id", "body"},
     "error": null}

`quickstep batch` and `/v1/batches` both parse lines with `read_line` and process them with
`run_lines`. Each line runs through the endpoint of its API (`batch_endpoints`), so its output has
the same bits as a served request. Opening input and output files is the caller's work.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.errors import EngineDied, EngineError, RequestError
from quickstep.json_line import json_line
from quickstep.server.anthropic.endpoint import Messages
from quickstep.server.fields.decode import decode
from quickstep.server.generate.api import GeneratingApi, LineResult, Observers
from quickstep.server.generate.endpoint import GeneratingRoute
from quickstep.server.http.body import check_json
from quickstep.server.http.errors import GenerationFailed, error_of
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.openai.chat import Chat
from quickstep.server.openai.completions import Completions
from quickstep.server.openai.embeddings import Embeddings
from quickstep.server.options import RequestLimits
from quickstep.server.responses.endpoint import Responses
from quickstep.server.responses.store import ResponseStore

BATCH_URLS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
    }
)
_LIMITS = RequestLimits()
_CUSTOM_ID_CHARS = 512
_ENVELOPE_BYTES = 8 * 1024  # of a line around its body: the id, each character escaped, and the url
_BLANK = b" \t\r\n"


class BatchEndpoint(Protocol):
    """An endpoint without HTTP: `GeneratingRoute.answer_line` is one."""

    async def __call__(self, body: bytes, caller: str = "", added_priority: int = 0) -> LineResult:
        """Return the JSON response to a body. Raises RequestError, EngineError."""


def batch_endpoints(models: ModelRegistry, observers: Observers) -> Mapping[str, BatchEndpoint]:
    """The endpoints of `BATCH_URLS`.

    Responses of batches are kept in a store of their own, so that they evict no response of a
    live client.
    """
    apis: dict[str, GeneratingApi] = {
        "/v1/chat/completions": Chat(),
        "/v1/completions": Completions(),
        "/v1/responses": Responses(ResponseStore()),
        "/v1/messages": Messages(),
    }
    generating = {
        url: GeneratingRoute(api, models, observers).answer_line for url, api in apis.items()
    }
    return MappingProxyType(
        {**generating, "/v1/embeddings": Embeddings(models, observers).answer_line}
    )


class BatchLine(msgspec.Struct, frozen=True):
    """A request of an input file; `body` is the JSON text of an object. Lines count from 1."""

    number: int
    custom_id: str
    url: str
    body: bytes


class LineFault(RequestError):
    """A line that is not a valid request; the complete file is then refused."""

    def __init__(self, number: int, message: str, param: str | None, code: str) -> None:
        super().__init__(message, param=param, code=code)
        self.number = number


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


class LineAnswer(msgspec.Struct, frozen=True):
    """The result of a line; `ignored` are the fields of its body that have no effect."""

    custom_id: str
    status: int
    body: object
    ignored: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether the body is a response and not an error."""
        return self.status < 400

    @property
    def usage(self) -> Mapping[str, Any]:
        """The response's `usage`, {} if it has none."""
        if isinstance(self.body, dict):
            usage = self.body.get("usage")
        else:
            usage = getattr(self.body, "usage", None)
        usage = msgspec.to_builtins(usage)
        return usage if isinstance(usage, dict) else {}

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, by either API's name of the count."""
        usage = self.usage
        return int(usage.get("completion_tokens", usage.get("output_tokens", 0)) or 0)

    def text(self) -> bytes:
        """The line of the output file, with its newline."""
        request_id = f"req_{secrets.token_hex(12)}"
        response = LineResponse(self.status, request_id, self.body, self.ignored or UNSET)
        return _encoded_line(self.custom_id, response, None)


def expired_line(custom_id: str) -> bytes:
    """The error file's line for a request that the batch's completion window left no time for."""
    error = LineError(
        "batch_expired",
        "this request could not be executed before the completion window expired",
    )
    return _encoded_line(custom_id, None, error)


def _encoded_line(custom_id: str, response: LineResponse | None, error: LineError | None) -> bytes:
    line = OutputLine(f"batch_req_{secrets.token_hex(12)}", custom_id, response, error)
    return json_line(line) + b"\n"


def numbered_lines(file: BinaryIO, limits: RequestLimits) -> Iterator[tuple[int, bytes]]:
    """Lines from 1, without the blank ones. Of a line that is too long, only as much is read as
    `read_line` needs to refuse it.
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
        check_json(text, limits, num_outer=1)
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


class Submitter(msgspec.Struct, frozen=True):
    """The client of the lines, and what is added to their priority (lower runs first)."""

    caller: str = ""
    added_priority: int = 0


class LineSlots:
    """Bounds how many lines, of all batches, run at a time; or lets one line run exclusively."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots = asyncio.Semaphore(num_slots)
        self._exclusive = asyncio.Lock()
        self._num_exclusive = 0  # lines that run exclusively or wait for it; the others then wait
        self._none_exclusive = asyncio.Event()
        self._none_exclusive.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """One slot, while other lines run."""
        while True:
            await self._none_exclusive.wait()
            await self._slots.acquire()
            if not self._num_exclusive:
                break
            self._slots.release()
        try:
            yield
        finally:
            self._slots.release()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Every slot: no other line runs meanwhile."""
        self._num_exclusive += 1
        self._none_exclusive.clear()
        num_acquired = 0
        try:
            async with self._exclusive:
                try:
                    while num_acquired < self._num_slots:
                        await self._slots.acquire()
                        num_acquired += 1
                    yield
                finally:
                    for _ in range(num_acquired):
                        self._slots.release()
        finally:
            self._num_exclusive -= 1
            if not self._num_exclusive:
                self._none_exclusive.set()


class LineRunner(msgspec.Struct, frozen=True):
    """Runs one line, and retries while the engine accepts no requests.

    Attributes:
        slots: Where lines run. With it, a line that failed with a status of 5xx is sent once more,
            exclusively: the engine's process may have died because of another line; if this line
            is the cause, no other fails with it. None for an engine in this process.
        submitter: The client that sent the lines.
        num_tries: How often a line is sent to an engine that accepts none (during a restart).
        retry_s: The pause between two tries.
    """

    endpoints: Mapping[str, BatchEndpoint]
    slots: LineSlots | None = None
    submitter: Submitter = msgspec.field(default_factory=Submitter)
    num_tries: int = 1
    retry_s: float = 0.5

    async def answer(self, line: BatchLine) -> LineAnswer:
        """The line's answer. Raises EngineError when the last try has failed.

        A full queue empties, so waiting for it has no limit.
        """
        if self.slots is None:
            return await self._send(line)
        async with self.slots.shared():
            answer = await self._send(line)
        if answer.status >= 500:
            async with self.slots.exclusive():
                answer = await self._send(line)
        return answer

    async def _send(self, line: BatchLine) -> LineAnswer:
        """The answer of an engine that accepted the line, or died while it computed it."""
        num_failed = 0
        while True:
            try:
                return await _answer_line(self.endpoints[line.url], line, self.submitter)
            except RequestError as error:
                if not _is_transient(error):
                    raise
            except EngineDied as error:
                status, refusal = error_of(GenerationFailed(str(error)))
                return LineAnswer(line.custom_id, status, refusal)
            except EngineError:
                num_failed += 1
                if num_failed >= self.num_tries:
                    raise
            await asyncio.sleep(self.retry_s)


async def _answer_line(
    endpoint: BatchEndpoint, line: BatchLine, submitter: Submitter
) -> LineAnswer:
    """The line's answer; an error of the API or of the model is an answer, too.

    Raises:
        EngineError: The engine accepts no requests now; the line may be tried again.
        RequestError: 429, the engine's queue is full; the line may be tried again.
    """
    try:
        answered = await endpoint(line.body, submitter.caller, submitter.added_priority)
    except Exception as error:  # a line's top: an error fails one line
        if _is_transient(error):
            raise
        status, refusal = error_of(error)
        return LineAnswer(line.custom_id, status, refusal)
    return LineAnswer(line.custom_id, 200, answered.body, answered.ignored)


def _is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a little later; a spent budget lasts for days."""
    if isinstance(error, RequestError):
        return error.status == 429 and error.code != "insufficient_quota"
    return isinstance(error, EngineError) and not isinstance(error, GenerationFailed)


async def run_lines(
    lines: AsyncIterator[BatchLine],
    answer: Callable[[BatchLine], Awaitable[LineAnswer]],
    write: Callable[[LineAnswer], Awaitable[None]],
    concurrency: int,
) -> None:
    """Answer every line, `concurrency` at a time, and write each answer when it is complete.

    A cancellation, or an error of `lines`, `answer` or `write`, cancels the lines that run; what
    was written by then is complete.
    """
    reading = asyncio.Lock()  # the workers share the iterator: every line goes to one of them

    async def next_line() -> BatchLine | None:
        async with reading:
            return await anext(lines, None)

    async def work() -> None:
        while (line := await next_line()) is not None:
            await write(await answer(line))

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
