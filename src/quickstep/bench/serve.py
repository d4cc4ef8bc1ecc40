"""A client that measures a server: streaming HTTP requests at given times.

It works with any server that has OpenAI's `/v1/completions` with prompts of token ids. One thread
per request, standard library only. Requests are greedy and their outputs have an exact length
(`ignore_eos`), so that every server does the same work.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from quickstep.errors import ConfigError, EngineError

_TIMEOUT_S = 3600.0


class Target(msgspec.Struct, frozen=True):
    """A server to measure.

    Attributes:
        url: Such as `http://127.0.0.1:8000`.
        model: The name of the model on the server.
        max_model_len: Its longest sequence in tokens, if the server reports it.
        api_key: Sent with each request.
    """

    url: str
    model: str
    max_model_len: int | None = None
    api_key: str | None = None


class ServedRequest(msgspec.Struct, frozen=True):
    """A request to send `at_s` seconds after the start."""

    prompt: tuple[int, ...]
    num_outputs: int
    at_s: float


class RequestResult(msgspec.Struct):
    """The times of a request, by `time.perf_counter`. Owned by the thread that sends it.

    Attributes:
        due_s: When it should be sent; latencies start here, so that a late client is visible.
        chunks_s: When each chunk of the stream arrived; servers send one token per chunk.
        num_tokens: Output tokens as counted by the server.
        error: Why it failed.
    """

    due_s: float
    chunks_s: list[float] = msgspec.field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None


class Objectives(msgspec.Struct, frozen=True):
    """A request counts as good if its TTFT is at most `ttft_ms` and every ITL at most `itl_ms`."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


def find_target(url: str, model: str | None = None, api_key: str | None = None) -> Target:
    """The server, with `model` or the first model that it lists. Raises ConfigError."""
    connection = _connect(url)
    try:
        connection.request("GET", f"{_path(url)}/v1/models", headers=_headers(api_key))
        body = json.loads(connection.getresponse().read())
        named = [entry for entry in body["data"] if model in (None, entry["id"])] or body["data"]
        name = str(named[0]["id"]) if model is None else model
        return Target(url, name, named[0].get("max_model_len"), api_key)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--url {url} does not list its models: {error}") from error
    finally:
        connection.close()


def send_all(
    target: Target,
    requests: Sequence[ServedRequest],
    answered: Callable[[int, int], None] | None = None,
) -> list[RequestResult]:
    """Send each request at its time and wait for all; `answered` is called with how many have
    ended, in the order of their times, and how many there are. Raises EngineError if any failed.
    """
    start_s = time.perf_counter()
    results = [RequestResult(start_s + request.at_s) for request in requests]
    threads = [
        threading.Thread(target=_send, args=(target, request, result), daemon=True)
        for request, result in zip(requests, results, strict=True)
    ]
    for result, thread in zip(results, threads, strict=True):
        time.sleep(max(0.0, result.due_s - time.perf_counter()))
        thread.start()
    for num_ended, thread in enumerate(threads, 1):
        thread.join()
        if answered is not None:
            answered(num_ended, len(threads))
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise EngineError(f"{len(failed)} of {len(results)} requests failed, first: {failed[0]}")
    return results


def serve_figures(results: Sequence[RequestResult], objectives: Objectives) -> dict[str, float]:
    """Times, throughput and goodput of one round; every name ends in its unit."""
    firsts = [1e3 * (result.chunks_s[0] - result.due_s) for result in results]
    gaps = [[1e3 * (b - a) for a, b in pairwise(result.chunks_s)] for result in results]
    ends = [1e3 * (result.chunks_s[-1] - result.due_s) for result in results]
    per_token = [
        1e3 * (result.chunks_s[-1] - result.chunks_s[0]) / (result.num_tokens - 1)
        for result in results
        if result.num_tokens > 1
    ]
    wall_s = max(result.chunks_s[-1] for result in results) - min(
        result.due_s for result in results
    )
    good = sum(_good(first, within, objectives) for first, within in zip(firsts, gaps, strict=True))
    return {
        **_spread("ttft", firsts),
        **_spread("tpot", per_token),
        **_spread("itl", [gap for within in gaps for gap in within]),
        **_spread("e2e", ends),
        "wall_s": wall_s,
        "requests_per_s": len(results) / wall_s,
        "output_tokens_per_s": sum(result.num_tokens for result in results) / wall_s,
        "goodput_requests_per_s": good / wall_s,
        "goodput_share": good / len(results),
    }


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that a `fraction` of all values do not exceed; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    fractions = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {
        f"{name}_{key}_ms": percentile(values, fraction) for key, fraction in fractions.items()
    }
    return {**found, f"{name}_max_ms": max(values, default=0.0)}


def _good(first_ms: float, gaps_ms: Sequence[float], objectives: Objectives) -> bool:
    in_time = objectives.ttft_ms is None or first_ms <= objectives.ttft_ms
    return in_time and (objectives.itl_ms is None or max(gaps_ms, default=0.0) <= objectives.itl_ms)


def _send(target: Target, request: ServedRequest, result: RequestResult) -> None:
    """Run one request in its thread; any failure becomes its `error`."""
    try:
        _stream(target, request, result)
        if not result.chunks_s:
            result.error = "the stream had no token"
        elif result.num_tokens != request.num_outputs:
            result.error = f"it gave {result.num_tokens} of {request.num_outputs} output tokens"
    except Exception as error:  # the thread's top
        result.error = f"{type(error).__name__}: {error}"


def _stream(target: Target, request: ServedRequest, result: RequestResult) -> None:
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
        response = connection.getresponse()
        if response.status != 200:
            raise EngineError(
                f"status {response.status}: {response.read(500).decode(errors='replace')}"
            )
        for line in response:
            if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                _add_chunk(json.loads(line[6:]), result)
    finally:
        connection.close()


def _add_chunk(chunk: dict[str, Any], result: RequestResult) -> None:
    """Read a chunk; the usage is in the last one or follows it."""
    if "error" in chunk:
        raise EngineError(str(chunk["error"]))
    usage = chunk.get("usage")
    if usage:
        result.num_tokens = usage["completion_tokens"]
    choices = chunk.get("choices")
    # a chunk with a finish reason and no text has no token
    if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
        result.chunks_s.append(time.perf_counter())


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise ConfigError(f"--url is {url!r}, it must be like http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)


def _path(url: str) -> str:
    """The path before `/v1`; the URL may include `/v1` or not."""
    return urllib.parse.urlsplit(url).path.rstrip("/").removesuffix("/v1")


def _headers(api_key: str | None) -> dict[str, str]:
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return {"content-type": "application/json", **key}
