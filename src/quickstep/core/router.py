"""Which replica of a model gets a request, by what the replicas have reported.

A router owns no connection and no clock: a driver keeps a `ReplicaView` for each replica, and calls
`choose` for each request in the order of arrivals. The simulator (`sim.replicas`) is such a driver.
The choice moves a request in time only: its tokens are the same on every replica.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec

from quickstep.core.admission import AdmissionState
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.resources.block_pool import ChainRoot, chain_digest, root_digest
from quickstep.core.service_order import level_of
from quickstep.types import Request

_BLOCK_TOKENS = 16  # of the blocks whose digests are compared, unless the driver has others
_MAX_PREFIXES = 1_000_000  # that a router remembers: about 100 MB
_SPILL = 2.0  # a prefix goes elsewhere if its replica has so many times the mean, and as many more
_NEAR = 1.1  # predictions within this ratio of the least one are taken to be equal
_NEAR_S = 0.001  # and those that are so much later
_MAX_SCORED = 64  # replicas that are scored for a request
_MAX_OUTPUTS = 256  # that are predicted of a request: most end before their limit
_REPORT_S = 0.25  # a replica that has reported nothing for longer than that may have stopped


class ReplicaState(enum.Enum):
    """Whether a replica gets requests."""

    UP = "up"
    DRAINING = "draining"  # it ends those that it has, and gets no others
    DOWN = "down"


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """What a router knows of a replica.

    Attributes:
        num_live: Requests that the driver has sent there and that have not ended.
        admission: The state that the replica has reported last.
        reported_at_s: When that came, by the driver's clock; None before the first report.
        num_sent: Sequences that the driver has sent there since, which the state does not count.
        num_blocks: KV blocks that it has, of the size of a request's; None if that is not known.
        num_free_blocks: How many of them no sequence uses; None likewise.
        costs: Predicts the replica's steps: a `LinearCostModel` of the coefficients that it has
            reported, or what a simulated replica is made of. None if they are not known.
        adapters: Ids of the LoRA adapters in its memory.
        adapter_load_s: How long the load of another one takes.
    """

    state: ReplicaState = ReplicaState.UP
    num_live: int = 0
    admission: AdmissionState = AdmissionState()
    reported_at_s: float | None = None
    num_sent: int = 0
    num_blocks: int | None = None
    num_free_blocks: int | None = None
    costs: CostModel | None = None
    adapters: frozenset[str] = frozenset()
    adapter_load_s: float = 0.0

    @property
    def is_up(self) -> bool:
        """Whether it may be chosen."""
        return self.state is ReplicaState.UP


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a router knows of a request: no tokens, so that decisions can be recorded.

    Attributes:
        digests: Of the full blocks of the prompt, as a replica's block pool has them; () if the
            router does not read them.
        block_size: Tokens of such a block.
        num_outputs: Tokens that its sequences may generate, as far as that is predicted.
        level: Of its priority (`service_order.level_of`).
        adapter_id: Of its LoRA adapter, "" for none.
    """

    num_prompt_tokens: int
    digests: tuple[bytes, ...] = ()
    block_size: int = _BLOCK_TOKENS
    num_outputs: int = 0
    level: int = 0
    adapter_id: str = ""


class Router(Protocol):
    """Chooses a replica for each request."""

    @property
    def predicts(self) -> bool:
        """Whether the choice depends on what replicas report; else `state` and `num_live` are all
        that a driver has to fill in.
        """

    @property
    def reads_prompts(self) -> bool:
        """Whether the choice depends on the digests of a prompt."""

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> int:
        """The place of a replica that is up; one of them at least has to be. `now` is the time on
        the driver's clock.
        """

    def num_cached_tokens(self, request: RouteRequest, num_replicas: int) -> list[int]:
        """How much of a prompt each replica is taken to have cached."""

    def lost_cache(self, replica: int) -> None:
        """A replica has started again: nothing is cached there."""


class _NothingCached:
    """Knows nothing of caches."""

    def num_cached_tokens(self, request: RouteRequest, num_replicas: int) -> list[int]:
        """`Router.num_cached_tokens`."""
        return [0] * num_replicas


class RoundRobin(_NothingCached):
    """One replica after the other."""

    predicts = False
    reads_prompts = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> int:
        """`Router.choose`."""
        while not replicas[self._next % len(replicas)].is_up:
            self._next += 1
        self._next += 1
        return (self._next - 1) % len(replicas)

    def lost_cache(self, replica: int) -> None:
        """The choice does not depend on it."""


class FewestRequests(_NothingCached):
    """The replica with the fewest live requests; of several, the first."""

    predicts = False
    reads_prompts = False

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> int:
        """`Router.choose`."""
        return min((view.num_live, place) for place, view in enumerate(replicas) if view.is_up)[1]

    def lost_cache(self, replica: int) -> None:
        """The choice does not depend on it."""


class PrefixAffinity(_NothingCached):
    """The replica that last had the longest part of the prompt, if that is half of it at least and
    the replica has not far more requests than the others; else the one with the fewest. As the
    cache-aware router of SGLang.
    """

    predicts = False
    reads_prompts = True

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._replica_of: dict[bytes, int] = {}  # by the digest of a prompt's first blocks
        self._fewest = FewestRequests()

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> int:
        """`Router.choose`."""
        keys = request.digests
        chosen = self._with_prefix(keys, replicas)
        if chosen is None:
            chosen = self._fewest.choose(request, replicas, now)
        self._replica_of.update(dict.fromkeys(keys, chosen))
        while len(self._replica_of) > self._max_prefixes:
            del self._replica_of[next(iter(self._replica_of))]
        return chosen

    def lost_cache(self, replica: int) -> None:
        """Its prefixes stay with it: the next request brings them back."""

    def _with_prefix(self, keys: Sequence[bytes], replicas: Sequence[ReplicaView]) -> int | None:
        loads = [view.num_live for view in replicas if view.is_up]
        most = _SPILL * (1 + sum(loads) / len(loads))
        for key in reversed(keys[len(keys) // 2 :]):
            known = self._replica_of.get(key)
            if known is not None and replicas[known].is_up:
                return known if replicas[known].num_live <= most else None
        return None


class PredictedFirst:
    """The replica that is predicted to serve a request first: the wait in its queue, then the
    prefill of what it has not cached, then the time by which its live requests slow the decoding.
    Without that last part, requests with a prompt in common gather where it is cached: simulated
    (3 prompts of 1,500 tokens and 4 replicas; 2 of 800 and 2), they take 12 to 19 % longer, and
    their first tokens 9 to 28 % (p90). Of those that are about equal, the one with the fewest live
    requests, then one by the hash of the prompt's first block.

    A request's blocks are taken to be cached where it was sent, until so many others were sent
    there as it has blocks. A driver that learns more about the caches reports it to `prefixes`.

    Of many replicas, a few dozen are scored (`_MAX_SCORED`).
    """

    predicts = True
    reads_prompts = True

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self.prefixes = PrefixIndex(max_prefixes)
        self._prefilled_s: dict[int, float] = {}  # when a replica has computed what it was sent
        self._turn = 0  # of the replicas that are scored, if there are many

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> int:
        """`Router.choose`."""
        digests = request.digests
        places = self._scored(digests, replicas)
        cached = self.prefixes.num_blocks(digests, places)
        prefills = {
            place: prefill_s(request, replicas[place], num_blocks * request.block_size)
            for place, num_blocks in zip(places, cached, strict=True)
        }
        scores_s = {}
        for place in places:
            view = replicas[place]
            wait_s = max(queue_s(request, view, now), self._prefilled_s.get(place, now) - now)
            scores_s[place] = wait_s + prefills[place] + _slower_s(request, view)
        latest_s = _NEAR_S + _NEAR * min(scores_s.values())
        near = [place for place, score_s in scores_s.items() if score_s <= latest_s]
        first = digests[0] if digests else b""
        chosen = min(
            near, key=lambda place: (replicas[place].num_live, chain_digest(first, (place,)))
        )
        self.prefixes.add(chosen, digests, replicas[chosen].num_blocks)
        since_s = max(now, self._prefilled_s.get(chosen, now))
        self._prefilled_s[chosen] = since_s + prefills[chosen]
        return chosen

    def _scored(self, digests: Sequence[bytes], replicas: Sequence[ReplicaView]) -> list[int]:
        """The replicas to choose from. Of many, some of those that have the longest part of the
        prompt, and others in turn: the best of a few dozen is nearly as good as the best of all.
        """
        if len(replicas) <= _MAX_SCORED:
            return [place for place, view in enumerate(replicas) if view.is_up]
        known = self.prefixes.holders_of_longest(digests, _MAX_SCORED // 4)
        places = {place for place in known if place < len(replicas) and replicas[place].is_up}
        for _ in range(len(replicas)):
            if len(places) >= _MAX_SCORED:
                break
            self._turn = (self._turn + 1) % len(replicas)
            if replicas[self._turn].is_up:
                places.add(self._turn)
        return sorted(places)

    def num_cached_tokens(self, request: RouteRequest, num_replicas: int) -> list[int]:
        """`Router.num_cached_tokens`."""
        counts = self.prefixes.num_blocks(request.digests, range(num_replicas), is_used=False)
        return [count * request.block_size for count in counts]

    def lost_cache(self, replica: int) -> None:
        """`Router.lost_cache`."""
        self.prefixes.forget(replica)
        self._prefilled_s.pop(replica, None)


def queue_s(request: RouteRequest, view: ReplicaView, now: float) -> float:
    """How long a request would wait by what a replica has reported."""
    state, seconds = view.admission, 0.0
    if state.num_waiting or view.num_sent >= state.num_free_slots:
        seconds = state.wait_s_of(request.level, view.num_sent)
    if view.reported_at_s is not None:
        seconds += max(0.0, now - view.reported_at_s - _REPORT_S)
    return seconds


def prefill_s(request: RouteRequest, view: ReplicaView, num_cached: int) -> float:
    """How long the prompt takes on a replica, without the tokens that it has cached."""
    seconds = 0.0
    if view.costs is not None:
        num_prompt = request.num_prompt_tokens
        start = max(0, min(num_cached, num_prompt - 1))
        load = StepLoad.of_span(start, num_prompt - start, num_logits_rows=1)
        seconds = view.costs.seconds(load)
    if request.adapter_id and request.adapter_id not in view.adapters:
        seconds += view.adapter_load_s
    return seconds


def _slower_s(request: RouteRequest, view: ReplicaView) -> float:
    """How much longer the outputs take with the live requests of a replica than without them."""
    if view.costs is None or not (view.num_live and request.num_outputs):
        return 0.0
    row = StepLoad.of_span(request.num_prompt_tokens, 1, num_logits_rows=1)
    row_s = view.costs.seconds(StepLoad.total([row, row])) - view.costs.seconds(row)
    return view.num_live * request.num_outputs * row_s


class PrefixIndex:
    """Which replicas have cached which blocks, by their digests; those that were used least
    recently are forgotten, of all replicas and of each that cannot hold more.
    """

    def __init__(self, max_digests: int = _MAX_PREFIXES) -> None:
        self._max_digests = max_digests
        self._holders: OrderedDict[bytes, int] = OrderedDict()  # a bit for each replica
        self._held: dict[int, OrderedDict[bytes, None]] = {}  # by replicas with a known size
        self._bits: dict[int, int] = {}
        self._replica_of_bit: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, replica: int, digests: Sequence[bytes], num_blocks: int | None = None) -> None:
        """A replica that holds `num_blocks` has these blocks, given from the first of a prompt to
        the last: the last ones are forgotten first.
        """
        bit, holders = self._bit(replica), self._holders
        for digest in reversed(digests):
            holders[digest] = holders.get(digest, 0) | bit
            holders.move_to_end(digest)
        while len(holders) > self._max_digests:
            holders.popitem(last=False)
        if num_blocks is not None:
            self._limit(replica, digests, num_blocks)

    def _limit(self, replica: int, digests: Sequence[bytes], num_blocks: int) -> None:
        held = self._held.setdefault(replica, OrderedDict())
        for digest in reversed(digests):
            held[digest] = None
            held.move_to_end(digest)
        num_more = len(held) - num_blocks
        if num_more > 0:
            self.remove(replica, [held.popitem(last=False)[0] for _ in range(num_more)])

    def remove(self, replica: int, digests: Iterable[bytes]) -> None:
        """A replica has evicted these blocks."""
        bit, holders = self._bit(replica), self._holders
        for digest in digests:
            left = holders.get(digest, 0) & ~bit
            if left:
                holders[digest] = left
            else:
                holders.pop(digest, None)

    def forget(self, replica: int) -> None:
        """A replica has lost all its blocks. Its old bit is in the index until the digests that
        have it are forgotten, so that this takes no time.
        """
        self._bits.pop(replica, None)
        self._held.pop(replica, None)

    def holders_of_longest(self, digests: Sequence[bytes], most: int) -> list[int]:
        """At most so many replicas that have the most of the blocks from the first one on; none if
        no replica has the first.
        """
        having = 0
        for place, digest in enumerate(digests):
            still = self._holders.get(digest, 0)
            still = still if not place else having & still
            if not still:
                break
            having = still
        found: list[int] = []
        while having and len(found) < most:
            lowest = having & -having
            having ^= lowest
            replica = self._replica_of_bit[lowest.bit_length() - 1]
            if self._bits.get(replica) == lowest:  # else it has lost its blocks
                found.append(replica)
        return found

    def num_blocks(
        self, digests: Sequence[bytes], replicas: Sequence[int], is_used: bool = True
    ) -> list[int]:
        """How many of the blocks from the first one on each of these replicas has; `is_used`: they
        are forgotten later.
        """
        bits = [self._bit(replica) for replica in replicas]
        counts, having, known = [0] * len(bits), sum(bits), 0
        for digest in digests:
            still = having & self._holders.get(digest, 0)
            if still != having:
                _count(counts, bits, having & ~still, known)
                having = still
            if not having:
                break
            known += 1
        _count(counts, bits, having, known)
        for digest in reversed(digests[:known] if is_used else ()):
            self._holders.move_to_end(digest)
        return counts

    def _bit(self, replica: int) -> int:
        bit = self._bits.get(replica)
        if bit is None:
            bit = self._bits[replica] = 1 << len(self._replica_of_bit)
            self._replica_of_bit.append(replica)
        return bit


def _count(counts: list[int], bits: Sequence[int], having: int, num_blocks: int) -> None:
    """Set the count of the replicas whose bits are in `having`."""
    for replica, bit in enumerate(bits):
        if having & bit:
            counts[replica] = num_blocks


def route_request(
    request: Request, router: Router, block_size: int = _BLOCK_TOKENS
) -> RouteRequest:
    """What `router` has to know of a request on replicas with blocks of this size."""
    return RouteRequest(
        num_prompt_tokens=len(request.prompt_token_ids),
        digests=prompt_digests(request, block_size) if router.reads_prompts else (),
        block_size=block_size,
        num_outputs=_num_outputs(request),
        level=level_of(request),
        adapter_id=request.adapter_id,
    )


def _num_outputs(request: Request) -> int:
    if request.prompt_only:
        return 0
    max_tokens = request.sampling.max_tokens
    of_each = _MAX_OUTPUTS if max_tokens is None else min(max_tokens, _MAX_OUTPUTS)
    return of_each * request.sampling.n


def prompt_digests(request: Request, block_size: int) -> tuple[bytes, ...]:
    """The digests of the full blocks of a prompt, as a replica's block pool has them."""
    token_ids = request.prompt_token_ids
    ends = range(block_size, len(token_ids) + 1, block_size)
    blocks = (tuple(token_ids[end - block_size : end]) for end in ends)
    root = root_digest(ChainRoot(request.adapter_id, request.cache_salt))
    return tuple(accumulate(blocks, chain_digest, initial=root))[1:]


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "fewest-requests": FewestRequests,
    "prefix": PrefixAffinity,
    "predicted": PredictedFirst,
}
