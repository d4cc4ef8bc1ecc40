"""`KVTiers`: KV blocks that a place outside of the pool keeps, and gives back as a cached prefix.

    a sequence leaves the batch ──> its full blocks are saved while they are still cached
    a sequence is next to enter ──> the blocks after its hits are restored, then it is admitted

What is restored is only ever a cached prefix: a span that is lost, or changed on its way, is
computed again, with the same bits. A save changes nothing here: a driver copies the blocks, then
`confirm` tells whether they had their content all the time. Both happen only where the cost model
predicts that a restore takes less time than computing the tokens.

A block is found by the digest of its chain, as in the pool, and what is found is compared by
`identities`, another digest over the same: of adapter, salt and all tokens up to its end. Who reads
the files finds no token there, and with a salt cannot check a guess. A driver moves the bytes; a
plan never waits for it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

import msgspec

from quickstep.config import KVTierConfig
from quickstep.core.accounting import KVTierStats
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.resources.arriving_blocks import ArrivingBlocks
from quickstep.core.resources.block_pool import BlockKey, ChainRoot, KVBlockPool
from quickstep.core.resources.resource import Preempt, Resource
from quickstep.core.sequence import Sequence
from quickstep.core.step import StepsInFlight
from quickstep.types import Request

_IDENTITY_BYTES = 32
_FIRST_RATE = 1e9  # bytes per second, before the first one is measured
_RATE_GAIN = 0.2
_RATE_RECOVERY = 0.02  # of the way back to the first rate, when a restore does not pay
# Most blocks that are saved are never restored, and a save takes about as long as a restore: save
# what takes at least so many times longer to compute.
_SAVE_RATIO = 10.0
_MAX_CANDIDATES = 1024  # sequences whose blocks are to be saved; further ones are left out
_KEY_PREFIX = "stored kv of "


class TierBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block of a chain: the digest by which it is found, and its identity."""

    digest: bytes
    identity: bytes


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of one chain that are kept together, from the chain's block `first` on."""

    name: str
    first: int
    digests: tuple[bytes, ...]


class SaveOrder(msgspec.Struct, frozen=True):
    """Remove the spans `removed`, copy `block_ids`, let `confirm` check the copy, keep it; then
    call `saved`.
    """

    span: Span
    blocks: tuple[TierBlock, ...]
    block_ids: tuple[int, ...]
    content: tuple[BlockKey, ...]
    removed: tuple[str, ...] = ()


class RestorePiece(msgspec.Struct, frozen=True):
    """Blocks of a span, from its block `start` on, and where they go."""

    name: str
    start: int
    blocks: tuple[TierBlock, ...]
    block_ids: tuple[int, ...]


class RestoreOrder(msgspec.Struct, frozen=True):
    """Fill the blocks of the pieces in order; call `restored` for each piece, then
    `Scheduler.end_restoring`.
    """

    request_id: str
    pieces: tuple[RestorePiece, ...]


class _Candidate(msgspec.Struct, frozen=True):
    """The full blocks of a sequence that has left the batch before step `step_id` was planned."""

    root: ChainRoot
    keys: tuple[BlockKey, ...]
    step_id: int


class _Restore(msgspec.Struct):
    """A restore that was ordered for some sequences; `digests` are those of its blocks. Requests
    with the same prefix wait for it too.
    """

    arriving: ArrivingBlocks
    digests: SequenceOf[bytes]
    sequences: SequenceOf[Sequence] = ()
    request_ids: list[str] = msgspec.field(default_factory=list)


def identities(root: ChainRoot, blocks: Iterable[SequenceOf[int]]) -> Iterator[bytes]:
    """Of the leading blocks of a chain, from their tokens: equal ones have equal content."""
    content = msgspec.msgpack.encode((root.adapter, root.cache_salt))
    for token_ids in blocks:
        content += array("q", token_ids).tobytes()
        content = blake2b(content, digest_size=_IDENTITY_BYTES).digest()
        yield content


class KVTiers(Resource):
    """The tier of one scheduler's pool; `steps` are the scheduler's."""

    def __init__(
        self,
        pool: KVBlockPool,
        cost_model: CostModel,
        config: KVTierConfig,
        steps: StepsInFlight,
    ) -> None:
        self._pool = pool
        self._cost_model = cost_model
        self._config = config
        self._steps = steps
        self._may_save = config.may_save
        self._spans: OrderedDict[str, Span] = OrderedDict()  # least recently used first
        self._places: dict[bytes, tuple[Span, int]] = {}  # by digest: a span, and the place in it
        self._num_bytes = 0
        self._candidates: deque[_Candidate] = deque()
        self._saving: SaveOrder | None = None
        self._restores: dict[str, _Restore] = {}  # by the request for which it was ordered
        self._awaited: dict[str, str] = {}  # by request: the one whose restore it waits for
        self._arriving: dict[bytes, str] = {}  # by digest: in whose restore a block is
        self._ordered: deque[tuple[int, RestoreOrder]] = deque()  # each before a step
        self._considered: set[str] = set()  # waiting sequences for which nothing is restored now
        self._rate = _FIRST_RATE
        self._num_saved = self._num_restored = self._num_lost = 0

    # -- what is kept -----------------------------------------------------------------------------

    def add_spans(self, spans: Iterable[Span]) -> SequenceOf[str]:
        """What was kept earlier, least recently used first; returns the names of those that are too
        much, or there already.
        """
        refused = []
        for span in spans:
            if any(digest in self._places for digest in span.digests):
                refused.append(span.name)
            else:
                self._add(span)
        if self._may_save:
            refused += self._make_room(0)
        return refused

    def forget_span(self, name: str) -> None:
        """A span cannot be read, or has other content."""
        if (span := self._spans.get(name)) is not None:
            self._num_lost += len(span.digests)
            self._remove(span)

    def stop_saving(self) -> None:
        """There is no room, or no permission: nothing is saved any more."""
        self._may_save = False
        self._candidates.clear()

    def stats(self) -> KVTierStats:
        """Counts for metrics."""
        return KVTierStats(
            len(self._places),
            self._num_bytes,
            self._num_saved,
            self._num_restored,
            self._num_lost,
            int(self._may_save),
        )

    def _add(self, span: Span) -> None:
        self._spans[span.name] = span
        for index, digest in enumerate(span.digests):
            self._places[digest] = span, index
        self._num_bytes += len(span.digests) * self._config.block_bytes

    def _remove(self, span: Span) -> None:
        del self._spans[span.name]
        for digest in span.digests:
            del self._places[digest]
        self._num_bytes -= len(span.digests) * self._config.block_bytes

    def _make_room(self, num_bytes: int) -> list[str]:
        """Remove what was used least recently; returns the names."""
        removed = []
        while self._spans and self._num_bytes + num_bytes > self._config.max_bytes:
            span = next(iter(self._spans.values()))
            self._remove(span)
            removed.append(span.name)
        return removed

    def _pays(self, first: int, num_blocks: int, ratio: float = 1.0) -> bool:
        """Whether computing blocks of a chain is predicted to take longer than restoring them,
        `ratio` times as long.
        """
        size, costs = self._pool.block_size, self._cost_model
        load = StepLoad.of_span(first * size, num_blocks * size)
        restore_s = self._config.latency_s + num_blocks * self._config.block_bytes / self._rate
        return ratio * restore_s < costs.seconds(load) - costs.seconds(StepLoad())

    # -- saving -----------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """It leaves the batch, its blocks may be evicted from now on: save the full ones."""
        self._considered.discard(sequence.sequence_id)
        keys = sequence.residency.keys
        if keys and self._may_save and len(self._candidates) < _MAX_CANDIDATES:
            candidate = _Candidate(sequence.root, tuple(keys), self._steps.next_id)
            self._candidates.append(candidate)

    @property
    def is_restoring(self) -> bool:
        """Whether blocks are held that no sequence may have."""
        return bool(self._restores)

    @property
    def is_saving(self) -> bool:
        """Whether an order is being carried out."""
        return self._saving is not None

    def take_save(self) -> SaveOrder | None:
        """The next order, once the one before is `saved`; None for nothing yet."""
        if self._saving is not None:
            return None
        while self._candidates:
            if not self._steps.are_over_before(self._candidates[0].step_id + 1):
                return None
            order = self._save(self._candidates[0])
            if order is not None:
                self._saving = order
                return order
            self._candidates.popleft()
        return None

    def confirm(self, order: SaveOrder) -> bool:
        """Whether the blocks of an order have kept their content until now."""
        return all(map(self._pool.has_content, order.block_ids, order.content))

    def saved(self, order: SaveOrder, is_saved: bool) -> None:
        """An order is carried out; without `is_saved` nothing is kept."""
        self._saving = None
        if is_saved:
            self._add(order.span)
            self._num_saved += len(order.block_ids)
        elif self._candidates:  # its blocks were evicted
            self._candidates.popleft()

    def _save(self, candidate: _Candidate) -> SaveOrder | None:
        """Its first blocks that are cached and not kept; None if there are none that pay."""
        keys, places = candidate.keys, self._places
        for key in reversed(keys):  # the root of the chain becomes the latest
            if key.digest in places:
                self._spans.move_to_end(places[key.digest][0].name)
        first = next((at for at, key in enumerate(keys) if key.digest not in places), len(keys))
        blocks: dict[bytes, tuple[BlockKey, int]] = {}  # by digest
        for key in keys[first : first + self._config.span_blocks]:
            block_id = self._pool.block_of(key)
            if block_id is None or key.digest in places or key.digest in blocks:
                break
            blocks[key.digest] = key, block_id
        num_bytes = len(blocks) * self._config.block_bytes
        if not blocks or num_bytes > self._config.max_bytes:
            return None
        if not self._pays(first, len(blocks), _SAVE_RATIO):
            return None
        end = first + len(blocks)
        known = list(identities(candidate.root, (key.token_ids for key in keys[:end])))[first:]
        name = blake2b(b"".join(known), digest_size=16).hexdigest()
        return SaveOrder(
            Span(name, first, tuple(blocks)),
            tuple(map(TierBlock, blocks, known)),
            tuple(block_id for _, block_id in blocks.values()),
            tuple(key for key, _ in blocks.values()),
            tuple(self._make_room(num_bytes)),
        )

    # -- restoring --------------------------------------------------------------------------------

    def key(self, request: Request) -> str:
        """The restore of its blocks, if there is one."""
        awaited = self._awaited.get(request.request_id)
        return "" if awaited is None else _KEY_PREFIX + awaited

    def is_ready(self, key: str) -> bool:
        """Whether it is over."""
        return key.removeprefix(_KEY_PREFIX) not in self._restores

    def prepare(
        self, waiting: WaitingQueue, batch: RunningBatch, now: float, preempt: Preempt
    ) -> None:
        """Restore for the sequence that is admitted next, and for those after it until there is one
        for which nothing is to be restored. Each is considered once before it is admitted.
        """
        while self._places and (head := waiting.head) is not None:
            if head.num_pending or head.sequence_id in self._considered:
                return
            self._lookup(head)
            if not self._has_room(head, len(batch)):
                return
            if not self._await_blocks(head, waiting, now):
                return

    def _await_blocks(self, sequence: Sequence, waiting: WaitingQueue, now: float) -> bool:
        """Let a sequence wait for blocks after its hits; False if there is nothing to wait for."""
        num_hits = len(sequence.known_hits.block_ids)
        missing = sequence.digests[num_hits : sequence.num_reusable // self._pool.block_size]
        name = self._arriving.get(missing[0]) if missing else None
        is_new = name is None
        if name is None:
            self._considered.add(sequence.sequence_id)
            num_blocks = self._num_to_restore(num_hits, missing)
            if not num_blocks:
                return False
            name = self._restore(sequence, num_blocks)
        request_id, restore = sequence.request.request_id, self._restores[name]

        def begin() -> None:
            self._awaited[request_id] = name
            restore.request_ids.append(request_id)

        sequences = waiting.await_for(sequence.request, begin, now)
        if is_new:
            restore.sequences = sequences
        return True

    def ended(self, sequence: Sequence, now: float) -> None:
        """It may have waited."""
        self._considered.discard(sequence.sequence_id)

    def take_restores(self) -> SequenceOf[RestoreOrder]:
        """What was ordered, once no step in flight uses the blocks any more."""
        orders = []
        while self._ordered and self._steps.are_over_before(self._ordered[0][0]):
            orders.append(self._ordered.popleft()[1])
        return orders

    def restored(self, request_id: str, num_blocks: int) -> None:
        """The next so many blocks of a restore have their content."""
        self._restores[request_id].arriving.filled(num_blocks)
        self._num_restored += num_blocks

    def measured(self, num_blocks: int, seconds: float) -> None:
        """A restore of so many blocks took so long, with its latency."""
        reading_s = max(seconds - self._config.latency_s, seconds / 4, 1e-6)
        rate = num_blocks * self._config.block_bytes / reading_s
        self._rate += _RATE_GAIN * (rate - self._rate)

    def end_restoring(self, request_id: str) -> str:
        """Nothing writes to the blocks of a request any more: those with content are cached.
        Returns the key of the sequences that wait for it, which `Scheduler.arrived` takes.
        """
        restore = self._restores.pop(request_id)
        restore.arriving.release()
        for digest in restore.digests:
            self._arriving.pop(digest, None)
        for waiting_id in restore.request_ids:
            del self._awaited[waiting_id]
        num_tokens = restore.arriving.num_filled * self._pool.block_size
        for sequence in restore.sequences:
            sequence.num_restored_tokens += num_tokens
        return _KEY_PREFIX + request_id

    def _lookup(self, sequence: Sequence) -> None:
        """Bring the hits of a waiting sequence up to date."""
        pool, digests, tokens = self._pool, sequence.digests, sequence.token_ids
        num_blocks = sequence.num_reusable // pool.block_size
        pool.extend_digests(digests, sequence.root, tokens, num_blocks)
        known = digests[:num_blocks]
        hits = pool.lookup(sequence.root, tokens, known, sequence.known_hits)
        sequence.known_hits = hits

    def _has_room(self, sequence: Sequence, num_running: int) -> bool:
        """Whether there are blocks for a sequence, and one more for each that runs: it is admitted
        once its prefix is restored.
        """
        hits, size = sequence.known_hits.block_ids, self._pool.block_size
        needed = -(-len(sequence.token_ids) // size) - len(hits) + num_running
        return needed <= self._pool.num_free_besides(hits)

    def _num_to_restore(self, first: int, missing: SequenceOf[bytes]) -> int:
        """How many of the blocks with these digests, from a chain's block `first` on, are kept, if
        it pays to restore them.
        """
        num_blocks = 0
        for digest in missing:
            if digest in self._arriving or digest not in self._places:
                break
            num_blocks += 1
        if num_blocks and not self._pays(first, num_blocks):
            # else a slow hour of the disk would end restores for good: no other is measured
            self._rate += _RATE_RECOVERY * (_FIRST_RATE - self._rate)
            return 0
        return num_blocks

    def _restore(self, sequence: Sequence, num_blocks: int) -> str:
        """Order so many blocks after its hits; returns the name of the restore."""
        hits, size, root = sequence.known_hits.block_ids, self._pool.block_size, sequence.root
        end = len(hits) + num_blocks
        token_ids, digests = tuple(sequence.token_ids[: end * size]), sequence.digests[:end]
        arriving = ArrivingBlocks(self._pool, root, token_ids, digests, hits)
        missing = digests[len(hits) :]
        blocks = (token_ids[start : start + size] for start in range(0, len(token_ids), size))
        known = list(identities(root, blocks))[len(hits) :]
        pieces = self._pieces(list(map(TierBlock, missing, known)), arriving.fresh)
        name = sequence.request.request_id
        self._restores[name] = _Restore(arriving, missing)
        self._arriving.update(dict.fromkeys(missing, name))
        self._ordered.append((self._steps.next_id, RestoreOrder(name, pieces)))
        return name

    def _pieces(
        self, blocks: SequenceOf[TierBlock], block_ids: SequenceOf[int]
    ) -> tuple[RestorePiece, ...]:
        """Blocks that are kept, by span, to be copied to `block_ids`."""
        pieces: list[RestorePiece] = []
        start = 0
        while start < len(blocks):
            span, place = self._places[blocks[start].digest]
            end = start + 1
            while end < len(blocks) and self._places[blocks[end].digest][0] is span:
                end += 1
            piece = tuple(blocks[start:end]), tuple(block_ids[start:end])
            pieces.append(RestorePiece(span.name, place, *piece))
            start = end
        for name in [piece.name for piece in reversed(pieces)]:  # the chain's root is the latest
            self._spans.move_to_end(name)
        return tuple(pieces)

    # -- checks -----------------------------------------------------------------------------------

    def check(self, running: Iterable[Sequence]) -> None:
        """The index agrees with the spans, and both with the limit."""
        places = {
            digest: (span, index)
            for span in self._spans.values()
            for index, digest in enumerate(span.digests)
        }
        assert places == self._places, "the places differ from the spans"
        assert self._num_bytes == len(places) * self._config.block_bytes, "the bytes are wrong"
        saving = 0 if self._saving is None else len(self._saving.block_ids)
        num_bytes = self._num_bytes + saving * self._config.block_bytes
        is_within = num_bytes <= self._config.max_bytes or not self._config.may_save
        assert is_within, f"{num_bytes} bytes are kept, {self._config.max_bytes} are allowed"
