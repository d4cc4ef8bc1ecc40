"""When a dead engine is started again: the counting, without processes."""

from hypothesis import given
from hypothesis import strategies as st

from quickstep.engine.remote.supervisor import RestartLimits, Restarts


def test_each_short_life_doubles_the_wait_until_it_is_given_up() -> None:
    limits = RestartLimits(max_quick_deaths=4, quick_s=10, first_delay_s=1, max_delay_s=5)
    restarts = Restarts(limits)
    assert [restarts.delay_after(0.0) for _ in range(6)] == [1, 2, 4, 5, None, None]


def test_a_long_life_starts_the_count_again() -> None:
    restarts = Restarts(RestartLimits(max_quick_deaths=1, quick_s=10, first_delay_s=1))
    assert [restarts.delay_after(lived_s) for lived_s in (0, 10, 9, 8)] == [1, 1, 1, None]


def test_a_life_that_answered_a_request_is_never_short() -> None:
    restarts = Restarts(RestartLimits(max_quick_deaths=1, quick_s=10, first_delay_s=1))
    assert [restarts.delay_after(0.5, has_answered=True) for _ in range(20)] == [1] * 20
    assert [restarts.delay_after(0.5) for _ in range(2)] == [1, None]


def test_a_death_that_a_request_caused_starts_the_count_again() -> None:
    restarts = Restarts(RestartLimits(max_quick_deaths=2, quick_s=10, first_delay_s=1))
    assert [restarts.delay_after(0.0) for _ in range(2)] == [1, 2]
    restarts.works()
    assert [restarts.delay_after(0.0) for _ in range(3)] == [1, 2, None]


def test_what_the_system_does_not_let_start_is_tried_without_end() -> None:
    limits = RestartLimits(max_quick_deaths=1, quick_s=10, first_delay_s=1, max_delay_s=5)
    restarts = Restarts(limits)
    assert restarts.delay_after(0.0) == 1
    assert [restarts.delay_without_start() for _ in range(5)] == [1, 2, 4, 5, 5]
    assert restarts.delay_after(0.0) is None, "of the engine's own deaths none was forgotten"
    assert restarts.delay_without_start() == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans())))
def test_it_is_given_up_exactly_when_too_many_short_lives_follow_each_other(
    lives: list[tuple[float, bool]],
) -> None:
    limits = RestartLimits()
    restarts = Restarts(limits)
    num_short = 0
    for lived_s, has_answered in lives:
        is_short = lived_s < limits.quick_s and not has_answered
        num_short = num_short + 1 if is_short else 0
        delay_s = restarts.delay_after(lived_s, has_answered)
        if num_short > limits.max_quick_deaths:
            assert delay_s is None
            return
        assert delay_s is not None
        assert limits.first_delay_s <= delay_s <= limits.max_delay_s
