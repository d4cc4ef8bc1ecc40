"""`UpstreamClient`: one request to another server with OpenAI's API, over HTTP/1.1.

A connection per request. The host comes from the operator's config, never from a client or from a
response: redirects are failures. Everything that arrives is bounded in bytes and in time, and is
JSON before it is passed on. The API key is in no error and in no log.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quickstep.core.fallback import LEAST_FIRST_BYTE_S, Upstream
from quickstep.errors import EngineError
from quickstep.server.upstream.breaker import Breaker

CONNECT_S = 2.0
FIRST_BYTE_S = 60.0  # without a deadline
SILENCE_S = 30.0  # between two reads of a response
LONGEST_S = 600.0  # of a response, without a deadline
MAX_RESPONSE_BYTES = 16 * 1024 * 1024
MAX_CALLS = 64  # at a time
_MAX_LINE = 64 * 1024
_MAX_EVENT_LINE = 1024 * 1024
_MAX_HEADERS = 100
_ERROR_CHARS = 200
_DONE = b"[DONE]"
_Content = dict[str, Any]


class UpstreamFailed(EngineError):
    """An upstream gave no valid response. `retry_after_s`: what it demands, if it does."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _NotReached(UpstreamFailed):
    """No connection, or an error of the server: the call may be repeated."""


class _Head(msgspec.Struct, frozen=True):
    """The beginning of a response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]


class TimeLeft(msgspec.Struct, frozen=True):
    """Seconds until the first byte and the end of a response are due; None without a deadline."""

    first_s: float | None = None
    total_s: float | None = None

    @property
    def least_s(self) -> float | None:
        """Until the first of the deadlines."""
        due_s = [left for left in (self.first_s, self.total_s) if left is not None]
        return min(due_s, default=None)


class _End(msgspec.Struct):
    """When a call ends at the latest, by the client's clock: later once the first byte is there."""

    at_s: float


class UpstreamClient:
    """Calls one upstream; its breaker says whether it should be called.

    Args:
        api_key: None for none.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        upstream: Upstream,
        api_key: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.upstream = upstream
        self.breaker = Breaker(clock)
        self._api_key = api_key
        self._clock = clock
        self._num_calls = 0

    @property
    def is_free(self) -> bool:
        """Whether a call may begin now."""
        return not self.breaker.is_open and self._num_calls < MAX_CALLS

    async def complete(self, path: str, body: _Content, time: TimeLeft) -> _Content:
        """The complete response. Raises UpstreamFailed."""
        contents = [content async for content in self.stream(path, body, time)]
        return contents[0]

    @property
    def _name(self) -> str:
        return f"the upstream {urlsplit(self.upstream.url).hostname}"

    async def stream(
        self, path: str, body: _Content, time: TimeLeft
    ) -> AsyncGenerator[_Content, None]:
        """The chunks of a stream, which ends as the upstream ends it; there is at most one retry,
        while there are none. A body that requests no stream has one, the complete response.

        Raises:
            UpstreamFailed: The response is not complete and valid, or comes too late.
        """
        now = self._clock
        last_s = now() + (LONGEST_S if time.total_s is None else time.total_s)
        first_s = FIRST_BYTE_S if body.get("stream") else LONGEST_S
        end_s = _End(min(last_s, now() + (first_s if time.first_s is None else time.first_s)))
        self.breaker.begin()
        self._num_calls += 1
        began_s, is_first, is_retried, has_ended = now(), True, False, False
        try:
            while True:
                try:
                    async for content in self._call(path, body, end_s):
                        if is_first:
                            self.breaker.answered(now() - began_s)
                            is_first, end_s.at_s = False, last_s
                        yield content
                    has_ended = True
                    self.breaker.succeeded()
                    return
                except _NotReached:
                    is_late = end_s.at_s - now() < LEAST_FIRST_BYTE_S
                    if not is_first or is_retried or is_late or not self.breaker.take_retry():
                        raise
                    is_retried = True
        except UpstreamFailed as error:
            has_ended = True
            if error.retry_after_s is not None:
                self.breaker.pause(error.retry_after_s)
            else:
                self.breaker.failed()
            raise
        finally:
            self._num_calls -= 1
            if not has_ended:
                self.breaker.left()

    async def _call(self, path: str, body: _Content, end_s: _End) -> AsyncGenerator[_Content, None]:
        is_stream = bool(body.get("stream"))
        try:
            async with self._connection(end_s) as (reader, writer):
                writer.write(self._request(path, body))
                await self._in_time(writer.drain(), CONNECT_S, end_s)
                head = await self._in_time(_read_head(reader), FIRST_BYTE_S, end_s)
                blocks = self._blocks(reader, head, end_s)
                if head.status != 200:
                    raise await self._refusal(head, blocks)
                if is_stream:
                    async for content in _events(blocks, head):
                        yield content
                else:
                    yield _object(b"".join([block async for block in blocks]))
        except TimeoutError:
            raise _NotReached(f"{self._name} did not respond in time") from None
        except (OSError, EOFError, ValueError) as error:
            what = str(error) or type(error).__name__
            raise _NotReached(f"{self._name} failed: {what[:_ERROR_CHARS]}") from None

    async def _in_time(self, awaitable: Any, most_s: float, end_s: _End) -> Any:
        """The result. Raises TimeoutError."""
        async with asyncio.timeout(min(most_s, max(0.0, end_s.at_s - self._clock()))):
            return await awaitable

    @asynccontextmanager
    async def _connection(
        self, end_s: _End
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        parts = urlsplit(self.upstream.url)
        is_tls = parts.scheme == "https"
        opening = asyncio.open_connection(
            parts.hostname,
            parts.port or (443 if is_tls else 80),
            ssl=ssl.create_default_context() if is_tls else None,
            limit=_MAX_EVENT_LINE,
        )
        reader, writer = await self._in_time(opening, CONNECT_S, end_s)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def _request(self, path: str, body: _Content) -> bytes:
        content = msgspec.json.encode({**body, "model": self.upstream.model})
        parts = urlsplit(self.upstream.url)
        lines = [
            f"POST {parts.path}{path} HTTP/1.1",
            f"host: {parts.netloc}",
            "connection: close",
            "content-type: application/json",
            "accept: application/json, text/event-stream",
            "accept-encoding: identity",
            f"content-length: {len(content)}",
        ]
        if self._api_key is not None:
            lines.append(f"authorization: Bearer {self._api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + content

    async def _blocks(
        self, reader: asyncio.StreamReader, head: _Head, end_s: _End
    ) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises ValueError and EOFError if it is not as long as it says."""
        num_bytes = 0
        blocks = _chunked(reader) if _is_chunked(head) else _sized(reader, head)
        while True:
            block = await self._in_time(anext(blocks, None), SILENCE_S, end_s)
            if block is None:
                return
            num_bytes += len(block)
            if num_bytes > MAX_RESPONSE_BYTES:
                raise ValueError(f"its response has more than {MAX_RESPONSE_BYTES} bytes")
            yield block

    async def _refusal(self, head: _Head, blocks: AsyncIterator[bytes]) -> UpstreamFailed:
        """The error of a status other than 200. What the upstream says is not passed on."""
        if head.status in (429, 503) and (text := head.headers.get("retry-after")):
            wait_s = float(text) if text.isdigit() and len(text) < 8 else 1.0
            return UpstreamFailed(f"{self._name} responded {head.status}", wait_s)
        if head.status == 429:
            return UpstreamFailed(f"{self._name} responded 429", 1.0)
        kind = _NotReached if head.status >= 500 else UpstreamFailed
        return kind(f"{self._name} responded {head.status}")


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    """Status and headers. Raises ValueError, EOFError."""
    version, _, rest = (await _line(reader)).partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not (status.isdigit() and len(status) == 3):
        raise ValueError("its response is no HTTP/1.1")
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        line = await _line(reader)
        if not line:
            return _Head(int(status), headers)
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError("it sent a header without a colon")
        headers[name.strip().lower()] = value.strip()
    raise ValueError(f"it sent more than {_MAX_HEADERS} headers")


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readuntil(b"\n")
    if len(line) > _MAX_LINE:
        raise ValueError(f"it sent a line of more than {_MAX_LINE} bytes")
    return line.decode("latin-1").rstrip("\r\n")


def _is_chunked(head: _Head) -> bool:
    return head.headers.get("transfer-encoding", "").lower() == "chunked"


async def _sized(reader: asyncio.StreamReader, head: _Head) -> AsyncGenerator[bytes, None]:
    """A body of the declared length, or until the connection ends."""
    declared = head.headers.get("content-length")
    if declared is None:
        while block := await reader.read(_MAX_LINE):
            yield block
        return
    if not declared.isdigit() or len(declared) > 12:
        raise ValueError(f"its content-length is {declared[:32]!r}")
    num_left = int(declared)
    if num_left > MAX_RESPONSE_BYTES:
        raise ValueError(f"its response has more than {MAX_RESPONSE_BYTES} bytes")
    while num_left:
        block = await reader.read(min(num_left, _MAX_LINE))
        if not block:
            raise EOFError(f"its response ended {num_left} bytes early")
        num_left -= len(block)
        yield block


async def _chunked(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while True:
        size = int((await _line(reader)).partition(";")[0].strip() or "x", 16)
        if not 0 <= size <= MAX_RESPONSE_BYTES:
            raise ValueError(f"it sent a chunk of {size} bytes")
        if not size:
            return
        block = await reader.readexactly(size)
        if await _line(reader):
            raise ValueError("it sent a chunk of another length than declared")
        yield block


async def _events(blocks: AsyncIterator[bytes], head: _Head) -> AsyncGenerator[_Content, None]:
    """The objects of server-sent events, until `[DONE]`. Raises ValueError, EOFError."""
    if not head.headers.get("content-type", "").lower().startswith("text/event-stream"):
        raise ValueError("its response is no stream of events")
    unread = b""
    async for block in blocks:
        *lines, unread = (unread + block).split(b"\n")
        if len(unread) > _MAX_EVENT_LINE:
            raise ValueError(f"it sent an event of more than {_MAX_EVENT_LINE} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == _DONE:
                return
            yield _object(data)
    raise EOFError("its stream ended before [DONE]")


def _object(data: bytes) -> _Content:
    """A JSON object with choices. Raises ValueError."""
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("it sent something else than JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("choices"), list):
        raise ValueError("it sent an object without choices")
    return content
