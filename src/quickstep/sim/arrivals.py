"""When requests arrive: times in seconds, ascending, from a seeded generator.

Rates are requests per second. `gamma` has the burstiness of `vllm bench serve`: 1 is Poisson,
smaller is burstier, larger is more regular. `varying` is a Poisson process whose rate changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


def poisson(rng: Random, rate: float, num_requests: int) -> list[float]:
    """Independent arrivals."""
    return gamma(rng, rate, num_requests, burstiness=1.0)


def gamma(rng: Random, rate: float, num_requests: int, burstiness: float) -> list[float]:
    """Intervals of a gamma distribution with this shape and the mean 1 / rate."""
    at_s, times = 0.0, []
    for _ in range(num_requests):
        at_s += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        times.append(at_s)
    return times


def varying(
    rng: Random, rate_at: Callable[[float], float], max_rate: float, duration_s: float
) -> list[float]:
    """Arrivals with the rate `rate_at(time)`, which never exceeds `max_rate` (thinning)."""
    at_s, times = 0.0, []
    while (at_s := at_s + rng.expovariate(max_rate)) < duration_s:
        if rng.random() * max_rate < rate_at(at_s):
            times.append(at_s)
    return times


def ramp(rng: Random, first: float, last: float, duration_s: float) -> list[float]:
    """Arrivals whose rate changes linearly from `first` to `last`."""

    def rate_at(at_s: float) -> float:
        return first + (last - first) * at_s / duration_s

    return varying(rng, rate_at, max(first, last), duration_s)


def diurnal(
    rng: Random, mean: float, peak: float, period_s: float, duration_s: float
) -> list[float]:
    """Arrivals whose rate is a sine around `mean` that reaches `peak` (at most twice the mean)
    after a quarter of the period.
    """

    def rate_at(at_s: float) -> float:
        return mean + (peak - mean) * math.sin(2.0 * math.pi * at_s / period_s)

    return varying(rng, rate_at, peak, duration_s)
