"""Rate limits and budgets of API keys: which request may start, and what a key has used.

A rate limit is a token bucket: it holds what a minute allows, and refills continuously. A request
takes one from the bucket of requests; the tokens of a sequence are taken when it has ended, and
until then the most that a request may need is reserved. A request that took more than was left
leaves a debt, so over a long time no key gets more than its limit.

A budget is spent per day or month (UTC). A request has to fit into what is left of it: it counts as
much as it declares that it may need, or as the last requests of its key used on average if that is
more. If no other request of the key runs, the rest of the budget is enough, so that all of it can
be used: a budget is exceeded by what one request needs above the rest. What is spent is known by
the period, so that a clock that is set to another day and back changes nothing. Lines of batches
have the budget but no rate limit: they run when nothing else does.

`KeyLimiter` belongs to one app and is used in its event loop only. Clocks are arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from quickstep.errors import ConfigError, RequestError
from quickstep.server.usage.price_book import Cost, SequenceUsage

_MINUTE_S = 60.0
_LEAST_RETRY_S = 1.0
_NANO = 1e9
_MAX_PERIODS = 4  # whose spendings are remembered
_MEAN_DECAY = 0.98  # of what a key's requests used, per ended request
_ROUNDING = 1e-6  # a bucket that is refilled for exactly the missing time may lack the last bit


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a key may use in a day or a month: exactly one of dollars by the price of tokens, tokens
    (of prompts and outputs), and seconds on the device.
    """

    per: Literal["day", "month"]
    usd: float | None = None
    tokens: int | None = None
    device_s: float | None = None

    @property
    def amount(self) -> float:
        """The budget in its unit."""
        return next(value for value in (self.usd, self.tokens, self.device_s) if value is not None)

    def amount_of(self, usage: SequenceUsage, costs: Cost) -> float:
        """What a usage takes of it."""
        if self.usd is not None:
            return costs.by_tokens_usd
        if self.tokens is not None:
            return usage.num_prompt_tokens + usage.num_output_tokens
        return usage.device_s

    def __str__(self) -> str:
        unit = (
            "USD"
            if self.usd is not None
            else "tokens"
            if self.tokens is not None
            else "device seconds"
        )
        return f"{self.amount:.12g} {unit} per {self.per}"


class KeyLimits(msgspec.Struct, frozen=True):
    """The limits of one API key; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budgets: tuple[Budget, ...] = ()

    def check(self, name: str) -> None:
        """Raise ConfigError if a limit of the key `name` is not valid."""
        for field in ("requests_per_minute", "tokens_per_minute"):
            limit = getattr(self, field)
            if limit is not None and limit < 1:
                raise ConfigError(
                    f"{field} of the API key {name} is {limit}, it must be at least 1"
                )
        for budget in self.budgets:
            amounts = (budget.usd, budget.tokens, budget.device_s)
            if sum(amount is not None for amount in amounts) != 1:
                raise ConfigError(
                    f"a budget of the API key {name} must have exactly one of usd, tokens and "
                    "device_s"
                )
            if not (math.isfinite(budget.amount) and budget.amount > 0):
                raise ConfigError(
                    f"a budget of the API key {name} is {budget}, it must be above 0 and finite"
                )


class Used(msgspec.Struct, frozen=True):
    """What ended sequences of a key have used together."""

    usage: SequenceUsage
    costs: Cost
    num_sequences: int = 1


class Reservation:
    """What a running request may still take: tokens of the rate limit, and of each budget an amount
    in its unit. `release` it at the request's end.
    """

    def __init__(
        self,
        state: _KeyState | None,
        num_tokens: float = 0.0,
        amounts: tuple[float, ...] = (),
    ) -> None:
        self._state = state
        self._num_tokens = num_tokens
        self._amounts = amounts

    def release(self) -> None:
        """The request has ended, and what it used is charged. Idempotent."""
        if self._state is not None:
            self._state.end_request(self._num_tokens, self._amounts)
        self._state = None


class KeyLimiter:
    """The state of all keys with limits.

    Args:
        limits: By the key's name.
        clock: Seconds that only grow, for rates.
        wall_clock: Seconds since 1970, for budgets.
    """

    def __init__(
        self,
        limits: Mapping[str, KeyLimits] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._take_others: Callable[[], Iterable[tuple[str, Used]]] = tuple
        self._used_since: Callable[[str, int], Used] | None = None
        limited = {} if limits is None else limits
        self._keys = {
            name: _KeyState(of_key, clock())
            for name, of_key in limited.items()
            if of_key != KeyLimits()
        }

    def restore(
        self,
        used_since: Callable[[str, int], Used],
        take_others: Callable[[], Iterable[tuple[str, Used]]] = tuple,
    ) -> None:
        """Read what was spent of each budget before this start.

        Args:
            used_since: (key name, nanoseconds since 1970) -> what the key has used since then.
            take_others: What other servers have charged since the last call, by the key's name.
        """
        self._take_others = take_others
        self._used_since = used_since
        for name, state in self._keys.items():
            self._restore(name, state)

    def _restore(self, name: str, state: _KeyState) -> None:
        now = self._wall_clock()
        for spending in state.spendings:
            spending.enter_period(now)
            self._restore_period(name, spending)

    def _restore_period(self, name: str, spending: _Spending) -> None:
        if self._used_since is not None:
            spending.restore(self._used_since(name, round(spending.start_s * _NANO)))

    def _enter_periods(self, name: str, state: _KeyState) -> float:
        """Let the budgets be those of the present day or month; returns the time."""
        wall_s = self._wall_clock()
        for spending in state.spendings:
            if spending.enter_period(wall_s):  # the ledger knows more
                self._restore_period(name, spending)
        return wall_s

    def take_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        """Keep these limits from now on; a key whose limits are as before keeps its state."""
        before, self._keys = self._keys, {}
        for name, of_key in limits.items():
            state = before.get(name)
            if state is None or state.limits != of_key:
                state = _KeyState(of_key, self._clock())
                self._restore(name, state)
            self._keys[name] = state

    def check(self, key_name: str) -> None:
        """Raise what `admit` would raise for any request of a key, before it is parsed. Counts
        nothing.
        """
        state = self._keys.get(key_name)
        if state is not None:
            self._checked(key_name, state, 0, False, 0.0)

    def admit(
        self,
        key_name: str,
        num_tokens: int,
        in_batch: bool = False,
        usd: float = 0.0,
        is_counted: bool = False,
    ) -> Reservation:
        """Count a request that may need `num_tokens`, which may cost `usd`, or refuse it.

        A request that may need more than a minute allows waits until the limit is unused. One that
        `is_counted` is tried again: the limit of requests has counted it.

        Raises:
            RequestError: 429, a limit of the key is reached; names the limit and when it resets.
        """
        state = self._keys.get(key_name)
        if state is None:
            return Reservation(None)
        wanted, amounts = self._checked(key_name, state, num_tokens, in_batch, usd, is_counted)
        if state.requests is not None and not in_batch and not is_counted:
            state.requests.take(self._clock(), 1)
        return state.begin_request(wanted, amounts)

    def _checked(
        self,
        key_name: str,
        state: _KeyState,
        num_tokens: int,
        in_batch: bool,
        usd: float,
        is_counted: bool = False,
    ) -> tuple[float, tuple[float, ...]]:
        """The tokens and the amounts that a request reserves. Raises RequestError."""
        self._charge_others()
        wall_s = self._enter_periods(key_name, state)
        amounts = tuple([spending.expected(num_tokens, usd) for spending in state.spendings])
        for spending, amount in zip(state.spendings, amounts, strict=True):
            if not spending.has_room(amount):
                raise _spent(key_name, spending, amount, wall_s)
        if in_batch:
            return 0.0, amounts
        now, tokens, requests = self._clock(), state.tokens, state.requests
        wanted = 0.0 if tokens is None else min(max(num_tokens, 1), tokens.capacity)
        if requests is not None and not is_counted and not requests.has(now, 1):
            raise _too_fast(key_name, "requests", requests, requests.wait_s(now, 1))
        if tokens is not None and not tokens.has(now, wanted):
            raise _too_fast(key_name, "tokens", tokens, tokens.wait_s(now, wanted))
        return wanted, amounts

    def charge(
        self, key_name: str, usage: SequenceUsage, costs: Cost, in_batch: bool = False
    ) -> None:
        """Take what a sequence has used."""
        state = self._keys.get(key_name)
        if state is None:
            return
        self._enter_periods(key_name, state)
        num_tokens = usage.num_prompt_tokens + usage.num_output_tokens
        for spending in state.spendings:
            spending.charge(spending.budget.amount_of(usage, costs), num_tokens)
        if state.tokens is not None and not in_batch:
            state.tokens.take(self._clock(), num_tokens)

    def _charge_others(self) -> None:
        for name, used in self._take_others():
            state = self._keys.get(name)
            if state is None:
                continue
            self._enter_periods(name, state)
            for spending in state.spendings:
                spending.spent += spending.budget.amount_of(used.usage, used.costs)

    def headers(self, key_name: str) -> Iterable[tuple[bytes, bytes]]:
        """OpenAI's headers about the rate limits of a key."""
        state = self._keys.get(key_name)
        if state is None:
            return
        now = self._clock()
        for what, bucket in (("requests", state.requests), ("tokens", state.tokens)):
            if bucket is not None:
                values = {
                    "limit": f"{bucket.capacity:.0f}",
                    "remaining": str(max(0, math.floor(bucket.left(now) + _ROUNDING))),
                    "reset": _duration(bucket.wait_s(now, bucket.capacity)),
                }
                for name, value in values.items():
                    yield f"x-ratelimit-{name}-{what}".encode(), value.encode()


class _Bucket:
    """A limit per minute. `reserved` is what running requests may still take."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = float(per_minute)
        self.reserved = 0.0
        self._level = self.capacity  # below 0 is a debt
        self._updated_s = now

    def left(self, now: float) -> float:
        """How much a request may take now."""
        return self._refilled(now) - self.reserved

    def has(self, now: float, amount: float) -> bool:
        """Whether a request may take so much now."""
        return self.left(now) >= amount - _ROUNDING

    def take(self, now: float, amount: float) -> None:
        """Take some, even if so much is not there."""
        self._level = self._refilled(now) - amount
        self._updated_s = now

    def wait_s(self, now: float, amount: float) -> float:
        """Seconds until there is as much, if running requests take what is reserved for them."""
        missing = amount - self.left(now)
        return max(0.0, missing * _MINUTE_S / self.capacity)

    def _refilled(self, now: float) -> float:
        added = (now - self._updated_s) * self.capacity / _MINUTE_S
        return min(self.capacity, self._level + added)


class _Spending:
    """What is spent of a budget in the period that began at `start_s`, and what its running
    requests may still spend.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.start_s = 0.0
        self.reserved = 0.0
        self._num_running = 0
        self._spent: dict[float, float] = {}  # by the period's start
        self._recent = 0.0  # the decaying sum of what was charged
        self._recent_tokens = 0.0  # and of the tokens
        self._num_recent = 0.0  # and of the requests that have ended

    @property
    def spent(self) -> float:
        """In the present period."""
        return self._spent.get(self.start_s, 0.0)

    @spent.setter
    def spent(self, amount: float) -> None:
        self._spent[self.start_s] = amount

    def expected(self, num_tokens: int, usd: float) -> float:
        """What a request that may need so many tokens, for so much, counts until it has ended: at
        least as much as the last ones used on average.
        """
        mean = self._recent / self._num_recent if self._num_recent else 0.0
        if self.budget.tokens is not None:
            return max(mean, float(num_tokens))
        if self.budget.usd is not None:
            return max(mean, usd)
        per_token = self._recent / self._recent_tokens if self._recent_tokens else 0.0
        return max(mean, per_token * num_tokens)

    def has_room(self, amount: float) -> bool:
        """Whether a request that counts so much may start."""
        if not self._num_running:
            return self.spent < self.budget.amount
        return self.spent + self.reserved + amount <= self.budget.amount

    def restore(self, used: Used) -> None:
        """Continue from what was used in this period before."""
        self.spent = self.budget.amount_of(used.usage, used.costs)
        if used.num_sequences and not self._num_recent:
            self._recent, self._num_recent = self.spent / used.num_sequences, 1.0
            num_tokens = used.usage.num_prompt_tokens + used.usage.num_output_tokens
            self._recent_tokens = num_tokens / used.num_sequences

    def charge(self, amount: float, num_tokens: int) -> None:
        """Take what a sequence has used."""
        self.spent += amount
        self._recent += amount
        self._recent_tokens += num_tokens

    def begin_request(self, amount: float) -> None:
        """A request starts that counts so much."""
        self._num_running += 1
        self.reserved += amount

    def end_request(self, amount: float) -> None:
        """A request has ended, and its sequences are charged now or before."""
        self._num_running -= 1
        self.reserved = self.reserved - amount if self._num_running else 0.0
        self._recent *= _MEAN_DECAY
        self._recent_tokens *= _MEAN_DECAY
        self._num_recent = (self._num_recent + 1.0) * _MEAN_DECAY

    def enter_period(self, wall_s: float) -> bool:
        """Let the present day or month be that of a time. Returns whether that is before the last
        one, and not known: the clock was set back, and what was spent by it was spent now.
        """
        start_s = _start(self.budget, wall_s).timestamp()
        if start_s == self.start_s:
            return False
        is_earlier = start_s < self.start_s and start_s not in self._spent
        self._spent.setdefault(start_s, self.spent if is_earlier else 0.0)
        self.start_s = start_s
        while len(self._spent) > _MAX_PERIODS:
            del self._spent[min(period_s for period_s in self._spent if period_s != start_s)]
        return is_earlier


class _KeyState:
    """The buckets and the spendings of a key."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self.requests = None if requests is None else _Bucket(requests, now)
        self.tokens = None if tokens is None else _Bucket(tokens, now)
        self.spendings = tuple(map(_Spending, limits.budgets))

    def begin_request(self, num_tokens: float, amounts: tuple[float, ...]) -> Reservation:
        """Reserve for a request that starts now: of the rate limit, and of each budget."""
        if self.tokens is not None:
            self.tokens.reserved += num_tokens
        for spending, amount in zip(self.spendings, amounts, strict=True):
            spending.begin_request(amount)
        return Reservation(self, num_tokens, amounts)

    def end_request(self, num_tokens: float, amounts: tuple[float, ...]) -> None:
        """Give back what `begin_request` has reserved."""
        if self.tokens is not None:
            self.tokens.reserved -= num_tokens
        for spending, amount in zip(self.spendings, amounts, strict=True):
            spending.end_request(amount)


def _start(budget: Budget, wall_s: float) -> datetime:
    """When the day or month of a time began."""
    day = datetime.fromtimestamp(wall_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day if budget.per == "day" else day.replace(day=1)


def _spent(key_name: str, spending: _Spending, expected: float, wall_s: float) -> RequestError:
    budget = spending.budget
    # more than the longest period, less than two of the shortest month
    length_s = 86_400 if budget.per == "day" else 32 * 86_400
    reset = _start(budget, spending.start_s + length_s)
    used = f"{spending.spent:.6g} used"
    wait_s = max(_LEAST_RETRY_S, reset.timestamp() - wall_s)
    if spending.spent < budget.amount:
        used += (
            f", {spending.reserved:.6g} reserved for running requests, {expected:.6g} for this one"
        )
        wait_s = _LEAST_RETRY_S  # they may need less
    return RequestError(
        f"the API key {key_name} has spent its budget of {budget} ({used}); it "
        f"resets at {reset:%Y-%m-%dT%H:%M:%SZ}",
        status=429,
        code="insufficient_quota",
        retry_after_s=wait_s,
    )


def _too_fast(key_name: str, what: str, bucket: _Bucket, wait_s: float) -> RequestError:
    wait_s = max(0.001, wait_s)
    return RequestError(
        f"the API key {key_name} has a limit of {bucket.capacity:.0f} {what} per minute; send the "
        f"request again in {_duration(wait_s)}",
        status=429,
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


def _duration(seconds: float) -> str:
    """A duration as in OpenAI's headers, rounded up: `20ms`, `59s`, `6m0s`, `1h0m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
