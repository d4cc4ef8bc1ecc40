"""`DecodeGroup`: decode rows that are planned and committed together, for drivers that compute
nothing.

In the simulator, a step differs from the one before it in few rows: those of arrivals, and those
that begin a block, fill one, or end. The other rows only become one token longer, which the group
counts for all of them at once. Everything that a later decision or a report reads is equal to the
last bit to what rows that are listed in the plan give: charges are whole numbers
(`accounting.UnitTicks`), and blocks are allocated and registered in the same order.

Owned by `GroupedScheduler`. While a sequence is in the group, its tokens, its planned positions and
its charge are those of the last `settle`; all else of it is up to date.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

import msgspec

from quickstep.core.accounting import UnitTicks
from quickstep.core.cost_model import StepLoad
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.sequence import Rank, Sequence
from quickstep.types import SequenceOutput, StepRecord


class DecodeSteps(msgspec.Struct, frozen=True):
    """Steps that were planned and committed: their records, and the sequences that the last of them
    ended.
    """

    records: tuple[StepRecord, ...] = ()
    outputs: tuple[SequenceOutput, ...] = ()


class _Member(msgspec.Struct, eq=False):
    """A sequence of the group.

    Attributes:
        shift: Its next position is that plus the number of the group's steps.
        end_step: The number of steps after which it has ended.
        row_ticks: The group's sum at the last `settle`.
        context_ticks: The group's sum at the last `settle`.
    """

    sequence: Sequence
    shift: int
    end_step: int
    row_ticks: int
    context_ticks: int


_rank: Callable[[_Member], Rank] = attrgetter("sequence.rank")


class DecodeGroup:
    """Running sequences whose next rows, until their last token, are plain: each generates
    `token_id`, and nothing but their length ends them.
    """

    def __init__(self, pool: KVBlockPool, token_id: int) -> None:
        self._pool = pool
        self._block_size = block_size = pool.block_size
        self._token_id = token_id
        self._output_block = (token_id,) * block_size
        self._members: dict[Sequence, _Member] = {}
        self._is_in_flight = False
        self._leaving: dict[Sequence, None] = {}  # with the step in flight
        self._last_step_id = -1
        self._num_steps = 0  # that were committed
        # by step, modulo the block size, in the order of rows: who begins or fills a block in it
        self._changing: list[list[_Member]] = [[] for _ in range(block_size)]
        self._num_growing = [0] * block_size  # how many begin one
        self._ends: dict[int, list[_Member]] = {}  # by `end_step`
        self._sum_shifts = 0
        # Sums over the steps: a member with the shift s was charged row_ticks + (s + 1) *
        # context_ticks since it joined.
        self._row_ticks = 0
        self._context_ticks = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def load(self) -> StepLoad:
        """That of the step in flight, or of the next one."""
        num = len(self._members)
        num_kv_tokens = self._sum_shifts + num * (self._num_steps + 1)
        return StepLoad(num, num, num_kv_tokens, num_kv_tokens, 0, num)

    @property
    def num_new_blocks(self) -> int:
        """How many blocks the next step needs."""
        return self._num_growing[self._num_steps % self._block_size]

    def num_steps_without_end(self, num_free_blocks: int) -> int:
        """At least so many of the next steps end no sequence and find the blocks that they need."""
        if not self._members:
            return 0
        num_before_end = min(self._ends) - self._num_steps - 1
        return min(num_before_end, num_free_blocks // len(self._members) * self._block_size)

    def join(self, sequence: Sequence) -> None:
        """Take a sequence that has no row in flight, if it only decodes from now on."""
        if self._is_in_flight or sequence in self._members or not self._only_decodes(sequence):
            return
        num_steps, num_planned = self._num_steps, sequence.residency.planned
        num_left = sequence.output_limit - sequence.num_outputs
        member = _Member(
            sequence,
            num_planned - num_steps,
            num_steps + num_left,
            self._row_ticks,
            self._context_ticks,
        )
        self._members[sequence] = member
        self._sum_shifts += member.shift
        self._ends.setdefault(member.end_step, []).append(member)
        begins, fills = self._places(member)
        self._num_growing[begins] += 1
        for place in {begins, fills}:
            insort(self._changing[place], member, key=_rank)

    def leave(self, sequence: Sequence) -> None:
        """Bring a sequence up to date, and remove it; any other sequence is ignored."""
        member = self._members.get(sequence)
        if member is None:
            return
        ends = self._ends[member.end_step]
        ends.remove(member)
        if not ends:
            del self._ends[member.end_step]
        self._remove(member)

    def leave_after_step(self, sequence: Sequence) -> None:
        """Remove a sequence when it has the token of the step in flight."""
        if not self._is_in_flight:
            self.leave(sequence)
        elif sequence in self._members:
            self._leaving[sequence] = None

    def dissolve(self) -> None:
        """Remove all, up to date."""
        for sequence in tuple(self._members):
            self.leave(sequence)

    def settle(self) -> None:
        """Bring all sequences up to date."""
        for member in self._members.values():
            self._settle(member)

    def pending_tokens(self) -> dict[str, int]:
        """How many tokens the step in flight will emit, by sequence id."""
        return {member.sequence_id: int(self._is_in_flight) for member in self._members}

    def plan(self, step_id: int) -> None:
        """Plan a row for each: allocate and register blocks, in the order of rows."""
        num_steps, block_size, pool = self._num_steps, self._block_size, self._pool
        allocate_one, register = pool.allocate_one, pool.register
        first_new = num_steps + 1 - block_size
        for member in self._changing[num_steps % block_size]:
            sequence, start = member.sequence, member.shift + num_steps
            residency = sequence.residency
            if not start % block_size:
                residency.blocks.append(allocate_one())
                residency.capacity += block_size
            if not (start + 1) % block_size and pool.prefix_caching:
                content = self._output_block
                if member.shift + first_new < sequence.prompt_len:
                    content = self._last_block(sequence, start + 1)
                blocks = residency.blocks
                register(residency.keys, sequence.root, blocks, (content,), sequence.digests)
                residency.registers_at += block_size
        self._last_step_id = step_id
        self._is_in_flight = True

    def commit(self, prices: UnitTicks) -> list[Sequence]:
        """Take the results of the step in flight, at its prices; returns the sequences that have
        their last token, which leave the group.
        """
        context_ticks = prices.decode_context
        self._row_ticks += prices.decode_row + context_ticks * self._num_steps
        self._context_ticks += context_ticks
        self._is_in_flight = False
        self._num_steps += 1
        ends = self._ends.pop(self._num_steps, [])
        ends.sort(key=_rank)
        for member in ends:
            self._remove(member)
        for sequence in tuple(self._leaving):
            self.leave(sequence)
        return [member.sequence for member in ends]

    def _remove(self, member: _Member) -> None:
        self._settle(member)
        del self._members[member.sequence]
        self._leaving.pop(member.sequence, None)
        self._sum_shifts -= member.shift
        begins, fills = self._places(member)
        self._num_growing[begins] -= 1
        for place in {begins, fills}:
            self._changing[place].remove(member)

    def _places(self, member: _Member) -> tuple[int, int]:
        """In which steps, modulo the block size, it begins a block, and fills one."""
        begins = -member.shift % self._block_size
        return begins, (begins - 1) % self._block_size

    def _settle(self, member: _Member) -> None:
        sequence, residency = member.sequence, member.sequence.residency
        self._set_length(sequence, member.shift + self._num_steps)
        residency.planned += self._is_in_flight
        residency.pending = int(self._is_in_flight)
        sequence.last_step_id = max(sequence.last_step_id, self._last_step_id)
        sequence.charges.device_ticks += self._row_ticks - member.row_ticks
        context_ticks = self._context_ticks - member.context_ticks
        sequence.charges.device_ticks += (member.shift + 1) * context_ticks
        member.row_ticks, member.context_ticks = self._row_ticks, self._context_ticks

    def _last_block(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """The tokens of the last block of a sequence with so many."""
        start = num_tokens - self._block_size
        known = sequence.token_ids[start:]
        return (*known, *self._output_block[len(known) :])

    def _set_length(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence after so many positions: one more token is known."""
        tokens = sequence.token_ids
        tokens += [self._token_id] * (num_computed + 1 - len(tokens))
        sequence.residency.planned = num_computed

    def _only_decodes(self, sequence: Sequence) -> bool:
        """Whether each next step of a sequence is a plain row, until its last output token."""
        residency, request, token_id = sequence.residency, sequence.request, self._token_id
        sampling = request.sampling
        is_plain = not (
            sequence.is_paused
            or residency.pending
            or request.adapter_id
            or request.pooling is not None
            or request.handover is not None
            or sampling.grammar is not None
            or sampling.logprobs is not None
            or sampling.repetition_detection is not None
        )
        may_stop = not sampling.ignore_eos and token_id in request.eos_token_ids
        planned = residency.planned
        return (
            is_plain
            and not may_stop
            and token_id not in sampling.stop_token_ids
            and planned == len(sequence.token_ids) - 1
            and planned >= max(residency.prefill_end, residency.recompute_end)
        )
