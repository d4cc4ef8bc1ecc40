"""Runs plans on a worker thread of this process, strictly in the order of `submit`.

Used by the engine, which awaits tickets through their callback. One thread, so a step never
overlaps the next on the device; planning the next while one runs is what overlaps. After a step
raised, every plan queued behind it fails until `reset`, because its inputs were never computed; the
slots still follow the plans, so that runner and scheduler agree on what is resident.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from quickstep.errors import EngineError
from quickstep.runtime.runner import ModelRunner
from quickstep.types import StepPlan, StepResult

__all__ = ["LocalExecutor", "LocalTicket"]


class LocalTicket:
    """A step on the worker thread."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def result(self) -> StepResult:
        """Wait for the step. Raises EngineError when it failed, or one before it did."""
        return self._future.result()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the step is done: on the worker thread, or here if it already is."""
        self._future.add_done_callback(lambda _: callback())


class LocalExecutor:
    """Owns the worker thread, and the runner while it is open."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._failure: EngineError | None = None
        self._is_closed = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quickstep-step")

    def submit(self, plan: StepPlan) -> LocalTicket:
        """Queue a step; returns before it has run. Raises EngineError once closed."""
        if self._is_closed:
            raise EngineError(f"step {plan.step_id} was submitted to a closed executor")
        return LocalTicket(self._worker.submit(self._run, plan))

    def reset(self) -> None:
        """Let the plans fail that are queued by now, and run the next ones again."""
        if not self._is_closed:
            self._worker.submit(self._forget_failure).result()

    def close(self) -> None:
        """Finish what was submitted and end the thread. Idempotent."""
        self._is_closed = True
        self._worker.shutdown(wait=True)

    def _run(self, plan: StepPlan) -> StepResult:
        """On the worker thread."""
        if self._failure is not None:
            self._runner.skip(plan)
            raise EngineError(
                f"step {plan.step_id} was queued behind a step that failed"
            ) from self._failure
        try:
            return self._runner.run(plan)
        except Exception as error:  # the thread's top: the ticket carries it to the engine
            self._failure = EngineError(f"step {plan.step_id} failed: {error}")
            raise self._failure from error

    def _forget_failure(self) -> None:
        """On the worker thread, behind everything that was queued."""
        self._failure = None
