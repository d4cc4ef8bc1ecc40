"""w4 and footprint: runs against the engines' own servers, one server at a time.

w4 starts every server once and stops the processes of those whose turn it is not (SIGSTOP): an
idle server can keep cores busy. `footprint` starts each anew in every repeat.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.peers.checkpoints import VOCABULARY
from benchmarks.peers.contestants import Contestant, DriverFailed
from benchmarks.peers.report import show_progress
from benchmarks.peers.servers import SERVERS, PeerServer
from benchmarks.peers.workloads import draw_requests
from quickstep.bench.serve import Objectives, ServedRequest, send_all, serve_figures

__all__ = ["footprint", "under_arrivals"]

Results = dict[str, list[dict[str, float]]]


def under_arrivals(contestants: list[Contestant], args: argparse.Namespace) -> Results:
    """w4 at `--rate`: the figures of `quickstep bench serve`, after one unmeasured round."""
    servers: dict[Contestant, PeerServer] = {}
    try:
        for contestant in _with_servers(contestants):
            server = PeerServer(contestant, _log(contestant, args))
            if _start(server):
                servers[contestant] = server
        return _arrival_rounds(servers, args)
    finally:
        for server in servers.values():
            server.close()


def _arrival_rounds(servers: dict[Contestant, PeerServer], args: argparse.Namespace) -> Results:
    results: Results = {contestant.name: [] for contestant in servers}
    for repeat in range(-1, args.repeats):
        for contestant, server in servers.items():
            found = _arrivals(server, repeat, args)
            if repeat >= 0:
                results[contestant.name].append(found)
        show_progress("w4", repeat, results)
    return results


def footprint(contestants: list[Contestant], args: argparse.Namespace) -> Results:
    """From the process's start to the first token, and its peak memory by then."""
    results: Results = {one.name: [] for one in _with_servers(contestants)}
    for repeat in range(args.repeats):
        for contestant in _with_servers(contestants):
            server = PeerServer(contestant, _log(contestant, args))
            if _start(server):
                figures = {"cold_start_s": server.cold_start_s, "rss_gb": server.rss_bytes / 1e9}
                results[contestant.name].append(figures)
                server.close()
        show_progress("footprint", repeat, results)
    return results


def _with_servers(contestants: list[Contestant]) -> list[Contestant]:
    return [one for one in contestants if one.engine in SERVERS]


def _log(contestant: Contestant, args: argparse.Namespace) -> Path:
    name = f"{contestant.name.replace(' ', '-')}-server.log"
    return Path(args.cache / name)


def _start(server: PeerServer) -> bool:
    """Whether it serves, and holds it until its turn; who does not is left out, and why printed."""
    try:
        server.start()
    except DriverFailed as error:
        print(f"left out: {error}", file=sys.stderr)
        return False
    server.hold()
    return True


def _arrivals(server: PeerServer, repeat: int, args: argparse.Namespace) -> dict[str, float]:
    assert server.target is not None
    count = args.requests if repeat >= 0 else max(4, args.requests // 8)
    drawn = draw_requests("w4", args.seed * 1000 + repeat, VOCABULARY, args.rate, count)
    requests = [ServedRequest(one.prompt, one.num_outputs, one.at_s) for one in drawn]
    server.let_run()
    found = serve_figures(send_all(server.target, requests), Objectives())
    server.hold()
    return {**found, "rss_gb": server.rss_bytes / 1e9}
