"""`quickstep serve --data-parallel-size`: clients of a server whose engines are killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from process_lists import workers
from serve_process import serving

BODY: dict[str, Any] = {
    "prompt": "def first(a):\n    return a\n\ndef second(a):\n",
    "temperature": 0.9,
    "seed": 3,
    "max_tokens": 400,
    "ignore_eos": True,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module", params=["1", "2"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    with serving("demo", "--data-parallel-size", request.param, "--threads", "1") as (
        process,
        address,
    ):
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process.pid, address


def streamed(address: str, kill_after: int | None = None, server_id: int = 0) -> dict[str, Any]:
    """The texts, ends and usage of a stream; after so many chunks its engine is killed."""
    texts, ends, usage, number = {0: "", 1: ""}, {}, None, 0
    with httpx.stream("POST", f"{address}/v1/completions", json=BODY, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    ends[choice["index"]] = choice["finish_reason"]
            usage = chunk.get("usage") or usage
            number += 1
            if number == kill_after:
                kill_busy(address, server_id)
    return {"texts": texts, "ends": ends, "usage": usage}


def kill_busy(address: str, server_id: int) -> None:
    health = httpx.get(f"{address}/health", timeout=30).json()
    busy = [replica["process_id"] for replica in health["replicas"] if replica["num_requests"]]
    os.kill(busy[0] if busy else workers(server_id)[0], signal.SIGKILL)


def until_ready(address: str, num_replicas: int) -> dict[str, Any]:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        health: dict[str, Any] = httpx.get(f"{address}/health", timeout=30).json()
        states = [replica["engine"] for replica in health["replicas"]] or [health["engine"]]
        if states == ["running"] * num_replicas:
            return health
        time.sleep(0.05)
    raise AssertionError(health)


def test_a_client_does_not_notice_that_its_engine_was_killed(server: tuple[int, str]) -> None:
    server_id, address = server
    num_replicas = len(until_ready(address, len(workers(server_id)))["replicas"]) or 1
    expected = streamed(address)
    assert expected["usage"]["completion_tokens"] == 800
    found = streamed(address, kill_after=30, server_id=server_id)
    usage, before = found.pop("usage"), expected.pop("usage")
    assert found == expected
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[name] for name in counts] == [before[name] for name in counts]
    health = until_ready(address, num_replicas)
    assert health["num_moved_requests"] == 1
    assert health["num_restarts"] == 1
    metrics = httpx.get(f"{address}/metrics", timeout=30).text
    assert "moved_requests_total" in metrics
    assert ('replica_up{engine="1"' in metrics) == (num_replicas == 2)
