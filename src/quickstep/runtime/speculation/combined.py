"""Several proposers for one sequence: each time, the drafts that are predicted to gain most.

Proposers without a model run every time, they take microseconds. Those with a model run for the
sequences for which they are predicted to gain more tokens than the others, if that is worth their
seconds:

    n drafts that are accepted with p each after those before it     p + p^2 + ... + p^n tokens
    tokens per second                 (sequences + gained tokens) / (seconds of a step + of calls)

Models are chosen one after the other, as long as a further one makes the tokens per second rise.
p is an exponential average for each sequence and proposer. A proposal is compared with the tokens
that were sampled, also if another one was chosen, so that p is known of all that ran. A model that
was not called for some time is called once in addition, more and more rarely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

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
_AVERAGE_GAIN = 0.1
_LONGEST_GAP = 4.0  # times the seconds of a step: after a longer one, the engine was idle
_RETRY_AFTER = 48  # proposals without a model
_MOST_RETRY_AFTER = 768
# A call that computes more tokens than so many of a sequence is one of those that are rare.
_MOST_UNSEEN = 32


class _Part(msgspec.Struct):
    """A proposer and what is known of it.

    Attributes:
        first_rate: The rate of new sequences.
        depth_ratio: How many drafts can be accepted, per draft that was wanted.
        seconds: Of a call, by the bit length of the number of its tasks.
        num_without: Proposals since its last call.
        retry_after: Proposals without a call, after which it is called in any case.
    """

    proposer: Proposer
    first_rate: float = _FIRST_RATE
    depth_ratio: float = 1.0
    seconds: dict[int, float] = msgspec.field(default_factory=dict)
    num_without: int = 0
    retry_after: int = _RETRY_AFTER

    def seconds_of(self, num_tasks: int) -> float:
        """Of a call, as of the calls with about as many tasks; 0 before the first one."""
        if not self.seconds:
            return 0.0
        size = num_tasks.bit_length()
        return self.seconds[min(self.seconds, key=lambda known: abs(known - size))]

    def measured(self, num_tasks: int, seconds: float) -> None:
        """Learn from a call."""
        size = num_tasks.bit_length()
        self.seconds[size] = _average(self.seconds.get(size, 0.0), seconds)


class _Unused(msgspec.Struct):
    """What a sequence had without a model: proposals, and tokens."""

    num_proposals: int = 0
    num_tokens: int = 0


class _Slot(msgspec.Struct):
    """A sequence: by the names of proposers, rates, and drafts that were not compared yet."""

    unused: dict[str, _Unused]
    rates: dict[str, float] = msgspec.field(default_factory=dict)
    pending: dict[str, Drafts] = msgspec.field(default_factory=dict)

    def rate(self, part: _Part) -> float:
        """With which the drafts of a proposer are accepted."""
        return self.rates.get(part.proposer.name, part.first_rate)


class CombinedProposer:
    """Drafts with the `free` proposers and the `models`; their names differ. `clock`: seconds.

    `aux_layers`, `reads_final` and `compute` exist if a model reads the hidden states of all
    tokens, as `HiddenStateProposer` says: the union of what the models read, of which each gets its
    own part.
    """

    name = "auto"
    aux_layers: tuple[int, ...]
    reads_final: bool
    compute: Callable[[Sequence[ComputedRow]], None]

    def __init__(
        self, free: Sequence[Proposer], models: Sequence[Proposer], clock: Callable[[], float]
    ) -> None:
        self.needs_hidden = any(one.needs_hidden for one in models)
        readers = [one for one in models if isinstance(one, HiddenStateProposer)]
        if readers:
            self.aux_layers = tuple(sorted({layer for one in readers for layer in one.aux_layers}))
            self.reads_final = any(one.reads_final for one in readers)
            self.compute = partial(_compute, readers, self.aux_layers)
        self._free = [_Part(one) for one in free]
        self._models = [_Part(one) for one in models]
        self._parts = [*self._free, *self._models]
        self._clock = clock
        self._slots: dict[int, _Slot] = {}
        self._step_s = 0.0
        self._ended_s: float | None = None

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        count = len(admission.token_ids)
        unused = {part.proposer.name: _Unused(num_tokens=count) for part in self._models}
        self._slots[slot] = _Slot(unused)
        for part in self._parts:
            part.proposer.admit(slot, admission)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        known = self._slots[slot]
        self._compare(known, token_ids)
        for unused in known.unused.values():
            unused.num_tokens += len(token_ids)
        for part in self._parts:
            part.proposer.observe(slot, token_ids)

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._slots.pop(slot, None)
        for part in self._parts:
            part.proposer.release(slot)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        """`Proposer.propose`."""
        self._measure_step()
        slots = [self._slots[task.slot] for task in tasks]
        for slot, task in zip(slots, tasks, strict=True):
            self._compare(slot, task.new_token_ids)
        for part in self._free:
            _keep(part, slots, part.proposer.propose(tasks))
        chosen = self._choose(slots, tasks)
        for part in self._models:
            self._run(part, slots, tasks, self._with_trials(part, slots, chosen))
        self._ended_s = self._clock()
        return [self._best(slot)[0] for slot in slots]

    def _choose(self, slots: Sequence[_Slot], tasks: Sequence[DraftTask]) -> list[_Part | None]:
        """The model that drafts for each task; None where the drafts that it has are as good."""
        chosen: list[_Part | None] = [None] * len(tasks)
        gains = [self._best(slot)[1] for slot in slots]
        left = list(self._models)
        best_value = (len(tasks) + sum(gains)) / self._cost(chosen)
        while left:
            found = [
                self._with_model(part, slots, tasks, list(zip(chosen, gains, strict=True)))
                for part in left
            ]
            values = [
                (len(tasks) + sum(new_gains)) / self._cost(new_chosen)
                for new_chosen, new_gains in found
            ]
            best = max(range(len(left)), key=values.__getitem__)
            if values[best] <= best_value:
                break
            best_value = values[best]
            chosen, gains = found[best]
            del left[best]
        return chosen

    def _with_model(
        self,
        part: _Part,
        slots: Sequence[_Slot],
        tasks: Sequence[DraftTask],
        before: Sequence[tuple[_Part | None, float]],
    ) -> tuple[list[_Part | None], list[float]]:
        """What drafts for each task, and how many tokens that gains, if this model can, too."""
        chosen: list[_Part | None] = []
        gains: list[float] = []
        for slot, task, (other, gain) in zip(slots, tasks, before, strict=True):
            expected = 0.0
            if task.hidden is not None or not part.proposer.needs_hidden:
                expected = _expected(slot.rate(part), part.depth_ratio * task.num_drafts)
            chosen.append(part if expected > gain else other)
            gains.append(max(expected, gain))
        return chosen, gains

    def _cost(self, chosen: Sequence[_Part | None]) -> float:
        """Seconds of a step and of the calls of its models, in those of a step."""
        if self._step_s <= 0.0:
            return 1.0
        counts = [sum(one is part for one in chosen) for part in self._models]
        calls = zip(self._models, counts, strict=True)
        return 1.0 + sum(part.seconds_of(count) for part, count in calls if count) / self._step_s

    def _with_trials(
        self, part: _Part, slots: Sequence[_Slot], chosen: Sequence[_Part | None]
    ) -> set[int]:
        """The tasks for which a model runs: those for which it was chosen, and from time to time
        others.
        """
        wanted = {index for index, one in enumerate(chosen) if one is part}
        if wanted:
            part.retry_after = _RETRY_AFTER
            for index, slot in enumerate(slots):
                if slot.unused[part.proposer.name].num_proposals >= _RETRY_AFTER:
                    wanted.add(index)
        elif part.num_without >= part.retry_after:
            part.retry_after = min(2 * part.retry_after, _MOST_RETRY_AFTER)
            wanted = set(range(len(slots)))
        part.num_without = 0 if wanted else part.num_without + 1
        return wanted

    def _run(
        self,
        part: _Part,
        slots: Sequence[_Slot],
        tasks: Sequence[DraftTask],
        wanted: set[int],
    ) -> None:
        """Call a model for the wanted tasks; it sees the new tokens of the others, too."""
        most_unseen = 0
        for index, (slot, task) in enumerate(zip(slots, tasks, strict=True)):
            unused = slot.unused[part.proposer.name]
            unused.num_tokens += len(task.new_token_ids)
            if index in wanted:
                most_unseen = max(most_unseen, unused.num_tokens)
                slot.unused[part.proposer.name] = _Unused()
            else:
                unused.num_proposals += 1
                part.proposer.observe(task.slot, task.new_token_ids)
        if not wanted:
            return
        indexes = sorted(wanted)
        began_s = self._clock()
        drafts = part.proposer.propose([tasks[index] for index in indexes])
        if most_unseen <= _MOST_UNSEEN:
            part.measured(len(indexes), self._clock() - began_s)
            for index, draft in zip(indexes, drafts, strict=True):
                ratio = depth_of(draft) / tasks[index].num_drafts
                part.depth_ratio += _AVERAGE_GAIN * (ratio - part.depth_ratio)
        _keep(part, [slots[index] for index in indexes], drafts)

    def _best(self, slot: _Slot) -> tuple[Drafts, float]:
        """The drafts with the largest expected number of accepted tokens, and that number."""
        best: Drafts = ()
        best_gain = 0.0
        for part in self._parts:
            draft = slot.pending.get(part.proposer.name, ())
            gain = _expected(slot.rate(part), depth_of(draft))
            if gain > best_gain:
                best, best_gain = draft, gain
        return best, best_gain

    def _compare(self, slot: _Slot, token_ids: tuple[int, ...]) -> None:
        """Learn from tokens that were sampled after the pending drafts were proposed."""
        for part in self._parts:
            draft = slot.pending.pop(part.proposer.name, None)
            if draft is None:
                continue
            rate = slot.rate(part)
            num_right, is_wrong = compare(draft, token_ids)
            for outcome in (*[1.0] * num_right, *[0.0] * is_wrong):
                rate += _GAIN * (outcome - rate)
                part.first_rate += _SHARED_GAIN * (outcome - part.first_rate)
            slot.rates[part.proposer.name] = rate

    def _measure_step(self) -> None:
        """The seconds since the last proposal are those of a step, unless the engine was idle."""
        if self._ended_s is None:
            return
        seconds = self._clock() - self._ended_s
        if self._step_s > 0.0:
            seconds = min(seconds, _LONGEST_GAP * self._step_s)
        self._step_s = _average(self._step_s, seconds)


def _compute(
    readers: Sequence[HiddenStateProposer],
    aux_layers: tuple[int, ...],
    rows: Sequence[ComputedRow],
) -> None:
    """Give each of the readers what it reads of a step."""
    for reader in readers:
        places = [aux_layers.index(layer) for layer in reader.aux_layers]
        own = [
            replace(
                row,
                hidden=row.hidden if reader.reads_final else None,
                aux_hidden=tuple([row.aux_hidden[place] for place in places]),
            )
            for row in rows
        ]
        reader.compute(own)


def _keep(part: _Part, slots: Sequence[_Slot], drafts: Sequence[Drafts]) -> None:
    for slot, draft in zip(slots, drafts, strict=True):
        if draft:
            slot.pending[part.proposer.name] = draft


def _average(average: float, value: float) -> float:
    """The exponential average with a further value; 0 before the first one."""
    return value if average == 0.0 else average + _AVERAGE_GAIN * (value - average)


def _expected(rate: float, num_drafts: float) -> float:
    """How many of the drafts are accepted, on average."""
    rate = min(rate, _MOST_RATE)
    return rate * (1.0 - math.pow(rate, num_drafts)) / (1.0 - rate)
