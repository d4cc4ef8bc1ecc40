"""When an engine's process counts as stalled: a clock of the test's, no processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from quickstep.core.accounting import SchedulerStats, Totals
from quickstep.core.resources.block_pool import PoolStats
from quickstep.engine.remote.messages import StatsNote, StepNote
from quickstep.engine.remote.supervisor import StallWatch
from quickstep.engine.stats import EngineState, EngineStats

STALL_S = 30.0
IDLE = EngineStats(
    state=EngineState.RUNNING,
    failure="",
    now_s=0.0,
    last_step_s=None,
    busy_since_s=None,
    num_steps_in_flight=0,
    num_requests=0,
    scheduler=SchedulerStats(0, 0, 0, 0, PoolStats(8, 0, 0, 0, 0), Totals()),
)
SAYS_ANYTHING = StepNote()


def in_flight(last_step_s: float | None, computed_s: float) -> StatsNote:
    """The worker tells that a step is in flight, the last one having ended at `last_step_s`."""
    return StatsNote(replace(IDLE, last_step_s=last_step_s, num_steps_in_flight=1), computed_s)


class WatchedEngine:
    """A process that is looked at regularly."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.watch = StallWatch(STALL_S)
        self.watch.begin(now)

    def pass_s(self, seconds: float, pending: bool = True, says: StatsNote | None = None) -> str:
        """Let time pass, saying `says` all along; the first verdict that is a stall."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.watch.every_s)
            if says is not None:
                self.watch.note(says)
            verdict = self.watch.stall(self.now, pending)
            if verdict:
                return verdict
        return ""


def test_a_silent_process_with_work_is_stalled_after_the_limit_and_not_before() -> None:
    engine = WatchedEngine()
    assert engine.pass_s(2 * engine.watch.every_s, pending=False) == ""
    assert engine.pass_s(STALL_S - 1) == ""
    assert "sent nothing for 30 s" in engine.pass_s(1 + 2 * engine.watch.every_s)


def test_a_silent_process_without_work_is_not_stalled() -> None:
    engine = WatchedEngine()
    assert engine.pass_s(100 * STALL_S, pending=False) == ""
    assert engine.watch.silent_s == 0.0
    assert engine.pass_s(STALL_S - 1) == "", "only what is silent while there is work counts"


def test_any_message_ends_the_silence() -> None:
    engine = WatchedEngine()
    for _ in range(9):
        assert engine.pass_s(STALL_S - 1) == ""
        assert engine.watch.silent_s > STALL_S / 2
        engine.watch.note(SAYS_ANYTHING)
        assert engine.watch.silent_s == 0.0


def test_a_step_that_waits_for_ever_is_a_stall_though_the_loop_talks() -> None:
    engine = WatchedEngine()
    assert engine.pass_s(STALL_S - 2, says=in_flight(7.0, computed_s=3.0)) == ""
    assert "no step has ended" in engine.pass_s(5, says=in_flight(7.0, computed_s=3.1))


def test_so_is_the_first_step_whatever_loading_computed() -> None:
    engine = WatchedEngine()
    assert "no step has ended" in engine.pass_s(STALL_S + 5, says=in_flight(None, computed_s=99.0))


def test_a_long_step_that_computes_is_none() -> None:
    engine = WatchedEngine()
    for round_ in range(20):
        computed_s = round_ * STALL_S / 10  # a tenth of one processor
        assert engine.pass_s(STALL_S, says=in_flight(7.0, computed_s)) == ""


def test_steps_that_end_are_none_however_little_they_compute() -> None:
    engine = WatchedEngine()
    for round_ in range(20):
        assert engine.pass_s(STALL_S - 2, says=in_flight(float(round_), computed_s=0.0)) == ""


def test_a_process_that_talks_and_has_no_step_in_flight_is_none() -> None:
    """Grammars are being prepared, say, or a policy waits for more requests."""
    assert WatchedEngine().pass_s(10 * STALL_S, says=StatsNote(IDLE, 0.0)) == ""


def test_a_look_that_comes_late_does_not_count_in_full() -> None:
    """This process was stopped too, or the machine slept: the worker had no chance to talk."""
    engine = WatchedEngine()
    assert engine.pass_s(1.0) == ""
    engine.now += 1000 * STALL_S
    assert engine.watch.stall(engine.now, True) == ""
    assert engine.pass_s(STALL_S / 2) == ""


def test_a_new_process_begins_with_nothing_against_it() -> None:
    engine = WatchedEngine()
    assert engine.pass_s(STALL_S - 2, says=in_flight(7.0, 3.0)) == ""
    engine.watch.begin(engine.now)
    assert engine.watch.silent_s == 0.0
    assert engine.pass_s(STALL_S - 2, says=in_flight(7.0, 3.0)) == ""


@given(st.lists(st.tuples(st.floats(0, 60), st.booleans(), st.booleans()), max_size=60))
def test_silence_never_exceeds_the_time_with_work_since_the_last_message(
    moments: list[tuple[float, bool, bool]],
) -> None:
    watch = StallWatch(STALL_S)
    now = quiet_s = 0.0
    watch.begin(now)
    for seconds, pending, talks in moments:
        now += seconds
        quiet_s = quiet_s + seconds if pending else 0.0
        if talks:
            watch.note(SAYS_ANYTHING)
            quiet_s = seconds if pending else 0.0
        verdict = watch.stall(now, pending)
        assert watch.silent_s <= quiet_s + 1e-6
        assert not verdict or quiet_s >= STALL_S - 1e-6
