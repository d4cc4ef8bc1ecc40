"""Engines that Ray places, with a Ray cluster of this machine. `make ray` runs these in an
environment of their own: Ray has 240 MB and is no requirement of the other tests.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from ray_cluster import RayCluster, ray_cluster

from benchmarks.pulled_cable import Cable, cable
from quickstep.cluster.placed_engines import PlacedEngines
from quickstep.cluster.ray_hosts import PlaceGroup
from quickstep.cluster.replicas import ReplicaSet
from quickstep.config import CacheConfig, EngineConfig, ReplicaConfig, RouterName
from quickstep.engine.llm import engine_config
from quickstep.engine.logs import LogSetup
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.remote.hello import Hello, protocol
from quickstep.engine.remote.host import RECONNECTIONS
from quickstep.engine.remote.listening import Listening
from quickstep.errors import ConfigError
from quickstep.types import Request, SamplingParams

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; `make ray` runs these tests", allow_module_level=True)

DEADLINE_S = 150
TOKEN = "a-token-for-tests-of-32-characters"
NUM_TOKENS = 600


def small() -> EngineConfig:
    config = engine_config("demo", {"device": "cpu"})
    return replace(
        config,
        load=replace(config.load, num_threads=1),
        cache=CacheConfig(num_blocks=128),
        streams=None,
    )


def order_of(address: str, num_engines: int, cpus: float = 1.0, wait_s: float = 30.0) -> PlaceGroup:
    listening = Listening(small(), LogSetup(), TOKEN, "")
    return PlaceGroup(address, num_engines, {"CPU": cpus}, wait_s, listening)


def run(order: PlaceGroup, test: Callable[[ReplicaSet], Awaitable[None]]) -> None:
    async def main() -> None:
        placed = PlacedEngines(order, Hello(protocol(), TOKEN))
        connectors = placed.connectors()

        def make(number: int, step_log: StepLog, watcher: ReplicaSet) -> RemoteEngine:
            return RemoteEngine(
                small(),
                connect=connectors[number],
                restart_limits=RECONNECTIONS,
                watcher=watcher,
                replica=number,
                step_log=step_log,
            )

        replicas = ReplicaConfig(order.num_engines, RouterName.ROUND_ROBIN, 1000)
        server = ReplicaSet(replicas, make, seed=1)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await server.open()
                await server.start()
                await test(server)
        finally:
            await server.stop()
            placed.end()

    asyncio.run(main())


def request_of(server: ReplicaSet, number: int) -> Request:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8, seed=7)
    return Request(f"r{number}", tuple(server.tokenizer.encode("def first(a):\n")), sampling)


async def output(server: ReplicaSet, number: int, begun: asyncio.Event | None = None) -> list[int]:
    token_ids: list[int] = []
    async with server.stream(request_of(server, number)) as stream:
        async for delta in stream:
            token_ids += delta.token_ids
            if begun is not None:
                begun.set()
    assert len(token_ids) == NUM_TOKENS
    return token_ids


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def both(server: ReplicaSet, disturb: Callable[[], Any]) -> None:
    """`disturb` while a stream runs on each of two engines: both have the bits of a quiet run."""
    expected = await output(server, 0)
    begun = [asyncio.Event(), asyncio.Event()]
    tasks = [asyncio.create_task(output(server, 1 + index, begun[index])) for index in range(2)]
    await asyncio.gather(*(event.wait() for event in begun))
    disturb()
    assert await asyncio.gather(*tasks) == [expected, expected]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as found:
        found.start_head(3)
        yield found


def processes(marker: bytes) -> list[int]:
    """The processes of this machine whose command line has `marker`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if marker in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


ENGINES = b"quickstep.engine.remote.listening"
ACTORS = b"ray::HostedEngine"
DRIVERS = b"quickstep.cluster.ray_hosts"


@pytest.mark.parametrize("marker", [ENGINES, ACTORS, DRIVERS], ids=["engine", "actor", "driver"])
def test_a_kill_loses_no_stream_and_the_engine_is_placed_again(
    cluster: RayCluster, marker: bytes
) -> None:
    async def test(server: ReplicaSet) -> None:
        await both(server, lambda: os.kill(processes(marker)[0], signal.SIGKILL))
        await until(lambda: all(engine.is_serving for engine in server.engines))
        assert all(replica.address for replica in server.stats().replicas)

    run(order_of(cluster.address, 2), test)
    assert not processes(DRIVERS)


def test_no_engine_is_left_when_the_server_has_ended(cluster: RayCluster) -> None:
    async def nothing(server: ReplicaSet) -> None:
        assert len(processes(ENGINES)) == 1
        assert not [pid for pid in processes(TOKEN.encode())], "the token is in no command line"

    async def gone() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await until(lambda: not processes(ENGINES))

    run(order_of(cluster.address, 1), nothing)
    asyncio.run(gone())


def test_a_group_without_a_place_is_refused_with_what_is_missing(cluster: RayCluster) -> None:
    missing = (
        "Ray has found no place for 2 engines with CPU 64 each in 1 s: [0-9.]+ has CPU 3; "
        "free in total: CPU 3; add nodes, or lower --threads or --data-parallel-size"
    )

    async def never(server: ReplicaSet) -> None:
        raise AssertionError("it has opened")

    with pytest.raises(ConfigError, match=f"^{missing}$"):
        run(order_of(cluster.address, 2, cpus=64, wait_s=1.0), never)


class Hosts:
    """This host with the head and one CPU, and one on the other end of a cable."""

    def __init__(self, cluster: RayCluster, link: Cable) -> None:
        self.cluster = cluster
        self.link = link
        self.head = cluster.start_head(1)
        self.far_host = link.listen.partition(":")[0]
        self.start_far()

    def start_far(self) -> None:
        self.far = self.cluster.start_node(1, self.far_host, self.link.prefix)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with cable() as link:
        if link.proxy is not None:
            pytest.skip("two hosts need network namespaces, which are not permitted here")
        near = link.listen.rpartition(".")[0] + ".1"
        inside = ("ip", "-n", link.namespace)
        subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        # Ray may name this host by another one of its addresses
        subprocess.run([*inside, "route", "add", "default", "via", near], check=True)
        with ray_cluster(near) as found:
            yield Hosts(found, link)


def far_engine(server: ReplicaSet, hosts: Hosts) -> Any:
    (found,) = (engine for engine in server.engines if engine.address.startswith(hosts.far_host))
    return found


def test_streams_leave_a_node_whose_cable_was_pulled(hosts: Hosts) -> None:
    async def test(server: ReplicaSet) -> None:
        far = far_engine(server, hosts)
        await both(server, hosts.link.pull)
        assert not far.is_serving
        hosts.link.mend()
        await until(lambda: far.is_serving)
        assert far.address.startswith(hosts.far_host)

    run(order_of(hosts.cluster.address, 2), test)


def test_an_engine_is_placed_again_when_its_raylet_was_killed(hosts: Hosts) -> None:
    async def test(server: ReplicaSet) -> None:
        far = far_engine(server, hosts)
        await both(server, hosts.far.kill_raylet)
        await until(lambda: not far.is_serving)
        hosts.far.kill()
        hosts.start_far()
        await until(lambda: far.is_serving)
        assert far.address.startswith(hosts.far_host)

    run(order_of(hosts.cluster.address, 2), test)


def test_streams_wait_for_a_head_that_is_restarted(hosts: Hosts) -> None:
    def restart() -> None:
        hosts.head.kill()
        hosts.far.kill()
        hosts.cluster.start_head(1)
        hosts.start_far()

    async def test(server: ReplicaSet) -> None:
        await both(server, restart)

    run(order_of(hosts.cluster.address, 2), test)
