"""Runs plans in this process, strictly in the order of `submit`: on a worker thread, or at once.

Used by the engine, which awaits tickets through their callback. Steps run one at a time, so steps
never overlap on the device; planning the next step overlaps with the one that runs. Passing a step
to another thread and back takes longer than the steps of a small model: a step that is expected to
be that short runs on the caller's thread, when its result is requested. After a step raised, every
plan queued after it fails until `reset`, because its inputs were never computed; the slots still
follow the plans, so that runner and scheduler agree on what is resident.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from quickstep.errors import EngineError
from quickstep.runtime.executors.out_of_memory import free_device_memory, step_failure
from quickstep.runtime.runner import ModelRunner
from quickstep.types import StepPlan, StepResult

# A shorter step is not worth a change of threads (0.1-0.2 ms with two asyncio wake-ups), and blocks
# the caller's event loop no longer than a garbage collection.
_SHORT_S = 5e-4


class ShortTicket:
    """A step that runs on the thread that calls `result`, so that there is nothing to wait for."""

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run = run
        self._outcome: StepResult | EngineError | None = None

    def done(self) -> bool:
        """True: `result` returns after the short step at the latest."""
        return True

    def result(self) -> StepResult:
        """Run the step, the first time. Raises EngineError when it failed."""
        self.finish()
        if isinstance(self._outcome, EngineError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def finish(self) -> None:
        """Run the step unless it has run; `result` raises its failure."""
        if self._outcome is None:
            try:
                self._outcome = self._run()
            except EngineError as error:
                self._outcome = error

    def add_done_callback(self, callback: Callable[[ShortTicket], object], /) -> None:
        """Call `callback` at once."""
        callback(self)


class LocalExecutor:
    """Owns the worker thread, and the runner while it is open.

    `short_s` is the longest step that runs on the caller's thread. `on_close` is called once no
    step can run any more.
    """

    def __init__(
        self,
        runner: ModelRunner,
        short_s: float = _SHORT_S,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._on_close = on_close
        self._runner = runner
        self._short_s = short_s
        self._short_tokens = 0  # of the last step, if it was short
        self._newest: Future[StepResult] | ShortTicket | None = None
        self._failure: EngineError | None = None
        self._is_closed = False
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="quickstep-step", initializer=self._use_device
        )

    def submit(self, plan: StepPlan) -> Future[StepResult] | ShortTicket:
        """Queue a step; returns before it has run. Raises EngineError once closed; the result
        raises it when the step failed, or one before it did.
        """
        if self._is_closed:
            raise EngineError(f"step {plan.step_id} was submitted to a closed executor")
        newest, num_tokens = self._newest, plan.num_tokens
        if isinstance(newest, ShortTicket):
            newest.finish()  # plans run in order
            is_idle = True
        else:
            is_idle = newest is None or newest.done()
        if is_idle and not plan.admitted and 0 < num_tokens <= self._short_tokens:
            self._newest = ShortTicket(partial(self._run, plan, num_tokens))
        else:
            self._newest = self._worker.submit(self._run, plan, num_tokens)
        return self._newest

    def reset(self) -> None:
        """Let the plans that are queued now fail, and run later ones again."""
        if not self._is_closed:
            self._finish_short()
            self._worker.submit(self._forget_failure).result()

    def wait_until_captured(self, timeout_s: float | None = None) -> bool:
        """`types.Executor.wait_until_captured`: steps are recorded when they first run."""
        return True

    def close(self) -> None:
        """Finish what was submitted, end the thread, and free the runner's memory. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._finish_short()
        self._worker.shutdown(wait=True)
        if self._on_close is not None:
            self._on_close()
        is_on_host = self._runner.is_on_host
        del self._runner
        if not is_on_host:
            free_device_memory()

    def _use_device(self) -> None:
        self._runner.use_device()

    def _finish_short(self) -> None:
        """Plans run in order: before the next one is queued, the last one has run or is queued."""
        if isinstance(self._newest, ShortTicket):
            self._newest.finish()

    def _run(self, plan: StepPlan, num_tokens: int) -> StepResult:
        """On the worker thread, or on the caller's while the worker is idle."""
        try:
            if self._failure is None:
                result = self._runner.run(plan)
                is_short = result.seconds <= self._short_s and self._runner.is_on_host
                self._short_tokens = num_tokens if is_short else 0
                return result
            self._runner.skip(plan)
        except BaseException as error:  # the thread's top, and a panic in Rust is no Exception
            self._failure = step_failure(plan.step_id, error)
            raise self._failure from self._failure.__cause__
        raise EngineError(
            f"step {plan.step_id} was queued after a step that failed"
        ) from self._failure

    def _forget_failure(self) -> None:
        """On the worker thread, after everything that was queued."""
        self._failure = None
