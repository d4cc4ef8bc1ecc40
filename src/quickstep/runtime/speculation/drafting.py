"""Asks a proposer for the drafts of the next step's rows, and keeps it informed.

Owned by `runtime.runner`, on its thread. A proposer that raises is switched off for some steps,
because a draft is never needed: the log has the cause, metrics the count (`combined` drops one of
several). When it comes back, it drafts for the sequences that are admitted from then on. Where a
grammar or a thinking budget forces the next tokens, they are the drafts, whatever the proposer is.

A step in which no row wants drafts does not call the proposer: it gets a sequence's new tokens when
drafts are wanted for it, and when the sequence leaves. One that reads the hidden states of all
tokens gets them at once, because both belong together.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import accumulate

import msgspec

from quickstep.ops.tensors import AnyTensor, HostTensor
from quickstep.runtime.sampling.sampler import failure_of
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot, SlotTable
from quickstep.runtime.speculation.proposer import (
    ComputedRow,
    ComputedStep,
    Drafts,
    DraftTask,
    DraftTree,
    HiddenStateProposer,
    Proposer,
)
from quickstep.runtime.speculation.verification import EmittingRow
from quickstep.types import Admission, StepRow

_LOGGER = logging.getLogger(__name__)
# Steps for which a proposer is off after its first failure; twice as many after each further one.
_FIRST_PAUSE, _MAX_DOUBLINGS = 256, 12


class NextDrafts(msgspec.Struct, frozen=True):
    """Drafts of a row, with `parents` as in `StepRow`; the first `num_forced` are certain."""

    token_ids: tuple[int, ...] = ()
    num_forced: int = 0
    parents: tuple[int, ...] = ()


class _Known(msgspec.Struct):
    """What the proposer knows of a slot's sequence: so many of its outputs."""

    state: SamplingState
    num_outputs: int

    def new_tokens(self) -> tuple[int, ...]:
        """The outputs since the last call."""
        token_ids = self.state.outputs_since(self.num_outputs)
        self.num_outputs += len(token_ids)
        return tuple(token_ids)


class Drafting:
    """The proposer of a runner; without one, nothing is drafted.

    Attributes:
        reader: The proposer, while it reads the hidden states of all tokens.
    """

    def __init__(self, proposer: Proposer | None) -> None:
        self._proposer = proposer
        self.num_failures = 0  # of the proposer
        self._paused: Proposer | None = None  # it has failed, and comes back
        self._num_steps_off = 0  # until then
        self._known: dict[int, _Known] = {}  # by slot
        # Decided once: isinstance of a protocol takes 30 us, and every step asks.
        self.reader = proposer if isinstance(proposer, HiddenStateProposer) else None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the proposer reads."""
        return () if self.reader is None else self.reader.aux_layers

    @property
    def reads_hidden(self) -> bool:
        """Whether the proposer reads hidden states of the target."""
        proposer = self._proposer
        return self.reader is not None or (proposer is not None and proposer.needs_hidden)

    def needs_every_token(self, rows: Sequence[StepRow]) -> bool:
        """Whether the final hidden states of more than the emitting tokens are needed."""
        if self.reader is None or not self.reader.reads_final:
            return False
        return any([row.num_tokens > row.num_drafts + row.emits for row in rows])

    def compute(
        self,
        rows: Sequence[StepRow],
        slots: Sequence[Slot],
        emitting: Sequence[EmittingRow],
        hidden: AnyTensor,
        every_token: bool,
        aux_hidden: Sequence[AnyTensor],
        gone: Collection[int] = (),
    ) -> None:
        """Give the proposer the hidden states of a step, if it reads those of all tokens: the final
        ones, of every token [T, C] or of those with logits [E, C], and the inputs [T, C] of each of
        the `aux_layers`. The rows at the places `gone` have lost their slots to other sequences.
        """
        reader = self.reader
        if reader is None:
            return
        try:
            final = hidden if reader.reads_final else None
            computed = _computed(
                rows, slots, emitting, final, every_token, aux_hidden, self._known.keys(), gone
            )
            if computed is not None:
                reader.compute(computed)
        except Exception:  # a draft is never needed
            self._switch_off()

    def move(
        self, released: Sequence[int], admitted: Sequence[Admission], slots: SlotTable
    ) -> None:
        """The slots have changed as a plan says."""
        proposer = self._proposer
        if proposer is None:
            return
        try:
            for slot in released:
                self._observe(proposer, slot)
                self._known.pop(slot, None)
                proposer.release(slot)
            for admission in admitted:
                proposer.admit(admission.slot, admission)
                state = slots[admission.slot].state
                if state is not None:
                    self._known[admission.slot] = _Known(state, state.num_outputs)
        except Exception:  # a draft is never needed
            self._switch_off()

    def _observe(self, proposer: Proposer, slot: int) -> None:
        known = self._known.get(slot)
        token_ids = () if known is None else known.new_tokens()
        if token_ids:
            proposer.observe(slot, token_ids)

    def propose(
        self,
        rows: Sequence[StepRow],
        emitting: Sequence[EmittingRow],
        hidden: AnyTensor | None = None,
        every_token: bool = False,
    ) -> dict[int, NextDrafts]:
        """Drafts by the row's place in the step, for the rows that want some. `hidden` as in
        `compute`; without them, a proposer that needs them has no drafts.
        """
        proposer = self._proposer
        if proposer is None:
            if self._paused is not None:
                self._count_step_off(self._paused)
            return {}
        is_wanted = self.reader is not None
        for row in rows:
            is_wanted = is_wanted or bool(row.num_next_drafts or row.num_next_forced)
        if not is_wanted:
            return {}
        try:
            return self._propose(proposer, rows, emitting, hidden, every_token)
        except Exception:  # a draft is never needed
            self._switch_off()
            return {}

    def _propose(
        self,
        proposer: Proposer,
        rows: Sequence[StepRow],
        emitting: Sequence[EmittingRow],
        hidden: AnyTensor | None,
        every_token: bool,
    ) -> dict[int, NextDrafts]:
        ends = list(accumulate([row.num_tokens for row in rows])) if every_token else []
        tasks: dict[int, DraftTask] = {}
        found: dict[int, NextDrafts] = {}
        for emitted in emitting:
            row = rows[emitted.index]
            if emitted.slot.failure or not emitted.samples:
                continue
            known = self._known.get(row.slot)
            forced = _forced(row, emitted)
            if forced:
                found[emitted.index] = NextDrafts(forced, len(forced))
            if known is None:  # admitted while the proposer was off
                continue
            if row.num_next_drafts > len(forced):
                state = None
                if proposer.needs_hidden and hidden is not None:
                    first = ends[emitted.index] - 1 - row.num_drafts if ends else emitted.first
                    state = hidden[first + emitted.computed[-1]]
                token_ids = known.new_tokens()
                tasks[emitted.index] = DraftTask(row.slot, row.num_next_drafts, token_ids, state)
            elif self.reader is not None:
                self._observe(proposer, row.slot)
        drafts: Sequence[Drafts] = proposer.propose(list(tasks.values())) if tasks else ()
        for index, proposed in zip(tasks, drafts, strict=True):
            token_ids, parents = (
                (proposed.token_ids, proposed.parents)
                if isinstance(proposed, DraftTree)
                else (proposed, ())
            )
            forced = found[index].token_ids if index in found else ()
            if len(token_ids) <= len(forced):
                continue
            if not forced or (not parents and token_ids[: len(forced)] == forced):
                found[index] = NextDrafts(token_ids, len(forced), parents)
        return found

    def _switch_off(self) -> None:
        proposer = self._proposer
        assert proposer is not None
        self._num_steps_off = _FIRST_PAUSE << min(self.num_failures, _MAX_DOUBLINGS)
        self.num_failures += 1
        _LOGGER.exception(
            "speculation is off for %d steps: the proposer %s failed",
            self._num_steps_off,
            proposer.name,
        )
        self._paused = proposer
        self._proposer = self.reader = None
        for slot in self._known:
            with suppress(Exception):  # its state is unknown
                proposer.release(slot)
        self._known.clear()

    def _count_step_off(self, proposer: Proposer) -> None:
        self._num_steps_off -= 1
        if self._num_steps_off > 0:
            return
        self._proposer, self._paused = proposer, None
        self.reader = proposer if isinstance(proposer, HiddenStateProposer) else None
        _LOGGER.info("the proposer %s drafts again, for new sequences", proposer.name)


def _computed(
    rows: Sequence[StepRow],
    slots: Sequence[Slot],
    emitting: Sequence[EmittingRow],
    hidden: AnyTensor | None,
    every_token: bool,
    aux_hidden: Sequence[AnyTensor],
    known: Collection[int],
    gone: Collection[int],
) -> ComputedStep | None:
    """The tokens that the target has computed and accepted, of sequences in the slots that the
    proposer knows; None without any.
    """
    emitted = {row.index: row for row in emitting}
    computed = []
    of_all: list[int] = []  # places in a tensor of all tokens
    of_final: list[int] = of_all if every_token else []
    start = 0
    for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        one = emitted.get(index)
        first, start = start, start + row.num_tokens
        if slot.failure or (row.emits and (one is None or not one.samples)):
            continue
        if row.slot not in known or index in gone:
            continue
        num_before = len(of_all)
        if one is None:
            of_all.extend(range(first, start))
        else:
            root = start - 1 - row.num_drafts
            of_all.extend(range(first, root))
            of_all.extend([root + node for node in one.computed])
        num_tokens = len(of_all) - num_before
        if one is not None and not every_token:  # then no token comes before the root
            of_final.extend([one.first + node for node in one.computed])
        computed.append(ComputedRow(row.slot, row.start, num_tokens, slot.block_ids))
    if not computed:
        return None
    final = None if hidden is None else _rows_at(hidden, of_final)
    aux = tuple([_rows_at(layer, of_all) for layer in aux_hidden])
    return ComputedStep(tuple(computed), final, aux)


def _rows_at(layer: AnyTensor, places: Sequence[int]) -> AnyTensor:
    """Rows of [T, C] at ascending places, without a copy where they follow one another."""
    if places[-1] - places[0] == len(places) - 1:
        return layer[places[0] : places[-1] + 1]
    if isinstance(layer, HostTensor):
        return HostTensor(layer.numpy()[list(places)], layer.dtype)
    return layer[list(places)]


def _forced(row: StepRow, emitted: EmittingRow) -> tuple[int, ...]:
    """What must follow the row's tokens: drafts that are free, and right."""
    if not row.num_next_forced:
        return ()
    try:
        return emitted.state.next_tokens()[: row.num_next_forced]
    except BaseException as error:  # a panic in Rust is no Exception; the next mask will fail, too
        failure_of(error, "forced tokens could not be computed")
        return ()
