"""`python -m benchmarks.prefix_eviction`: which cached block to evict, simulated.

The trace has conversations of several turns that begin with one of a few system prompts, and long
prompts that come once. Requests run one after another. A request hits the cached prefix of its
prompt, computes the rest, and leaves its full blocks (prompt and answer) in the cache. The figure
is the device time for prompt blocks that had been computed before and were evicted since, compared
with the engine's order, LRU with the end of a chain first.

    lru         least recently used first (`core.resources.block_pool`)
    segmented   blocks without a hit first, then LRU; at most 80 % of the pool is protected
    frequency   aged number of uses: GreedyDual-Size-Frequency with equal costs
    gdsf        GreedyDual-Size-Frequency: uses x seconds to compute the block, aged
    bonus       LRU, but each of up to five hits counts as a use 20 requests later
    optimal     the block whose next use is last: knows the future (Belady)

A block's value is never below that of the blocks after it, so that none loses its prefix.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol

_BLOCK = 16  # tokens
# Seconds per token, and per token and position before it: a 0.5B model in bf16 on two cores, as in
# `benchmarks.policies`.
_TOKEN_S = 0.004
_PAIR_S = 2e-7
_PROTECTED = 0.8  # of the pool, under `segmented`
_BONUS = 20  # requests, under `bonus`
_MOST_BONUSES = 5


class Job(NamedTuple):
    """A request: the blocks of its prompt and answer, and how many full ones its prompt has."""

    at_s: float
    blocks: tuple[int, ...]
    num_prompt: int


def trace(rng: Random, num_conversations: int, one_off: float) -> list[Job]:
    """Conversations, and `one_off` as many long prompts that come once, by arrival."""
    num_blocks = 0

    def new(num_tokens: int) -> tuple[int, ...]:
        nonlocal num_blocks
        num_blocks += num_tokens // _BLOCK
        return tuple(range(num_blocks - num_tokens // _BLOCK, num_blocks))

    systems = [new(rng.randint(200, 3000)) for _ in range(12)]
    weights = [1 / (1 + rank) for rank in range(len(systems))]
    jobs, at_s = [], 0.0
    for _ in range(num_conversations):
        at_s += rng.expovariate(0.2)
        turn_s, chain = at_s, rng.choices(systems, weights)[0]
        for _ in range(min(12, 1 + int(rng.expovariate(1 / 3)))):
            prompt = chain + new(rng.randint(20, 300))
            chain = prompt + new(rng.randint(50, 400))
            jobs.append(Job(turn_s, chain, len(prompt)))
            turn_s += 5 + rng.expovariate(1 / 60)
    for _ in range(round(one_off * num_conversations)):
        prompt = new(rng.randint(2000, 8000))
        jobs.append(Job(rng.uniform(0, at_s), prompt, len(prompt)))
    return sorted(jobs)


class Order(Protocol):
    """An order of eviction over cached blocks."""

    def used(self, chain: tuple[int, ...], num_hits: int, now: int) -> None:
        """A request has used the blocks; the first `num_hits` were cached."""

    def evict(self, pinned: set[int]) -> int:
        """Remove a block that is not pinned, and return it."""


class Lru:
    """Least recently used first, the end of a chain before its beginning."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def used(self, chain: tuple[int, ...], num_hits: int, now: int) -> None:
        """Move the blocks to the end."""
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def evict(self, pinned: set[int]) -> int:
        """The oldest."""
        block = next(block for block in self._blocks if block not in pinned)
        del self._blocks[block]
        return block


class Segmented:
    """Two LRU lists: blocks that were never hit go first."""

    def __init__(self, num_blocks: int) -> None:
        self._most_protected = int(_PROTECTED * num_blocks)
        self._new: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def used(self, chain: tuple[int, ...], num_hits: int, now: int) -> None:
        """Protect what was hit."""
        for index in range(len(chain) - 1, -1, -1):
            block = chain[index]
            if index < num_hits or block in self._protected:
                self._new.pop(block, None)
                self._protected[block] = None
                self._protected.move_to_end(block)
            else:
                self._new[block] = None
                self._new.move_to_end(block)
        while len(self._protected) > self._most_protected:
            block, _ = self._protected.popitem(last=False)
            self._new[block] = None

    def evict(self, pinned: set[int]) -> int:
        """The oldest of the first list that has one."""
        for blocks in (self._new, self._protected):
            for block in blocks:
                if block not in pinned:
                    del blocks[block]
                    return block
        raise IndexError("every block is pinned")


class Valued:
    """The block of the least value first, by a heap; `value` gets block, position, uses, now."""

    def __init__(self, value: Callable[[int, int, int, int], float], is_aged: bool) -> None:
        self._value = value
        self._is_aged = is_aged
        self._age = 0.0  # the value of the last block that was evicted
        self._values: dict[int, float] = {}
        self._num_uses: dict[int, int] = {}
        self._heap: list[tuple[float, int, int]] = []

    def used(self, chain: tuple[int, ...], num_hits: int, now: int) -> None:
        """Value the blocks again, each at least as high as the one after it."""
        least = -sys.float_info.max
        for position in range(len(chain) - 1, -1, -1):
            block = chain[position]
            self._num_uses[block] = uses = self._num_uses.get(block, 0) + 1
            value = self._value(block, position, uses, now)
            least = self._values[block] = max(least, self._age + value)
            heapq.heappush(self._heap, (least, -position, block))

    def evict(self, pinned: set[int]) -> int:
        """The block of the least value."""
        held = []
        while True:
            entry = heapq.heappop(self._heap)
            value, _, block = entry
            if self._values.get(block) != value:
                continue  # an older value
            if block not in pinned:
                break
            held.append(entry)
        for entry in held:
            heapq.heappush(self._heap, entry)
        del self._values[block], self._num_uses[block]
        if self._is_aged:
            self._age = value
        return block


def orders(jobs: list[Job], num_blocks: int, pair_s: float) -> dict[str, Callable[[], Order]]:
    """Every order by its name."""
    uses: dict[int, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        for block in job.blocks[: job.num_prompt]:
            uses[block].append(number)

    def next_use(block: int, position: int, num_uses: int, now: int) -> float:
        later = uses.get(block, [])
        place = bisect_right(later, now)
        return -float(later[place] if place < len(later) else len(jobs))

    def seconds(block: int, position: int, num_uses: int, now: int) -> float:
        return num_uses * block_s(position, pair_s)

    def frequency(block: int, position: int, num_uses: int, now: int) -> float:
        return float(num_uses)

    def bonus(block: int, position: int, num_uses: int, now: int) -> float:
        return float(now + _BONUS * min(_MOST_BONUSES, num_uses - 1))

    return {
        "lru": Lru,
        "segmented": lambda: Segmented(num_blocks),
        "frequency": lambda: Valued(frequency, is_aged=True),
        "gdsf": lambda: Valued(seconds, is_aged=True),
        "bonus": lambda: Valued(bonus, is_aged=False),
        "optimal": lambda: Valued(next_use, is_aged=False),
    }


def block_s(position: int, pair_s: float) -> float:
    """Seconds to compute the block at `position` of a chain."""
    return _BLOCK * (_TOKEN_S + pair_s * _BLOCK * (position + 0.5))


def run(jobs: list[Job], order: Order, num_blocks: int, pair_s: float) -> tuple[float, float]:
    """Seconds for prompt blocks, and the part for blocks that had been computed before."""
    cached: set[int] = set()
    known: set[int] = set()
    total_s = recomputed_s = 0.0
    for now, job in enumerate(jobs):
        prompt = job.blocks[: job.num_prompt]
        num_hits = next((at for at, one in enumerate(prompt) if one not in cached), len(prompt))
        for position in range(num_hits, len(prompt)):
            seconds = block_s(position, pair_s)
            total_s += seconds
            recomputed_s += seconds * (prompt[position] in known)
        pinned = set(job.blocks)
        num_new = len(pinned - cached)
        while len(cached) + num_new > num_blocks:
            cached.discard(order.evict(pinned))
        cached |= pinned
        known |= pinned
        order.used(job.blocks, num_hits, now)
    return total_s, recomputed_s


def main() -> int:
    """Print a table for each size of the pool: means over the seeds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_eviction")
    parser.add_argument("--conversations", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[2048, 4096, 8192], help="sizes of the pool"
    )
    parser.add_argument("--one-off", type=float, default=0.3, help="long prompts per conversation")
    parser.add_argument(
        "--pair-s", type=float, default=_PAIR_S, help="attention's seconds per pair of tokens"
    )
    args = parser.parse_args()
    traces = [trace(Random(seed), args.conversations, args.one_off) for seed in range(args.seeds)]
    print("blocks  order       recomputed s  of all %  less than lru %")
    for num_blocks in args.blocks:
        base_s = 0.0
        for name in orders([], num_blocks, args.pair_s):
            totals = [
                run(jobs, orders(jobs, num_blocks, args.pair_s)[name](), num_blocks, args.pair_s)
                for jobs in traces
            ]
            total_s = statistics.mean(total for total, _ in totals)
            recomputed_s = statistics.mean(recomputed for _, recomputed in totals)
            base_s = base_s or recomputed_s
            saved = 100 * (1 - recomputed_s / base_s) if base_s else 0.0
            part = 100 * recomputed_s / total_s
            print(f"{num_blocks:6}  {name:10}  {recomputed_s:12.1f}  {part:8.1f}  {saved:15.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
