"""Of several proposers, a sequence gets the drafts of the one that is right, if it pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quickstep.runtime.speculation.combined import CombinedProposer
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.types import Admission, SamplingParams

RIGHT, WRONG = 7, 3


class Constant:
    """Drafts one token again and again; a call takes `seconds` of the test's clock."""

    needs_hidden = False

    def __init__(self, name: str, token_id: int, wait: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.token_id = token_id
        self.num_calls = 0
        self.seen: list[int] = []
        self._wait = wait

    def admit(self, slot: int, admission: Admission) -> None:
        self.seen = list(admission.token_ids)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        self.seen += token_ids

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        self.num_calls += 1
        self._wait()
        for task in tasks:
            self.seen += task.new_token_ids
        return [(self.token_id,) * task.num_drafts for task in tasks]

    def release(self, slot: int) -> None:
        self.seen = []


class World:
    """A free proposer and one with a model, and steps of 10 ms."""

    def __init__(self, free: int, model: int, model_s: float) -> None:
        self.now = 0.0
        self.free = Constant("suffix", free)
        self.model = Constant("draft", model, lambda: self.wait(model_s))
        self.combined = CombinedProposer([self.free], self.model, lambda: self.now)
        self.combined.admit(0, Admission(0, "r#0", (1, 2), 2, SamplingParams(), 0))

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def run(self, num_steps: int) -> list[tuple[int, ...]]:
        """Steps in which the model samples RIGHT; the drafts of each."""
        proposed: list[tuple[int, ...]] = []
        for _ in range(num_steps):
            self.wait(0.01)
            num_accepted = 4 if proposed and proposed[-1][:1] == (RIGHT,) else 0
            [draft] = self.combined.propose([DraftTask(0, 4, (RIGHT,) * (1 + num_accepted))])
            proposed.append(draft)
        return proposed


def test_the_drafts_of_the_proposer_that_is_right_are_chosen() -> None:
    world = World(free=WRONG, model=RIGHT, model_s=0.002)
    assert world.run(60)[-40:] == [(RIGHT,) * 4] * 40
    world = World(free=RIGHT, model=WRONG, model_s=0.0)
    assert world.run(60)[-40:] == [(RIGHT,) * 4] * 40


def test_the_model_is_not_asked_where_others_are_as_good() -> None:
    world = World(free=RIGHT, model=RIGHT, model_s=0.002)
    world.run(40)
    assert world.model.num_calls <= 2
    assert world.free.num_calls == 40


def test_a_model_that_costs_more_than_it_gains_is_asked_now_and_then() -> None:
    world = World(free=WRONG, model=RIGHT, model_s=0.08)
    world.run(500)
    assert 2 <= world.model.num_calls <= 40
    cheap = World(free=WRONG, model=RIGHT, model_s=0.002)
    cheap.run(500)
    assert cheap.model.num_calls > 450


def test_every_proposer_sees_every_token_once() -> None:
    world = World(free=WRONG, model=RIGHT, model_s=0.08)
    world.run(100)
    world.combined.observe(0, (5, 6))
    assert world.free.seen == world.model.seen
    assert world.model.seen[-2:] == [5, 6]
    world.combined.release(0)
    world.combined.release(0)
    assert world.free.seen == world.model.seen == []
