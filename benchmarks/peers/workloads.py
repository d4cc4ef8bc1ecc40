"""The request sets that every engine gets: token ids, output lengths, arrival times; seeded.

w1         one stream, 512 in, 128 out
w2         64 requests at once with lognormal lengths (near those of short chat turns)
w3         32 requests at once that share 1,024 tokens and have 32 of their own, 32 out; cold
w4         Poisson arrivals; every tenth prompt has 2,000 tokens
footprint  one short request that ends a cold start, then one of 512 in, 16 out
proof      one request of 32 in, 8 out: whether an engine runs at all
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quickstep.bench.lengths import random_arrivals, random_request

__all__ = ["PeerRequest", "WorkloadSize", "random_requests", "size_of"]


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One request; `at_s` counts from the start of the round. `model` may name an adapter."""

    prompt: tuple[int, ...]
    num_outputs: int
    at_s: float = 0.0
    model: str = "model"


@dataclass(frozen=True, slots=True)
class WorkloadSize:
    """What an engine has to be sized for: streams at once, and the longest one in tokens."""

    num_streams: int
    max_len: int


def random_requests(
    workload: str, seed: str, token_ids: Sequence[int], num_requests: int = 64, rate: float = 0.67
) -> list[PeerRequest]:
    """The set of a workload. Every seed has prompts of its own; the lengths and arrival times are
    the same for all, so that rounds can be compared. `rate` is w4's requests per second.
    """
    rng = random.Random(f"{workload} {seed}")

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(token_ids, k=count))

    if workload == "w2":
        lengths = random.Random("lengths of w2")
        requests = [random_request(lengths) for _ in range(num_requests)]
        return [PeerRequest(ids(request.num_inputs), request.num_outputs) for request in requests]
    if workload == "w3":
        shared = ids(1024)
        return [PeerRequest(shared + ids(32), 32) for _ in range(max(1, num_requests // 2))]
    if workload == "w4":
        arrivals = random_arrivals(random.Random("arrivals of w4"), num_requests, rate)
        return [
            PeerRequest(ids(arrival.lengths.num_inputs), arrival.lengths.num_outputs, arrival.at_s)
            for arrival in arrivals
        ]
    num_inputs, num_outputs = {"w1": (512, 128), "footprint": (512, 16), "proof": (32, 8)}[workload]
    return [PeerRequest(ids(num_inputs), num_outputs)]


def size_of(requests: Sequence[PeerRequest]) -> WorkloadSize:
    """The streams of a set count as at once, whatever their times."""
    longest = max(len(request.prompt) + request.num_outputs for request in requests)
    return WorkloadSize(len(requests), longest)
