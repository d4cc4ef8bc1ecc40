"""Keeps an engine's process alive: reads it, notices its death or its stall, starts another, and
ends it.

A task follows each process from its opening to its end. Whoever stands behind (`EngineClient`) is
told of a death before anything else is done about it. Restarts come slower each time a process
dies young, until they are given up. Everything runs in the event loop that called `open`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from quickstep.engine.remote.child import EngineProcess, LoadProgress
from quickstep.engine.remote.launch import Launched
from quickstep.engine.remote.messages import FromEngine, Open, Opened, Stop
from quickstep.engine.remote.restarts import RestartLimits, Restarts
from quickstep.engine.remote.stall_watch import StallWatch
from quickstep.engine.stats import EngineState
from quickstep.errors import EngineError, QuickstepError

__all__ = ["EngineClient", "Supervisor"]

_LOGGER = logging.getLogger(__name__)
# What a process may take between two messages while it loads a model that was loaded before.
_RELOAD_SILENCE_S = 600.0
# What an engine that was told to stop may take to finish its step and close.
_STOP_S = 5.0


class EngineClient(Protocol):
    """Whom the engine's process works for."""

    async def opened(self, opened: Opened) -> None:
        """A process has the model loaded. Raises ConfigError if that cannot be served."""

    def receive(self, message: FromEngine) -> None:
        """The process said something."""

    @property
    def has_work(self) -> bool:
        """Whether it waits for the process."""

    def died(self) -> str:
        """The process is gone. Says why its engine had failed before, "" if it had not."""


class Supervisor:
    """Owns the process and the engine's state. `open`, `start`, `drain`, `end`, in this order.

    `launched` is the first process, where there is one already. One that makes no progress for
    `stall_s` seconds with work pending is killed, and so replaced (see `stall_watch`).
    """

    def __init__(
        self,
        client: EngineClient,
        opening: Open,
        command: Sequence[str],
        limits: RestartLimits,
        clock: Callable[[], float],
        stall_s: float,
        launched: Launched | None = None,
    ) -> None:
        self._client = client
        self._opening = opening
        self._command = tuple(command)
        self._restarts = Restarts(limits)
        self._clock = clock
        self._watch = StallWatch(stall_s)
        self._stall = ""  # why the process was killed, if it was for a stall
        self._launched = launched
        self._state = EngineState.NEW
        self._failure = ""
        self._num_restarts = 0
        self._process: EngineProcess | None = None
        self._following: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def failure(self) -> str:
        """Why it is restarting or has failed, "" otherwise."""
        return self._failure

    @property
    def num_restarts(self) -> int:
        """Processes that were started after the first one."""
        return self._num_restarts

    @property
    def silent_s(self) -> float:
        """Seconds that the process has said nothing with work pending."""
        return self._watch.silent_s

    @property
    def process(self) -> EngineProcess | None:
        """The one that serves now."""
        return self._process

    @property
    def is_ending(self) -> bool:
        """Whether the process has been told to stop."""
        return self._ending is not None

    async def open(self, progress: LoadProgress | None) -> None:
        """Start the first process. Raises ConfigError, EngineError."""
        self._process = await self._launch(progress, None)
        self._following = asyncio.create_task(self._follow(self._process), name="engine-process")

    def start(self) -> None:
        """Requests are welcome. Raises EngineError if there is nothing open."""
        if self._following is None or self._state in (EngineState.STOPPED, EngineState.FAILED):
            raise EngineError(f"the engine is {self._state.value}, it cannot start")
        if self._state is EngineState.NEW:
            self._state = EngineState.RUNNING

    def drain(self) -> None:
        """No request is welcome any more, and a process that dies now is the last one."""
        if self._state in (EngineState.STOPPED, EngineState.FAILED):
            return
        self._state = EngineState.DRAINING
        if self._process is None and self._following is not None:
            self._following.cancel()

    async def end(self) -> None:
        """Stop the process, in order if it can; when this returns there is none. Idempotent."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name="engine-end")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._process is not None and self._following is not None:
            self._process.send(Stop())
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

    async def _launch(
        self, progress: LoadProgress | None, silence_s: float | None
    ) -> EngineProcess:
        launched, self._launched = self._launched, None
        if launched is None:
            process = await EngineProcess.spawn(self._command)
        else:
            process = await EngineProcess.take(launched)
        try:
            opened = await process.open(self._opening, progress, silence_s)
            await self._client.opened(opened)
        except BaseException:
            process.kill()
            await process.end()
            raise
        _LOGGER.info("the engine is process %d", process.process_id)
        return process

    async def _follow(self, process: EngineProcess) -> None:
        living: EngineProcess | None = process
        try:
            while living is not None:
                since_s = self._clock()
                reason = await self._live(living)
                living = await self._restarted(reason, self._clock() - since_s)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the task's top: what this object knows is in doubt
            _LOGGER.exception("the engine's supervisor failed")
            self._give_up(f"{type(error).__name__}: {error}")

    async def _live(self, process: EngineProcess) -> str:
        """Take in what the process says until it is gone; says why it went."""
        self._process = process
        self._watch.begin(self._clock())
        self._stall = ""
        watching = asyncio.create_task(self._watch_stalls(process), name="engine-stalls")
        try:
            async for message in process.messages:
                self._watch.heard(message)
                self._client.receive(message)
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
            if self._state is not EngineState.DRAINING:
                self._state = EngineState.RESTARTING
            failure = self._client.died()
            how = await process.end()
        return failure or self._stall or f"the engine process {how}"

    async def _watch_stalls(self, process: EngineProcess) -> None:
        """Kill a process that makes no progress; its end is then noticed as any other."""
        while not self._stall:
            await asyncio.sleep(self._watch.every_s)
            self._stall = self._watch.look(self._clock(), self._client.has_work)
        _LOGGER.error("%s: killing process %d", self._stall, process.process_id)
        process.kill()

    async def _restarted(self, reason: str, lived_s: float) -> EngineProcess | None:
        """The next process, open; None when none is wanted, or it is no use."""
        since_s = self._clock()
        if self._state is EngineState.DRAINING:
            if self._ending is None:
                _LOGGER.error("%s while it drained", reason)
            return None
        while True:
            self._failure = reason
            delay_s = self._restarts.delay_after(lived_s)
            if delay_s is None:
                self._give_up(reason)
                return None
            _LOGGER.error("%s; starting it again in %.1f s", reason, delay_s)
            await asyncio.sleep(delay_s)
            try:
                process = await self._launch(None, _RELOAD_SILENCE_S)
            except QuickstepError as error:
                reason, lived_s = str(error), 0.0
                continue
            self._state, self._failure = EngineState.RUNNING, ""
            self._num_restarts += 1
            _LOGGER.warning("the engine is back after %.1f s", self._clock() - since_s)
            return process

    def _give_up(self, reason: str) -> None:
        self._state, self._failure = EngineState.FAILED, reason
        _LOGGER.critical("the engine is given up: %s", reason)
