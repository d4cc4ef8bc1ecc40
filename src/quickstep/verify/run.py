"""Drives one scheduler and one runner over some requests, synchronously, on a counted clock.

The exactness checker's engine: the parts that compute are the live ones, the asyncio loop and the
threads around them are left out, so that a run is a function of its arguments. Called by
`verify.checker`.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import field

from quickstep.config import SchedulerConfig
from quickstep.core.block_pool import KVBlockPool
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.scheduler import Scheduler
from quickstep.dataclass import dataclass
from quickstep.errors import EngineError
from quickstep.model.interface import Model
from quickstep.ops.table import KVCache
from quickstep.runtime.constraints.grammar import NewMatcher
from quickstep.runtime.runner import ModelRunner
from quickstep.types import (
    FinishReason,
    Phase,
    Request,
    SequenceOutput,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

__all__ = ["Event", "RunCounts", "Signal", "Trace", "run_requests"]

_STEP_S = 1e-3  # what each step pretends to take: measured time would make runs differ


@dataclass(slots=True)
class Trace:
    """What one sequence gave: token ids, the bits of each token's logprobs, and its end; of its
    prompt the bits of each token's score, and of its embedding.
    """

    token_ids: list[int] = field(default_factory=list)
    logprob_bits: list[bytes] = field(default_factory=list)
    prompt_bits: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""


class Signal(enum.Enum):
    """What happens to a request on its way."""

    ABORT = "abort"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Event:
    """At step `at` a request arrives, or something happens to the one of that id."""

    at: int
    request_id: str
    what: Request | Signal


@dataclass(slots=True)
class RunCounts:
    """What really happened in runs, so that zero mismatches is known to mean something."""

    steps: int = 0
    output_tokens: int = 0
    chunked_rows: int = 0
    mixed_steps: int = 0
    overlapped_steps: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    pauses: int = 0

    def add(self, other: RunCounts) -> None:
        """Add another run's counts."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class _Run:
    def __init__(
        self,
        model: Model,
        kv: KVCache,
        config: SchedulerConfig,
        pool: KVBlockPool,
        new_matcher: NewMatcher | None,
    ) -> None:
        self._pool = pool
        self._scheduler = Scheduler(config, pool, make_policy(config), LinearCostModel())
        self._step = 0
        self._runner = ModelRunner(
            model,
            kv,
            pool.block_size,
            config.max_num_seqs,
            clock=lambda: self._step * _STEP_S,
            new_matcher=new_matcher,
        )
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.counts = RunCounts()
        self.traces: dict[tuple[str, int], Trace] = {}

    def drive(self, events: Iterable[Event]) -> None:
        """Until every request has ended."""
        coming = deque(sorted(events, key=lambda event: event.at))
        while coming or self._scheduler.has_work() or self._in_flight:
            while coming and coming[0].at <= self._step:
                self._apply(coming.popleft())
            self._advance(is_idle_fine=bool(coming))
            self._step += 1
        self._scheduler.check()
        num_leaked = self._pool.num_blocks - self._pool.num_free
        if num_leaked:
            raise EngineError(f"{num_leaked} KV blocks leaked")

    def _apply(self, event: Event) -> None:
        match event.what:
            case Request() as request:
                self._scheduler.add(request, self._now)
                for index in range(request.sampling.n):
                    self.traces[event.request_id, index] = Trace()
            case Signal.ABORT:
                ended = self._scheduler.abort(event.request_id, self._now)
                self.counts.aborts += len(ended)
                self._take(ended)
            case Signal.PAUSE:
                before = self._scheduler.stats().num_paused
                self._scheduler.pause(event.request_id, self._now)
                self.counts.pauses += self._scheduler.stats().num_paused - before
            case Signal.RESUME:
                self._scheduler.resume(event.request_id, self._now)

    def _advance(self, is_idle_fine: bool) -> None:
        """Plan and compute a step; commit the oldest once no more may be in flight."""
        plan = self._scheduler.plan(self._now)
        if plan is not None:
            self.counts.overlapped_steps += bool(self._in_flight)
            self._count(plan)
            self._in_flight.append((plan, self._runner.run(plan)))
            return
        if self._in_flight:
            oldest, result = self._in_flight.popleft()
            outcome = self._scheduler.commit(oldest, result, self._now)
            self.counts.preemptions += outcome.record.num_preemptions
            self._take(outcome.outputs)
        elif self._scheduler.has_work() and not is_idle_fine:
            raise EngineError("the scheduler has work and plans nothing")

    def _count(self, plan: StepPlan) -> None:
        self.counts.steps += 1
        phases = {row.phase for row in plan.rows}
        self.counts.mixed_steps += len(phases) == 2
        self.counts.chunked_rows += sum(
            row.phase is Phase.PREFILL and not row.emits for row in plan.rows
        )

    def _take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            trace = self.traces[output.request_id, output.index]
            trace.token_ids.extend(output.token_ids)
            trace.logprob_bits.extend(_bits(logprobs) for logprobs in output.logprobs)
            trace.prompt_bits.extend(_bits(score) for score in output.prompt_logprobs if score)
            if output.embedding is not None:
                trace.prompt_bits.append(
                    struct.pack(f"<{len(output.embedding)}d", *output.embedding)
                )
            self.counts.output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                trace.finish_reason, trace.error = output.finish_reason, output.error
            if output.timings is not None:
                self.counts.prefix_hit_tokens += output.timings.num_cached_tokens

    @property
    def _now(self) -> float:
        return self._step * _STEP_S


def run_requests(
    model: Model,
    kv: KVCache,
    config: SchedulerConfig,
    pool: KVBlockPool,
    events: Iterable[Event],
    new_matcher: NewMatcher | None = None,
) -> tuple[dict[tuple[str, int], Trace], RunCounts]:
    """The trace of each (request id, index), and what happened on the way.

    `kv` may hold anything an earlier run left; `pool` has to be fresh.

    Raises:
        EngineError: A block leaked, or the scheduler is stuck.
    """
    run = _Run(model, kv, config, pool, new_matcher)
    run.drive(events)
    return run.traces, run.counts


def _bits(logprobs: TokenLogprobs) -> bytes:
    packed = struct.pack("<qqd", logprobs.token_id, logprobs.rank, logprobs.logprob)
    return packed + b"".join(struct.pack("<qd", *entry) for entry in logprobs.top)
