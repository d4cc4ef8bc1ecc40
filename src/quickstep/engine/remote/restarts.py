"""When to start a dead engine again: at once after a long life, slower each time it dies young.

Pure counting; `Supervisor` does the waiting.
"""

from __future__ import annotations

import msgspec

__all__ = ["RestartLimits", "Restarts"]


class RestartLimits(msgspec.Struct, frozen=True):
    """How often and how fast.

    Attributes:
        max_quick_deaths: Give up when more lives than this in a row were short.
        quick_s: A life shorter than this is short; a failed start is one of no length.
        first_delay_s: Wait before the first restart; doubled with each short life in a row.
        max_delay_s: Longest wait.
    """

    max_quick_deaths: int = 5
    quick_s: float = 60.0
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0


class Restarts:
    """Counts short lives in a row. Owned by the supervisor."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._num_quick = 0

    def delay_after(self, lived_s: float) -> float | None:
        """A life ended: seconds until the next may begin; None to give up."""
        limits = self._limits
        if lived_s >= limits.quick_s:
            self._num_quick = 0
            return limits.first_delay_s
        self._num_quick += 1
        if self._num_quick > limits.max_quick_deaths:
            return None
        return min(limits.max_delay_s, limits.first_delay_s * 2.0 ** (self._num_quick - 1))
