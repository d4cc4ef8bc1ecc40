"""When an upstream is called: a circuit breaker, and a budget of retries. Times come in."""

from __future__ import annotations

from collections.abc import Callable

_FAILURES = 5
_OPEN_S = 10.0
_LONGEST_PAUSE_S = 300.0  # of what an upstream demands with Retry-After
_CALLS_PER_RETRY = 10
_MAX_RETRIES = 10
_NEW_WEIGHT = 0.2  # of the last call in the mean of the first byte's time


class Breaker:
    """The state of one upstream. Owned by its `UpstreamClient`.

    Five failures in a row open it for 10 seconds; then one call is the probe, whose end closes it
    or opens it again. One in ten calls may be repeated.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_failures = 0
        self._open_until_s = 0.0
        self._is_probed = False
        self._calls_to_retry = _CALLS_PER_RETRY  # of which ten allow a retry
        self._first_byte_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether no call may begin now."""
        return self._is_probed or self._clock() < self._open_until_s

    @property
    def first_byte_s(self) -> float:
        """Predicted seconds until the first byte; 0 before the first call."""
        return self._first_byte_s

    def begin(self) -> None:
        """A call begins."""
        self._is_probed = self._num_failures >= _FAILURES
        most = _MAX_RETRIES * _CALLS_PER_RETRY
        self._calls_to_retry = min(most, self._calls_to_retry + 1)

    def take_retry(self) -> bool:
        """Whether the call may be repeated, which counts as a retry."""
        if self._calls_to_retry < _CALLS_PER_RETRY:
            return False
        self._calls_to_retry -= _CALLS_PER_RETRY
        return True

    def answered(self, seconds: float) -> None:
        """The first byte of a valid response came after so long."""
        known = self._first_byte_s
        self._first_byte_s = known + _NEW_WEIGHT * (seconds - known) if known else seconds

    def succeeded(self) -> None:
        """A response came to its end."""
        self._num_failures, self._is_probed = 0, False

    def failed(self) -> None:
        """A call failed by the upstream's fault."""
        self._num_failures += 1
        self._is_probed = False
        if self._num_failures >= _FAILURES:
            self._open_until_s = self._clock() + _OPEN_S

    def left(self) -> None:
        """A call was given up on this side, which says nothing about the upstream."""
        self._is_probed = False

    def pause(self, seconds: float) -> None:
        """The upstream demands to be left in peace for so long."""
        self._is_probed = False
        until_s = self._clock() + min(max(seconds, 1.0), _LONGEST_PAUSE_S)
        self._open_until_s = max(self._open_until_s, until_s)
