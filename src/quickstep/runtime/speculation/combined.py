"""Several proposers for one sequence: each time, the drafts that are predicted to gain most.

`core.drafts.choice` chooses. A proposal is compared with the tokens that were sampled, also if
another one was chosen, so that the acceptance of all that ran is known. A proposer that raises is
dropped: the log has the cause once, and the others draft without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from quickstep.core.drafts.choice import DraftChoice, WantedDrafts
from quickstep.runtime.speculation.proposer import (
    ComputedStep,
    Drafts,
    DraftTask,
    HiddenStateProposer,
    Proposer,
    compare,
    depth_of,
)
from quickstep.types import Admission

_LOGGER = logging.getLogger(__name__)


class CombinedProposer:
    """Drafts with the `free` proposers and the `models`; their names differ. `clock`: seconds.

    `aux_layers`, `reads_final` and `compute` exist if a model reads the hidden states of all
    tokens, as `HiddenStateProposer` says: the union of what the models read, of which each gets its
    own part.
    """

    name = "auto"
    aux_layers: tuple[int, ...]
    reads_final: bool
    compute: Callable[[ComputedStep], None]

    def __init__(
        self, free: Sequence[Proposer], models: Sequence[Proposer], clock: Callable[[], float]
    ) -> None:
        self.needs_hidden = any(model.needs_hidden for model in models)
        self._readers = {
            model.name: model for model in models if isinstance(model, HiddenStateProposer)
        }
        if self._readers:
            readers = self._readers.values()
            self.aux_layers = tuple(
                sorted({layer for reader in readers for layer in reader.aux_layers})
            )
            self.reads_final = any(reader.reads_final for reader in readers)
            self.compute = self._compute
        self._proposers = {proposer.name: proposer for proposer in (*free, *models)}
        self._free = [proposer.name for proposer in free]
        self._choice = DraftChoice(
            self._free,
            [model.name for model in models],
            [model.name for model in models if model.needs_hidden],
        )
        self._clock = clock
        # Of each slot, the drafts that were not compared yet.
        self._pending: dict[int, dict[str, Drafts]] = {}
        self._ended_s: float | None = None

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self._choice.admit(slot, len(admission.token_ids))
        self._pending[slot] = {}
        for name, proposer in list(self._proposers.items()):
            self._guarded(name, partial(proposer.admit, slot, admission))

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._compare(slot, token_ids)
        self._choice.seen(slot, len(token_ids))
        for name, proposer in list(self._proposers.items()):
            self._guarded(name, partial(proposer.observe, slot, token_ids))

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._choice.release(slot)
        self._pending.pop(slot, None)
        for name, proposer in list(self._proposers.items()):
            self._guarded(name, partial(proposer.release, slot))

    def _guarded(self, name: str, call: Callable[[], object]) -> None:
        """Call a proposer, and drop it if it raises; the last one's failure is that of all."""
        try:
            call()
        except Exception:  # a draft is never needed
            if len(self._proposers) == 1:  # then `Drafting` switches speculation off
                raise
            _LOGGER.exception(
                "the proposer %s failed and is off; the others draft without it", name
            )
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._choice.drop(name)
        del self._proposers[name]
        self._readers.pop(name, None)
        self._free = [proposer for proposer in self._free if proposer != name]
        for pending in self._pending.values():
            pending.pop(name, None)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        """`Proposer.propose`."""
        if self._ended_s is not None:  # unless the engine was idle, a step took so long
            self._choice.stepped(self._clock() - self._ended_s)
        for task in tasks:
            self._compare(task.slot, task.new_token_ids)
        for name in list(self._free):
            self._guarded(name, partial(self._ask, name, tasks))
        wanted = [self._wanted(task) for task in tasks]
        for name, places in self._choice.choose(wanted).items():
            self._guarded(name, partial(self._run, name, tasks, wanted, places))
        self._ended_s = self._clock()
        return [self._best(task.slot) for task in tasks]

    def _wanted(self, task: DraftTask) -> WantedDrafts:
        has_hidden = task.hidden is not None
        depths = self._depths(task.slot)
        num_new = len(task.new_token_ids)
        return WantedDrafts(task.slot, task.num_drafts, num_new, depths, has_hidden)

    def _run(
        self,
        name: str,
        tasks: Sequence[DraftTask],
        wanted: Sequence[WantedDrafts],
        places: Sequence[int],
    ) -> None:
        """Call a model for the tasks at these places; it sees the new tokens of the others, too."""
        proposer, called = self._proposers[name], set(places)
        for place, task in enumerate(tasks):
            if place not in called:
                proposer.observe(task.slot, task.new_token_ids)
        if not places:
            return
        began_s = self._clock()
        drafts = self._ask(name, [tasks[place] for place in places])
        seconds = self._clock() - began_s
        depths = [depth_of(draft) for draft in drafts]
        self._choice.called(name, seconds, [wanted[place] for place in places], depths)

    def _ask(self, name: str, tasks: Sequence[DraftTask]) -> Sequence[Drafts]:
        """Drafts of a proposer, which are kept until tokens follow."""
        drafts = self._proposers[name].propose(tasks)
        for task, draft in zip(tasks, drafts, strict=True):
            if draft:
                self._pending[task.slot][name] = draft
        return drafts

    def _depths(self, slot: int) -> dict[str, int]:
        return {name: depth_of(draft) for name, draft in self._pending[slot].items()}

    def _best(self, slot: int) -> Drafts:
        """The drafts with the largest expected number of accepted tokens."""
        name, _ = self._choice.best(slot, self._depths(slot))
        return () if name is None else self._pending[slot][name]

    def _compare(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """Learn from tokens that were sampled after the pending drafts were proposed."""
        pending = self._pending[slot]
        for name, draft in pending.items():
            self._choice.compared(slot, name, *compare(draft, token_ids))
        pending.clear()

    def _compute(self, step: ComputedStep) -> None:
        """Give each of the readers what it reads of a step."""
        for name, reader in list(self._readers.items()):
            places = [self.aux_layers.index(layer) for layer in reader.aux_layers]
            own = replace(
                step,
                hidden=step.hidden if reader.reads_final else None,
                aux_hidden=tuple([step.aux_hidden[place] for place in places]),
            )
            self._guarded(name, partial(reader.compute, own))
