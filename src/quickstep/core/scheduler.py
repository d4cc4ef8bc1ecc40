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

from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from itertools import chain

import msgspec
from msgspec.structs import replace

from quickstep.config import SchedulerConfig
from quickstep.core.accounting import (
    AdapterStats,
    SchedulerStats,
    Totals,
    UnitTicks,
    charge,
    decode_record,
    step_record,
    with_unloaded,
)
from quickstep.core.adapter_residency import (
    AdapterOrders,
    AdapterResidency,
    AdapterState,
    AdapterUse,
)
from quickstep.core.admission import AdmissionState, LevelCounts, WaitEstimate
from quickstep.core.block_pool import KVBlockPool
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.decode_group import DecodeGroup, DecodeSteps
from quickstep.core.policies import Policy, StepView
from quickstep.core.queues import Deadlines, Due, RunningBatch, WaitingQueue
from quickstep.core.sequence import TICKS_PER_S, Sequence, SequenceState
from quickstep.core.service_order import account_of
from quickstep.core.speculation import DraftControl
from quickstep.core.step import (
    FlightRow,
    InFlightStep,
    RowFailures,
    StepDraft,
    all_failed,
    invalidated_by,
    pending_tokens,
    row_failures,
)
from quickstep.errors import (
    EngineError,
    FirstTokenTooLate,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from quickstep.types import (
    FinishReason,
    Phase,
    Request,
    RequestClass,
    RowOutput,
    SequenceOutput,
    SequenceTimings,
    StepOutcome,
    StepPlan,
    StepRecord,
    StepResult,
)

__all__ = ["Scheduler", "SequenceLimits"]

# The expected outputs of a request that may end early: a running mean, and its gain per end.
_FIRST_MEAN_OUTPUTS = 256.0
_MEAN_GAIN = 0.05
_NATURAL_ENDS = (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING)
# Part of the expected growth that admission leaves free: after a preemption, per step, and ignored.
_FIRST_RESERVE = 0.25
_RESERVE_DECAY = 0.995
_LEAST_RESERVE = 0.01
_LEAST_PREFILL = 16  # tokens of a step that more decode rows than it has tokens leave
_SHARE_OF_FREE = 8.0  # of the free places of the queue, for an account of weight 1
_MAX_LEVELS = 32  # of priority, in the published state


class SequenceLimits(msgspec.Struct, frozen=True):
    """Sizes that a sequence must keep, in tokens; requests are checked when they are added.

    Everything here is known beforehand, so that an admitted request can always finish: any single
    sequence fits the pool at its longest.

    Attributes:
        max_model_len: Longest sequence the engine was started for.
        pool_tokens: Tokens that the KV pool holds.
        max_num_seqs: Most resident sequences.
        max_waiting: Queued sequences beyond which requests are refused; None for no limit.
    """

    max_model_len: int
    pool_tokens: int
    max_num_seqs: int
    max_waiting: int | None

    @staticmethod
    def of(config: SchedulerConfig, pool_tokens: int) -> SequenceLimits:
        """The limits of a scheduler."""
        return SequenceLimits(
            config.max_model_len, pool_tokens, config.max_num_seqs, config.max_waiting
        )

    def max_outputs(self, prompt_len: int) -> int:
        """Output tokens that fit after a prompt."""
        return min(self.max_model_len, self.pool_tokens) - prompt_len

    def output_limit(self, request: Request) -> int:
        """Output tokens after which a sequence of `request` ends in any case."""
        if request.prompt_only:
            return 0
        max_outputs = self.max_outputs(len(request.prompt_token_ids))
        max_tokens = request.sampling.max_tokens
        return max_outputs if max_tokens is None else min(max_outputs, max_tokens)

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that can never be served."""
        num_tokens = len(request.prompt_token_ids)
        if not num_tokens:
            raise RequestError("prompt has no tokens, it needs at least 1", param="prompt")
        least_outputs = 0 if request.prompt_only else 1
        if num_tokens + least_outputs > self.max_model_len:
            raise PromptTooLong(num_tokens, self.max_model_len, num_outputs=least_outputs)
        if num_tokens + least_outputs > self.pool_tokens:
            raise RequestError(
                f"prompt has {num_tokens} tokens, with {least_outputs} output tokens the KV cache "
                f"holds {self.pool_tokens}; raise --num-blocks or shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        if request.sampling.n > self.max_num_seqs:
            raise RequestError(
                f"n is {request.sampling.n}, at most {self.max_num_seqs} sequences run at once;"
                " lower n or raise --max-num-seqs",
                param="n",
            )


class Scheduler:
    """Owns every sequence, the block pool and the queue. Not thread-safe: one driver calls it."""

    def __init__(
        self, config: SchedulerConfig, pool: KVBlockPool, policy: Policy, cost_model: CostModel
    ) -> None:
        self._config = config
        self._pool = pool
        self._policy = policy
        self._cost_model = cost_model
        self._limits = SequenceLimits.of(config, pool.num_blocks * pool.block_size)
        self._requests: dict[str, list[Sequence]] = {}  # live sequences of each request
        self._order = policy.order
        self._adapters: AdapterResidency | None = None
        if config.max_loras is not None:
            self._adapters = AdapterResidency(config.max_loras, config.lora_bytes)
        is_ready = None if self._adapters is None else self._adapters.is_ready
        self._waiting = WaitingQueue(self._order, is_ready)
        self._batch = RunningBatch(pool, config.max_num_seqs, self._order)
        self._group: DecodeGroup | None = None  # of sequences whose rows are not listed
        self._in_flight: deque[InFlightStep] = deque()
        self._deadlines = Deadlines(self._order.relegates)
        self._wait_estimate = WaitEstimate()
        self._mean_outputs = _FIRST_MEAN_OUTPUTS
        max_drafts = config.num_speculative_tokens if config.use_kv_cache else 0
        self._drafts = DraftControl(max_drafts)
        self._growth_reserve = 0.0  # part of the predicted growth that admission keeps free
        self._is_turn_of_prefill = False  # of the tenants above their part of the batch
        self._num_arrivals = 0
        self._next_step_id = 0
        self._totals = Totals()
        self._accounted_s: float | None = None  # until when: the first plan, then each commit

    def group_decodes(self, token_id: int) -> None:
        """Plan decode rows without listing them, where nothing depends on them: for a driver that
        computes nothing and gets `token_id` for each row, so none of them fails. Call it before the
        first request.
        """
        config = self._config
        if (
            config.num_in_flight == 1
            and config.use_kv_cache
            and not self._drafts.max_drafts
            and not self._order.takes_turns
        ):
            self._group = DecodeGroup(self._pool, token_id)

    # -- requests come and go ---------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; a cached prefix is a multiple of it."""
        return self._pool.block_size

    def add(self, request: Request, now: float) -> None:
        """Queue the `n` sequences of a request.

        Raises:
            RequestError: It can never be served, or not in time, its id is in use, or the queue is
                full.
        """
        self._limits.check(request)
        if (name := request.request_id) in self._requests:
            raise RequestError(f"request_id {name!r} is in use; choose another", param="request_id")
        if self._adapters is not None and request.adapter_id:
            self._check_adapter(self._adapters, request)
        self._check_share(request, now)
        n, service_s, prompt_s = request.sampling.n, *self._predicted_service_s(request)
        charge_s = prompt_s + self._predicted_decode_charge_s(request)
        first_token_s = prompt_s + self._wait_estimate.delay_s(now)
        arrival_s = now if request.received_s is None else min(now, request.received_s)
        sequences = [
            Sequence(
                request,
                index,
                self._num_arrivals + index,
                # the time before a continuation was counted for the request that it continues
                now if request.is_continuation else arrival_s,
                self._order.rank(request, arrival_s, service_s),
                service_s,
                first_token_s,
                self._limits.output_limit(request),
                charge_s,
            )
            for index in range(n)
        ]
        if self._is_limited(request):
            state = self._state_for(request, now)
            state.check_queue(request, n)
            self._check_first_token_in_time(sequences[0], state, now)
        # what was refused until here has changed nothing
        if self._adapters is not None and request.adapter_id:
            self._adapters.count_use(request.adapter_id, now)
        self._wait_estimate.count_prompt(prompt_s)
        self._num_arrivals += n
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

    def _predicted_service_s(self, request: Request) -> tuple[float, float]:
        """How long a sequence of the request takes by itself, and until its first token."""
        num_prompt = len(request.prompt_token_ids)
        prompt = StepLoad.of_span(0, num_prompt, num_logits_rows=1)
        first_token_s = self._cost_model.seconds(prompt)
        num_outputs = self._expected_outputs(request)
        middle = num_prompt + num_outputs // 2
        decode_s = self._cost_model.seconds(StepLoad.of_span(middle, 1, num_logits_rows=1))
        return first_token_s + max(0, num_outputs - 1) * decode_s, first_token_s

    def _predicted_decode_charge_s(self, request: Request) -> float:
        """The device seconds that the outputs of a sequence are charged, in a batch with those that
        are there: each row has its part of what a step costs once.
        """
        num_live = len(self._batch) + len(self._waiting) + request.sampling.n
        num_outputs = self._expected_outputs(request)
        num_rows = min(num_live, self._config.max_num_seqs)
        num_kv = num_rows * (len(request.prompt_token_ids) + num_outputs // 2)
        step = StepLoad(num_rows, num_rows, num_kv, num_kv, num_logits_rows=num_rows)
        return max(0, num_outputs - 1) * self._cost_model.seconds(step) / num_rows

    def _admission_state(self, now: float, num_prompt: float, num_outputs: float) -> AdmissionState:
        """The state for sequences of a size, without the levels: the scheduler knows the place of a
        sequence in the queue.
        """
        is_queued = len(self._waiting) > 0
        return AdmissionState(
            num_waiting=len(self._waiting),
            num_interactive=self._waiting.num_interactive,
            max_waiting=self._limits.max_waiting,
            num_free_slots=self._batch.num_free_slots,
            prompt_s=self._wait_estimate.prompt_s,
            slot_s=self._predicted_slot_s(num_prompt, num_outputs),
            interval_s=self._wait_estimate.interval_s(now) if is_queued else None,
            delay_s=self._wait_estimate.delay_s(now),
        )

    def _state_for(self, request: Request, now: float) -> AdmissionState:
        """The state for sequences of the size of a request."""
        num_prompt, num_outputs = len(request.prompt_token_ids), self._expected_outputs(request)
        return self._admission_state(now, num_prompt, num_outputs)

    def _predicted_slot_s(self, num_prompt: float, num_outputs: float) -> float:
        """How long until a full batch of sequences of a size ends one."""
        num_rows = self._config.max_num_seqs
        num_kv = round(num_rows * (num_prompt + num_outputs / 2))
        step = StepLoad(num_rows, num_rows, num_kv, num_kv, num_logits_rows=num_rows)
        return num_outputs * self._cost_model.seconds(step) / num_rows

    def _levels(self, sequences: Iterable[Sequence]) -> LevelCounts | None:
        """How many there are of each of the first levels; None if levels do not decide."""
        levels = [self._order.level(sequence.request) for sequence in sequences]
        known = Counter(level for level in levels if level is not None)
        return None if len(levels) > known.total() else tuple(sorted(known.items())[:_MAX_LEVELS])

    def _expected_outputs(self, request: Request) -> int:
        """How many tokens a sequence is expected to generate: its limit, or the recent mean if an
        end token may come before.
        """
        limit = self._limits.output_limit(request)
        return limit if request.sampling.ignore_eos else min(limit, round(self._mean_outputs))

    def _check_first_token_in_time(
        self, sequence: Sequence, state: AdmissionState, now: float
    ) -> None:
        """Raise RequestError if the first token of an arriving sequence is predicted to be late."""
        request, first_token_s = sequence.request, sequence.first_token_service_s
        deadline_s = request.ttft_deadline_s
        if deadline_s is None:
            return
        num_before = self._waiting.num_before(request, sequence.rank)
        num_preemptible = 0
        if self._order.level(request) is not None:
            may_preempt = partial(self._order.may_preempt, sequence)
            num_preemptible = self._batch.num_preemptible(may_preempt)
        wait_s = state.wait_s(num_before, num_preemptible)
        waited_s = now - sequence.arrival_s
        if waited_s + wait_s + first_token_s > deadline_s:
            raise FirstTokenTooLate(deadline_s, wait_s, first_token_s, waited_s)

    def _check_share(self, request: Request, now: float) -> None:
        """Raise QueueFull if the account of a request has its share of the queue: so many times
        what is free, by its weight (dynamic thresholds, Choudhury and Hahne 1998), and nothing of
        the last ninth, which is for accounts that have nothing in the queue. So however fast one
        sends, it leaves room for the next.
        """
        most, account = self._limits.max_waiting, account_of(request)
        if most is None or not account or request.is_continuation:
            return
        is_batch = request.request_class is RequestClass.BATCH
        num_waiting = len(self._waiting) if is_batch else self._waiting.num_interactive
        num_own = self._waiting.num_of(account, with_batch=is_batch)
        num_free, num_more = max(0, most - num_waiting), request.sampling.n
        num_reserved = min(most // 2, max(1, round(most / (_SHARE_OF_FREE + 1))))
        share = _SHARE_OF_FREE * request.tenant_weight * num_free
        if num_own and (num_own + num_more > share or num_free - num_more < num_reserved):
            state = self._state_for(request, now)
            raise QueueFull(num_own, num_more, most, state.wait_s(num_own), account)

    def _is_limited(self, request: Request) -> bool:
        """Whether the state of the queue may have the request refused."""
        if request.is_continuation:  # of one that was accepted
            return False
        limit = self._limits.max_waiting
        num_more = request.sampling.n
        is_full = limit is not None and len(self._waiting) + num_more > limit
        return is_full or request.ttft_deadline_s is not None

    def expire(self, now: float) -> tuple[SequenceOutput, ...]:
        """End the sequences whose deadline has passed, those that wait and cannot meet it, and
        those whose adapter has no room any more.
        """
        outputs: list[SequenceOutput] = []
        for sequence, due in self._deadlines.pop_due(now):
            if due is Due.EXPIRE:
                outputs.append(self._finish(sequence, FinishReason.DEADLINE, now))
            elif due is Due.SHED and sequence.num_cached_tokens is None:
                num_before = self._waiting.num_before(sequence.request, sequence.rank)
                error = FirstTokenTooLate(
                    deadline_s=sequence.request.ttft_deadline_s or 0.0,
                    wait_s=self._state_for(sequence.request, now).wait_s(num_before),
                    first_token_s=sequence.first_token_service_s,
                    waited_s=now - sequence.arrival_s,
                )
                outputs.append(self._finish(sequence, FinishReason.SHED, now, str(error)))
            elif due is Due.RELEGATE and sequence.state is not SequenceState.RUNNING:
                self._waiting.relegate(sequence, now)
        for sequence, why in self._without_room():
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
            if self._group is not None:
                self._group.leave_after_step(sequence)
            queue.set_paused(sequence, is_paused, now)

    def reset_prefix_cache(self) -> int:
        """Free every cached block that no sequence uses; returns how many there were."""
        return self._pool.forget_cached()

    # -- the next step ----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed until something is committed."""
        if len(self._in_flight) >= self._config.num_in_flight:
            return None
        draft = StepDraft(self._config.max_num_batched_tokens)
        if self._adapters is not None and self._waiting.parked_adapters:
            self._order_loads(self._adapters, draft, now)
        if self._drafts.max_drafts:
            most = min(self._waiting.num_active, self._config.max_num_seqs)
            self._drafts.begin_step(self._batch.num_active or most)
        if not self._config.use_kv_cache:
            self._recompute_decodes(draft, now)
        self._preempt_for_waiting(draft, now)
        for phase in self._policy.phases:
            budget = draft.num_tokens_left
            start = self._batch.prefill_start
            if start is not None or self._waiting.head:  # else there is nothing to split
                view = self._view(draft, now, start or 0)
                num_tokens = self._policy.tokens(phase, view, self._cost_model)
                budget = min(num_tokens, budget)
            elif phase is Phase.PREFILL:
                continue
            if phase is Phase.DECODE:
                self._place_decodes(draft, budget, now)
            else:
                self._place_prefills(draft, budget, now)
        return self._issue(draft, now) if draft.has_rows else None

    def _place_decodes(self, draft: StepDraft, budget: int, now: float) -> None:
        if self._group and self._place_group(self._group, draft, budget):
            return
        over_share = self._order.over_share(self._batch)
        held = {sequence.sequence_id for sequence in over_share} if over_share else ()
        sequences = [one for one in self._batch if one.sequence_id not in held]
        num_rows = len(sequences) + len(over_share)
        allowed: dict[str, int] | None = None
        if num_rows > budget - _LEAST_PREFILL or any([one.drafts for one in sequences]):
            allowed = self._share_tokens(draft, sequences, over_share, budget, now)
            budget = min(budget, draft.num_tokens_left - draft.least_prefill)
            if num_rows > budget:  # more rows than tokens: in turn
                sequences.sort(key=_last_step_id)
        for sequence in sequences:
            if budget < 1:
                return
            most = budget if allowed is None else 1 + allowed.get(sequence.sequence_id, 0)
            budget -= self._place_decode(draft, sequence, min(most, budget), now)
        if over_share:
            self._place_over_share(draft, over_share, budget, now)

    def _share_tokens(
        self,
        draft: StepDraft,
        sequences: list[Sequence],
        over_share: list[Sequence],
        budget: int,
        now: float,
    ) -> dict[str, int] | None:
        """Divide the tokens of a step that are not enough for all: a token for every row and the
        prefill that there would be without drafts come first, drafts get the rest. So no sequence
        waits for more steps than without drafts.

        Returns how many drafts each sequence may have at most, by its id; None if all may have
        theirs. If not, each step begins with another sequence.
        """
        rows = [one for one in (*sequences, *over_share) if self._can_decode(one)]
        if self._policy.phases[0] is Phase.DECODE:
            # also with more rows than tokens, some go to prefill: in every other step of one token
            least = min(_LEAST_PREFILL, budget // 2 or self._next_step_id % 2)
            most = max(budget - len(rows), least)
            draft.least_prefill = self._prefill_next_to(draft, rows, most, now)
        spare = budget - len(rows) - draft.least_prefill
        wanting = [
            sequence for sequence in sequences if sequence.drafts and self._can_decode(sequence)
        ]
        if spare >= sum([len(one.drafts) for one in wanting]):
            return None
        first = self._next_step_id % max(1, len(wanting))
        allowed = {}
        for one in wanting[first:] + wanting[:first]:
            num_drafts = allowed[one.sequence_id] = max(0, min(len(one.drafts), spare))
            spare -= num_drafts
        return allowed

    def _prefill_next_to(
        self, draft: StepDraft, rows: list[Sequence], most: int, now: float
    ) -> int:
        """How many of `most` tokens prefill would take next to decode rows without drafts."""
        if self._batch.prefill_start is None and self._waiting.head is None:  # the usual case
            return 0
        load = draft.decode_load
        for row in rows:
            load += StepLoad.of_span(row.resident.planned, 1, num_logits_rows=1)
        start = self._batch.prefill_start or 0
        view = replace(self._view(draft, now, start), decode=load, num_tokens_left=most)
        num_tokens = sum(sequence.num_prefill_left for sequence in self._batch.prefilling)
        head = self._waiting.head
        if head is not None and not head.num_pending and self._policy.may_admit(view):
            hits = self._batch.hits_if_it_fits(head, self._num_reserved_blocks())
            num_tokens = num_tokens if hits is None else most
        if not num_tokens:
            return 0
        return min(num_tokens, most, self._policy.tokens(Phase.PREFILL, view, self._cost_model))

    def _place_group(self, group: DecodeGroup, draft: StepDraft, budget: int) -> bool:
        """Place the rows of the group, if they are all that decode, and are not to be chosen from.
        Else it is dissolved, and its rows are listed.
        """
        num_decoding = self._batch.num_active - len(self._batch.prefilling)
        # the step has the end of their prompts already, with policies that place prefill first
        num_decoding -= sum(
            [
                sequence.residency.planned >= sequence.residency.prefill_end
                for sequence in draft.prefill
            ]
        )
        is_free = group.num_new_blocks <= self._pool.num_free
        if len(group) == num_decoding and len(group) <= budget and is_free:
            draft.add_group(group.load)
            group.plan(self._next_step_id)
            return True
        if budget > 0:
            group.dissolve()
        return False

    def _place_decode(self, draft: StepDraft, sequence: Sequence, most: int, now: float) -> int:
        """Add a row for the next token of a sequence and its drafts, `most` tokens at most; returns
        how many, 0 if it gets none in this step.
        """
        is_due = self._can_decode(sequence) and not draft.has_row(sequence)
        if not is_due or not self._free_blocks_for(sequence, draft, now):
            return 0
        drafts = sequence.drafts[: self._num_drafts(sequence, most - 1)] if sequence.drafts else ()
        num_tokens = 1 + len(drafts)
        self._place(draft, sequence, 1, self._batch.grow(sequence, num_tokens), drafts)
        return num_tokens

    def _num_drafts(self, sequence: Sequence, most: int) -> int:
        """How many drafts pay and fit into the blocks and the length of the sequence."""
        num_forced = min(sequence.num_forced_drafts, self._drafts.num_forced())
        num_left = sequence.output_limit - sequence.num_outputs - 1
        return min(
            max(num_forced, self._drafts.num_checked(sequence.acceptance)),
            num_left,
            most,
            self._batch.num_drafts_that_fit(sequence),
        )

    def _num_next_drafts(self, sequence: Sequence) -> tuple[int, int]:
        """How many drafts to request for the row after the one that is placed now, and how many if
        they are forced.
        """
        request = sequence.request
        if not request.speculation:
            return 0, 0
        num_known = sequence.num_outputs + 1  # after that row, at least
        num_left = max(0, sequence.output_limit - num_known - 1)
        num_drafts = min(self._drafts.num_requested(sequence.acceptance), num_left)
        if request.sampling.grammar is None and request.sampling.thinking_budget is None:
            return num_drafts, 0
        return num_drafts, min(self._drafts.num_forced(), num_left)

    def _place_over_share(
        self, draft: StepDraft, sequences: list[Sequence], budget: int, now: float
    ) -> None:
        """Add rows of tenants that hold more than their part, while the step stays short enough for
        the rows of the others; those first that had no row for longest. They get no drafts.
        """
        before = StepLoad()
        if draft.decode_load.num_rows:
            view = self._view(draft, now)
            draft.limit_s = self._policy.step_limit_s(view, self._cost_model)
            before = self._prefill_before(draft, sequences, view)
        for sequence in sorted(sequences, key=_last_step_id)[:budget]:
            if draft.limit_s is not None and self._can_decode(sequence):
                start = sequence.resident.planned
                load = draft.decode_load + StepLoad.of_span(start, 1, num_logits_rows=1) + before
                if self._cost_model.seconds(load) > draft.limit_s:
                    return
            self._place_decode(draft, sequence, 1, now)

    def _prefill_before(
        self, draft: StepDraft, over_share: list[Sequence], view: StepView
    ) -> StepLoad:
        """The prefill that the step must have time for before rows above their tenant's part.

        That of other tenants; the prefill of the same tenants takes turns with their rows, because
        the least chunk and those rows in one step would delay the rows of the others twice.
        """
        prompts = list(self._batch.prefilling)
        if self._waiting.head is not None:
            prompts.append(self._waiting.head)
        if not prompts:
            return StepLoad()
        queue_of = self._order.queue_of
        first = queue_of(min(prompts, key=self._order.key).request)
        if first in {queue_of(sequence.request) for sequence in over_share}:
            self._is_turn_of_prefill = not self._is_turn_of_prefill
            draft.prefill_may_wait = not self._is_turn_of_prefill
        return StepLoad() if draft.prefill_may_wait else self._policy.least_prefill(view)

    def _recompute_decodes(self, draft: StepDraft, now: float) -> None:
        """Without a KV cache: the next token of a sequence needs all its tokens again."""
        for sequence in sorted(self._batch, key=_last_step_id):
            is_due = self._can_decode(sequence) and not sequence.num_pending
            if not is_due or not draft.num_tokens_left:
                continue
            if self._free_blocks_for(sequence, draft, now):
                new_block_ids = self._batch.restart(sequence)
                num_tokens = min(len(sequence.token_ids), draft.num_tokens_left)
                self._place(draft, sequence, num_tokens, new_block_ids)

    def _can_decode(self, sequence: Sequence) -> bool:
        residency = sequence.resident
        return (
            sequence.state is SequenceState.RUNNING
            and not sequence.is_paused
            and residency.planned >= residency.prefill_end
            and not residency.awaits_drafts
            and sequence.num_outputs + residency.pending < sequence.output_limit
        )

    def _place_prefills(self, draft: StepDraft, budget: int, now: float) -> None:
        """Continue prompts that are partly computed and admit others, in the order of service."""
        budget = max(budget, min(draft.least_prefill, draft.num_tokens_left))
        for sequence in sorted(self._batch.prefilling, key=self._order.key):
            budget = self._admit_waiting(draft, budget, now, before=sequence)
            num_tokens = min(sequence.num_prefill_left, budget)
            if num_tokens > 0:
                start = sequence.resident.planned
                num_tokens = min(num_tokens, self._affordable(draft, sequence, start, now))
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
            if not self._policy.may_admit(self._view(draft, now, start=0)):
                return budget
            hits = self._batch.hits_if_it_fits(sequence, self._num_reserved_blocks())
            if hits is None:
                return budget
            start = len(hits) * self._pool.block_size
            affordable = self._affordable(draft, sequence, start, now)
            if affordable < 1:
                return budget
            budget -= self._admit(draft, sequence, hits, min(budget, affordable), now)
        return budget

    def _admit(
        self, draft: StepDraft, sequence: Sequence, hits: tuple[int, ...], most: int, now: float
    ) -> int:
        """Move a sequence into the batch and place its first tokens; returns how many."""
        self._waiting.remove(sequence)
        self._wait_estimate.count_admission(now, any_left=bool(self._waiting.head))
        is_new = sequence.num_cached_tokens is None
        residency = self._batch.admit(sequence, hits, now)
        if self._adapters is not None:
            self._adapters.acquire(sequence.request.adapter_id)
        self._policy.admitted()
        if is_new and not sequence.request.is_continuation:  # a beam's prompt was counted before
            self._totals.prefix_query_tokens += sequence.prompt_len
            self._totals.prefix_hit_tokens += residency.planned
        draft.admit(sequence)
        num_tokens = min(residency.prefill_end - residency.planned, most)
        self._place(draft, sequence, num_tokens, tuple(residency.blocks))
        return num_tokens

    def _num_reserved_blocks(self) -> int:
        """Blocks that an admission leaves free for the growth of running sequences.

        None until a sequence was preempted because another one had to grow; then a part of the
        growth that is expected, which decreases while nothing is preempted (as the new-token ratio
        of SGLang). So the batch neither keeps room for outputs that end early, nor evicts the same
        sequences again and again.
        """
        if self._growth_reserve < _LEAST_RESERVE:
            return 0
        if self._group is not None:
            self._group.settle()
        growth = sum(
            max(0, self._expected_outputs(sequence.request) - sequence.num_outputs)
            for sequence in self._batch
        )
        return int(self._growth_reserve * growth) // self._pool.block_size

    def _affordable(self, draft: StepDraft, sequence: Sequence, start: int, now: float) -> int:
        """How many tokens of a prompt the step may take from position `start` on.

        All that are left in the step, unless prompts are scored: their tokens cost more than the
        policy assumed for the phase.
        """
        scored = sequence.scored_positions
        if not scored and not draft.prefill_load.num_scored:
            return draft.num_tokens_left
        view = self._view(draft, now, start, scored)
        return min(
            self._policy.tokens(Phase.PREFILL, view, self._cost_model), draft.num_tokens_left
        )

    def _issue(self, draft: StepDraft, now: float) -> StepPlan:
        predicted_s = self._cost_model.seconds(draft.decode_load + draft.prefill_load)
        draft_mode = self._drafts.planned(draft.decode_load, self._cost_model)
        released = self._batch.take_released_slots()
        step = draft.issue(self._next_step_id, released, now, predicted_s, draft_mode)
        self._next_step_id += 1
        self._in_flight.append(step)
        if self._accounted_s is None:
            self._accounted_s = now
        return step.plan

    def _place(
        self,
        draft: StepDraft,
        sequence: Sequence,
        num_tokens: int,
        new_block_ids: tuple[int, ...],
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Add a row to the draft; from now on others may share the blocks that it fills."""
        residency = sequence.resident
        next_drafts = self._num_next_drafts(sequence) if self._drafts.may_request else (0, 0)
        row = sequence.row(num_tokens, new_block_ids, drafts, *next_drafts)
        sequence.drafts = ()
        residency.planned = row.end
        residency.awaits_drafts = row.num_drafts > 0 or row.requests_drafts
        if drafts:
            residency.drafted_end = max(residency.drafted_end, row.end)
        residency.pending += row.emits
        sequence.last_step_id = self._next_step_id
        load = StepLoad.of_row(row, sequence.request.sampling)
        draft.add(FlightRow(sequence, residency, row, load))
        if row.phase is Phase.PREFILL:
            self._batch.prefill_planned(sequence)
        self._batch.register(sequence)

    # -- preemption -------------------------------------------------------------------------------

    def _preempt_for_waiting(self, draft: StepDraft, now: float) -> None:
        """Preempt paused sequences and those of lower priority for the head of the queue."""
        if not self._waiting or not self._policy.may_admit(self._view(draft, now, start=0)):
            return
        head = self._waiting.head
        if head is not None and not head.num_pending:
            for victim in self._batch.victims_for(head):
                self._preempt(victim, now)
                draft.num_preemptions += 1

    def _free_blocks_for(self, sequence: Sequence, draft: StepDraft, now: float) -> bool:
        """Preempt sequences of lower rank until `sequence` can grow; False if it must wait."""
        while not self._batch.can_grow(sequence):
            victim = self._batch.lowest_victim(sequence, draft.has_row)
            if victim is None:
                return False
            self._preempt(victim, now)
            draft.num_preemptions += 1
            self._growth_reserve = min(1.0, max(_FIRST_RESERVE, 1.5 * self._growth_reserve))
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._leave_batch(sequence)
        sequence.preempt(now)
        self._waiting.push(sequence, now)
        self._totals.num_preemptions += 1

    def _leave_batch(self, sequence: Sequence) -> None:
        if self._group is not None:
            self._group.leave(sequence)
        self._batch.remove(sequence)
        if self._adapters is not None:
            self._adapters.release(sequence.request.adapter_id)

    # -- adapters ---------------------------------------------------------------------------------

    @property
    def adapter_room(self) -> AdapterResidency | None:
        """The adapters in compute memory; None if adapters are no resource."""
        return self._adapters

    def register_adapter(
        self, adapter_id: str, num_bytes: int, is_pinned: bool = False, is_resident: bool = False
    ) -> None:
        """Let requests name an adapter, which is loaded when one is queued, unless it is in memory
        already (`is_resident`); a pinned one stays there, until it is registered without.
        """
        if self._adapters is not None:
            self._adapters.register(
                adapter_id, num_bytes, is_pinned=is_pinned, is_resident=is_resident
            )

    def retire_adapter(self, adapter_id: str) -> bool:
        """No new request will name the adapter. Returns whether it is forgotten: if sequences or
        steps in flight use it, it can still be loaded for them, and this has to be called again.
        """
        if self._adapters is None or adapter_id not in self._adapters:
            return True
        if self.is_adapter_used(adapter_id):
            return False
        self._adapters.forget(adapter_id)
        return True

    def is_adapter_used(self, adapter_id: str) -> bool:
        """Whether sequences or steps in flight use an adapter."""
        sequences = chain.from_iterable(self._requests.values())
        if any(sequence.request.adapter_id == adapter_id for sequence in sequences):
            return True
        return adapter_id in self._adapters_in_flight()

    def take_adapter_orders(self) -> AdapterOrders | None:
        """What `plan` wants to be loaded and freed; None for nothing. The driver frees first, and
        calls `adapter_loaded` or `adapter_failed` for each load.
        """
        return None if self._adapters is None else self._adapters.take_orders()

    def adapter_loaded(self, adapter_id: str, now: float) -> bool:
        """A load has ended well; False if nothing wants the adapter now."""
        if self._adapters is None or not self._adapters.finish_load(adapter_id):
            return False
        self._waiting.sort_again(adapter_id, now)
        return True

    def adapter_failed(
        self, adapter_id: str, reason: str, now: float
    ) -> tuple[SequenceOutput, ...]:
        """A load has failed: end the sequences that wait for it with ERROR."""
        if self._adapters is not None:
            self._adapters.fail_load(adapter_id)
        parked = self._waiting.parked(adapter_id)
        return tuple(self._finish(sequence, FinishReason.ERROR, now, reason) for sequence in parked)

    def _check_adapter(self, adapters: AdapterResidency, request: Request) -> None:
        """Raise RequestError if the adapter of a request has no room next to the pinned ones."""
        if why := adapters.misfit(request.adapter_id):
            raise RequestError(
                f"the adapter {request.adapter!r} cannot be loaded: {why}", param="model"
            )

    def _without_room(self) -> list[tuple[Sequence, str]]:
        """The sequences that wait for an adapter which pinned ones leave no room for, since they
        were pinned after the sequence was added; and why.
        """
        if self._adapters is None or not self._adapters.has_pinned:
            return []
        reasons = [
            (parked_adapter, self._adapters.misfit(parked_adapter))
            for parked_adapter in self._waiting.parked_adapters
        ]
        return [
            (sequence, f"its adapter cannot be loaded: {why}")
            for adapter_id, why in reasons
            if why
            for sequence in self._waiting.parked(adapter_id)
        ]

    def _order_loads(self, adapters: AdapterResidency, draft: StepDraft, now: float) -> None:
        """Begin loads for the sequences that wait for an adapter, in the order of service; preempt
        those that hold a place which the next load may take.
        """
        while (first := self._waiting.first_parked(besides=adapters.held)) is not None:
            is_ordered = adapters.order_load(
                first.request.adapter_id,
                now - first.awaits_adapter_since_s,
                now,
                self._adapter_uses(adapters, first),
                self._adapters_in_flight(),
            )
            if not is_ordered and not self._preempt_draining(adapters, first, draft, now):
                break
        if first is None:
            adapters.stop_draining()
        for adapter_id in adapters.take_changed():
            self._waiting.sort_again(adapter_id, now)

    def _preempt_draining(
        self, adapters: AdapterResidency, first: Sequence, draft: StepDraft, now: float
    ) -> bool:
        """Preempt what runs with draining adapters, if `first` may have their place."""
        victims = [
            sequence
            for sequence in self._batch
            if adapters.state(sequence.request.adapter_id) is AdapterState.DRAINING
            and self._order.may_displace(first, sequence)
        ]
        for victim in victims:
            self._preempt(victim, now)
            draft.num_preemptions += 1
        return bool(victims)

    def _adapter_uses(self, adapters: AdapterResidency, first: Sequence) -> dict[str, AdapterUse]:
        """What sequences do with the adapters in memory, as far as that matters to one that waits
        for a place.
        """
        uses: dict[str, AdapterUse] = {}
        key, may_displace = self._order.key, self._order.may_displace
        first_key = key(first)
        for adapter_id in adapters.held:
            one = self._waiting.first_of_adapter(adapter_id)
            if one is not None and key(one) < first_key:
                uses[adapter_id] = AdapterUse.AHEAD
            elif one is not None and not may_displace(first, one):
                uses[adapter_id] = AdapterUse.WANTED
        for one in self._batch:
            adapter_id = one.request.adapter_id
            use = AdapterUse.PREEMPTIBLE if may_displace(first, one) else AdapterUse.RUNNING
            if use > uses.get(adapter_id, AdapterUse.UNUSED):
                uses[adapter_id] = use
        return uses

    def _adapters_in_flight(self) -> set[str]:
        return {entry.row.adapter for step in self._in_flight for entry in step.rows}

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
        group = self._group if plan.num_grouped_rows else None
        grouped = StepLoad() if group is None else group.load
        charges = charge(step, result.outputs, result.seconds, self._cost_model, grouped)
        if self._order.takes_turns:
            for entry, ticks in zip(step.rows, charges.ticks, strict=True):
                if ticks:  # a sequence that has ended is charged nothing
                    self._order.charged(entry.sequence, ticks / TICKS_PER_S)
        self._cost_model.observe(step.load, result.seconds)
        outputs = self._end_failed(step, failures, now)
        self._in_flight.popleft()
        if group is not None:
            outputs += self._commit_group(group, charges.prices, now)
        for entry, output in zip(step.rows, result.outputs, strict=True):
            new = self._receive(entry, output, now)
            if new is not None:
                outputs.append(new)
        self._growth_reserve *= _RESERVE_DECAY
        assert self._accounted_s is not None, "a step was planned"
        since_s = self._accounted_s
        self._totals.add_step(result.seconds, now - since_s, charges)
        self._accounted_s = now
        record = step_record(
            step,
            result.outputs,
            result.seconds,
            charges,
            now,
            num_free_blocks=self._pool.num_free,
            num_waiting=len(self._waiting),
            num_running=len(self._batch),
        )
        self._totals.num_prefill_tokens += record.num_prefill_tokens
        self._totals.num_drafts += record.num_drafts
        self._totals.num_accepted += record.num_accepted
        self._learn_from_drafts(step, record, since_s, now)
        return StepOutcome(tuple(outputs), record)

    def _learn_from_drafts(
        self, step: InFlightStep, record: StepRecord, since_s: float, now: float
    ) -> None:
        """Measure what drafts gain, by a step whose result followed the one at `since_s`."""
        mode = step.draft_mode
        if mode is None or not any(row.sequence.request.speculation for row in step.rows):
            return
        # With what follows a result, which drafts make longer, but without a pause.
        if step.planned_at_s - since_s > record.seconds:
            since_s = step.planned_at_s
        elapsed_s = (now - since_s) * (record.decode_s / max(record.seconds, 1e-9))
        load, num_accepted = step.decode_load, record.num_accepted
        self._drafts.measured(mode, load, num_accepted, elapsed_s, self._cost_model)

    def decode_stretch(self, now: float, until_s: float, machine: CostModel) -> DecodeSteps:
        """Plan and commit steps of grouped rows only, one after the other, in one go.

        Equal to `plan` and, when the step is over by `machine`, `commit`, again and again until a
        step ends a sequence, would not end before `until_s`, or needs a decision. It does nothing
        if the first step is not that simple.
        """
        group, costs = self._group, self._cost_model
        if group is None or not self._has_only(group):
            return DecodeSteps()
        records: list[StepRecord] = []
        outputs: list[SequenceOutput] = []
        deadline_s = self._deadlines.next_s()
        until_s = until_s if deadline_s is None else min(until_s, deadline_s)
        while not outputs:
            load = group.load
            seconds = machine.seconds(load)
            end_s = now + seconds
            if not end_s < until_s or group.num_new_blocks > self._pool.num_free:
                break
            predicted_s = seconds if costs is machine else costs.seconds(load)
            self._batch.take_released_slots()
            group.plan(self._next_step_id)
            prices = UnitTicks.divide(seconds, costs.unit_prices(load), load)
            costs.observe(load, seconds)
            outputs = self._commit_group(group, prices, end_s)
            self._growth_reserve *= _RESERVE_DECAY
            assert self._accounted_s is not None, "the batch was computed"
            self._totals.add_step(seconds, end_s - self._accounted_s)
            self._accounted_s = end_s
            records.append(
                decode_record(
                    self._next_step_id,
                    now,
                    end_s,
                    seconds,
                    predicted_s,
                    load,
                    prices,
                    num_free_blocks=self._pool.num_free,
                    num_running=len(self._batch),
                )
            )
            self._next_step_id += 1
            now = end_s
        return DecodeSteps(tuple(records), tuple(outputs))

    def least_decode_stretch_s(self, machine: CostModel) -> float:
        """For how long at least `decode_stretch` would take steps that end no sequence, if nothing
        else happens; 0.0 if the next step is not of that kind. Step times grow with the context.
        """
        group = self._group
        if group is None or not self._has_only(group):
            return 0.0
        num_steps = group.num_steps_without_end(self._pool.num_free)
        return num_steps * machine.seconds(group.load) if num_steps else 0.0

    def _has_only(self, group: DecodeGroup) -> bool:
        """Whether the next step has the rows of the group, and nothing else."""
        return (
            not self._in_flight
            and not self._waiting
            and 0 < len(group) <= self._config.max_num_batched_tokens
            and len(group) == len(self._batch)
        )

    def _commit_group(
        self, group: DecodeGroup, prices: UnitTicks, now: float
    ) -> list[SequenceOutput]:
        """Take the results of the rows that are not listed; returns the ends."""
        self._totals.num_output_tokens += len(group)
        return [
            self._finish(
                sequence,
                sequence.length_reason,
                now,
                new=SequenceOutput(
                    sequence.request.request_id, sequence.index, (sequence.token_ids[-1],)
                ),
            )
            for sequence in group.commit(prices)
        ]

    def fail(self, plan: StepPlan, reason: str, now: float) -> tuple[SequenceOutput, ...]:
        """Drop the oldest step in flight: the executor raised. Its sequences end with ERROR.

        Other sequences which share blocks that the step should have filled are recomputed.
        """
        assert not plan.num_grouped_rows, "a step that is not computed has failed"
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
        if not failures:
            return []
        failed = [step.rows[index] for index in sorted(failures)]
        rows = [entry for other in self._in_flight for entry in other.rows]
        self._pool.forget(invalidated_by(failed, rows, self._pool.block_size))
        outputs: list[SequenceOutput] = []
        for index, failure in sorted(failures.items()):
            sequence = step.rows[index].sequence
            if sequence.state is not SequenceState.FINISHED:
                outputs.append(self._finish(sequence, failure.finish_reason, now, failure.reason))
        for sequence in self._batch:
            if sequence.resident.invalidated:
                self._preempt(sequence, now)
        return outputs

    def _receive(self, entry: FlightRow, output: RowOutput, now: float) -> SequenceOutput | None:
        """Append a row's output to its sequence; returns what is to be delivered."""
        sequence, residency = entry.sequence, entry.residency
        if sequence.state is SequenceState.FINISHED or residency.invalidated:
            return None
        residency.pending -= entry.row.emits
        if entry.row.emits and not sequence.num_outputs:
            self._count_first_token(sequence, now)
        if entry.row.num_drafts or entry.row.requests_drafts:
            self._check_drafts(entry, output)
        max_outputs = self._limits.max_outputs(sequence.prompt_len)
        new, reason = sequence.receive(entry.row, output, now, max_outputs)
        self._totals.num_output_tokens += len(new.token_ids)
        if sequence.state is SequenceState.RUNNING:
            self._batch.register(sequence)
        if reason is not None:
            return self._finish(sequence, reason, now, new=new)
        if self._group is not None and sequence.state is SequenceState.RUNNING:
            self._group.join(sequence)
        has_news = new.token_ids or new.prompt_logprobs or new.progress is not None
        return new if has_news else None

    def _count_first_token(self, sequence: Sequence, now: float) -> None:
        prompt = StepLoad.of_span(0, sequence.prompt_len, num_logits_rows=1)
        prompt_s = self._cost_model.seconds(prompt)
        since_s = sequence.first_scheduled_s
        if since_s is not None:
            self._wait_estimate.count_first_token(now - since_s - prompt_s, now)

    def _check_drafts(self, entry: FlightRow, output: RowOutput) -> None:
        """Take the positions of rejected drafts back: the next row overwrites their KV."""
        num_drafts, num_accepted = entry.row.num_drafts, len(output.token_ids) - 1
        sequence, residency = entry.sequence, entry.residency
        residency.awaits_drafts = False
        if not num_drafts:
            return
        residency.planned -= num_drafts - num_accepted
        num_forced = min(num_drafts, sequence.num_forced_drafts)
        accepted = output.accepted_drafts or range(1, num_accepted + 1)
        self._drafts.checked(sequence.acceptance, entry.row, accepted, num_forced)

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
        if reason in _NATURAL_ENDS:
            self._mean_outputs += _MEAN_GAIN * (sequence.num_outputs - self._mean_outputs)
        chunk = self._config.max_num_batched_tokens
        timings = with_unloaded(sequence.finish(now), self._cost_model, chunk)
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
        is_full = len(self._in_flight) >= self._config.num_in_flight  # then `plan` returns None
        policy_s = None if is_full else self._policy.wakeup(self._view(StepDraft(0), now))
        lost_s = now if self._without_room() else None
        times = self._deadlines.next_s(), policy_s, lost_s
        return min((time for time in times if time is not None), default=None)

    def stats(self) -> SchedulerStats:
        """The current state, and totals since the start."""
        states = Counter(
            sequence.state for sequence in (*self._batch, *self._waiting) if not sequence.is_paused
        )
        return SchedulerStats(
            num_waiting=states[SequenceState.WAITING],
            num_running=states[SequenceState.RUNNING],
            num_preempted=states[SequenceState.PREEMPTED],
            num_in_flight=len(self._in_flight),
            blocks=self._pool.stats(),
            totals=replace(self._totals),
            num_paused=len(self._batch) + len(self._waiting) - states.total(),
            adapters=self._adapter_stats(),
        )

    def _adapter_stats(self) -> AdapterStats | None:
        if self._adapters is None:
            return None
        return AdapterStats(
            self._adapters.max_loras,
            self._adapters.num_resident,
            self._adapters.num_bytes,
            self._adapters.num_loads,
            self._adapters.num_evictions,
            _adapter_names(self._batch),
            _adapter_names(self._waiting),
        )

    def admission_state(self, now: float) -> AdmissionState:
        """What decides whether one more request may queue, with the levels of all sequences."""
        running = tuple(self._batch)
        num_outputs = num_prompt = 0.0
        if running:
            expected = [self._expected_outputs(sequence.request) for sequence in running]
            num_outputs = sum(expected) / len(running)
            num_prompt = sum(sequence.prompt_len for sequence in running) / len(running)
        return replace(
            self._admission_state(now, num_prompt, num_outputs),
            waiting=self._levels(self._waiting),
            running=self._levels(running),
        )

    def timings(self, request_id: str, now: float) -> dict[int, SequenceTimings]:
        """What the live sequences of a request spent their time on so far, by index."""
        if self._group is not None:
            self._group.settle()
        chunk = self._config.max_num_batched_tokens
        return {
            sequence.index: with_unloaded(sequence.timings(now), self._cost_model, chunk)
            for sequence in self._requests.get(request_id, ())
        }

    def check(self) -> None:
        """Raise AssertionError unless all parts of the state agree: for tests, after any call."""
        if self._group is not None:
            self._group.settle()
        self._batch.check()
        self._waiting.check()
        if self._adapters is not None:
            self._adapters.check()
        for sequence in self._waiting:
            self._batch.check_hits(sequence)
        for request in self._requests.values():
            assert len({sequence.is_paused for sequence in request}) == 1, (
                "a request is partly paused"
            )
        live = {one.sequence_id for of_request in self._requests.values() for one in of_request}
        queued = [one.sequence_id for one in (*self._batch, *self._waiting)]
        assert sorted(queued) == sorted(live), "live sequences and those in a queue differ"
        assert len(self._in_flight) <= self._config.num_in_flight, "too many steps in flight"
        pending = pending_tokens(self._in_flight)
        if self._group is not None:
            pending.update(self._group.pending_tokens())
        for sequence in (*self._batch, *self._waiting):
            name, count = sequence.sequence_id, pending[sequence.sequence_id]
            assert sequence.num_pending == count, (
                f"{name} awaits {sequence.num_pending} tokens, {count} are in flight"
            )

    def _view(
        self, draft: StepDraft, now: float, start: int | None = None, scored: range = range(0)
    ) -> StepView:
        """The policy's view, for the prompt that continues at `start`; if None, for the first
        running prompt.
        """
        head = self._waiting.head
        if start is None:
            start = self._batch.prefill_start or 0
        return StepView(
            now=now,
            decode=draft.decode_load,
            prefill=draft.prefill_load,
            num_tokens_left=draft.num_tokens_left,
            prefill_start=start,
            num_running=self._batch.num_active,
            num_waiting=self._waiting.num_served,
            oldest_arrival_s=head.arrival_s if head else None,
            scored=scored,
            limit_s=draft.limit_s,
            prefill_may_wait=draft.prefill_may_wait,
        )


def _adapter_names(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(
        sorted({sequence.request.adapter for sequence in sequences if sequence.request.adapter})
    )


def _last_step_id(sequence: Sequence) -> int:
    return sequence.last_step_id
