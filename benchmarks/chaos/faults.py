"""The faults of the chaos run, a row each: what it is called, how it begins and how it ends.

A fault is an asynchronous context manager over the `World`: what is before its `yield` begins it,
what follows ends it. A new one is a function and a row of `FAULTS`.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal
from urllib.parse import urlsplit

import httpx
import msgspec

from benchmarks.chaos.requests import ADAPTERS, Outcome
from benchmarks.chaos.sites import SITES, Host, Hosts
from benchmarks.chaos.world import ADMIN, STALL_S, World, address_space_bytes

__all__ = ["FAULTS", "Fault"]

_TCP_REPAIR = 19  # of linux/tcp.h: a socket that is closed in this state sends nothing
_HOUR_S = 3600.0
_OPERATOR_S = 20.0  # until an operator's request is given up
_DONE_S = 30.0  # until an operator's request that is sent again has to succeed

Break = Callable[[World, Random], AbstractAsyncContextManager[None]]


class Fault(msgspec.Struct, frozen=True):
    """A row.

    Attributes:
        name: As it is printed.
        broken: Begins and ends it.
        lasts_s: Shortest and longest time between its beginning and its end; 0 for what is over at
            once.
        holds: Whose time it takes, so that it is no time of the server's: of `all` requests, of
            those over the cable (`far`), or of connections that are being opened (`new`).
        errors: A regular expression of the reasons of errors that it may cause, "" for none.
        cuts: It may take connections, whose clients then get no answer.
        needs: `mounts`, `shim`, `netns`, or "" for nothing that a user may lack.
        sites: The servers that may have it (`sites.SITES`).
        delays: Streams have gaps that are the network's.
    """

    name: str
    broken: Break
    lasts_s: tuple[float, float] = (0.0, 0.0)
    holds: Literal["", "all", "far", "new"] = ""
    cuts: bool = False
    needs: Literal["", "mounts", "shim", "netns"] = ""
    errors: str = ""
    sites: tuple[str, ...] = tuple(SITES)
    delays: bool = False

    def explains(self, outcome: Outcome) -> bool:
        """Whether it may be why a request ended with an error."""
        return bool(self.errors and re.search(self.errors, outcome.reason))


def _signal(process_id: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, number)


# -- processes ----------------------------------------------------------------------------------


@asynccontextmanager
async def _engine_killed(world: World, rng: Random) -> AsyncIterator[None]:
    if found := world.engine_ids():
        _signal(rng.choice(found), signal.SIGKILL)
    yield


@asynccontextmanager
async def _engines_killed(world: World, rng: Random) -> AsyncIterator[None]:
    for child in world.engine_ids():
        _signal(child, signal.SIGKILL)
    yield


@asynccontextmanager
async def _killed_while_it_starts(world: World, rng: Random) -> AsyncIterator[None]:
    before = set(world.engine_ids())
    if before:
        _signal(rng.choice(sorted(before)), signal.SIGKILL)
    for _ in range(40):
        await asyncio.sleep(0.05)
        if fresh := set(world.engine_ids()) - before:
            await asyncio.sleep(rng.random() * 0.4)
            _signal(fresh.pop(), signal.SIGKILL)
            break
    yield


@asynccontextmanager
async def _engine_stopped(world: World, rng: Random) -> AsyncIterator[None]:
    found = world.engine_ids()
    process_id = rng.choice(found) if found else 0
    if process_id:
        _signal(process_id, signal.SIGSTOP)
    yield
    if process_id:
        _signal(process_id, signal.SIGCONT)


@asynccontextmanager
async def _server_stopped(world: World, rng: Random) -> AsyncIterator[None]:
    process_id = world.server.process_ids()[0]
    _signal(process_id, signal.SIGSTOP)
    yield
    _signal(process_id, signal.SIGCONT)


@asynccontextmanager
async def _child_killed(module: bytes, world: World, rng: Random) -> AsyncIterator[None]:
    for child in world.ids_of(module):
        _signal(child, signal.SIGKILL)
    yield


@asynccontextmanager
async def _child_stopped(module: bytes, world: World, rng: Random) -> AsyncIterator[None]:
    found = world.ids_of(module)
    for child in found:
        _signal(child, signal.SIGSTOP)
    yield
    for child in found:
        _signal(child, signal.SIGCONT)


@asynccontextmanager
async def _out_of_memory(world: World, rng: Random) -> AsyncIterator[None]:
    """No engine gets more address space than it has: every further allocation fails."""
    limited = {}
    for child in world.engine_ids():
        with suppress(ProcessLookupError, FileNotFoundError):
            _, hard = resource.prlimit(child, resource.RLIMIT_AS)
            resource.prlimit(child, resource.RLIMIT_AS, (address_space_bytes(child), hard))
            limited[child] = hard
    yield
    for child, hard in limited.items():
        with suppress(ProcessLookupError):
            resource.prlimit(child, resource.RLIMIT_AS, (hard, hard))


@asynccontextmanager
async def _no_descriptors(world: World, rng: Random) -> AsyncIterator[None]:
    """The server may open nothing more than it has open."""
    process_id = world.server.process_ids()[0]
    soft, hard = resource.prlimit(process_id, resource.RLIMIT_NOFILE)
    num_open = len(list(Path(f"/proc/{process_id}/fd").iterdir()))
    resource.prlimit(process_id, resource.RLIMIT_NOFILE, (num_open, hard))
    yield
    resource.prlimit(process_id, resource.RLIMIT_NOFILE, (soft, hard))


# -- disks and clocks -----------------------------------------------------------------------------


@asynccontextmanager
async def _full(name: str, world: World, rng: Random) -> AsyncIterator[None]:
    folder = Path(name) if name.startswith("/") else world.folder / name
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    yield
    filler.unlink(missing_ok=True)


@asynccontextmanager
async def _lost_shm(world: World, rng: Random) -> AsyncIterator[None]:
    for entry in Path("/dev/shm").iterdir():
        entry.unlink()
    yield


@asynccontextmanager
async def _slow_disk(world: World, rng: Random) -> AsyncIterator[None]:
    world.set_shim(write_s=rng.choice((0.02, 0.1, 0.5)))
    yield
    world.set_shim(write_s=0.0)


@asynccontextmanager
async def _clock_jump(seconds: float, world: World, rng: Random) -> AsyncIterator[None]:
    world.set_shim(clock_s=seconds)
    yield
    world.set_shim(clock_s=0.0)


@asynccontextmanager
async def _ledger_locked(world: World, rng: Random) -> AsyncIterator[None]:
    """Another process, such as a backup, has the lock of the file."""
    connection = sqlite3.connect(world.ledger, isolation_level=None, timeout=2.0)
    with suppress(sqlite3.OperationalError):
        connection.execute("BEGIN EXCLUSIVE")
    yield
    connection.close()


# -- connections ----------------------------------------------------------------------------------


@asynccontextmanager
async def _cable_pulled(world: World, rng: Random) -> AsyncIterator[None]:
    world.cable.set_forwarding(False)
    yield
    world.cable.set_forwarding(True)


@asynccontextmanager
async def _half_open(world: World, rng: Random) -> AsyncIterator[None]:
    """Clients that send a part of a request and are silent then; some of them are gone without a
    packet that says so, as after a power cut.
    """
    parts = urlsplit(world.server.url)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nx-api-key: first-key\r\n"
    body = "content-type: application/json\r\ncontent-length: 400\r\n\r\n" + '{"prompt": "abc'
    opened = []
    for number in range(30):
        connection = socket.create_connection((parts.hostname or "", parts.port or 80), 5.0)
        with suppress(OSError):
            connection.sendall((head + body if number % 2 else head[: 10 + number]).encode())
        if number % 3 == 0:
            with suppress(OSError):  # needs root
                connection.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            connection.close()
        else:
            opened.append(connection)
    yield
    for connection in opened:
        connection.close()


# -- hosts ----------------------------------------------------------------------------------------


def _host(world: World, rng: Random) -> Host:
    assert isinstance(world.site, Hosts), "faults of hosts are in their site only"
    return rng.choice(world.site.hosts)


@asynccontextmanager
async def _host_cut(world: World, rng: Random) -> AsyncIterator[None]:
    link = _host(world, rng).link
    link.pull()
    yield
    link.mend()


@asynccontextmanager
async def _hosts_cut(world: World, rng: Random) -> AsyncIterator[None]:
    assert isinstance(world.site, Hosts), "faults of hosts are in their site only"
    for host in world.site.hosts:
        host.link.pull()
    yield
    for host in world.site.hosts:
        host.link.mend()


@asynccontextmanager
async def _packets_lost(
    to_host: float, from_host: float, world: World, rng: Random
) -> AsyncIterator[None]:
    link = _host(world, rng).link
    link.lose(to_host, from_host)
    yield
    link.lose()


@asynccontextmanager
async def _power_lost(world: World, rng: Random) -> AsyncIterator[None]:
    """The engine is gone, and no packet says so: the server's connection is half-open."""
    host = _host(world, rng)
    host.link.pull()
    host.send(signal.SIGKILL)
    yield
    host.link.mend()


@asynccontextmanager
async def _engine_told_to_end(world: World, rng: Random) -> AsyncIterator[None]:
    _host(world, rng).send(signal.SIGTERM)
    yield


@asynccontextmanager
async def _strangers(world: World, rng: Random) -> AsyncIterator[None]:
    """Connections to an engine that say nothing, or half of it, and then vanish."""
    address, port = _host(world, rng).link.listen.split(":")
    opened = []
    for number in range(24):
        with suppress(OSError):  # the engine may be away
            connection = socket.create_connection((address, int(port)), 0.5)
            connection.sendall((b"", b"\0\0", b"GET / HTTP/1.1\r\n")[number % 3])
            opened.append(connection)
    yield
    for connection in opened:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        connection.close()


# -- several models -------------------------------------------------------------------------------


@asynccontextmanager
async def _model_loaded(world: World, rng: Random) -> AsyncIterator[None]:
    await operate(world, "/v1/models/load", {"model": rng.choice(world.site.models)})
    yield


@asynccontextmanager
async def _model_unloaded(world: World, rng: Random) -> AsyncIterator[None]:
    await operate(world, "/v1/models/unload", {"model": rng.choice(world.site.models)})
    yield


@asynccontextmanager
async def _model_sleeps(world: World, rng: Random) -> AsyncIterator[None]:
    name = rng.choice(world.site.models)
    await operate(world, f"/sleep?model={name}")
    yield
    await operate(world, f"/wake_up?model={name}")


@asynccontextmanager
async def _keep_alive(world: World, rng: Random) -> AsyncIterator[None]:
    """An operator's request has its model leave as soon as it has no requests, which lasts until
    another one says otherwise.
    """
    body: dict[str, object] = {"model": rng.choice(world.site.models), "prompt": "a", "raw": True}
    body |= {"options": {"num_predict": 1}, "stream": False}
    await operate(world, "/api/generate", {**body, "keep_alive": 0})
    yield
    await operate_until_done(world, "/api/generate", {**body, "keep_alive": -1})


@asynccontextmanager
async def _models_in_turn(world: World, rng: Random) -> AsyncIterator[None]:
    """All models are wanted at once, and there is no room for all."""
    loads = (operate(world, "/v1/models/load", {"model": name}) for name in world.site.models)
    await asyncio.gather(*loads)
    yield


# -- operators ------------------------------------------------------------------------------------


async def operate(world: World, path: str, body: dict[str, object] | None = None) -> bool:
    """Call a route of operators; False if it refuses, since an engine may be away, or does not
    answer in time.
    """
    async with httpx.AsyncClient(
        base_url=world.server.url, headers=ADMIN, timeout=_OPERATOR_S
    ) as client:
        with suppress(httpx.HTTPError):
            return (await client.post(path, json=body or {})).status_code == 200
    return False


async def operate_until_done(world: World, path: str, body: dict[str, object]) -> bool:
    """`operate`, again until it succeeds, as an operator tries again while an engine is started;
    False if it did not in `_DONE_S`.
    """
    until_s = time.monotonic() + _DONE_S
    while not await operate(world, path, body):
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(0.2)
    return True


async def load_adapter(world: World, name: str) -> bool:
    """Load one of the bundled adapters, again if it is there; False if it could not be loaded."""
    body = {"lora_name": name, "lora_path": str(world.adapter_path(name)), "load_inplace": True}
    return await operate_until_done(world, "/v1/load_lora_adapter", body)


@asynccontextmanager
async def _adapter_replaced(world: World, rng: Random) -> AsyncIterator[None]:
    await load_adapter(world, rng.choice(ADAPTERS))
    yield


@asynccontextmanager
async def _adapter_gone(world: World, rng: Random) -> AsyncIterator[None]:
    name = rng.choice(ADAPTERS)
    await operate(world, "/v1/unload_lora_adapter", {"lora_name": name})
    yield
    await load_adapter(world, name)


@asynccontextmanager
async def _replica_restarted(world: World, rng: Random) -> AsyncIterator[None]:
    await operate(world, f"/admin/replicas/{rng.randrange(2)}/restart")
    yield


@asynccontextmanager
async def _all_restarted(world: World, rng: Random) -> AsyncIterator[None]:
    _signal(world.server.process_ids()[0], signal.SIGHUP)
    yield


@asynccontextmanager
async def _cache_reset(world: World, rng: Random) -> AsyncIterator[None]:
    await operate(world, "/reset_prefix_cache")
    yield


_NO_ADAPTER = (
    "^404 the (model|adapter) '[a-z-]+' (does not exist|is not loaded|was unloaded or replaced)"
)
_NO_ROOM = "^(507|a batch failed:) the server's disk is full"
_NO_WORKER = "^503 the process that tokenises long texts ended"
_DEATHS = "[0-9]+ engine processes ended in a row while they computed it"  # docs/guide/scale.md
_NO_DESCRIPTORS = (
    "^503 the server has too many open files|Too many open files|cannot be (started|written)"
)
_NO_TRIAL = "^503 (the process that tries out grammars ended|the grammar was not compiled within)"
_NO_MEMORY = f"{_DEATHS}|ImportError|cannot be started|can't start new thread|MemoryError"
_GRAMMARS, _TOKENIZER = b"grammar.trial_worker", b"text.tokenizer_worker"

_of_hosts = partial(Fault, needs="netns", sites=("hosts",), delays=True)
_of_models = partial(Fault, sites=("models",))

FAULTS: tuple[Fault, ...] = (
    Fault("an engine is killed", _engine_killed, errors=_DEATHS),
    Fault("all engines are killed", _engines_killed, errors=_DEATHS),
    Fault(
        "an engine is killed, and again while it starts", _killed_while_it_starts, errors=_DEATHS
    ),
    Fault("an engine is stopped for a moment", _engine_stopped, (0.2, 1.5)),
    Fault("an engine is stopped until it is replaced", _engine_stopped, (STALL_S + 1, STALL_S + 3)),
    Fault("the engines get no more memory", _out_of_memory, (0.5, 2.0), errors=_NO_MEMORY),
    Fault("the server is stopped", _server_stopped, (0.2, 1.5), holds="all"),
    Fault("the process of grammars is killed", partial(_child_killed, _GRAMMARS), errors=_NO_TRIAL),
    Fault(
        "the process of grammars is stopped",
        partial(_child_stopped, _GRAMMARS),
        (0.5, 3.0),
        errors=_NO_TRIAL,
    ),
    Fault(
        "the process of long texts is killed", partial(_child_killed, _TOKENIZER), errors=_NO_WORKER
    ),
    Fault("the process of long texts is stopped", partial(_child_stopped, _TOKENIZER), (0.5, 3.0)),
    Fault("no more descriptors", _no_descriptors, (0.5, 3.0), "new", True, errors=_NO_DESCRIPTORS),
    Fault("the ledger's disk is full", partial(_full, "ledger"), (0.5, 4.0), needs="mounts"),
    Fault("the disk of KV blocks is full", partial(_full, "kv"), (0.5, 4.0), needs="mounts"),
    Fault(
        "the disk of files is full",
        partial(_full, "files"),
        (0.5, 4.0),
        "",
        False,
        "mounts",
        _NO_ROOM,
    ),
    Fault("the disk of temporary files is full", partial(_full, "tmp"), (1.0, 4.0), needs="mounts"),
    Fault("/dev/shm is full", partial(_full, "/dev/shm"), (1.0, 4.0), needs="mounts"),
    Fault("/dev/shm is emptied", _lost_shm, needs="mounts"),
    Fault("the disks are slow", _slow_disk, (1.0, 4.0), needs="shim"),
    Fault("the ledger is locked", _ledger_locked, (0.5, 7.0)),
    Fault("the clock is an hour ahead", partial(_clock_jump, _HOUR_S), (0.5, 3.0), needs="shim"),
    Fault("the clock is an hour late", partial(_clock_jump, -_HOUR_S), (0.5, 3.0), needs="shim"),
    Fault("the cable is pulled", _cable_pulled, (0.3, 3.0), holds="far"),
    Fault("half-open connections", _half_open, (1.0, 4.0)),
    Fault("an adapter is loaded again", _adapter_replaced),
    Fault("an adapter is gone for a time", _adapter_gone, (0.2, 2.0), errors=_NO_ADAPTER),
    Fault("a replica is restarted", _replica_restarted, sites=("replicas", "hosts")),
    Fault("all replicas are restarted in turn", _all_restarted),
    Fault("the prefix cache is reset", _cache_reset),
    _of_hosts("a host is cut off for a moment", _host_cut, (0.3, 2.5)),
    _of_hosts("a host is cut off until it is given up", _host_cut, (6.0, 9.0)),
    _of_hosts("all hosts are cut off", _hosts_cut, (0.5, 7.0)),
    _of_hosts("a third of a host's packets is lost", partial(_packets_lost, 0.3, 0.3), (1.0, 6.0)),
    _of_hosts("a host hears nothing", partial(_packets_lost, 1.0, 0.0), (1.0, 8.0)),
    _of_hosts("nothing hears a host", partial(_packets_lost, 0.0, 1.0), (1.0, 8.0)),
    _of_hosts("a host loses its power", _power_lost, (0.5, 3.0), errors=_DEATHS),
    _of_hosts("an engine of a host is told to end", _engine_told_to_end),
    _of_hosts("strangers connect to an engine", _strangers, (1.0, 4.0)),
    _of_models("a model is loaded", _model_loaded),
    _of_models("a model is unloaded", _model_unloaded),
    _of_models("a model sleeps", _model_sleeps, (0.1, 2.0)),
    _of_models("a model is kept for no time", _keep_alive, (0.5, 3.0)),
    _of_models("all models are loaded", _models_in_turn),
)


class Meeting(msgspec.Struct):
    """One occurrence of a fault, on the client's monotonic clock."""

    fault: Fault
    begin_s: float
    end_s: float = float("inf")


async def break_at_random(
    world: World,
    faults: list[Fault],
    rng: Random,
    until_s: float,
    every_s: float,
    met: list[Meeting],
) -> None:
    """Have faults at random times until then; none of them twice at the same time."""
    while time.monotonic() < until_s:
        await asyncio.sleep(min(rng.expovariate(1 / every_s), 4 * every_s))
        running = {meeting.fault.name for meeting in met if meeting.end_s == float("inf")}
        others = [meeting for meeting in faults if meeting.name not in running]
        if time.monotonic() >= until_s:
            return
        if not others:
            continue
        fault = rng.choice(others)
        meeting = Meeting(fault, time.monotonic())
        met.append(meeting)
        try:
            async with fault.broken(world, rng):
                await asyncio.sleep(rng.uniform(*fault.lasts_s))
        finally:
            meeting.end_s = time.monotonic()
