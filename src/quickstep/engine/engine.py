"""The live engine: one asyncio task that plans, submits, commits and delivers.

    submit -> Scheduler.add ─┐
                             v
      expire -> plan -> Executor.submit -> (ticket) -> commit -> text, stop strings -> sink

This is the asynchronous API of the library; `LLM` and the server call it:

    engine = open_engine(EngineConfig())
    await engine.start()
    async with engine.generate("def add(", SamplingParams(max_tokens=32)) as stream:
        async for delta in stream:
            print(delta.text, end="")
    await engine.stop()

Everything here runs in the event loop that called `start` and never blocks it: steps run in the
executor's thread. When idle, the task waits for an event. A failing step fails its own sequences;
several in a row, or an error in the task itself, fail the engine and every request at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from quickstep.config import StreamConfig
from quickstep.core.resources.block_pool import ChainRoot
from quickstep.core.scheduler import Scheduler
from quickstep.engine.adapter_loader import AdapterLoader
from quickstep.engine.adapters import Adapters, LoadedAdapter
from quickstep.engine.live_requests import LiveRequests
from quickstep.engine.loaded_model import LoadedModel
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.requests import RequestIntake, as_token_ids
from quickstep.engine.retrieval.card import Retrieval
from quickstep.engine.stats import EngineState, EngineStats
from quickstep.engine.step_times.cost_fits import FitSaver
from quickstep.engine.stream import Sink, Stream
from quickstep.errors import EngineError, RequestError, StepOutOfMemory, text_for_clients
from quickstep.text.grammar.grammars import CompiledGrammar, check_grammar, prepare_grammar
from quickstep.text.token_forms import TokenFormFinder
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import (
    Admission,
    Executor,
    FinishReason,
    KVTarget,
    Request,
    SamplingParams,
    SequenceOutput,
    SequenceTimings,
    SlotPrefix,
    StepPlan,
    StepResult,
    Ticket,
)

if TYPE_CHECKING:
    from quickstep.engine.handover.transfers import EngineTransfers
    from quickstep.engine.kv_files.slot_files import SlotFiles
    from quickstep.engine.kv_files.tier import EngineTier
    from quickstep.engine.records.recording_file import RecordingFile
    from quickstep.model.sizing import MemoryPlan
    from quickstep.text.chat_template import ChatTemplate, Message
    from quickstep.text.tool_calls.formats import ReasoningFormat

_LOGGER = logging.getLogger(__name__)
# One step may fail because of its rows. Several in a row mean that scheduler, runner or device are
# in a state that no request can change: the engine fails, and its owner may start another.
_MAX_FAILED_IN_A_ROW = 3
_STEPPING = (EngineState.RUNNING, EngineState.DRAINING)


class Engine:
    """One loaded model, serving requests. Built by `open_engine`; owns scheduler and executor.

    `clock` gives monotonic seconds; `seeds` gives the seeds of unseeded requests; `streams` bounds
    the unread deltas of a stream, None does not; `fits` stores what the scheduler's cost model has
    learnt. `adapters` None refuses requests with an adapter. `recording` is what the scheduler
    writes to; it is closed with the engine, as are `kv_transfers`, which transfers KV blocks,
    `kv_tier`, which stores them, and `slot_files`, which does so when a client says so.
    """

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        executor: Executor,
        *,
        step_log: StepLog,
        streams: StreamConfig | None = None,
        seeds: random.Random,
        clock: Callable[[], float],
        fits: FitSaver | None = None,
        adapters: Adapters | None = None,
        recording: RecordingFile | None = None,
        kv_transfers: EngineTransfers | None = None,
        kv_tier: EngineTier | None = None,
        slot_files: SlotFiles | None = None,
    ) -> None:
        self._model = model
        self._kv_tier = kv_tier
        self._slot_files = slot_files
        self._kv_transfers = kv_transfers
        self._recording = recording
        self._scheduler = scheduler
        self._executor = executor
        self._step_log = step_log
        self._fits = fits
        self._stream_bounds = streams
        self._clock = clock
        self._state = EngineState.NEW
        self._failure = ""
        self._token_forms = TokenFormFinder(
            model.tokenizer, model.vocab_size, model.max_model_len, self._reasoning_format
        )
        self._live = LiveRequests(model.tokenizer, step_log, self._end_sequences)
        self._intake = RequestIntake(seeds, self._live)
        self._in_flight: deque[tuple[StepPlan, Ticket]] = deque()
        self._last_step_s: float | None = None
        self._num_failed_in_a_row = 0  # steps
        self._busy_since_s = 0.0  # since when there was a request to generate for
        self._wakeup = asyncio.Event()
        self._has_failed = asyncio.Event()
        self._admission_reports: list[Callable[[Sequence[Admission]], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._adapters: AdapterLoader | None = None
        if adapters is not None:
            self._adapters = AdapterLoader(
                adapters, scheduler, clock, self._live.deliver, self._wakeup.set
            )
            self._adapters.load_at_start()

    @property
    def model(self) -> LoadedModel:
        """The loaded model: memory plan, load seconds, sampling defaults, tokenizer."""
        return self._model

    @property
    def model_name(self) -> str:
        """The name that responses carry."""
        return self._model.name

    @property
    def fingerprint(self) -> str:
        """Weights, dtype and kernel set: equal fingerprints give equal bits."""
        return self._model.fingerprint

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output."""
        return self._model.max_model_len

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; the prefix cache holds complete blocks."""
        return self._scheduler.block_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None if the model has none. Raises ConfigError if it cannot be read."""
        return self._model.chat_template

    def _reasoning_format(self) -> ReasoningFormat | None:
        template = self.chat_template
        return None if template is None else template.formats.reasoning

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """The checkpoint's own sampling values (`generation_config.json`), by our names."""
        return self._model.default_sampling

    @property
    def retrieval(self) -> Retrieval:
        """How the model embeds texts and scores pairs, as its card says."""
        return self._model.retrieval

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The use of the memory (`model.sizing.MemoryPlan`)."""
        return self._model.memory_plan

    @property
    def step_log(self) -> StepLog:
        """The log of steps and sequences; read it, or follow it."""
        return self._step_log

    @property
    def kv_address(self) -> KVTarget | None:
        """Where other engines send KV blocks; None if they are not transferred."""
        return None if self._kv_transfers is None else self._kv_transfers.address

    @property
    def kv_block_bytes(self) -> int:
        """Of a KV block that is transferred."""
        return 0 if self._kv_transfers is None else self._kv_transfers.block_bytes

    @property
    def is_moving_blocks(self) -> bool:
        """Whether KV blocks are on their way from or to engines or files."""
        return self._scheduler.held.is_moving_blocks

    def stats(self) -> EngineStats:
        """The engine's current state."""
        now = self._clock()
        return EngineStats(
            state=self._state,
            failure=self._failure,
            now_s=now,
            last_step_s=self._last_step_s,
            busy_since_s=None if self._scheduler.is_held() else self._busy_since_s,
            num_steps_in_flight=len(self._in_flight),
            num_requests=len(self._live),
            scheduler=self._scheduler.stats(),
            admission=self._scheduler.admission_state(now),
            coefficients=None if self._fits is None else self._fits.model.coefficients,
        )

    @property
    def has_queue(self) -> bool:
        """Whether sequences wait."""
        return self._scheduler.num_waiting > 0

    def check_admission(self, request: Request, num_sequences: int) -> None:
        """Raise RequestError for a request that could not be accepted now, whatever its prompt."""
        now = self._clock()
        waited_s = 0.0 if request.received_s is None else max(0.0, now - request.received_s)
        self._scheduler.admission_state(now).check(request, num_sequences, {}, waited_s)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of live requests."""
        return self._live.request_ids

    async def live_timings(self, request_id: str) -> dict[int, SequenceTimings]:
        """What the live sequences of a request spent their time on so far, by index."""
        return self._scheduler.timings(request_id, self._clock())

    async def reset_prefix_cache(self) -> int:
        """Free every cached block that no sequence uses; returns how many there were."""
        return self._scheduler.reset_prefix_cache()

    async def save_slot(
        self, filename: str, adapter: str, cache_salt: str, token_ids: Sequence[int]
    ) -> SlotPrefix:
        """Write what is cached of a prefix into a file of `--slot-save-path`.

        Raises:
            RequestError: There is no such directory, or the name is none.
            EngineError: Nothing of it is cached any more, or it cannot be written.
        """
        files = self._require_slot_files()
        return await files.save(filename, adapter, self._root(adapter, cache_salt), token_ids)

    async def restore_slot(self, filename: str, cache_salt: str) -> SlotPrefix:
        """Read a prefix from such a file into the prefix cache.

        Raises:
            RequestError: There is no such file, or it is not of this model and salt.
            EngineError: It cannot be read, or there is no room.
        """
        files = self._require_slot_files()
        adapter = await files.adapter_of(filename)
        return await files.restore(filename, self._root(adapter, cache_salt))

    def cached_slot(self, adapter: str, cache_salt: str, token_ids: Sequence[int]) -> SlotPrefix:
        """What `save_slot` would write of a prefix now. Raises RequestError."""
        files = self._require_slot_files()
        return files.cached(adapter, self._root(adapter, cache_salt), token_ids)

    async def stored_slot(self, filename: str, cache_salt: str) -> SlotPrefix:
        """What `restore_slot` would read from a file. Raises as that, but for room."""
        files = self._require_slot_files()
        adapter = await files.adapter_of(filename)
        return await files.stored(filename, self._root(adapter, cache_salt))

    def _root(self, adapter: str, cache_salt: str) -> ChainRoot:
        request = self.with_adapter_id(Request("", (0,), SamplingParams(), adapter=adapter))
        return ChainRoot(request.adapter_id, cache_salt)

    def _require_slot_files(self) -> SlotFiles:
        if self._slot_files is None:
            raise RequestError(
                "this server does not save slots; start it with --slot-save-path DIR",
                status=501,
                code="not_supported",
            )
        return self._slot_files

    @property
    def adapters(self) -> Sequence[LoadedAdapter]:
        """The adapters that requests may name and that were opened."""
        return () if self._adapters is None else self._adapters.loaded

    async def load_adapter(
        self, name: str, path: str, *, is_from_client: bool = False
    ) -> LoadedAdapter:
        """Read and check an adapter, while steps continue; it is in compute memory when a request
        has named it. The latest of a name serves new requests, those that run finish on theirs.
        `is_from_client`: only from the directories that clients may load from.

        Raises:
            RequestError: The adapter cannot be used.
            EngineError: It cannot be read, or not in time.
        """
        return await self._require_adapters().load(name, path, is_from_client=is_from_client)

    async def open_adapter(self, name: str) -> LoadedAdapter:
        """The adapter of this name; one in `lora_dir` and a mix are opened when first named.

        Raises:
            RequestError: There is none, or it cannot be used.
            EngineError: It cannot be read, or not in time.
        """
        return await self._require_adapters().open(name)

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests with an adapter; it is freed when the last one has ended.

        Raises:
            RequestError: There is no such adapter.
        """
        self._require_adapters().unload(name)

    def _require_adapters(self) -> AdapterLoader:
        if self._adapters is None:
            raise RequestError(
                "adapters are off; start with --enable-lora (in Python: enable_lora=True)",
                param="model",
            )
        return self._adapters

    async def start(self) -> None:
        """Begin stepping in the running event loop.

        Raises:
            EngineError: The engine was stopped before; open a new one.
        """
        if self._state is EngineState.RUNNING:
            return
        if self._state is not EngineState.NEW:
            raise EngineError(f"the engine is {self._state.value}, it cannot start again")
        self._step_log.open()
        if self._kv_transfers is not None:
            self._kv_transfers.start(self._wakeup.set)
        if self._kv_tier is not None:
            self._kv_tier.start(self._wakeup.set)
        if self._slot_files is not None:
            self._slot_files.start(self._wakeup.set)
        self._state = EngineState.RUNNING
        self._task = asyncio.create_task(self._run(), name="quickstep-engine")
        self._task.add_done_callback(self._ended)

    def follow_admissions(self, report: Callable[[Sequence[Admission]], None]) -> None:
        """Call `report` with the sequences that a step is the first to compute, before it is."""
        self._admission_reports.append(report)

    def unfollow_admissions(self, report: Callable[[Sequence[Admission]], None]) -> None:
        """Call `report` no more."""
        self._admission_reports.remove(report)

    async def wait_until_captured(self) -> None:
        """Return once every step that was wanted is captured, for measurements. The engine serves
        meanwhile.
        """
        await asyncio.to_thread(self._executor.wait_until_captured)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Accept no more, let requests continue for `drain_s` seconds, end the rest with SHUTDOWN.

        If a call is cancelled while it drains, call it again to end the rest.
        """
        if self._task is not None and self._state in _STEPPING:
            self._state = EngineState.DRAINING
            await self._drain(drain_s)
            self._end_all(FinishReason.SHUTDOWN)
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED
        self._wakeup.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        if self._adapters is not None:
            self._adapters.close()
        if self._kv_transfers is not None:
            self._kv_transfers.close()
        if self._kv_tier is not None:
            await self._kv_tier.close()
        if self._slot_files is not None:
            self._slot_files.close()
        # the task has received every step, so that there is nothing to wait for
        self._executor.close()
        if self._fits is not None:
            await self._fits.close()
        if self._recording is not None:
            self._recording.close()
        self._step_log.close()

    async def wait_until_failed(self) -> None:
        """Return once the engine has failed; `stats` has the reason."""
        await self._has_failed.wait()

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The prompt tokens of a conversation.

        Raises:
            RequestError: The model has no chat template, or it refuses the conversation.
            ConfigError: The chat template cannot be read.
        """
        if self.chat_template is None:
            raise RequestError(
                f"the model {self.model_name} has no chat template; send a completion instead",
                param="messages",
            )
        text = self.chat_template.render(
            messages, tools, add_generation_prompt, extra, continue_final_message
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def is_prepared(self, request: Request) -> bool:
        """Whether `submit` has no slow work to do."""
        sampling = request.sampling
        if self._needs_opening(request):
            return False
        return sampling.grammar is None and self._token_forms.knows(sampling)

    def _needs_opening(self, request: Request) -> bool:
        """Whether the adapter of a request may have to be read first; a search has had its own."""
        if not request.adapter or (request.is_in_search and request.adapter_id):
            return False
        adapters, adapter_id = self._adapters, request.adapter_id
        if adapters is None or not adapter_id:
            return adapters is None or not adapters.is_opened(request.adapter)
        return not adapters.has_content(adapter_id)

    async def prepare(self, request: Request) -> CompiledGrammar | None:
        """Do the slow work of `submit` in a thread; hold the result until `submit`.

        Raises:
            RequestError: As `submit`.
        """
        if self._needs_opening(request):
            await self.open_adapter(request.adapter)
        await self._token_forms.prepare(request.sampling)
        return await prepare_grammar(request.sampling.grammar, self._model.grammars)

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        adapter: str = "",
        priority: int = 0,
    ) -> Stream:
        """Submit a prompt; see `stream`, which takes requests with more fields."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = Request(
            request_id,
            as_token_ids(ids),
            sampling,
            timeout_s=timeout_s,
            adapter=adapter,
            priority=priority,
        )
        return self.stream(request)

    def stream(self, request: Request) -> Stream:
        """Check and submit a request; the caller reads its deltas from the stream, which has begun.

        The id, the seed and the end tokens are set here. Call it in the engine's event loop.

        Raises:
            RequestError: The request cannot be served as it is.
            EngineError: The engine does not run (not started, stopping, failed).
        """
        self._require_running()
        eos_token_ids = self.tokenizer.eos_token_ids
        request = self._intake.take(
            request, self._model.vocab_size, self.max_model_len, eos_token_ids, self.retrieval
        )
        stream = Stream(request, self, self._stream_bounds)
        stream.accept(self.submit(request, stream))
        return stream

    def submit(self, request: Request, sink: Sink) -> tuple[str, ...]:
        """Queue a request that a `RequestIntake` has checked; its deltas go to `sink`.

        Returns the keywords of its grammar that are enforced less strictly than specified.

        Raises:
            RequestError: The request cannot be served as it is.
            EngineError: The engine does not run (not started, stopping, failed).
        """
        self._require_running()
        request = self.with_adapter_id(request)
        now = self._clock()
        grammar = check_grammar(request.sampling.grammar, self._model.grammars)
        sampling = self._token_forms.find(request.sampling, request.prompt_token_ids)
        if sampling is not request.sampling:
            request = structs.replace(request, sampling=sampling)
        was_held = self._scheduler.is_held()
        self._scheduler.add(request, now)
        try:
            self._live.accept(request, sink, grammar)
        except BaseException:
            self._scheduler.abort(request.request_id, now)
            raise
        self._note_work(was_held, now)
        return () if grammar is None else grammar.ignored

    def with_adapter_id(self, request: Request) -> Request:
        """The request with the content id of its adapter, by which it is the same on every engine.

        Raises:
            RequestError: There is no such adapter, or none with the id that the request has.
        """
        return self._require_adapters().with_id(request) if request.adapter else request

    def abort(self, request_id: str) -> None:
        """End a request; its output so far is its answer. Ignores unknown and finished ids."""
        self._end(request_id, FinishReason.ABORTED)

    def pause(self, request_id: str) -> None:
        """Generate no more for a request until `resume`; its deadline stays. Any id is allowed."""
        self._scheduler.pause(request_id, self._clock())

    def resume(self, request_id: str) -> None:
        """Continue a paused request."""
        was_held, now = self._scheduler.is_held(), self._clock()
        self._scheduler.resume(request_id, now)
        self._note_work(was_held, now)

    def _note_work(self, was_held: bool, now: float) -> None:
        if was_held:
            self._busy_since_s = now
        self._wakeup.set()

    def _require_running(self) -> None:
        if self._state is not EngineState.RUNNING:
            why = f": {self._failure}" if self._failure else ""
            raise EngineError(f"the engine is {self._state.value} and takes no requests{why}")

    async def _run(self) -> None:
        """Fill the pipeline, then commit its oldest step; sleep while there is nothing to do."""
        while self._state in _STEPPING or self._in_flight:
            if self._state in _STEPPING:
                now = self._fill_pipeline()
                if not self._in_flight:
                    await self._sleep(self._next_wakeup(now), now)
                    continue
            ticket = self._in_flight[0][1]
            await _done(ticket)
            try:
                result = ticket.result()
            except Exception as error:  # the executor's thread ended here; its sequences fail
                await self._recover(error)
            else:
                self._commit(self._in_flight.popleft()[0], result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The loop has ended. If it failed, its state is unknown: fail all requests, accept none.

        This also gets errors that are no Exception, such as a panic in Rust.
        """
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._state = EngineState.FAILED
        self._failure = f"{type(error).__name__}: {error}" if error else "its task was cancelled"
        _LOGGER.critical("the engine failed: %s", self._failure, exc_info=error)
        self._has_failed.set()
        self._live.fail_all(self._failure)

    def _fill_pipeline(self) -> float:
        """Plan and submit as many steps as may be in flight; returns the time."""
        self._wakeup.clear()
        now = self._clock()
        if expired := self._scheduler.expire(now):
            self._live.deliver(expired, now)
        if self._adapters is not None:
            self._adapters.free_retired(now)
        while len(self._in_flight) < self._scheduler.max_in_flight:
            plan = self._scheduler.plan(now)
            if plan is None:
                break
            if plan.admitted:
                for report in self._admission_reports:
                    report(plan.admitted)
            self._in_flight.append((plan, self._executor.submit(plan)))
        if self._adapters is not None:
            self._adapters.follow_orders()
        if self._kv_transfers is not None:
            self._kv_transfers.follow_orders()
        if self._kv_tier is not None:
            self._kv_tier.follow_orders()
        if self._slot_files is not None:
            self._slot_files.follow_steps()
        return now

    def _next_wakeup(self, now: float) -> float | None:
        """When there is something to do without a request's change; None for never."""
        adapters_s = None if self._adapters is None else self._adapters.wakeup_s
        times = self._scheduler.wakeup(now), adapters_s
        return min((time for time in times if time is not None), default=None)

    async def _sleep(self, wakeup_s: float | None, now: float) -> None:
        """Wait for a request's change, or until the clock reaches `wakeup_s`."""
        if wakeup_s is None:
            await self._wakeup.wait()
            return
        alarm = asyncio.get_running_loop().call_later(max(0.0, wakeup_s - now), self._wakeup.set)
        try:
            await self._wakeup.wait()
        finally:
            alarm.cancel()

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        now = self._last_step_s = self._clock()
        self._num_failed_in_a_row = 0
        outcome = self._scheduler.commit(plan, result, now)
        if self._kv_transfers is not None:
            self._kv_transfers.follow_orders()
        if self._kv_tier is not None:
            self._kv_tier.follow_orders()
        if self._slot_files is not None:
            self._slot_files.follow_steps()
        self._live.deliver(outcome.outputs, now)
        self._step_log.add_step(outcome.record)
        if self._fits is not None and now >= self._fits.due_s:
            self._fits.tick(now)

    async def _recover(self, error: Exception) -> None:
        """Fail the sequences of the failed step and of those after it; the others continue.

        Raises:
            EngineError: So many steps failed in a row that the next would as well.
        """
        _LOGGER.error("step %d failed", self._in_flight[0][0].step_id, exc_info=error)
        for _, ticket in self._in_flight:
            await _done(ticket)
        self._executor.reset()
        plans = [plan for plan, _ in self._in_flight]
        self._in_flight.clear()
        now, reason = self._clock(), f"a step failed: {text_for_clients(error)}"
        for plan in plans:
            self._live.deliver(self._scheduler.fail(plan, reason, now), now)
        if isinstance(error, StepOutOfMemory):
            return  # the sequences that needed so much have ended
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row == _MAX_FAILED_IN_A_ROW:
            raise EngineError(
                f"{_MAX_FAILED_IN_A_ROW} steps in a row failed, the last one with: {error}"
            )

    async def _drain(self, drain_s: float) -> None:
        if self._live and drain_s > 0:
            try:
                async with asyncio.timeout(drain_s):
                    await self._live.wait_until_empty()
            except TimeoutError:
                _LOGGER.warning("%d requests did not end in time", len(self._live))

    def _end_all(self, reason: FinishReason) -> None:
        for request_id in self._live.request_ids:
            self._end(request_id, reason)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        if request_id in self._live:
            now = self._clock()
            self._live.deliver(self._scheduler.abort(request_id, now, reason), now)
            self._wakeup.set()

    def _end_sequences(
        self, request_id: str, index: int | None, reason: FinishReason, now: float
    ) -> tuple[SequenceOutput, ...]:
        return self._scheduler.abort(request_id, now, reason, index)


def _done(ticket: Ticket) -> Awaitable[None]:
    """The end of a step, awaited; other tasks get a turn in any case."""
    if ticket.done():
        return asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    ticket.add_done_callback(partial(loop.call_soon_threadsafe, partial(_resolve, done)))
    return done


def _resolve(done: asyncio.Future[None], _: object) -> None:
    if not done.done():  # the engine's task was cancelled
        done.set_result(None)
