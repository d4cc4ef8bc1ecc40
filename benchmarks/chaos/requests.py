"""The requests of the chaos run: a pool of reproducible ones, and how a client sends them.

Every request of the pool has a deadline, and a seed or temperature 0, so that its answer on a quiet
server is the only right one. It is sent as most clients do, or by one that reads slowly, or by one
that leaves; hostile requests are those of the soak.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any, Literal

import httpx
import msgspec

from benchmarks.chaos.answers import Answer, read_answer
from benchmarks.chaos.world import PATIENCE_S
from benchmarks.soak_requests import APIS, malformed_request, random_request

__all__ = ["ADAPTERS", "ChaosRequest", "Outcome", "hostile", "pool", "send"]

ADAPTERS = ("demo-docstrings", "demo-annotations", "demo-sql")
_KINDS = ("chat", "completions", "chat", "completions", "responses", "messages", "embeddings")
_HUNG_S = 45.0  # after its deadline, a client gives up
_PAUSE_S = 0.15  # of a slow reader, between two reads
_MAX_PAUSES = 12
_BUSY = (503, 529)  # the Anthropic API has a status of its own
_WAITED = "was not ready within"  # a request waited for its model until its time limit

Manner = Literal["reads", "reads slowly", "leaves"]


class ChaosRequest(msgspec.Struct, frozen=True):
    """A request, and until when it has to end; `number` is its place in the pool, -1 outside."""

    kind: str
    path: str
    body: bytes
    streams: bool
    timeout_s: float
    number: int = -1
    adapter: str = ""
    statuses: frozenset[int] = frozenset()  # what refuses a hostile one; empty for others
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    model: str = ""  # of several


class Outcome(msgspec.Struct):
    """How a request ended, on the client's monotonic clock.

    Attributes:
        paused_s: For how long the client itself did not read.
        is_far: Its connection passes the cable that is pulled now and then.
        end: `answer`, `timeout` (with the text so far), `error` (with a reason), `left` (by its
            client), `refused` (a hostile one); or `cut`, `hung`, `unexplained`, which may not be.
        reason: Of an error, or what was wrong.
    """

    request: ChaosRequest
    request_id: str
    begin_s: float
    end_s: float = 0.0
    paused_s: float = 0.0
    is_far: bool = False
    status: int = 0
    end: str = "hung"
    reason: str = ""
    answer: Answer = msgspec.field(default_factory=Answer)


def pool(seed: int, num: int, models: Sequence[str] = ()) -> list[ChaosRequest]:
    """Requests of every kind, whose answers depend on nothing but themselves; of several models,
    the first of which has adapters, each names one.
    """
    rng = random.Random(seed)
    return [_reproducible(rng, number, models) for number in range(num)]


def _reproducible(rng: random.Random, number: int, models: Sequence[str]) -> ChaosRequest:
    kind = _KINDS[number % len(_KINDS)]
    path = APIS[kind][1]
    body: dict[str, Any] = json.loads(random_request(rng, [kind]).body)
    timeout_s = rng.choice((1.0, 3.0, 6.0, 6.0))
    if kind == "messages":
        timeout_s = PATIENCE_S
    else:
        body["timeout_s"] = timeout_s
    adapter = ""
    if kind in ("chat", "completions"):
        _lengthen(rng, kind, body)
        if rng.random() < 0.25:
            adapter = body["model"] = rng.choice(ADAPTERS)
    elif kind in ("responses", "messages"):
        body["temperature"] = 0
    if models and not adapter:
        body["model"] = rng.choice(models)
    content = json.dumps(body).encode()
    streams = bool(body.get("stream"))
    model = body.get("model", "") if models and not adapter else ""
    return ChaosRequest(kind, path, content, streams, timeout_s, number, adapter, model=model)


def _lengthen(rng: random.Random, kind: str, body: dict[str, Any]) -> None:
    """Give a request a seed, and often what makes it last, so that a fault meets it."""
    body["seed"] = rng.randrange(1 << 31)
    has_grammar = {"tools", "response_format", "structured_outputs"} & body.keys()
    if not has_grammar and rng.random() < 0.6:
        body["max_tokens"] = rng.randrange(150, 400)
        body["ignore_eos"] = True
        body.pop("stop", None)
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat" and rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 2}


def hostile(rng: random.Random) -> ChaosRequest:
    """A request that has to be refused."""
    found = malformed_request(rng)
    return ChaosRequest(
        "hostile",
        found.path,
        found.body,
        streams=False,
        timeout_s=PATIENCE_S,
        statuses=found.statuses,
        method=found.method,
        headers=found.headers,
    )


async def send(
    client: httpx.AsyncClient,
    request: ChaosRequest,
    request_id: str,
    manner: Manner = "reads",
    rng: random.Random | None = None,
) -> Outcome:
    """Send a request and read what comes; how it ended is in the outcome, and nothing is raised."""
    outcome = Outcome(request, request_id, time.monotonic())
    received: list[bytes] = []
    try:
        async with asyncio.timeout(request.timeout_s + _HUNG_S):
            has_left = await _read(client, outcome, received, manner, rng or random.Random(0))
    except TimeoutError:
        outcome.reason = f"no end after {request.timeout_s + _HUNG_S:g} s"
    except httpx.HTTPError as error:
        outcome.end, outcome.reason = "cut", f"{type(error).__name__} {error}".strip()
    else:
        outcome.answer = read_answer(request.kind, request.streams, b"".join(received))
        outcome.end = "left" if has_left else ""
    outcome.end_s = time.monotonic()
    if not outcome.end:
        _judge(outcome, b"".join(received))
    return outcome


async def _read(
    client: httpx.AsyncClient,
    outcome: Outcome,
    received: list[bytes],
    manner: Manner,
    rng: random.Random,
) -> bool:
    """Collect the response's body; returns whether the client left before its end."""
    request = outcome.request
    headers = {
        "content-type": "application/json",
        "x-request-id": outcome.request_id,
        **dict(request.headers),
    }
    leaves_after = rng.randrange(4) if manner == "leaves" else None
    num_pauses = 0
    async with client.stream(
        request.method, request.path, content=request.body, headers=headers
    ) as response:
        outcome.status = response.status_code
        async for chunk in response.aiter_raw():
            received.append(chunk)
            if leaves_after is not None and len(received) > leaves_after:
                return True
            if manner == "reads slowly" and num_pauses < _MAX_PAUSES:
                num_pauses += 1
                await asyncio.sleep(_PAUSE_S)
                outcome.paused_s += _PAUSE_S
    return False


def _judge(outcome: Outcome, body: bytes) -> None:
    """Decide how a request ended whose response was read."""
    request, answer = outcome.request, outcome.answer
    took_s = time.monotonic() - outcome.begin_s
    message = answer.error or read_answer("", streams=False, body=body).error
    if (outcome.status == 408 and message) or (outcome.status in _BUSY and _WAITED in message):
        outcome.end = "timeout"  # of what has no partial answer
    elif outcome.status != 200:
        is_refusal = outcome.status in request.statuses
        outcome.end = "refused" if is_refusal else "error"
        outcome.reason = f"{outcome.status} {message}".strip()
        if not message and not is_refusal:
            outcome.end = "unexplained"
    elif answer.error:
        outcome.end, outcome.reason = "error", f"in the stream: {answer.error}"
    elif not answer.is_over:
        outcome.end, outcome.reason = "cut", "the response has no end"
    elif request.statuses and took_s < request.timeout_s:  # later, it may have reached no engine
        outcome.end, outcome.reason = "unexplained", "a hostile request was answered"
    elif request.statuses:
        outcome.end = "timeout"
    else:
        # these APIs have one reason for a limit of tokens and of time
        may_be_late = request.kind in ("responses", "messages") and took_s >= request.timeout_s
        outcome.end = "timeout" if answer.is_late or may_be_late else "answer"


def texts_begin(part: Sequence[str], complete: Sequence[str]) -> bool:
    """Whether a partial answer has the beginnings of the texts of the complete one."""
    return all(text.startswith(start) for start, text in zip(part, complete, strict=False))
