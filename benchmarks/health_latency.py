"""`python -m benchmarks.health_latency`: how long `/health` takes while 4 MiB prompts are read.

One client sends prompts of nearly the largest body, as text and as a conversation, one after
another; another asks for `/health` all the time, over one connection. Prints its quantiles idle and
under that load.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import httpx

from quickstep.bench.server_process import ServerProcess

_TEXT = "def chain(*iterables):\n    for it in iterables:\n        yield from it\n\n"
_JSON = {"content-type": "application/json"}
_TOO_LONG = "context_length_exceeded"
_NUM_CHARS = 4 * 2**20 * 9 // 10
_LONG = _TEXT * (_NUM_CHARS // len(_TEXT))
_BODIES = (
    ("/v1/completions", {"prompt": _LONG}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": _LONG}]}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": _TEXT}] * (_NUM_CHARS // (len(_TEXT) + 40))},
    ),
)


def main() -> int:
    """Measure; exit code 0 if the 99th percentile is below 100 ms."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.health_latency")
    parser.add_argument("--seconds", type=float, default=20.0, help="under load")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    child = ServerProcess([args.model])
    child.start()
    try:
        worst = asyncio.run(_measure(child.url, args.seconds))
    finally:
        child.stop()
    return 0 if worst < 0.1 else 1


async def _measure(url: str, seconds: float) -> float:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await client.get("/health")
        _show("idle", await _asked(client, time.monotonic() + 2))
        p99 = 0.0
        for number, (path, body) in enumerate(_BODIES, 1):
            content = httpx.Request("POST", url, json=body).content
            stop = asyncio.Event()
            sending = asyncio.create_task(_send(url, path, content, stop))
            taken = await _asked(client, time.monotonic() + seconds / len(_BODIES))
            stop.set()
            num_sent = await sending
            p99 = max(p99, _show(f"load {number}: {num_sent} x {path}", taken))
        return p99


async def _send(url: str, path: str, content: bytes, stop: asyncio.Event) -> int:
    """In a thread, so that sending costs the other client little."""
    num_sent = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        while not stop.is_set():
            answer = await asyncio.to_thread(client.post, path, content=content, headers=_JSON)
            if answer.status_code != 400 or answer.json()["error"]["code"] != _TOO_LONG:
                raise RuntimeError(f"a prompt beyond the context was answered with {answer.text}")
            num_sent += 1
    return num_sent


async def _asked(client: httpx.AsyncClient, until_s: float) -> list[float]:
    taken = []
    while time.monotonic() < until_s:
        since_s = time.monotonic()
        (await client.get("/health")).raise_for_status()
        taken.append(time.monotonic() - since_s)
        await asyncio.sleep(0.002)
    return taken


def _show(name: str, taken: list[float]) -> float:
    cuts = statistics.quantiles(taken, n=100)
    print(
        f"{name}: {len(taken)} answers, p50 {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms, "
        f"longest {max(taken) * 1e3:.1f} ms",
        flush=True,
    )
    return cuts[98]


if __name__ == "__main__":
    sys.exit(main())
