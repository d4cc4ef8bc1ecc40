"""The engine's side of a connection: messages become calls of `Engine`, deltas become messages.

One `EngineService` per connection: the only one of a child, whose engine it opens, or one of
several of a listening engine (`listener`), which is open already and knows the requests by their
ids with a prefix of the connection. Reading never stops, so that a closed connection is noticed
while a model loads (in a thread) or a long step runs. The engine puts each delta into the
connection (`_RequestSink`); stats are sent when a request comes or ends, and ten times a second
while there is work, so that the other end knows that this loop runs (see `supervisor.StallWatch`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quickstep.config import EngineConfig
from quickstep.engine.logs import install
from quickstep.engine.records.step_log import SequenceRecord
from quickstep.engine.remote.connection import Connection, Sender
from quickstep.engine.remote.messages import (
    TO_ENGINE,
    Abort,
    Accepted,
    AdapterNote,
    ClockNote,
    Draining,
    FindCachedSlot,
    FindStoredSlot,
    LoadAdapter,
    Loading,
    ModelFacts,
    Opened,
    OpenRefused,
    Pause,
    PrefixCacheNote,
    ReadClock,
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
    Stop,
    TextDigests,
    TimingsNote,
    ToEngine,
    UnloadAdapter,
)
from quickstep.engine.remote.opening import Open
from quickstep.engine.stats import EngineStats
from quickstep.errors import ConfigError, EngineError, RequestError, text_for_clients
from quickstep.types import Admission, Delta, Request, SequenceTimings, StepRecord

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine

_LOGGER = logging.getLogger(__name__)
_STATS_EVERY_S = 0.1
_STATS_PART = 0.05  # of the event loop's time, at most: they look at all sequences
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
    With a `prefix`, only sequences whose request ids begin with it are sent, without it.

    Attributes:
        deltas: Outputs of requests that are to be sent; call `will_send` after adding the first.
    """

    def __init__(self, sender: Sender, prefix: str = "") -> None:
        self._sender = sender
        self._prefix = prefix
        self._sequences: list[SequenceRecord] = []
        self.deltas: list[tuple[str, Delta]] = []
        self._flush: asyncio.Handle | None = None

    def add_step(self, record: StepRecord) -> None:
        """A step was committed."""
        if self._prefix and record.prefills:
            prefills = tuple(
                replace(charge, request_id=charge.request_id.removeprefix(self._prefix))
                for charge in record.prefills
            )
            record = replace(record, prefills=prefills)
        self._send(record)

    def add_sequence(self, record: SequenceRecord) -> None:
        """A sequence ended."""
        if self._prefix:
            if not record.request_id.startswith(self._prefix):
                return
            record = replace(record, request_id=record.request_id.removeprefix(self._prefix))
        self._sequences.append(record)
        self.will_send()

    def add_admissions(self, admitted: Sequence[Admission]) -> None:
        """A step computes sequences for the first time."""
        ids = (admission.sequence_id.rpartition("#")[0] for admission in admitted)
        started = dict.fromkeys(ids)
        if self._prefix:
            started = {
                request_id.removeprefix(self._prefix): None
                for request_id in started
                if request_id.startswith(self._prefix)
            }
        self._sender.put(Started(tuple(started)))

    def will_send(self) -> None:
        """Send what has come without a step, in this turn of the loop."""
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._send)

    def _send(self, record: StepRecord | None = None) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        note = StepNote(tuple(self._sequences), tuple(self.deltas), record)
        self._sequences.clear()
        self.deltas.clear()
        self._sender.put(note)


class _RequestSink:
    """Sends the deltas of one request; `ended` is called with the last."""

    def __init__(self, request: Request, notes: StepNotes, ended: Callable[[str], None]) -> None:
        self._request_id = request.request_id
        self._num_running = len(request.indices)
        self._notes = notes
        self._ended = ended

    def put(self, delta: Delta) -> None:
        """Send a delta. Raises UnicodeEncodeError for text that is not Unicode."""
        delta.text.encode()
        deltas = self._notes.deltas
        if not deltas:
            self._notes.will_send()
        deltas.append((self._request_id, delta))
        if delta.finish_reason is not None:
            self._num_running -= 1
            if not self._num_running:
                self._ended(self._request_id)


class EngineService:
    """Serves an engine to the other end of a connection: one that `opener` opens, or an open
    `engine` that serves several, with the `prefix` of this one's requests.
    """

    def __init__(
        self,
        connection: Connection,
        opener: EngineOpener | None = None,
        engine: Engine | None = None,
        prefix: str = "",
        text_digests: TextDigests | None = None,
    ) -> None:
        self._connection = connection
        self._sender = connection.sender
        self._notes = StepNotes(self._sender, prefix)
        self._opener = opener
        self._engine = engine
        self._prefix = prefix
        self._text_digests = text_digests
        self._live: set[str] = set()  # ids of submitted requests
        self._has_ended = asyncio.Event()  # one of them, or a preparation
        self._preparing: set[str] = set()
        self._num_changes = 0  # of adapters, which later requests wait for
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats_due = asyncio.Event()
        self._stopped = False

    async def run(self) -> bool:
        """Serve until the connection ends. Returns whether that was after a Stop.

        Raises:
            EngineError: The other end sent what is no message.
        """
        self._start(self._sender.run())
        if self._engine is not None:
            self._engine.step_log.follow(self._notes)
            self._engine.follow_admissions(self._notes.add_admissions)
            self._begin(self._engine)
        try:
            await self._receive_all()
        finally:
            self._leave()
        return self._stopped

    def drain(self) -> None:
        """Have the other end send no more requests."""
        self._sender.put(Draining())

    async def wait_until_idle(self) -> None:
        """Return once no request of this connection is live."""
        while self._live or self._preparing:
            self._has_ended.clear()
            await self._has_ended.wait()

    async def close(self) -> None:
        """Send what is queued and close the connection, which ends `run`."""
        with suppress(OSError):
            await self._sender.flush()
        self._connection.close()

    async def _receive_all(self) -> None:
        num_requests = 0
        async for message in self._connection.messages(TO_ENGINE):
            self._receive(message)
            num_requests += isinstance(message, Request)
            if num_requests == _REQUESTS_PER_TURN:
                num_requests = 0
                await asyncio.sleep(0)

    def _leave(self) -> None:
        """End all work for this connection; an engine that serves others continues."""
        for task in self._tasks:
            task.cancel()
        if self._prefix and self._engine is not None:
            self._engine.step_log.unfollow(self._notes)
            self._engine.unfollow_admissions(self._notes.add_admissions)
            for request_id in tuple(self._live):
                self._engine.abort(self._prefix + request_id)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                # no other task does its work: end the process, which the supervisor replaces
                _LOGGER.critical("a task of the engine process failed", exc_info=error)
                self._connection.close()

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
                self._require_engine().abort(self._prefix + request_id)
            case Pause(request_id=request_id):
                self._require_engine().pause(self._prefix + request_id)
                self._stats_due.set()
            case Resume(request_id=request_id):
                self._require_engine().resume(self._prefix + request_id)
                self._stats_due.set()
            case ReportTimings(request_id=request_id):
                self._start(self._report_timings(request_id))
            case ResetPrefixCache():
                self._start(self._reset_prefix_cache())
            case LoadAdapter() | UnloadAdapter():
                self._num_changes += 1
                self._start(self._change_adapters(message))
            case SaveSlot() | RestoreSlot() | FindCachedSlot() | FindStoredSlot():
                self._start(self._answer_slot(message))
            case ReadClock(sent_s=sent_s):
                self._sender.put(ClockNote(sent_s, self._require_engine().stats().now_s))
            case Stop():
                self._start(self._end_requests() if self._prefix else self._stop())

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
            if self._opener is None:
                raise EngineError("the engine is open")
            engine = await asyncio.to_thread(self._opener, opening.config, progress)
            engine.step_log.follow(self._notes)
            engine.follow_admissions(self._notes.add_admissions)
            await engine.start()
            self._begin(engine)
        except ConfigError as error:
            self._sender.put(OpenRefused(str(error), is_config=True))
            return
        except Exception as error:  # the task's top: the other end decides what to do
            _LOGGER.exception("the engine could not be opened")
            reason = f"the engine could not be opened: {type(error).__name__}: {error}"
            self._sender.put(OpenRefused(reason, is_config=False))
            return
        begin_serving()

    def _begin(self, engine: Engine) -> None:
        """Report that the engine is open, and its state from now on."""
        opened = Opened(_facts(engine, self._text_digests), engine.stats())
        self._engine = engine
        self._sender.put(opened)
        self._start(self._send_stats(engine))
        self._start(self._report_failure(engine))

    def _submit(self, request: Request) -> None:
        sink = _RequestSink(request, self._notes, self._ended)
        request_id = request.request_id
        self._live.add(request_id)
        try:
            engine = self._require_engine()
            request = engine.with_adapter_id(request)
            if self._prefix:
                request = replace(request, request_id=self._prefix + request_id)
            ignored = engine.submit(request, sink)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # one request's end; a panic in Rust is no Exception
            self._ended(request_id)
            self._refuse(request_id, error)
        else:
            self._sender.put(Accepted(request_id, ignored, request.adapter_id))
        self._stats_due.set()

    def _ended(self, request_id: str) -> None:
        self._live.discard(request_id)
        self._has_ended.set()
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
        self._has_ended.set()

    def _refuse(self, request_id: str, error: BaseException) -> None:
        self._sender.put(_refusal(request_id, error))

    async def _send_stats(self, engine: Engine) -> None:
        while True:
            self._stats_due.clear()
            began_s = time.perf_counter()
            stats = engine.stats()
            steps = stats.busy_since_s is not None or stats.num_steps_in_flight > 0
            # read with the stats: a transfer that ends in the pause below sets nothing
            busy = steps or bool(self._preparing) or engine.is_moving_blocks
            self._put_stats(stats)
            spent_s = time.perf_counter() - began_s
            await asyncio.sleep(min(spent_s / _STATS_PART, _STATS_EVERY_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATS_EVERY_S if busy else None):
                    await self._stats_due.wait()

    def _put_stats(self, stats: EngineStats) -> None:
        self._sender.put(StatsNote(stats, time.process_time() - time.thread_time()))

    async def _report_failure(self, engine: Engine) -> None:
        """Send the stats of a failed engine, which has no requests that would cause it."""
        await engine.wait_until_failed()
        self._stats_due.set()

    async def _report_timings(self, request_id: str) -> None:
        timings: dict[int, SequenceTimings] = {}
        if self._engine is not None:
            timings = await self._engine.live_timings(self._prefix + request_id)
        self._sender.put(TimingsNote(request_id, timings))

    async def _reset_prefix_cache(self) -> None:
        num_blocks = await self._require_engine().reset_prefix_cache()
        self._sender.put(PrefixCacheNote(num_blocks))
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

    async def _answer_slot(self, message: SlotMessage) -> None:
        engine, prefix, refused = self._require_engine(), None, None
        salt = message.cache_salt
        try:
            match message:
                case SaveSlot(filename=filename, adapter=adapter, token_ids=token_ids):
                    prefix = await engine.save_slot(filename, adapter, salt, token_ids)
                case RestoreSlot(filename=filename):
                    prefix = await engine.restore_slot(filename, salt)
                case FindCachedSlot(adapter=adapter, token_ids=token_ids):
                    prefix = engine.cached_slot(adapter, salt, token_ids)
                case FindStoredSlot(filename=filename):
                    prefix = await engine.stored_slot(filename, salt)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in `_submit`
            refused = _refusal("", error)
        self._sender.put(SlotNote(message.number, prefix, refused))
        self._stats_due.set()

    async def _end_requests(self) -> None:
        """End the requests of this connection, then close it."""
        engine = self._require_engine()
        self._preparing.clear()
        for request_id in tuple(self._live):
            engine.abort(self._prefix + request_id)
        await self.wait_until_idle()
        await asyncio.sleep(0)  # what ended is put
        self._put_stats(engine.stats())  # what it has counted up to here
        self._stopped = True
        await self.close()

    async def _stop(self) -> None:
        """Stop the engine in order, then close the connection, which ends `run`."""
        try:
            if self._engine is not None:
                await self._engine.stop()
            await asyncio.sleep(0)  # what ended with it is put
            if self._engine is not None:
                self._put_stats(self._engine.stats())  # the last ones
            await self._sender.flush()
            self._stopped = self._engine is not None
        except Exception:  # the task's top: the process ends, in order or not
            _LOGGER.exception("the engine could not be stopped in order")
        self._connection.close()


def begin_serving() -> None:
    """Undo the settings of the interpreter for loading; the objects that exist now stay."""
    gc.freeze()
    gc.enable()
    sys.setswitchinterval(_SWITCH_S)


def _refusal(request_id: str, error: BaseException) -> Refused:
    match error:
        case RequestError(param=param, status=status, code=code, retry_after_s=retry_s):
            return Refused(request_id, str(error), param, status, code, retry_s)
        case EngineError():
            return Refused(request_id, str(error), None, 503)
        case _:
            _LOGGER.error("a request failed in the engine process", exc_info=error)
            return Refused(request_id, text_for_clients(error), None, 500)


def _facts(engine: Engine, text_digests: TextDigests | None) -> ModelFacts:
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
        retrieval=model.retrieval,
        load_s=model.load_s,
        memory_plan=model.memory_plan,
        block_size=engine.block_size,
        kv_address=engine.kv_address,
        kv_block_bytes=engine.kv_block_bytes,
        text_digests=text_digests,
    )
