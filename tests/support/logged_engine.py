"""A scripted engine whose step log has a few steps and one request."""

from __future__ import annotations

from fake_engine import FakeEngine
from step_records import QUEUED, step

from quickstep.engine.records.step_log import SequenceRecord
from quickstep.types import FinishReason


def logged_engine() -> FakeEngine:
    """Its log has seven steps, one a second, and the request `web-1-ab`."""
    engine = FakeEngine(now_s=7.0)
    for number in range(7):
        engine.step_log.add_step(step(number, float(number), number + 1.0, {"other-9": 0.5}))
    record = SequenceRecord("web-1-ab", 0, "", 0, 5, FinishReason.EOS, QUEUED)
    engine.step_log.add_sequence(record)
    return engine
