"""`python -m benchmarks.soak [--minutes 10]`: the demo model under mixed load with aborts.

With `--switch-models`, each request names one of three small models, for two of which there is
memory: models go to sleep and wake all the time, no request may be refused, and the memory of the
server itself must not have grown. With `--switch-models real` they are SmolLM2, Gemma 3 270M and
demo. With `--kill-s 20`, an engine is killed every so many seconds, which no client may see.

30 % of the requests are aborted by the client, 5 % are malformed. At the end, no KV block may be in
use, memory must not have grown, every status must be an expected one, the log must contain no
error, and the server must exit with code 0 and leave no process. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from benchmarks.real.models import gemma3, smollm2
from benchmarks.soak_requests import APIS, SoakRequest, malformed_request, random_request
from benchmarks.storm_attacks import JSON
from quickstep.bench.server_process import ServerProcess

_ABORTED, _MALFORMED = 0.30, 0.05
_SAMPLE_EVERY_S = 1.0
_SETTLE_S = 30.0
# Allocators keep memory that they have used: growth within these limits is not a leak.
_FLAT_FRACTION, _FLAT_BYTES = 0.08, 24 * 2**20
_MIB = 2**20
_PARTS = ("server", "engine", "grammars", "tokenizer")
_NAMES = ("a", "b", "c")  # of the models that are switched
_MODELS = (
    {"model": "demo", "name": "a"},
    {"model": "demo", "name": "b", "max-model-len": 512},
    {"model": "demo-draft", "name": "c"},
)
_TWO_MODELS_BYTES = 30 * 2**20  # for `c` and one of the others
_TWO_REAL_MODELS_BYTES = 560 * 2**20  # 543 MiB are the two largest
_TEMPLATE = """\
{% if tools %}{{ tools | tojson }}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant:"""  # those of the real models show no tools, or there is none
_KILLED = "the engine process was ended by SIGKILL"  # in the log
_SMALL_ENGINE = ("--max-num-batched-tokens", "256", "--max-num-seqs", "16")
_ENDS = {
    "chat": ("data: [DONE]",),
    "completions": ("data: [DONE]",),
    "messages": ("message_stop",),
    "responses": ("response.completed", "response.incomplete"),
}


@dataclass(slots=True)
class Log:
    """The responses, failures and memory sizes of the run."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)  # of switched models, as seen
    num_killed: int = 0  # engines

    def count(self, request: SoakRequest, outcome: str) -> None:
        """Count a response."""
        self.counts[request.kind, outcome] += 1

    def fail(self, request: SoakRequest, what: str) -> None:
        """Count and describe a failure."""
        self.count(request, "FAILED")
        self.failures.append(f"{what} for {request.method} {request.path} {request.body[:300]!r}")


def main() -> int:
    """Run the soak and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--switch-models", nargs="?", const="bundled", choices=["bundled", "real"])
    parser.add_argument("--kill-s", type=float, help="an engine is killed every so many seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return _run(args, Path(folder))


def _run(args: argparse.Namespace, folder: Path) -> int:
    argv = [args.model, "--num-blocks", "600", "--max-num-seqs", "32"]
    if args.switch_models:
        argv = _switching(folder, args.switch_models == "real")
    server = ServerProcess(argv)
    server.start()
    processes = server.process_ids()
    log = Log()
    faults = []
    try:
        faults += asyncio.run(_soak(server, log, args))
    finally:
        processes = sorted({*processes, *server.process_ids()})
        code = server.stop()
    if code:
        faults.append(f"the server exited with code {code}")
    remaining = [process_id for process_id in processes if _is_alive(process_id)]
    faults += [f"process {process_id} still runs" for process_id in remaining]
    faults += [
        f"log: {line}" for line in server.faults() if not (log.num_killed and _KILLED in line)
    ]
    faults += log.failures[:20]
    faults += _growth(log, ("server",) if args.switch_models else _PARTS)
    if args.switch_models:
        faults += _switches(server, log)
    _print(log, faults)
    return 1 if faults else 0


def _switching(folder: Path, is_real: bool) -> list[str]:
    """The arguments of a server with three models, in memory for two."""
    models: Sequence[Mapping[str, object]] = _MODELS
    num_bytes = _TWO_MODELS_BYTES
    if is_real:
        template = folder / "template.jinja"
        template.write_text(_TEMPLATE)
        gemma_file = gemma3(folder)
        if gemma_file is None:
            raise SystemExit("make .venv/.gemma3 fetches Gemma 3")
        files = (str(smollm2()), str(gemma_file), "demo")
        shared = {"kv-cache-memory-bytes": "64MiB", "max-model-len": 2048}
        shared["chat-template"] = str(template)
        models = [
            {"model": file, "name": name, **shared}
            for file, name in zip(files, _NAMES, strict=True)
        ]
        num_bytes = _TWO_REAL_MODELS_BYTES
    file = folder / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    memory = ["--models-memory-bytes", str(num_bytes)]
    return ["--config", str(file), "--model-overtake-s", "0.5", *memory, *_SMALL_ENGINE]


def _switches(server: ServerProcess, log: Log) -> list[str]:
    """How often models woke, if that was never, and in which states they were seen."""
    num_woken = sum("is ready after" in line for line in server.log)
    print(f"models became ready {num_woken} times")
    print("models seen:", ", ".join(f"{count} x {state}" for state, count in log.states.items()))
    return [] if num_woken > len(_NAMES) else ["no model was put to sleep and woken"]


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def _soak(server: ServerProcess, log: Log, args: argparse.Namespace) -> list[str]:
    limits = httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=120, limits=limits, headers=JSON
    ) as client:
        kinds = [kind for kind in APIS if await _is_served(client, kind)]
        print(f"soaking {', '.join(kinds)} for {args.minutes:g} minutes", flush=True)
        until_s = time.monotonic() + args.minutes * 60
        watching = [asyncio.create_task(_watch_memory(server, log))]
        if args.switch_models:
            watching.append(asyncio.create_task(_watch_states(client, log)))
        if args.kill_s is not None:
            watching.append(asyncio.create_task(_kill_engines(server, log, args.kill_s)))
        seeds = random.Random(args.seed)
        names = _NAMES if args.switch_models else ()
        clients = (
            _client(client, log, random.Random(seeds.random()), kinds, until_s, names)
            for _ in range(args.clients)
        )
        await asyncio.gather(*clients)
        for task in watching:
            task.cancel()
        ends = await asyncio.gather(*watching, return_exceptions=True)
        faults = [repr(end) for end in ends if not isinstance(end, asyncio.CancelledError)]
        return faults + await _settled(client, log.num_killed)


async def _is_served(client: httpx.AsyncClient, kind: str) -> bool:
    return (await client.post(APIS[kind][1], content=b"{}")).status_code != 404


async def _client(
    client: httpx.AsyncClient,
    log: Log,
    rng: random.Random,
    kinds: list[str],
    until_s: float,
    names: Sequence[object],
) -> None:
    while time.monotonic() < until_s:
        if rng.random() < _MALFORMED:
            await _send(client, log, malformed_request(rng))
            continue
        request = random_request(rng, kinds)
        if names:
            request = _naming(request, rng.choice(names))
        if rng.random() < _ABORTED / (1 - _MALFORMED):
            await _abort(str(client.base_url), log, request, rng)
        else:
            await _send(client, log, request)


def _naming(request: SoakRequest, model: object) -> SoakRequest:
    """The request to a model; one without a body stays as it is."""
    if not request.body:
        return request
    body = json.dumps({**json.loads(request.body), "model": model}).encode()
    return replace(request, body=body)


async def _send(client: httpx.AsyncClient, log: Log, request: SoakRequest) -> None:
    since_s = time.monotonic()
    try:
        response = await client.request(
            request.method, request.path, content=request.body, headers=dict(request.headers)
        )
    except httpx.HTTPError as error:
        if request.kind != "malformed" or not isinstance(error, httpx.TransportError):
            log.fail(request, repr(error))
            return
        log.count(request, type(error).__name__)  # the server rejected it before all was sent
        return
    if response.status_code not in request.statuses:
        log.fail(request, f"status {response.status_code} ({response.text[:200]})")
        return
    broken = _broken_stream(response.text, request) if request.streams else ""
    if broken:
        log.fail(request, f"{broken}: {response.text[-300:]}")
        return
    log.seconds.append(time.monotonic() - since_s)
    log.count(request, str(response.status_code))


def _broken_stream(text: str, request: SoakRequest) -> str:
    """What is wrong with a stream; empty for a good one."""
    if '"server_error"' in text or '"api_error"' in text:
        return "an error in a stream"
    return "" if any(end in text for end in _ENDS[request.kind]) else "a stream without an end"


async def _abort(url: str, log: Log, request: SoakRequest, rng: random.Random) -> None:
    """Disconnect after a moment, or after some bytes of a stream.

    The request has its own connection: a pool of httpx loses connections that are cancelled while
    they are opened.
    """
    try:
        async with httpx.AsyncClient(base_url=url, timeout=120, headers=JSON) as client:
            async with asyncio.timeout(rng.choice([0.0, 0.005, 0.05, 0.3])):
                status = await _read_some(client, request, rng.randrange(2000))
    except TimeoutError:
        status = 200
    except httpx.HTTPError as error:
        log.fail(request, repr(error))
        return
    if status == 200:
        log.count(request, "aborted")
    else:
        log.fail(request, f"status {status}")


async def _read_some(client: httpx.AsyncClient, request: SoakRequest, num_bytes: int) -> int:
    async with client.stream("POST", request.path, content=request.body) as response:
        async for chunk in response.aiter_raw():
            num_bytes -= len(chunk)
            if num_bytes < 0:
                break
        return response.status_code


async def _watch_memory(server: ServerProcess, log: Log) -> None:
    while True:
        log.memory.append((time.monotonic(), server.memory_bytes()))
        await asyncio.sleep(_SAMPLE_EVERY_S)


async def _watch_states(client: httpx.AsyncClient, log: Log) -> None:
    while True:
        models = (await client.get("/v1/models")).json()["data"]
        log.states.update(model["status"]["state"] for model in models)
        await asyncio.sleep(_SAMPLE_EVERY_S)


async def _kill_engines(server: ServerProcess, log: Log, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        engine = server.processes().get("engine")
        if engine is not None and _is_alive(engine):
            os.kill(engine, signal.SIGKILL)
            log.num_killed += 1


async def _settled(client: httpx.AsyncClient, num_killed: int) -> list[str]:
    """Check the health of the server after all clients have finished."""
    until_s = time.monotonic() + _SETTLE_S
    while True:
        health = (await client.get("/health")).json()
        if not health["num_requests"] and not health["num_used_blocks"]:
            break
        if time.monotonic() > until_s:
            return [f"requests or blocks remain: {health}"]
        await asyncio.sleep(0.1)
    if (health["num_restarts"] and not num_killed) or health["status"] != "ok":
        return [f"the engine was restarted or failed: {health}"]
    return []


def _parts(log: Log) -> dict[str, tuple[float, float, float]]:
    """(MiB after warm-up, MiB at the end, MiB a minute) of each process."""
    found = {}
    warm = log.memory[len(log.memory) // 3 :]
    for part in _PARTS:
        line = [(at_s, sizes[part]) for at_s, sizes in warm if sizes.get(part)]
        if len(line) < 8:
            continue
        quarter = len(line) // 4
        early = statistics.median(size for _, size in line[:quarter])
        late = statistics.median(size for _, size in line[-quarter:])
        slope = statistics.linear_regression(*zip(*line, strict=True)).slope
        found[part] = (early / _MIB, late / _MIB, slope * 60 / _MIB)
    return found


def _growth(log: Log, parts: Sequence[str]) -> list[str]:
    return [
        f"the memory of the {part} grew from {early:.0f} to {late:.0f} MiB"
        for part, (early, late, _) in _parts(log).items()
        if part in parts and (late - early) * _MIB > max(_FLAT_BYTES, early * _MIB * _FLAT_FRACTION)
    ]


def _print(log: Log, faults: list[str]) -> None:
    print(f"{'kind':<14}{'outcome':<14}{'requests':>9}")
    for (kind, outcome), count in sorted(log.counts.items()):
        print(f"{kind:<14}{outcome:<14}{count:>9}")
    print(f"{'all':<28}{log.counts.total():>9}")
    if len(log.seconds) > 1:
        cuts = statistics.quantiles(log.seconds, n=100)
        print(f"seconds per complete response: p50 {cuts[49]:.3f}, p99 {cuts[98]:.3f}")
    if log.num_killed:
        print(f"{log.num_killed} engines killed")
    for part, (early, late, slope) in _parts(log).items():
        print(f"memory of the {part}: {early:.0f} to {late:.0f} MiB, {slope:+.2f} MiB a minute")
    print(f"{len(faults)} faults" if faults else "no fault")
    for fault in faults:
        print(f"  {fault}")


if __name__ == "__main__":
    sys.exit(main())
