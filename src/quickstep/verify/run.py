"""Runs one scheduler and one runner over some requests, step by step, on a counted clock.

The exactness checker's engine, called by `verify.checker`. It computes, reads text and searches
beams with the engine's own parts, but without threads and real time, so that a run is a function of
its arguments. The beams of a search (`engine.beam_search`) are requests to the run's scheduler; the
loop runs the search's task between steps.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

import msgspec
from msgspec import structs
from msgspec.structs import replace

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.engine.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from quickstep.errors import EngineError
from quickstep.model.interface import Model
from quickstep.ops.table import KVCache, LoRAAdapter
from quickstep.runtime.cache.opening import open_block_bytes
from quickstep.runtime.runner import ModelRunner, PostedStep
from quickstep.runtime.sampling.grammar import NewMatcher
from quickstep.runtime.speculation.proposer import Proposer
from quickstep.runtime.steps.opening import device_graphs
from quickstep.runtime.steps.pipeline import StageLinks
from quickstep.runtime.steps.step_model import GraphOptions
from quickstep.text.output_text import OutputText
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import (
    Delta,
    FinishReason,
    Phase,
    Request,
    SequenceOutput,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quickstep.verify.requests import RandomRequest
from quickstep.verify.stored_blocks import StoredBlocks


class _BeamStream:
    """The deltas of one beam's request: a `Continuation`."""

    def __init__(self, abort: Callable[[], object]) -> None:
        self._abort = abort
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self.is_over = False

    def put(self, output: SequenceOutput) -> None:
        """Add an output of the scheduler."""
        self._deltas.append(
            Delta(
                output.index,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                finish_reason=output.finish_reason,
                error=output.error,
                prompt_logprobs=output.prompt_logprobs,
            )
        )
        self.is_over = output.finish_reason is not None
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """`Continuation.__aiter__`."""
        while self._deltas or not self.is_over:
            await self._arrived.wait()
            self._arrived.clear()
            while self._deltas:
                yield self._deltas.popleft()

    async def accepted(self) -> None:
        """Returns at once: the scheduler accepts every request."""

    async def aclose(self) -> None:
        """`Continuation.aclose`."""
        if not self.is_over:
            self._abort()


class RunningSearch:
    """One search under way. `add` and `abort` are the scheduler's, by request and by its id."""

    def __init__(
        self,
        request: Request,
        params: BeamSearchParams,
        limits: tuple[int, int],
        add: Callable[[Request], None],
        abort: Callable[[str], object],
    ) -> None:
        """`limits`: longest sequence and vocabulary."""
        self._request = request
        self.adapter_id = request.adapter_id
        self._add = add
        self._abort = abort
        self._streams: dict[str, _BeamStream] = {}
        max_model_len, vocab_size = limits
        self._search = BeamSearch(
            self._submit,
            request,
            params,
            request.eos_token_ids,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        self._search.start()
        self._task = asyncio.ensure_future(self._search.run())

    @property
    def is_done(self) -> bool:
        """Whether the hypotheses are known."""
        return self._task.done()

    @property
    def live_ids(self) -> list[str]:
        """The requests of the beams that run."""
        return [name for name, stream in self._streams.items() if not stream.is_over]

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Of the prompt, after the search."""
        return self._search.prompt_logprobs

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The result, once done. Raises EngineError."""
        return self._task.result()

    def put(self, output: SequenceOutput) -> None:
        """Add the output of one of the beams' requests."""
        self._streams[output.request_id].put(output)

    def cancel(self) -> None:
        """Abort the beams that run."""
        self._task.cancel()
        for name in self.live_ids:
            self._abort(name)

    def _submit(self, request: Request) -> _BeamStream:
        name = f"{self._request.request_id}/{len(self._streams)}"
        stream = self._streams[name] = _BeamStream(lambda: self._abort(name))
        self._add(structs.replace(request, request_id=name))
        return stream


_STEP_S = 1e-3  # the assumed time of each step: measured time would make runs differ
_LOAD_STEPS = 3
_EVICTION_STEPS = 7  # after as many, what is cached has to come back from where it is stored
_SEARCH_TURNS = 8  # of the loop between two steps: a search has read its beams and sent the next


class Trace(msgspec.Struct):
    """The output of one sequence: token ids, the bits of each token's logprobs, and its end; of its
    prompt the bits of each token's score, and of its embedding; the text where it may end in a stop
    string.
    """

    token_ids: list[int] = msgspec.field(default_factory=list)
    logprob_bits: list[bytes] = msgspec.field(default_factory=list)
    prompt_bits: list[bytes] = msgspec.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str = ""


class Signal(enum.Enum):
    """What happens to a request on its way."""

    ABORT = "abort"
    PAUSE = "pause"
    RESUME = "resume"


class Event(msgspec.Struct, frozen=True):
    """At step `at` a request arrives, or something happens to the one of that id."""

    at: int
    request_id: str
    what: RandomRequest | Signal


class AdapterRetired(msgspec.Struct, frozen=True):
    """At step `at` an adapter is unloaded or replaced: no later request has it."""

    at: int
    adapter_id: str


class RunCounts(msgspec.Struct):
    """What really happened in runs, so that zero mismatches is known to mean something."""

    steps: int = 0
    output_tokens: int = 0
    chunked_rows: int = 0
    mixed_steps: int = 0
    overlapped_steps: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    aborts: int = 0
    pauses: int = 0
    stop_strings: int = 0
    repetitions: int = 0
    beam_searches: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    adapters_retired: int = 0  # while requests with them were running or waiting
    restored_blocks: int = 0

    def add(self, other: RunCounts) -> None:
        """Add another run's counts."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def _graphs(model: Model, kv: KVCache, config: SchedulerConfig) -> GraphOptions | None:
    """On a GPU, batches run as CUDA graphs, one more after every step; requests alone do not."""
    if config.max_num_seqs == 1:
        return None
    max_width = 1 + config.num_speculative_tokens
    return device_graphs(model, kv, config.max_num_seqs, max_width, config.max_num_batched_tokens)


class _Run:
    def __init__(
        self,
        model: Model,
        kv: KVCache,
        config: SchedulerConfig,
        pool: KVBlockPool,
        new_matcher: NewMatcher | None,
        tokenizer: Tokenizer | None,
        proposer: Proposer | None,
        adapters: Mapping[str, LoRAAdapter],
        links: StageLinks | None,
    ) -> None:
        self._pool = pool
        # those that are in memory, if they are a resource of the scheduler
        self._adapters = adapters
        self._resident = dict(adapters if config.max_loras is None else {})
        self._loads: deque[tuple[int, str]] = deque()  # when each ends
        self._retired: set[str] = set()
        self._limits = config.max_model_len, model.vocab_size
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(config, pool, make_policy(config), LinearCostModel())
        self._step = 0
        self._runner = ModelRunner(
            model,
            kv,
            pool.block_size,
            config.max_num_seqs,
            clock=lambda: self._step * _STEP_S,
            new_matcher=new_matcher,
            proposer=proposer,
            adapters=self._resident if adapters else None,
            graphs=_graphs(model, kv, config),
            links=links,
        )
        for adapter_id in adapters:
            self._scheduler.register_adapter(adapter_id, 1)
        self._stored: StoredBlocks[list[bytes]] | None = None
        if config.kv_tier is not None:
            self._blocks = open_block_bytes(kv)
            self._stored = StoredBlocks(self._scheduler, self._block_content, self._write_block)
        self._in_flight: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()
        self.counts = RunCounts()
        self.traces: dict[tuple[str, int], Trace] = {}
        self._texts: dict[tuple[str, int], OutputText] = {}
        self._searches: dict[str, RunningSearch] = {}

    async def drive(self, events: Iterable[Event | AdapterRetired]) -> None:
        """Until every request has ended."""
        coming = deque(sorted(events, key=lambda event: event.at))
        while coming or self._scheduler.has_work() or self._in_flight or self._searches:
            while coming and coming[0].at <= self._step:
                self._apply(coming.popleft())
            self._advance(is_idle_fine=bool(coming))
            if self._searches:
                await self._search()
            self._step += 1
        self._scheduler.check()
        num_leaked = self._pool.num_blocks - self._pool.num_free
        if num_leaked:
            raise EngineError(f"{num_leaked} KV blocks leaked")

    def _apply(self, event: Event | AdapterRetired) -> None:
        if isinstance(event, AdapterRetired):
            self._retired.add(event.adapter_id)
            places = self._scheduler.held.adapters
            is_used = places is not None and places.is_used(event.adapter_id)
            self.counts.adapters_retired += is_used
            return
        match event.what:
            case RandomRequest() as added:
                self._add(added)
            case Signal.ABORT:
                self._abort(event.request_id)
            case Signal.PAUSE:
                before = self._scheduler.stats().num_paused
                for request_id in self._scheduled(event.request_id):
                    self._scheduler.pause(request_id, self._now)
                self.counts.pauses += self._scheduler.stats().num_paused - before
            case Signal.RESUME:
                for request_id in self._scheduled(event.request_id):
                    self._scheduler.resume(request_id, self._now)

    def _add(self, added: RandomRequest) -> None:
        request = added.request
        for index in range(request.sampling.n):
            self.traces[request.request_id, index] = Trace()
        if added.beams is not None:
            self._searches[request.request_id] = RunningSearch(
                request,
                added.beams,
                self._limits,
                add=lambda beam: self._scheduler.add(beam, self._now),
                abort=self._abort_scheduled,
            )
            return
        self._scheduler.add(request, self._now)
        if request.sampling.stop and self._tokenizer is not None:
            for index in range(request.sampling.n):
                text = OutputText(self._tokenizer, request.sampling, at_text_start=False)
                self._texts[request.request_id, index] = text

    def _abort(self, request_id: str) -> None:
        search = self._searches.pop(request_id, None)
        if search is None:
            self._take(self._abort_scheduled(request_id))
            return
        search.cancel()
        for (name, _), trace in self.traces.items():
            if name == request_id:
                trace.finish_reason = FinishReason.ABORTED

    def _abort_scheduled(self, request_id: str) -> tuple[SequenceOutput, ...]:
        ended = self._scheduler.abort(request_id, self._now)
        self.counts.aborts += len(ended)
        return ended

    def _scheduled(self, request_id: str) -> list[str]:
        """The requests at the scheduler: a search has one for each beam."""
        search = self._searches.get(request_id)
        return [request_id] if search is None else search.live_ids

    async def _search(self) -> None:
        """Let the searches read what came, send their next beams, and end."""
        for _ in range(_SEARCH_TURNS):
            await asyncio.sleep(0)
        for request_id, search in list(self._searches.items()):
            if search.is_done:
                del self._searches[request_id]
                self._end_search(request_id, search)
        if self._searches and not self._scheduler.has_work():
            raise EngineError("a beam search has no request under way and does not end")

    def _end_search(self, request_id: str, search: RunningSearch) -> None:
        try:
            hypotheses = search.hypotheses()
        except EngineError as error:
            first = self.traces[request_id, 0]
            first.finish_reason, first.error = FinishReason.ERROR, str(error)
            return
        self.counts.beam_searches += 1
        for index, one in enumerate(hypotheses):
            trace = self.traces[request_id, index]
            trace.token_ids.extend(one.token_ids)
            trace.logprob_bits.extend(map(_bits, one.logprobs))
            trace.finish_reason = one.reason
        scores = self.traces[request_id, 0].prompt_bits
        scores.extend(_bits(score) for score in search.prompt_logprobs if score)

    def _follow_adapter_orders(self) -> None:
        """Free and load adapters as the scheduler wants; a load takes a few steps."""
        orders = self._scheduler.take_adapter_orders()
        if orders is None:
            return
        for adapter_id in orders.evictions:
            self._resident.pop(adapter_id, None)  # a retired one may still be loading
        self._loads += [(self._step + _LOAD_STEPS, load) for load in orders.loads]
        self.counts.adapter_evictions += len(orders.evictions)

    def _end_loads(self) -> None:
        while self._loads and self._loads[0][0] <= self._step:
            _, adapter_id = self._loads.popleft()
            if self._scheduler.adapter_loaded(adapter_id, self._now):
                self._resident[adapter_id] = self._adapters[adapter_id]
            self.counts.adapter_loads += 1

    def _free_retired_adapters(self) -> None:
        """As the engine does: those that no request and no beam search uses any more."""
        searched = {search.adapter_id for search in self._searches.values()}
        for adapter_id in sorted(self._retired):
            if adapter_id not in searched and self._scheduler.retire_adapter(adapter_id):
                self._retired.discard(adapter_id)

    def _move_blocks(self, stored: StoredBlocks[list[bytes]]) -> None:
        """Store and restore KV blocks, and evict what is cached now and then."""
        stored.save_all()
        stored.restore_all(self._now)
        if self._step % _EVICTION_STEPS == 0:
            self._scheduler.reset_prefix_cache()
        tier = self._scheduler.stats().kv_tier
        assert tier is not None, "blocks are stored"
        self.counts.restored_blocks = tier.num_restored

    @property
    def _is_restoring(self) -> bool:
        return self._scheduler.held.tiers is not None and self._scheduler.held.tiers.is_restoring

    def _block_content(self, block_id: int) -> list[bytes]:
        with self._blocks.reading((block_id,)) as (parts,):
            return list(map(bytes, parts))

    def _write_block(self, block_id: int, content: list[bytes]) -> None:
        with self._blocks.writing((block_id,)) as (places,):
            for place, part in zip(places, content, strict=True):
                place[:] = part

    def _advance(self, is_idle_fine: bool) -> None:
        """Plan and compute a step; commit the oldest once no more may be in flight."""
        if self._stored is not None:
            self._move_blocks(self._stored)
        self._end_loads()
        self._free_retired_adapters()
        plan = self._scheduler.plan(self._now)
        self._follow_adapter_orders()
        if plan is not None:
            self.counts.overlapped_steps += bool(self._in_flight)
            self._count(plan)
            self._in_flight.append((plan, self._begun(plan)))
            self._runner.capture_next()
            return
        if self._in_flight:
            oldest, finish = self._in_flight.popleft()
            outcome = self._scheduler.commit(oldest, finish(), self._now)
            self.counts.preemptions += outcome.record.num_preemptions
            self.counts.drafts += outcome.record.num_drafts
            self.counts.accepted_drafts += outcome.record.num_accepted
            self._take(outcome.outputs)
        elif self._scheduler.has_work() and not (is_idle_fine or self._loads or self._is_restoring):
            raise EngineError("the scheduler has work and plans nothing")

    def _begun(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Run a step, or let the stages of a pipeline begin it; returns what finishes it."""
        runner = self._runner
        if not runner.has_stages:
            result = runner.run(plan)
            return lambda: result
        step = runner.launch(plan)
        assert isinstance(step, PostedStep), "a plan has rows"
        runner.send(step)
        return lambda: runner.finish(step, runner.wait(step))

    def _count(self, plan: StepPlan) -> None:
        self.counts.steps += 1
        phases = {row.phase for row in plan.rows}
        self.counts.mixed_steps += len(phases) == 2
        self.counts.chunked_rows += sum(
            row.phase is Phase.PREFILL and not row.emits for row in plan.rows
        )

    def _take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            self.counts.output_tokens += len(output.token_ids)
            if output.timings is not None:
                self.counts.prefix_hit_tokens += output.timings.num_cached_tokens
            owner, _, beam = output.request_id.rpartition("/")
            if beam.isdecimal():
                if owner in self._searches:
                    self._searches[owner].put(output)
                continue
            trace = self.traces[output.request_id, output.index]
            output = self._read(output, trace)
            trace.token_ids.extend(output.token_ids)
            trace.logprob_bits.extend(_bits(logprobs) for logprobs in output.logprobs)
            trace.prompt_bits.extend(_bits(score) for score in output.prompt_logprobs if score)
            if output.embedding is not None:
                trace.prompt_bits.append(
                    struct.pack(f"<{len(output.embedding)}d", *output.embedding)
                )
            if output.finish_reason is not None:
                trace.finish_reason, trace.error = output.finish_reason, output.error
                self.counts.repetitions += output.finish_reason is FinishReason.REPETITION

    def _read(self, output: SequenceOutput, trace: Trace) -> SequenceOutput:
        """The output up to a stop string, which ends its sequence as the engine does."""
        text = self._texts.get((output.request_id, output.index))
        if text is None:
            return output
        delta = text.advance(output)
        trace.text += delta.text
        if output.finish_reason is None and delta.finish_reason is not None:
            self._scheduler.abort(
                output.request_id, self._now, FinishReason.STOP_STRING, output.index
            )
            self.counts.stop_strings += 1
        return replace(
            output,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            finish_reason=delta.finish_reason,
        )

    @property
    def _now(self) -> float:
        return self._step * _STEP_S


def run_requests(
    model: Model,
    kv: KVCache,
    config: SchedulerConfig,
    pool: KVBlockPool,
    events: Iterable[Event | AdapterRetired],
    new_matcher: NewMatcher | None = None,
    tokenizer: Tokenizer | None = None,
    proposer: Proposer | None = None,
    adapters: Mapping[str, LoRAAdapter] | None = None,
    links: StageLinks | None = None,
) -> tuple[dict[tuple[str, int], Trace], RunCounts]:
    """The trace of each (request id, index), and what happened on the way.

    `kv` may hold anything an earlier run left; `pool` has to be fresh. `adapters` are those that
    requests name; with `config.max_loras`, they are loaded and evicted on the way. `links`
    lead to the other stages of the model.

    Raises:
        EngineError: A block leaked, or the scheduler is stuck.
    """
    run = _Run(model, kv, config, pool, new_matcher, tokenizer, proposer, adapters or {}, links)
    asyncio.run(run.drive(events))
    return run.traces, run.counts


def _bits(logprobs: TokenLogprobs) -> bytes:
    packed = struct.pack("<qqd", logprobs.token_id, logprobs.rank, logprobs.logprob)
    return packed + b"".join(struct.pack("<qd", *entry) for entry in logprobs.top)
