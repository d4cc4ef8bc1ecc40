"""Whether the engine's process makes progress, judged by what it says and a clock.

While it has work the worker tells its stats ten times a second, from its event loop; the loop is
alive while a step runs, because steps run in a thread. Two things are a stall when they last for
`stall_s` with requests pending, and the supervisor then replaces the process:

    silence         Nothing comes at all: the process is stopped, or something holds its loop.
    a stuck step    The loop talks, but the step in flight does not end, and no thread but the
                    loop's uses the processor: the step waits for what does not come.

A step that computes, however slowly, is neither: a large model on a small machine is left alone,
and `/ready` and `/health` show that no step has ended. Nor is a process with nothing in flight:
grammars are prepared in other processes, and policies wait on purpose.

Pure: time is an argument. Owned by the `Supervisor`, which asks `look` regularly.
"""

from __future__ import annotations

from quickstep.engine.remote.messages import FromEngine, StatsNote

__all__ = ["StallWatch"]

_LOOKS = 60  # within `stall_s`
# Of one processor. An idle worker's threads use next to none of it; one that reads its weights back
# from a swap file or a slow disk uses little, but more.
_COMPUTING_SHARE = 0.02


class StallWatch:
    """The verdict on one process after the other.

    A look that comes late counts as two at most: this process may have been stopped with the
    worker, or the machine may have slept.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self.every_s = stall_s / _LOOKS
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """A new process serves from now on."""
        self._looked_s = now
        self._was_pending = False
        self._silent_s = 0.0
        self._last_step_s: float | None = None
        self._is_in_flight = False
        self._computed_s = 0.0
        self._begin_window()

    @property
    def silent_s(self) -> float:
        """Seconds with requests pending since the process last said something."""
        return self._silent_s

    def heard(self, message: FromEngine) -> None:
        """The process said something."""
        self._silent_s = 0.0
        if not isinstance(message, StatsNote):
            return
        self._computed_s = message.computed_s
        stats = message.stats
        if not self._is_in_flight or stats.last_step_s != self._last_step_s:
            self._begin_window()
        self._is_in_flight = stats.num_steps_in_flight > 0
        self._last_step_s = stats.last_step_s

    def look(self, now: float, has_work: bool) -> str:
        """Why the process must be replaced, "" if it need not. Call it every `every_s` seconds."""
        passed_s = min(now - self._looked_s, 2 * self.every_s) if self._was_pending else 0.0
        self._looked_s, self._was_pending = now, has_work
        if not has_work:
            self._silent_s = 0.0
            self._begin_window()
            return ""
        self._silent_s += passed_s
        if self._silent_s >= self._stall_s:
            return f"the engine process said nothing for {self._silent_s:.0f} s with work pending"
        if self._is_in_flight:
            self._stuck_s += passed_s
        if self._stuck_s < self._stall_s:
            return ""
        if self._computed_s - self._window_computed_s < _COMPUTING_SHARE * self._stuck_s:
            return f"no step has ended for {self._stuck_s:.0f} s, and none has computed"
        self._begin_window()
        return ""

    def _begin_window(self) -> None:
        """Begin to count anew for how long the step in flight has neither ended nor computed."""
        self._stuck_s = 0.0
        self._window_computed_s = self._computed_s
