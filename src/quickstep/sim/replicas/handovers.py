"""`KVHandovers`: prompts that one engine computes for another one, on a virtual clock.

    client -> prefill engine (first token) -> decode engine (all other tokens)
                      └──── KV blocks, chunk by chunk ────┘

Both ends run the engine's own scheduler with its own resource for transfers
(`core.resources.kv_transfers`), and `core.handover` chooses them, as in the live server: a request
of an idle decode engine is not divided, a transfer for which a decode engine has no room is
refused, and what did not arrive is computed again. This module is what carries out the orders of
the schedulers: links that send one thing at a time.

Owned by `sim.replicas.run`, which says when blocks arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.core.handover import Assignment, Phases, assign, can_hand_over
from quickstep.core.resources.block_pool import ChainRoot
from quickstep.core.resources.kv_transfers import KVTransfers, SendOrder
from quickstep.core.router import ReplicaView, Router, route_request
from quickstep.sim.outcome import Handovers
from quickstep.sim.replicas.replica import Role, SimulatedReplica
from quickstep.types import KVTarget, Request, Resumed, SequenceOutput, SequenceTimings


class KVLink(msgspec.Struct, frozen=True):
    """What hands KV over: bytes per second of one engine's link in one direction, seconds of each
    transfer in addition, and bytes of a token's KV.
    """

    bytes_per_s: float
    latency_s: float
    kv_bytes_per_token: int


class BlocksSent(msgspec.Struct, frozen=True, eq=False):
    """What an order has sent: from its replica to another one, which gets `num_blocks` new ones."""

    source: int
    target: int
    order: SendOrder
    num_blocks: int
    ordered_at_s: float


class _Prefilling(msgspec.Struct):
    """A divided request at its prefill engine; `token_ids` by index, and the indices that have
    `ended` there.
    """

    request: Request
    target: int
    token_ids: dict[int, list[int]]
    ended: set[int] = msgspec.field(default_factory=set)

    @property
    def has_begun(self) -> bool:
        """Whether all sequences have their first token."""
        return all(tokens or index in self.ended for index, tokens in self.token_ids.items())


class KVHandovers:
    """All requests that replicas of different roles compute together.

    `touch` is called with the number of a replica, and returns its time, before its scheduler is
    changed.
    """

    def __init__(
        self, link: KVLink, replicas: Sequence[SimulatedReplica], touch: Callable[[int], float]
    ) -> None:
        roles = [replica.role for replica in replicas]
        num_prefill = roles.count(Role.PREFILL)
        self.prefilling: dict[str, _Prefilling] = {}
        self.prefill_timings: dict[tuple[str, int], SequenceTimings] = {}
        self._replicas = replicas
        self._touch = touch
        self._link = link
        self._link_free_at_s = [0.0] * len(replicas)
        block_size = replicas[0].engine.scheduler.block_size
        block_bytes = link.kv_bytes_per_token * block_size
        self._phases = Phases(num_prefill, block_size, block_bytes, link.bytes_per_s)
        self._begun: dict[str, None] = {}
        self._firsts: dict[str, int] = {}  # of open transfers: the first block that is sent
        self._num_continued = 0
        self._num_refused = 0
        self._num_sent = 0
        self._sent_blocks = 0
        self._sent_s = 0.0

    # -- the router -------------------------------------------------------------------------------

    def assign(
        self, request: Request, views: Sequence[ReplicaView], router: Router, now: float
    ) -> Assignment:
        """Which replica gets a request, and which one continues it."""
        routed = route_request(request, router, self._phases.block_size)
        is_divided, same = can_hand_over(request), [""] * len(views)
        return assign(routed, is_divided, views, router, self._phases, same, now)

    def divide(self, request: Request, target: int) -> Request:
        """What a prefill engine gets of a request that `target` continues."""
        name, indices = request.request_id, request.indices
        self.prefilling[name] = _Prefilling(request, target, {index: [] for index in indices})
        return replace(request, handover=KVTarget("", target, ""))

    # -- a prefill engine -------------------------------------------------------------------------

    def computed(self, output: SequenceOutput) -> None:
        """Take an output of any replica."""
        name = output.request_id
        divided = self.prefilling.get(name)
        if divided is None:
            return
        divided.token_ids[output.index] += output.token_ids
        if output.finish_reason is not None:
            divided.ended.add(output.index)
        self._begun.pop(name, None)
        if len(divided.ended) == len(divided.token_ids):
            del self.prefilling[name]  # it has ended there
        elif divided.has_begun:
            self._begun[name] = None

    def take_begun(self) -> list[str]:
        """The requests that another engine continues from now on."""
        begun = list(self._begun)
        self._begun.clear()
        return begun

    def continuation(self, name: str, aborted: Sequence[SequenceOutput]) -> tuple[int, Request]:
        """The replica that continues a request, and what it gets; `aborted` are the sequences'
        ends at the prefill engine.
        """
        divided = self.prefilling.pop(name)
        parts = {
            index: Resumed(index, tuple(tokens), index in divided.ended)
            for index, tokens in divided.token_ids.items()
        }
        for output in aborted:
            timings = output.timings
            assert timings is not None, "it has ended"
            self.prefill_timings[name, output.index] = timings
            parts[output.index] = replace(
                parts[output.index],
                num_cached_tokens=timings.num_cached_tokens,
                device_s=timings.device_s,
            )
        self._num_continued += 1
        return divided.target, replace(divided.request, resumed=tuple(parts.values()))

    def joined(self, name: str, index: int, timings: SequenceTimings) -> SequenceTimings:
        """The timings of a sequence that ends, with those of its prefill elsewhere."""
        prefill = self.prefill_timings.pop((name, index), None)
        return timings if prefill is None else _joined(prefill, timings)

    def forget(self, request: Request) -> None:
        """The client has cancelled a request."""
        self.prefilling.pop(request.request_id, None)
        for index in request.indices:
            self.prefill_timings.pop((request.request_id, index), None)

    # -- transfers --------------------------------------------------------------------------------

    def follow_orders(self, place: int, now: float) -> Iterator[tuple[float, BlocksSent]]:
        """Carry out what a replica's scheduler has ordered; yields what is sent, with the time at
        which it arrives.
        """
        for order in self._transfers(place).take_orders():
            target = order.handover.port
            if order.request is not None:
                self._offer(order.request, target)
            elif order.request_id not in self._firsts:  # it was refused
                self._transfers(place).sent(order)
            else:
                num_known = self._firsts[order.request_id] - order.first
                num_blocks = max(0, len(order.block_ids) - max(0, num_known))
                sent = BlocksSent(place, target, order, num_blocks, now)
                yield self._arrives_at_s(sent, now), sent

    def _offer(self, request: Request, target: int) -> None:
        self._touch(target)
        root = ChainRoot(request.adapter_id, request.cache_salt)
        place = self._transfers(target).begin_receiving(
            request.request_id, root, request.prompt_token_ids
        )
        if place is None:
            self._num_refused += 1
        else:
            self._firsts[request.request_id] = place.first

    def _arrives_at_s(self, sent: BlocksSent, now: float) -> float:
        """A link does one transfer at a time in each direction."""
        free_at_s, link = self._link_free_at_s, self._link
        start_s = max(now, free_at_s[sent.source], free_at_s[sent.target])
        end_s = start_s + sent.num_blocks * self._phases.block_bytes / link.bytes_per_s
        free_at_s[sent.source] = free_at_s[sent.target] = end_s
        return end_s + link.latency_s

    def arrive(self, sent: BlocksSent, now: float) -> None:
        """Blocks have arrived: their source may free them, and sequences may use them."""
        order, name = sent.order, sent.order.request_id
        self._touch(sent.source)
        self._transfers(sent.source).sent(order)
        target_now = self._touch(sent.target)
        if sent.num_blocks:
            self._transfers(sent.target).received(name, sent.num_blocks)
            self._sent_blocks += sent.num_blocks
        if order.ends:
            del self._firsts[name]
            key = self._transfers(sent.target).end_receiving(name)
            self._replicas[sent.target].engine.scheduler.arrived(key, target_now)
        if order.is_last:
            self._num_sent += 1
            self._sent_s += now - sent.ordered_at_s

    def _transfers(self, place: int) -> KVTransfers:
        transfers = self._replicas[place].engine.scheduler.held.transfers
        assert transfers is not None, "KV is transferred"
        return transfers

    def stats(self, duration_s: float) -> Handovers:
        """Of a simulation that took so long."""
        first = self._phases.num_prefill
        return Handovers(
            self._num_continued,
            self._num_refused,
            self._sent_blocks * self._phases.block_bytes,
            self._sent_s / self._num_sent if self._num_sent else 0.0,
            _busy(self._replicas[:first], duration_s),
            _busy(self._replicas[first:], duration_s),
        )


def _joined(prefill: SequenceTimings, decode: SequenceTimings) -> SequenceTimings:
    """Of both engines; what follows the first token is part of the decode phase."""
    preempted_s = prefill.preempted_s + decode.preempted_s
    since_first_s = prefill.decode_s + decode.finished_s - prefill.finished_s
    return replace(
        decode,
        arrival_s=prefill.arrival_s,
        first_scheduled_s=prefill.first_scheduled_s,
        first_token_s=prefill.first_token_s,
        queue_s=prefill.queue_s,
        prefill_s=prefill.prefill_s,
        decode_s=since_first_s - decode.preempted_s - decode.paused_s,
        preempted_s=preempted_s,
        adapter_s=prefill.adapter_s,
        restore_s=prefill.restore_s,
        paused_s=prefill.paused_s + decode.paused_s,
        num_preemptions=prefill.num_preemptions + decode.num_preemptions,
        num_prompt_tokens=prefill.num_prompt_tokens,
        num_resumed_tokens=0,
        elsewhere_s=0.0,
        activities=(),
    )


def _busy(replicas: Sequence[SimulatedReplica], duration_s: float) -> float:
    """The part of the time in which a step ran, as a mean over engines."""
    seconds = sum(record.seconds for replica in replicas for record in replica.records)
    return min(1.0, seconds / len(replicas) / duration_s) if duration_s > 0.0 else 0.0
