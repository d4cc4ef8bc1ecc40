"""A client that stops reading for a while: its request is paused, and then its bytes are those of
a client that never stopped. Over real sockets with small buffers, here and in a process of its own.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client import COMPLETIONS
from live_server import LiveServer, live_server_of, until

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig, StreamConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.interface import ServedEngine
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.server.options import ConnectionOptions, ServerOptions

CONFIG = EngineConfig(
    load=LoadConfig(model="demo", device="cpu"),
    cache=CacheConfig(num_blocks=200),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, pipeline_depth=2),
    streams=StreamConfig(max_unread_deltas=16),
)
NUM_TOKENS = 400
_BUFFER_BYTES = 16 * 1024
BODY = {
    "prompt": "def add(first, second):\n    return",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "logprobs": 5,
    "temperature": 0.9,
    "seed": 3,
    "stream": True,
}
WIDE = {**BODY, "prompt": ["import os", "class A:"], "n": 2, "max_tokens": NUM_TOKENS // 2}
OPTIONS = ServerOptions(drain_s=0.0, connections=ConnectionOptions(comment_every_s=0))


@pytest.fixture(scope="module", params=["this process", "a process of its own"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    async def opened() -> ServedEngine:
        if request.param == "this process":
            return open_engine(CONFIG)
        engine = RemoteEngine(CONFIG)
        await engine.open()
        return engine

    with live_server_of(opened, OPTIONS) as server:
        for sock in server.server.servers[0].sockets:  # connections inherit it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        yield server


def health(server: LiveServer) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/health")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def num_tokens_made(server: LiveServer) -> int:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(r"quickstep:engine_output_tokens_total\{.*\} (\S+)", text)
    assert found is not None
    return int(float(found[1]))


def is_held(server: LiveServer) -> bool:
    state = health(server)
    return state["num_paused"] > 0 and state["num_running"] + state["num_waiting"] == 0


def makes_only_what_others_ask(server: LiveServer) -> bool:
    """Whether the slow request stays as it is while another one is answered."""
    if not is_held(server):
        return False
    made = num_tokens_made(server)
    other = {"prompt": "import", "max_tokens": 7, "ignore_eos": True}
    assert httpx.post(f"{server.url}{COMPLETIONS}", json=other).status_code == 200
    return is_held(server) and num_tokens_made(server) == made + 7


def plain(text: str) -> list[str]:
    """The events without what differs each time, by choice: choices take turns as they come."""
    text = re.sub(r'"id":"[^"]*","created":\d+', "", text)
    return sorted(text.split("\n\n"), key=lambda event: re.findall(r'"index":(\d+)', event))


@pytest.mark.parametrize("body", [BODY, WIDE], ids=["one", "several prompts and choices"])
def test_who_stops_reading_for_a_while_gets_the_same_bytes(
    server: LiveServer, body: dict[str, Any]
) -> None:
    undisturbed = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60).text
    small = httpx.HTTPTransport(
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)]
    )
    with (
        httpx.Client(base_url=server.url, transport=small, timeout=60) as client,
        client.stream("POST", COMPLETIONS, json=body) as response,
    ):
        # sockets fill up first: the request may be paused and go on a few times
        until(lambda: makes_only_what_others_ask(server))
        assert is_held(server)  # so it has not ended
        sock = response.extensions["network_stream"].get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024 * 1024)  # as fast as it comes
        late = "".join(response.iter_text())
    assert plain(late) == plain(undisturbed)
    until(lambda: health(server)["num_used_blocks"] == 0)
