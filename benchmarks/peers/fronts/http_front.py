"""A thin HTTP server for engines that have none: OpenAI's streaming completions over token ids.

OpenVINO GenAI and transformers are libraries, so this server puts them on the transport of the
others. It does what a client of the comparison needs and nothing else: `GET /v1/models` and
`POST /v1/completions` with a prompt of token ids, `max_tokens` and a stream; no text, no sampling.
Every report says what it costs per token (`empty_front.py`).

An engine that works in steps (`SteppedEngine`) runs in a thread of its own; the tokens of a step
cross to the event loop in one call. Standard library only, and nothing of this repository: peers
have their own Python environments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

__all__ = ["StepThread", "SteppedEngine", "StreamingEngine", "front_arguments", "serve"]


class StreamingEngine(Protocol):
    """What the server needs of an engine."""

    async def start(self) -> None:
        """Load the model."""

    def stream(self, prompt: list[int], num_outputs: int) -> AsyncIterator[list[int]]:
        """Exactly `num_outputs` greedy tokens in pieces, as they are generated."""


class SteppedEngine(Protocol):
    """An engine that a loop drives. All calls come from one thread."""

    def add(self, number: int, prompt: list[int], num_outputs: int) -> None:
        """Begin a request; `number` is its name in `step`."""

    def step(self) -> Mapping[int, list[int]]:
        """Compute once; the new tokens of each request that has any."""

    def has_work(self) -> bool:
        """Whether a request has tokens to come."""


class StepThread:
    """A stepped engine as a streaming one. Owns the thread in which the engine lives.

    `gather_s` is how long an idle engine waits after a first request for others: only for engines
    whose batch cannot grow once it runs.
    """

    def __init__(self, load: Callable[[], SteppedEngine], gather_s: float = 0.0) -> None:
        self._load = load
        self._gather_s = gather_s
        self._added: queue.SimpleQueue[tuple[int, list[int], int]] = queue.SimpleQueue()
        self._streams: dict[int, asyncio.Queue[list[int]]] = {}
        self._num_added = 0

    async def start(self) -> None:
        """Return once the model is loaded."""
        self._loop = asyncio.get_running_loop()
        loaded = self._loop.create_future()
        threading.Thread(target=self._run, args=(loaded,), daemon=True).start()
        await loaded

    async def stream(self, prompt: list[int], num_outputs: int) -> AsyncIterator[list[int]]:
        """As `StreamingEngine` says."""
        number = self._num_added
        self._num_added += 1
        tokens = self._streams[number] = asyncio.Queue()
        self._added.put((number, prompt, num_outputs))
        try:
            while num_outputs > 0:
                piece = await tokens.get()
                num_outputs -= len(piece)
                yield piece
        finally:
            del self._streams[number]

    def _run(self, loaded: asyncio.Future[None]) -> None:
        """The thread. A failure ends the process: what it computed can no longer be trusted."""
        try:
            engine = self._load()
            self._loop.call_soon_threadsafe(loaded.set_result, None)
            while True:
                self._add_waiting(engine)
                found = engine.step()
                if found:
                    self._loop.call_soon_threadsafe(self._deliver, found)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _add_waiting(self, engine: SteppedEngine) -> None:
        """Take what has come; block for a first request if there is no work."""
        if not engine.has_work():
            engine.add(*self._added.get())
            time.sleep(self._gather_s)
        while not self._added.empty():
            engine.add(*self._added.get())

    def _deliver(self, found: Mapping[int, list[int]]) -> None:
        for number, tokens in found.items():
            if number in self._streams:
                self._streams[number].put_nowait(tokens)


def front_arguments() -> argparse.ArgumentParser:
    """The flags that every front takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    return parser


def serve(engine: StreamingEngine, host: str, port: int) -> None:
    """Load, then listen until the process is ended."""
    asyncio.run(_serve(engine, host, port))


async def _serve(engine: StreamingEngine, host: str, port: int) -> None:
    await engine.start()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(engine, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async with await asyncio.start_server(answer, host, port) as server:
        await server.serve_forever()


async def _answer(
    engine: StreamingEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One request; the connection closes after it."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    if (method, path) == ("GET", "/v1/models"):
        _write_json(writer, "200 OK", {"object": "list", "data": [{"id": "model"}]})
    elif (method, path) == ("POST", "/v1/completions"):
        await _stream(engine, json.loads(body), writer)
    else:
        _write_json(writer, "404 Not Found", {"error": f"no route {method} {path}"})
    await writer.drain()


def _write_json(writer: asyncio.StreamWriter, status: str, value: object) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


async def _stream(
    engine: StreamingEngine, request: dict[str, object], writer: asyncio.StreamWriter
) -> None:
    """Server-sent events: a chunk with token ids per piece, then one with the usage."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    prompt, num_outputs = request["prompt"], request["max_tokens"]
    assert isinstance(prompt, list)
    assert isinstance(num_outputs, int)
    num_tokens = 0
    async for piece in engine.stream(prompt, num_outputs):
        num_tokens += len(piece)
        choice = {"index": 0, "text": "", "token_ids": piece, "finish_reason": None}
        _write_event(writer, {"object": "text_completion", "choices": [choice]})
    usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
    _write_event(writer, {"object": "text_completion", "choices": [], "usage": usage})
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _write_event(writer: asyncio.StreamWriter, value: object) -> None:
    event = f"data: {json.dumps(value)}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
