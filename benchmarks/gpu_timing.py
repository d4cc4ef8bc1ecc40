"""Times of kernels on a GPU: launches in a CUDA graph, between two events, with a cold cache.

A call is repeated over copies of what it reads, which together are larger than a GPU's L2 cache, as
a step reads each weight once. On a CPU, calls are timed one by one: it only shows that they run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["Call", "gpu_us", "median_us", "num_copies"]

Call = Callable[[], object]

_CACHE_BYTES = 256 * 2**20  # several times the 50 or 60 MB of an H100 or H200
_MOST_COPIES = 200
_LEAST_LAUNCHES = 20
_LEAST_US = 4000.0  # of a graph, so that the resolution of events does not count
_ROUNDS = 7
_WARM_UPS = 3


def num_copies(num_bytes: int, device: str) -> int:
    """The copies of something so large that do not fit into the cache together."""
    return min(_MOST_COPIES, -(-_CACHE_BYTES // num_bytes)) if device == "cuda" else 1


def median_us(device: str, *kinds: Sequence[Call]) -> list[float]:
    """Median microseconds of a call of each kind, taking turns; a kind's calls run one by one."""
    if device == "cpu":
        return [_host_us(calls[0]) for calls in kinds]
    graphs = [_recorded(calls) for calls in kinds]
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(_ROUNDS):
        for (replay, num_launches), spent in zip(graphs, times, strict=True):
            spent.append(gpu_us(replay) / num_launches)
    return [statistics.median(spent) for spent in times]


def gpu_us(call: Call) -> float:
    """Between two events around it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def _recorded(calls: Sequence[Call]) -> tuple[Call, int]:
    """A graph that runs the calls in turn, and how many launches that is."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):  # the first one compiles
            calls[0]()
        once_us = gpu_us(calls[0])
    torch.cuda.current_stream().wait_stream(side)
    wanted = min(_LEAST_LAUNCHES, round(_LEAST_US / max(once_us, 1.0)) + 1)
    num_launches = -(-wanted // len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            calls[index % len(calls)]()
    graph.replay()
    return graph.replay, num_launches


def _host_us(call: Call) -> float:
    call()
    started_s = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - started_s)
