"""The chaos run: quiet answers first, then load without faults, then load with faults, then checks.

`Run` owns the clients and what they saw. What was broken is in `broken`, a sentence each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec.structs import replace

from benchmarks.chaos.answers import read_answer
from benchmarks.chaos.faults import Fault, Meeting, break_at_random, load_adapter, operate
from benchmarks.chaos.requests import (
    ADAPTERS,
    ChaosRequest,
    Manner,
    Outcome,
    hostile,
    pool,
    send,
    texts_begin,
)
from benchmarks.chaos.sites import OVERTAKE_S
from benchmarks.chaos.world import ADMIN, CLIENT_KEYS, NEIGHBOUR, PATIENCE_S, Held, World
from quickstep.bench.serve import percentile
from quickstep.engine.records.step_log import SequenceRecord
from quickstep.server.usage.price_book import sequence_usage

__all__ = ["Effort", "Run", "overlap_s"]

MARGIN_S = 1.0  # after a deadline
_EARLY_S = 0.05  # before a deadline, at which a time limit may be noticed
_AFTER_S = 3.0  # after a fault's end, what it may still cause
_QUIET_TIMEOUT_S = 60.0
_LAG_S = 0.1  # of this process's own event loop, from which it counts
_SETTLE_S = 40.0
_BATCH_S = 60.0
_MOST_GAP_RATIO = 3.0
_NEIGHBOUR_TOKENS = 300
# Between two answers of a model (0062): a turn, a drain and a loading for each of the others.
_MOST_TURN_S = 2 * (OVERTAKE_S + PATIENCE_S + 4.0)


Gap = tuple[float, float]  # begin and end


class Effort(msgspec.Struct, frozen=True):
    """How long, with what seed, how many clients, how often a fault, and how many requests."""

    seconds: float
    seed: int
    num_clients: int
    every_s: float
    num_requests: int
    is_timed: bool = True  # deadlines and gaps are judged


class Run:
    """One run against a server that is open."""

    def __init__(self, world: World, faults: list[Fault], effort: Effort) -> None:
        self.world = world
        self.faults = faults
        self.effort = effort
        self.meetings: list[Meeting] = []
        self.outcomes: list[Outcome] = []
        self.broken: list[str] = []
        self.blamed: Counter[str] = Counter()  # broken promises of requests by fault
        self.facts: list[str] = []
        self.quiet_gaps: list[Gap] = []
        self.gaps: list[Gap] = []
        self._pool = pool(effort.seed, effort.num_requests, world.site.models)
        self._expected: list[Outcome] = []
        self._lags: list[tuple[float, float]] = []
        self._records: list[SequenceRecord] = []
        self._num_lost_records = 0
        self._num_sent = 0

    # -- the run ----------------------------------------------------------------------------------

    async def all(self) -> None:
        """Everything that needs the server."""
        await self._load_adapters()
        following = asyncio.create_task(self._follow())
        watching = asyncio.create_task(self._watch_lag())
        self._expected = await self._quiet()
        print(f"{len(self._expected)} quiet answers", flush=True)
        seconds = self.effort.seconds
        await self._open_all()
        self.quiet_gaps = await self._load(max(3.0, seconds / 10))
        await self._unload()
        await self._settled()
        before, before_memory = Held(self.world), self.world.server.memory_bytes()
        self.outcomes.clear()
        breaking = [
            break_at_random(
                self.world,
                self.faults,
                random.Random(f"{self.effort.seed} {lane}"),
                time.monotonic() + seconds,
                2 * self.effort.every_s,
                self.meetings,
            )
            for lane in range(2)
        ]
        self.gaps = await self._load(seconds, breaking)
        print(f"{len(self.outcomes)} requests, {len(self.meetings)} faults", flush=True)
        await self._load_adapters()
        health = await self._settled()
        await self._check_again()
        await self._unload()
        await self._settled()
        await self._nothing_left(before)
        memory = self.world.server.memory_bytes()
        for when, held in (("before", before), ("at the end", Held(self.world))):
            self.facts.append(f"held {when}: {held}")
        self.facts += [
            f"memory of the {name}: {before_memory[name] >> 20} to {memory[name] >> 20} MiB"
            for name in ("server", "engine")
            if name in before_memory and name in memory
        ]
        self.facts.append(
            f"{health['num_restarts']} restarts of engines, {health['num_moved_requests']} moves"
        )
        num_read = -1
        while num_read != len(self._records):  # the last ones are on their way
            num_read = len(self._records)
            await asyncio.sleep(1.0)
        for task in (following, watching):
            task.cancel()
        await asyncio.gather(following, watching, return_exceptions=True)

    async def _load_adapters(self) -> None:
        for name in ADAPTERS:
            if not await load_adapter(self.world, name):
                self.broken.append(f"the adapter {name} could not be loaded")

    async def _quiet(self) -> list[Outcome]:
        """The answers of the pool on a server that does nothing else."""
        async with self._client(CLIENT_KEYS[0]) as client:
            # by model: there is no room for all of them
            by_model = sorted(self._pool, key=lambda request: request.model)
            found = [
                await send(client, _patient(request), f"quiet-{request.number:05d}")
                for request in by_model
            ]
        found.sort(key=lambda outcome: outcome.request.number)
        for outcome in found:
            if outcome.end != "answer":
                self.broken.append(f"quiet: {_described(outcome)}")
        return found

    def _client(self, key: str, is_far: bool = False) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.world.far_url if is_far else self.world.server.url,
            headers={"authorization": f"Bearer {key}"},
            timeout=None,
        )

    async def _open_all(self) -> None:
        """Have the server start what it starts when it is first needed."""
        text = json.dumps({"prompt": "word " * 20_000}).encode()
        request = ChaosRequest("tokenize", "/tokenize", text, False, _QUIET_TIMEOUT_S)
        async with self._client(CLIENT_KEYS[0]) as client:
            await asyncio.gather(*(send(client, request, self._next_id()) for _ in range(16)))

    async def _load(self, seconds: float, others: Iterable[Awaitable[None]] = ()) -> list[Gap]:
        """Clients for so long, together with others. Returns the gaps of the neighbour."""
        until_s = time.monotonic() + seconds
        gaps: list[Gap] = []
        await asyncio.gather(
            *(self._one_client(number, until_s) for number in range(self.effort.num_clients)),
            self._neighbour(until_s, gaps),
            self._batches(until_s),
            *others,
        )
        return gaps

    def _next_id(self) -> str:
        self._num_sent += 1
        return f"chaos-{self._num_sent:07d}"

    async def _one_client(self, number: int, until_s: float) -> None:
        """One request after the other; every fourth client is connected by the cable."""
        rng = random.Random(f"{self.effort.seed} {number} {self._num_sent}")
        is_far = number % 4 == 3
        key = CLIENT_KEYS[number % len(CLIENT_KEYS)]
        client = self._client(key, is_far)
        try:
            while time.monotonic() < until_s:
                form = rng.random()
                request = hostile(rng) if form < 0.08 else rng.choice(self._pool)
                manner: Manner = "reads"
                if 0.08 <= form < 0.2:
                    manner = "leaves"
                elif 0.2 <= form < 0.28:
                    manner = "reads slowly"
                outcome = await send(client, request, self._next_id(), manner, rng)
                outcome.is_far = is_far
                self.outcomes.append(outcome)
                if outcome.end in ("cut", "hung", "left"):
                    await client.aclose()
                    client = self._client(key, is_far)
                    await asyncio.sleep(0.05)
                elif outcome.end == "error":
                    await asyncio.sleep(0.1)  # as a client that tries again
        finally:
            await client.aclose()

    async def _neighbour(self, until_s: float, gaps: list[Gap]) -> None:
        """One stream after the other, with a key of its own."""
        body = {
            "prompt": "import os\n",
            "max_tokens": _NEIGHBOUR_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "speculation": False,  # a token per step, so that gaps are those between steps
            "stream": True,
            "timeout_s": _QUIET_TIMEOUT_S,
        }
        headers = {**NEIGHBOUR, "content-type": "application/json"}
        async with httpx.AsyncClient(base_url=self.world.server.url, headers=headers) as client:
            while time.monotonic() < until_s:
                last_s = None
                try:
                    async with client.stream(
                        "POST", "/v1/completions", json=body, timeout=_QUIET_TIMEOUT_S
                    ) as response:
                        async for line in response.aiter_lines():
                            if line.startswith("data: {"):
                                now = time.monotonic()
                                if last_s is not None:
                                    gaps.append((last_s, now))
                                last_s = now
                except httpx.HTTPError:  # a connection that a fault took
                    await asyncio.sleep(0.1)

    async def _batches(self, until_s: float) -> None:
        """One batch after the other, of completions of the pool."""
        rng = random.Random(f"{self.effort.seed} batches {self._num_sent}")
        lines = [request for request in self._pool if request.kind == "completions"]
        while time.monotonic() < until_s:
            chosen = rng.sample(lines, min(4, len(lines)))
            request = ChaosRequest("batch", "/v1/batches", b"", False, _BATCH_S)
            outcome = Outcome(request, self._next_id(), time.monotonic())
            try:
                async with asyncio.timeout(_BATCH_S + PATIENCE_S):
                    async with self._client(CLIENT_KEYS[0]) as client:
                        await self._one_batch(client, chosen, outcome)
            except TimeoutError:
                outcome.end, outcome.reason = "hung", "the batch has not ended"
            except httpx.HTTPError as error:
                outcome.end, outcome.reason = "cut", type(error).__name__
            outcome.end_s = time.monotonic()
            self.outcomes.append(outcome)
            await asyncio.sleep(0.2)

    async def _one_batch(
        self, client: httpx.AsyncClient, chosen: list[ChaosRequest], outcome: Outcome
    ) -> None:
        """Upload, run, compare, and delete the files of one batch."""
        content = b"".join(
            json.dumps(
                {
                    "custom_id": str(request.number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": _without_stream(request),
                }
            ).encode()
            + b"\n"
            for request in chosen
        )
        files: list[str] = []
        try:
            found = await client.post(
                "/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"}
            )
            if not _is_good(found, outcome):
                return
            files.append(found.json()["id"])
            fields = {
                "input_file_id": files[0],
                "endpoint": "/v1/completions",
                "completion_window": "1m",
            }
            found = await client.post("/v1/batches", json=fields)
            if not _is_good(found, outcome):
                return
            batch = found.json()
            while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
                await asyncio.sleep(0.1)
                found = await client.get(f"/v1/batches/{batch['id']}")
                if not _is_good(found, outcome):
                    return
                batch = found.json()
            files += filter(None, (batch.get("output_file_id"), batch.get("error_file_id")))
            if batch["status"] != "completed":
                listed = (batch.get("errors") or {}).get("data") or [{}]
                outcome.end = "error" if listed[0].get("message") else "unexplained"
                outcome.reason = f"a batch {batch['status']}: {listed[0].get('message')}"
                return
            outcome.end = "answer"
            if batch["request_counts"]["total"] != len(chosen):
                outcome.end, outcome.reason = "unexplained", f"lines are missing: {batch}"
            if output_id := batch.get("output_file_id"):
                found = await client.get(f"/v1/files/{output_id}/content")
                if _is_good(found, outcome) and (wrong := self._other_lines(found.text)):
                    outcome.end, outcome.reason = "unexplained", f"lines with other bits: {wrong}"
        finally:
            for name in files:
                with suppress(httpx.HTTPError):
                    await client.delete(f"/v1/files/{name}")

    def _other_lines(self, output: str) -> list[str]:
        """The ids of a batch's answers whose choices are not those of the quiet server."""
        wrong = []
        for line in map(json.loads, output.splitlines()):
            expected = self._expected[int(line["custom_id"])].answer
            body = json.dumps(line["response"]["body"]).encode()
            found = read_answer("completions", streams=False, body=body)
            if found.content[0] != expected.content[0]:  # the rest is usage, which not all ask for
                wrong.append(line["custom_id"])
        return wrong

    async def _follow(self) -> None:
        """Collect the records of sequences, as long as the server lives."""
        async with httpx.AsyncClient(
            base_url=self.world.server.url, headers=ADMIN, timeout=None
        ) as client:
            query = {"last_s": "0", "follow": "true"}
            async with client.stream("GET", "/debug/steps", params=query) as response:
                async for line in response.aiter_lines():
                    if '"kind":"sequence"' in line:
                        self._records.append(msgspec.json.decode(line, type=SequenceRecord))
                    elif '"kind":"lost"' in line:
                        self._num_lost_records += json.loads(line)["num_records"]

    async def _watch_lag(self) -> None:
        while True:
            since_s = time.monotonic()
            await asyncio.sleep(0.02)
            if (now := time.monotonic()) - since_s > _LAG_S:
                self._lags.append((since_s, now))

    async def _unload(self) -> None:
        """Of several models, have the first in memory and no other, so that what is held at two
        times can be compared.
        """
        first, *others = self.world.site.models or ("",)
        for name in others:  # the first leaves, or is one of two
            await operate(self.world, "/v1/models/load", {"model": name})
        if others:
            await operate(self.world, "/v1/models/load", {"model": first})
            await operate(self.world, "/v1/models/unload", {"model": others[-1]})
        until_s = time.monotonic() + _SETTLE_S
        while self.world.site.models and time.monotonic() < until_s:
            states = self.world.health().get("models")
            if isinstance(states, dict) and list(states.values()).count("ready") == 1:
                return
            await asyncio.sleep(0.1)

    # -- at the end -------------------------------------------------------------------------------

    async def _settled(self) -> dict[str, Any]:
        """Wait until nothing runs and every replica serves."""
        until_s = time.monotonic() + _SETTLE_S
        async with httpx.AsyncClient(base_url=self.world.server.url, timeout=20.0) as client:
            while True:
                health: dict[str, Any] = (await client.get("/health")).json()
                is_up = all(replica["state"] == "up" for replica in health["replicas"])
                # of several models, the first is in memory (`_unload`)
                is_up &= set(health.get("models", {}).values()) <= {"ready", "asleep", "absent"}
                held = health["num_requests"] or health["num_used_blocks"]
                if is_up and not held and health["status"] == "ok":
                    return health
                if time.monotonic() > until_s:
                    self.broken.append(f"the server is not as before: {health}")
                    return health
                await asyncio.sleep(0.1)

    async def _check_again(self) -> None:
        """Every request of the pool, after all faults."""
        async with self._client(CLIENT_KEYS[0]) as client:
            pairs = zip(self._pool, self._expected, strict=True)
            for request, expected in sorted(pairs, key=lambda pair: pair[0].model):
                outcome = await send(client, _patient(request), self._next_id())
                if outcome.end != "answer" or outcome.answer.content != expected.answer.content:
                    self.broken.append(f"after all faults: {_described(outcome)}")

    async def _nothing_left(self, before: Held) -> None:
        """Compare what is held, for some seconds: connections close in their time."""
        for _ in range(75):
            left = Held(self.world).above(before)
            if not left:
                return
            await asyncio.sleep(0.2)
        self.broken += [f"{name}: {what}" for name, what in left.items()]

    def after(self, status: int, left: list[str]) -> None:
        """Judge what was collected, once the server has ended."""
        if status or left:
            self.broken.append(f"the server's exit status is {status}, left: {left}")
        for line in self.world.log():
            if "was never retrieved" in line or "Exception in callback" in line:
                self.broken.append(f"in the log: {line.strip()}")
        self._check_turns()
        for outcome in self.outcomes:
            if fault := self._fault_of(outcome):
                names = [meeting.fault.name for meeting in self.meetings_of(outcome)]
                self.blamed.update(names)
                met = f" (met: {', '.join(names)})" if names else ""
                self.broken.append(f"{fault}: {_described(outcome)}{met}")
        self._compare_ledger()
        self._compare_gaps()

    def _check_turns(self) -> None:
        """Of several models, each has answered again and again."""
        for model in self.world.site.models:
            ends = sorted(
                outcome.end_s
                for outcome in self.outcomes
                if outcome.request.model == model and outcome.end == "answer"
            )
            longest_s = max((b - a for a, b in itertools.pairwise(ends)), default=0.0)
            self.facts.append(
                f"model {model}: {len(ends)} answers, at most {longest_s:.1f} s apart"
            )
            if self.effort.is_timed and (not ends or longest_s > _MOST_TURN_S):
                self.broken.append(f"the model {model} had no answer for {longest_s:.1f} s")

    def meetings_of(self, outcome: Outcome) -> list[Meeting]:
        """The faults that were there, or had just been, while a request ran."""
        return [
            meeting
            for meeting in self.meetings
            if meeting.begin_s <= outcome.end_s and outcome.begin_s <= meeting.end_s + _AFTER_S
        ]

    def _fault_of(self, outcome: Outcome) -> str:
        """Which promise an outcome breaks, "" for none."""
        met = [meeting.fault for meeting in self.meetings_of(outcome)]
        request, took_s = outcome.request, outcome.end_s - outcome.begin_s
        if outcome.end in ("hung", "unexplained"):
            return outcome.end
        if outcome.end == "cut" and not any(fault.cuts for fault in met):
            return "no answer"
        if outcome.end == "error" and not any(fault.explains(outcome) for fault in met):
            return "an error that no fault explains"
        limit_s = request.timeout_s + MARGIN_S + self._allowed_s(outcome)
        if self.effort.is_timed and took_s > limit_s:
            return f"{took_s:.2f} s, of at most {limit_s:.2f}"
        if request.number < 0:
            return ""
        expected = self._expected[request.number].answer
        if outcome.end == "answer" and outcome.answer.content != expected.content:
            return "other bits"
        if outcome.end == "timeout":
            if took_s < request.timeout_s - _EARLY_S:
                return f"a time limit after {took_s:.2f} s"
            if not texts_begin(outcome.answer.texts, expected.texts):
                return "a partial text that is no beginning"
        return ""

    def _allowed_s(self, outcome: Outcome) -> float:
        """What faults, and this process, took of a request's time."""
        taken = list(self._lags)
        for meeting in self.meetings:
            holds = meeting.fault.holds
            is_held = holds == "all" or (holds == "far" and outcome.is_far)
            if is_held or (holds == "new" and outcome.begin_s <= meeting.end_s):
                taken.append((meeting.begin_s, meeting.end_s))
        return outcome.paused_s + overlap_s(taken, outcome.begin_s, outcome.end_s)

    def _compare_gaps(self) -> None:
        if not self.quiet_gaps or not self.gaps:
            self.broken.append("the neighbour's streams had no tokens")
        cuts = [meeting for meeting in self.meetings if meeting.fault.delays]
        quiet = [end - begin for begin, end in self.quiet_gaps]
        gaps = [
            end - begin
            for begin, end in self.gaps
            if not any(cut.begin_s <= end and begin <= cut.end_s + _AFTER_S for cut in cuts)
        ]
        quiet_s, chaos_s = percentile(quiet, 0.99), percentile(gaps, 0.99)
        ratio = chaos_s / quiet_s if quiet_s else float("inf")
        self.facts.append(
            f"gaps of a neighbour's stream, without and with faults: {len(quiet)} and "
            f"{len(gaps)}, p99 {1e3 * quiet_s:.1f} and {1e3 * chaos_s:.1f} ms "
            f"({ratio:.2f} times), longest {1e3 * max(quiet, default=0):.0f} and "
            f"{1e3 * max(gaps, default=0):.0f} ms"
            + f"; {len(self.gaps) - len(gaps)} while a network was cut"
            * bool(cuts)
        )
        if self.effort.is_timed and ratio > _MOST_GAP_RATIO:
            self.broken.append(f"the neighbour's p99 gap is {ratio:.2f} times that without faults")

    def _compare_ledger(self) -> None:
        """The ledger against the step log, and against what clients were told."""
        rows = _ledger_rows(self.world.ledger)
        in_ledger: Counter[tuple[Any, ...]] = Counter(row[:8] for row in rows)
        in_log: Counter[tuple[Any, ...]] = Counter(map(_row_of, self._records))
        missing, extra = in_log - in_ledger, in_ledger - in_log
        self.facts.append(
            f"ledger: {len(rows)} rows, {sum(row[5] for row in rows)} output tokens, "
            f"{sum(row[7] for row in rows) / 1e9:.3f} s on the device; step log: "
            f"{len(self._records)} sequences, {self._num_lost_records} records lost by its reader"
        )
        if missing:
            self.broken.append(f"{missing.total()} records are not in the ledger: {_some(missing)}")
        if extra.total() > self._num_lost_records:
            self.broken.append(f"{extra.total()} rows are in no record: {_some(extra)}")
        by_request: Counter[str] = Counter()
        for row in rows:
            by_request[row[0][: len("chaos-0000000")]] += row[5]
        for outcome in self.outcomes:
            said = outcome.answer.num_outputs
            if outcome.end == "answer" and said is not None:
                charged = by_request[outcome.request_id]
                if charged != said:
                    self.broken.append(
                        f"{charged} output tokens in the ledger: {_described(outcome)}, "
                        f"which said {said}"
                    )


def _patient(request: ChaosRequest) -> ChaosRequest:
    body = json.loads(request.body)
    if "timeout_s" in body:
        body["timeout_s"] = _QUIET_TIMEOUT_S
    return replace(request, body=json.dumps(body).encode(), timeout_s=_QUIET_TIMEOUT_S)


def _without_stream(request: ChaosRequest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request.body)
    for name in ("stream", "stream_options", "timeout_s"):
        body.pop(name, None)
    return body


def _is_good(response: httpx.Response, outcome: Outcome) -> bool:
    """Whether a step of a batch was answered; its error is the outcome's otherwise."""
    if response.status_code == 200:
        return True
    with suppress(ValueError, KeyError, TypeError):
        outcome.end = "error"
        outcome.reason = f"{response.status_code} {response.json()['error']['message']}"
        return False
    outcome.end, outcome.reason = "unexplained", f"{response.status_code} {response.text[:200]}"
    return False


def _described(outcome: Outcome) -> str:
    request = outcome.request
    reason = f", {outcome.reason[:300]}" if outcome.reason else ""
    return (
        f"{outcome.request_id} {request.kind} {request.number} after "
        f"{outcome.end_s - outcome.begin_s:.2f} s: {outcome.end}{reason}"
    )


def overlap_s(intervals: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """How much of a time is in the union of intervals."""
    total_s, reached_s = 0.0, begin_s
    for first, last in sorted(intervals):
        first, last = max(first, reached_s), min(last, end_s)
        if last > first:
            total_s, reached_s = total_s + last - first, last
    return total_s


def _some(counts: Counter[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list(counts)[:3]


_COLUMNS = (
    "request_id, sequence_index, finish_reason, num_prompt_tokens, num_cached_tokens, "
    "num_output_tokens, adapter, device_ns"
)


def _row_of(record: SequenceRecord) -> tuple[Any, ...]:
    """What the ledger has to have of a sequence."""
    pays_prompt = record.index == 0 and not record.is_continuation
    usage = sequence_usage(record.finish_reason, record.timings, pays_prompt)
    return (
        record.request_id,
        record.index,
        record.finish_reason.value,
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        usage.num_output_tokens,
        record.adapter,
        round(record.timings.device_s * 1e9),
    )


def _ledger_rows(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT {_COLUMNS} FROM sequences").fetchall()
