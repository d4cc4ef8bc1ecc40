"""`KVTiers`: KV blocks that a place outside of the pool keeps, and gives back as a cached prefix.

    a sequence leaves the batch ──> its full blocks are saved while they are still cached
    a sequence is next to enter ──> the blocks after its hits are restored, then it is admitted

What is restored is only ever a cached prefix: a span that is lost, or changed on its way, is
computed again, with the same bits. A save changes nothing here: a driver copies the blocks, then
`confirm` tells whether they had their content all the time. Both happen only where the cost model
predicts that a restore takes less time than computing the tokens.

The identity of a block is the digest of its chain, as in the pool, and its tokens are compared
too. With a `cache_salt` both are digests with the salt as key: who reads the files does not learn
the tokens from them. A driver moves the bytes; a plan never waits for it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

import msgspec

from quickstep.config import KVTierConfig
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.resources.arriving_blocks import ArrivingBlocks
from quickstep.core.resources.block_pool import BlockKey, ChainRoot, KVBlockPool
from quickstep.core.resources.resource import Preempt, Resource
from quickstep.core.sequence import Sequence
from quickstep.core.step import InFlightStep
from quickstep.types import Request

_KEY_BYTES = 16
_TOKENS_BYTES = 32  # of the digest of a block's tokens, with a salt
_LATENCY_S = 2e-3  # of a restore, without its bytes
_FIRST_RATE = 1e9  # bytes per second, before the first one is measured
_RATE_GAIN = 0.2
_MAX_CANDIDATES = 1024  # sequences whose blocks are to be saved; further ones are left out
_KEY_PREFIX = "stored kv of "


class TierBlock(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a block: the digest of its chain, and its tokens; see `block_identity`."""

    key: bytes
    tokens: bytes


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of one chain that are kept together, from the chain's block `first` on."""

    name: str
    first: int
    keys: tuple[bytes, ...]


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


class TierStats(msgspec.Struct, frozen=True):
    """What a tier keeps now, and counts since the start."""

    num_blocks: int
    num_bytes: int
    num_saved: int
    num_restored: int
    num_lost: int
    restore_bytes_per_s: float
    is_saving: bool


class _Candidate(msgspec.Struct, frozen=True):
    """The full blocks of a sequence that has left the batch before step `step_id` was planned."""

    root: ChainRoot
    keys: tuple[BlockKey, ...]
    step_id: int


class _Restore(msgspec.Struct):
    """A restore that was ordered, and the sequences that wait for it."""

    arriving: ArrivingBlocks
    sequences: SequenceOf[Sequence] = ()


def block_identity(root: ChainRoot, digest: bytes, token_ids: SequenceOf[int]) -> TierBlock:
    """What identifies a block in a tier: with a salt, nothing that can be computed without it."""
    return TierBlock(_chain_key(root, digest), _tokens(root, token_ids))


def _chain_key(root: ChainRoot, digest: bytes) -> bytes:
    if not root.cache_salt:
        return digest
    return blake2b(digest, digest_size=_KEY_BYTES, key=_secret(root)).digest()


def _tokens(root: ChainRoot, token_ids: SequenceOf[int]) -> bytes:
    tokens = array("q", token_ids).tobytes()
    if not root.cache_salt:
        return tokens
    return blake2b(tokens, digest_size=_TOKENS_BYTES, key=_secret(root)).digest()


def _secret(root: ChainRoot) -> bytes:
    """A salt may be longer than a key."""
    return blake2b(root.cache_salt.encode("utf-8", "surrogatepass")).digest()


class KVTiers(Resource):
    """The tier of one scheduler's pool. `in_flight` are the scheduler's steps, `next_step_id` gives
    the number of its next one.
    """

    def __init__(
        self,
        pool: KVBlockPool,
        cost_model: CostModel,
        config: KVTierConfig,
        in_flight: SequenceOf[InFlightStep],
        next_step_id: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._cost_model = cost_model
        self._config = config
        self._in_flight = in_flight
        self._next_step_id = next_step_id
        self._may_save = config.may_save
        self._spans: OrderedDict[str, Span] = OrderedDict()  # least recently used first
        self._places: dict[bytes, tuple[Span, int]] = {}  # by key: a span, and the place in it
        self._num_bytes = 0
        self._candidates: deque[_Candidate] = deque()
        self._saving: SaveOrder | None = None
        self._restores: dict[str, _Restore] = {}  # by request
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
            if any(key in self._places for key in span.keys):
                refused.append(span.name)
            else:
                self._add(span)
        if self._may_save:
            refused += self._make_room(0)
        return refused

    def forget_span(self, name: str) -> None:
        """A span cannot be read, or has other content."""
        if (span := self._spans.get(name)) is not None:
            self._num_lost += len(span.keys)
            self._remove(span)

    def stop_saving(self) -> None:
        """There is no room, or no permission: nothing is saved any more."""
        self._may_save = False
        self._candidates.clear()

    def stats(self) -> TierStats:
        """Counts for metrics."""
        return TierStats(
            len(self._places),
            self._num_bytes,
            self._num_saved,
            self._num_restored,
            self._num_lost,
            self._rate,
            self._may_save,
        )

    def _add(self, span: Span) -> None:
        self._spans[span.name] = span
        for index, key in enumerate(span.keys):
            self._places[key] = span, index
        self._num_bytes += len(span.keys) * self._config.block_bytes

    def _remove(self, span: Span) -> None:
        del self._spans[span.name]
        for key in span.keys:
            del self._places[key]
        self._num_bytes -= len(span.keys) * self._config.block_bytes

    def _make_room(self, num_bytes: int) -> list[str]:
        """Remove what was used least recently; returns the names."""
        removed = []
        while self._spans and self._num_bytes + num_bytes > self._config.max_bytes:
            span = next(iter(self._spans.values()))
            self._remove(span)
            removed.append(span.name)
        return removed

    def _pays(self, first: int, num_blocks: int) -> bool:
        """Whether restoring blocks of a chain is predicted to take less than computing them."""
        size, costs = self._pool.block_size, self._cost_model
        load = StepLoad.of_span(first * size, num_blocks * size)
        restore_s = _LATENCY_S + num_blocks * self._config.block_bytes / self._rate
        return restore_s < costs.seconds(load) - costs.seconds(StepLoad())

    # -- saving -----------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """It leaves the batch, its blocks may be evicted from now on: save the full ones."""
        self._considered.discard(sequence.sequence_id)
        keys = sequence.residency.keys
        if keys and self._may_save and len(self._candidates) < _MAX_CANDIDATES:
            candidate = _Candidate(sequence.root, tuple(keys), self._next_step_id())
            self._candidates.append(candidate)

    @property
    def is_saving(self) -> bool:
        """Whether blocks are being saved, or are to be."""
        return bool(self._candidates or self._saving is not None)

    def take_save(self) -> SaveOrder | None:
        """The next order, once the one before is `saved`; None for nothing yet."""
        if self._saving is not None:
            return None
        while self._candidates:
            if not self._is_over(self._candidates[0].step_id):
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
        root, places = candidate.root, self._places
        keys = [_chain_key(root, key.digest) for key in candidate.keys]
        for key in reversed(keys):  # the root of the chain becomes the latest
            if key in places:
                self._spans.move_to_end(places[key][0].name)
        first = next((index for index, key in enumerate(keys) if key not in places), None)
        if first is None:
            return None
        content: list[BlockKey] = []
        block_ids: list[int] = []
        for index in range(first, min(len(keys), first + self._config.span_blocks)):
            block_id = self._pool.block_of(candidate.keys[index])
            if block_id is None or keys[index] in places:
                break
            content.append(candidate.keys[index])
            block_ids.append(block_id)
        num_bytes = len(block_ids) * self._config.block_bytes
        if not block_ids or num_bytes > self._config.max_bytes:
            return None
        if not self._pays(first, len(block_ids)):
            return None
        blocks = tuple(block_identity(root, key.digest, key.token_ids) for key in content)
        name = blake2b(b"".join(block.key for block in blocks), digest_size=_KEY_BYTES).hexdigest()
        span = Span(name, first, tuple(block.key for block in blocks))
        removed = tuple(self._make_room(num_bytes))
        return SaveOrder(span, blocks, tuple(block_ids), tuple(content), removed)

    def _is_over(self, step_id: int) -> bool:
        """Whether all steps up to this one are committed, if it was planned."""
        return not self._in_flight or self._in_flight[0].plan.step_id > step_id

    # -- restoring --------------------------------------------------------------------------------

    @staticmethod
    def key_of(request_id: str) -> str:
        """The key of sequences that wait for a restore."""
        return _KEY_PREFIX + request_id

    def key(self, request: Request) -> str:
        """The restore of its blocks, if there is one."""
        return self.key_of(request.request_id) if request.request_id in self._restores else ""

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
            self._considered.add(head.sequence_id)
            num_blocks = self._num_to_restore(head)
            if not num_blocks:
                return
            self._restore(head, num_blocks, waiting, now)

    def ended(self, sequence: Sequence) -> None:
        """It may have waited."""
        self._considered.discard(sequence.sequence_id)

    def take_restores(self) -> SequenceOf[RestoreOrder]:
        """What was ordered, once no step in flight uses the blocks any more."""
        orders = []
        while self._ordered and self._is_over(self._ordered[0][0] - 1):
            orders.append(self._ordered.popleft()[1])
        return orders

    def restored(self, request_id: str, num_blocks: int) -> None:
        """The next so many blocks of a restore have their content."""
        self._restores[request_id].arriving.filled(num_blocks)
        self._num_restored += num_blocks

    def measured(self, num_blocks: int, seconds: float) -> None:
        """A restore of so many blocks took so long."""
        rate = num_blocks * self._config.block_bytes / max(seconds, 1e-6)
        self._rate += _RATE_GAIN * (rate - self._rate)

    def end_restoring(self, request_id: str) -> None:
        """Nothing writes to the blocks of a request any more: those with content are cached."""
        restore = self._restores.pop(request_id)
        restore.arriving.release()
        num_tokens = restore.arriving.num_filled * self._pool.block_size
        for sequence in restore.sequences:
            sequence.num_restored_tokens += num_tokens

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

    def _num_to_restore(self, sequence: Sequence) -> int:
        """How many blocks after its hits are kept, if it pays to restore them."""
        first, end = len(sequence.known_hits.block_ids), sequence.num_reusable
        num_blocks = 0
        for digest in sequence.digests[first : end // self._pool.block_size]:
            if _chain_key(sequence.root, digest) not in self._places:
                break
            num_blocks += 1
        is_open = sequence.request.request_id in self._restores
        return 0 if is_open or not self._pays(first, num_blocks) else num_blocks

    def _restore(
        self, sequence: Sequence, num_blocks: int, waiting: WaitingQueue, now: float
    ) -> None:
        hits, size, root = sequence.known_hits.block_ids, self._pool.block_size, sequence.root
        end = len(hits) + num_blocks
        token_ids, digests = tuple(sequence.token_ids[: end * size]), sequence.digests[:end]
        restore = _Restore(ArrivingBlocks(self._pool, root, token_ids, digests, hits))
        request = sequence.request

        def begin() -> None:
            self._restores[request.request_id] = restore

        restore.sequences = waiting.await_for(request, begin, now)
        fresh = restore.arriving.fresh
        pieces = self._pieces(root, digests[len(hits) :], token_ids[len(hits) * size :], fresh)
        order = RestoreOrder(request.request_id, pieces)
        self._ordered.append((self._next_step_id(), order))

    def _pieces(
        self,
        root: ChainRoot,
        digests: SequenceOf[bytes],
        token_ids: SequenceOf[int],
        block_ids: SequenceOf[int],
    ) -> tuple[RestorePiece, ...]:
        """The blocks with these digests and tokens, by span, to be copied to `block_ids`."""
        size = self._pool.block_size
        pieces: list[RestorePiece] = []
        blocks = [
            block_identity(root, digest, token_ids[index * size : (index + 1) * size])
            for index, digest in enumerate(digests)
        ]
        start = 0
        while start < len(blocks):
            span, place = self._places[blocks[start].key]
            end = start + 1
            while end < len(blocks) and self._places[blocks[end].key][0] is span:
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
            key: (span, index) for span in self._spans.values() for index, key in enumerate(span.keys)
        }
        assert places == self._places, "the places differ from the spans"
        assert self._num_bytes == len(places) * self._config.block_bytes, "the bytes are wrong"
        saving = 0 if self._saving is None else len(self._saving.block_ids)
        num_bytes = self._num_bytes + saving * self._config.block_bytes
        is_within = num_bytes <= self._config.max_bytes or not self._config.may_save
        assert is_within, f"{num_bytes} bytes are kept, {self._config.max_bytes} are allowed"
