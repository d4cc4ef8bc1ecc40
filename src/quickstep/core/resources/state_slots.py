"""`StateSlots`: the slots of sequences' states, in models with layers that keep a state.

A running sequence has a slot, which each of its rows moves on. A state cannot be cut to a shorter
prefix as keys and values can, so it is saved on the way, at ends of KV blocks, in slots of its
own. A sequence is a prefix hit up to the last of its cached blocks at whose end a state is saved,
and begins with that. Saved are

    the end of a prompt   its last full block before the last token
    a branching point     where another sequence with the same beginning left it, as the KV cache
                          has more of a prompt than any saved state
    ends of turns         the first one, of a system prompt, and the last two: where one of the
                          model's end tokens is in the prompt
    every `interval`      tokens of a long prompt
    each decoded block    the newest of a sequence takes the place of the one before it

Saved states that were not used for longest are dropped first when slots are needed. As steps run in
plan order, a slot can have another owner while steps that use it still run; within one step no slot
is read and written by different rows (`_touched`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

import msgspec

from quickstep.core.resources.block_pool import BlockKey, KVBlockPool
from quickstep.core.resources.resource import Resource
from quickstep.core.sequence import Residency, Sequence
from quickstep.core.step import StepsInFlight
from quickstep.types import RowState

_LARGEST_SHARE = 4  # one prompt's states on the way take at most a part of the slots, 1 / 4


def _turn_ends(sequence: Sequence) -> list[int]:
    """The positions after end tokens in a sequence, ascending."""
    end_ids, tokens = sequence.request.eos_token_ids, sequence.token_ids
    return [place for place, token_id in enumerate(tokens, 1) if token_id in end_ids]


class SavedState(msgspec.Struct, eq=False):
    """A saved state: `slot` has it once step `step_id` has run.

    Attributes:
        position: How many tokens it is after.
        key: The content of the last KV block before it; None until that block is registered.
        writer: Who saves it; None once that step is over, which has not failed.
        num_uses: How many sequences began with it.
    """

    slot: int
    step_id: int
    position: int
    writer: Residency | None
    key: BlockKey | None = None
    num_uses: int = 0


class StateSlots(Resource):
    """`num_slots` slots, 2 at least, next to the KV blocks of `pool`."""

    def __init__(
        self, pool: KVBlockPool, num_slots: int, interval: int, in_flight: StepsInFlight
    ) -> None:
        assert num_slots > 1, "a sequence that begins with a saved state has two"
        self._pool = pool
        self._num_slots = num_slots
        self._interval = max(1, interval // pool.block_size) * pool.block_size
        self._in_flight = in_flight
        self._free = deque(range(num_slots))
        self._touched = [-1] * num_slots  # the last step with a row that reads or writes the slot
        # by the block that ends where they do, least recently used first
        self._saved: OrderedDict[int, SavedState] = OrderedDict()

    # -- admission --------------------------------------------------------------------------------

    def num_usable(self, block_ids: SequenceOf[int]) -> int:
        """How many of a prefix's leading blocks a sequence can begin after."""
        for count in range(len(block_ids), 0, -1):
            if self._is_valid(block_ids[count - 1]):
                return count
        return 0

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is a slot, with what it begins with kept. A state that the step which is
        planned saves is waited for: rows of one step do not read what others write.
        """
        return self.fits_without(sequence, ())

    def fits_without(self, sequence: Sequence, leaving: SequenceOf[Sequence]) -> bool:
        """The same, with the slots of `leaving`."""
        block_ids = sequence.known_hits.block_ids
        num_usable = self.num_usable(block_ids) if self._pool.prefix_caching else 0
        source = self._saved[block_ids[num_usable - 1]] if num_usable else None
        if source is not None and source.step_id == self._in_flight.next_id:
            return False
        num_free = len(leaving) - (source is not None and self._is_idle(source.slot))
        slots = (*self._free, *[saved.slot for saved in self._saved.values()])
        return num_free + sum(map(self._is_idle, slots)) > 0

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        """Give it a slot; `residency` has the cached blocks that it begins after."""
        num_hits = residency.planned // self._pool.block_size
        source = None
        if num_hits:
            block_id = residency.blocks[num_hits - 1]
            source = self._saved[block_id]
            source.num_uses += 1
            self._saved.move_to_end(block_id)
            self._touched[source.slot] = self._in_flight.next_id
        slot = self._take()
        assert slot is not None, "a sequence that fits gets a slot"
        points = list(self._points(sequence, residency)) if self._pool.prefix_caching else []
        residency.state = StateCursor(self, residency, slot, source, points)

    def _points(self, sequence: Sequence, residency: Residency) -> Iterator[int]:
        """Where the state of a prompt is saved, in ascending order."""
        size, begin = self._pool.block_size, residency.planned
        end = (len(sequence.token_ids) - 1) // size * size
        branch = len(sequence.known_hits.block_ids) * size
        first = (begin // self._interval + 1) * self._interval
        num_most = max(1, self._num_slots // _LARGEST_SHARE)
        on_the_way = range(first, end, self._interval)[-num_most:]
        turns = [turn // size * size for turn in _turn_ends(sequence)]
        points = (*on_the_way, *turns[:1], *turns[-2:], branch, end)
        yield from sorted({point for point in points if begin < point <= end})

    def release(self, sequence: Sequence) -> None:
        """Free its slot, and those with states whose blocks are not registered."""
        cursor = sequence.residency.state
        assert cursor is not None, "a running sequence has a slot"
        self._free.extend(cursor.slots)
        sequence.residency.state = None

    # -- saved states -----------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._pool.block_size

    @property
    def saves(self) -> bool:
        """Whether there is a use for saved states."""
        return self._pool.prefix_caching

    def touch(self, slot: int) -> int:
        """A row of the step that is planned uses it; returns the step's number."""
        step_id = self._in_flight.next_id
        self._touched[slot] = step_id
        return step_id

    def take_to_save(self) -> int | None:
        """A slot to save a state to; None if all are in use."""
        return self._take()

    def is_over(self, step_id: int) -> bool:
        """Whether a step is committed or has failed, which the one that is planned is not."""
        in_flight = self._in_flight
        return step_id < in_flight.next_id and in_flight.are_over_before(step_id + 1)

    def keep(self, saved: SavedState) -> bool:
        """Sequences may begin with a state whose block is registered; False if they could
        already, so that it is dropped.
        """
        assert saved.key is not None
        block_id = self._pool.block_of(saved.key)
        if block_id is None or self._is_valid(block_id):
            self._free.append(saved.slot)
            return False
        self._saved[block_id] = saved
        return True

    def replace_older(self, older: SavedState) -> None:
        """Drop a saved state of a sequence that has a newer one, unless others have used it."""
        block_id = None if older.key is None else self._pool.block_of(older.key)
        is_kept = block_id is not None and self._saved.get(block_id) is older
        if block_id is not None and is_kept and not older.num_uses:
            self._drop(block_id)

    def _is_valid(self, block_id: int) -> bool:
        """Whether a state is saved at the end of a block; one that is of no use is dropped."""
        saved = self._saved.get(block_id)
        if saved is None:
            return False
        assert saved.key is not None, "its block is registered"
        writer = saved.writer
        if not self._pool.has_content(block_id, saved.key) or (
            writer is not None and writer.invalidated
        ):
            self._drop(block_id)
            return False
        if writer is not None and self.is_over(saved.step_id):
            saved.writer = None
        return True

    def _drop(self, block_id: int) -> None:
        self._free.append(self._saved.pop(block_id).slot)

    def _is_idle(self, slot: int) -> bool:
        """Whether no row of the step that is planned uses a slot."""
        return self._touched[slot] != self._in_flight.next_id

    def _take(self) -> int | None:
        """A free slot, or that of the saved state that was not used for longest."""
        if not (self._free and self._is_idle(self._free[0])):
            for block_id in list(self._saved):
                self._is_valid(block_id)
        if self._free and self._is_idle(self._free[0]):
            return self._free.popleft()
        for block_id, saved in self._saved.items():
            if self._is_idle(saved.slot):
                del self._saved[block_id]
                return saved.slot
        free = next(filter(self._is_idle, self._free), None)
        if free is not None:
            self._free.remove(free)
        return free

    def check(self, running: Iterable[Sequence]) -> None:
        """Every slot is free, of a saved state, or of one sequence."""
        cursors = [sequence.residency.state for sequence in running]
        held = [slot for cursor in cursors if cursor is not None for slot in cursor.slots]
        kept = [saved.slot for saved in self._saved.values()]
        assert sorted([*self._free, *kept, *held]) == list(range(self._num_slots)), (
            f"slots of states: {list(self._free)} free, {kept} saved and {held} held do not add up"
        )
        for block_id, saved in self._saved.items():
            assert saved.position % self._pool.block_size == 0, f"a state within {block_id}"


class StateCursor:
    """The state of one residency: where it is, and what its rows do with it.

    Attributes:
        slot: Its own.
        position: How many tokens the state in the slot is after; those that were drafts and follow
            are recorded there.
        unregistered: What was saved, but its block is not registered.
        begun_with: The saved state with which its first row begins, until a later row.
    """

    __slots__ = ("_newest", "_owner", "_points", "_residency", "begun_with", "position", "slot",
                 "unregistered")  # fmt: skip

    def __init__(
        self,
        owner: StateSlots,
        residency: Residency,
        slot: int,
        source: SavedState | None,
        points: list[int],
    ) -> None:
        self._owner = owner
        self._residency = residency
        self._points = points  # of the prompt, ascending
        self._newest: SavedState | None = None  # of those since the prompt
        self.slot = slot
        self.position = 0
        self.unregistered: list[SavedState] = []
        self.begun_with = source

    @property
    def slots(self) -> tuple[int, ...]:
        """All that it holds."""
        return self.slot, *[saved.slot for saved in self.unregistered]

    def depends_on(self) -> Residency | None:
        """Who computes, in a step in flight, the state that it began with; None for none."""
        return None if self.begun_with is None else self.begun_with.writer

    def advance(self, start: int, end: int, num_drafts: int) -> RowState:
        """What the row from position `start` to `end` does, the last of whose tokens are drafts."""
        owner, slot = self._owner, self.slot
        step_id = owner.touch(slot)
        if start == 0:
            source, before = -1, 0
        elif not self.position:
            assert self.begun_with is not None, "a later position is after a saved state"
            source, before = self.begun_with.slot, start
            owner.touch(source)
        else:
            source, before = slot, self.position
            if self.begun_with is not None and owner.is_over(self.begun_with.step_id):
                self.begun_with = None
        self.position = certain = end - num_drafts
        saves = []
        for position in self._due(before, certain):
            if (free := owner.take_to_save()) is not None:
                owner.touch(free)
                saves.append((position - before, free))
                self.unregistered.append(SavedState(free, step_id, position, self._residency))
        return RowState(source, slot, start - before if start else 0, tuple(saves))

    def _due(self, before: int, end: int) -> list[int]:
        """The positions after `before` up to `end` at which the state is saved."""
        points = self._points
        if points:
            due = [point for point in points if before < point <= end]
            self._points = [point for point in points if point > end]
            return due
        size = self._owner.block_size
        last = end // size * size
        is_decoding = end > self._residency.prefill_end
        return [last] if is_decoding and last > before and self._owner.saves else []

    def registered(self, keys: SequenceOf[BlockKey]) -> None:
        """The residency's leading blocks have these keys by now."""
        size = self._owner.block_size
        while self.unregistered and self.unregistered[0].position <= len(keys) * size:
            saved = self.unregistered.pop(0)
            saved.key = keys[saved.position // size - 1]
            if not self._owner.keep(saved):
                continue
            if saved.position > self._residency.prefill_end:
                if self._newest is not None:
                    self._owner.replace_older(self._newest)
                self._newest = saved
