"""The bundled demo model in a process of its own, behind a socket: the same answers as in this
process, and what happens when either process is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, chunks, client_of
from live_server import LiveServer, connect, live_server_of, until
from process_lists import processes, workers

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.ops.native.backend import native_status
from quickstep.server.app import create_app

CONFIG = EngineConfig(
    load=LoadConfig(model="demo", device="cpu"),
    cache=CacheConfig(num_blocks=400),
    scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256),
    seed=5,
)
STREAMS_END_S = 2.0  # the promise, of which it takes a small part even on a busy machine
CODE = "def add(first, second):\n    return"
QUESTION = [{"role": "user", "content": "What does itertools.chain do?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": CODE, "logprobs": 3, "temperature": 0, "max_tokens": 12}),
    (COMPLETIONS, {"prompt": [CODE, "import os"], "n": 2, "temperature": 0.9, "seed": 3}),
    (COMPLETIONS, {"prompt": CODE, "temperature": 1.2, "max_tokens": 6}),
    (CHAT, {"messages": QUESTION, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": QUESTION, "max_tokens": 24, "stop": ["a"], "n": 2}),
    (COMPLETIONS, {"prompt": CODE, "structured_outputs": {"regex": "[0-9]{4}"}, "seed": 4}),
    (CHAT, {"messages": QUESTION, "response_format": SCHEMA_FORMAT, "seed": 5, "n": 2}),
    (CHAT, {"messages": QUESTION, "structured_outputs": {"json": {"not": {}}}}),
    (
        COMPLETIONS,
        {
            "prompt": CODE,
            "bad_words": ["first", " second", "self."],
            "dry_multiplier": 0.8,
            "xtc_probability": 0.5,
            "typical_p": 0.9,
            "preset": "creative",
            "seed": 6,
            "max_tokens": 40,
        },
    ),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["a"], "allowed_token_ids": [67, 271], "seed": 7}),
    (CHAT, {"messages": QUESTION, "thinking_budget": 9}),
    (
        COMPLETIONS,
        {
            "prompt": "1 1 1 1 1 1",
            "seed": 8,
            "temperature": 0,
            "max_tokens": 60,
            "repetition_detection": {"max_pattern_size": 4, "min_count": 4},
        },
    ),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**6]}),
    (COMPLETIONS, {"prompt": "a " * 20_000}),
)


def descendants(process_id: int) -> set[int]:
    """The living children of a process, and theirs."""
    children = {child for child, parent in processes().items() if parent == process_id}
    return children.union(*map(descendants, children))


def maps(process_id: int) -> str:
    """What files a process has mapped, libraries among them."""
    return Path(f"/proc/{process_id}/maps").read_text()


@pytest.fixture(scope="module")
def engine() -> RemoteEngine:
    return RemoteEngine(CONFIG)


@pytest.fixture(scope="module")
def server(engine: RemoteEngine) -> Iterator[LiveServer]:
    async def opened() -> RemoteEngine:
        await engine.open()
        return engine

    with live_server_of(opened) as server:
        yield server
    assert not workers(os.getpid())


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs each time."""
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.fixture(scope="module")
def local_answers() -> list[tuple[int, dict[str, Any], list[dict[str, Any]]]]:
    """Status, answer and stream of each request, from an engine in this process."""

    async def whole() -> list[tuple[int, dict[str, Any], list[dict[str, Any]]]]:
        async with client_of(create_app(open_engine(CONFIG))) as client:
            return [await both(client, path, body) for path, body in REQUESTS]

    return asyncio.run(whole())


async def both(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    whole = await client.post(path, json=body)
    streamed = await client.post(path, json={**body, "stream": True})
    assert streamed.status_code == whole.status_code
    if whole.status_code != 200:
        assert streamed.json() == whole.json()
        return whole.status_code, whole.json(), []
    return whole.status_code, plain(whole.json()), [plain(chunk) for chunk in chunks(streamed.text)]


def test_answers_are_those_of_an_engine_in_this_process(
    server: LiveServer, local_answers: list[tuple[int, dict[str, Any], list[dict[str, Any]]]]
) -> None:
    async def whole() -> list[tuple[int, dict[str, Any], list[dict[str, Any]]]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return [await both(client, path, body) for path, body in REQUESTS]

    answers = asyncio.run(whole())
    for (status, answer, stream), (local_status, local_answer, local_stream) in zip(
        answers, local_answers, strict=True
    ):
        assert status == local_status
        assert answer == local_answer
        # chunks may be cut elsewhere between the choices of one request
        assert sorted(map(json.dumps, stream)) == sorted(map(json.dumps, local_stream))


def used_blocks(server: LiveServer) -> int:
    return int(httpx.get(f"{server.url}/health").json()["num_used_blocks"])


def test_leaving_frees_the_blocks_in_the_engine(server: LiveServer) -> None:
    async def leave() -> None:
        body = {"prompt": CODE, "max_tokens": 900, "ignore_eos": True, "stream": True}
        reader, writer = await connect(server, body)
        await reader.readuntil(b"data: ")
        while not used_blocks(server):
            await asyncio.sleep(0.005)
        writer.transport.abort()

    asyncio.run(asyncio.wait_for(leave(), 60))
    until(lambda: used_blocks(server) == 0)


def test_killing_the_engine_under_50_streams_ends_each_with_an_error_and_serves_again(
    server: LiveServer, engine: RemoteEngine
) -> None:
    body = {"prompt": CODE, "max_tokens": 900, "ignore_eos": True, "stream": True}
    killed = engine.process_id
    assert killed is not None
    grammar = {"prompt": CODE, "structured_outputs": {"regex": "[a-z]{3}"}}
    httpx.post(f"{server.url}{COMPLETIONS}", json=grammar, timeout=60)  # a process tried it out
    family = {killed} | descendants(killed)
    assert len(family) > 1

    async def run() -> list[bytes]:
        connections = [await connect(server, body) for _ in range(50)]
        started = [reader.readuntil(b"data: {") for reader, _ in connections]
        await asyncio.gather(*started)
        os.kill(killed, signal.SIGKILL)
        ends = [reader.readuntil(b"data: [DONE]\n\n") for reader, _ in connections]
        answers = await asyncio.wait_for(asyncio.gather(*ends), STREAMS_END_S)
        for _, writer in connections:
            writer.close()
        return answers

    answers = asyncio.run(asyncio.wait_for(run(), 120))
    for answer in answers:
        event = answer.split(b"\n\n")[-3].rpartition(b"data: ")[2]
        assert "engine process ended" in json.loads(event)["error"]["message"]
    until(lambda: not family & set(processes()))
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    health = httpx.get(f"{server.url}/health")
    assert (health.status_code, health.json()["num_restarts"]) == (200, 1)
    assert health.json()["num_used_blocks"] == 0
    assert workers(os.getpid()) == [engine.process_id]
    fields = {"prompt": CODE, "max_tokens": 4}
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=fields, timeout=60)
    assert answer.status_code == 200
    assert (
        'engine_restarts_total{engine="0",model_name="demo"} 1.0'
        in httpx.get(f"{server.url}/metrics").text
    )


def test_while_it_is_started_again_health_and_requests_are_503(
    server: LiveServer, engine: RemoteEngine
) -> None:
    os.kill(engine.process_id or 0, signal.SIGKILL)
    until(lambda: httpx.get(f"{server.url}/health").json()["status"] == "restarting")
    refused = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert httpx.get(f"{server.url}/ready").status_code == 503
    until(lambda: httpx.get(f"{server.url}/health").status_code == 200)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`quickstep serve` on a free port, in a process group of its own."""
    argv = [sys.executable, "-m", "quickstep", "serve", "--port", "0", "--num-blocks", "64"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        argv, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def log_line(process: subprocess.Popen[str], words: str) -> str:
    """The next line of its log with these words."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return line
    raise AssertionError(f"the log ended without {words!r}: {''.join(seen)}")


def test_neither_process_loads_torch_and_killing_the_server_leaves_nothing(
    command: subprocess.Popen[str], tmp_path: Path
) -> None:
    address = log_line(command, " serving ").split(" at ")[1].split("/v1")[0]
    (worker,) = workers(command.pid)
    body = {"messages": QUESTION, "max_tokens": 4, "logprobs": True}
    assert httpx.post(f"{address}{CHAT}", json=body, timeout=60).status_code == 200
    if native_status().available:
        assert "libtorch" not in maps(worker)
    assert "libtorch" not in maps(command.pid)
    command.kill()
    command.wait()
    until(lambda: worker not in processes())
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_the_model_loads_leaves_no_engine(command: subprocess.Popen[str]) -> None:
    until(lambda: bool(workers(command.pid)))
    (worker,) = workers(command.pid)
    os.kill(worker, signal.SIGSTOP)  # otherwise it may be ready before the signal comes
    log_line(command, " loading ")
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait(60) == 130
    assert worker not in processes()


def test_the_second_sigterm_of_the_group_ends_the_drain(command: subprocess.Popen[str]) -> None:
    address = log_line(command, " serving ").split(" at ")[1].split("/v1")[0]
    (worker,) = workers(command.pid)
    body = {"prompt": CODE, "max_tokens": 900, "ignore_eos": True, "n": 32, "stream": True}
    with httpx.stream("POST", f"{address}{COMPLETIONS}", json=body, timeout=60) as answer:
        frames = answer.iter_lines()
        next(frames)
        os.killpg(command.pid, signal.SIGTERM)
        log_line(command, "no new requests")
        os.killpg(command.pid, signal.SIGTERM)
        log_line(command, "ending the running requests")
        assert [line for line in frames if line][-1] == "data: [DONE]"
        assert command.wait(60) == 0
    assert worker not in processes()
    assert command.stderr is not None
    assert "Traceback" not in command.stderr.read()


PROBE = """
import sys
import quickstep.cli.main, quickstep.server.run, quickstep.engine.remote.engine
print(sorted(name for name in ("torch", "numpy", "transformers") if name in sys.modules))
"""


def test_what_the_server_imports_holds_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
