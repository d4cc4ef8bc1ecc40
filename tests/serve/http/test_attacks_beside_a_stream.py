"""Everything that holds up others at once, over HTTP, beside a stream that must not notice."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from client import COMPLETIONS
from live_server import LiveServer, live_server_of, until

from benchmarks.storm_attacks import ATTACKS
from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.server.batches.file_store import FileStore
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

DEADLINE_S = 400.0
NUM_TOKENS = 60
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in ("AAAA", "BBBB"))
HEALTHY = {
    "prompt": "import os\n",
    "max_tokens": NUM_TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 1,
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = RemoteEngine(
        EngineConfig(
            load=LoadConfig(model="demo", device="cpu"),
            cache=CacheConfig(num_blocks=300),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256, max_waiting=600),
        )
    )

    async def opened() -> RemoteEngine:
        await engine.open()
        return engine

    options = ServerOptions(api_keys=ApiKeys(["ann=AAAA", "bob=BBBB"]), drain_s=0.0)
    with live_server_of(opened, options) as server:
        yield server


async def healthy(client: httpx.AsyncClient) -> str:
    """The text of a stream with all its tokens."""
    answer = await client.post(COMPLETIONS, json=HEALTHY, headers=ANN)
    assert answer.status_code == 200, answer.text
    events = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1] if not event.startswith(":")]
    assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


def test_a_storm_of_attackers_loses_nothing_of_a_healthy_stream(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All attackers are answered, the engine lives on, and nothing of them is left."""

    # a minute passes whenever the store looks at its clock: a batch of a minute expires at once
    minutes = itertools.count()
    clock = lambda store: int(time.time()) + 61 * next(minutes)  # noqa: E731
    monkeypatch.setattr(FileStore, "now", clock)

    async def run() -> tuple[str, list[str], dict[str, list[int]]]:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client,
            httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, headers=BOB) as attacker,
        ):
            quiet = await healthy(client)
            storm = {name: asyncio.create_task(run(attacker)) for name, run in ATTACKS.items()}
            texts = [await healthy(client)]
            while not all(task.done() for task in storm.values()):
                texts.append(await healthy(client))
            return quiet, texts, {name: task.result() for name, task in storm.items()}

    quiet, texts, statuses = asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert set(texts) == {quiet}
    for name, found in statuses.items():
        assert found, name
        assert set(found) <= {200, 400, 413, 429, 503}, (name, found)
    assert statuses["giant batch line"][:2] == [200, 200]
    assert statuses["expiring batch"][:3] == [200, 200, 200]
    assert set(statuses["4 MiB prompts"][:4]) <= {400, 503}
    until(lambda: httpx.get(f"{server.url}/health").json()["num_used_blocks"] == 0)
    health = httpx.get(f"{server.url}/health").json()
    assert (health["status"], health["num_restarts"], health["num_requests"]) == ("ok", 0, 0)
