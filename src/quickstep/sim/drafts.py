"""Draft tokens of simulated steps: how many are accepted by chance, and how long proposing takes.

The scheduler decides how many drafts it asks for, as in the engine. `SimulatedDrafts` answers: a
draft is accepted with a fixed probability after those before it were. Of several models,
`core.drafts.choice` decides which ones are called, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from quickstep.core.cost_model import StepLoad
from quickstep.core.drafts.choice import DraftChoice, WantedDrafts
from quickstep.types import Phase, RowOutput, StepPlan, StepRow

if TYPE_CHECKING:
    from random import Random


class SimulatedModel(msgspec.Struct, frozen=True):
    """A model that drafts.

    Attributes:
        name: That of its method.
        acceptance: The probability that a draft is accepted after those before it were.
        seconds: Predicts a step of it, which computes one draft of each row.
        computes_prompts: False for Medusa heads.
        most_drafts: Of a row; None for any number.
    """

    name: str
    acceptance: float
    seconds: Callable[[StepLoad], float]
    computes_prompts: bool = True
    most_drafts: int | None = None

    def num_drafts(self, wanted: int) -> int:
        """How many it proposes if so many are wanted."""
        return wanted if self.most_drafts is None else min(wanted, self.most_drafts)


class _Slot(msgspec.Struct):
    """A sequence.

    Attributes:
        chosen: The model whose drafts its row has.
        depths: How many drafts each model has proposed that were not compared yet.
        unseen: Tokens that each model has not computed, beyond the newest one.
    """

    chosen: str = ""
    depths: dict[str, int] = msgspec.field(default_factory=dict)
    unseen: dict[str, int] = msgspec.field(default_factory=dict)


class SimulatedDrafts:
    """The drafts of one engine. `models` have different names."""

    def __init__(self, models: Sequence[SimulatedModel], rng: Random) -> None:
        self._models = {model.name: model for model in models}
        self._rng = rng
        self._choice = DraftChoice((), list(self._models)) if len(models) > 1 else None
        self._slots: dict[int, _Slot] = {}

    def step(
        self, plan: StepPlan, step_s: float, token_id: int
    ) -> tuple[dict[int, RowOutput], float]:
        """The outputs of the rows that emit, by their places in a step that takes `step_s` without
        drafts, and the seconds of the models after it. Accepted drafts and a token more are all
        `token_id`, and so are the next drafts.
        """
        self._move(plan)
        emitting = [(place, row) for place, row in enumerate(plan.rows) if row.emits]
        counts = {place: self._accept(row) for place, row in emitting}
        seconds = self._propose(plan, [(row, counts[place]) for place, row in emitting], step_s)
        outputs = {}
        for place, row in emitting:
            slot = self._slots[row.slot]
            num_drafts = slot.depths.get(slot.chosen, 0)
            drafts = (token_id,) * num_drafts
            outputs[place] = RowOutput((token_id,) * counts[place], draft_token_ids=drafts)
        return outputs, seconds

    def _move(self, plan: StepPlan) -> None:
        """Slots change as the plan says."""
        for released in plan.released:
            self._slots.pop(released, None)
            if self._choice is not None:
                self._choice.release(released)
        new = {admission.slot: len(admission.token_ids) for admission in plan.admitted}
        new |= {row.slot: row.end for row in plan.rows if row.slot not in self._slots | new}
        for place, num_tokens in new.items():
            self._slots[place] = _Slot()
            if self._choice is not None:
                self._choice.admit(place, num_tokens)

    def _accept(self, row: StepRow) -> int:
        """How many tokens the row generates; learn from all drafts that were proposed for it."""
        slot = self._slots[row.slot]
        num_tokens = 1
        if row.num_drafts:
            num_tokens += self._num_right(slot.chosen, row.num_drafts)
        if self._choice is not None:
            for name, depth in slot.depths.items():
                compared = min(depth, num_tokens)
                num_right = num_tokens - 1
                if name != slot.chosen:
                    num_right = self._num_right(name, compared)
                elif num_right == row.num_drafts < compared:  # one more than was checked
                    num_right += self._num_right(name, 1)
                self._choice.compared(row.slot, name, num_right, num_right < compared)
        slot.depths.clear()
        return num_tokens

    def _num_right(self, name: str, num_drafts: int) -> int:
        acceptance, count = self._models[name].acceptance, 0
        while count < num_drafts and self._rng.random() < acceptance:
            count += 1
        return count

    def _propose(
        self, plan: StepPlan, emitting: Sequence[tuple[StepRow, int]], step_s: float
    ) -> float:
        """Propose drafts for the rows that ask for some; seconds of the models. `emitting` are rows
        and how many tokens each generates.
        """
        wanting = [(row, count) for row, count in emitting if row.num_next_drafts]
        calls = self._calls(emitting, wanting, step_s)
        prefill = StepLoad()
        for row in plan.rows:
            if row.phase is Phase.PREFILL:
                prefill += StepLoad.of_span(row.start, row.num_tokens)
        seconds = 0.0
        for name, model in self._models.items():
            called = [wanting[place] for place in calls.get(name, ())]
            loads = self._loads(model, [row for row, _ in called])
            if self._choice is not None and called:
                wanted = [self._wanted(row, count) for row, count in called]
                depths = [model.num_drafts(row.num_next_drafts) for row, _ in called]
                self._choice.called(name, sum(map(model.seconds, loads)), wanted, depths)
            if model.computes_prompts and prefill.num_rows:
                loads = [loads[0] + prefill, *loads[1:]] if loads else [prefill]
            seconds += sum(map(model.seconds, loads))
            for row, _ in called:
                depth = model.num_drafts(row.num_next_drafts)
                self._slots[row.slot].depths[name] = depth
            slots = {row.slot for row, _ in called}
            for row, count in emitting:
                unseen = self._slots[row.slot].unseen
                unseen[name] = 0 if row.slot in slots else unseen.get(name, 0) + count
        for row, _ in wanting:
            slot = self._slots[row.slot]
            slot.chosen = next(iter(slot.depths), "")
            if self._choice is not None:
                slot.chosen = self._choice.best(row.slot, slot.depths)[0] or ""
        return seconds

    def _calls(
        self,
        emitting: Sequence[tuple[StepRow, int]],
        wanting: Sequence[tuple[StepRow, int]],
        step_s: float,
    ) -> Mapping[str, Sequence[int]]:
        """For each model, the places in `wanting` for which it is called."""
        if self._choice is None:
            return dict.fromkeys(self._models, range(len(wanting)))
        for row, count in emitting:
            if not row.num_next_drafts:
                self._choice.seen(row.slot, count)
        if not wanting:
            return {}
        self._choice.stepped(step_s)
        return self._choice.choose([self._wanted(row, count) for row, count in wanting])

    def _wanted(self, row: StepRow, count: int) -> WantedDrafts:
        return WantedDrafts(row.slot, row.num_next_drafts, count, self._slots[row.slot].depths)

    def _loads(self, model: SimulatedModel, rows: Sequence[StepRow]) -> list[StepLoad]:
        """The steps of a model that drafts for rows: what it has not computed, then one token after
        the other.
        """
        loads: list[StepLoad] = []
        for row in rows:
            unseen = self._slots[row.slot].unseen.get(model.name, 0)
            for place in range(model.num_drafts(row.num_next_drafts)):
                num_unseen = unseen if model.computes_prompts and not place else 0
                if place == len(loads):
                    loads.append(StepLoad())
                loads[place] += StepLoad.of_span(row.end + place - num_unseen, 1 + num_unseen)
        return loads
