"""`quickstep serve --data-parallel-size`: clients of a server whose engines are killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_lists import processes, workers
from serve_process import serving

BODY: dict[str, Any] = {
    "prompt": "def first(a):\n    return a\n\ndef second(a):\n",
    "temperature": 0.9,
    "seed": 3,
    "max_tokens": 800,
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


def streamed(
    address: str, kill_after: int | None = None, kill: Callable[[], None] | None = None
) -> dict[str, Any]:
    """The texts, ends and usage of a stream; after so many chunks `kill` is called."""
    with httpx.stream("POST", f"{address}/v1/completions", json=BODY, timeout=120) as response:
        assert response.status_code == 200
        return collected(response.iter_lines(), kill_after, kill)


def collected(
    lines: Iterable[str], kill_after: int | None = None, kill: Callable[[], None] | None = None
) -> dict[str, Any]:
    """The same of the lines of a stream."""
    texts, ends, usage, number = {0: "", 1: ""}, {}, None, 0
    for line in lines:
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
        if kill is not None and number == kill_after:
            kill()
    return {"texts": texts, "ends": ends, "usage": usage}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same texts, ends and numbers of tokens; more of a prompt may be cached."""
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    for part in ("texts", "ends"):
        assert found[part] == expected[part]
    assert [found["usage"][name] for name in counts] == [expected["usage"][name] for name in counts]


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
    assert expected["usage"]["completion_tokens"] == 1600
    assert_same(streamed(address, 30, partial(kill_busy, address, server_id)), expected)
    health = until_ready(address, num_replicas)
    assert health["num_moved_requests"] == 1
    assert health["num_restarts"] == 1
    metrics = httpx.get(f"{address}/metrics", timeout=30).text
    assert "moved_requests_total" in metrics
    assert ('replica_up{engine="1"' in metrics) == (num_replicas == 2)


def test_a_client_that_left_reads_on_although_its_engine_was_killed(
    server: tuple[int, str],
) -> None:
    """It left in the middle of a chunk, and counts bytes."""
    server_id, address = server
    until_ready(address, len(workers(server_id)))
    expected = streamed(address)
    header, first = {"x-conversation-id": "lost"}, b""
    url = f"{address}/v1/completions"
    with httpx.stream("POST", url, json=BODY, headers=header, timeout=120) as response:
        for chunk in response.iter_raw():
            first += chunk
            if first.count(b"\n\n") >= 30:
                break
    kill_busy(address, server_id)
    first = first[:-7]
    rest = httpx.get(f"{address}/v1/stream/lost?from={len(first)}", timeout=120)
    assert rest.status_code == 200
    assert_same(collected((first + rest.content).decode().splitlines()), expected)
    assert httpx.get(f"{address}/v1/stream/lost", timeout=30).content == first + rest.content
    until_ready(address, len(workers(server_id)))


def test_a_client_does_not_notice_that_its_engine_was_restarted(server: tuple[int, str]) -> None:
    server_id, address = server
    num_replicas = len(workers(server_id))
    expected = streamed(address)
    before = until_ready(address, num_replicas)
    changes: list[dict[str, Any]] = []

    def restart_all() -> None:
        replicas = httpx.get(f"{address}/health", timeout=30).json()["replicas"]
        replicas.sort(key=lambda replica: -replica["num_requests"])  # first the stream's own
        for number in [replica["replica"] for replica in replicas] or [0]:
            path = f"{address}/admin/replicas/{number}/restart"
            changes.append(httpx.post(path, timeout=60).raise_for_status().json())

    assert_same(streamed(address, 30, restart_all), expected)
    assert len(changes) == num_replicas
    assert sum(change["num_moved"] for change in changes) >= 1
    assert not any(change["is_draining"] or change["note"] for change in changes)
    health = until_ready(address, num_replicas)
    assert health["num_restarts"] == before["num_restarts"] + num_replicas
    assert health["num_used_blocks"] == 0


def test_an_operator_drains_a_replica(server: tuple[int, str]) -> None:
    server_id, address = server
    last = len(workers(server_id)) - 1
    drained = httpx.post(f"{address}/admin/replicas/{last}/drain?drain_s=0.1", timeout=60)
    if not last:
        assert drained.status_code == 409
        assert "restart it instead" in drained.json()["error"]["message"]
    else:
        assert drained.json()["is_draining"]
        states = [one["state"] for one in httpx.get(f"{address}/health").json()["replicas"]]
        assert states == ["up", "draining"]
        metrics = httpx.get(f"{address}/metrics").text
        assert 'replica_draining{engine="1",model_name="demo"} 1.0' in metrics
        assert 'replica_up{engine="1",model_name="demo"} 0.0' in metrics
        restarted = httpx.post(f"{address}/admin/replicas/{last}/restart", timeout=60)
        assert not restarted.json()["is_draining"]
    for path, status in (("7/restart", 404), ("x/drain", 404), ("0/restart?drain_s=-1", 400)):
        assert httpx.post(f"{address}/admin/replicas/{path}").status_code == status


def test_sighup_restarts_several_engines_one_by_one(server: tuple[int, str]) -> None:
    server_id, address = server
    num_replicas = len(workers(server_id))
    before = until_ready(address, num_replicas)["num_restarts"]
    expected = streamed(address)
    hang_up = partial(os.kill, server_id, signal.SIGHUP)
    assert_same(streamed(address, 10, hang_up), expected)
    num_expected = before + (num_replicas if num_replicas > 1 else 0)
    end = time.monotonic() + 60
    while until_ready(address, num_replicas)["num_restarts"] != num_expected:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_does_not_notice_that_a_rank_of_its_engine_was_killed() -> None:
    with serving("demo", "--tensor-parallel-size", "2", "--threads", "2") as (process, address):
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        quiet = streamed(address)

        def kill_rank() -> None:
            (engine,) = workers(process.pid)
            (rank,) = workers(engine, b"engine.ranks.worker")
            os.kill(rank, signal.SIGKILL)

        assert_same(streamed(address, 20, kill_rank), quiet)
        health = until_ready(address, 1)
        assert health["num_moved_requests"] == 1
        assert (health["tensor_parallel_size"], health["pipeline_parallel_size"]) == (2, 1)
        assert health["exchange_seconds"] > 0.0
        (engine,) = workers(process.pid)
        (rank,) = workers(engine, b"engine.ranks.worker")
    end = time.monotonic() + 30  # the kernel ends them after the server
    while set(processes()) & {engine, rank} and time.monotonic() < end:
        time.sleep(0.02)
    assert not set(processes()) & {engine, rank}


def test_slots_are_numbered_over_all_replicas_and_restored_after_a_restart(tmp_path: Path) -> None:
    """The slot of a number is no replica's: what is restored is hit wherever it was computed."""
    options = ("--data-parallel-size", "2", "--threads", "1", "--slot-save-path", str(tmp_path))
    slots = (0, 3, 7)
    found: list[list[dict[str, Any]]] = []
    for action, counted in (("save", "n_saved"), ("restore", "n_restored")):
        with serving("demo", *options) as (process, address):
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()
            assert [slot["id"] for slot in httpx.get(f"{address}/slots").json()] == [*range(8)]
            assert httpx.get(f"{address}/props").json()["total_slots"] == 8

            def completion(slot: int, address: str = address) -> dict[str, Any]:
                prompt = [*range(20 + slot, 120), slot]
                body = {"prompt": prompt, "n_predict": 8, "seed": 3, "id_slot": slot}
                answer = httpx.post(f"{address}/completion", json=body, timeout=60)
                return {"status": answer.status_code, **answer.json()}

            if action == "save":
                found.append([completion(slot) for slot in slots])
                assert "the slots 0 to 7" in completion(8)["error"]["message"]
            else:
                url = f"{address}/slots/0?action=restore"
                missing = httpx.post(url, json={"filename": "other"})
                assert missing.status_code == 404
            for slot in slots:
                url = f"{address}/slots/{slot}?action={action}"
                answer = httpx.post(url, json={"filename": f"{slot}.bin"}, timeout=60).json()
                assert answer[counted] == 96, answer
            if action == "restore":
                found.append([completion(slot) for slot in slots])
    first, restored = found
    assert [one["content"] for one in restored] == [one["content"] for one in first]
    assert [one["tokens_cached"] for one in restored] == [96, 96, 80]
