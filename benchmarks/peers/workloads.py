"""The request sets that every engine gets: token ids, output lengths, arrival times; seeded.

w1  one stream, 512 in, 128 out
w2  64 requests at once with lognormal lengths (near those of short chat turns)
w3  32 requests at once that share 1,024 tokens and have 32 of their own, 32 out; cold
w4  Poisson arrivals over HTTP; every tenth prompt has 2,000 tokens
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from quickstep.bench.lengths import draw_arrivals, draw_request

__all__ = ["WORKLOADS", "PeerRequest", "draw_requests", "write_requests"]

WORKLOADS = ("w1", "w2", "w3", "w4")


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One request; `at_s` counts from the start of the run."""

    prompt: tuple[int, ...]
    num_outputs: int
    at_s: float = 0.0


def draw_requests(
    workload: str, seed: int, vocab_size: int, rate: float, num_requests: int = 64
) -> list[PeerRequest]:
    """The set of a workload. Every seed has prompts of its own; the lengths of w2 are the same
    for all, so that repeats can be compared. `rate` is w4's requests per second.
    """
    rng = random.Random(f"{workload} {seed}")

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    if workload == "w1":
        return [PeerRequest(ids(512), 128)]
    if workload == "w2":
        lengths = random.Random("lengths of w2")
        drawn = [draw_request(lengths) for _ in range(num_requests)]
        return [PeerRequest(ids(one.num_inputs), one.num_outputs) for one in drawn]
    if workload == "w3":
        shared = ids(1024)
        return [PeerRequest(shared + ids(32), 32) for _ in range(num_requests // 2)]
    arrivals = draw_arrivals(random.Random("arrivals of w4"), num_requests, rate)
    return [
        PeerRequest(ids(one.lengths.num_inputs), one.lengths.num_outputs, one.at_s)
        for one in arrivals
    ]


def write_requests(path: Path, requests: list[PeerRequest]) -> Path:
    """The set as the drivers read it."""
    path.write_text(json.dumps([asdict(request) for request in requests]))
    return path
