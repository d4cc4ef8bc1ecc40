"""Request lengths and arrival times that the benchmarks draw. Standard library only.

Lengths are lognormal, near those of short chat turns: 64 requests have some 14,000 prompt and
6,000 output tokens. Arrivals are Poisson, and every tenth prompt is long: what stalls a server
that computes a whole prompt in one step. All are functions of the generator that draws them.
"""

from __future__ import annotations

import random

import msgspec

__all__ = ["LONG_PROMPT", "Arrival", "RequestLengths", "random_arrivals", "random_request"]

_INPUT_MEDIAN, _INPUT_SIGMA, _INPUT_RANGE = 150, 0.8, (8, 1024)
_OUTPUT_MEDIAN, _OUTPUT_SIGMA, _OUTPUT_RANGE = 90, 0.6, (8, 512)

LONG_PROMPT = 2000
_LONG_EVERY = 10


class RequestLengths(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    num_inputs: int
    num_outputs: int


class Arrival(msgspec.Struct, frozen=True):
    """A request's lengths, and when it comes, in seconds from the start."""

    lengths: RequestLengths
    at_s: float


def random_request(rng: random.Random, max_len: int | None = None) -> RequestLengths:
    """Lognormal lengths; `max_len` caps each."""
    return RequestLengths(
        _draw(rng, _INPUT_MEDIAN, _INPUT_SIGMA, _INPUT_RANGE, max_len),
        _draw(rng, _OUTPUT_MEDIAN, _OUTPUT_SIGMA, _OUTPUT_RANGE, max_len),
    )


def random_arrivals(
    rng: random.Random, num_requests: int, rate: float, long_prompt: int = LONG_PROMPT
) -> tuple[Arrival, ...]:
    """Poisson arrivals at `rate` per second; every tenth prompt has `long_prompt` tokens."""
    arrivals, at_s = [], 0.0
    for place in range(num_requests):
        at_s += rng.expovariate(rate)
        lengths = random_request(rng)
        if place % _LONG_EVERY == _LONG_EVERY - 1:
            lengths = RequestLengths(long_prompt, lengths.num_outputs)
        arrivals.append(Arrival(lengths, at_s))
    return tuple(arrivals)


def _draw(
    rng: random.Random,
    median: float,
    sigma: float,
    limits: tuple[int, int],
    max_len: int | None,
) -> int:
    drawn = min(max(limits[0], round(median * rng.lognormvariate(0.0, sigma))), limits[1])
    return drawn if max_len is None else min(drawn, max_len)
