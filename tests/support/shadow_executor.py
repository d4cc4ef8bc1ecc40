"""An executor without a model that believes nothing but the plans.

For every KV slot (block, offset) it remembers which content was written: a fingerprint of all
tokens up to that position, with adapter and salt, as a real model's KV would depend on them. It
follows block tables from `released`, `admitted` and `new_block_ids` only, refuses to read anything
but the content that the row's own history asks for, and derives the next token from what it *read*.
A step writes all its KV, then reads. Of the
drafts that it proposes, the first ones are right; half of the proposals are random trees, whose
accepted drafts it moves to the slots of their positions.

Failures on demand: rows that fail leave poison where they wrote; steps that raise do so before
anything is applied, or midway. Steps already in flight at that moment may read poison: they give a
wrong token, which the scheduler has to discard.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from quickstep.types import (
    Phase,
    Pooling,
    RowFailure,
    RowOutput,
    SamplingParams,
    StepPlan,
    StepResult,
    StepRow,
    TokenLogprobs,
)

EOS = 2
STOP = 3
WRONG = 7  # a row that read poison; no sound row ever gives it
_POISON = -1
# Two ordinary letters, and now and then an end.
_LETTERS = (0, 1) * 10 + (EOS, STOP)


class Trouble(Enum):
    """How a step goes wrong."""

    NONE = "none"
    ROWS = "rows"  # some rows fail, the others are fine
    EARLY = "early"  # raises before it has applied anything
    MIDWAY = "midway"  # raises with slots set up and KV half written


@dataclass
class Slot:
    """What the executor knows of a resident sequence."""

    sequence_id: str
    history: list[int]
    prompt_len: int
    prefill_end: int
    sampling: SamplingParams
    seed: int
    adapter: str
    pooling: Pooling | None
    table: list[int] = field(default_factory=list)
    computed: int | None = None
    chain: list[int] = field(default_factory=list)  # fingerprint after each token of `history`
    pooled: list[int] = field(default_factory=list)  # what a mean has taken in
    proposed: tuple[int, ...] = ()  # drafts that the next row may have
    proposed_parents: tuple[int, ...] = ()
    row_chain: list[int] = field(default_factory=list)  # `chain` with the drafts of its row
    drafted_end: int = 0
    state_is_sound: bool = True  # what its row began with

    @property
    def prompt_only(self) -> bool:
        return self.pooling is not None or self.sampling.max_tokens == 0


@dataclass(frozen=True)
class Sizes:
    """The limits that every plan has to keep."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_drafts: int = 0
    token_s: float = 1e-4
    num_states: int = 0


@dataclass(frozen=True)
class State:
    """What a slot of states holds: the fingerprint after some tokens, and drafts that follow."""

    after: int
    drafts: tuple[int, ...] = ()


class ShadowExecutor:
    """Runs submitted plans one by one, in order; raises AssertionError on any wrong access."""

    def __init__(self, sizes: Sizes, root_of: Callable[[str], int]) -> None:
        self.sizes = sizes
        self.kv: dict[tuple[int, int], int] = {}
        self.states: dict[int, State] = {}
        self.slots: dict[int, Slot] = {}
        self.queue: deque[StepPlan] = deque()
        self._root_of = root_of
        self._last_step_id = -1
        self._doomed_until = -1  # steps in flight when something failed may read poison
        self._loose_slots: set[int] = set()  # a failed step should have set or dropped them

    def submit(self, plan: StepPlan) -> None:
        self._check_shape(plan)
        self.queue.append(plan)

    def run_next(
        self, trouble: Trouble = Trouble.NONE, failing: frozenset[int] = frozenset()
    ) -> tuple[StepResult | None, tuple[str, ...]]:
        """The result (None: it raised), and the ids of the sequences whose rows failed."""
        plan = self.queue.popleft()
        if trouble is not Trouble.NONE:
            self._doomed_until = self.queue[-1].step_id if self.queue else plan.step_id
        if trouble is Trouble.EARLY:
            return None, self._drop(plan)
        self._set_up(plan)
        lenient = plan.step_id <= self._doomed_until
        names = {row.slot: self.slots[row.slot].sequence_id for row in plan.rows if self._has(row)}
        if trouble is Trouble.MIDWAY:
            failing = frozenset(range(len(plan.rows)))
        rows = [row for row in plan.rows if not lenient or self._extends(row)]
        bad = {plan.rows[index].slot for index in failing}
        self._write(rows, bad, lenient)
        failed_ids = tuple(name for slot, name in names.items() if slot in bad)
        if trouble is Trouble.MIDWAY:
            return None, failed_ids
        outputs = self._read(plan, rows, bad, lenient)
        failures = tuple(RowFailure(index, "planted failure") for index in sorted(failing))
        seconds = 1e-3 * (1 + len(plan.rows)) + self.sizes.token_s * plan.num_tokens
        return StepResult(plan.step_id, outputs, seconds, failures), failed_ids

    def block_content(self, block_id: int) -> tuple[int | None, ...]:
        """What was written to a block."""
        return tuple(self.kv.get((block_id, at)) for at in range(self.sizes.block_size))

    def set_block_content(self, block_id: int, content: tuple[int | None, ...]) -> None:
        """Something other than a step writes to a block."""
        for at, one in enumerate(content):
            assert one is not None, "a block without content was kept"
            self.kv[block_id, at] = one

    # -- a plan's shape ---------------------------------------------------------------------------

    def _check_shape(self, plan: StepPlan) -> None:
        assert plan.step_id == self._last_step_id + 1, "step ids have a gap"
        self._last_step_id = plan.step_id
        assert plan.rows, "an empty step"
        assert plan.num_tokens <= self.sizes.max_num_batched_tokens, "too many tokens in a step"
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), "two rows of one slot"
        assert all(0 <= slot < self.sizes.max_num_seqs for slot in slots), "no such slot"
        phases = [row.phase for row in plan.rows]
        num_decodes = phases.count(Phase.DECODE)
        assert phases[:num_decodes] == [Phase.DECODE] * num_decodes, "decode rows come first"
        assert {one.slot for one in plan.admitted} <= set(slots), "admitted without a row"
        for row in plan.rows:
            self._check_row_shape(row)

    def _check_row_shape(self, row: StepRow) -> None:
        assert row.num_tokens >= 1, "a row without tokens"
        assert row.phase is Phase.PREFILL or row.num_tokens == 1 + row.num_drafts, (
            "a decode row of several tokens"
        )
        assert row.num_drafts == 0 or row.phase is Phase.DECODE, "a prefill row with drafts"
        assert row.num_drafts == 0 or row.token_ids, "drafts without tokens"
        assert max(row.num_drafts, row.num_next_drafts) <= self.sizes.max_drafts, "many drafts"
        assert len(row.token_ids) in (0, row.num_tokens), "token_ids differ from num_tokens"
        assert row.token_ids or row.phase is Phase.DECODE, "a prefill row without tokens"
        assert row.emits or row.phase is Phase.PREFILL, "a decode row that emits nothing"
        assert row.end <= self.sizes.max_model_len, "planned past the context limit"
        assert row.start <= row.score_start or not row.num_scored, "scores another row's position"
        assert row.score_start + row.num_scored <= row.end, "scores another row's position"
        assert all(0 <= block_id < self.sizes.num_blocks for block_id in row.new_block_ids)

    # -- slots and tables -------------------------------------------------------------------------

    def _set_up(self, plan: StepPlan) -> None:
        for slot in plan.released:
            assert slot in self.slots or slot in self._loose_slots, f"slot {slot} is not in use"
            self.slots.pop(slot, None)
        for one in plan.admitted:
            assert one.slot not in self.slots or one.slot in self._loose_slots, (
                f"slot {one.slot} is in use"
            )
            self._loose_slots.discard(one.slot)
            slot_now = Slot(
                one.sequence_id,
                list(one.token_ids),
                one.prompt_len,
                len(one.token_ids),
                one.sampling,
                one.seed,
                one.adapter,
                one.pooling,
            )
            self.slots[one.slot] = slot_now
            self._extend_chain(slot_now)
        for row in plan.rows:
            if self._has(row):
                self.slots[row.slot].table.extend(row.new_block_ids)

    def _drop(self, plan: StepPlan) -> tuple[str, ...]:
        """Forget the slots of a step that never ran; the ids of the sequences in it."""
        names = {one.slot: one.sequence_id for one in plan.admitted}
        for slot in plan.released:
            self.slots.pop(slot, None)
        for row in plan.rows:
            slot_now = self.slots.pop(row.slot, None)
            if slot_now is not None:
                names.setdefault(row.slot, slot_now.sequence_id)
        self._loose_slots.update(plan.released, (row.slot for row in plan.rows))
        return tuple(names.values())

    def _has(self, row: StepRow) -> bool:
        assert row.slot in self.slots or row.slot in self._loose_slots, f"no slot {row.slot}"
        return row.slot in self.slots

    def _extends(self, row: StepRow) -> bool:
        """Whether a row in the shadow of a failure still has its table and history here."""
        if not self._has(row):
            return False
        slot = self.slots[row.slot]
        capacity = len(slot.table) * self.sizes.block_size
        end = row.end - row.num_drafts
        fits = row.end <= capacity and end <= len(slot.history)
        return fits and slot.computed in (None, row.start)

    def _extend_chain(self, slot: Slot) -> None:
        slot.chain = self._chained(slot, slot.chain, slot.history)

    def _chained(self, slot: Slot, chain: list[int], tokens: list[int]) -> list[int]:
        """`chain` up to the end of `tokens`."""
        chain = list(chain)
        for position in range(len(chain), len(tokens)):
            before = chain[-1] if chain else self._root_of(slot.sequence_id)
            chain.append(hash((before, position, tokens[position])) >> 3)
        return chain

    # -- KV ---------------------------------------------------------------------------------------

    def _write(self, rows: list[StepRow], bad: set[int], lenient: bool) -> None:
        written: set[tuple[int, int]] = set()
        self._check_state_slots(rows)
        before = dict(self.states)
        for row in rows:
            slot = self.slots[row.slot]
            if row.num_drafts:
                slot.drafted_end = max(slot.drafted_end, row.end)
            if not lenient:
                self._check_row(row, slot)
            slot.computed = row.end
            slot.row_chain = self._row_chain(slot, row)
            for position in range(row.start, row.end):
                place = self._place(slot, position)
                assert lenient or place not in written, f"two rows write {place}"
                written.add(place)
                self.kv[place] = _POISON if row.slot in bad else slot.row_chain[position]
            slot.state_is_sound = self._begins_well(row, slot, before)
            assert lenient or slot.state_is_sound, (
                f"{slot.sequence_id} begins at {row.start} with the state of other tokens"
            )
            self._write_states(row, slot, row.slot in bad)

    # -- states -----------------------------------------------------------------------------------

    def _check_state_slots(self, rows: list[StepRow]) -> None:
        """No slot is written by two rows, or read by one and written by another."""
        writers: dict[int, int] = {}
        for row in rows:
            assert (row.state is not None) == (self.sizes.num_states > 0), "a row without a state"
            if row.state is None:
                continue
            assert not row.parents, "a state is of one chain of tokens"
            for written in (row.state.target, *(slot for _, slot in row.state.saves)):
                assert 0 <= written < self.sizes.num_states, "no such slot of states"
                assert written not in writers, f"the state {written} is written twice"
                writers[written] = row.slot
        for row in rows:
            if row.state is not None:
                writer = writers.get(row.state.source, row.slot)
                assert writer == row.slot, "a state is read and written"
                saved = [slot for _, slot in row.state.saves]
                assert row.state.source not in saved, "a row overwrites what it begins with"

    def _begins_well(self, row: StepRow, slot: Slot, states: dict[int, State]) -> bool:
        state = row.state
        if state is None:
            return True
        if state.source < 0:
            return row.start == 0 and state.num_replayed == 0
        found = states.get(state.source)
        base = row.start - state.num_replayed
        replayed = tuple(slot.history[base : row.start])
        return (
            found is not None
            and base > 0
            and found.after == slot.chain[base - 1]
            and found.drafts[: state.num_replayed] == replayed
            and len(replayed) == state.num_replayed
        )

    def _write_states(self, row: StepRow, slot: Slot, is_bad: bool) -> None:
        state = row.state
        if state is None:
            return
        poison = is_bad or not slot.state_is_sound
        end, base = row.end - row.num_drafts, row.start - state.num_replayed
        drafts = tuple(row.token_ids[row.num_tokens - row.num_drafts :]) if row.num_drafts else ()
        after = _POISON if poison else slot.row_chain[end - 1]
        self.states[state.target] = State(after, drafts)
        for count, saved in state.saves:
            assert 0 < count <= end - base, "a state is saved that the row does not have"
            self.states[saved] = State(_POISON if poison else slot.row_chain[base + count - 1])

    def _row_chain(self, slot: Slot, row: StepRow) -> list[int]:
        """What the KV slots of the sequence hold after the row, its drafts included."""
        drafts = list(row.token_ids[row.num_tokens - row.num_drafts :]) if row.num_drafts else []
        if not row.parents:
            return self._chained(slot, slot.chain, slot.history + drafts)
        chain = slot.chain[: row.root + 1]
        for node in range(1, len(drafts) + 1):
            path = [drafts[one - 1] for one in row.path(node)]
            tokens = slot.history[: row.root + 1] + path
            chain.append(self._chained(slot, slot.chain[: row.root + 1], tokens)[-1])
        return chain

    def _check_row(self, row: StepRow, slot: Slot) -> None:
        name = slot.sequence_id
        if row.start == 0 and slot.computed is not None:  # without a KV cache: all tokens again
            slot.prefill_end = len(slot.history)
        else:
            assert slot.computed in (None, row.start), f"{name} leaves a gap at {row.start}"
        assert row.adapter == slot.adapter, f"{name} changed its adapter"
        in_prefill = row.start < slot.prefill_end
        assert (row.phase is Phase.PREFILL) == in_prefill, f"{name}: wrong phase"
        end = row.end - row.num_drafts
        assert end <= len(slot.history), f"{name} is planned past its tokens"
        drafts = slot.proposed[: row.num_drafts]
        assert len(drafts) == row.num_drafts, f"{name} has drafts that were not proposed"
        parents = slot.proposed_parents[: row.num_drafts]
        assert row.parents == parents, f"{name} has drafts in another tree"
        slot.proposed = slot.proposed_parents = ()
        expected = (*slot.history[row.start : end], *drafts)
        assert row.token_ids in ((), expected), f"{name} got {row.token_ids}, not {expected}"
        ends = end == len(slot.history)
        assert row.emits == (ends and not slot.prompt_only), f"{name}: wrong emits"
        assert row.pools == (ends and slot.pooling is not None), f"{name}: wrong pools"
        # the last token of the longest sequence is never computed
        assert slot.prompt_only or row.end < self.sizes.max_model_len, f"{name} is too long"
        scored_end = row.score_start + row.num_scored
        assert not row.num_scored or (
            slot.sampling.prompt_logprobs is not None and scored_end < slot.prompt_len
        ), f"{name} has scores that were not requested"
        assert row.end <= len(slot.table) * self.sizes.block_size, f"{name} has too few blocks"
        most = max(row.end, slot.prefill_end, slot.drafted_end)
        needed = -(-most // self.sizes.block_size)
        assert len(slot.table) == needed, f"{name} has {len(slot.table)} blocks, not {needed}"
        if row.emits:
            position = len(slot.history) - slot.prompt_len
            assert row.output_position == position, f"{name}: wrong output position"
            limit = slot.sampling.max_tokens
            last = position + row.num_drafts
            assert limit is None or last < limit, f"{name} is planned past max_tokens"

    def _read(
        self, plan: StepPlan, rows: list[StepRow], bad: set[int], lenient: bool
    ) -> tuple[RowOutput, ...]:
        sound = self._sound_rows(rows, lenient)
        outputs = []
        for row in plan.rows:
            if row.slot in bad:
                outputs.append(RowOutput())
                continue
            output = self._of_prompt(row, row.slot in sound, lenient)
            if not row.emits:
                outputs.append(output)
                continue
            token_ids, accepted = self._next_tokens(row) if row.slot in sound else ((WRONG,), ())
            if row.parents:
                output = replace(output, accepted_drafts=accepted)
            output = replace(output, token_ids=token_ids)
            if row.slot in self.slots:
                slot = self.slots[row.slot]
                self._emitted(slot, row, token_ids)
                drafts, parents = slot.proposed, slot.proposed_parents
                output = replace(output, draft_token_ids=drafts, draft_parents=parents)
            outputs.append(output)
        return tuple(outputs)

    def _emitted(self, slot: Slot, row: StepRow, token_ids: tuple[int, ...]) -> None:
        """Take in what a row emitted, and propose drafts for the next one."""
        slot.computed = row.end - row.num_drafts + len(token_ids) - 1
        slot.history += token_ids
        self._extend_chain(slot)
        slot.proposed = slot.proposed_parents = ()
        if not row.num_next_drafts:
            return
        if slot.chain[-1] % 2 and not self.sizes.num_states:
            self._propose_tree(slot, row.num_next_drafts)
            return
        tokens, chain, drafts = list(slot.history), list(slot.chain), []
        num_right = slot.chain[-1] % (row.num_next_drafts + 1)
        for index in range(row.num_next_drafts):
            right = _token_after(tuple(chain), slot.seed, len(tokens) - slot.prompt_len)
            drafts.append(right if index < num_right else 1 - right % 2)
            tokens.append(drafts[-1])
            chain = self._chained(slot, chain, tokens)
        slot.proposed = tuple(drafts)

    def _propose_tree(self, slot: Slot, num_drafts: int) -> None:
        """A random tree, in which most drafts are right after those before them."""
        rng = random.Random(slot.chain[-1])
        drafts: list[int] = []
        parents: list[int] = []
        histories = [slot.history]
        for node in range(num_drafts):
            parents.append(rng.choice((node, rng.randint(0, node))))
            before = histories[parents[-1]]
            chain = self._chained(slot, slot.chain, before)
            right = _token_after(tuple(chain), slot.seed, len(before) - slot.prompt_len)
            drafts.append(right if rng.random() < 0.7 else 1 - right % 2)
            histories.append([*before, drafts[-1]])
        slot.proposed, slot.proposed_parents = tuple(drafts), tuple(parents)

    def _of_prompt(self, row: StepRow, is_sound: bool, lenient: bool) -> RowOutput:
        """Scores and embedding out of what each position read; wrong ones where it read poison."""
        if not is_sound:
            wrong = (TokenLogprobs(WRONG, math.nan, 0),) * row.num_scored
            return RowOutput(prompt_logprobs=wrong, embedding=(math.nan,) if row.pools else None)
        slot = self.slots[row.slot]
        end = row.score_start + row.num_scored
        scores = tuple(self._score(slot, position) for position in range(row.score_start, end))
        if slot.pooling is None:
            return RowOutput(prompt_logprobs=scores)
        if slot.pooling is Pooling.LAST:
            slot.pooled.clear()
        else:
            assert lenient or len(slot.pooled) == row.start, f"{slot.sequence_id} misses a mean"
        slot.pooled += slot.chain[row.start : row.end]
        pooled = slot.pooled[-1:] if slot.pooling is Pooling.LAST else slot.pooled
        value = float(hash(tuple(pooled)) % 1009)
        return RowOutput(prompt_logprobs=scores, embedding=(value,) if row.pools else None)

    def _score(self, slot: Slot, position: int) -> TokenLogprobs:
        """A function of the position's fingerprint and of the token after it."""
        token_id = slot.history[position + 1]
        value = -float(hash((slot.chain[position], token_id)) % 97)
        return TokenLogprobs(token_id, value, 1)

    def _next_tokens(self, row: StepRow) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The token after the last known one, and one more after each draft that is right; which
        drafts these are.
        """
        slot = self.slots[row.slot]
        root = row.end - 1 - row.num_drafts
        parents = row.parents or tuple(range(row.num_drafts))
        read = [self.kv[self._place(slot, position)] for position in range(root + 1)]
        token_ids: list[int] = []
        accepted: list[int] = []
        node: int | None = 0
        while node is not None:
            if node:
                accepted.append(node)
                read.append(self.kv[self._place(slot, root + node)])
                self.kv[self._place(slot, len(read) - 1)] = read[-1]
            position = row.output_position + len(token_ids)
            token_ids.append(_token_after(tuple(read), slot.seed, position))
            children = [
                child
                for child, parent in enumerate(parents, 1)
                if parent == node and row.token_ids[child] == token_ids[-1]
            ]
            node = children[0] if children else None
        return tuple(token_ids), tuple(accepted)

    def _sound_rows(self, rows: list[StepRow], lenient: bool) -> set[int]:
        """Slots of the rows that read what they should; what the others wrote becomes poison."""
        sound = {row.slot: row for row in rows}
        while True:
            wrong = [row for row in sound.values() if not self._reads_well(row, lenient)]
            if not wrong:
                return set(sound)
            for row in wrong:
                del sound[row.slot]
                slot = self.slots[row.slot]
                for position in range(row.start, row.end):
                    self.kv[self._place(slot, position)] = _POISON
                if row.state is not None:
                    for written in (row.state.target, *(saved for _, saved in row.state.saves)):
                        self.states[written] = State(_POISON)

    def _reads_well(self, row: StepRow, lenient: bool) -> bool:
        slot = self.slots[row.slot]
        if not slot.state_is_sound:
            return False
        for position in range(row.end):
            place = self._place(slot, position)
            if self.kv.get(place) != slot.row_chain[position]:
                assert lenient, (
                    f"{slot.sequence_id} reads position {position} at {place}, which holds"
                    f" {self.kv.get(place, 'nothing')}"
                )
                return False
        return True

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        return slot.table[position // self.sizes.block_size], position % self.sizes.block_size


def _token_after(read: tuple[int, ...], seed: int, output_position: int) -> int:
    mixed = hash((read, seed, output_position)) >> 7
    return _LETTERS[mixed % len(_LETTERS)]
