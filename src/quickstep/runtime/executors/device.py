"""Runs plans on a device that works by itself: the next step is launched while one still runs.

A GPU is one, and so are the earlier stages of a pipeline. As `runtime.executors.local`, with two
threads. One launches steps in the order of `submit`; a GPU keeps the tokens that it sampled, so
that the next step needs no result, and a pipeline gets no sequence again before its token is known.
The other one waits for the tokens and records them. On a GPU, a step with rows for which the host
computes something from the tokens before it (a grammar, drafts) waits until all steps before it are
finished. While nothing runs, steps are recorded (`ModelRunner.capture_next`); where there is no
pause, one after a number of steps that ran op by op for want of a recorded one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from quickstep.errors import EngineError
from quickstep.runtime.executors.out_of_memory import free_device_memory, step_failure
from quickstep.runtime.runner import HeldStep, LaunchedStep, ModelRunner, PostedStep
from quickstep.types import StepPlan, StepResult

_LOGGER = logging.getLogger(__name__)

_MISSED_PER_CAPTURE = 16  # steps op by op, under load without a pause

_Answer = Future[StepResult]
_Outcome = LaunchedStep | PostedStep | StepResult | EngineError


class _Submitted(msgspec.Struct):
    """A plan, its place among all plans, what gets its result, and the step once it is launched."""

    plan: StepPlan
    number: int
    answer: _Answer
    step: LaunchedStep | PostedStep | None = None


class DeviceExecutor:
    """Owns the two threads, and the runner while it is open.

    `_changed` guards the queues; `_running` guards the runner. It is held while a step is launched,
    and while one is recorded, which waits for the device: results of steps that still run, and what
    a draft model launches for them, come after it. `on_close` is called once no step can run.
    """

    def __init__(self, runner: ModelRunner, on_close: Callable[[], None] | None = None) -> None:
        self._on_close = on_close
        self._runner = runner
        self._changed = threading.Condition()
        self._running = threading.Lock()
        self._queued: deque[_Submitted] = deque()
        self._launched: deque[_Submitted] = deque()
        self._is_launching = False
        self._is_capturing = False
        self._num_submitted = 0
        # the first step that failed, and why: those after it fail until `reset`
        self._failure: tuple[int, EngineError] | None = None
        self._is_closed = False
        self._finished_s = 0.0
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._launch_all, "quickstep-step"),
                (self._finish_all, "quickstep-results"),
            )
        ]

    def start(self) -> DeviceExecutor:
        """Start the threads."""
        self._runner.record_sampling()
        for thread in self._threads:
            thread.start()
        return self

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step; returns before it has run. Raises EngineError once closed."""
        with self._changed:
            if self._is_closed:
                raise EngineError(f"step {plan.step_id} was submitted to a closed executor")
            one = _Submitted(plan, self._num_submitted, Future())
            self._num_submitted += 1
            self._queued.append(one)
            self._changed.notify_all()
        return one.answer

    def wait_until_captured(self, timeout_s: float | None = None) -> bool:
        """`types.Executor.wait_until_captured`."""
        with self._changed:
            return self._changed.wait_for(self._has_captured, timeout_s)

    @property
    def num_captured(self) -> int:
        """Steps that are recorded."""
        return self._runner.num_captured

    def reset(self) -> None:
        """Let the plans that are queued now fail, and run later ones again."""
        with self._changed:
            self._changed.wait_for(self._is_idle)
            self._failure = None

    def close(self) -> None:
        """Finish what was submitted, end the threads, and free the runner's memory. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._threads:
            self._threads.clear()
            if self._on_close is not None:
                self._on_close()
            is_on_host = self._runner.is_on_host
            del self._runner
            if not is_on_host:
                free_device_memory()

    def _is_idle(self) -> bool:
        return not (self._queued or self._launched or self._is_launching)

    def _has_captured(self) -> bool:
        is_busy = self._is_capturing or not self._is_idle()
        return self._is_closed or not (is_busy or self._runner.wants_capture)

    def _failed_before(self, one: _Submitted) -> EngineError | None:
        """The failure of an earlier step: this one never got its inputs."""
        with self._changed:
            if self._failure is None or self._failure[0] >= one.number:
                return None
            failure = EngineError(f"step {one.plan.step_id} was queued after a step that failed")
            failure.__cause__ = self._failure[1]
            return failure

    def _failed(self, one: _Submitted, error: BaseException) -> EngineError:
        """Remember that a step failed; the first one counts."""
        failure = step_failure(one.plan.step_id, error)
        with self._changed:
            if self._failure is None or self._failure[0] > one.number:
                self._failure = one.number, failure
        return failure

    # -- the thread that launches ------------------------------------------------------------------

    def _launch_all(self) -> None:
        self._runner.use_device()
        while True:
            self._capture()
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._is_closed)
                if not self._queued:
                    return
                one = self._queued.popleft()
                self._is_launching = True
            outcome = self._launch(one)
            with self._changed:
                if isinstance(outcome, LaunchedStep | PostedStep):
                    one.step = outcome
                    self._launched.append(one)
                self._is_launching = False
                self._changed.notify_all()
            _answer(one, outcome)

    def _capture(self) -> None:
        """Record steps until there is something else to do, or one step if that is due."""
        while True:
            with self._changed:
                is_due = self._runner.num_missed >= _MISSED_PER_CAPTURE
                if self._is_closed or not (self._is_idle() or is_due):
                    return
                self._is_capturing = True
            has_captured = False
            try:
                with self._running:
                    has_captured = self._runner.capture_next()
            except BaseException:  # steps that are not recorded run op by op
                _LOGGER.exception("no further CUDA graphs: a capture failed")
                self._runner.stop_capturing()
            with self._changed:
                self._is_capturing = False
                self._changed.notify_all()
            if not has_captured:
                return

    def _launch(self, one: _Submitted) -> _Outcome:
        try:
            if (failure := self._failed_before(one)) is not None:
                with self._running:
                    self._runner.skip(one.plan)
                return failure
            with self._running:
                step = self._runner.launch(one.plan)
            if isinstance(step, PostedStep):
                self._runner.send(step)
            if not isinstance(step, HeldStep):
                return step
            with self._changed:
                self._changed.wait_for(lambda: not self._launched)
            if (failure := self._failed_before(one)) is not None:
                with self._running:
                    self._runner.drop(step)
                return failure
            with self._running:
                step.started_s = max(step.started_s, self._finished_s)
                result = self._runner.resume(step)
                self._finished_s = self._runner.now()
            return result
        except BaseException as error:  # the thread's top, and a panic in Rust is no Exception
            return self._failed(one, error)

    # -- the thread that waits for results ---------------------------------------------------------

    def _finish_all(self) -> None:
        self._runner.use_device()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._launched or (self._is_closed and self._is_idle())
                )
                if not self._launched:
                    return
                one = self._launched[0]
            assert one.step is not None, "it is launched"
            outcome = self._finish(one, one.step)
            with self._changed:
                self._launched.popleft()
                self._changed.notify_all()
            _answer(one, outcome)

    def _finish(self, one: _Submitted, step: LaunchedStep | PostedStep) -> StepResult | EngineError:
        try:
            awaited = self._runner.wait(step)
            failure = self._failed_before(one)
            with self._running:
                if failure is None:
                    step.started_s = max(step.started_s, self._finished_s)
                    result = self._runner.finish(step, awaited)
                    self._finished_s = self._runner.now()
                    return result
                self._runner.abandon(step)
                return failure
        except BaseException as error:  # the thread's top
            with self._running:
                self._runner.abandon(step)
            return self._failed(one, error)


def _answer(one: _Submitted, outcome: _Outcome) -> None:
    if isinstance(outcome, StepResult):
        one.answer.set_result(outcome)
    elif isinstance(outcome, EngineError):
        one.answer.set_exception(outcome)
