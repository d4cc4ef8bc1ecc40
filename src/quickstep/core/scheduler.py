"""Continuous batching: which sequence computes what in the next step, and the result of a step.

    add ──> waiting ──plan──> running ──commit──> finished
               ^                 │                   ^
               └──── preempted <─┘   abort, expire, fail, from anywhere at any moment
    pause, resume: in any state; a paused sequence gets no rows

Two drivers call it, the engine in real time and the simulator on a virtual clock; time comes in as
`now`. Up to `pipeline_depth` plans are in flight and are committed in order. Overlap is simple
because executors run plans in order: blocks can be reused while steps that use them still run, and
a prompt block is a prefix hit for others as soon as its computation is *planned*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

from msgspec.structs import replace

from quickstep.config import SchedulerConfig
from quickstep.core.accounting import (
    Accounts,
    SchedulerStats,
    StateAfterStep,
    StepCharges,
)
from quickstep.core.admission import AdmissionControl, AdmissionState, SequenceLimits
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.drafts.control import DraftControl
from quickstep.core.policies import Policy
from quickstep.core.queues import (
    DeadlineQueue,
    Due,
    RunningBatch,
    WaitingQueue,
    check_queues,
)
from quickstep.core.resources.adapter_residency import AdapterOrders
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.resources.held import HeldResources
from quickstep.core.resources.resource import Resource
from quickstep.core.sequence import Sequence, SequenceState
from quickstep.core.step import (
    FlightRow,
    InFlightStep,
    RowFailures,
    StepDraft,
    StepsInFlight,
    all_failed,
    invalidated_by,
    pending_tokens,
    row_failures,
)
from quickstep.core.step_budget import StepBudget, last_step_id
from quickstep.errors import EngineError, RequestError
from quickstep.types import (
    FinishReason,
    Phase,
    Request,
    RowOutput,
    SequenceOutput,
    SequenceTimings,
    StepOutcome,
    StepPlan,
    StepResult,
)

_NO_LOAD = StepLoad()


class Scheduler:
    """Owns every sequence, the block pool and the queue. Not thread-safe: one driver calls it.

    `more_resources`: What sequences have to hold to run, in addition to a slot, KV blocks and the
    place of their adapter.

    Attributes:
        max_in_flight: Plans that may be in flight.
        held: The resources; a driver carries out what its adapters, transfers and tiers order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVBlockPool,
        policy: Policy,
        cost_model: CostModel,
        more_resources: Iterable[Resource] = (),
    ) -> None:
        self._config = config
        self._pool = pool
        self._policy = policy
        self._cost_model = cost_model
        self._order = policy.order
        self._requests: dict[str, list[Sequence]] = {}  # live sequences of each request
        self._in_flight = StepsInFlight()
        self.max_in_flight = config.num_in_flight
        limits = SequenceLimits.of(config, pool.num_blocks * pool.block_size)
        self.held = HeldResources(
            config,
            pool,
            policy.order,
            cost_model,
            self._in_flight,
            limits.blocks_of_longest(pool.block_size),
            self._expected_growth,
            more_resources,
        )
        self._slots, self._blocks = self.held.slots, self.held.blocks
        self._waiting = WaitingQueue(self._order, self.held.gates, config.max_waiting)
        self._batch = RunningBatch(self._order)
        self._deadlines = DeadlineQueue(self._order.relegates)
        self._admission = AdmissionControl(
            config, limits, cost_model, self._order, self._waiting, self._batch, self._slots
        )
        self._budget = StepBudget(
            config, policy, cost_model, self._waiting, self._batch, self.held.fits
        )
        self._drafts = DraftControl(config.num_speculative_tokens if config.use_kv_cache else 0)
        self._place_rows = {
            Phase.PREFILL: self._place_prefills,
            Phase.DECODE: self._place_decodes if config.use_kv_cache else self._recompute_decodes,
        }
        self._num_arrivals = 0
        self._accounts = Accounts(config, cost_model, policy.order)
        self._totals = self._accounts.totals

    # -- requests come and go ---------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; a cached prefix is a multiple of it."""
        return self._pool.block_size

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Those of them that no sequence uses."""
        return self._pool.num_free

    def add(self, request: Request, now: float) -> None:
        """Queue the `n` sequences of a request.

        Raises:
            RequestError: It can never be served, or not in time, its id is in use, or the queue is
                full.
        """
        self._admission.limits.check(request)
        if (name := request.request_id) in self._requests:
            raise RequestError(f"request_id {name!r} is in use; choose another", param="request_id")
        self.held.check_request(request)
        self._admission.check_share(request, now)
        sequences = self._admission.sequences(request, self._num_arrivals, now)
        self._admission.check_queue(sequences[0], len(sequences), now)
        # what was refused until here has changed nothing
        self.held.requested(request, now)
        self._admission.accepted(request, sequences[0].prediction, now)
        self._num_arrivals += len(sequences)
        for sequence in sequences:
            self._order.added(sequence)
            self._waiting.push(sequence, now)
            self._deadlines.push(sequence)
        self._requests[name] = sequences
        self._totals.num_requests += 1

    def abort(
        self,
        request_id: str,
        now: float,
        reason: FinishReason = FinishReason.ABORTED,
        index: int | None = None,
    ) -> tuple[SequenceOutput, ...]:
        """End a request's sequences, or the one with `index`; () if none of them lives."""
        return tuple(
            self._finish(sequence, reason, now)
            for sequence in list(self._requests.get(request_id, ()))
            if index is None or sequence.index == index
        )

    def expire(self, now: float) -> tuple[SequenceOutput, ...]:
        """End the sequences whose deadline has passed, those that wait and cannot meet it, and
        those that cannot get a resource any more.
        """
        outputs: list[SequenceOutput] = []
        for sequence, due in self._deadlines.pop_due(now) if self._deadlines.heap else ():
            if due is Due.EXPIRE:
                outputs.append(self._finish(sequence, FinishReason.DEADLINE, now))
            elif due is Due.SHED and sequence.num_cached_tokens is None:
                error = self._admission.too_late(sequence, now)
                outputs.append(self._finish(sequence, FinishReason.SHED, now, str(error)))
            elif (
                due is Due.RELEGATE
                and sequence.state is not SequenceState.RUNNING
                and not self._deadlines.is_later(sequence, now)  # it may have run meanwhile
            ):
                self._waiting.relegate(sequence, now)
        for sequence, why in self.held.lost(self._waiting) if self._waiting.parked_by_key else ():
            outputs.append(self._finish(sequence, FinishReason.ERROR, now, why))
        return tuple(outputs)

    def pause(self, request_id: str, now: float) -> None:
        """Plan nothing of a request until `resume`. It keeps its blocks until others need them."""
        self._totals.num_pauses += request_id in self._requests
        self._set_paused(request_id, True, now)

    def resume(self, request_id: str, now: float) -> None:
        """Resume a paused request. Like `pause`, it accepts any id at any time."""
        self._set_paused(request_id, False, now)

    def _set_paused(self, request_id: str, is_paused: bool, now: float) -> None:
        for sequence in self._requests.get(request_id, ()):
            runs = sequence.state is SequenceState.RUNNING
            queue: RunningBatch | WaitingQueue = self._batch if runs else self._waiting
            queue.set_paused(sequence, is_paused, now)

    def reset_prefix_cache(self) -> int:
        """Free every cached block that no sequence uses; returns how many there were."""
        return self._pool.forget_cached()

    # -- the next step ----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed until something is committed."""
        if len(self._in_flight) >= self.max_in_flight:
            return None
        draft = StepDraft(self._config.max_num_batched_tokens)
        num_preemptions = self._totals.num_preemptions
        if self._waiting.num:
            self.held.prepare(self._waiting, self._batch, now, self._preempt)
        num_rows = self._batch.num_active or self._waiting.num_active
        self._drafts.begin_step(min(num_rows, self._config.max_num_seqs))
        draft.may_request_drafts = self._drafts.may_request
        if self._waiting.num:
            self._preempt_for_waiting(draft, now)
        if self._waiting.num or self._batch.prompts:
            for phase in self._policy.phases:
                if (budget := self._budget.of_phase(phase, draft, now)) > 0:
                    self._place_rows[phase](draft, budget, now)
        else:
            self._place_rows[Phase.DECODE](draft, draft.num_tokens_left, now)
        if not (draft.decode or draft.prefill or draft.grouped_load.num_rows):
            return None
        draft.num_preemptions = self._totals.num_preemptions - num_preemptions
        released = self._slots.take_released() if self._slots.released else ()
        step = draft.issue(self._in_flight.next_id, released, now, self._cost_model, self._drafts)
        self._in_flight.next_id += 1
        self._in_flight.append(step)
        if not self._accounts.has_begun:
            self._accounts.begin(now)
        return step.plan

    def _place_decodes(self, draft: StepDraft, budget: int, now: float) -> None:
        """Add a row for each running sequence that has its prompt; those of tenants which hold more
        than their part come last.
        """
        turn = self._budget.decode_turn(draft, now)
        sequences, over_share, max_rows = turn.sequences, turn.over_share, turn.max_rows
        num_drafts = self._budget.of_drafts(
            draft, sequences, over_share, budget, self._in_flight.next_id, now
        )
        budget = min(budget, draft.num_tokens_left - draft.min_prefill)
        if len(sequences) + len(over_share) > budget:  # more rows than tokens: in turn
            sequences.sort(key=last_step_id)
        for sequence in sequences:
            if budget < 1 or not max_rows:
                return
            most = budget
            if num_drafts is not None:
                most = min(budget, 1 + num_drafts.get(sequence.sequence_id, 0))
            if num_tokens := self._place_decode(draft, sequence, most, now):
                budget -= num_tokens
                max_rows -= 1
        if not over_share:
            return
        # Those first that had no row for longest. They get no drafts.
        prefill = self._budget.limit_over_share(draft, over_share, now)
        for sequence in sorted(over_share, key=last_step_id)[:budget]:
            if not max_rows or not self._budget.has_time_for(draft, sequence, prefill):
                return
            max_rows -= bool(self._place_decode(draft, sequence, 1, now))

    def _place_decode(self, draft: StepDraft, sequence: Sequence, most: int, now: float) -> int:
        """Add a row for the next token of a sequence and its drafts, `most` tokens at most; returns
        how many, 0 if it gets none in this step.
        """
        residency = sequence.residency
        if sequence.last_step_id == self._in_flight.next_id or not sequence.can_decode:
            return 0
        has_room = residency.planned < residency.capacity  # the usual case
        if not has_room and not self._free_blocks_for(sequence, now):
            return 0
        drafts: tuple[int, ...] = ()
        if sequence.drafts.token_ids:
            most = min(most - 1, self._blocks.num_drafts_that_fit(sequence))
            drafts = sequence.drafts.token_ids[: self._drafts.num_for_row(sequence, most)]
        new_block_ids: tuple[int, ...] = ()
        if residency.planned + 1 + len(drafts) > residency.capacity:
            new_block_ids = self._blocks.grow(sequence, 1 + len(drafts))
        self._place(draft, sequence, 1, new_block_ids, drafts)
        return 1 + len(drafts)

    def _recompute_decodes(self, draft: StepDraft, budget: int, now: float) -> None:
        """Without a KV cache: the next token of a sequence needs all its tokens again."""
        for sequence in sorted(self._batch, key=last_step_id):
            is_due = sequence.can_decode and not sequence.num_pending
            if not is_due or not budget:
                continue
            if self._free_blocks_for(sequence, now):
                new_block_ids = self._blocks.grow(sequence)
                self._batch.restart(sequence)
                num_tokens = min(len(sequence.token_ids), budget)
                self._place(draft, sequence, num_tokens, new_block_ids)
                budget -= num_tokens

    def _place_prefills(self, draft: StepDraft, budget: int, now: float) -> None:
        """Continue prompts that are partly computed and admit others, in the order of service."""
        for sequence in sorted(self._batch.prefilling, key=self._order.key):
            budget = self._admit_waiting(draft, budget, now, before=sequence)
            num_tokens = min(sequence.num_prefill_left, budget)
            if num_tokens > 0:
                start = sequence.residency.planned
                num_tokens = min(num_tokens, self._budget.of_prompt(draft, sequence, start, now))
            if num_tokens > 0:
                self._place(draft, sequence, num_tokens, ())
                budget -= num_tokens
        self._admit_waiting(draft, budget, now)

    def _admit_waiting(
        self, draft: StepDraft, budget: int, now: float, before: Sequence | None = None
    ) -> int:
        """Admit waiting sequences, those that are served before another one if that is given;
        returns the rest of the budget.
        """
        while budget > 0 and draft.may_admit:
            sequence = self._waiting.head
            # A preempted sequence waits for its tokens in flight: admission needs all of them.
            if sequence is None or sequence.num_pending:
                return budget
            if before is not None and self._order.key(sequence) > self._order.key(before):
                return budget
            if not self._budget.may_admit(draft, now):
                return budget
            if not self.held.fits(sequence):
                return budget
            start = self._blocks.num_hit_tokens(sequence)
            affordable = self._budget.of_prompt(draft, sequence, start, now)
            if affordable < 1:
                return budget
            budget -= self._admit(draft, sequence, min(budget, affordable), now)
        return budget

    def _admit(self, draft: StepDraft, sequence: Sequence, most: int, now: float) -> int:
        """Move a sequence into the batch and place its first tokens; returns how many."""
        self._waiting.remove(sequence)
        self._admission.admitted(now)
        is_new = sequence.num_cached_tokens is None
        residency = self.held.admit(sequence, now)
        self._batch.admit(sequence, residency, now)
        self._policy.admitted()
        if is_new and not sequence.request.is_continuation:  # a beam's prompt was counted before
            self._totals.prefix_query_tokens += sequence.prompt_len
            self._totals.prefix_hit_tokens += sequence.num_cached_tokens or 0
        draft.admit(sequence)
        num_tokens = min(residency.prefill_end - residency.planned, most)
        self._place(draft, sequence, num_tokens, tuple(residency.blocks))
        return num_tokens

    def _place(
        self,
        draft: StepDraft,
        sequence: Sequence,
        num_tokens: int,
        new_block_ids: tuple[int, ...],
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Add a row to the draft; from now on others may share the blocks that it fills."""
        residency = sequence.residency
        may_request = draft.may_request_drafts and sequence.request.speculation
        next_drafts = self._drafts.num_next(sequence) if may_request else (0, 0)
        row = sequence.row(num_tokens, new_block_ids, drafts, *next_drafts)
        sequence.drafts.token_ids = ()
        residency.planned = end = row.start + row.num_tokens
        awaits_drafts = bool(drafts) or row.num_next_drafts > 0 or row.num_next_forced > 0
        residency.awaits_drafts = awaits_drafts
        if drafts:
            residency.drafted_end = max(residency.drafted_end, end)
        residency.pending += row.emits
        sequence.last_step_id = self._in_flight.next_id
        load = StepLoad.of_row(row, sequence.request.sampling)
        draft.may_speculate |= sequence.request.speculation
        entry = FlightRow(sequence, residency, row, load, awaits_drafts)
        draft.num_tokens_left -= row.num_tokens
        if row.phase is Phase.DECODE:
            draft.decode.append(entry)
        else:
            draft.prefill.append(entry)
            self._batch.prefill_planned(sequence)
        if residency.planned >= residency.registers_at:
            self._blocks.register(sequence)

    # -- preemption -------------------------------------------------------------------------------

    def _preempt_for_waiting(self, draft: StepDraft, now: float) -> None:
        """Preempt paused sequences and those of lower priority for the head of the queue."""
        if not self._budget.may_admit(draft, now):
            return
        head = self._waiting.head
        if head is not None and not head.num_pending:
            for victim in self._batch.victims_for(head, partial(self.held.fits_without, head)):
                self._preempt(victim, now)

    def _free_blocks_for(self, sequence: Sequence, now: float) -> bool:
        """Preempt sequences of lower rank until `sequence` can grow; False if it must wait."""
        while not self._blocks.can_grow(sequence):
            victim = self._batch.lowest_victim(sequence, self._in_flight.next_id)
            if victim is None:
                return False
            self._preempt(victim, now)
            self._blocks.preempted_to_grow()
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._leave_batch(sequence)
        sequence.preempt(now)
        self._waiting.push(sequence, now)
        self._deadlines.push_relegation(sequence)
        self._totals.num_preemptions += 1

    def _leave_batch(self, sequence: Sequence) -> None:
        self._batch.remove(sequence)
        self.held.release(sequence)

    def _expected_growth(self) -> int:
        """How many tokens the running sequences are expected to generate from now on."""
        return self._admission.expected_growth()

    # -- what sequences wait for comes, or does not -----------------------------------------------

    def register_adapter(
        self, adapter_id: str, num_bytes: int, is_pinned: bool = False, is_resident: bool = False
    ) -> None:
        """Let requests name an adapter, which is loaded when one is queued, unless it is in memory
        already (`is_resident`); a pinned one stays there, until it is registered without.
        """
        if self.held.adapters is not None:
            self.held.adapters.residency.register(
                adapter_id, num_bytes, is_pinned=is_pinned, is_resident=is_resident
            )

    def retire_adapter(self, adapter_id: str) -> bool:
        """No new request will name the adapter. Returns whether it is forgotten: if sequences or
        steps in flight use it, it can still be loaded for them, and this has to be called again.
        """
        return self.held.adapters is None or self.held.adapters.retire(adapter_id)

    def take_adapter_orders(self) -> AdapterOrders | None:
        """What `plan` wants to be loaded and freed; None for nothing. The driver frees first, and
        calls `adapter_loaded` or `adapter_failed` for each load.
        """
        return None if self.held.adapters is None else self.held.adapters.residency.take_orders()

    def adapter_loaded(self, adapter_id: str, now: float) -> bool:
        """A load has ended well; False if nothing wants the adapter now."""
        if self.held.adapters is None or not self.held.adapters.residency.finish_load(adapter_id):
            return False
        self.arrived(adapter_id, now)
        return True

    def adapter_failed(
        self, adapter_id: str, reason: str, now: float
    ) -> tuple[SequenceOutput, ...]:
        """A load has failed: end the sequences that wait for it with ERROR."""
        if self.held.adapters is not None:
            self.held.adapters.residency.fail_load(adapter_id)
        parked = self._waiting.parked(adapter_id)
        return tuple(self._finish(sequence, FinishReason.ERROR, now, reason) for sequence in parked)

    def arrived(self, key: str, now: float) -> None:
        """What sequences wait for under `key` has come, as far as it will: they may be admitted."""
        self._waiting.sort_again(key, now)

    # -- the result of a step ---------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepOutcome:
        """Take the result of the oldest step in flight.

        Raises:
            EngineError: The result does not belong to the plan.
        """
        step = self._oldest(plan)
        if result.step_id != plan.step_id or len(result.outputs) != len(plan.rows):
            raise EngineError(f"step {plan.step_id} got a result of another shape or step")
        failures = row_failures(plan, result)
        unlisted = self._unlisted_load() if plan.num_grouped_rows else _NO_LOAD
        charges = self._accounts.charge(step, result, unlisted)
        self._cost_model.observe(step.load, result.seconds)
        outputs = self._end_failed(step, failures, now) if failures else []
        self._in_flight.popleft()
        outputs += self._receive_rows(step, result, charges, now)
        self._blocks.step_ended()
        since_s = self._accounts.since_s
        left = StateAfterStep(self._pool.num_free, self._waiting.num, len(self._batch))
        record = self._accounts.step_committed(step, result, charges, now, left)
        if step.draft_mode is not None:
            load, costs = step.decode_load, self._cost_model
            self._drafts.learn(step.draft_mode, load, record, since_s, now, costs)
        return StepOutcome(tuple(outputs), record)

    def fail(self, plan: StepPlan, reason: str, now: float) -> tuple[SequenceOutput, ...]:
        """Drop the oldest step in flight: the executor raised. Its sequences end with ERROR.

        Other sequences which share blocks that the step should have filled are recomputed.
        """
        step = self._oldest(plan)
        outputs = self._end_failed(step, all_failed(step, reason), now)
        self._in_flight.popleft()
        return tuple(outputs)

    def _oldest(self, plan: StepPlan) -> InFlightStep:
        if not self._in_flight or self._in_flight[0].plan.step_id != plan.step_id:
            raise EngineError(f"step {plan.step_id} is not the oldest in flight")
        return self._in_flight[0]

    def _end_failed(
        self, step: InFlightStep, failures: RowFailures, now: float
    ) -> list[SequenceOutput]:
        """End the sequences of failed rows; preempt those that read their KV, to recompute it."""
        failed = [step.rows[index] for index in sorted(failures)]
        rows = [entry for other in self._in_flight for entry in other.rows]
        self._pool.forget(invalidated_by(failed, rows, self._pool.block_size))
        outputs: list[SequenceOutput] = []
        for index, failure in sorted(failures.items()):
            sequence = step.rows[index].sequence
            if sequence.state is not SequenceState.FINISHED:
                outputs.append(self._finish(sequence, failure.finish_reason, now, failure.reason))
        for sequence in self._batch:
            if sequence.residency.invalidated:
                self._preempt(sequence, now)
        return outputs

    def _receive_rows(
        self, step: InFlightStep, result: StepResult, charges: StepCharges, now: float
    ) -> list[SequenceOutput]:
        """Take the outputs of a step's rows; returns what is to be delivered."""
        outputs: list[SequenceOutput] = []
        for entry, output in zip(step.rows, result.outputs, strict=True):
            if (new := self._receive(entry, output, now)) is not None:
                outputs.append(new)
        return outputs

    def _receive(self, entry: FlightRow, output: RowOutput, now: float) -> SequenceOutput | None:
        """Append a row's output to its sequence; returns what is to be delivered."""
        sequence, residency = entry.sequence, entry.residency
        if sequence.state is SequenceState.FINISHED or residency.invalidated:
            return None
        residency.pending -= entry.row.emits
        if entry.row.emits and len(sequence.token_ids) == sequence.prompt_len:
            self._admission.first_token(sequence, now)
        if entry.awaits_drafts:
            self._drafts.receive(sequence, residency, entry.row, output)
        new, reason = sequence.receive(entry.row, output, now)
        self._totals.num_output_tokens += len(new.token_ids)
        if residency.planned >= residency.registers_at and sequence.state is SequenceState.RUNNING:
            self._blocks.register(sequence)
        if sequence.request.handover is not None:
            new = self._handed_over(entry, new, now)
        if reason is not None:
            return self._finish(sequence, reason, now, new=new)
        is_empty = not (new.token_ids or new.prompt_logprobs or new.progress)
        return None if is_empty else new

    def _handed_over(self, entry: FlightRow, new: SequenceOutput, now: float) -> SequenceOutput:
        """The output of a sequence that another engine continues after its first token."""
        if self.held.transfers is not None:
            self.held.transfers.computed(entry)
        if not new.token_ids:
            return new
        return replace(new, timings=self._accounts.with_unloaded(entry.sequence.timings(now)))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        error: str = "",
        new: SequenceOutput | None = None,
    ) -> SequenceOutput:
        """End a sequence in any state and free its slot and blocks at once."""
        if sequence.state is SequenceState.RUNNING:
            self._leave_batch(sequence)
        else:
            self._waiting.remove(sequence)
        self._order.ended(sequence)
        self.held.ended(sequence, now)
        self._admission.ended(sequence, reason)
        timings = self._accounts.with_unloaded(sequence.finish(now))
        name = sequence.request.request_id
        new = new or SequenceOutput(name, sequence.index)
        self._requests[name].remove(sequence)
        if not self._requests[name]:
            del self._requests[name]
        stopped = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        return replace(
            new,
            finish_reason=reason,
            stop_token_id=new.token_ids[-1] if stopped and new.token_ids else None,
            timings=timings,
            error=error,
        )

    # -- queries ----------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether there is a live sequence or a step in flight."""
        return bool(self._requests or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    def is_held(self) -> bool:
        """Whether all live sequences are paused, so that only `resume` leads to more steps."""
        return not (self._batch.num_active or self._waiting.num_active)

    def wakeup(self, now: float) -> float | None:
        """When to call `expire` and `plan` again at the latest, if no event comes before."""
        is_full = len(self._in_flight) >= self.max_in_flight  # then `plan` returns None
        due_s = None if is_full else self._budget.wakeup(now)
        if self._waiting.parked_by_key and self.held.lost(self._waiting):
            due_s = now if due_s is None else min(now, due_s)
        deadline_s = self._deadlines.next_s()
        if due_s is None or deadline_s is None:  # the usual case
            return due_s if deadline_s is None else deadline_s
        return min(due_s, deadline_s)

    def stats(self) -> SchedulerStats:
        """The current state, and totals since the start."""
        adapters = None
        if self.held.adapters is not None:
            adapters = self.held.adapters.stats(self._waiting, self._batch)
        sequences = (*self._batch, *self._waiting)
        num_in_flight = len(self._in_flight)
        kv_tier = None if self.held.tiers is None else self.held.tiers.stats()
        return self._accounts.stats(sequences, num_in_flight, self._pool.stats(), adapters, kv_tier)

    def admission_state(self, now: float) -> AdmissionState:
        """What decides whether one more request may queue, with the levels of all sequences."""
        return self._admission.state(now)

    def timings(self, request_id: str, now: float) -> dict[int, SequenceTimings]:
        """What the live sequences of a request spent their time on so far, by index."""
        return {
            sequence.index: self._accounts.with_unloaded(sequence.timings(now))
            for sequence in self._requests.get(request_id, ())
        }

    def check(self) -> None:
        """Raise AssertionError unless all parts of the state agree: for tests, after any call."""
        self.held.check(self._batch)
        for sequence in self._waiting:
            self._blocks.check_hits(sequence)
        check_queues(self._batch, self._waiting, self._requests.values(), self._pending_tokens())
        assert len(self._in_flight) <= self.max_in_flight, "too many steps in flight"

    def _unlisted_load(self) -> StepLoad:
        """Of the rows of a step that are not listed in its plan, and whose sequences live: the
        engine lists all, `sim.grouped_scheduler` does not.
        """
        return _NO_LOAD

    def _pending_tokens(self) -> Counter[str]:
        """How many tokens the steps in flight will emit, by sequence id."""
        return pending_tokens(self._in_flight)
