"""`python -m benchmarks.flood`: what one API key that floods a route costs another key.

For each route of the server, a quiet client sends one request after the other: before a flood,
while another key keeps many connections busy with requests to the same route, and after it. Prints
the quiet client's median and 99th percentile without and with the flood, and their ratio. The exit
code is 1 if a 99th percentile with the flood is above three times the one without, or if a request
of the quiet client failed.

Clients are usually on other machines. So the flooding one has the lowest of the priorities here
(`nice`), and the quiet one a real-time priority, where the system permits it: with an ordinary one
(`--ordinary-priority`) its slowest responses were there in time, and its process waited for a core
that the server used. Both keys may use the operator's routes.

A virtual machine loses its cores to others for 30 to 200 ms at a time, which would be counted as
the server's. So a phase is measured in parts of half a second, and a part that lost cores is
measured again, up to twice the time of those that count; what these have lost is printed as
`stolen`, in milliseconds. One measurement of a route differs from the next, also by a half:
`--repeats` measures each so many times, and judges it by the median of its ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
import msgspec
import uvloop

from benchmarks.flood_cases import Case, cases_of, encoded, flooding, prepared, request_of
from benchmarks.machine import describe_machine, stolen_s
from quickstep.bench.serve import percentile
from quickstep.bench.server_process import ServerProcess

__all__ = ["Effort", "RouteResult", "measured"]

_QUIET, _FLOOD = "quiet-key", "flood-key"
_FLOOD_ADDRESS = "127.0.0.2"  # for what has no key
_MOST_RATIO = 3.0
_PATIENCE_S = 60.0  # for one response
_SETTLE_S = 30.0
_NO_CONTENT = 204  # has no body and no length
_RAMP_S = 0.3
_PART_S = 0.5  # of a phase
_MOST_DISCARDED = 2.0  # times what counts
_NUM_WARM = 3
_LEAST_PRIORITY = 19
_ARGUMENTS = (
    *("--max-num-seqs", "16", "--num-blocks", "2000", "--max-waiting", "256"),
    *("--scheduling-policy", "fair"),
    *("--lora-allowed-dirs", str(Path(__file__).parent.parent / "src" / "quickstep" / "bundled")),
    *("--enable-lora", "--admin-api-key", f"quiet={_QUIET}", f"flood={_FLOOD}"),
)

Route = tuple[str, str]


class RouteResult(msgspec.Struct):
    """What was measured of one route; times in milliseconds."""

    route: Route
    quiet_ms: list[float] = msgspec.field(default_factory=list)
    flooded_ms: list[float] = msgspec.field(default_factory=list)
    failures: list[str] = msgspec.field(default_factory=list)
    num_sent: int = 0  # by the flooding client
    floods: Counter[int] = msgspec.field(default_factory=Counter)  # its responses by status
    stolen_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Of the 99th percentiles."""
        return percentile(self.flooded_ms, 0.99) / max(1e-9, percentile(self.quiet_ms, 0.99))

    def line(self) -> str:
        """The row of the table."""
        times = [
            percentile(values, fraction)
            for values in (self.quiet_ms, self.flooded_ms)
            for fraction in (0.5, 0.99)
        ]
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(self.floods.items()))
        return (
            f"{' '.join(self.route):<42}"
            + "".join(f"{value:>9.1f}" for value in times)
            + f"{self.ratio:>7.1f}{len(self.flooded_ms):>6}{self.stolen_s * 1e3:>8.0f}  {statuses}"
        )


class Effort(msgspec.Struct, frozen=True):
    """How long each phase of a route takes at least, with how many requests, how many connections
    flood, whether the quiet client has a real-time priority, and how often a route is measured.
    """

    seconds: float = 2.0
    num_requests: int = 100
    num_connections: int = 16
    is_realtime: bool = False
    num_repeats: int = 1


def main() -> int:
    """Measure all routes, or those whose path contains a text of `--only`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flood")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each phase of a route")
    parser.add_argument("--requests", type=int, default=100, help="least number in a phase")
    parser.add_argument("--connections", type=int, default=16, help="that flood")
    parser.add_argument("--repeats", type=int, default=1, help="of each route; the median counts")
    parser.add_argument("--threads", type=int, default=0, help="of the engine (default: all cores)")
    parser.add_argument("--ordinary-priority", action="store_true", help="of the quiet client")
    parser.add_argument("--only", default="", help="texts in the path of the routes, A,B")
    args = parser.parse_args()
    print(describe_machine())
    print(f"load average {os.getloadavg()[0]:.1f} before")
    flags = (*_ARGUMENTS, *(("--threads", str(args.threads)) if args.threads else ()))
    print(f"quickstep serve {args.model}", *flags)
    is_realtime = not args.ordinary_priority and _may_be_realtime()
    effort = Effort(args.seconds, args.requests, args.connections, is_realtime, args.repeats)
    print(f"{args.connections} connections flood; a phase takes {args.seconds:g} s or longer")
    print(f"the quiet client has {'a real-time' if is_realtime else 'an ordinary'} priority")
    print(f"{'milliseconds':<42}{'quiet':>9}{'':>9}{'flooded':>9}")
    print(
        f"{'route':<42}{'p50':>9}{'p99':>9}{'p50':>9}{'p99':>9}{'ratio':>7}{'n':>6}{'stolen':>8}"
        "  flood"
    )
    results = measured(
        args.model, effort, args.only, lambda result: print(result.line(), flush=True), flags
    )
    failures = [failure for result in results for failure in result.failures]
    ratios: dict[Route, list[float]] = {}
    for result in results:
        ratios.setdefault(result.route, []).append(result.ratio)
    medians = {route: median(of_route) for route, of_route in ratios.items()}
    failures += [
        f"{' '.join(route)}: the 99th percentile is {ratio:.1f} times that without the flood"
        for route, ratio in medians.items()
        if ratio > _MOST_RATIO
    ]
    print(
        f"{len(medians)} routes, ratio {min(medians.values()):.1f} to {max(medians.values()):.1f}"
    )
    print(f"{len(failures)} faults" if failures else "no fault", *failures, sep="\n  ")
    return 1 if failures else 0


def measured(
    model: str,
    effort: Effort,
    only: str = "",
    report: Callable[[RouteResult], object] = lambda result: None,
    flags: Sequence[str] = _ARGUMENTS,
) -> list[RouteResult]:
    """The results of all routes whose path contains a text of `only` (`A,B`), those of a route next
    to each other; each is reported.
    """
    server = ServerProcess([model, *flags])
    server.start()
    flood = _FloodProcess(server.url, effort.num_connections)
    try:
        results = []
        for route, case in cases_of(_routes(server.url)).items():
            if any(text in route[1] for text in only.split(",")):
                for _ in range(effort.num_repeats):
                    results.append(_measure(server.url, route, case, effort, flood))
                    report(results[-1])
        return results
    finally:
        flood.stop()
        server.stop()


def _routes(url: str) -> list[Route]:
    """The routes of the server's own document, without those that are OpenAI's without `/v1`."""
    document = httpx.get(f"{url}/openapi.json", headers={"x-api-key": _QUIET}, timeout=60).json()
    paths = document["paths"]
    return [
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if f"/v1{path}" not in paths
    ]


def _client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=_PATIENCE_S)


def _measure(
    url: str, route: Route, case: Case, effort: Effort, flood: _FloodProcess
) -> RouteResult:
    result = RouteResult(route)
    with _client(url, _QUIET) as client, _client(url, _FLOOD) as other:
        names = prepared(client, case.once, {"client": "quiet"})
        others = prepared(other, (*case.once, *case.before), {"client": "flood"})
        quiet = _Quiet(url, client, route, case, names, result)
        result.quiet_ms += quiet.run(effort, 0.5)
        flood.begin([encoded(sent, "localhost", _FLOOD) for sent in flooding(route, case, others)])
        time.sleep(min(_RAMP_S, effort.seconds))
        result.flooded_ms += quiet.run(effort)
        result.num_sent, result.floods = flood.end()
        _settle(client, other, route)
        result.quiet_ms += quiet.run(effort, 0.5)
    return result


def _settle(client: httpx.Client, other: httpx.Client, route: Route) -> None:
    """Remove what the flood has stored, and wait until nothing runs."""
    if route[1].startswith(("/v1/files", "/v1/batches")):
        for batch in other.get("/v1/batches", params={"limit": 100}).json()["data"]:
            other.post(f"/v1/batches/{batch['id']}/cancel")
        for file in other.get("/v1/files").json()["data"]:
            other.delete(f"/v1/files/{file['id']}")
    until_s = time.monotonic() + _SETTLE_S
    while client.get("/health").json()["num_requests"] and time.monotonic() < until_s:
        time.sleep(0.05)


class _Quiet:
    """The quiet client of one route."""

    def __init__(
        self,
        url: str,
        client: httpx.Client,
        route: Route,
        case: Case,
        names: dict[str, str],
        result: RouteResult,
    ) -> None:
        self._address = urlsplit(url)
        self._client = client
        self._route = route
        self._case = case
        self._names = names
        self._result = result

    def run(self, effort: Effort, fraction: float = 1.0) -> list[float]:
        """Send a fraction of the requests; returns their times, in milliseconds."""
        with _realtime() if effort.is_realtime else nullcontext():
            return uvloop.run(self._run(effort.seconds * fraction, effort.num_requests * fraction))

    async def _run(self, least_s: float, least_num: float) -> list[float]:
        connection = _Connection(self._address.hostname or "", self._address.port or 0)
        for _ in range(_NUM_WARM):
            await self._send(connection, [])
        times_ms: list[float] = []
        counted_s = discarded_s = 0.0
        while counted_s < least_s or len(times_ms) < least_num:
            part_ms: list[float] = []
            since_s, stolen_before_s = time.monotonic(), stolen_s()
            while time.monotonic() - since_s < min(_PART_S, least_s):
                await self._send(connection, part_ms)
                if len(self._result.failures) > _NUM_WARM:
                    return times_ms + part_ms
            part_s, lost_s = time.monotonic() - since_s, stolen_s() - stolen_before_s
            if lost_s and discarded_s < _MOST_DISCARDED * max(least_s, counted_s):
                discarded_s += part_s
                continue
            times_ms += part_ms
            counted_s += part_s
            self._result.stolen_s += lost_s
        connection.close()
        return times_ms

    async def _send(self, connection: _Connection, times_ms: list[float]) -> None:
        case, result = self._case, self._result
        names = prepared(self._client, case.before, self._names)
        payload = encoded(request_of(self._route, case, names), "localhost", _QUIET)
        since_s = time.perf_counter()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                status, body = await connection.exchange(payload)
        except (TimeoutError, OSError, EOFError) as error:
            result.failures.append(f"{' '.join(self._route)}: {error!r}")
            connection.close()
            return
        times_ms.append((time.perf_counter() - since_s) * 1e3)
        if status not in case.statuses:
            result.failures.append(f"{' '.join(self._route)}: {status} {body[:200]!r}")
        elif case.after:
            answer = msgspec.json.decode(body)["id"]
            for sent in case.after:
                step = sent.filled({**names, "answer": answer})
                self._client.request(step.method, step.path, json=step.body)


@contextmanager
def _realtime() -> Iterator[None]:
    """This process takes a core when it can run; those that it starts have ordinary priorities."""
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _may_be_realtime() -> bool:
    try:
        with _realtime():
            return True
    except (AttributeError, OSError):  # no Linux, or no permission
        return False


class _Connection:
    """A client's connection, which is opened again when the server closes it."""

    def __init__(self, host: str, port: int, source: str = "127.0.0.1") -> None:
        self._host = host
        self._port = port
        self._source = source
        self.num_sent = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, payload: bytes) -> tuple[int, bytes]:
        """Send a request; returns the response's status and body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                self._host, self._port, limit=2**24, local_addr=(self._source, 0)
            )
        reader, writer = self._streams
        writer.write(payload)
        self.num_sent += 1
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        status = int(head.split(b" ", 2)[1])
        if status == _NO_CONTENT:
            body = b""
        elif b"content-length" in headers:
            body = await reader.readexactly(int(headers[b"content-length"]))
        elif headers.get(b"transfer-encoding") == b"chunked":
            body = await _chunks(reader)
        else:
            body = await reader.read()
        if headers.get(b"connection") == b"close":
            self.close()
        return status, body

    def close(self) -> None:
        """Close it."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


class _FloodProcess:
    """The flooding client, in a process of its own."""

    def __init__(self, url: str, num_connections: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        address = urlsplit(url)
        arguments = (theirs, address.hostname, address.port, num_connections)
        self._process = context.Process(target=_flood, args=arguments, daemon=True)
        self._process.start()

    def begin(self, payloads: Sequence[bytes]) -> None:
        """Send these in turns on every connection; returns when each has sent one."""
        self._pipe.send(list(payloads))
        self._pipe.recv()

    def end(self) -> tuple[int, Counter[int]]:
        """Stop; returns how many requests were sent, and how many responses there were by status, 0
        for a connection that broke.
        """
        self._pipe.send(None)
        counts: tuple[int, Counter[int]] = self._pipe.recv()
        return counts

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def _flood(pipe: Pipe, host: str, port: int, num_connections: int) -> None:
    os.nice(_LEAST_PRIORITY)
    os.setsid()  # Linux gives each session the same time, whatever the priorities of its processes
    autogroup = Path("/proc/self/autogroup")
    if autogroup.exists():
        autogroup.write_text(f"{_LEAST_PRIORITY}")
    uvloop.run(_flood_phases(pipe, host, port, num_connections))


async def _flood_phases(pipe: Pipe, host: str, port: int, num_connections: int) -> None:
    while True:
        try:
            payloads: list[bytes] = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        connections = [_Connection(host, port, _FLOOD_ADDRESS) for _ in range(num_connections)]
        counts: Counter[int] = Counter()
        clients = [
            asyncio.create_task(_flood_client(connection, payloads, number, counts))
            for number, connection in enumerate(connections)
        ]
        try:
            while not all(connection.num_sent for connection in connections):
                await asyncio.sleep(0.001)
            pipe.send(None)
            await asyncio.to_thread(pipe.recv)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        pipe.send((sum(connection.num_sent for connection in connections), counts))


async def _flood_client(
    connection: _Connection, payloads: Sequence[bytes], turn: int, counts: Counter[int]
) -> None:
    try:
        while True:
            try:
                status, _ = await connection.exchange(payloads[turn % len(payloads)])
            except (OSError, EOFError):
                connection.close()
                status = 0
            counts[status] += 1
            turn += 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
