"""`python -m benchmarks.health_latency`: latency of `/health` while 4 MiB prompts are read.

One client sends prompts of nearly the largest body, as text and as a conversation; another requests
`/health` repeatedly on one connection. Prints the latency's quantiles, idle and under that load.
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
    """Measure. Returns exit code 0 if the 99th percentile is below 100 ms."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.health_latency")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the load")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    server = ServerProcess([args.model])
    server.start()
    try:
        worst = asyncio.run(_measure(server.url, args.seconds))
    finally:
        server.stop()
    return 0 if worst < 0.1 else 1


async def _measure(url: str, seconds: float) -> float:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await client.get("/health")
        _report("idle", await _latencies(client, time.monotonic() + 2))
        p99 = 0.0
        for number, (path, body) in enumerate(_BODIES, 1):
            content = httpx.Request("POST", url, json=body).content
            stop = asyncio.Event()
            sending = asyncio.create_task(_send(url, path, content, stop))
            latencies_s = await _latencies(client, time.monotonic() + seconds / len(_BODIES))
            stop.set()
            num_sent = await sending
            p99 = max(p99, _report(f"load {number}: {num_sent} x {path}", latencies_s))
        return p99


async def _send(url: str, path: str, content: bytes, stop: asyncio.Event) -> int:
    """Send in a thread, so that the other client is not delayed."""
    num_sent = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        while not stop.is_set():
            response = await asyncio.to_thread(client.post, path, content=content, headers=_JSON)
            if response.status_code != 400 or response.json()["error"]["code"] != _TOO_LONG:
                raise RuntimeError(f"a prompt beyond the context was answered with {response.text}")
            num_sent += 1
    return num_sent


async def _latencies(client: httpx.AsyncClient, until_s: float) -> list[float]:
    latencies_s = []
    while time.monotonic() < until_s:
        started_s = time.monotonic()
        (await client.get("/health")).raise_for_status()
        latencies_s.append(time.monotonic() - started_s)
        await asyncio.sleep(0.002)
    return latencies_s


def _report(name: str, latencies_s: list[float]) -> float:
    cuts = statistics.quantiles(latencies_s, n=100)
    print(
        f"{name}: {len(latencies_s)} responses, p50 {cuts[49] * 1e3:.1f} ms, "
        f"p99 {cuts[98] * 1e3:.1f} ms, longest {max(latencies_s) * 1e3:.1f} ms",
        flush=True,
    )
    return cuts[98]


if __name__ == "__main__":
    sys.exit(main())
