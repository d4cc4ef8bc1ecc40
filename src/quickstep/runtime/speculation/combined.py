"""Several proposers for one sequence: each time, the drafts that are predicted to gain most.

Proposers without a model run every time, they take microseconds. The one with a model runs
for those sequences for which it is predicted to gain more tokens than the others and than its
own time costs:

    n drafts that are accepted with p each after those before     p + p^2 + ... + p^n tokens
    a call of the model                            its seconds / seconds of a step, in tokens

p is an exponential average for each sequence and proposer. A proposal is compared with the tokens
that were sampled, also if another one was chosen, so that p is known of all that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.runtime.speculation.proposer import (
    ComputedRow,
    Drafts,
    DraftTask,
    HiddenStateProposer,
    Proposer,
    compare,
    depth_of,
)
from quickstep.types import Admission

__all__ = ["CombinedProposer"]

_GAIN = 0.15  # of a sequence's rate, per draft
_SHARED_GAIN = 0.02  # of the rate with which new sequences begin
_FIRST_RATE = 0.6
_MOST_RATE = 0.98
_SECONDS_GAIN = 0.1
_LONGEST_GAP = 4.0  # times the seconds of a step: after a longer one, the engine was idle
_RETRY_AFTER = 48  # proposals without the model


class _Part(msgspec.Struct):
    """A proposer and what is known of it: the rate of new sequences, the seconds of a call."""

    proposer: Proposer
    first_rate: float = _FIRST_RATE
    seconds: float = 0.0


class _Slot(msgspec.Struct):
    """A sequence: the rate of each part, and its drafts that were not compared yet."""

    rates: dict[str, float] = msgspec.field(default_factory=dict)
    pending: dict[str, Drafts] = msgspec.field(default_factory=dict)
    num_without_model: int = 0


class CombinedProposer:
    """Asks the `free` proposers and the one with a `model`; their names differ. `clock`: seconds.

    `aux_layers` and `compute` exist if the model reads the hidden states of all tokens, as
    `HiddenStateProposer` says.
    """

    name = "auto"
    aux_layers: tuple[int, ...]
    compute: Callable[[Sequence[ComputedRow]], None]

    def __init__(
        self, free: Sequence[Proposer], model: Proposer, clock: Callable[[], float]
    ) -> None:
        self.needs_hidden = model.needs_hidden
        if isinstance(model, HiddenStateProposer):
            self.aux_layers = model.aux_layers
            self.compute = model.compute
        self._free = [_Part(one) for one in free]
        self._model = _Part(model)
        self._clock = clock
        self._slots: dict[int, _Slot] = {}
        self._step_s = 0.0
        self._ended_s: float | None = None

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self._slots[slot] = _Slot()
        for part in (*self._free, self._model):
            part.proposer.admit(slot, admission)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._compare(self._slots[slot], token_ids)
        for part in (*self._free, self._model):
            part.proposer.observe(slot, token_ids)

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._slots.pop(slot, None)
        for part in (*self._free, self._model):
            part.proposer.release(slot)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        """`Proposer.propose`."""
        self._measure_step()
        slots = [self._slots[task.slot] for task in tasks]
        for slot, task in zip(slots, tasks, strict=True):
            self._compare(slot, task.new_token_ids)
        without_hidden = [replace(task, hidden=None) for task in tasks]
        for part in self._free:
            self._keep(part, slots, part.proposer.propose(without_hidden))
        wanted = [
            index
            for index, (slot, task) in enumerate(zip(slots, tasks, strict=True))
            if self._wants_model(slot, task)
        ]
        chosen = set(wanted)
        for index, task in enumerate(tasks):
            if index not in chosen:
                self._model.proposer.observe(task.slot, task.new_token_ids)
        if wanted:
            began_s = self._clock()
            drafts = self._model.proposer.propose([tasks[index] for index in wanted])
            self._model.seconds = _average(self._model.seconds, self._clock() - began_s)
            self._keep(self._model, [slots[index] for index in wanted], drafts)
        self._ended_s = self._clock()
        return [self._best(slot)[0] for slot in slots]

    def _wants_model(self, slot: _Slot, task: DraftTask) -> bool:
        slot.num_without_model += 1
        rate = slot.rates.get(self._model.proposer.name, self._model.first_rate)
        price = self._model.seconds / self._step_s if self._step_s > 0.0 else 0.0
        gain = _expected(rate, task.num_drafts) - price
        if gain <= self._best(slot)[1] and slot.num_without_model < _RETRY_AFTER:
            return False
        slot.num_without_model = 0
        return True

    def _best(self, slot: _Slot) -> tuple[Drafts, float]:
        """The drafts with the largest expected number of accepted tokens, and that number."""
        best: Drafts = ()
        best_gain = 0.0
        for part in (*self._free, self._model):
            name = part.proposer.name
            draft = slot.pending.get(name, ())
            gain = _expected(slot.rates.get(name, part.first_rate), depth_of(draft))
            if gain > best_gain:
                best, best_gain = draft, gain
        return best, best_gain

    def _keep(self, part: _Part, slots: Sequence[_Slot], drafts: Sequence[Drafts]) -> None:
        for slot, draft in zip(slots, drafts, strict=True):
            if draft:
                slot.pending[part.proposer.name] = draft

    def _compare(self, slot: _Slot, token_ids: tuple[int, ...]) -> None:
        """Learn from tokens that were sampled after the pending drafts were proposed."""
        for part in (*self._free, self._model):
            name = part.proposer.name
            draft = slot.pending.pop(name, None)
            if draft is None:
                continue
            rate = slot.rates.get(name, part.first_rate)
            num_right, is_wrong = compare(draft, token_ids)
            for outcome in (*[1.0] * num_right, *[0.0] * is_wrong):
                rate += _GAIN * (outcome - rate)
                part.first_rate += _SHARED_GAIN * (outcome - part.first_rate)
            slot.rates[name] = rate

    def _measure_step(self) -> None:
        """The seconds since the last proposal are those of a step, unless the engine was idle."""
        if self._ended_s is None:
            return
        seconds = self._clock() - self._ended_s
        if self._step_s > 0.0:
            seconds = min(seconds, _LONGEST_GAP * self._step_s)
        self._step_s = _average(self._step_s, seconds)


def _average(average: float, value: float) -> float:
    """The exponential average with a further value; 0 before the first one."""
    return value if average == 0.0 else average + _SECONDS_GAIN * (value - average)


def _expected(rate: float, num_drafts: int) -> float:
    """How many of the drafts are accepted, on average."""
    rate = min(rate, _MOST_RATE)
    return rate * (1.0 - rate**num_drafts) / (1.0 - rate)
