"""A proposer gets every token once, when drafts are wanted; steps without drafts do not call it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quickstep.runtime.sampling.sampler import Sample
from quickstep.runtime.slots import SlotTable
from quickstep.runtime.speculation import drafting as drafting_module
from quickstep.runtime.speculation.drafting import Drafting, NextDrafts
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.runtime.speculation.verification import EmittingRow
from quickstep.types import Admission, Phase, SamplingParams, StepRow


class Recording:
    """Drafts the token 9, and records its calls."""

    name = "recording"
    needs_hidden = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[int, ...]]] = []

    def admit(self, slot: int, admission: Admission) -> None:
        self.calls.append(("admit", slot, tuple(admission.token_ids)))

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        self.calls.append(("observe", slot, token_ids))

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        self.calls += [("propose", task.slot, task.new_token_ids) for task in tasks]
        return [(9,) * task.num_drafts for task in tasks]

    def release(self, slot: int) -> None:
        self.calls.append(("release", slot, ()))


class World:
    """One slot, whose sequence begins with the tokens 1 and 2."""

    def __init__(self) -> None:
        self.proposer = Recording()
        self.slots = SlotTable(1, 100)
        self.drafting = Drafting(self.proposer)
        admission = Admission(0, "r#0", (1, 2), 2, SamplingParams(), 0)
        self.slots.move((), (admission,))
        self.drafting.move((), (admission,), self.slots)

    def step(self, token_ids: tuple[int, ...], num_drafts: int) -> dict[int, NextDrafts]:
        """Emit tokens, and ask for drafts after them."""
        slot = self.slots[0]
        row = StepRow(0, 1, 1, (2,), (), Phase.DECODE, True, 0, num_next_drafts=num_drafts)
        for token_id in token_ids:
            slot.last_token = token_id
            slot.state.record(token_id)
        samples = [Sample(token_id) for token_id in token_ids]
        return self.drafting.propose([row], [EmittingRow(0, slot, slot.state, 0, samples=samples)])

    def release(self) -> None:
        self.slots.move((0,), ())
        self.drafting.move((0,), (), self.slots)


def test_steps_without_drafts_do_not_call_the_proposer() -> None:
    world = World()
    for token_id in (3, 4, 5):
        assert world.step((token_id,), 0) == {}
    assert world.proposer.calls == [("admit", 0, (1, 2))]


def test_later_it_gets_all_tokens_once() -> None:
    world = World()
    world.step((3,), 0)
    world.step((4, 5), 0)
    assert world.step((6,), 2) == {0: NextDrafts((9, 9))}
    world.step((7,), 1)
    assert world.proposer.calls[1:] == [("propose", 0, (3, 4, 5, 6)), ("propose", 0, (7,))]


def test_the_last_tokens_of_a_released_sequence_are_observed() -> None:
    """Recent outputs are candidates for other sequences, also if nothing was drafted for them."""
    world = World()
    world.step((3,), 0)
    world.step((4,), 0)
    world.release()
    assert world.proposer.calls[1:] == [("observe", 0, (3, 4)), ("release", 0, ())]
    world.release()
    assert world.proposer.calls[-1] == ("release", 0, ())


def test_a_proposer_that_raises_comes_back_for_new_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting_module, "_FIRST_PAUSE", 3)
    world = World()

    def fails(tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        raise ValueError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(world.proposer, "propose", fails)
        assert not world.step((3,), num_drafts=1)
    assert world.drafting.num_failures == 1
    assert world.proposer.calls[-1] == ("release", 0, ())
    for token_id in (4, 5, 6, 7):  # off, then it does not know this sequence
        assert not world.step((token_id,), num_drafts=1)
    world.release()
    admission = Admission(0, "s#0", (1, 2), 2, SamplingParams(), 0)
    world.slots.move((), (admission,))
    world.drafting.move((), (admission,), world.slots)
    assert world.step((3,), num_drafts=1)[0].token_ids == (9,)
