"""The clock of an engine on another host, against ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from quickstep.core.accounting import SchedulerStats, Totals
from quickstep.core.resources.block_pool import PoolStats
from quickstep.engine.records.step_log import SequenceRecord
from quickstep.engine.remote.clock_offset import ClockOffset, shifted
from quickstep.engine.remote.messages import Draining, StatsNote, StepNote, TimingsNote
from quickstep.engine.stats import EngineState, EngineStats
from quickstep.types import Activity, Delta, FinishReason, SequenceTimings, StepRecord

TIMES = st.floats(0, 1e6)
TRIPS = st.floats(0, 1)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(TIMES, TRIPS, TRIPS), min_size=1, max_size=100))
def test_the_error_is_at_most_half_of_the_round_trip(
    planted_s: float, answers: list[tuple[float, float, float]]
) -> None:
    offset = ClockOffset()
    for sent_s, there_s, back_s in answers:
        engine_s = sent_s + there_s + planted_s
        offset.observe(sent_s, engine_s, sent_s + there_s + back_s)
        assert abs(offset.offset_s - planted_s) <= offset.round_trip_s / 2 + 1e-6


def test_the_shortest_round_trip_counts_until_the_next_window() -> None:
    offset = ClockOffset()
    assert offset.offset_s == 0.0
    offset.observe(0.0, 100.0, 0.2)
    offset.observe(1.0, 101.0, 1.1)
    offset.observe(2.0, 112.0, 4.0)
    assert offset.round_trip_s == pytest.approx(0.1)
    assert offset.offset_s == pytest.approx(99.95)
    for second in range(3, 59):  # the clocks have moved by 50 ms
        offset.observe(second, second + 100.1, second + 0.2)
        assert offset.offset_s == pytest.approx(99.95)
    offset.observe(59, 159.1, 59.2)
    assert offset.offset_s == pytest.approx(100.0)


def timings(by_s: float) -> SequenceTimings:
    known = SequenceTimings.of_unknown(3, 1.0 + by_s, 9.0 + by_s, 2)
    return replace(
        known,
        first_scheduled_s=2.0 + by_s,
        first_token_s=3.0 + by_s,
        activities=((Activity.QUEUE, 1.0 + by_s), (Activity.DECODE, 3.0 + by_s)),
    )


def step_note(by_s: float) -> StepNote:
    record = SequenceRecord("r", 0, "", 0, 1, FinishReason.EOS, timings(by_s))
    deltas = (("r", Delta(0, "a", (1,))), ("r", Delta(0, timings=timings(by_s))))
    counts = [name for name in StepRecord.__struct_fields__ if name.startswith("num_")]
    step = StepRecord(
        step_id=1,
        planned_at_s=4.0 + by_s,
        committed_at_s=5.0 + by_s,
        seconds=0.5,
        predicted_s=0.4,
        **dict.fromkeys(counts, 1),  # type: ignore[arg-type]
    )
    return StepNote((record,), deltas, step)


def stats_note(by_s: float, is_busy: bool) -> StatsNote:
    stats = EngineStats(
        state=EngineState.RUNNING,
        failure="",
        now_s=7.0 + by_s,
        last_step_s=6.0 + by_s if is_busy else None,
        busy_since_s=5.0 + by_s if is_busy else None,
        num_steps_in_flight=1,
        num_requests=1,
        scheduler=SchedulerStats(0, 1, 0, 0, PoolStats(1, 0, 0, 0, 0), Totals()),
    )
    return StatsNote(stats, 1.0)


def test_all_times_of_the_clock_move_and_no_durations() -> None:
    assert shifted(step_note(0.0), 64.0) == step_note(64.0)
    assert shifted(stats_note(0.0, True), 64.0) == stats_note(64.0, True)
    assert shifted(stats_note(0.0, False), 64.0) == stats_note(64.0, False)
    assert shifted(TimingsNote("r", {0: timings(0.0)}), 64.0) == TimingsNote(
        "r", {0: timings(64.0)}
    )
    assert shifted(StepNote(), 64.0) == StepNote()
    assert shifted(Draining(), 64.0) == Draining()
