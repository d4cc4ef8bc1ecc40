"""Of several proposers, a sequence gets the drafts of the one that is right, if it pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quickstep.ops.tensors import FLOAT32, HostTensor
from quickstep.runtime.speculation.combined import CombinedProposer
from quickstep.runtime.speculation.proposer import (
    ComputedRow,
    ComputedStep,
    DraftTask,
    HiddenStateProposer,
)
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
        self.combined = CombinedProposer([self.free], [self.model], lambda: self.now)
        self.combined.admit(0, Admission(0, "r#0", (1, 2), 2, SamplingParams(), 0))

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def add_model(self, name: str, token_id: int, seconds: float) -> Constant:
        """Start again, with one model more."""
        other = Constant(name, token_id, lambda: self.wait(seconds))
        self.combined = CombinedProposer([self.free], [self.model, other], lambda: self.now)
        self.combined.admit(0, Admission(0, "r#0", (1, 2), 2, SamplingParams(), 0))
        return other

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


def test_the_model_is_not_run_where_others_are_as_good() -> None:
    world = World(free=RIGHT, model=RIGHT, model_s=0.002)
    world.run(40)
    assert world.model.num_calls <= 2
    assert world.free.num_calls == 40


def test_a_model_that_costs_more_than_it_gains_is_tried_now_and_then() -> None:
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


@pytest.mark.parametrize(("first", "second"), [(RIGHT, WRONG), (WRONG, RIGHT)])
def test_of_two_models_the_one_that_is_right_is_called(first: int, second: int) -> None:
    world = World(free=WRONG, model=first, model_s=0.002)
    other = world.add_model("eagle", second, 0.002)
    assert world.run(300)[-40:] == [(RIGHT,) * 4] * 40
    right, wrong = (world.model, other) if first == RIGHT else (other, world.model)
    assert right.num_calls > 250
    assert 2 <= wrong.num_calls <= 20
    assert world.model.seen == other.seen == world.free.seen


def test_of_two_models_that_are_right_the_cheaper_one_is_called() -> None:
    world = World(free=WRONG, model=RIGHT, model_s=0.02)
    cheap = world.add_model("medusa", RIGHT, 0.001)
    world.run(300)
    assert cheap.num_calls > 250
    assert world.model.num_calls <= 20


class ByToken(Constant):
    """Right for sequences of one prompt only."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        super().propose(tasks)
        return [(task.new_token_ids[-1] + (self.token_id != task.slot),) * 4 for task in tasks]


def test_each_sequence_has_the_model_that_is_right_for_it() -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    models = [ByToken(name, place, lambda: wait(0.001)) for place, name in enumerate("ab")]
    combined = CombinedProposer([], models, lambda: now[0])
    for slot in (0, 1):
        combined.admit(slot, Admission(slot, f"r#{slot}", (1, 2), 2, SamplingParams(), 0))
    for _ in range(200):
        wait(0.01)
        drafts = combined.propose([DraftTask(slot, 4, (RIGHT,)) for slot in (0, 1)])
    assert drafts == [(RIGHT,) * 4] * 2


class Reader(Constant):
    """Reads hidden states of all tokens."""

    def __init__(self, name: str, aux_layers: tuple[int, ...]) -> None:
        super().__init__(name, RIGHT)
        self.aux_layers = aux_layers
        self.reads_final = not aux_layers
        self.steps: list[ComputedStep] = []

    def compute(self, step: ComputedStep) -> None:
        self.steps.append(step)


def test_the_union_of_hidden_states_is_read_and_each_model_has_its_own() -> None:
    states = {name: HostTensor.empty((1, 2), FLOAT32) for name in ("final", 1, 3, 5)}
    readers = [Reader("eagle", ()), Reader("eagle3", (1, 5)), Reader("other", (3, 5))]
    combined = CombinedProposer([], [Constant("draft", RIGHT), *readers], lambda: 0.0)
    assert isinstance(combined, HiddenStateProposer)
    assert (combined.aux_layers, combined.reads_final) == ((1, 3, 5), True)
    blocks = np.zeros(1, dtype=np.int32)
    aux = (states[1], states[3], states[5])
    combined.compute(ComputedStep((ComputedRow(0, 0, 1, blocks),), states["final"], aux))
    for reader, names in zip(readers, (["final"], [1, 5], [3, 5]), strict=True):
        [step] = reader.steps
        found = [*step.aux_hidden] if step.hidden is None else [step.hidden, *step.aux_hidden]
        assert [id(one) for one in found] == [id(states[name]) for name in names]
    without = CombinedProposer([Constant("ngram", RIGHT)], [Constant("draft", RIGHT)], lambda: 0.0)
    assert not isinstance(without, HiddenStateProposer)


class Failing(Reader):
    """Raises in one of its methods, from its third call on."""

    def __init__(self, method: str, name: str = "eagle") -> None:
        super().__init__(name, (1,))
        self._num_calls = 0
        right = getattr(self, method)

        def fail(*args: object) -> object:
            self._num_calls += 1
            if self._num_calls > 2:
                raise RuntimeError("no draft today")
            return right(*args)

        setattr(self, method, fail)


@pytest.mark.parametrize("method", ["admit", "observe", "propose", "release", "compute"])
def test_a_model_that_raises_is_dropped_and_the_others_continue(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Failing(method), Constant("draft", RIGHT)
    combined = CombinedProposer([Constant("suffix", WRONG)], [failing, other], lambda: 0.0)
    states = (HostTensor.empty((1, 2), FLOAT32),)
    for request in range(4):
        combined.admit(0, Admission(0, f"r#{request}", (1, 2), 2, SamplingParams(), 0))
        for _ in range(60):
            row = ComputedRow(0, 0, 1, np.zeros(1, dtype=np.int32))
            combined.compute(ComputedStep((row,), None, states))
            combined.observe(0, (RIGHT,))
            drafts = combined.propose([DraftTask(0, 4, (RIGHT,) * 5)])
        assert drafts == [(RIGHT,) * 4]
        assert other.seen == [1, 2, *([RIGHT] * 6) * 60]
        combined.release(0)
    assert [record.message for record in caplog.records] == [
        "the proposer eagle failed and is off; the others draft without it"
    ]
    assert isinstance(combined, HiddenStateProposer)
    assert combined.aux_layers == (1,)


def test_the_failure_of_the_last_proposer_is_that_of_all() -> None:
    models = [Failing("propose"), Failing("propose", "eagle3")]
    combined = CombinedProposer([], models, lambda: 0.0)
    combined.admit(0, Admission(0, "r#0", (1, 2), 2, SamplingParams(), 0))
    with pytest.raises(RuntimeError, match="no draft today"):
        for _ in range(200):
            combined.propose([DraftTask(0, 4, (RIGHT,))])
