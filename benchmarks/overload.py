"""`python -m benchmarks.overload`: a served model at two, three and ten times its capacity.

The capacity is measured first: as many clients as the server runs sequences, each with one request
after the other. Then requests arrive at random times at a multiple of that rate, with a deadline
for the first token and one for the end. After each load the capacity is measured again, since
machines become slower and faster: the peak of a load is the mean of the capacities around it. At
twice the capacity a server with `--scheduling-policy fcfs`, whose requests have no deadlines, gets
the same requests. A request is good if it met both limits, by the clock of the client. After each
load, small probes measure how long the server needs until they are as quick as before.

The client shares the machine with the server. Requests that the client sends late are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import statistics
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

import msgspec
import uvloop
from msgspec.structs import replace

from benchmarks.machine import describe_machine
from quickstep.bench.serve import percentile
from quickstep.bench.server_process import ServerProcess

_LOADS = (2.0, 3.0, 10.0)
_FCFS_LOAD = 2.0
_RAMP = 0.2  # part of a load that is not counted: the queue fills
_GOALS = (
    "throughput >= 90 % of the peak; goodput >= 90 % of the peak, at 2x >= 1.3 times that of fcfs;",
    "refusals at once within 100 ms; >= 99 % of the admitted in time; normal within 2 s.",
)
_PROBE_EVERY_S = 0.05
_NUM_PROBES = 20
_MAX_RECOVERY_S = 60.0
_REFUSED = (429, 503)


class Limits(msgspec.Struct, frozen=True):
    """How long a good request takes at most, in seconds from when it was due."""

    first_token_s: float
    end_s: float


class Body(msgspec.Struct, frozen=True):
    """A prompt, and how many tokens are generated."""

    prompt: tuple[int, ...]
    num_outputs: int


class Response(msgspec.Struct):
    """The result of a request; times are those of `time.perf_counter`.

    Attributes:
        due_s: When it had to be sent; all durations start here.
        sent_s: When it was sent.
        first_s: When its first token came.
        ended_s: When the response was complete.
        status: Of HTTP; 0 without a response.
        num_tokens: Output tokens, as counted by the server.
        finish_reason: Of a complete output; "error" where the stream ended with an error.
    """

    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    status: int = 0
    num_tokens: int = 0
    finish_reason: str = ""

    @property
    def was_admitted(self) -> bool:
        """Whether it was accepted, with tokens or without."""
        return self.status not in _REFUSED

    def is_good(self, limits: Limits) -> bool:
        """Whether it met both limits."""
        return (
            self.finish_reason == "length"
            and self.first_s is not None
            and self.first_s - self.due_s <= limits.first_token_s
            and self.ended_s - self.due_s <= limits.end_s
        )


class Figures(msgspec.Struct, frozen=True):
    """The measurements of one load; rates are per second. `client_cpu` is the part of the machine
    that this program used, which the server did not have. `peak` are the tokens per second of the
    capacities around the load.
    """

    requests: float
    tokens: float
    good_tokens: float
    offered: float
    refused: float
    refusal_s: tuple[float, ...]
    in_time: float
    first_token_s: tuple[float, ...]
    lateness_s: tuple[float, ...]
    num_failed: int
    recovery_s: float
    client_cpu: float
    peak: float = math.nan


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--scheduling-policy", default="mixed")
    parser.add_argument("--ttft-deadline-s", type=float, default=1.0)
    parser.add_argument("--timeout-s", type=float, default=20.0)
    parser.add_argument(
        "--connection-per-request", action="store_true", help="otherwise connections are reused"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(describe_machine())
    print(
        f"{args.model}, {args.max_num_seqs} sequences, prompts of 64 to 256 tokens, outputs of 32 "
        f"to 96; the first token within {args.ttft_deadline_s:g} s, the end within "
        f"{args.timeout_s:g} s; {args.repeats} times {args.seconds:g} s of each load, "
        f"{'a connection per request' if args.connection_per_request else 'connections reused'}\n",
        flush=True,
    )
    rows: dict[str, list[Figures]] = {}
    for repeat in range(args.repeats):
        for name, figures in _measure_both(args, Random(args.seed + repeat)).items():
            rows.setdefault(name, []).append(figures)
    _print(rows)
    return 0


def _measure_both(args: argparse.Namespace, rng: Random) -> dict[str, Figures]:
    limits = Limits(args.ttft_deadline_s, args.timeout_s)
    found = {}
    with _Server(args, args.scheduling_policy) as url:
        before = uvloop.run(_capacity(url, args, rng, limits))
        if not before.requests:
            raise SystemExit(f"no request ended within {args.seconds:g} s; raise --seconds")
        found["capacity"], rate = before, before.requests
        for load in _LOADS:
            run = _overload(url, args, load * rate, rng, limits, sends_limits=True)
            figures = uvloop.run(run)
            after = uvloop.run(_capacity(url, args, rng, limits))
            peak = statistics.mean([before.tokens, after.tokens])
            found[f"{args.scheduling_policy} {load:g}x"] = replace(figures, peak=peak)
            before = after
    with _Server(args, "fcfs") as url:
        before = uvloop.run(_capacity(url, args, rng, limits))
        run = _overload(url, args, _FCFS_LOAD * rate, rng, limits, sends_limits=False)
        found[f"fcfs {_FCFS_LOAD:g}x"] = replace(uvloop.run(run), peak=before.tokens)
    return found


class _Server:
    """A server with a policy, as a context."""

    def __init__(self, args: argparse.Namespace, policy: str) -> None:
        flags = ["--max-num-seqs", str(args.max_num_seqs), "--scheduling-policy", policy]
        self._process = ServerProcess([args.model, *flags])

    def __enter__(self) -> str:
        self._process.start()
        return self._process.url

    def __exit__(self, *exception: object) -> None:
        self._process.stop()
        for line in self._process.faults()[:5]:
            print("log of the server:", line, flush=True)


# -- loads ----------------------------------------------------------------------------------------


def _random_body(rng: Random) -> Body:
    prompt = tuple(rng.randrange(10, 250) for _ in range(rng.randint(64, 256)))
    return Body(prompt, rng.randint(32, 96))


async def _capacity(url: str, args: argparse.Namespace, rng: Random, limits: Limits) -> Figures:
    """As many clients as sequences; each sends its next request when it has the last response."""
    responses: list[Response] = []
    client = Client(url, not args.connection_per_request)
    start_s, cpu_s = time.perf_counter(), time.process_time()

    async def one_client() -> None:
        while time.perf_counter() < start_s + args.seconds:
            responses.append(Response(time.perf_counter()))
            await client.send(client.encode(_random_body(rng)), responses[-1])

    await asyncio.gather(*(one_client() for _ in range(args.max_num_seqs)))
    cpu_s = time.process_time() - cpu_s
    return _figures(responses, start_s, args.seconds, limits, recovery_s=0.0, cpu_s=cpu_s)


async def _overload(
    url: str,
    args: argparse.Namespace,
    rate: float,
    rng: Random,
    limits: Limits,
    sends_limits: bool,
) -> Figures:
    """Requests at random times, at `rate` per second; then probes until they are quick again."""
    client, seconds = Client(url, not args.connection_per_request), args.seconds
    idle_s = [await _probe(client) for _ in range(_NUM_PROBES)]
    normal_s = max(0.1, 3 * statistics.median(idle_s))
    extra = {}
    if sends_limits:
        extra = {"ttft_deadline_ms": 1e3 * limits.first_token_s, "timeout_s": limits.end_s}
    at_s, requests = 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        requests.append((at_s, client.encode(_random_body(rng), extra)))
    responses, sending = [], []
    start_s, cpu_s = time.perf_counter(), time.process_time()
    for at_s, request in requests:
        await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
        responses.append(Response(start_s + at_s))
        sending.append(asyncio.create_task(client.send(request, responses[-1])))
    await asyncio.sleep(max(0.0, start_s + seconds - time.perf_counter()))
    cpu_s = time.process_time() - cpu_s
    recovery_s = await _recovery_s(client, normal_s)
    await asyncio.gather(*sending)
    return _figures(responses, start_s, seconds, limits, recovery_s, cpu_s)


async def _recovery_s(client: Client, normal_s: float) -> float:
    """How long after the load a probe is sent that is quick, as are the two that follow it."""
    start_s, num_quick, since_s = time.perf_counter(), 0, 0.0
    while (at_s := time.perf_counter() - start_s) < _MAX_RECOVERY_S:
        if await _probe(client) > normal_s:
            num_quick = 0
        else:
            since_s = at_s if not num_quick else since_s
            num_quick += 1
        if num_quick == 3:
            return since_s
        await asyncio.sleep(_PROBE_EVERY_S)
    return math.inf


async def _probe(client: Client) -> float:
    """Seconds until the first token of a small request."""
    response = Response(time.perf_counter())
    await client.send(client.encode(Body(tuple(range(10, 26)), 1)), response)
    return math.inf if response.first_s is None else response.first_s - response.due_s


# -- requests -------------------------------------------------------------------------------------


class Client:
    """Sends requests as OpenAI's client or a load balancer does: a connection that has brought its
    response is used again. With `reuses_connections=False` each request opens its own.
    """

    def __init__(self, url: str, reuses_connections: bool) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._reuses_connections = reuses_connections
        connection = "keep-alive" if reuses_connections else "close"
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: {connection}\r\n"
            "content-type: application/json\r\n"
        )
        self._free: list[_Connection] = []

    def encode(self, body: Body, extra: dict[str, float] | None = None) -> bytes:
        """The bytes of a request, with `extra` fields."""
        content = json.dumps(
            {
                "prompt": body.prompt,
                "max_tokens": body.num_outputs,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **(extra or {}),
            }
        )
        return f"{self._head}content-length: {len(content)}\r\n\r\n{content}".encode()

    async def send(self, request: bytes, response: Response) -> None:
        """Send an encoded request and read its response, a stream or an error, to the end."""
        response.sent_s = time.perf_counter()
        try:
            connection = await self._connection()
            await connection.exchange(request, response)
            if self._reuses_connections:
                self._free.append(connection)
            else:
                connection.close()
        except (OSError, ValueError):
            response.finish_reason = "error"
        response.ended_s = time.perf_counter()

    async def _connection(self) -> _Connection:
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time. To leave the machine to the server, only the first bytes with text and
    the last ones are looked at while a response arrives.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._received = bytearray()
        self._response: Response | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    async def exchange(self, request: bytes, response: Response) -> None:
        """Fill in `response`.

        Raises:
            ConnectionError: If the server closed the connection.
            ValueError: If the response cannot be parsed.
        """
        self._received.clear()
        self._response = response
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        head, _, body = bytes(self._received).partition(b"\r\n\r\n")
        response.status = _status(head)
        if response.status == 200:
            for line in body.splitlines():
                _read_line(line, response)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._response is not None and self._response.first_s is None and b'"text":"' in data:
            self._response.first_s = time.perf_counter()
        if self._done is not None and not self._done.done() and self._is_complete():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("closed before the response was complete"))

    def close(self) -> None:
        self._transport.close()

    def _is_complete(self) -> bool:
        """Streams end with an empty chunk, errors have a length."""
        if self._received.endswith(b"\r\n0\r\n\r\n"):
            return True
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or _status(head) == 200:
            return False
        length = re.search(rb"content-length: (\d+)", head)
        return length is not None and len(body) >= int(length[1])


def _status(head: bytes | bytearray) -> int:
    return int(head[9:12])


def _read_line(line: bytes, response: Response) -> None:
    """Take counts from a line of a stream; only what is needed is parsed."""
    if not line.startswith(b"data: {") or b'"finish_reason":null' in line:
        return
    event: dict[str, Any] = json.loads(line[6:])
    if "error" in event:
        response.finish_reason = "error"
    for choice in event.get("choices") or ():
        response.finish_reason = choice["finish_reason"] or response.finish_reason
    if usage := event.get("usage"):
        response.num_tokens = usage["completion_tokens"]


# -- figures --------------------------------------------------------------------------------------


def _figures(
    responses: Sequence[Response],
    start_s: float,
    seconds: float,
    limits: Limits,
    recovery_s: float,
    cpu_s: float,
) -> Figures:
    """Rates are of what ended while the load lasted, without its first part."""
    from_s, until_s = start_s + _RAMP * seconds, start_s + seconds
    window_s = until_s - from_s
    ended = [response for response in responses if from_s <= response.ended_s < until_s]
    done = [request for request in ended if request.num_tokens]
    refused = [response for response in responses if response.status in _REFUSED]
    admitted = [response for response in responses if response.was_admitted]
    return Figures(
        requests=len(done) / window_s,
        tokens=sum(request.num_tokens for request in done) / window_s,
        good_tokens=sum(request.num_tokens for request in done if request.is_good(limits))
        / window_s,
        offered=len(responses) / seconds,
        refused=len(refused) / max(1, len(responses)),
        refusal_s=tuple(request.ended_s - request.sent_s for request in refused),
        in_time=sum(request.is_good(limits) for request in admitted) / max(1, len(admitted)),
        first_token_s=tuple(
            request.first_s - request.due_s for request in admitted if request.first_s
        ),
        lateness_s=tuple(response.sent_s - response.due_s for response in responses),
        num_failed=sum(response.finish_reason == "error" for response in responses),
        recovery_s=recovery_s,
        client_cpu=cpu_s / seconds / (os.cpu_count() or 1),
    )


_COLUMNS: dict[str, Callable[[Figures], float]] = {
    "offered/s": lambda one: one.offered,
    "tokens/s": lambda one: one.tokens,
    "good tokens/s": lambda one: one.good_tokens,
    "of the peak %": lambda one: 100 * one.good_tokens / one.peak,
    "refused %": lambda one: 100 * one.refused,
    "refusal p50 ms": lambda one: 1e3 * percentile(one.refusal_s, 0.5),
    "p99": lambda one: 1e3 * percentile(one.refusal_s, 0.99),
    "TTFT p50 ms": lambda one: 1e3 * percentile(one.first_token_s, 0.5),
    "TTFT p99": lambda one: 1e3 * percentile(one.first_token_s, 0.99),
    "in time %": lambda one: 100 * one.in_time,
    "normal after s": lambda one: one.recovery_s,
    "sent late p99 ms": lambda one: 1e3 * percentile(one.lateness_s, 0.99),
    "failed": lambda one: one.num_failed,
    "client's CPU %": lambda one: 100 * one.client_cpu,
}


def _print(rows: dict[str, list[Figures]]) -> None:
    """A table with the median of each figure, and its range over the repeats."""
    print("| load | " + " | ".join(_COLUMNS) + " |")
    print("|---" * (len(_COLUMNS) + 1) + "|")
    for name, repeats in rows.items():
        cells = [_cell([column(repeat) for repeat in repeats]) for column in _COLUMNS.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\nMedian (lowest to highest) of the repeats; in time: of the admitted ones. Goals:")
    print("\n".join(_GOALS))


def _cell(values: list[float]) -> str:
    digits = 1 if max(values) < 10 else 0
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
