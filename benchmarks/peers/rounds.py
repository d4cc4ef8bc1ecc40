"""Rounds of a workload: every contestant once a round, in a new random order each time.

Servers of a group stay loaded and are held (SIGSTOP) while it is not their turn, so that a round
takes minutes and the machine's drift meets all alike. `footprint` starts each anew in every round.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.client import fault_of, send_all
from benchmarks.peers.contestants import Contestant, Launch, launch_of
from benchmarks.peers.report import Measured, figures
from benchmarks.peers.servers import PeerServer, ServerFailed
from benchmarks.peers.workloads import PeerRequest, random_requests, size_of

__all__ = ["LoadedServers", "Plan", "measure", "order_of_round"]

# A cold start that takes longer is measured once.
_LONG_START_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a workload's rounds have in common. After `until_s` of the clock no round begins."""

    workload: str
    seed: int
    num_rounds: int
    num_requests: int
    rate: float
    token_ids: Sequence[int]
    logs: Path
    until_s: float = float("inf")

    def requests(self, label: str) -> list[PeerRequest]:
        """The set of a round; every contestant gets the same one."""
        seed = f"{self.seed} {label}"
        return random_requests(self.workload, seed, self.token_ids, self.num_requests, self.rate)

    def launch(self, contestant: Contestant) -> Launch:
        """How a contestant is started for this workload."""
        return launch_of(contestant, self.workload, size_of(self.requests("size")))

    def short(self, label: str) -> PeerRequest:
        """A request that ends a start or wakes a server that was held; never measured."""
        [proof] = random_requests("proof", f"{self.seed} {label}", self.token_ids)
        return PeerRequest(proof.prompt, 2)


class LoadedServers:
    """The servers that are loaded, by contestant. Leave with `close`.

    A server stays from one workload to the next if its command line is the same.
    """

    def __init__(self) -> None:
        self._servers: dict[Contestant, PeerServer] = {}
        self._failed: set[tuple[Contestant, Launch]] = set()

    def load(self, plan: Plan, contestants: Sequence[Contestant]) -> dict[Contestant, PeerServer]:
        """Servers for a workload, all held. One that fails is printed and left out."""
        wanted = {contestant: plan.launch(contestant) for contestant in contestants}
        for one, server in list(self._servers.items()):
            if wanted.get(one) != server.launch:
                self._servers.pop(one).close()
        for one, launch in wanted.items():
            if one not in self._servers and (one, launch) not in self._failed:
                server = PeerServer(one.name, launch, _log(plan, one))
                if _start(server, plan.short("start")):
                    server.hold()
                    self._servers[one] = server
                else:
                    self._failed.add((one, launch))
        return {
            contestant: self._servers[contestant]
            for contestant in wanted
            if contestant in self._servers
        }

    def close(self) -> None:
        """End them all. Idempotent."""
        while self._servers:
            self._servers.popitem()[1].close()


def order_of_round(names: Sequence[str], workload: str, seed: int, number: int) -> list[str]:
    """A permutation that depends on the arguments alone."""
    return random.Random(f"order {workload} {seed} {number}").sample(sorted(names), len(names))


def measure(
    plan: Plan, contestants: Sequence[Contestant], loaded: LoadedServers
) -> tuple[dict[str, Measured], list[str]]:
    """All rounds of a workload, after an unmeasured one of few requests; and their orders."""
    results = {
        contestant.name: Measured(contestant.engine, contestant.precision)
        for contestant in contestants
    }
    if plan.workload == "footprint":
        loaded.close()
        return results, _run_rounds(
            plan, {contestant.name: contestant for contestant in contestants}, results, _start_anew
        )
    servers = {one.name: server for one, server in loaded.load(plan, contestants).items()}
    for contestant in contestants:
        if contestant.name not in servers:
            results[contestant.name].faults[0] = "its server did not start"
    warm = plan.requests("warm")
    for server in servers.values():
        _turn(plan, server, warm[: max(1, len(warm) // 8)], "warm")
    return results, _run_rounds(plan, servers, results, _take_turn)


def _run_rounds(
    plan: Plan,
    contestants: Mapping[str, Any],
    results: Mapping[str, Measured],
    take: Callable[[Plan, Any, Measured, int], None],
) -> list[str]:
    """One call of `take` for every contestant in every round; returns the orders."""
    orders = []
    for number in range(plan.num_rounds):
        if number and time.monotonic() > plan.until_s:
            _say(f"{plan.workload}: the time is up after {number} rounds")
            break
        order = order_of_round(list(contestants), plan.workload, plan.seed, number)
        orders.append(f"round {number + 1}: {', '.join(order)}")
        _say(f"{plan.workload}, {orders[-1]}")
        for name in order:
            take(plan, contestants[name], results[name], number)
            found = results[name].rounds.get(number, results[name].faults.get(number))
            # what an interrupted run has measured is not lost
            _say(json.dumps({"workload": plan.workload, "round": number, name: found}))
    return orders


def _take_turn(plan: Plan, server: PeerServer, measured: Measured, number: int) -> None:
    found = _turn(plan, server, plan.requests(str(number)), str(number))
    if isinstance(found, str):
        measured.faults[number] = found
    else:
        measured.rounds[number] = found


def _turn(
    plan: Plan, server: PeerServer, requests: Sequence[PeerRequest], label: str
) -> dict[str, float] | str:
    """A server's figures, or why its round is invalid. It is held again afterwards."""
    wake = plan.short(f"wake {label}")
    server.resume()
    [awake] = send_all(server.port, server.api, [wake])
    replies = send_all(server.port, server.api, requests)
    memory = server.memory()
    server.hold()
    checked = [(wake, awake), *zip(requests, replies, strict=True)]
    wrong = [fault for one, reply in checked if (fault := fault_of(one, reply)) is not None]
    if wrong:
        return f"{len(wrong)} of {len(checked)} requests, first: {wrong[0]}"
    return {**figures(replies), **memory}


def _start_anew(plan: Plan, contestant: Contestant, measured: Measured, number: int) -> None:
    """From the process's start to its first token; memory after one request of some length."""
    if any(run["cold_start_s"] > _LONG_START_S for run in measured.rounds.values()):
        return
    server = PeerServer(contestant.name, plan.launch(contestant), _log(plan, contestant))
    if not _start(server, plan.short(f"start {number}")):
        measured.faults[number] = "its server did not start"
        return
    found = _turn(plan, server, plan.requests(str(number)), str(number))
    server.close()
    if isinstance(found, str):
        measured.faults[number] = found
    else:
        measured.rounds[number] = {**found, "cold_start_s": server.cold_start_s}


def _start(server: PeerServer, first: PeerRequest) -> bool:
    """Whether it runs; why not is printed."""
    try:
        server.start(first)
    except ServerFailed as error:
        _say(f"left out: {error}")
        return False
    return True


def _log(plan: Plan, contestant: Contestant) -> Path:
    plan.logs.mkdir(parents=True, exist_ok=True)
    return plan.logs / f"{contestant.name.replace(' ', '-')}-{plan.workload}.log"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
