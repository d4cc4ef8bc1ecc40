"""Asks a proposer for the drafts of the next step's rows, and keeps it informed.

Owned by `runtime.runner`, on its thread. A proposer that raises is switched off, because a draft is
never needed: the log has the cause once. Where a grammar or a thinking budget forces the next
tokens, they are the drafts, whatever the proposer is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from quickstep.ops.tensors import AnyTensor
from quickstep.runtime.sampling.sampler import failure_of
from quickstep.runtime.speculation.proposer import DraftTask, Proposer
from quickstep.runtime.speculation.verification import EmittingRow
from quickstep.types import Admission, StepRow

__all__ = ["Drafting", "NextDrafts"]

_LOGGER = logging.getLogger(__name__)


class NextDrafts(msgspec.Struct, frozen=True):
    """Drafts of a row; the first `num_forced` of them are certain."""

    token_ids: tuple[int, ...] = ()
    num_forced: int = 0


class Drafting:
    """The proposer of a runner; without one, nothing is drafted."""

    def __init__(self, proposer: Proposer | None) -> None:
        self._proposer = proposer

    def move(self, released: Sequence[int], admitted: Sequence[Admission]) -> None:
        """Slots change as a plan says."""
        proposer = self._proposer
        if proposer is None:
            return
        try:
            for slot in released:
                proposer.release(slot)
            for admission in admitted:
                proposer.admit(admission.slot, admission)
        except Exception:  # a draft is never needed
            self._switch_off()

    def propose(
        self,
        rows: Sequence[StepRow],
        emitting: Sequence[EmittingRow],
        hidden: AnyTensor | None = None,
    ) -> dict[int, NextDrafts]:
        """Drafts by the row's place in the step, for the rows that want some. `hidden` [E, C] are
        the hidden states of the logits; without them, a proposer that needs them has no drafts.
        """
        proposer = self._proposer
        if proposer is None:
            return {}
        try:
            return _propose(proposer, rows, emitting, hidden)
        except Exception:  # a draft is never needed
            self._switch_off()
            return {}

    def _switch_off(self) -> None:
        assert self._proposer is not None
        _LOGGER.exception("speculation is off: the proposer %s failed", self._proposer.name)
        self._proposer = None


def _propose(
    proposer: Proposer,
    rows: Sequence[StepRow],
    emitting: Sequence[EmittingRow],
    hidden: AnyTensor | None,
) -> dict[int, NextDrafts]:
    tasks: dict[int, DraftTask] = {}
    found: dict[int, NextDrafts] = {}
    for emitted in emitting:
        row, token_ids = rows[emitted.index], tuple([one.token_id for one in emitted.samples])
        if emitted.slot.failure or not token_ids:
            continue
        forced = _forced(row, emitted)
        if forced:
            found[emitted.index] = NextDrafts(forced, len(forced))
        if row.num_next_drafts > len(forced):
            state = None
            if proposer.needs_hidden and hidden is not None:
                state = hidden[emitted.next_logits - 1]
            tasks[emitted.index] = DraftTask(row.slot, row.num_next_drafts, token_ids, state)
        else:
            proposer.observe(row.slot, token_ids)
    drafts = proposer.propose(list(tasks.values())) if tasks else ()
    for index, proposed in zip(tasks, drafts, strict=True):
        forced = found[index].token_ids if index in found else ()
        if len(proposed) > len(forced) and proposed[: len(forced)] == forced:
            found[index] = NextDrafts(proposed, len(forced))
    return found


def _forced(row: StepRow, emitted: EmittingRow) -> tuple[int, ...]:
    """What must follow the row's tokens: drafts that are free, and right."""
    if not row.num_next_forced:
        return ()
    try:
        return emitted.state.next_tokens()[: row.num_next_forced]
    except BaseException as error:  # a panic in Rust is no Exception; the next mask will fail, too
        failure_of(error, "forced tokens could not be computed")
        return ()
