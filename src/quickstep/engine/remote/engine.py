"""An engine in its own process, with the interface that the server uses: `RemoteEngine`.

    RemoteEngine (here: no torch) ── socket pair or TCP, msgpack ── EngineService ── Engine

The `Supervisor` keeps a worker running, or a connection to an engine that listens on another host.
When it ends, every stream ends with an error at once. A request is checked here, before it is sent;
the engine checks the rest, and its refusals are raised by the stream's `accepted`. All times are
of this process's monotonic clock (`host`). Everything runs in the event loop that called `open`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from quickstep.config import STALL_S, EngineConfig
from quickstep.core.accounting import SchedulerStats, added, counts
from quickstep.core.admission import AdmissionState
from quickstep.core.cost_model import CostModel, LinearCostModel
from quickstep.core.resources.block_pool import PoolStats
from quickstep.core.service_order import level_of
from quickstep.engine.adapters import LoadedAdapter
from quickstep.engine.logs import LogSetup
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.child import ProcessLauncher, StandbyProcess
from quickstep.engine.remote.launch import WORKER_COMMAND, Launched
from quickstep.engine.remote.messages import (
    Abort,
    Accepted,
    AdapterNote,
    Draining,
    FindCachedSlot,
    FindStoredSlot,
    FromEngine,
    LoadAdapter,
    ModelFacts,
    Opened,
    Pause,
    PrefixCacheNote,
    Refused,
    ReportTimings,
    ResetPrefixCache,
    RestoreSlot,
    Resume,
    SaveSlot,
    SlotMessage,
    SlotNote,
    Started,
    StatsNote,
    StepNote,
    TimingsNote,
    UnloadAdapter,
)
from quickstep.engine.remote.opening import opening_of
from quickstep.engine.remote.streams import LostRequest, RemoteStreams
from quickstep.engine.remote.supervisor import (
    EngineConnector,
    EngineLink,
    LoadProgress,
    RestartLimits,
    Supervisor,
)
from quickstep.engine.remote.texts import Texts
from quickstep.engine.requests import RequestIntake, open_seeds
from quickstep.engine.retrieval.card import Retrieval
from quickstep.engine.stats import EngineState, EngineStats
from quickstep.engine.stream import Stream
from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.model.checkpoint.source import FileVersions, file_versions
from quickstep.model.sizing import MemoryPlan
from quickstep.text.chat_template import ChatTemplate
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import FinishReason, KVTarget, Request, SequenceTimings, SlotPrefix

_LOGGER = logging.getLogger(__name__)
# After a request's deadline, until it is ended here.
_DEADLINE_MARGIN_S = 0.5
# Messages that may wait for a process that does not read.
LOG_CAPACITY = 16_384  # of each kind, about 770 bytes a step and 1,300 a sequence
_REPORT_S = 2.0  # how long the process may take to answer a question
# Until an adapter that could not be read is read again: doubled with each attempt.
_RELOAD_S, _MOST_RELOAD_S = 2.0, 120.0
_ADAPTER_S = 130.0  # for an adapter, which it gives up after 120
_SLOT_S = 300.0  # for a slot's file, which may have gigabytes
_MAX_UNSENT_BYTES = 64 * 1024 * 1024


class _LoadedModel(msgspec.Struct, frozen=True):
    """What this process knows of the loaded model."""

    facts: ModelFacts
    texts: Texts
    files: FileVersions


class _WorkerStats:
    """The stats that the worker last sent, with counts over all of the engine's processes.

    Counts only grow, even if a process dies; blocks and queues are the current process's, and empty
    while there is none. What an engine that listens counted before a connection, or between two, is
    not this server's.
    """

    def __init__(self) -> None:
        self._last: EngineStats | None = None
        self._past: list[SchedulerStats] = []  # counts that the last stats do not have: their sum
        self._scheduler: SchedulerStats | None = None  # the last one, with the past

    def open(self, stats: EngineStats) -> None:
        """A worker is open, with these stats."""
        self._past = [added([*self._past, counts(stats.scheduler, -1)])]
        self.update(stats)

    def update(self, stats: EngineStats) -> None:
        """The worker sent its stats."""
        self._last, self._scheduler = stats, None

    def add_past(self) -> str:
        """The worker has ended, with all its blocks and queues. Returns why its engine failed."""
        last = self._required()
        self._past = [added([*self._past, counts(last.scheduler)])]
        blocks = last.scheduler.blocks
        empty = PoolStats(blocks.num_blocks, 0, 0, 0, 0)
        self._scheduler = None
        self._last = replace(
            last,
            failure="",
            last_step_s=None,
            num_steps_in_flight=0,
            admission=AdmissionState(),
            scheduler=replace(counts(last.scheduler, 0), blocks=empty),
        )
        return last.failure

    def stats(
        self,
        state: EngineState,
        failure: str,
        now_s: float,
        busy_since_s: float | None,
        num_requests: int,
        num_restarts: int,
        silent_s: float,
    ) -> EngineStats:
        """The current stats: the arguments, and the rest as the worker last sent it."""
        last = self._required()
        if self._scheduler is None:
            self._scheduler = added([last.scheduler, *self._past])
        return replace(
            last,
            state=state,
            failure=failure,
            now_s=now_s,
            busy_since_s=busy_since_s,
            num_requests=num_requests,
            scheduler=self._scheduler,
            num_restarts=num_restarts,
            silent_s=silent_s,
        )

    @property
    def last(self) -> EngineStats:
        """As the worker last sent them."""
        return self._required()

    def _required(self) -> EngineStats:
        if self._last is None:
            raise EngineError("the engine is not open")
        return self._last


class EngineWatcher(Protocol):
    """Continues the requests of an engine whose process has ended."""

    def lost(self, engine: RemoteEngine, requests: Sequence[LostRequest]) -> None:
        """The process has ended with these requests."""

    def begun(self, engine: RemoteEngine, requests: Sequence[LostRequest]) -> None:
        """The prompts of these requests are computed, which other engines are to continue."""

    def freed(self, engine: RemoteEngine) -> None:
        """The engine has ended requests that were handed over, and may get them again."""

    def restarted(self, engine: RemoteEngine) -> None:
        """Another process serves."""

    def given_up(self, engine: RemoteEngine) -> None:
        """No other process will be started."""


class RemoteEngine:
    """One model in a process that this object owns. `open` it, `start` it, `stop` it.

    `command` starts the worker; tests have their own. `launched` is the first worker, if it has
    been started, perhaps with the message to open the same `config`; this object takes it over.
    `standby` is what several engines share: when one sleeps, a worker is prepared for the next. A
    process that makes no progress for `stall_s` seconds with requests pending is replaced. With
    `connect` it is an engine that listens (`host.connector`), and of `config` only the parts that
    concern this process matter. At most
    `max_undecided` requests wait to be accepted or refused: more only wait if the process does not
    read its messages.

    With a `watcher`, the requests of a process that has ended are handed over to it; without one
    they end with an error. Of several replicas of a model, each has its number as `replica`, and
    they may have one `step_log`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log: LogSetup | None = None,
        restart_limits: RestartLimits | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        clock: Callable[[], float] = time.monotonic,
        launched: Launched | None = None,
        standby: StandbyProcess | None = None,
        stall_s: float = STALL_S,
        max_undecided: int = 4096,
        watcher: EngineWatcher | None = None,
        replica: int = 0,
        step_log: StepLog | None = None,
        connect: EngineConnector | None = None,
    ) -> None:
        if connect is None:
            connect = ProcessLauncher(opening_of(config, log), command, launched, standby).start
        self._standby = standby
        self._supervisor = Supervisor(
            client=self,
            connect=connect,
            limits=restart_limits or RestartLimits(),
            clock=clock,
            stall_s=stall_s,
        )
        self._clock = clock
        self._max_undecided = max_undecided
        self._load = config.load
        self._inputs = config.inputs
        self._stream_bounds = config.streams
        self._max_waiting = config.scheduler.max_waiting
        self._load = config.load
        self._worker_stats = _WorkerStats()
        self._step_log = StepLog(LOG_CAPACITY) if step_log is None else step_log
        self._watcher = watcher
        self._replica = replica
        self._reports: dict[str, asyncio.Future[dict[int, SequenceTimings]]] = {}
        self._resets: deque[asyncio.Future[int]] = deque()  # answered in order
        self._changes: dict[int, asyncio.Future[LoadedAdapter | None]] = {}  # of adapters
        self._num_changes = 0
        self._slots: dict[int, asyncio.Future[SlotPrefix]] = {}  # that are saved or restored
        # What clients changed, for a new process: paths by name, None for those of the start that
        # are unloaded.
        self._changed_adapters: dict[str, str | None] = {}
        # Of a new process, by the change's number: name, path, and seconds until another attempt.
        self._reloads: dict[int, tuple[str, str, float]] = {}
        self._adapters_at_start = frozenset(
            () if config.lora is None else (name for name, _ in config.lora.modules)
        )
        self._streams = RemoteStreams(clock, moves=watcher is not None)
        self._intake = RequestIntake(open_seeds(config.seed), self._streams)
        self._tasks = OwnedTasks(_LOGGER)
        self._ahead: asyncio.Task[Texts | None] | None = None
        self._model: _LoadedModel | None = None
        self._is_draining = False  # the engine's process

    async def open(
        self, progress: LoadProgress | None = None, like: RemoteEngine | None = None
    ) -> None:
        """Start the process and have the model loaded. The tokenizer and the template are those of
        `like`, if that opens the same checkpoint.

        Raises:
            ConfigError: The checkpoint is missing or broken, or does not fit.
            EngineError: The process failed.
        """
        if like is not None:
            self._ahead = like._ahead
        else:
            self._ahead = self._tasks.start(
                asyncio.to_thread(Texts.ahead, self._load.model, self._inputs)
            )
        await self._supervisor.open(progress)

    async def start(self) -> None:
        """Take requests. Raises EngineError if the engine is not open, or was stopped."""
        self._supervisor.start()

    async def restart(self) -> None:
        """End the process in order and start another; its requests have ended, or were taken.
        Raises EngineError if none serves then.
        """
        await self._supervisor.restart()

    async def sleep(self) -> None:
        """End the process in order, which gives its memory back, until `wake`. Requests that are
        live end, or are taken. Raises EngineError if the engine does not run.
        """
        await self._supervisor.sleep()
        if self._standby is not None:
            self._standby.prepare()

    async def wake(self) -> None:
        """Start a process again. Raises EngineError if the engine does not sleep, or none serves
        then.
        """
        await self._supervisor.wake()

    async def wait_until_idle(self) -> None:
        """Return once no request is live."""
        await self._streams.wait_until_empty()

    def take_requests(self) -> list[LostRequest]:
        """Hand over all live requests, which the process is then to end, to continue elsewhere, or
        here when it has (`has_id`).
        """
        return self._taken(self._streams.take_all(self.fingerprint, has_ended=False))

    def _taken(self, lost: list[LostRequest]) -> list[LostRequest]:
        """Let the process end requests that continue elsewhere."""
        if (process := self._supervisor.process) is not None:
            for request in lost:
                process.sender.put(Abort(request.request.request_id))
        return lost

    @property
    def kv_address(self) -> KVTarget | None:
        """Where other engines send KV blocks; None if they are not transferred."""
        return self._loaded.facts.kv_address

    @property
    def kv_block_bytes(self) -> int:
        """Of a KV block that is transferred."""
        return self._loaded.facts.kv_block_bytes

    def has_new_files(self) -> bool:
        """Whether the files of the checkpoint have changed since the process loaded them, so that
        its successor may give other bits. A listening engine keeps what it has loaded.
        """
        if self._loaded.facts.text_digests is not None:
            return False
        return file_versions(self._loaded.texts.path) != self._loaded.files

    def cause_found(self) -> None:
        """It was a request that ended the last process."""
        self._supervisor.cause_found()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Accept no more, let requests continue for `drain_s` seconds, end the rest with SHUTDOWN.

        A second call, with the first still draining, ends them at once.
        """
        self._supervisor.drain()
        try:
            async with asyncio.timeout(drain_s):
                await self._streams.wait_until_empty()
        except TimeoutError:
            if drain_s > 0:
                _LOGGER.warning("%d requests did not end in time", len(self._streams))
        await self._supervisor.end()

    @property
    def process_id(self) -> int | None:
        """The operating system's id of the engine's process; None while there is none."""
        process = self._supervisor.process
        return None if process is None else process.process_id

    @property
    def address(self) -> str:
        """HOST:PORT of an engine that listens; "" of a child, and while there is none."""
        process = self._supervisor.process
        return "" if process is None else process.address

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests now."""
        is_running = self._supervisor.state is EngineState.RUNNING and not self._is_draining
        return is_running and self._supervisor.process is not None

    @property
    def will_serve(self) -> bool:
        """Whether it takes requests now, or will when its process is back."""
        return self._supervisor.state in (EngineState.RUNNING, EngineState.RESTARTING)

    @property
    def is_coming(self) -> bool:
        """Whether it takes no requests now, and will."""
        return self.will_serve and not self.is_serving

    @property
    def max_waiting(self) -> int | None:
        """Queued sequences beyond which it refuses requests; None for no limit."""
        return self._max_waiting

    def check_serving(self) -> None:
        """Raise EngineError if it takes no requests now."""
        self._running_process()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_undecided(self) -> int:
        """Sequences of requests that the process has neither accepted nor refused."""
        return sum(self._streams.undecided_by_level.values())

    @property
    def admission(self) -> AdmissionState:
        """What decides whether one more request may queue, as the process last sent it."""
        return self._worker_stats.last.admission

    @property
    def reported_at_s(self) -> float | None:
        """When the process last sent its state, if requests are live, which make it send more."""
        return self._worker_stats.last.now_s if len(self._streams) else None

    @property
    def num_blocks(self) -> int:
        """KV blocks that the process has."""
        return self._worker_stats.last.scheduler.blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence used at the last report."""
        blocks = self._worker_stats.last.scheduler.blocks
        return blocks.num_free + blocks.num_cached

    @property
    def costs(self) -> CostModel | None:
        """Predicts the steps of the process; None if it has not reported how long they take."""
        coefficients = self._worker_stats.last.coefficients
        return None if coefficients is None else LinearCostModel(coefficients)

    def is_live(self, request_id: str) -> bool:
        """Whether the request has not ended."""
        return self._streams.is_live(request_id)

    def waits_for_token(self, request_id: str) -> bool:
        """Whether the request is live and has got no token from this engine."""
        return self._streams.waits_for_token(request_id)

    def has_id(self, request_id: object) -> bool:
        """Whether the id is in use, by a live request or by one that the process has yet to end."""
        return request_id in self._streams

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._loaded.facts.vocab_size

    @property
    def model_name(self) -> str:
        """The name that responses carry."""
        return self._loaded.facts.name

    @property
    def fingerprint(self) -> str:
        """Weights, dtype and kernel set: equal fingerprints give equal bits."""
        return self._loaded.facts.fingerprint

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output."""
        return self._loaded.facts.max_model_len

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """The checkpoint's own sampling values (`generation_config.json`), by our names."""
        return self._loaded.facts.default_sampling

    @property
    def retrieval(self) -> Retrieval:
        """How the model embeds texts and scores pairs, as its card says."""
        return self._loaded.facts.retrieval

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The use of the engine's memory."""
        return self._loaded.facts.memory_plan

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; the prefix cache holds complete blocks."""
        return self._loaded.facts.block_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.texts.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None if the model has none."""
        return self._loaded.texts.chat_template

    @property
    def step_log(self) -> StepLog:
        """A copy of the engine's step log, over all its processes; read it, or follow it."""
        return self._step_log

    def stats(self) -> EngineStats:
        """The engine's state; values from the worker are up to a tenth of a second old, and stay so
        if it is killed.
        """
        stats = self._worker_stats.stats(
            state=self._supervisor.state,
            failure=self._supervisor.failure,
            now_s=self._clock(),
            busy_since_s=self._streams.busy_since_s,
            num_requests=len(self._streams),
            num_restarts=self._supervisor.num_restarts,
            silent_s=self._supervisor.silent_s,
        )
        return replace(
            stats,
            tensor_parallel_size=self._load.tensor_parallel_size,
            pipeline_parallel_size=self._load.pipeline_parallel_size,
        )

    @property
    def has_queue(self) -> bool:
        """Whether sequences waited when the process last sent its state."""
        return self.admission.num_waiting > 0

    def check_admission(self, request: Request, num_sequences: int) -> None:
        """Raise RequestError for a request that could not be accepted now, whatever its prompt: by
        the state that the process last sent, and what it has not decided yet.
        """
        now = self._clock()
        waited_s = 0.0 if request.received_s is None else max(0.0, now - request.received_s)
        undecided = self._streams.undecided_by_level
        self.admission.check(request, num_sequences, undecided, waited_s)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of live requests."""
        return self._streams.request_ids

    async def live_timings(self, request_id: str) -> dict[int, SequenceTimings]:
        """What the live sequences of a request spent their time on so far, by index; empty if the
        engine's process does not report it in time.
        """
        process = self._supervisor.process
        if process is None or not self._streams.is_live(request_id):
            return {}
        report = self._reports.get(request_id)
        if report is None:
            report = self._reports[request_id] = asyncio.get_running_loop().create_future()
            process.sender.put(ReportTimings(request_id))
        try:
            async with asyncio.timeout(_REPORT_S):
                return await asyncio.shield(report)
        except TimeoutError:
            self._reports.pop(request_id, None)
            return {}

    async def reset_prefix_cache(self) -> int:
        """Free every cached block that no sequence uses; returns how many there were.

        Raises:
            EngineError: The engine does not run, or its process does not answer in time.
        """
        process = self._running_process()
        reset: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._resets.append(reset)
        process.sender.put(ResetPrefixCache())
        try:
            async with asyncio.timeout(_REPORT_S):
                return await reset
        except TimeoutError:
            raise EngineError("the engine process did not reset its prefix cache in time") from None

    async def load_adapter(
        self, name: str, path: str, *, is_from_client: bool = False
    ) -> LoadedAdapter:
        """Let new requests name a LoRA adapter, the latest of a name. `is_from_client`: only from
        the directories that clients may load from.

        Raises:
            RequestError: The adapter cannot be used.
            EngineError: The engine does not run, or its process does not answer in time.
        """
        process = self._running_process()
        number = self._next_change()
        loaded = await self._changed(
            process, number, LoadAdapter(number, name, path, is_from_client)
        )
        assert loaded is not None, "an adapter was loaded"
        self._changed_adapters[name] = loaded.path
        return loaded

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests with an adapter; running ones end on it.

        Raises:
            RequestError: There is no such adapter.
            EngineError: The engine does not run, or its process does not answer in time.
        """
        process = self._running_process()
        number = self._next_change()
        await self._changed(process, number, UnloadAdapter(number, name))
        self._changed_adapters.pop(name, None)
        if name in self._adapters_at_start:
            self._changed_adapters[name] = None

    async def save_slot(
        self, filename: str, adapter: str, cache_salt: str, token_ids: Sequence[int]
    ) -> SlotPrefix:
        """Write what is cached of a prefix into a file of `--slot-save-path`.

        Raises:
            RequestError: There is no such directory, or the name is none.
            EngineError: It cannot be written, or the engine does not answer in time.
        """
        number = self._next_change()
        return await self._slot_answer(
            SaveSlot(number, filename, adapter, cache_salt, tuple(token_ids))
        )

    async def restore_slot(self, filename: str, cache_salt: str) -> SlotPrefix:
        """Read such a file into the prefix cache.

        Raises:
            RequestError: There is no such file, or it is not of this model and salt.
            EngineError: It cannot be read, or the engine does not answer in time.
        """
        return await self._slot_answer(RestoreSlot(self._next_change(), filename, cache_salt))

    async def cached_slot(
        self, adapter: str, cache_salt: str, token_ids: Sequence[int]
    ) -> SlotPrefix:
        """What `save_slot` would write of a prefix now. Raises RequestError, EngineError."""
        number = self._next_change()
        return await self._slot_answer(
            FindCachedSlot(number, adapter, cache_salt, tuple(token_ids))
        )

    async def stored_slot(self, filename: str, cache_salt: str) -> SlotPrefix:
        """What `restore_slot` would read from a file. Raises RequestError, EngineError."""
        return await self._slot_answer(FindStoredSlot(self._next_change(), filename, cache_salt))

    async def _slot_answer(self, message: SlotMessage) -> SlotPrefix:
        process = self._running_process()
        moved: asyncio.Future[SlotPrefix] = asyncio.get_running_loop().create_future()
        self._slots[message.number] = moved
        try:
            process.sender.put(message)
            async with asyncio.timeout(_SLOT_S):
                return await moved
        except TimeoutError:
            raise EngineError("the engine process did not answer about the slot") from None
        finally:
            del self._slots[message.number]

    def _next_change(self) -> int:
        self._num_changes += 1
        return self._num_changes

    async def _changed(
        self, process: EngineLink, number: int, message: LoadAdapter | UnloadAdapter
    ) -> LoadedAdapter | None:
        change: asyncio.Future[LoadedAdapter | None] = asyncio.get_running_loop().create_future()
        self._changes[number] = change
        try:
            process.sender.put(message)
            async with asyncio.timeout(_ADAPTER_S):
                return await change
        except TimeoutError:
            raise EngineError("the engine process did not answer about the adapter") from None
        finally:
            self._changes.pop(number, None)

    async def prepare(self, request: Request) -> None:
        """Do nothing: the engine's process prepares a request before it accepts it."""

    def stream(self, request: Request) -> Stream:
        """Check a request and send it to the engine; `Stream.accepted` returns once it is accepted.

        The id, the seed and the end tokens are set here. If the engine has not ended the request
        half a second after its deadline, it is ended here with the output so far.

        Raises:
            RequestError: The request cannot be served as it is.
            EngineError: The engine accepts no requests now (not started, restarting, stopping), or
                does not read those that were sent.
        """
        process = self._running_process()
        self._check_backlog(process)
        facts = self._loaded.facts
        eos_token_ids = self.tokenizer.eos_token_ids
        request = self._intake.take(
            request, facts.vocab_size, facts.max_model_len, eos_token_ids, facts.retrieval
        )
        stream = Stream(request, self, self._stream_bounds)
        self.submit(request, stream)
        return stream

    def submit(self, request: Request, stream: Stream, before: LostRequest | None = None) -> None:
        """Send a request that is complete, with its id and its seed, to the engine; its deltas go
        to `stream`. `before` is what an engine that had it handed over.

        Raises:
            RequestError: The request cannot be sent.
            EngineError: As `stream`.
        """
        process = self._running_process()
        self._check_backlog(process)
        self._streams.open(stream, request, level_of(request), before)
        try:
            process.sender.put(request)
        except (UnicodeEncodeError, OverflowError) as error:
            refusal = RequestError("the request holds a whole number of more than 64 bits")
            if isinstance(error, UnicodeEncodeError):
                refusal = RequestError(f"the request holds half a surrogate pair: {error.object!r}")
            self._streams.refuse(request.request_id, refusal)
            raise refusal from error
        if request.timeout_s is not None:
            loop = asyncio.get_running_loop()
            # a continuation has the time that is left
            since_s = None if request.is_continuation else request.received_s
            waited_s = 0.0 if since_s is None else self._clock() - since_s
            wait_s = max(0.0, request.timeout_s - waited_s) + _DEADLINE_MARGIN_S
            timer = loop.call_later(wait_s, self._expire, request.request_id)
            self._streams.set_deadline(request.request_id, timer)

    def abort(self, request_id: str) -> None:
        """End a request; its output so far is its answer. Ignores unknown and finished ids."""
        self._send(request_id, Abort)

    def pause(self, request_id: str) -> None:
        """Generate no more for a request until `resume`; steps in flight still give deltas."""
        self._send(request_id, Pause)
        if self._streams.is_live(request_id):
            self._streams.pause(request_id)

    def resume(self, request_id: str) -> None:
        """Continue a paused request."""
        self._send(request_id, Resume)
        if self._streams.is_live(request_id):
            self._streams.resume(request_id)

    def _expire(self, request_id: str) -> None:
        self.abort(request_id)
        self._streams.expire(request_id)

    def _send(self, request_id: str, kind: type[Abort | Pause | Resume]) -> None:
        process = self._supervisor.process
        if process is not None and self._streams.is_live(request_id):
            process.sender.put(kind(request_id))

    async def opened(self, opened: Opened, process: EngineLink) -> None:
        """A process has the model loaded (the supervisor only). Raises ConfigError if that is
        another one.
        """
        facts = opened.facts
        texts = await self._texts_of(facts)
        if facts.text_digests is not None:
            await asyncio.to_thread(texts.check, facts.text_digests, process.name)
            if self._model is not None and facts.fingerprint != self.fingerprint:
                raise ConfigError(
                    f"{process.name} came back with the fingerprint {facts.fingerprint}, it had "
                    f"{self.fingerprint}: start it with the same weights, or start the server again"
                )
        files = await asyncio.to_thread(file_versions, texts.path)
        self._model = _LoadedModel(facts, texts, files)
        self._is_draining = False
        self._worker_stats.open(opened.stats)
        self._reloads.clear()
        for name, adapter_path in self._changed_adapters.items():
            if name in self._adapters_at_start:  # no request may get what it was at the start
                process.sender.put(UnloadAdapter(self._next_change(), name))
            if adapter_path is not None:
                self._reload(process, name, adapter_path, _RELOAD_S)

    def _reload(self, process: EngineLink, name: str, path: str, delay_s: float) -> None:
        """Have a new process load what the one before it had."""
        number = self._next_change()
        self._reloads[number] = (name, path, delay_s)
        process.sender.put(LoadAdapter(number, name, path, False))

    def _reload_again(self, process: EngineLink, name: str, path: str, delay_s: float) -> None:
        """The same later, unless clients have changed it, or the process has ended."""
        is_current = process is self._supervisor.process
        if is_current and self._changed_adapters.get(name) == path:
            self._reload(process, name, path, min(_MOST_RELOAD_S, 2.0 * delay_s))

    async def _texts_of(self, facts: ModelFacts) -> Texts:
        """Tokenizer and template of a loaded model: the engine's, or this host's own copy."""
        ahead, self._ahead = self._ahead, None
        texts = None if ahead is None else await asyncio.shield(ahead)
        if facts.text_digests is not None:
            if self._model is not None:
                return self._model.texts
            if texts is None:
                texts = await asyncio.to_thread(Texts.own, self._load, self._inputs)
            return texts
        path = Path(facts.path)
        if texts is not None and texts.path == path:
            return texts
        model, files = self._model, None
        if model is not None and model.texts.path == path:
            with suppress(OSError):  # `Texts.open` says what is missing
                files = await asyncio.to_thread(file_versions, path)
            if files == model.files:  # another tokenizer would have a process of its own
                return model.texts
        return await asyncio.to_thread(Texts.open, path, self._inputs)

    def receive(self, message: FromEngine) -> None:
        """The process sent a message (the supervisor only)."""
        match message:
            case StepNote():
                replica = self._replica
                for sequence in message.sequences:
                    if self._streams.has_moved(sequence.request_id):
                        continue  # it has not ended
                    timings = self._completed(sequence.request_id, sequence.timings)
                    self._step_log.add_sequence(replace(sequence, timings=timings))
                for request_id, delta in message.deltas:
                    self._streams.deliver(request_id, delta)
                if self._streams.has_handovers and self._watcher is not None:
                    begun = self._streams.take_begun(self.fingerprint)
                    self._watcher.begun(self, self._taken(begun))
                if self._streams.has_freed_ids and self._watcher is not None:
                    self._streams.has_freed_ids = False
                    self._watcher.freed(self)
                if (step := message.record) is not None:
                    self._step_log.add_step(replace(step, replica=replica) if replica else step)
            case Started(request_ids=request_ids):
                self._streams.start(request_ids)
            case Accepted(request_id=request_id, ignored=ignored, adapter_id=adapter_id):
                self._streams.accept(request_id, ignored, adapter_id)
            case Refused():
                self._streams.refuse(message.request_id, message.error)
            case TimingsNote(request_id=request_id, timings=timings):
                if (report := self._reports.pop(request_id, None)) is not None:
                    report.set_result(
                        {
                            index: self._completed(request_id, timing)
                            for index, timing in timings.items()
                        }
                    )
            case PrefixCacheNote(num_blocks=num_blocks):
                if not (reset := self._resets.popleft()).done():  # else its caller has left
                    reset.set_result(num_blocks)
            case AdapterNote():
                self._note_change(message)
            case SlotNote(number=number, prefix=prefix, refused=refused):
                moved = self._slots.get(number)
                if moved is None or moved.done():
                    return  # its caller has left
                if prefix is not None:
                    moved.set_result(prefix)
                elif refused is not None:
                    moved.set_exception(refused.error)
            case StatsNote(stats=stats):
                self._note_stats(stats)
            case Draining():
                self._is_draining = True
            case _:
                _LOGGER.error("the engine process sent %s out of turn", message)

    def _completed(self, request_id: str, timings: SequenceTimings) -> SequenceTimings:
        timings = self._streams.complete(request_id, timings)
        return replace(timings, replica=self._replica) if self._replica else timings

    @property
    def has_work(self) -> bool:
        """Whether a request waits for the process, and not for its reader (the supervisor only)."""
        return self._streams.busy_since_s is not None

    def died(self) -> str:
        """The process has ended: end all streams (the supervisor only)."""
        while self._resets:
            if not (reset := self._resets.popleft()).done():
                reset.set_exception(EngineError("the engine process ended, and its cache with it"))
        for moved in self._slots.values():
            if not moved.done():
                moved.set_exception(EngineError("the engine process ended"))
        for change in self._changes.values():
            if not change.done():
                change.set_exception(EngineError("the engine process ended"))
        reason, why = FinishReason.ERROR, "the engine process ended; send it again"
        if self._supervisor.is_ending:
            reason, why = FinishReason.SHUTDOWN, "the engine was stopped"
        if self._watcher is not None and not self._supervisor.is_ending:
            self._watcher.lost(self, self._streams.take_all(self.fingerprint))
            return self._worker_stats.add_past()
        for record in self._streams.unfinished(reason):
            self._step_log.add_sequence(record)
        self._streams.end_all(reason, why)
        return self._worker_stats.add_past()

    def restarted(self) -> None:
        """Another process serves (the supervisor only)."""
        if self._watcher is not None:
            self._watcher.restarted(self)

    def given_up(self) -> None:
        """No other process will be started (the supervisor only)."""
        if self._watcher is not None:
            self._watcher.given_up(self)

    @property
    def _loaded(self) -> _LoadedModel:
        if self._model is None:
            raise EngineError("the engine is not open")
        return self._model

    def _running_process(self) -> EngineLink:
        state, failure = self._supervisor.state, self._supervisor.failure
        process = self._supervisor.process
        if state is not EngineState.RUNNING or process is None:
            why = f": {failure}" if failure else ""
            raise EngineError(f"the engine is {state.value} and takes no requests{why}")
        if self._is_draining:
            raise EngineError(f"{process.name} is stopping and takes no requests")
        return process

    def _check_backlog(self, process: EngineLink) -> None:
        num_undecided, limit = self._streams.num_undecided, self._max_undecided
        if num_undecided >= limit or process.sender.num_bytes >= _MAX_UNSENT_BYTES:
            raise EngineError(
                f"{num_undecided} requests wait for the engine to take them, the limit is {limit} "
                f"or {_MAX_UNSENT_BYTES} bytes; send it again later"
            )

    def _note_change(self, note: AdapterNote) -> None:
        change, process = self._changes.get(note.number), self._supervisor.process
        reload = self._reloads.pop(note.number, None)
        may_pass = note.refused is not None and isinstance(note.refused.error, EngineError)
        if reload is not None and process is not None and may_pass:  # it is of the system
            _, _, delay_s = reload
            loop = asyncio.get_running_loop()
            loop.call_later(delay_s, self._reload_again, process, *reload)
        if change is None or change.done():  # its caller has left, or a new process had to load it
            if note.refused is not None:
                _LOGGER.warning("an adapter was not loaded again: %s", note.refused.message)
        elif note.refused is not None:
            change.set_exception(note.refused.error)
        else:
            change.set_result(note.loaded)

    def _note_stats(self, stats: EngineStats) -> None:
        self._worker_stats.update(stats)
        process = self._supervisor.process
        if stats.state is EngineState.FAILED and process is not None:
            process.kill()  # its loop failed, so its state is unknown
