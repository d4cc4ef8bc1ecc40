"""The circuit breaker of an upstream, by a virtual clock."""

from __future__ import annotations

from quickstep.server.upstream.breaker import Breaker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def failed(breaker: Breaker, num_calls: int) -> None:
    for _ in range(num_calls):
        breaker.begin()
        breaker.failed()


def test_five_failures_open_it_for_ten_seconds_and_one_probe_decides():
    clock = Clock()
    breaker = Breaker(clock)
    failed(breaker, 4)
    assert not breaker.is_open
    failed(breaker, 1)
    assert breaker.is_open
    clock.now_s += 10.0
    assert not breaker.is_open
    breaker.begin()
    assert breaker.is_open  # the probe is under way
    breaker.failed()
    clock.now_s += 9.0
    assert breaker.is_open
    clock.now_s += 1.0
    breaker.begin()
    breaker.succeeded()
    assert not breaker.is_open
    failed(breaker, 4)
    assert not breaker.is_open


def test_probe_that_is_given_up_lets_another_one_begin():
    clock = Clock()
    breaker = Breaker(clock)
    failed(breaker, 5)
    clock.now_s += 10.0
    breaker.begin()
    breaker.left()
    assert not breaker.is_open


def test_one_call_in_ten_is_repeated():
    breaker = Breaker(Clock())
    num_retries = 0
    for _ in range(200):
        breaker.begin()
        num_retries += breaker.take_retry()
    assert num_retries == 21  # and the one that it has at first


def test_pause_is_bounded():
    clock = Clock()
    breaker = Breaker(clock)
    breaker.pause(1e9)
    assert breaker.is_open
    clock.now_s += 300.0
    assert not breaker.is_open
