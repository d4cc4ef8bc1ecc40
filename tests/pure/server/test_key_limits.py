"""Rate limits and budgets of API keys, on clocks of the test."""

import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstep.errors import ConfigError, RequestError
from quickstep.server.usage.limits import Budget, KeyLimiter, KeyLimits, Used
from quickstep.server.usage.price_book import Cost, SequenceUsage

NOON = datetime(2026, 2, 28, 12, tzinfo=UTC).timestamp()


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def limiter_of(clock: Clock | None = None, wall: Clock | None = None, **limits) -> KeyLimiter:
    return KeyLimiter({"ann": KeyLimits(**limits)}, clock or Clock(), wall or Clock(NOON))


def refusal(limiter: KeyLimiter, num_tokens: int = 1, **options) -> RequestError:
    with pytest.raises(RequestError) as caught:
        limiter.admit("ann", num_tokens, **options)
    assert caught.value.status == 429
    return caught.value


def headers(limiter: KeyLimiter) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in limiter.headers("ann")}


def test_a_key_without_limits_is_always_admitted_and_has_no_headers() -> None:
    limiter = KeyLimiter({"bob": KeyLimits()}, Clock(), Clock())
    for name in ("", "bob", "ann"):
        for _ in range(100):
            limiter.admit(name, 10**9).release()
        assert list(limiter.headers(name)) == []


def test_requests_per_minute_refill_continuously() -> None:
    clock = Clock()
    limiter = limiter_of(clock, requests_per_minute=60)
    for _ in range(60):
        limiter.admit("ann", 1)
    error = refusal(limiter)
    assert str(error) == (
        "the API key ann has a limit of 60 requests per minute; send the request again in 1s"
    )
    assert (error.code, error.retry_after_s) == ("rate_limit_exceeded", 1.0)
    assert headers(limiter) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now = 1.0
    limiter.admit("ann", 1)
    refusal(limiter)
    clock.now = 1000.0
    assert headers(limiter)["x-ratelimit-remaining-requests"] == "60"
    assert headers(limiter)["x-ratelimit-reset-requests"] == "0ms"


def test_tokens_are_reserved_while_a_request_runs_and_charged_at_its_end() -> None:
    limiter = limiter_of(tokens_per_minute=1000)
    first = limiter.admit("ann", 600)
    assert headers(limiter)["x-ratelimit-remaining-tokens"] == "400"
    assert "1000 tokens per minute" in str(refusal(limiter, 600))
    limiter.charge("ann", SequenceUsage(50, 20, 50), Cost())
    first.release()
    first.release()
    assert headers(limiter)["x-ratelimit-remaining-tokens"] == "900"
    limiter.admit("ann", 600)


def test_a_request_above_the_limit_is_admitted_when_the_limit_is_unused_and_leaves_a_debt() -> None:
    clock = Clock()
    limiter = limiter_of(clock, tokens_per_minute=1000)
    running = limiter.admit("ann", 5000)
    limiter.charge("ann", SequenceUsage(4000, 0, 1000), Cost())
    running.release()
    assert refusal(limiter, 1).retry_after_s == pytest.approx(4001 * 60 / 1000)
    assert headers(limiter)["x-ratelimit-remaining-tokens"] == "0"
    assert headers(limiter)["x-ratelimit-reset-tokens"] == "5m0s"
    clock.now = 4 * 60 + 1.0
    limiter.admit("ann", 1)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 3000)), min_size=1, max_size=60),
    st.integers(1, 2000),
)
def test_no_key_gets_more_than_its_limit_and_the_last_request(
    arrivals: list[tuple[float, int]], limit: int
) -> None:
    clock = Clock()
    limiter = limiter_of(clock, tokens_per_minute=limit)
    used, largest = 0, 0
    for wait_s, num_tokens in arrivals:
        clock.now += wait_s
        try:
            reservation = limiter.admit("ann", num_tokens)
        except RequestError as error:
            clock.now += error.retry_after_s or 0.0
            reservation = limiter.admit("ann", num_tokens)  # the time in the error is enough
        limiter.charge("ann", SequenceUsage(num_tokens), Cost())
        reservation.release()
        used, largest = used + num_tokens, max(largest, num_tokens)
        assert used <= limit * (1 + clock.now / 60) + largest + 1e-3


BUDGETS = [
    (Budget(usd=0.5, per="day"), SequenceUsage(), Cost(by_tokens_nusd=250_000_000), "0.5 USD"),
    (Budget(tokens=200, per="day"), SequenceUsage(60, 30, 40), Cost(), "200 tokens"),
    (Budget(device_s=3.0, per="day"), SequenceUsage(device_s=1.5), Cost(), "3 device seconds"),
]


@pytest.mark.parametrize(("budget", "usage", "costs", "text"), BUDGETS)
def test_a_spent_budget_refuses_requests_until_the_next_day(
    budget: Budget, usage: SequenceUsage, costs: Cost, text: str
) -> None:
    wall = Clock(NOON)
    limiter = limiter_of(wall=wall, budgets=(budget,))
    for _ in range(2):
        limiter.admit("ann", 1).release()
        limiter.charge("ann", usage, costs)
    error = refusal(limiter)
    assert f"the API key ann has spent its budget of {text} per day" in str(error)
    assert "it resets at 2026-03-01T00:00:00Z" in str(error)
    assert (error.code, error.retry_after_s) == ("insufficient_quota", 12 * 3600)
    assert refusal(limiter, in_batch=True).code == "insufficient_quota"
    wall.now += 12 * 3600 - 1
    refusal(limiter)
    wall.now += 1
    limiter.admit("ann", 1)


@pytest.mark.parametrize(
    ("now", "reset"),
    [("2026-12-31T23:59:59", "2027-01-01"), ("2026-01-01T00:00:00", "2026-02-01"),
     ("2024-02-29T01:00:00", "2024-03-01"), ("2026-01-31T12:00:00", "2026-02-01")],
)  # fmt: skip
def test_a_monthly_budget_resets_with_the_month(now: str, reset: str) -> None:
    wall = Clock(datetime.fromisoformat(now + "+00:00").timestamp())
    limiter = limiter_of(wall=wall, budgets=(Budget(tokens=1, per="month"),))
    limiter.charge("ann", SequenceUsage(1), Cost())
    error = refusal(limiter)
    assert f"resets at {reset}T00:00:00Z" in str(error)
    wall.now += error.retry_after_s or 0.0
    limiter.admit("ann", 1)


def test_a_clock_that_goes_back_does_not_renew_a_budget() -> None:
    wall = Clock(NOON)
    limiter = limiter_of(wall=wall, budgets=(Budget(tokens=1, per="day"),))
    limiter.charge("ann", SequenceUsage(1), Cost())
    wall.now -= 86_400
    refusal(limiter)
    wall.now += 86_400
    refusal(limiter)


def test_a_budget_continues_after_a_restart_with_what_the_period_has_used() -> None:
    day, month = Budget(tokens=100, per="day"), Budget(usd=1.0, per="month")
    limiter = limiter_of(budgets=(day, month))
    since: list[tuple[str, int]] = []

    def used_since(key_name: str, since_ns: int) -> Used:
        since.append((key_name, since_ns))
        return Used(SequenceUsage(60, 0, 39), Cost(by_tokens_nusd=10**9 - 1), 100)

    limiter.restore(used_since)
    starts = [datetime(2026, 2, number, tzinfo=UTC).timestamp() for number in (28, 1)]
    assert since == [("ann", int(start) * 10**9) for start in starts]
    limiter.admit("ann", 1)
    limiter.charge("ann", SequenceUsage(1), Cost(by_tokens_nusd=1))
    assert re.search(r"100 tokens per day \(100 used\)", str(refusal(limiter)))


@pytest.mark.parametrize("in_batch", [False, True])
def test_running_requests_count_as_much_as_the_last_ones_used(in_batch: bool) -> None:
    limiter = limiter_of(budgets=(Budget(tokens=100, per="day"),))
    for _ in range(3):
        running = limiter.admit("ann", 1, in_batch)
        limiter.charge("ann", SequenceUsage(4, 0, 6), Cost(), in_batch)
        running.release()
    started = [limiter.admit("ann", 1, in_batch) for _ in range(7)]  # 30 used, 70 expected
    error = refusal(limiter, in_batch=in_batch)
    assert "(30 used, 70 reserved for running requests, 10 for this one)" in str(error)
    assert error.retry_after_s == 1.0
    limiter.charge("ann", SequenceUsage(4, 0, 1), Cost(), in_batch)
    started[0].release()
    started[0].release()
    refusal(limiter, in_batch=in_batch)  # 35 used, 60 reserved
    started[1].release()
    limiter.admit("ann", 1, in_batch)


def num_admitted(limiter: KeyLimiter, num_tokens: int, usd: float = 0.0) -> int:
    count = 0
    while True:
        try:
            limiter.admit("ann", num_tokens, usd=usd)
        except RequestError:
            return count
        count += 1


@pytest.mark.parametrize(
    ("budget", "usd"),
    [
        (Budget(tokens=1000, per="day"), 0.0),
        (Budget(usd=1.0, per="day"), 0.2),
    ],
)
def test_a_budget_holds_for_what_requests_declare_before_one_has_ended(
    budget: Budget, usd: float
) -> None:
    assert num_admitted(limiter_of(budgets=(budget,)), 200, usd) == 5


def test_large_requests_after_small_ones_count_as_they_declare() -> None:
    limiter = limiter_of(budgets=(Budget(tokens=1000, per="day"), Budget(device_s=1.0, per="day")))
    for _ in range(50):
        running = limiter.admit("ann", 1)
        limiter.charge("ann", SequenceUsage(0, 0, 1, device_s=0.001), Cost())
        running.release()
    assert num_admitted(limiter, 300) == 3  # of 950 tokens, and of 0.95 seconds


def test_the_rest_of_a_budget_is_for_one_request_of_any_size() -> None:
    limiter = limiter_of(budgets=(Budget(tokens=100, per="day"),))
    running = limiter.admit("ann", 5000)
    refusal(limiter)
    limiter.charge("ann", SequenceUsage(0, 0, 20), Cost())
    running.release()
    assert num_admitted(limiter, 50) == 1


def test_a_clock_that_was_ahead_for_a_moment_leaves_the_day_as_it_was() -> None:
    wall = Clock(NOON)
    limiter = limiter_of(wall=wall, budgets=(Budget(tokens=100, per="day"),))
    limiter.charge("ann", SequenceUsage(90), Cost())
    wall.now += 86_400
    limiter.charge("ann", SequenceUsage(5), Cost())
    wall.now -= 86_400
    assert num_admitted(limiter, 5) == 2
    wall.now += 86_400
    limiter.admit("ann", 5)


def test_a_start_with_a_clock_ahead_reads_the_true_month_from_the_ledger() -> None:
    wall = Clock(NOON + 40 * 86_400)
    limiter = limiter_of(wall=wall, budgets=(Budget(tokens=100, per="month"),))
    since: list[float] = []

    def used_since(name: str, since_ns: int) -> Used:
        since.append(since_ns / 1e9)
        return Used(SequenceUsage(30), Cost(), 1)

    limiter.restore(used_since)
    limiter.charge("ann", SequenceUsage(70), Cost())
    wall.now = NOON
    limiter.admit("ann", 1)
    assert since[-1] == datetime(2026, 2, 1, tzinfo=UTC).timestamp()


def test_what_other_servers_charge_counts() -> None:
    limiter = limiter_of(budgets=(Budget(tokens=100, per="day"),))
    others = [("ann", Used(SequenceUsage(50), Cost())), ("bob", Used(SequenceUsage(500), Cost()))]

    def take_others() -> list[tuple[str, Used]]:
        return [others.pop(0)] if others else []

    limiter.restore(lambda *_: Used(SequenceUsage(), Cost(), 0), take_others)
    limiter.admit("ann", 1).release()
    limiter.admit("ann", 1).release()
    assert not others
    limiter.charge("ann", SequenceUsage(50), Cost())
    assert "(100 used)" in str(refusal(limiter))


def test_lines_of_batches_have_no_rate_limit() -> None:
    limiter = limiter_of(requests_per_minute=1, tokens_per_minute=1)
    limiter.admit("ann", 1).release()
    refusal(limiter)
    before = headers(limiter)
    for _ in range(10):
        limiter.admit("ann", 10, in_batch=True).release()
        limiter.charge("ann", SequenceUsage(10), Cost(), in_batch=True)
    assert headers(limiter) == before


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (KeyLimits(requests_per_minute=0), "requests_per_minute of the API key ann is 0"),
        (KeyLimits(tokens_per_minute=-1), "tokens_per_minute of the API key ann is -1"),
        (KeyLimits(budgets=(Budget(per="day"),)), "exactly one of usd, tokens and device_s"),
        (KeyLimits(budgets=(Budget(per="day", usd=1, tokens=1),)), "exactly one of"),
        (KeyLimits(budgets=(Budget(per="day", usd=0),)), "is 0 USD per day, it must be above 0"),
        (KeyLimits(budgets=(Budget(per="day", device_s=float("inf")),)), "above 0 and finite"),
    ],
)
def test_invalid_limits_are_one_clear_sentence(limits: KeyLimits, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        limits.check("ann")
