"""w4 and footprint: runs against the engines' own servers, one server at a time.

An idle server can keep cores busy, so none waits beside another: a repeat starts each in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks.peers.checkpoints import VOCABULARY
from benchmarks.peers.contestants import Contestant, DriverFailed
from benchmarks.peers.servers import SERVERS, PeerServer
from benchmarks.peers.workloads import draw_requests
from quickstep.bench.serve import Objectives, ServedRequest, send_all, serve_figures
from quickstep.errors import EngineError

__all__ = ["footprint", "under_arrivals"]

Results = dict[str, list[dict[str, float]]]


def under_arrivals(contestants: list[Contestant], args: argparse.Namespace) -> Results:
    """w4 at `--rate`: the figures of `quickstep bench serve`."""

    def measure(server: PeerServer, repeat: int) -> dict[str, float]:
        assert server.target is not None
        seed = args.seed * 1000 + repeat
        drawn = draw_requests("w4", seed, VOCABULARY, args.rate, args.requests)
        requests = [ServedRequest(one.prompt, one.num_outputs, one.at_s) for one in drawn]
        found = serve_figures(send_all(server.target, requests), Objectives())
        return {**found, "rss_gb": server.rss_bytes / 1e9}

    return _rounds(contestants, args, measure)


def footprint(contestants: list[Contestant], args: argparse.Namespace) -> Results:
    """From the process's start to the first token, and its peak memory by then."""

    def measure(server: PeerServer, repeat: int) -> dict[str, float]:
        return {"cold_start_s": server.cold_start_s, "rss_gb": server.rss_bytes / 1e9}

    return _rounds(contestants, args, measure)


def _rounds(
    contestants: list[Contestant],
    args: argparse.Namespace,
    measure: Callable[[PeerServer, int], dict[str, float]],
) -> Results:
    """Every repeat starts, measures and ends each server; who fails once is left out."""
    results: Results = {one.name: [] for one in contestants if one.engine in SERVERS}
    for repeat in range(args.repeats):
        for contestant in contestants:
            if contestant.name not in results:
                continue
            log = args.cache / f"{contestant.name.replace(' ', '-')}-server.log"
            server = PeerServer(contestant, log)
            try:
                server.start()
                results[contestant.name].append(measure(server, repeat))
            except (DriverFailed, EngineError) as error:
                del results[contestant.name]
                print(f"left out: {contestant.name}: {error}", file=sys.stderr)
            finally:
                server.close()
    return results
