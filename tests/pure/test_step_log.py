"""The step log: what follows it cannot end what it observes."""

import logging

import pytest
from scheduler_world import Setup, ask, open_scheduler

from quickstep.engine.records.step_log import Quantity, SequenceRecord, StepLog
from quickstep.types import FinishReason, RowOutput, StepRecord, StepResult


def _records() -> tuple[StepRecord, SequenceRecord]:
    scheduler = open_scheduler(Setup())
    scheduler.add(ask("a", max_tokens=1), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    result = StepResult(plan.step_id, (RowOutput((1,)),), 0.01)
    outcome = scheduler.commit(plan, result, 0.01)
    timings = outcome.outputs[0].timings
    assert timings is not None
    return outcome.record, SequenceRecord("a", 0, "", 0, 0, FinishReason.MAX_TOKENS, timings)


class _Follower:
    def __init__(self, fails: bool) -> None:
        self.fails, self.num_records = fails, 0

    def _count(self) -> None:
        self.num_records += 1
        if self.fails:
            raise ValueError("planted")

    def add_step(self, record: StepRecord) -> None:
        self._count()

    def add_gap(self, seconds: float) -> None:
        self._count()

    def add_sequence(self, record: SequenceRecord) -> None:
        self._count()


def test_a_follower_that_raises_is_logged_once_and_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, bad, good = StepLog(), _Follower(fails=True), _Follower(fails=False)
    log.follow(bad)
    log.follow(good)
    step, sequence = _records()
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            log.add_step(step)
            log.add_gap(0.1)
            log.add_sequence(sequence)
    assert (bad.num_records, good.num_records) == (1, 6)
    assert len(caplog.records) == 1
    assert log.totals.num_steps == 2
    log.unfollow(bad)


def test_an_observer_that_raises_is_dropped() -> None:
    log, seen = StepLog(), []

    def fails(quantity: Quantity, value: float) -> None:
        seen.append(quantity)
        raise ValueError("planted")

    log.subscribe(fails)
    log.add_gap(0.1)
    log.add_gap(0.1)
    assert len(seen) == 1
