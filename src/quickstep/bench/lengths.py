"""Random request lengths and arrival times for the benchmarks. Standard library only.

Lengths are lognormal and similar to short chat messages: 64 requests have about 14,000 prompt
tokens and 6,000 output tokens. Arrivals are Poisson, and every tenth prompt is long, which stalls
a server that computes a complete prompt in one step. All depend on the random generator only.
"""

from __future__ import annotations

import random

import msgspec

_INPUT_MEDIAN, _INPUT_SIGMA, _INPUT_RANGE = 150, 0.8, (8, 1024)
_OUTPUT_MEDIAN, _OUTPUT_SIGMA, _OUTPUT_RANGE = 90, 0.6, (8, 512)

LONG_PROMPT = 2000
_LONG_EVERY = 10


class RequestLengths(msgspec.Struct, frozen=True):
    """Prompt and output tokens of one request."""

    num_inputs: int
    num_outputs: int


class TimedLengths(msgspec.Struct, frozen=True):
    """The lengths of a request that arrives `at_s` seconds after the start."""

    lengths: RequestLengths
    at_s: float


def random_request(rng: random.Random, max_len: int | None = None) -> RequestLengths:
    """Lognormal lengths of at most `max_len` each."""
    return RequestLengths(
        _random_length(rng, _INPUT_MEDIAN, _INPUT_SIGMA, _INPUT_RANGE, max_len),
        _random_length(rng, _OUTPUT_MEDIAN, _OUTPUT_SIGMA, _OUTPUT_RANGE, max_len),
    )


def random_arrivals(
    rng: random.Random, num_requests: int, rate: float, long_prompt: int = LONG_PROMPT
) -> tuple[TimedLengths, ...]:
    """Poisson arrivals at `rate` per second; every tenth prompt has `long_prompt` tokens."""
    arrivals, at_s = [], 0.0
    for place in range(num_requests):
        at_s += rng.expovariate(rate)
        lengths = random_request(rng)
        if place % _LONG_EVERY == _LONG_EVERY - 1:
            lengths = RequestLengths(long_prompt, lengths.num_outputs)
        arrivals.append(TimedLengths(lengths, at_s))
    return tuple(arrivals)


def _random_length(
    rng: random.Random,
    median: float,
    sigma: float,
    limits: tuple[int, int],
    max_len: int | None,
) -> int:
    length = min(max(limits[0], round(median * rng.lognormvariate(0.0, sigma))), limits[1])
    return length if max_len is None else min(length, max_len)
