"""`ResidentModels`: the models of a server with several, each loaded when a request names it.

A task that serves a request holds the model of its latest request until the task ends. Which model
is loaded or unloaded is decided by `core.model_residency`; here that is executed. Everything runs
in the server's event loop; `run` is the task that drives it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from quickstep.core.model_residency import ModelResidency, ModelState
from quickstep.core.shares import NoRoom, Shares
from quickstep.engine.interface import ServedEngine, SleepingEngine
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.stats import EngineState
from quickstep.errors import EngineDied, EngineError, QuickstepError, RequestError, size_text
from quickstep.server.models.lora_names import LoRANames
from quickstep.server.models.served_model import ServedModel
from quickstep.server.options import ServerOptions

if TYPE_CHECKING:
    from quickstep.model.sizing import MemoryPlan

_LOG = logging.getLogger("quickstep.server")
_POLL_S = 0.1  # while requests wait for a model
_MAX_LOADS = 3  # of a model whose engine's process dies while it loads
_RETRY_S = 0.5  # after an engine could not be unloaded
# The values of `ModelState`.
StateName = Literal["absent", "loading", "ready", "asleep", "draining", "failed"]
OpenedModel = Callable[[ServedModel], Awaitable[None]]


class ModelEntry(msgspec.Struct, frozen=True):
    """A model that a server may load.

    Attributes:
        names: The names that clients may use; the first one is in the responses.
        options: The server's, with what is the model's own.
        open: Opens its engine. Raises ConfigError, EngineError.
        num_bytes: What it takes in memory, 0 for unknown.
        is_pinned: It is loaded at the start and never unloaded.
    """

    names: tuple[str, ...]
    options: ServerOptions
    open: Callable[[], Awaitable[ServedEngine]]
    num_bytes: int = 0
    is_pinned: bool = False

    @property
    def name(self) -> str:
        """The name under which it is recorded, measured and priced."""
        return self.names[0]

    def has_adapter(self, name: str) -> bool:
        """Whether a name is that of one of the adapters that are known at the start."""
        options = self.options
        return name in LoRANames(options.adapter_names, options.lora_dir)


class SeveralModels(msgspec.Struct, frozen=True):
    """The models of a server, the first of which is open before it listens.

    Attributes:
        memory_bytes: What those in memory may take together.
        num_loaded: How many are loaded at the start.
        max_waiting: Requests that may wait for models, of which each API key has its share; None
            for no limit.
    """

    entries: tuple[ModelEntry, ...]
    memory_bytes: int
    num_loaded: int = 1
    max_waiting: int | None = None


class ModelStatus(msgspec.Struct, frozen=True):
    """Where a model is, and what it takes in memory."""

    name: str
    state: ModelState
    num_bytes: int
    is_pinned: bool
    num_requests: int
    num_waiting: int
    idle_s: float | None
    unused_s: float
    failure: str

    @property
    def left_s(self) -> float | None:
        """Seconds until it is unloaded if no request comes; None for never."""
        if self.idle_s is None or self.is_pinned:
            return None
        return max(0.0, self.idle_s - (0.0 if self.num_requests else self.unused_s))


class ResidentModels:
    """Loads and unloads the models of `entries`, the first of which is open already.

    `opened` is called once for each model, with its engine open and not started.
    """

    def __init__(
        self,
        several: SeveralModels,
        first: ServedModel,
        opened: OpenedModel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries = {entry.name: entry for entry in several.entries}
        self._server = first.server
        options = several.entries[0].options.models
        residency = self._residency = ModelResidency(several.memory_bytes, options.overtake_s)
        self._report_opened = opened
        self._clock = clock
        self._models = {first.name: first}
        self._failures: dict[str, str] = {}
        self._numbers = itertools.count()
        self._queue: dict[int, asyncio.Future[None]] = {}
        self._shares = Shares(several.max_waiting)  # of the queue, by key
        self._overtake_s = options.overtake_s
        self._held: dict[asyncio.Task[object], tuple[str, int]] = {}
        self._changes = OwnedTasks(_LOG)
        self._changed = asyncio.Event()
        self._is_stopping = False
        for entry in several.entries:
            residency.add(entry.name, entry.num_bytes, entry.is_pinned, options.idle_s)
        self._set_bytes(first)
        residency.request(first.name, -1, clock())
        residency.begin_loaded(first.name)
        residency.loaded(first.name, clock())
        residency.end(first.name, -1, clock())
        residency.preload(several.num_loaded)

    def entry(self, name: str) -> ModelEntry | None:
        """The model with a name, its own or that of an adapter; None if there is none."""
        for entry in self._entries.values():
            if name in entry.names:
                return entry
        for entry in self._entries.values():
            model = self._models.get(entry.name)
            if entry.has_adapter(name) if model is None else name in model.adapters:
                return entry
        return None

    @property
    def entries(self) -> Sequence[ModelEntry]:
        """All models."""
        return tuple(self._entries.values())

    def state(self, entry: ModelEntry) -> ModelState:
        """The state of a model."""
        return self._residency.state(entry.name)

    def status(self) -> Iterator[ModelStatus]:
        """The states of all models, in their order."""
        for name in self._entries:
            residency = self._residency
            yield ModelStatus(
                name,
                residency.state(name),
                residency.num_bytes(name),
                residency.is_pinned(name),
                residency.num_held(name),
                residency.num_waiting(name),
                residency.idle_s(name),
                self._clock() - residency.used_s(name),
                self._failures.get(name, ""),
            )

    @property
    def is_failed(self) -> bool:
        """Whether no model can be loaded any more."""
        return all(status.state is ModelState.FAILED for status in self.status())

    async def ready(
        self, entry: ModelEntry, wait_s: float | None = None, caller: str = ""
    ) -> ServedModel:
        """Wait until a model is loaded, for `wait_s` seconds at most (None: without a limit). The
        calling task holds it until it ends or calls this again. `caller` is the name of an API key.

        Raises:
            RequestError: The model can never fit, was not loaded in time, or too many wait.
            EngineError: It could not be loaded.
        """
        task, name, number = asyncio.current_task(), entry.name, next(self._numbers)
        assert task is not None, "requests are tasks"
        if self._is_stopping:
            raise EngineError("the server is stopping")
        self._check_fits(name)
        self._let_go(task)
        model = self._models.get(name)
        if model is not None and model.engine.stats().state is EngineState.FAILED:
            self._residency.failed(name)
            raise EngineError(f"the engine of {name} has failed and is not started again")
        if not self._residency.request(name, number, self._clock()):
            await self._wait(name, number, wait_s, caller)
        task.add_done_callback(self._let_go)
        self._held[task] = (name, number)
        return self._models[name]

    def _check_fits(self, name: str) -> None:
        num_bytes, most = self._residency.num_bytes(name), self._residency.free_for(name)
        if num_bytes > most:
            fitting = [
                other
                for other in self._entries
                if self._residency.num_bytes(other) <= self._residency.free_for(other)
            ]
            raise RequestError(
                f"the model {name} needs {size_text(num_bytes)}, models have at most "
                f"{size_text(most)}; raise --models-memory-bytes, lower the model's "
                f"kv-cache-memory-bytes, or name one that fits: {', '.join(fitting) or 'none'}",
                param="model",
                code="model_does_not_fit",
            )

    async def _wait(self, name: str, number: int, wait_s: float | None, caller: str) -> None:
        try:
            self._shares.take(caller, weight=self._server.api_keys.weight_of(caller))
        except NoRoom as full:
            self._residency.end(name, number, self._clock())
            whose = f" of {full.owner}" if full.owner else ""
            raise RequestError(
                f"{full.num_held} requests{whose} wait for a model, at most {full.capacity} may; "
                "send the request again later or raise --max-waiting",
                status=429,
                retry_after_s=self._overtake_s,
            ) from None
        loaded = self._queue[number] = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            async with asyncio.timeout(wait_s):
                await loaded
        except TimeoutError:
            self._residency.end(name, number, self._clock())
            state = self._residency.state(name).value
            raise RequestError(
                f"the model {name} is {state}, and was not ready within {wait_s:g} s",
                status=503,
                code="model_not_ready",
            ) from None
        except BaseException:
            self._residency.end(name, number, self._clock())
            self._changed.set()
            raise
        finally:
            del self._queue[number]
            self._shares.give_back(caller)

    def _let_go(self, task: asyncio.Task[object]) -> None:
        held = self._held.pop(task, None)
        if held is not None:
            self._residency.end(*held, self._clock())
            self._changed.set()

    async def load(self, entry: ModelEntry) -> None:
        """Load a model ahead of its requests. Raises as `ready`."""
        await self.ready(entry)
        task = asyncio.current_task()
        assert task is not None, "requests are tasks"
        self._let_go(task)

    def unload(self, entry: ModelEntry) -> None:
        """Unload a model once it has no requests. Raises RequestError for a pinned one."""
        if not self._residency.unload(entry.name):
            raise RequestError(f"the model {entry.name} is pinned", status=409, param="model")
        self._step()

    def keep(self, entry: ModelEntry, idle_s: float | None) -> None:
        """Unload a model after so long without requests; None for never."""
        self._residency.set_idle_s(entry.name, idle_s)
        self._changed.set()

    def stop(self) -> None:
        """Load no more models, and refuse the requests that wait for one."""
        self._is_stopping = True
        self._refuse(list(self._queue), EngineError("the server is stopping"))

    async def run(self) -> None:
        """Load and unload models until this is cancelled; then end what is under way."""
        try:
            while True:
                self._changed.clear()
                self._step()
                try:
                    async with asyncio.timeout(self._pause_s()):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            await self._changes.end()
            self.stop()

    def _pause_s(self) -> float | None:
        if self._queue:
            return _POLL_S
        next_s = self._residency.next_s()
        return None if next_s is None else max(_POLL_S, next_s - self._clock())

    def _step(self) -> None:
        if self._is_stopping:
            return
        busy = {name for name, model in self._models.items() if model.engine.stats().num_requests}
        steps, admitted = self._residency.plan(self._clock(), busy)
        self._admit(admitted)
        for step in steps:
            change = self._load(step.model) if step.is_load else self._unload(step.model)
            self._changes.start(change, f"model-{step.model}")

    async def _load(self, name: str) -> None:
        entry = self._entries[name]
        _LOG.info("loading the model %s", name)
        since_s = self._clock()
        try:
            if name in self._models:
                engine = self._models[name].engine
                if not isinstance(engine, SleepingEngine):
                    raise EngineError(f"the engine of {name} cannot be woken")
                await engine.wake()
            else:
                self._models[name] = await self._open(entry)
        except Exception as error:  # the task's top
            if not isinstance(error, QuickstepError):
                _LOG.exception("loading the model %s failed", name)
            self._fail(name, str(error))
        else:
            _LOG.info("the model %s is ready after %.1f s", name, self._clock() - since_s)
            self._failures.pop(name, None)
            self._admit(self._residency.loaded(name, self._clock()))
        self._changed.set()

    async def _open(self, entry: ModelEntry) -> ServedModel:
        engine = await self._opened(entry)
        try:
            model = ServedModel.of(engine, entry.options, self._server)
            await self._report_opened(model)
        except BaseException:
            await engine.stop()
            raise
        self._set_bytes(model)
        return model

    async def _opened(self, entry: ModelEntry) -> ServedEngine:
        """The engine of a model that is loaded for the first time. A process that was ended from
        outside, as for another program's memory, is tried again, as one that had run would be.
        """
        for _ in range(_MAX_LOADS - 1):
            try:
                return await entry.open()
            except EngineDied as error:
                _LOG.warning("loading the model %s again: %s", entry.name, error)
        return await entry.open()

    def _set_bytes(self, model: ServedModel) -> None:
        """Replace the planner's size of a model by the engine's own."""
        plan = model.engine.memory_plan
        if plan is not None:
            engines = model.engine.stats().replicas or (None,)
            self._residency.set_bytes(model.name, planned_bytes(plan) * len(engines))

    async def _unload(self, name: str) -> None:
        engine = self._models[name].engine
        try:
            if not isinstance(engine, SleepingEngine):
                raise EngineError(f"the engine of {name} cannot sleep")
            await engine.sleep()
        except Exception as error:  # the task's top: the model would be unloaded for ever
            if not isinstance(error, QuickstepError):
                _LOG.exception("unloading the model %s failed", name)
            _LOG.warning("the model %s stays in memory: %s", name, error)
            await asyncio.sleep(_RETRY_S)
            if engine.stats().state is EngineState.FAILED:
                self._fail(name, "its engine was given up")
            else:
                self._admit(self._residency.loaded(name, self._clock()))
        else:
            _LOG.info("the model %s sleeps", name)
            self._residency.unloaded(name)
        self._changed.set()

    def _fail(self, name: str, why: str) -> None:
        _LOG.error("the model %s cannot be used: %s", name, why)
        self._failures[name] = why
        error = EngineError(f"the model {name} could not be loaded: {why}")
        self._refuse(self._residency.failed(name), error)

    def _admit(self, requests: Sequence[int]) -> None:
        for number in requests:
            waiting = self._queue.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def _refuse(self, requests: Sequence[int], error: EngineError) -> None:
        for number in requests:
            waiting = self._queue.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)


def planned_bytes(plan: MemoryPlan) -> int:
    """What a model takes by its plan, without the rest of its limit."""
    return sum(row.num_bytes for row in plan.rows if row.label != "spare")
