"""The client of the comparison: token ids in, streamed token ids out, counted.

One event loop sends all requests of a round, each at its time, and notes when each token came.
A reply is checked against its request: the usage that the server reports and the token ids that it
streamed both have to be exactly what was requested, or the round is invalid (`faults`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from benchmarks.peers.workloads import PeerRequest

__all__ = ["Api", "Reply", "ServerRefused", "fault_of", "send_all"]

_TIMEOUT_S = 1200.0


class ServerRefused(Exception):
    """A server answered something else than a stream."""


class Api(Enum):
    """How a server takes token ids and streams them."""

    OPENAI = "/v1/completions"
    LLAMA_CPP = "/completion"


@dataclass(slots=True)
class Reply:
    """What came of a request. Times are of `time.perf_counter`.

    Attributes:
        due_s: When it was to be sent; times count from here, so that a late client shows.
        marks: When each token id came.
        num_prompt: Prompt tokens as the server counted them.
        num_outputs: Output tokens as the server counted them.
        status: Of HTTP; 0 before it is known.
        error: Why there is no complete reply.
    """

    due_s: float
    marks: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_prompt: int | None = None
    num_outputs: int | None = None
    status: int = 0
    error: str | None = None


def send_all(port: int, api: Api, requests: Sequence[PeerRequest]) -> list[Reply]:
    """Send each at its time to a server on this machine, and follow all to their ends."""
    return asyncio.run(_send_all(port, api, requests))


def fault_of(request: PeerRequest, reply: Reply) -> str | None:
    """What makes a reply unusable: an error, or a count that is not the requested one."""
    if reply.error is not None:
        return reply.error
    counts = (
        ("prompt tokens in the usage", reply.num_prompt, len(request.prompt)),
        ("output tokens in the usage", reply.num_outputs, request.num_outputs),
        ("streamed token ids", len(reply.token_ids), request.num_outputs),
    )
    wrong = [f"{found} {what}, not {wanted}" for what, found, wanted in counts if found != wanted]
    return "; ".join(wrong) or None


async def _send_all(port: int, api: Api, requests: Sequence[PeerRequest]) -> list[Reply]:
    start_s = time.perf_counter()
    replies = [Reply(start_s + request.at_s) for request in requests]
    await asyncio.gather(
        *(
            _follow(port, api, request, reply)
            for request, reply in zip(requests, replies, strict=True)
        )
    )
    return replies


async def _follow(port: int, api: Api, request: PeerRequest, reply: Reply) -> None:
    """A request from its time to its end; what goes wrong is its own error."""
    await asyncio.sleep(max(0.0, reply.due_s - time.perf_counter()))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for event in _events(port, api.value, _body(api, request), reply):
                _note(api, event, reply)
    except TimeoutError:
        reply.error = f"no end after {_TIMEOUT_S:.0f} s"
    except (OSError, EOFError, ValueError, LookupError, ServerRefused) as error:
        reply.error = f"{type(error).__name__}: {error}"


def _body(api: Api, request: PeerRequest) -> dict[str, Any]:
    fixed: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": True}
    fixed["prompt"] = list(request.prompt)
    if api is Api.LLAMA_CPP:
        return {
            **fixed,
            "n_predict": request.num_outputs,
            "return_tokens": True,
            "cache_prompt": True,
        }
    return {
        **fixed,
        "model": request.model,
        "max_tokens": request.num_outputs,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


def _note(api: Api, event: dict[str, Any], reply: Reply) -> None:
    """Read one event of a stream into the reply."""
    if "error" in event:
        raise ServerRefused(str(event["error"]))
    if api is Api.LLAMA_CPP:
        token_ids = event.get("tokens") or []
        if event.get("stop"):
            reply.num_prompt = event["tokens_evaluated"]
            reply.num_outputs = event["tokens_predicted"]
    else:
        choices = event.get("choices")
        token_ids = (choices[0].get("token_ids") or []) if choices else []
        usage = event.get("usage")
        if usage:
            reply.num_prompt = usage["prompt_tokens"]
            reply.num_outputs = usage["completion_tokens"]
    reply.token_ids += token_ids
    reply.marks += [time.perf_counter()] * len(token_ids)


async def _events(
    port: int, path: str, body: dict[str, Any], reply: Reply
) -> AsyncIterator[dict[str, Any]]:
    """The values of a stream of server-sent events; the reply gets the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        sent = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        pieces = _pieces(reader, is_chunked=b"transfer-encoding: chunked" in answer)
        reply.status = int(answer.split(b" ", 2)[1])
        if reply.status != 200:
            text = b"".join([piece async for piece in pieces])[:300].decode(errors="replace")
            raise ServerRefused(f"status {reply.status}: {text}")
        rest = b""
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                    yield json.loads(line[6:])
    finally:
        writer.close()


async def _pieces(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes."""
    while not is_chunked:
        piece = await reader.read(65536)
        if not piece:
            return
        yield piece
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
