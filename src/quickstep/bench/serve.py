"""A client that measures a server: requests over HTTP at given times, streamed, token by token.

Any server with OpenAI's `/v1/completions` and prompts of token ids: `bench serve` and the peers'
comparison use it alike. One thread per request, standard library only. Requests are greedy and
ask for outputs of an exact length (`ignore_eos`), so that every server does the same work.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from quickstep.errors import ConfigError, EngineError

__all__ = [
    "Objectives",
    "Served",
    "ServedRequest",
    "Target",
    "find_target",
    "percentile",
    "send_all",
    "serve_figures",
]

_TIMEOUT_S = 3600.0


class Target(msgspec.Struct, frozen=True):
    """A server: `http://host:port`, the model's name there, its longest sequence in tokens if it
    says so, and a key if it wants one.
    """

    url: str
    model: str
    max_model_len: int | None = None
    api_key: str | None = None


class ServedRequest(msgspec.Struct, frozen=True):
    """What to send: a prompt, output tokens, and when, in seconds from the start."""

    prompt: tuple[int, ...]
    num_outputs: int
    at_s: float


class Served(msgspec.Struct):
    """What came of a request, by `time.perf_counter`. Owned by the thread that follows it.

    Attributes:
        due_s: When it was to be sent; times count from here, so that a late client shows.
        marks: When each piece of the stream came; servers send a token a piece.
        num_tokens: As the server counted them.
        error: Why it failed.
    """

    due_s: float
    marks: list[float] = msgspec.field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None


class Objectives(msgspec.Struct, frozen=True):
    """A request is good if its first token came within `ttft_ms` and no gap exceeded `itl_ms`."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


def find_target(url: str, model: str | None = None, api_key: str | None = None) -> Target:
    """The server, and `model` there or the first that it lists. Raises ConfigError."""
    connection = _connect(url)
    try:
        connection.request("GET", f"{_path(url)}/v1/models", headers=_headers(api_key))
        answer = json.loads(connection.getresponse().read())
        named = [one for one in answer["data"] if model in (None, one["id"])] or answer["data"]
        name = str(named[0]["id"]) if model is None else model
        return Target(url, name, named[0].get("max_model_len"), api_key)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--url {url} does not list its models: {error}") from error
    finally:
        connection.close()


def send_all(target: Target, requests: Sequence[ServedRequest]) -> list[Served]:
    """Send each at its time and follow all to their ends. Raises EngineError if any failed."""
    start_s = time.perf_counter()
    found = [Served(start_s + request.at_s) for request in requests]
    threads = [
        threading.Thread(target=_follow, args=(target, request, served), daemon=True)
        for request, served in zip(requests, found, strict=True)
    ]
    for served, thread in zip(found, threads, strict=True):
        time.sleep(max(0.0, served.due_s - time.perf_counter()))
        thread.start()
    for thread in threads:
        thread.join()
    failed = [served.error for served in found if served.error is not None]
    if failed:
        raise EngineError(f"{len(failed)} of {len(found)} requests failed, first: {failed[0]}")
    return found


def serve_figures(found: Sequence[Served], objectives: Objectives) -> dict[str, float]:
    """Times, throughput and goodput of one round; every name ends in its unit."""
    firsts = [1e3 * (one.marks[0] - one.due_s) for one in found]
    gaps = [[1e3 * (b - a) for a, b in pairwise(one.marks)] for one in found]
    ends = [1e3 * (one.marks[-1] - one.due_s) for one in found]
    per_token = [
        1e3 * (one.marks[-1] - one.marks[0]) / (one.num_tokens - 1)
        for one in found
        if one.num_tokens > 1
    ]
    wall_s = max(one.marks[-1] for one in found) - min(one.due_s for one in found)
    good = sum(_good(first, within, objectives) for first, within in zip(firsts, gaps, strict=True))
    return {
        **_spread("ttft", firsts),
        **_spread("tpot", per_token),
        **_spread("itl", [gap for within in gaps for gap in within]),
        **_spread("e2e", ends),
        "wall_s": wall_s,
        "requests_per_s": len(found) / wall_s,
        "output_tokens_per_s": sum(one.num_tokens for one in found) / wall_s,
        "goodput_requests_per_s": good / wall_s,
        "goodput_share": good / len(found),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are at or below; 0 for none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {f"{name}_{key}_ms": percentile(values, share) for key, share in shares.items()}
    return {**found, f"{name}_max_ms": max(values, default=0.0)}


def _good(first_ms: float, gaps_ms: Sequence[float], objectives: Objectives) -> bool:
    in_time = objectives.ttft_ms is None or first_ms <= objectives.ttft_ms
    return in_time and (objectives.itl_ms is None or max(gaps_ms, default=0.0) <= objectives.itl_ms)


def _follow(target: Target, request: ServedRequest, served: Served) -> None:
    """A thread's top: what goes wrong is this request's error."""
    try:
        _stream(target, request, served)
        if not served.marks:
            served.error = "the stream had no token"
        elif served.num_tokens != request.num_outputs:
            served.error = f"it gave {served.num_tokens} of {request.num_outputs} output tokens"
    except Exception as error:  # the thread's top
        served.error = f"{type(error).__name__}: {error}"


def _stream(target: Target, request: ServedRequest, served: Served) -> None:
    body = {
        "model": target.model,
        "prompt": list(request.prompt),
        "max_tokens": request.num_outputs,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = _connect(target.url)
    try:
        path = f"{_path(target.url)}/v1/completions"
        connection.request("POST", path, json.dumps(body), _headers(target.api_key))
        answer = connection.getresponse()
        if answer.status != 200:
            raise EngineError(
                f"status {answer.status}: {answer.read(500).decode(errors='replace')}"
            )
        for line in answer:
            if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                _note(json.loads(line[6:]), served)
    finally:
        connection.close()


def _note(piece: dict[str, Any], served: Served) -> None:
    """A piece of the stream; the usage comes with the last one, or after it."""
    if "error" in piece:
        raise EngineError(str(piece["error"]))
    usage = piece.get("usage")
    if usage:
        served.num_tokens = usage["completion_tokens"]
    choices = piece.get("choices")
    # a piece that only ends the stream has no text: it is no token
    if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
        served.marks.append(time.perf_counter())


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise ConfigError(f"--url is {url!r}, it must be like http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)


def _path(url: str) -> str:
    """What stands before `/v1`; a URL may end in it."""
    return urllib.parse.urlsplit(url).path.rstrip("/").removesuffix("/v1")


def _headers(api_key: str | None) -> dict[str, str]:
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return {"content-type": "application/json", **key}
