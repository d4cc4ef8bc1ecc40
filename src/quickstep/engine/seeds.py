"""Seeds of requests that name none: drawn by whoever takes the request, and told in its answer."""

from __future__ import annotations

import random

__all__ = ["draw_seed", "open_seeds"]

# drawn seeds stay below 2^53, so that every JSON reader gets them exactly
_SEED_BITS = 53


def open_seeds(seed: int | None) -> random.Random:
    """A source of seeds: the same ones for the same `seed`, the system's entropy for None."""
    return random.SystemRandom() if seed is None else random.Random(seed)


def draw_seed(seeds: random.Random) -> int:
    """The next one."""
    return seeds.getrandbits(_SEED_BITS)
