"""`python -m benchmarks.soak [--minutes 10]`: a served demo model under mixed load with aborts.

30 % of the requests are left before their answer ends, 5 % are malformed. At the end no KV block
may be in use, memory must have stayed flat, every status was the expected one, the log tells of no
error, and the server stops in order with no process left. Exit code 1 if any of it is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from benchmarks.soak_requests import SURFACES, ParsedBody, drawn, malformed
from benchmarks.storm_attacks import JSON
from quickstep.bench.server_process import ServerProcess

_ABORTED, _MALFORMED = 0.30, 0.05
_SAMPLE_EVERY_S = 1.0
_SETTLE_S = 30.0
# Allocators keep what they once had: growth within this is no leak, over any number of minutes.
_FLAT_SHARE, _FLAT_BYTES = 0.08, 24 * 2**20
_MIB = 2**20
_ENDS = {
    "chat": ("data: [DONE]",),
    "completions": ("data: [DONE]",),
    "messages": ("message_stop",),
    "responses": ("response.completed", "response.incomplete"),
}


@dataclass(slots=True)
class Book:
    """What happened."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def note(self, asked: ParsedBody, answer: str) -> None:
        """An answer of some kind."""
        self.counts[asked.kind, answer] += 1

    def fault(self, asked: ParsedBody, what: str) -> None:
        """Something that must not be."""
        self.note(asked, "WRONG")
        self.wrong.append(f"{what} for {asked.method} {asked.path} {asked.body[:300]!r}")


def main() -> int:
    """Run the soak; print what happened."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    child = ServerProcess([args.model, "--num-blocks", "600", "--max-num-seqs", "32"])
    child.start()
    processes = child.process_ids()
    book = Book()
    faults = []
    try:
        faults += asyncio.run(_soak(child, book, args))
    finally:
        processes = sorted({*processes, *child.process_ids()})
        code = child.stop()
    if code:
        faults.append(f"the server exited with code {code}")
    left = [process_id for process_id in processes if _is_alive(process_id)]
    faults += [f"process {process_id} is left" for process_id in left]
    faults += [f"log: {line}" for line in child.faults()]
    faults += book.wrong[:20]
    faults += _growth(book)
    _print(book, faults)
    return 1 if faults else 0


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def _soak(child: ServerProcess, book: Book, args: argparse.Namespace) -> list[str]:
    limits = httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(
        base_url=child.url, timeout=120, limits=limits, headers=JSON
    ) as client:
        kinds = [kind for kind in SURFACES if await _is_served(client, kind)]
        print(f"soaking {', '.join(kinds)} for {args.minutes:g} minutes", flush=True)
        until_s = time.monotonic() + args.minutes * 60
        watching = asyncio.create_task(_watch_memory(child, book))
        seeds = random.Random(args.seed)
        clients = (
            _client(client, book, random.Random(seeds.random()), kinds, until_s)
            for _ in range(args.clients)
        )
        await asyncio.gather(*clients)
        watching.cancel()
        return await _settled(client)


async def _is_served(client: httpx.AsyncClient, kind: str) -> bool:
    return (await client.post(SURFACES[kind][1], content=b"{}")).status_code != 404


async def _client(
    client: httpx.AsyncClient, book: Book, rng: random.Random, kinds: list[str], until_s: float
) -> None:
    while time.monotonic() < until_s:
        if rng.random() < _MALFORMED:
            await _ask(client, book, malformed(rng))
            continue
        asked = drawn(rng, kinds)
        if rng.random() < _ABORTED / (1 - _MALFORMED):
            await _leave(str(client.base_url), book, asked, rng)
        else:
            await _ask(client, book, asked)


async def _ask(client: httpx.AsyncClient, book: Book, asked: ParsedBody) -> None:
    since_s = time.monotonic()
    try:
        answer = await client.request(
            asked.method, asked.path, content=asked.body, headers=dict(asked.headers)
        )
    except httpx.HTTPError as error:
        if asked.kind != "malformed" or not isinstance(error, httpx.TransportError):
            book.fault(asked, repr(error))
            return
        book.note(asked, type(error).__name__)  # refused while it was still sending
        return
    if answer.status_code not in asked.statuses:
        book.fault(asked, f"status {answer.status_code} ({answer.text[:200]})")
        return
    broken = _broken_stream(answer.text, asked) if asked.streams else ""
    if broken:
        book.fault(asked, f"{broken}: {answer.text[-300:]}")
        return
    book.seconds.append(time.monotonic() - since_s)
    book.note(asked, str(answer.status_code))


def _broken_stream(text: str, asked: ParsedBody) -> str:
    """What is wrong with a stream, "" if nothing is."""
    if '"server_error"' in text or '"api_error"' in text:
        return "an error in a stream"
    return "" if any(end in text for end in _ENDS[asked.kind]) else "a stream without an end"


async def _leave(url: str, book: Book, asked: ParsedBody, rng: random.Random) -> None:
    """Go away after a moment, or after some bytes of a stream, with a connection of its own: a pool
    loses the places of requests that are cancelled while they connect.
    """
    try:
        async with httpx.AsyncClient(base_url=url, timeout=120, headers=JSON) as client:
            async with asyncio.timeout(rng.choice([0.0, 0.005, 0.05, 0.3])):
                status = await _read_some(client, asked, rng.randrange(2000))
    except TimeoutError:
        status = 200
    except httpx.HTTPError as error:
        book.fault(asked, repr(error))
        return
    if status == 200:
        book.note(asked, "left")
    else:
        book.fault(asked, f"status {status}")


async def _read_some(client: httpx.AsyncClient, asked: ParsedBody, num_bytes: int) -> int:
    async with client.stream("POST", asked.path, content=asked.body) as answer:
        async for piece in answer.aiter_raw():
            num_bytes -= len(piece)
            if num_bytes < 0:
                break
        return answer.status_code


async def _watch_memory(child: ServerProcess, book: Book) -> None:
    while True:
        book.memory.append((time.monotonic(), child.memory_bytes()))
        await asyncio.sleep(_SAMPLE_EVERY_S)


async def _settled(client: httpx.AsyncClient) -> list[str]:
    """Faults of what the server says of itself once all clients are gone."""
    until_s = time.monotonic() + _SETTLE_S
    while True:
        health = (await client.get("/health")).json()
        if not health["num_requests"] and not health["num_used_blocks"]:
            break
        if time.monotonic() > until_s:
            return [f"requests or blocks are left: {health}"]
        await asyncio.sleep(0.1)
    if health["num_restarts"] or health["status"] != "ok":
        return [f"the engine did not live through it: {health}"]
    return []


def _parts(book: Book) -> dict[str, tuple[float, float, float]]:
    """(MiB after warm-up, MiB at the end, MiB a minute) of each process."""
    found = {}
    warm = book.memory[len(book.memory) // 3 :]
    for part in ("server", "engine", "grammars"):
        line = [(at_s, sizes[part]) for at_s, sizes in warm if sizes.get(part)]
        if len(line) < 8:
            continue
        quarter = len(line) // 4
        early = statistics.median(size for _, size in line[:quarter])
        late = statistics.median(size for _, size in line[-quarter:])
        slope = statistics.linear_regression(*zip(*line, strict=True)).slope
        found[part] = (early / _MIB, late / _MIB, slope * 60 / _MIB)
    return found


def _growth(book: Book) -> list[str]:
    return [
        f"the memory of the {part} grew from {early:.0f} to {late:.0f} MiB"
        for part, (early, late, _) in _parts(book).items()
        if (late - early) * _MIB > max(_FLAT_BYTES, early * _MIB * _FLAT_SHARE)
    ]


def _print(book: Book, faults: list[str]) -> None:
    print(f"{'kind':<14}{'answer':<14}{'requests':>9}")
    for (kind, answer), count in sorted(book.counts.items()):
        print(f"{kind:<14}{answer:<14}{count:>9}")
    print(f"{'all':<28}{book.counts.total():>9}")
    if len(book.seconds) > 1:
        cuts = statistics.quantiles(book.seconds, n=100)
        print(f"seconds of whole answers: p50 {cuts[49]:.3f}, p99 {cuts[98]:.3f}")
    for part, (early, late, slope) in _parts(book).items():
        print(f"memory of the {part}: {early:.0f} to {late:.0f} MiB, {slope:+.2f} MiB a minute")
    print(f"{len(faults)} faults" if faults else "no fault")
    for fault in faults:
        print(f"  {fault}")


if __name__ == "__main__":
    sys.exit(main())
