"""Accounting of a step's seconds: per sequence, in the step log, and in the counts of `stats`.

Every second is counted once, up to float rounding. From the first plan to the last commit:

    wall_s = busy_s + idle_s
    busy_s = attributed_s + recomputed_s + rejected_s + unclaimed_s
    attributed_s = sum of `device_s` over all sequences, recomputed_s that of their `recomputed_s`

Pure functions and plain data; `core.scheduler` owns the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import CostModel, PerUnit, StepLoad, UnitPrices, prompt_latency_s
from quickstep.core.resources.block_pool import PoolStats
from quickstep.core.sequence import TICKS_PER_S, Sequence, SequenceState
from quickstep.core.service_order import ServiceOrder
from quickstep.core.step import InFlightStep
from quickstep.types import (
    Phase,
    PrefillCharge,
    SequenceTimings,
    StepRecord,
    StepResult,
)

_NO_LOAD = StepLoad()
_LOAD = attrgetter("load")


class Totals(msgspec.Struct):
    """Counts since the start. The scheduler owns them and returns copies.

    Attributes:
        num_prefill_tokens: Prompt tokens that committed steps have computed; not those that were
            cached, and again those that are computed again after a preemption.
        prefix_query_tokens: Prompt tokens of sequences when first admitted.
        prefix_hit_tokens: Those of them found in the prefix cache.
        num_pauses: Pauses of live requests.
        busy_s: Measured seconds of all committed steps.
        unclaimed_s: Seconds of steps in which no row's sequence was alive any more (the last
            overlapped step, an abort in flight); the part of `busy_s` that no sequence is charged.
        attributed_s: The part of `busy_s` for positions that sequences computed for the first time.
        recomputed_s: The part for positions that were computed again after a preemption.
        rejected_s: The part for drafts that were rejected.
        num_drafts: Draft tokens that were checked.
        num_accepted: Those of them that were accepted.
        num_proposer_failures: How often a proposer of drafts failed.
        exchange_s: The part of `busy_s` in which rank 0 waited for other ranks.
        wall_s: From the first plan to the last commit, by the scheduler's clock.
        idle_s: The part of `wall_s` in which no step ran: no work, planning, delivery.
        bubble_s: The part of `idle_s` in which the stages of a pipeline had steps in flight: the
            mean over stages of the time in which one had none to compute.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    busy_s: float = 0.0
    unclaimed_s: float = 0.0
    attributed_s: float = 0.0
    recomputed_s: float = 0.0
    rejected_s: float = 0.0
    wall_s: float = 0.0
    idle_s: float = 0.0
    num_drafts: int = 0
    num_accepted: int = 0
    num_proposer_failures: int = 0
    exchange_s: float = 0.0
    bubble_s: float = 0.0

    def add_step(
        self, seconds: float, elapsed_s: float, charges: StepCharges | None = None
    ) -> None:
        """Count a step that took `seconds`, `elapsed_s` after the commit before it; with its
        charges, unless all of them are for what sequences computed for the first time.

        A late commit makes `elapsed_s` longer, and the next one shorter than its step: a single
        step's idle time may be negative, their sum is right.
        """
        self.num_steps += 1
        self.busy_s += seconds
        self.wall_s += elapsed_s
        self.attributed_s += seconds
        self.idle_s += elapsed_s - seconds
        if charges is not None:
            self.unclaimed_s += charges.unclaimed_s
            self.recomputed_s += charges.recomputed_s
            self.rejected_s += charges.rejected_s
            spent_s = charges.unclaimed_s + charges.recomputed_s + charges.rejected_s
            self.attributed_s -= spent_s


class AdapterStats(msgspec.Struct, frozen=True):
    """LoRA adapters in compute memory, and those of live requests, by name.

    Attributes:
        max_loras: Most adapters in compute memory.
        num_resident: Adapters in compute memory, those that are being loaded included.
        num_bytes: What they take.
        num_loads: Loads since the start.
        num_evictions: Evictions that made a place for another one, since the start.
        running: Adapters with a sequence in the batch.
        waiting: Adapters with a sequence that waits.
    """

    max_loras: int = 0
    num_resident: int = 0
    num_bytes: int = 0
    num_loads: int = 0
    num_evictions: int = 0
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class KVTierStats(msgspec.Struct, frozen=True):
    """KV blocks that are kept outside of the pool, and counts since the start.

    Attributes:
        num_blocks: Blocks that are kept now.
        num_bytes: What they take.
        num_saved: Blocks that were stored.
        num_restored: Blocks that came back to the pool.
        num_lost: Blocks that could not be read, or had changed.
        num_saving: Engines that store; 0 after the disk was full, or if another process does.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_saved: int = 0
    num_restored: int = 0
    num_lost: int = 0
    num_saving: int = 0


class SchedulerStats(msgspec.Struct, frozen=True):
    """The scheduler's state. A sequence is counted once, a paused one only in `num_paused`.

    Attributes:
        num_waiting: Sequences never admitted yet.
        num_preempted: Sequences that wait to be admitted again.
        num_in_flight: Steps planned and not committed.
        num_paused: Sequences whose client reads too slowly; resident or not.
        adapters: None if adapters are no resource.
        kv_tier: None if nothing keeps KV blocks outside of the pool.
    """

    num_waiting: int
    num_running: int
    num_preempted: int
    num_in_flight: int
    blocks: PoolStats
    totals: Totals
    num_paused: int = 0
    adapters: AdapterStats | None = None
    kv_tier: KVTierStats | None = None


_S = TypeVar("_S", bound=msgspec.Struct)


def counts(stats: SchedulerStats, times: int = 1) -> SchedulerStats:
    """The counts since the start, `times` each, and nothing of the present."""

    def of(struct: msgspec.Struct, names: SequenceOf[str]) -> dict[str, Any]:
        return {name: times * getattr(struct, name) for name in names}

    blocks, adapters, tier = stats.blocks, stats.adapters, stats.kv_tier
    return SchedulerStats(
        num_waiting=0,
        num_running=0,
        num_preempted=0,
        num_in_flight=0,
        blocks=PoolStats(0, 0, 0, **of(blocks, ("num_hits", "num_evictions"))),
        totals=Totals(**of(stats.totals, Totals.__struct_fields__)),
        adapters=adapters and AdapterStats(**of(adapters, ("num_loads", "num_evictions"))),
        kv_tier=tier and KVTierStats(**of(tier, ("num_saved", "num_restored", "num_lost"))),
    )


def added(structs: SequenceOf[_S]) -> _S:
    """The sums of all fields of structs of one class; names are listed once. A field that is None
    counts for nothing.
    """
    if len(structs) == 1:
        return structs[0]
    sums: dict[str, Any] = {}
    for name in structs[0].__struct_fields__:
        values = [getattr(struct, name) for struct in structs]
        known = [value for value in values if value is not None]
        if not known:
            sums[name] = None
        elif isinstance(known[0], msgspec.Struct):
            sums[name] = added(known)
        elif isinstance(known[0], tuple):
            sums[name] = tuple(sorted({each for names in known for each in names}))
        else:
            sums[name] = sum(known)
    return type(structs[0])(**sums)


class StepCharges(msgspec.Struct, frozen=True):
    """A step's seconds, divided: `ticks` has one entry per row of the plan, 0 for a row whose
    sequence ended while it ran. `recomputed_s` and `rejected_s` are parts of them, `unclaimed_s` is
    not.

    Attributes:
        prices: What each unit of a row was charged, in ticks.
        num_ticks: The sum over all rows, grouped ones included (`core.decode_group`).
    """

    ticks: tuple[int, ...]
    prices: UnitTicks
    num_ticks: int
    recomputed_s: float
    rejected_s: float
    unclaimed_s: float


class UnitTicks(PerUnit[int], frozen=True, gc=False):
    """What each unit of a `StepLoad` is charged in one step, in ticks.

    An integer for each unit, so charges can be added in any order, and those of many steps or rows
    in one go.
    """

    @staticmethod
    def divide(seconds: float, prices: UnitPrices, load: StepLoad) -> UnitTicks:
        """Such that `load` is charged `seconds`, but for rounding, in proportion to `prices`."""
        price = prices.of(load)
        if not price > 0.0:
            prices, price = UnitPrices(token=1.0), float(max(1, load.num_tokens))
        scale = seconds * TICKS_PER_S / price
        return UnitTicks(
            int(scale * prices.token),
            int(scale * prices.row),
            int(scale * prices.kv_token),
            int(scale * prices.pair),
            int(scale * prices.score),
            int(scale * prices.logits_row),
            int(scale * prices.grammar_row),
            int(scale * prices.logprobs_row),
            int(scale * prices.adapter_row),
        )

    @property
    def decode_row(self) -> int:
        """For a plain decode row: `decode_context` for each position of its context comes to it."""
        return self.token + self.row + self.logits_row

    @property
    def decode_context(self) -> int:
        """For a position that a decode row attends to."""
        return self.kv_token + self.pair

    def of_rows(self, loads: SequenceOf[StepLoad], step: StepLoad) -> list[int]:
        """The charge of each row of a step with the load `step`."""
        rare = step.num_scored, step.num_grammar_rows, step.num_logprobs_rows, step.num_adapter_rows
        if any(rare):
            return [self.of(load) for load in loads]
        token, row, kv_token, pair = self.token, self.row, self.kv_token, self.pair
        logits_row = self.logits_row
        ticks: list[int] = []
        for load in loads:  # without the units that are 0
            ticks.append(
                token * load.num_tokens
                + row
                + kv_token * load.num_kv_tokens
                + pair * load.num_pairs
                + logits_row * load.num_logits_rows
            )
        return ticks


def with_unloaded(
    timings: SequenceTimings, cost_model: CostModel, chunk: int, num_stages: int = 1
) -> SequenceTimings:
    """The timings with the predicted seconds of the same tokens without any other request.

    The prompt, with the outputs that came with the request, from its cached prefix on, in steps of
    at most `chunk` tokens; then one step per further token, each priced as the middle one. A step
    passes all stages of a pipeline.
    """
    cached, num_outputs = timings.num_cached_tokens, timings.num_new_tokens
    num_known = timings.num_prompt_tokens + timings.num_resumed_tokens
    num_tokens = num_known - cached
    first = cost_model.predict(StepLoad.of_span(cached, min(num_tokens, chunk)))
    middle = num_known + num_outputs // 2
    decode = cost_model.predict(StepLoad.of_span(middle, 1, num_logits_rows=1))
    num_decodes = max(0, num_outputs - 1)
    return replace(
        timings,
        unloaded_prefill_s=prompt_latency_s(cost_model, cached, num_tokens, chunk, num_stages),
        unloaded_decode_s=num_decodes * num_stages * decode.seconds,
        is_extrapolated=first.is_extrapolated or (num_decodes > 0 and decode.is_extrapolated),
    )


class StateAfterStep(msgspec.Struct, frozen=True):
    """What is left after a commit."""

    num_free_blocks: int
    num_waiting: int
    num_running: int


class Accounts:
    """The charges and counts of a scheduler, which owns it, and until when its time is accounted
    for. What sequences are charged counts in `order`, where it is one in turns.

    Attributes:
        totals: The counts.
        has_begun: Whether a step was planned; the wall time begins with the first.
        since_s: When that was, then when the last step was committed.
    """

    def __init__(self, config: SchedulerConfig, cost_model: CostModel, order: ServiceOrder) -> None:
        self._config = config
        self._cost_model = cost_model
        self._order = order
        self.totals = Totals()
        self.since_s = 0.0
        self.has_begun = False

    def begin(self, now: float) -> None:
        """The first step is planned."""
        self.has_begun, self.since_s = True, now

    def charge(
        self, step: InFlightStep, result: StepResult, unlisted: StepLoad = _NO_LOAD
    ) -> StepCharges:
        """Divide a step's seconds among its sequences, and add them to these.

        In proportion to the predicted cost of each row; what a step costs once is divided like the
        rest. A row whose sequence ended while it ran is charged to the others. The part of a row's
        charge for positions that an earlier residency computed, by tokens, is the sequence's
        `recomputed_s`; the part for drafts that were rejected is its `rejected_s`.

        `unlisted` is the load of the rows that the plan does not list and whose sequences have not
        ended. These are charged by their group.
        """
        rows, seconds = step.rows, result.seconds
        ended: list[bool] = []
        for entry in rows:
            ended.append(entry.sequence.state is SequenceState.FINISHED)
        some_ended, alive = any(ended), step.load
        if some_ended or unlisted.num_rows < step.plan.num_grouped_rows:
            loads = [entry.load for entry, is_over in zip(rows, ended, strict=True) if not is_over]
            alive = sum(loads, start=unlisted)
        prices = UnitTicks.divide(seconds, self._cost_model.unit_prices(step.load), alive)
        charged = prices.of_rows(list(map(_LOAD, rows)), step.load)
        if some_ended:
            charged = [0 if is_over else one for one, is_over in zip(charged, ended, strict=True)]
        recomputed = rejected = 0
        for entry, output, ticks in zip(rows, result.outputs, charged, strict=True):
            row, sequence, own = entry.row, entry.sequence, ticks
            if entry.residency.recompute_end > row.start:
                num_again = min(row.end, entry.residency.recompute_end) - row.start
                again = ticks * num_again // row.num_tokens
                sequence.charges.recomputed_ticks += again
                recomputed += again
                own -= again
            if row.num_drafts:
                num_rejected = row.num_drafts + 1 - max(1, len(output.token_ids))
                wasted = own * num_rejected // row.num_tokens
                sequence.charges.rejected_ticks += wasted
                rejected += wasted
                own -= wasted
            sequence.charges.device_ticks += own
        if self._order.takes_turns:
            for entry, ticks in zip(rows, charged, strict=True):
                if ticks:  # a sequence that has ended is charged nothing
                    self._order.charged(entry.sequence, ticks / TICKS_PER_S)
        return StepCharges(
            tuple(charged),
            prices,
            sum(charged) + (prices.of(unlisted) if unlisted.num_rows else 0),
            recomputed / TICKS_PER_S,
            rejected / TICKS_PER_S,
            0.0 if alive.num_rows else seconds,
        )

    def with_unloaded(self, timings: SequenceTimings) -> SequenceTimings:
        """The timings with the predicted seconds of the same tokens without any other request."""
        chunk, num_stages = self._config.max_num_batched_tokens, self._config.num_stages
        return with_unloaded(timings, self._cost_model, chunk, num_stages)

    def step_committed(
        self,
        step: InFlightStep,
        result: StepResult,
        charges: StepCharges,
        now: float,
        left: StateAfterStep,
    ) -> StepRecord:
        """Count a step; returns its line of the step log."""
        totals, since_s = self.totals, self.since_s
        totals.add_step(result.seconds, now - since_s, charges)
        self.since_s = now
        bubble_s = 0.0
        if result.stage_s:
            bubble_s = now - max(since_s, step.planned_at_s) - result.seconds
            totals.bubble_s += bubble_s
        decode, prefill = step.decode_load, step.prefill_load
        num_drafts = num_accepted = 0
        prefills: list[PrefillCharge] = []
        prefill_ticks = 0
        for entry, output, ticks in zip(step.rows, result.outputs, charges.ticks, strict=True):
            row = entry.row
            if row.num_drafts:
                num_drafts += row.num_drafts
                num_accepted += max(0, len(output.token_ids) - 1)
            if row.phase is Phase.PREFILL:
                name = entry.sequence.request.request_id
                prefills.append(PrefillCharge(name, row.num_tokens, ticks / TICKS_PER_S))
                prefill_ticks += ticks
        totals.num_prefill_tokens += prefill.num_tokens
        totals.num_proposer_failures = result.num_proposer_failures
        totals.exchange_s += result.exchange_s
        totals.num_drafts += num_drafts
        totals.num_accepted += num_accepted
        return StepRecord(
            step.plan.step_id,
            step.planned_at_s,
            now,
            result.seconds,
            step.predicted_s,
            num_prefill_rows=prefill.num_rows,
            num_decode_rows=decode.num_rows,
            num_prefill_tokens=prefill.num_tokens,
            num_decode_tokens=decode.num_tokens,
            num_kv_tokens=decode.num_kv_tokens + prefill.num_kv_tokens,
            num_pairs=decode.num_pairs + prefill.num_pairs,
            num_scored=prefill.num_scored,
            num_free_blocks=left.num_free_blocks,
            num_waiting=left.num_waiting,
            num_running=left.num_running,
            num_preemptions=step.num_preemptions,
            decode_s=(charges.num_ticks - prefill_ticks) / TICKS_PER_S,
            prefill_s=prefill_ticks / TICKS_PER_S,
            prefills=tuple(prefills),
            num_drafts=num_drafts,
            num_accepted=num_accepted,
            exchange_s=result.exchange_s,
            stage_s=result.stage_s,
            bubble_s=bubble_s,
        )

    def stats(
        self,
        sequences: Collection[Sequence],
        num_in_flight: int,
        blocks: PoolStats,
        adapters: AdapterStats | None,
        kv_tier: KVTierStats | None = None,
    ) -> SchedulerStats:
        """The state of all live sequences, and a copy of the counts."""
        states = Counter(sequence.state for sequence in sequences if not sequence.is_paused)
        return SchedulerStats(
            num_waiting=states[SequenceState.WAITING],
            num_running=states[SequenceState.RUNNING],
            num_preempted=states[SequenceState.PREEMPTED],
            num_in_flight=num_in_flight,
            blocks=blocks,
            totals=replace(self.totals),
            num_paused=len(sequences) - states.total(),
            adapters=adapters,
            kv_tier=kv_tier,
        )


def decode_record(
    step_id: int,
    planned_at_s: float,
    committed_at_s: float,
    seconds: float,
    predicted_s: float,
    load: StepLoad,
    prices: UnitTicks,
    *,
    num_free_blocks: int,
    num_running: int,
) -> StepRecord:
    """The record of a step that had only decode rows, of which none ended early."""
    return StepRecord(
        step_id,
        planned_at_s,
        committed_at_s,
        seconds,
        predicted_s,
        num_prefill_rows=0,
        num_decode_rows=load.num_rows,
        num_prefill_tokens=0,
        num_decode_tokens=load.num_tokens,
        num_kv_tokens=load.num_kv_tokens,
        num_pairs=load.num_pairs,
        num_scored=0,
        num_free_blocks=num_free_blocks,
        num_waiting=0,
        num_running=num_running,
        num_preemptions=0,
        decode_s=prices.of(load) / TICKS_PER_S,
        prefill_s=0.0,
    )
