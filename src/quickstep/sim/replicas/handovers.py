"""KV caches that prefill engines hand over to decode engines, on a virtual clock.

    client -> prefill engine (1 output) -> transfer of KV -> decode engine (all other outputs)

Both ends run the unchanged scheduler. The prefill engine gets the request with one output, which is
streamed at once. The decode engine gets a continuation, with the prompt and that output as its
prompt, after the prompt's full blocks have been registered in its pool as cached ones, so that the
scheduler finds them as a prefix hit; at most the tokens of the last, partly filled block are
computed again. Blocks that the decode engine has cached already are not sent.

Blocks are counted where they are: the prefill engine keeps those of a prompt until they are sent,
and the decode engine allocates them before. A prompt whose blocks no decode engine has room for
waits at its prefill engine. The blocks that wait for admission never fill a pool so far that the
longest sequence would not fit next to them: else the scheduler could admit nothing.

Owned by `sim.replicas.run`, which says when transfers are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.core.resources.block_pool import BlockKey, ChainRoot, KVBlockPool
from quickstep.errors import RequestError
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Handovers
from quickstep.sim.replicas.replica import Role, SimulatedReplica
from quickstep.types import FinishReason, Request, SequenceOutput, SequenceTimings


class KVLink(msgspec.Struct, frozen=True):
    """What hands KV over: bytes per second of one engine's link in one direction, seconds of each
    transfer in addition, and bytes of a token's KV.
    """

    bytes_per_s: float
    latency_s: float
    kv_bytes_per_token: int


class TransferEnd(msgspec.Struct, eq=False):
    """An engine as one end of transfers.

    Attributes:
        pool: That of the engine's scheduler.
        max_num_seqs: A decode engine takes no more.
        num_live: Sequences that were handed over to it and have not ended.
        link_free_at_s: When its last transfer is over.
        tables: Blocks that transfers hold here, by the name of the continuation.
        longest: Blocks of the longest sequence that was sent here.
    """

    replica: SimulatedReplica
    pool: KVBlockPool
    max_num_seqs: int
    num_live: int = 0
    link_free_at_s: float = 0.0
    tables: dict[str, list[int]] = msgspec.field(default_factory=dict)
    longest: int = 0

    def release(self, name: str) -> None:
        """Give the blocks of a transfer back, if it still holds some."""
        self.pool.release(self.tables.pop(name, ()))


class Handover(msgspec.Struct, eq=False):
    """A sequence from the end of its prefill to its own end.

    Attributes:
        name: Of its continuation, the request that the decode engine gets.
        timings: Of its prefill.
        target: None while no decode engine has room.
        has_arrived: Whether its KV is at the decode engine.
        is_cancelled: While its KV is on the way.
    """

    name: str
    request: Request
    index: int
    source: TransferEnd
    timings: SequenceTimings
    first_tokens: tuple[int, ...]
    target: TransferEnd | None = None
    num_sent_tokens: int = 0
    has_arrived: bool = False
    is_cancelled: bool = False


class KVHandovers:
    """All sequences that replicas of different roles compute together."""

    def __init__(self, link: KVLink, replicas: Sequence[SimulatedReplica]) -> None:
        self.prefilling: dict[str, Request] = {}  # what prefill engines have accepted
        self.live: dict[str, Handover] = {}  # by the name of the continuation
        self.waiting: deque[Handover] = deque()  # prefilled, and no decode engine has room
        self.prefill = [
            _transfer_end(replica) for replica in replicas if replica.role is Role.PREFILL
        ]
        self.decode = [
            _transfer_end(replica) for replica in replicas if replica.role is Role.DECODE
        ]
        self._end_of = {id(end.replica): end for end in (*self.prefill, *self.decode)}
        self._link = link
        self._num_sent = 0
        self._sent_tokens = 0
        self._handover_s = 0.0

    # -- prefill ----------------------------------------------------------------------------------

    def first_part(self, request: Request) -> Request:
        """What a prefill engine gets of a request. Raises RequestError for one whose prompt no
        decode engine holds.
        """
        pool = self.decode[0].pool
        num_tokens = len(request.prompt_token_ids)
        if _whole_blocks(num_tokens + 2, pool) > pool.num_blocks:
            raise RequestError(
                f"prompt has {num_tokens} tokens, the KV cache of a decode engine holds "
                f"{pool.num_blocks * pool.block_size}"
            )
        most = request.sampling.max_tokens
        most = 1 if most is None else min(1, most)
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    def ended(self, replica: SimulatedReplica, output: SequenceOutput) -> SequenceOutput | None:
        """The end of a sequence for its client, with the timings of both phases; None if it
        continues at a decode engine, as those do whose first output is not their last. Their
        prefill engine keeps the blocks until they are sent.
        """
        if replica.role is Role.DECODE:
            return self._decoded(output)
        request = self.prefilling[output.request_id]
        if output.request_id not in replica.held:
            del self.prefilling[output.request_id]
        most = request.sampling.max_tokens
        is_over = most is not None and most <= 1
        if is_over or output.finish_reason is not FinishReason.MAX_TOKENS:
            return output
        assert output.timings is not None, "the sequence has ended"
        source, name = self._end_of[id(replica)], f"{request.request_id}#{output.index}"
        handover = Handover(name, request, output.index, source, output.timings, output.token_ids)
        source.tables[name] = _acquire_cached(source.pool, request)
        self.live[name] = handover
        self.waiting.append(handover)
        return None

    def cancel(self, request_id: str, now: float) -> list[SequenceOutput]:
        """The client has cancelled a request; returns the ends of the sequences that prefill
        engines have computed.
        """
        self.prefilling.pop(request_id, None)
        cancelled = [
            handover for handover in self.live.values() if handover.request.request_id == request_id
        ]
        return [self._cancel(handover, now) for handover in cancelled]

    def _cancel(self, handover: Handover, now: float) -> SequenceOutput:
        target = handover.target
        if target is not None and handover.has_arrived:
            replica = target.replica
            (output,) = replica.engine.scheduler.abort(handover.name, replica.set_clock(now))
            replica.ended(handover.name)
            return self._decoded(output)
        if target is not None:
            handover.is_cancelled = True  # its KV is on the way
        else:
            self.waiting.remove(handover)
            handover.source.release(handover.name)
            del self.live[handover.name]
        return SequenceOutput(
            request_id=handover.request.request_id,
            index=handover.index,
            finish_reason=FinishReason.ABORTED,
            timings=_until(handover.timings, now),
        )

    # -- transfers --------------------------------------------------------------------------------

    def send(self, now: float) -> Iterator[tuple[float, Handover]]:
        """Send the KV of prompts to decode engines that have room, in the order of their ends; each
        with the time at which the transfer is over.
        """
        while self.waiting:
            handover = self.waiting[0]
            request = handover.request
            target = self._with_room(request)
            if target is None:
                return
            self.waiting.popleft()
            handover.target = target
            hits = _acquire_cached(target.pool, request)
            num_blocks = len(request.prompt_token_ids) // target.pool.block_size
            fresh = target.pool.allocate(num_blocks - len(hits))
            target.tables[handover.name] = [*hits, *fresh]
            target.num_live += 1
            target.longest = max(target.longest, _longest(request, target.pool))
            handover.num_sent_tokens = len(fresh) * target.pool.block_size
            yield self._sent_at_s(handover, target, now), handover

    def _sent_at_s(self, handover: Handover, target: TransferEnd, now: float) -> float:
        """When the transfer is over; a link does one at a time in each direction."""
        source, link = handover.source, self._link
        start_s = max(now, source.link_free_at_s, target.link_free_at_s)
        num_bytes = handover.num_sent_tokens * link.kv_bytes_per_token
        end_s = start_s + link.latency_s + num_bytes / link.bytes_per_s
        source.link_free_at_s = target.link_free_at_s = end_s
        return end_s

    def _with_room(self, request: Request) -> TransferEnd | None:
        """The decode engine with the fewest sequences of those that have room for one more."""
        for end in sorted(self.decode, key=lambda end: end.num_live):
            pool = end.pool
            num_blocks = len(request.prompt_token_ids) // pool.block_size
            hits = _cached(pool, request)
            num_fresh = num_blocks - len(hits)
            if not end.num_live:
                return end if num_fresh <= pool.num_free_besides(hits) else None
            longest = max(end.longest, _longest(request, pool))
            num_held = sum(map(len, end.tables.values()))
            has_room = (
                end.num_live < end.max_num_seqs
                and num_fresh + end.num_live <= pool.num_free_besides(hits)
                and num_held + num_blocks + longest <= pool.num_blocks
            )
            if has_room:
                return end
        return None

    # -- decode -----------------------------------------------------------------------------------

    def arrive(self, handover: Handover, now: float) -> None:
        """The KV has arrived: continue at the decode engine. Raises RequestError if that refuses
        the sequence.
        """
        target, request = handover.target, handover.request
        assert target is not None, "the transfer has two ends"
        handover.source.release(handover.name)
        handover.has_arrived = True
        self._num_sent += 1
        self._sent_tokens += handover.num_sent_tokens
        self._handover_s += now - handover.timings.finished_s
        _register(target.pool, request, target.tables[handover.name])
        if handover.is_cancelled:
            self._leave(handover, target)
            return
        replica = target.replica
        now = replica.set_clock(now)
        try:
            replica.engine.scheduler.add(_continuation(handover, now), now)
        except RequestError:
            self._leave(handover, target)
            raise
        replica.held[handover.name] = 1

    def release_admitted(self, now: float) -> None:
        """Give the references of transfers back whose sequences have their own, oldest first."""
        for end in self.decode:
            for name in list(end.tables):
                of_request = end.replica.engine.scheduler.timings(name, now)
                if not of_request or of_request[0].first_scheduled_s is None:
                    break  # its KV is on the way, or it waits
                end.release(name)

    def _decoded(self, output: SequenceOutput) -> SequenceOutput:
        handover, timings = self.live[output.request_id], output.timings
        assert handover.target is not None and timings is not None, "it was handed over"
        self._leave(handover, handover.target)
        return replace(
            output,
            request_id=handover.request.request_id,
            index=handover.index,
            timings=_joined(handover.timings, timings),
        )

    def _leave(self, handover: Handover, target: TransferEnd) -> None:
        target.release(handover.name)
        target.num_live -= 1
        del self.live[handover.name]

    def stats(self, duration_s: float) -> Handovers:
        """Of a simulation that took so long."""
        return Handovers(
            self._num_sent,
            self._sent_tokens * self._link.kv_bytes_per_token,
            self._handover_s / self._num_sent if self._num_sent else 0.0,
            _busy(self.prefill, duration_s),
            _busy(self.decode, duration_s),
        )


def _transfer_end(replica: SimulatedReplica) -> TransferEnd:
    scheduler = replica.engine.scheduler
    assert isinstance(scheduler, GroupedScheduler), "its pool is needed"
    return TransferEnd(replica, scheduler.pool, scheduler.max_num_seqs)


def _whole_blocks(num_tokens: int, pool: KVBlockPool) -> int:
    return -(-num_tokens // pool.block_size)


def _longest(request: Request, pool: KVBlockPool) -> int:
    """Blocks of a sequence of the request at its end, at most the pool's."""
    most = request.sampling.max_tokens
    if most is None:
        return pool.num_blocks
    return min(pool.num_blocks, _whole_blocks(len(request.prompt_token_ids) + most, pool))


def _digests(pool: KVBlockPool, request: Request) -> tuple[ChainRoot, list[bytes]]:
    """The root and the digests of the prompt's full blocks."""
    root, digests = ChainRoot(request.adapter_id, request.cache_salt), list[bytes]()
    tokens = request.prompt_token_ids
    pool.extend_digests(digests, root, tokens, len(tokens) // pool.block_size)
    return root, digests


def _cached(pool: KVBlockPool, request: Request) -> tuple[int, ...]:
    """The cached blocks of the prompt."""
    root, digests = _digests(pool, request)
    return pool.lookup(root, request.prompt_token_ids, digests).block_ids


def _acquire_cached(pool: KVBlockPool, request: Request) -> list[int]:
    """A reference to the cached blocks of the prompt."""
    hits = list(_cached(pool, request))
    pool.acquire(hits)
    return hits


def _register(pool: KVBlockPool, request: Request, block_ids: list[int]) -> None:
    """Index blocks that hold the prompt, so that the next lookup hits them."""
    root, digests = _digests(pool, request)
    parent: BlockKey | ChainRoot = root
    size = pool.block_size
    for place, (block_id, digest) in enumerate(zip(block_ids, digests, strict=True)):
        tokens = tuple(request.prompt_token_ids[place * size : (place + 1) * size])
        parent = pool.register(block_id, parent, tokens, digest)


def _continuation(handover: Handover, now: float) -> Request:
    """What the decode engine gets: the prompt, its first output, and the rest of the limits."""
    request = handover.request
    sampling = request.sampling
    most = None if sampling.max_tokens is None else sampling.max_tokens - 1
    timeout_s = request.timeout_s
    if timeout_s is not None:
        timeout_s = max(0.0, timeout_s - (now - handover.timings.arrival_s))
    return replace(
        request,
        request_id=handover.name,
        prompt_token_ids=(*request.prompt_token_ids, *handover.first_tokens),
        sampling=replace(sampling, max_tokens=most, n=1),
        timeout_s=timeout_s,
        ttft_deadline_s=None,
        received_s=None,
        is_continuation=True,
    )


def _until(timings: SequenceTimings, now: float) -> SequenceTimings:
    """Of a sequence that was cancelled after its prefill."""
    return replace(timings, finished_s=now, decode_s=timings.decode_s + now - timings.finished_s)


def _joined(prefill: SequenceTimings, decode: SequenceTimings) -> SequenceTimings:
    """Of both phases; the hand-over is part of the decode phase."""
    handover_s = decode.arrival_s - prefill.finished_s
    return replace(
        decode,
        arrival_s=prefill.arrival_s,
        first_scheduled_s=prefill.first_scheduled_s,
        first_token_s=prefill.first_token_s,
        queue_s=prefill.queue_s,
        prefill_s=prefill.prefill_s,
        decode_s=decode.queue_s + decode.prefill_s + decode.decode_s + handover_s,
        preempted_s=prefill.preempted_s + decode.preempted_s,
        device_s=prefill.device_s + decode.device_s,
        num_preemptions=prefill.num_preemptions + decode.num_preemptions,
        num_prompt_tokens=prefill.num_prompt_tokens,
        num_cached_tokens=prefill.num_cached_tokens,
        num_output_tokens=prefill.num_output_tokens + decode.num_output_tokens,
        activities=(),
    )


def _busy(ends: Sequence[TransferEnd], duration_s: float) -> float:
    """The part of the time in which a step ran, as a mean over engines."""
    seconds = sum(record.seconds for end in ends for record in end.replica.engine.records)
    return min(1.0, seconds / len(ends) / duration_s) if duration_s > 0.0 else 0.0
