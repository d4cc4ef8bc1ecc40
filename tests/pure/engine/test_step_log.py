"""What follows the step log never ends what it observes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

import pytest
from step_records import QUEUED, step

from quickstep.engine.records.step_log import SequenceRecord, StepLog
from quickstep.types import FinishReason, StepRecord

ENDED = SequenceRecord("a", 0, "", 0, 0, FinishReason.EOS, QUEUED)


class Failing:
    """Raises for every record."""

    def add_step(self, record: StepRecord) -> None:
        raise ValueError("step")

    def add_sequence(self, record: SequenceRecord) -> None:
        raise ValueError("sequence")


def add_all(log: StepLog) -> None:
    log.add_step(step(0, 0.0, 1.0))
    log.add_sequence(ENDED)


def test_a_follower_that_raises_is_logged_once_and_the_others_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, second = StepLog(), StepLog()
    log.follow(Failing())
    log.follow(second)
    with caplog.at_level(logging.ERROR):
        add_all(log)
        add_all(log)
    assert (len(log.steps), len(second.steps), len(second.sequences)) == (2, 2, 2)
    assert len(caplog.records) == 1


def test_a_log_file_on_a_full_disk_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError("no space left on device")

        def close(self) -> None:
            raise OSError("no space left on device")

    log = StepLog(path=tmp_path / "log")
    full: IO[str] = Full()  # type: ignore[assignment]
    log._file = full
    add_all(log)
    assert len(log.steps) == 1
    assert caplog.text.count("is not written any more") == 1
