"""Keeps an engine's process running: reads its messages, notices its death or its stall, starts
another process, and ends the last one. A process is a child, or listens on another host: then to
start it is to connect, and to end it is to close the connection (`EngineLink`).

A task follows each process from its opening to its end. The `EngineClient` is notified of a death
first. Each process that dies early, before it has given any output, delays the next restart longer,
until there are too many (`Restarts`). Everything runs in the event loop that called `open`.

Whether a process makes progress is judged by its messages and a clock (`StallWatch`). While it has
work the worker sends its stats ten times a second, from its event loop; the loop runs during a
step, because steps run in a thread. Two things are a stall when they last for `stall_s` with
requests pending:

    silence         No message comes: the process is stopped, or something blocks its loop.
    a stuck step    Messages come, but the step in flight does not end, and no thread but the
                    loop's uses the processor: the step waits for something that does not come.

A step that computes, however slowly, is neither: a large model on a small machine is not
restarted, and `/ready` and `/health` report that no step has ended. A process with nothing in
flight is not stalled either: grammars are prepared in other processes, and policies wait on
purpose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

import msgspec

from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.remote.messages import (
    FromEngine,
    Message,
    Opened,
    StatsNote,
    StepNote,
    Stop,
)
from quickstep.engine.stats import EngineState
from quickstep.errors import EngineError, EngineNotStarted, QuickstepError

_LOGGER = logging.getLogger(__name__)
# (bytes read, bytes in all)
LoadProgress = Callable[[int, int], None]
# What a process may take between two messages while it loads a model that was loaded before.
_RELOAD_SILENCE_S = 600.0
# What an engine may take to finish its step and close after Stop.
_STOP_S = 5.0
_MAX_DOUBLED = 30  # times that a delay is doubled; beyond them it is the longest one anyway
_NUM_CHECKS = 60  # of a stall, within `stall_s`
# Processor time per second above which a step computes. An idle worker's threads use almost none;
# one that reads its weights back from a swap file or a slow disk uses little, but more.
_COMPUTING_RATE = 0.02


class RestartLimits(msgspec.Struct, frozen=True):
    """How often and how fast an engine's process is restarted.

    Attributes:
        max_quick_deaths: Give up when more processes than this in a row died early; None never
            gives up. What the system does not let us start has not died.
        quick_s: A process that lived for less than this, and gave no output, died early; a failed
            start lived for 0 s.
        first_delay_s: Wait before the first restart; doubled with each early death in a row.
        max_delay_s: Longest wait.
    """

    max_quick_deaths: int | None = 5
    quick_s: float = 60.0
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0


class Restarts:
    """Counts early deaths in a row. Owned by the supervisor, which does the waiting."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._num_quick = 0
        self._num_not_started = 0

    def delay_after(self, lived_s: float, has_answered: bool = False) -> float | None:
        """A process died after `lived_s`: seconds until the next may start; None to give up. One
        that `has_answered` a request works: what ended it came from outside or from a request.
        """
        limits, self._num_not_started = self._limits, 0
        if has_answered or lived_s >= limits.quick_s:
            self._num_quick = 0
            return limits.first_delay_s
        self._num_quick += 1
        if limits.max_quick_deaths is not None and self._num_quick > limits.max_quick_deaths:
            return None
        return self._doubled(self._num_quick)

    def works(self) -> None:
        """The engine itself works: a process has answered, whatever ends it later, or what ended
        the last one was a request.
        """
        self._num_quick = 0

    def delay_without_start(self) -> float:
        """The system did not let a process start: seconds until it is tried again, without end."""
        self._num_not_started += 1
        return self._doubled(self._num_not_started)

    def _doubled(self, number: int) -> float:
        num_doubled = min(number - 1, _MAX_DOUBLED)
        return min(self._limits.max_delay_s, self._limits.first_delay_s * 2.0**num_doubled)


class StallWatch:
    """Decides whether a process is stalled. Pure: time is an argument.

    A check that comes late counts for at most two intervals: this process may have been stopped
    with the worker, or the machine may have been asleep.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self.every_s = stall_s / _NUM_CHECKS
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Begin to watch a new process."""
        self._checked_s = now
        self._was_pending = False
        self._silent_s = 0.0
        self._last_step_s: float | None = None
        self._is_in_flight = False
        self._computed_s = 0.0
        self._begin_window()

    @property
    def silent_s(self) -> float:
        """Seconds with requests pending since the process last sent a message."""
        return self._silent_s

    def note(self, message: FromEngine) -> None:
        """Note a message of the process."""
        self._silent_s = 0.0
        if not isinstance(message, StatsNote):
            return
        self._computed_s = message.computed_s
        stats = message.stats
        if not self._is_in_flight or stats.last_step_s != self._last_step_s:
            self._begin_window()
        self._is_in_flight = stats.num_steps_in_flight > 0
        self._last_step_s = stats.last_step_s

    def stall(self, now: float, has_work: bool) -> str:
        """Why the process must be replaced, "" if it need not. Called every `every_s` seconds."""
        passed_s = min(now - self._checked_s, 2 * self.every_s) if self._was_pending else 0.0
        self._checked_s, self._was_pending = now, has_work
        if not has_work:
            self._silent_s = 0.0
            self._begin_window()
            return ""
        self._silent_s += passed_s
        if self._silent_s >= self._stall_s:
            return f"the engine process sent nothing for {self._silent_s:.0f} s with work pending"
        if self._is_in_flight:
            self._stuck_s += passed_s
        if self._stuck_s < self._stall_s:
            return ""
        if self._computed_s - self._window_computed_s < _COMPUTING_RATE * self._stuck_s:
            return f"no step has ended for {self._stuck_s:.0f} s, and none has computed"
        self._begin_window()
        return ""

    def _begin_window(self) -> None:
        """Restart the count of seconds in which the step in flight neither ended nor computed."""
        self._stuck_s = 0.0
        self._window_computed_s = self._computed_s


class MessageSender(Protocol):
    """Queues messages for an engine."""

    @property
    def num_bytes(self) -> int:
        """The size of the messages that are not sent yet."""

    def put(self, message: Message) -> None:
        """Queue a message. Raises UnicodeEncodeError, OverflowError."""


class EngineLink(Protocol):
    """An engine's process and the connection to it: a child (`child.EngineProcess`), or one that
    listens (`host.EngineHost`). `messages` ends when the process or the connection does.
    """

    messages: AsyncGenerator[FromEngine, None]

    @property
    def sender(self) -> MessageSender:
        """Queues messages for the engine."""

    @property
    def name(self) -> str:
        """For the log."""

    @property
    def address(self) -> str:
        """HOST:PORT of an engine that listens, "" of a child."""

    @property
    def process_id(self) -> int | None:
        """The operating system's id of a child; None for one on another host."""

    async def open(self, progress: LoadProgress | None, silence_s: float | None) -> Opened:
        """Wait until the model is loaded; `silence_s` is the longest time between two messages,
        None for any time. Raises ConfigError, EngineError.
        """

    def kill(self) -> None:
        """End it now; `messages` ends with it."""

    async def end(self) -> str:
        """Close the connection, and end a child. Returns how it ended, as a sentence."""


# Starts an engine's process, or connects to it. Raises ConfigError, EngineError.
EngineConnector = Callable[[], Awaitable[EngineLink]]


class EngineClient(Protocol):
    """The object that the process works for; the supervisor notifies it."""

    async def opened(self, opened: Opened, process: EngineLink) -> None:
        """A process has the model loaded. Raises ConfigError if that cannot be served."""

    def receive(self, message: FromEngine) -> None:
        """The process sent a message."""

    @property
    def has_work(self) -> bool:
        """Whether a request waits for the process."""

    def died(self) -> str:
        """The process has ended. Returns why its engine had failed before, "" if it had not."""

    def restarted(self) -> None:
        """Another process serves."""

    def given_up(self) -> None:
        """No other process will be started."""


class Supervisor:
    """Owns the process and the engine's state. `open`, `start`, `drain`, `end`, in this order.

    `connect` starts a process, or connects to one. A process that makes no progress for `stall_s`
    seconds with work pending is killed, and so replaced (see `StallWatch`).
    """

    def __init__(
        self,
        client: EngineClient,
        connect: EngineConnector,
        limits: RestartLimits,
        clock: Callable[[], float],
        stall_s: float,
    ) -> None:
        self._client = client
        self._connect = connect
        self._restarts = Restarts(limits)
        self._clock = clock
        self._watch = StallWatch(stall_s)
        self._stall = ""  # why the process was killed, if it was for a stall
        self._has_answered = False  # whether the process has given output
        self._state = EngineState.NEW
        self._failure = ""
        self._num_restarts = 0
        self._process: EngineLink | None = None
        self._restart: asyncio.Future[None] | None = None  # resolved when that is over
        self._asleep: asyncio.Future[None] | None = None  # resolved when the process has ended
        self._waking: asyncio.Future[None] | None = None  # resolved when another one is wanted
        self._tasks = OwnedTasks(_LOGGER)
        self._following: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        return self._state

    @property
    def failure(self) -> str:
        """Why it is restarting or has failed, "" otherwise."""
        return self._failure

    @property
    def num_restarts(self) -> int:
        """Number of processes started after the first one."""
        return self._num_restarts

    def cause_found(self) -> None:
        """A request has ended the last process: the deaths before do not count any more."""
        self._restarts.works()

    @property
    def silent_s(self) -> float:
        """Seconds that the process has sent no message with work pending."""
        return self._watch.silent_s

    @property
    def process(self) -> EngineLink | None:
        """The one that serves now."""
        return self._process

    @property
    def is_ending(self) -> bool:
        """Whether the process was sent Stop."""
        return self._ending is not None

    async def open(self, progress: LoadProgress | None) -> None:
        """Start the first process. Raises ConfigError, EngineError."""
        self._process = await self._launch(progress, None)
        self._following = asyncio.create_task(self._follow(self._process), name="engine-process")

    def start(self) -> None:
        """Accept requests. Raises EngineError if there is no open process."""
        if self._following is None or self._state in (EngineState.STOPPED, EngineState.FAILED):
            raise EngineError(f"the engine is {self._state.value}, it cannot start")
        if self._state is EngineState.NEW:
            self._state = EngineState.RUNNING

    async def restart(self) -> None:
        """End the process in order and start another. Raises EngineError if none serves then."""
        if self._restart is None:
            process = self._running_process("restarted")
            restart = self._restart = asyncio.get_running_loop().create_future()
            self._state = EngineState.RESTARTING
            process.sender.put(Stop())
            kill = asyncio.get_running_loop().call_later(_STOP_S, process.kill)
            restart.add_done_callback(lambda _: kill.cancel())
        await asyncio.shield(self._restart)
        if self._state is not EngineState.RUNNING:
            raise EngineError(f"the engine is {self._state.value}: {self._failure}")

    async def sleep(self) -> None:
        """End the process in order, and start none before `wake`. Raises EngineError if there is
        none.
        """
        process = self._running_process("put to sleep")
        loop = asyncio.get_running_loop()
        asleep = self._asleep = loop.create_future()
        self._waking = loop.create_future()
        self._state = EngineState.ASLEEP
        process.sender.put(Stop())
        kill = loop.call_later(_STOP_S, process.kill)
        try:
            await asyncio.shield(asleep)
        finally:
            kill.cancel()

    async def wake(self) -> None:
        """Start a process again. Raises EngineError if the engine does not sleep, or none serves
        then.
        """
        if self._state is not EngineState.ASLEEP or self._waking is None:
            raise EngineError(f"the engine is {self._state.value}, it cannot be woken")
        restart = self._restart = asyncio.get_running_loop().create_future()
        self._state = EngineState.RESTARTING
        self._waking.set_result(None)
        await asyncio.shield(restart)
        if self.state is not EngineState.RUNNING:
            raise EngineError(f"the engine is {self._state.value}: {self._failure}")

    def _running_process(self, done: str) -> EngineLink:
        if self._process is None or self._state is not EngineState.RUNNING:
            raise EngineError(f"the engine is {self._state.value}, it cannot be {done}")
        return self._process

    def drain(self) -> None:
        """Accept no more requests, and do not restart a process that dies from now on."""
        if self._state in (EngineState.STOPPED, EngineState.FAILED):
            return
        self._state = EngineState.DRAINING
        if self._process is None and self._following is not None:
            self._following.cancel()

    async def end(self) -> None:
        """Stop the process, in order if possible; there is none when this returns. Idempotent."""
        if self._ending is None:
            self._ending = self._tasks.start(self._end(), "engine-end")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._process is not None and self._following is not None:
            self._process.sender.put(Stop())
            await asyncio.wait({self._following}, timeout=_STOP_S)
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._process is not None:  # the task was cancelled before it began
            self._process.kill()
            await self._process.end()
            self._process = None
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED

    async def _launch(self, progress: LoadProgress | None, silence_s: float | None) -> EngineLink:
        process = await self._connect()
        try:
            opened = await process.open(progress, silence_s)
            await self._client.opened(opened, process)
        except BaseException:
            process.kill()
            await process.end()
            raise
        _LOGGER.info("%s is open", process.name)
        return process

    async def _follow(self, process: EngineLink) -> None:
        living: EngineLink | None = process
        try:
            while living is not None:
                since_s = self._clock()
                reason = await self._live(living)
                living = await self._restarted(reason, self._clock() - since_s)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the task's top: this object's state is unknown
            _LOGGER.exception("the engine's supervisor failed")
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._end_restart()
            if self._asleep is not None and not self._asleep.done():
                self._asleep.set_result(None)

    async def _live(self, process: EngineLink) -> str:
        """Receive the process's messages until it ends. Returns why it ended."""
        self._process = process
        self._watch.begin(self._clock())
        self._stall, self._has_answered = "", False
        watching = self._tasks.start(self._watch_stalls(process), "engine-stalls")
        try:
            async for message in process.messages:
                self._watch.note(message)
                if not self._has_answered and _has_output(message):
                    self._has_answered = True
                    self._restarts.works()
                try:
                    self._client.receive(message)
                except Exception:  # the state of this process's streams is unknown
                    _LOGGER.exception("a message of the engine process could not be received")
                    self._stall = "the engine process was ended: a message failed"
                    process.kill()
                    break
        except EngineError as error:
            _LOGGER.error("%s", error)
            process.kill()
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            watching.cancel()
            self._watch.begin(self._clock())
            self._process = None
            if self._state not in (EngineState.DRAINING, EngineState.ASLEEP):
                self._state = EngineState.RESTARTING
            failure = self._client.died()
            how = await process.end()
        return failure or self._stall or how

    async def _watch_stalls(self, process: EngineLink) -> None:
        """Kill a process that makes no progress; its end is then noticed as any other."""
        while not self._stall:
            await asyncio.sleep(self._watch.every_s)
            self._stall = self._watch.stall(self._clock(), self._client.has_work)
        _LOGGER.error("%s: ending %s", self._stall, process.name)
        process.kill()

    async def _restarted(self, reason: str, lived_s: float) -> EngineLink | None:
        """The next process, open; None if the engine drains, or there were too many deaths."""
        was_asleep = await self._woken()
        since_s = self._clock()
        if self._state is EngineState.DRAINING:
            if self._ending is None:
                _LOGGER.error("%s while it drained", reason)
            return None
        has_answered = self._has_answered
        is_wanted, was_started = self._restart is not None, True
        while True:
            if not is_wanted:
                self._failure = reason
                if was_started:
                    delay_s = self._restarts.delay_after(lived_s, has_answered)
                else:
                    delay_s = self._restarts.delay_without_start()
                if delay_s is None:
                    self._give_up(reason)
                    return None
                _LOGGER.error("%s; trying again in %.1f s", reason, delay_s)
                await asyncio.sleep(delay_s)
            is_wanted = False
            try:
                process = await self._launch(None, _RELOAD_SILENCE_S)
            except QuickstepError as error:
                reason, lived_s, has_answered = str(error), 0.0, False
                was_started = not isinstance(error, EngineNotStarted)
                continue
            self._process = process
            self._state, self._failure = EngineState.RUNNING, ""
            self._num_restarts += not was_asleep
            level = logging.INFO if was_asleep else logging.WARNING
            _LOGGER.log(level, "the engine is back after %.1f s", self._clock() - since_s)
            self._end_restart()
            self._client.restarted()
            return process

    async def _woken(self) -> bool:
        """Wait for `wake` if the engine sleeps. Returns whether it slept."""
        asleep, waking = self._asleep, self._waking
        if asleep is None or waking is None:
            return False
        asleep.set_result(None)
        await waking
        self._asleep = self._waking = None
        return True

    def _end_restart(self) -> None:
        """A restart that was called for is over, in one way or another."""
        restart, self._restart = self._restart, None
        if restart is not None and not restart.done():
            restart.set_result(None)

    def _give_up(self, reason: str) -> None:
        self._state, self._failure = EngineState.FAILED, reason
        _LOGGER.critical("the engine is given up: %s", reason)
        self._client.given_up()


def _has_output(message: FromEngine) -> bool:
    """Whether a process has answered a request with it, if only in part."""
    if not isinstance(message, StepNote):
        return False
    return any(delta.token_ids or delta.embedding for _, delta in message.deltas)
