"""The engine's side of the connection: messages become calls of `Engine`, deltas become messages.

One `EngineService` per process. Reading never stops, so that a closed connection is noticed while
a model loads (in a thread) or a long step runs. The engine puts each delta into the connection
(`_RequestSink`); stats are sent when a request comes or ends, and ten times a second while there
is work, so that the other end knows that this loop runs (see `supervisor.StallWatch`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quickstep.config import EngineConfig
from quickstep.engine.logs import install
from quickstep.engine.records.step_log import SequenceRecord
from quickstep.engine.remote.messages import (
    BUFFER_BYTES,
    TO_ENGINE,
    Abort,
    Accepted,
    AdapterNote,
    LoadAdapter,
    Loading,
    ModelFacts,
    Opened,
    OpenRefused,
    Pause,
    PrefixCacheReset,
    Refused,
    ReportTimings,
    ResetPrefixCache,
    Resume,
    Sender,
    Started,
    StatsNote,
    StepNote,
    Stop,
    TimingsNote,
    ToEngine,
    UnloadAdapter,
    read_messages,
)
from quickstep.engine.remote.opening import Open
from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.types import Admission, Delta, Request, StepRecord

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine

_LOGGER = logging.getLogger(__name__)
_STATS_EVERY_S = 0.1
_PROGRESS_STEP = 0.02  # of the weights, between two Loading messages
# How long another thread may keep the interpreter from the event loop and from the step's thread:
# with Python's 5 ms, every return from native code waits that long while a grammar is prepared.
_SWITCH_S = 0.0005
# A frame may hold hundreds of requests; steps are planned and committed between so many of them.
_REQUESTS_PER_TURN = 8

# `engine.assembly.open_engine`, or a test's; called in a thread
EngineOpener = Callable[[EngineConfig, Callable[[int, int], None]], "Engine"]


class StepNotes:
    """Follows the engine's step log, and sends what comes of each step as one message: deltas,
    ended sequences, the record. What comes without a step is sent in the same turn of the loop.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._sequences: list[SequenceRecord] = []
        self._deltas: list[tuple[str, Delta]] = []
        self._flush: asyncio.Handle | None = None

    def add_step(self, record: StepRecord) -> None:
        """A step was committed."""
        self._send(record)

    def add_sequence(self, record: SequenceRecord) -> None:
        """A sequence ended."""
        self._sequences.append(record)
        self._will_send()

    def add_admissions(self, admitted: Sequence[Admission]) -> None:
        """A step computes sequences for the first time."""
        ids = (admission.sequence_id.rpartition("#")[0] for admission in admitted)
        self._sender.put(Started(tuple(dict.fromkeys(ids))))

    def add_delta(self, request_id: str, delta: Delta) -> None:
        """A request has output. Raises UnicodeEncodeError for text that is not Unicode."""
        delta.text.encode()
        self._deltas.append((request_id, delta))
        if self._flush is None:
            self._will_send()

    def _will_send(self) -> None:
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._send)

    def _send(self, record: StepRecord | None = None) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        note = StepNote(tuple(self._sequences), tuple(self._deltas), record)
        self._sequences.clear()
        self._deltas.clear()
        self._sender.put(note)


class _RequestSink:
    """Sends the deltas of one request; `ended` is called with the last."""

    def __init__(self, request: Request, notes: StepNotes, ended: Callable[[], None]) -> None:
        self._request_id = request.request_id
        self._num_running = len(request.indices)
        self._notes = notes
        self._ended = ended

    def put(self, delta: Delta) -> None:
        """Send a delta. Raises UnicodeEncodeError for text that is not Unicode."""
        self._notes.add_delta(self._request_id, delta)
        if delta.finish_reason is not None:
            self._num_running -= 1
            if not self._num_running:
                self._ended()


class EngineService:
    """Serves one engine to the other end of a connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opener: EngineOpener
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sender = Sender(writer)
        self._notes = StepNotes(self._sender)
        self._opener = opener
        self._engine: Engine | None = None
        self._preparing: set[str] = set()
        self._num_changes = 0  # of adapters, which later requests wait for
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats_due = asyncio.Event()
        self._stopped = False

    @classmethod
    async def connect(cls, sock: socket.socket, opener: EngineOpener) -> EngineService:
        """A service on a connected socket, which it owns from now on."""
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=BUFFER_BYTES)
        return cls(reader, writer, opener)

    async def run(self) -> bool:
        """Serve until the connection ends. Returns whether that was after a Stop."""
        self._start(self._sender.run())
        num_requests = 0
        async for message in read_messages(self._reader, TO_ENGINE):
            self._receive(message)
            num_requests += isinstance(message, Request)
            if num_requests == _REQUESTS_PER_TURN:
                num_requests = 0
                await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        return self._stopped

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                # no other task does its work: end the process, which the supervisor replaces
                _LOGGER.critical("a task of the engine process failed", exc_info=error)
                self._writer.close()

        task.add_done_callback(ended)

    def _receive(self, message: ToEngine) -> None:
        match message:
            case Abort() | Pause() | Resume() if self._engine is None:
                pass  # no request was accepted yet
            case Open():
                self._start(self._open(message))
            case Request() if self._is_prepared(message):
                self._submit(message)
            case Request(request_id=request_id):
                self._preparing.add(request_id)
                self._stats_due.set()
                self._start(self._prepare(message))
            case Abort(request_id=request_id):
                self._preparing.discard(request_id)
                self._require_engine().abort(request_id)
            case Pause(request_id=request_id):
                self._require_engine().pause(request_id)
                self._stats_due.set()
            case Resume(request_id=request_id):
                self._require_engine().resume(request_id)
                self._stats_due.set()
            case ReportTimings(request_id=request_id):
                self._start(self._report_timings(request_id))
            case ResetPrefixCache():
                self._start(self._reset_prefix_cache())
            case LoadAdapter() | UnloadAdapter():
                self._num_changes += 1
                self._start(self._change_adapters(message))
            case Stop():
                self._start(self._stop())

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the engine is not open")
        return self._engine

    async def _open(self, opening: Open) -> None:
        install(opening.log)
        loop = asyncio.get_running_loop()

        reported_bytes = 0

        def progress(num_bytes: int, total_bytes: int) -> None:
            nonlocal reported_bytes
            if (
                num_bytes < total_bytes
                and num_bytes - reported_bytes < total_bytes * _PROGRESS_STEP
            ):
                return  # a message wakes two loops, and a model has hundreds of tensors
            reported_bytes = num_bytes
            loop.call_soon_threadsafe(self._sender.put, Loading(num_bytes, total_bytes))

        try:
            engine = await asyncio.to_thread(self._opener, opening.config, progress)
            engine.step_log.follow(self._notes)
            engine.follow_admissions(self._notes.add_admissions)
            await engine.start()
            opened = Opened(_facts(engine), engine.stats())
        except ConfigError as error:
            self._sender.put(OpenRefused(str(error), is_config=True))
            return
        except Exception as error:  # the task's top: the other end decides what to do
            _LOGGER.exception("the engine could not be opened")
            reason = f"the engine could not be opened: {type(error).__name__}: {error}"
            self._sender.put(OpenRefused(reason, is_config=False))
            return
        # undo the settings of `worker.main`; the objects that exist now stay
        gc.freeze()
        gc.enable()
        sys.setswitchinterval(_SWITCH_S)
        self._engine = engine
        self._sender.put(opened)
        self._start(self._send_stats(engine))
        self._start(self._report_failure(engine))

    def _submit(self, request: Request) -> None:
        sink = _RequestSink(request, self._notes, self._stats_due.set)
        try:
            engine = self._require_engine()
            request = engine.with_adapter_id(request)
            ignored = engine.submit(request, sink)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # one request's end; a panic in Rust is no Exception
            self._refuse(request.request_id, error)
        else:
            self._sender.put(Accepted(request.request_id, ignored, request.adapter_id))
        self._stats_due.set()

    def _is_prepared(self, request: Request) -> bool:
        if self._engine is None:
            return True
        waits = bool(request.adapter and self._num_changes)
        return not waits and self._engine.is_prepared(request)

    async def _prepare(self, request: Request) -> None:
        """Do slow work in a thread, such as compiling a grammar; then submit the request, unless
        it was aborted.
        """
        request_id = request.request_id
        try:
            held = await self._require_engine().prepare(request)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in `_submit`
            self._refuse(request_id, error)
        else:
            if request_id in self._preparing:
                self._submit(request)
                del held  # the live request holds it now
            else:
                self._refuse(request_id, EngineError("the request was aborted"))
        self._preparing.discard(request_id)

    def _refuse(self, request_id: str, error: BaseException) -> None:
        self._sender.put(_refusal(request_id, error))

    async def _send_stats(self, engine: Engine) -> None:
        while True:
            self._stats_due.clear()
            stats = engine.stats()
            self._sender.put(StatsNote(stats, time.process_time() - time.thread_time()))
            steps = stats.busy_since_s is not None or stats.num_steps_in_flight > 0
            busy = steps or bool(self._preparing)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATS_EVERY_S if busy else None):
                    await self._stats_due.wait()

    async def _report_failure(self, engine: Engine) -> None:
        """Send the stats of a failed engine, which has no requests that would cause it."""
        await engine.wait_until_failed()
        self._stats_due.set()

    async def _report_timings(self, request_id: str) -> None:
        timings = {} if self._engine is None else await self._engine.live_timings(request_id)
        self._sender.put(TimingsNote(request_id, timings))

    async def _reset_prefix_cache(self) -> None:
        num_blocks = await self._require_engine().reset_prefix_cache()
        self._sender.put(PrefixCacheReset(num_blocks))
        self._stats_due.set()

    async def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        engine, loaded, refused = self._require_engine(), None, None
        try:
            if isinstance(message, LoadAdapter):
                loaded = await engine.load_adapter(
                    message.name, message.path, is_from_client=message.is_from_client
                )
            else:
                await engine.unload_adapter(message.name)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in `_submit`
            refused = _refusal("", error)
        finally:
            self._num_changes -= 1
        self._sender.put(AdapterNote(message.number, loaded, refused))

    async def _stop(self) -> None:
        """Stop the engine in order, then close the connection, which ends `run`."""
        try:
            if self._engine is not None:
                await self._engine.stop()
            await asyncio.sleep(0)  # what ended with it is put
            await self._sender.flush()
            self._stopped = self._engine is not None
        except Exception:  # the task's top: the process ends, in order or not
            _LOGGER.exception("the engine could not be stopped in order")
        self._writer.close()


def _refusal(request_id: str, error: BaseException) -> Refused:
    match error:
        case RequestError(param=param, status=status, code=code, retry_after_s=retry_s):
            return Refused(request_id, str(error), param, status, code, retry_s)
        case EngineError():
            return Refused(request_id, str(error), None, 503)
        case _:
            _LOGGER.error("a request failed in the engine process", exc_info=error)
            return Refused(request_id, f"{type(error).__name__}: {error}", None, 500)


def _facts(engine: Engine) -> ModelFacts:
    model = engine.model
    if model.path is None:
        raise EngineError(f"the model {model.name} has no directory to read its tokenizer from")
    return ModelFacts(
        name=model.name,
        fingerprint=model.fingerprint,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        path=str(model.path),
        default_sampling=dict(model.default_sampling),
        default_pooling=model.default_pooling,
        load_s=model.load_s,
        memory_plan=model.memory_plan,
        kv_address=engine.kv_address,
        kv_block_bytes=engine.kv_block_bytes,
    )
