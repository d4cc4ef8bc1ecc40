"""`python -m benchmarks.kills`: engines are killed under streams, and no stream may differ.

Streams of every kind (sampled, `n`, schemas, stop strings, log-probabilities, penalties, tools) run
against `quickstep serve` without a break, while an engine's process, or another rank of one, is
killed every few seconds. Each answer is compared with that of a quiet server. The exit code is 1 if
one differs or fails, if a block is in use at the end, or if a process is left.

    --replicas 3 --ranks 1 --streams 50 --seconds 60 --every 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import describe_machine
from quickstep.bench.server_process import ServerProcess

_TEXT = "def first(a):\n    return a\n\ndef second(a):\n"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "ignore_eos": True, "max_tokens": 200},
    {"temperature": 0.8, "n": 2, "max_tokens": 120, "ignore_eos": True},
    {"temperature": 1.0, "max_tokens": 80, "structured_outputs": {"json": _SCHEMA}},
    {"temperature": 0.7, "max_tokens": 150, "stop": ["return", "\n\n"], "logprobs": 2},
    {"temperature": 0.9, "max_tokens": 150, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"temperature": 0.0, "max_tokens": 150, "ignore_eos": True, "min_tokens": 100},
)
_NUM_BODIES = 24


def _bodies() -> list[dict[str, Any]]:
    """Requests of every kind, each with a seed of its own."""
    return [
        {
            **_KINDS[number % len(_KINDS)],
            "prompt": _TEXT * (1 + number % 4),
            "seed": number,
            "stream": True,
        }
        for number in range(_NUM_BODIES)
    ]


async def _answer(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Texts, ends and log-probabilities of a stream; raises RuntimeError for a failed one."""
    parts: dict[int, list[Any]] = {}
    is_over = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_over = True
                break
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            for choice in chunk["choices"]:
                found = parts.setdefault(choice["index"], ["", [], None])
                found[0] += choice["text"]
                found[1] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                found[2] = choice["finish_reason"] or found[2]
    if not is_over:
        raise RuntimeError("the stream was cut")
    return json.dumps(parts, sort_keys=True)


def _victims(server: ServerProcess) -> list[int]:
    """The processes of engines and of other ranks, without their children that are about to run
    another command: a grammar's process would be killed instead of an engine's.
    """
    commands: dict[int, bytes] = {}
    parents: dict[int, int] = {}
    for process_id in server.process_ids():
        folder = Path(f"/proc/{process_id}")
        try:
            commands[process_id] = (folder / "cmdline").read_bytes()
            parents[process_id] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return [
        process_id
        for process_id, command in commands.items()
        if b"engine.remote.worker" in command or b"engine.ranks.worker" in command
        if commands.get(parents.get(process_id, 0)) != command
    ]


class _Run:
    """Streams against one server, while its engines are killed."""

    def __init__(self, args: argparse.Namespace, expected: list[str]) -> None:
        self._args = args
        self._expected = expected
        self._bodies = _bodies()
        self._end_s = time.monotonic() + args.seconds
        self.outcomes: Counter[str] = Counter()
        self.num_kills = 0

    async def streams(self, client: httpx.AsyncClient, seed: int) -> None:
        """One client, which sends one request after another."""
        rng = random.Random(seed)
        while time.monotonic() < self._end_s:
            number = rng.randrange(_NUM_BODIES)
            try:
                answer = await _answer(client, self._bodies[number])
            except RuntimeError as error:
                self.outcomes[f"FAILED: {error}"] += 1
            except httpx.HTTPError as error:
                self.outcomes[f"FAILED: {type(error).__name__}"] += 1
            else:
                same = answer == self._expected[number]
                self.outcomes["same" if same else "DIFFERENT"] += 1

    async def kill(self, server: ServerProcess) -> None:
        """Kill a process of the server's every few seconds."""
        rng = random.Random(0)
        while time.monotonic() + self._args.every < self._end_s:
            await asyncio.sleep(self._args.every)
            victims = _victims(server)
            if victims:
                os.kill(rng.choice(victims), signal.SIGKILL)
                self.num_kills += 1


async def _expected(url: str) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return [await _answer(client, body) for body in _bodies()]


async def _run(run: _Run, server: ServerProcess, num_streams: int) -> dict[str, Any]:
    """The server's health when all streams have ended."""
    limits = httpx.Limits(max_connections=num_streams + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        killer = asyncio.create_task(run.kill(server))
        await asyncio.gather(*(run.streams(client, seed) for seed in range(num_streams)))
        await killer
        for _ in range(100):
            health: dict[str, Any] = (await client.get("/health")).json()
            if health["status"] == "ok" and not health["num_used_blocks"]:
                break
            await asyncio.sleep(0.2)
        return health


def main() -> int:
    """Print what the streams got; 1 if one was not that of the quiet server."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0)
    args = parser.parse_args()
    print(describe_machine())
    quiet = ServerProcess([args.model])
    quiet.start()
    expected = asyncio.run(_expected(quiet.url))
    quiet.stop()
    flags = ("-dp", str(args.replicas), "-tp", str(args.ranks))
    server = ServerProcess([args.model, *flags, "--max-moves", "100", "--max-engine-deaths", "100"])
    server.start()
    run = _Run(args, expected)
    health = asyncio.run(_run(run, server, args.streams))
    process_ids = server.process_ids()
    status = server.stop()
    left = [number for number in process_ids if Path(f"/proc/{number}").exists()]
    print(
        f"{args.replicas} replicas of {args.ranks} ranks, {args.streams} streams, "
        f"{args.seconds:g} s: {run.num_kills} kills, {health['num_moved_requests']} moves"
    )
    print("  ".join(f"{outcome}: {count}" for outcome, count in sorted(run.outcomes.items())))
    blocks = health["num_used_blocks"]
    print(f"exit status {status}, {blocks} blocks in use, {len(left)} processes left")
    is_clean = set(run.outcomes) == {"same"} and not (status or blocks or left)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
