"""`StepBudget`: how many tokens of a step each phase, prompt, draft and row may take.

The policy decides, by its view of the queue and of the step so far. Two rules hold for all
policies: drafts get what rows and prompts leave, and rows of tenants that hold more than their part
of the batch come last and only while the step stays short enough for the rows of the others, or for
a request that another tenant may send.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import msgspec
from msgspec.structs import replace

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import CostModel, StepLoad, tokens_of_part
from quickstep.core.drafts.control import divide
from quickstep.core.policies import Policy, StepView
from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.sequence import Sequence
from quickstep.core.step import StepDraft
from quickstep.types import Phase

_NO_POSITIONS = range(0)
_SHARED_STRETCH = 2.0  # of a step's rows by those of tenants above their part
# The same for a step without such rows, of its prompts: a prompt is in few steps, and has its
# output sooner if these are short. Rows of one request may be in step after step.
_PROMPT_STRETCH = 1.5
_MIN_PREFILL = 16  # tokens of a step that more decode rows than it has tokens leave


class DecodeTurn(msgspec.Struct, frozen=True):
    """Which running sequences may decode in a step.

    Attributes:
        sequences: Those that come first, by rank.
        over_share: Those of tenants that hold more than their part of the batch; without rows of
            other tenants those of tenants with many requests, if they are too many for a step.
        max_rows: How many rows they may have.
    """

    sequences: list[Sequence]
    over_share: list[Sequence]
    max_rows: int


class StepBudget:
    """The budgets of one scheduler's steps. `fits` says whether there are the resources to admit a
    sequence now.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        cost_model: CostModel,
        waiting: WaitingQueue,
        batch: RunningBatch,
        fits: Callable[[Sequence], bool],
    ) -> None:
        self._num_stages, self._max_rows = config.num_stages, config.max_num_seqs
        self._complete_prompts = config.complete_prompts
        self._policy = policy
        self._order = policy.order
        self._cost_model = cost_model
        self._waiting = waiting
        self._batch = batch
        self._fits = fits
        # of the tenants above their part of the batch: what prompts had more than rows
        self._prompts_ahead_s = 0.0

    def of_phase(self, phase: Phase, draft: StepDraft, now: float) -> int:
        """The tokens of a phase."""
        start = self._batch.prefill_start if self._batch.prompts else None
        has_head = self._waiting.num and self._waiting.head is not None
        if start is None and not has_head:  # then there is nothing to split
            return 0 if phase is Phase.PREFILL else draft.num_tokens_left
        num_tokens = self._policy.tokens(phase, self._view(draft, now, start), self._cost_model)
        if phase is Phase.PREFILL:
            if self._num_stages > 1:
                num_tokens = min(num_tokens, self._prompt_part_of_stage(draft))
            num_tokens = max(num_tokens, draft.min_prefill)
        return min(num_tokens, draft.num_tokens_left)

    def _prompt_part_of_stage(self, draft: StepDraft) -> int:
        """The tokens of prompts in a step of a pipeline. Complete prompts are divided, not what is
        left of them, so that the parts of one prompt are about equal.
        """
        waiting, head = self._waiting, self._waiting.head
        num_tokens = sum([prompt.residency.prefill_end for prompt in self._batch.prefilling])
        if head is not None:
            num_tokens += waiting.num_served * len(head.token_ids)
        most = max(1, draft.num_tokens_left)
        return tokens_of_part(self._cost_model, num_tokens, most, self._num_stages)

    def of_prompt(self, draft: StepDraft, sequence: Sequence, start: int, now: float) -> int:
        """The tokens of a prompt from position `start` on.

        All that are left in the step, unless prompts are scored (their tokens cost more than the
        policy assumed for the phase) or of a tenant that has many. None for a prompt that must be
        complete and is longer.
        """
        if self._complete_prompts and len(sequence.token_ids) - start > draft.num_tokens_left:
            return 0
        scored = sequence.scored_positions
        is_alike = not scored and not draft.prefill_load.num_scored
        if is_alike and not self._is_crowding(sequence, now):
            return draft.num_tokens_left
        view = self._view(draft, now, start, scored, sequence)
        num_tokens = self._policy.tokens(Phase.PREFILL, view, self._cost_model)
        return min(num_tokens, draft.num_tokens_left)

    def may_admit(self, draft: StepDraft, now: float) -> bool:
        """Whether the policy lets the head of the queue enter the batch."""
        return self._policy.may_admit(self._view(draft, now, start=0))

    def wakeup(self, now: float) -> float | None:
        """When the policy wants another plan without an event."""
        return self._policy.wakeup(self._view(StepDraft(0), now))

    def decode_turn(self, draft: StepDraft, now: float) -> DecodeTurn:
        """The running sequences that may decode in the next step: all, or where stages compute as
        many steps at the same time, the turn of this one. While tenants share the device, the step
        gets a limit.
        """
        sequences, max_rows = self._batch.ranked(), self._max_rows
        takes_turns = self._order.takes_turns
        over_share = self._order.over_share(sequences) if takes_turns else []
        if self._num_stages > 1:
            sequences, max_rows = turn_of_stage(sequences, self._num_stages)
        if takes_turns and not self._complete_prompts and self._order.is_shared(now):
            draft.shared_limit_s = self._policy.shared_limit_s(self._cost_model)
            if not over_share and not self._fits_shared_limit(draft, sequences, now):
                over_share = [each for each in sequences if self._order.is_crowding(each.request)]
        if not over_share:
            return DecodeTurn(sequences, over_share, max_rows)
        names = {sequence.sequence_id for sequence in over_share}
        if self._num_stages > 1:
            over_share = [sequence for sequence in sequences if sequence.sequence_id in names]
        first = [sequence for sequence in sequences if sequence.sequence_id not in names]
        return DecodeTurn(first, over_share, max_rows)

    def _fits_shared_limit(
        self, draft: StepDraft, sequences: Iterable[Sequence], now: float
    ) -> bool:
        """Whether a step has time for the rows of all sequences and the least part of a prompt."""
        load = _plain_load(each for each in sequences if each.can_decode)
        if self._batch.prompts or self._waiting.head is not None:
            load += self._policy.least_prefill(self._view(draft, now))
        return self._cost_model.seconds(load) <= (draft.shared_limit_s or math.inf)

    def _is_crowding(self, sequence: Sequence | None, now: float) -> bool:
        """Whether the prompt of a sequence, or else the next one, is of a tenant that leaves others
        too little.
        """
        if self._complete_prompts or not self._order.is_shared(now):  # the usual case
            return False
        if sequence is None:
            head = self._waiting.head
            prompts = [*self._batch.prefilling, *([] if head is None else [head])]
            sequence = min(prompts, key=self._order.key, default=None)
        return sequence is None or self._order.is_crowding(sequence.request)

    def _crowded_limit_s(self, draft: StepDraft) -> float:
        """How long the step may take with prompts of tenants that have many, if one of its rows,
        also of a prompt, is of a tenant with less than its part of requests; infinite if none is.
        """
        rows, prompts = (
            [each.load for each in part if not self._order.is_crowding(each.sequence.request)]
            for part in (draft.decode, draft.prefill)
        )
        if not rows and not prompts:
            return math.inf
        stretch = _SHARED_STRETCH if rows else _PROMPT_STRETCH
        return stretch * self._cost_model.seconds(StepLoad.total([*rows, *prompts]))

    # -- drafts -----------------------------------------------------------------------------------

    def of_drafts(
        self,
        draft: StepDraft,
        sequences: SequenceOf[Sequence],
        over_share: SequenceOf[Sequence],
        budget: int,
        step_id: int,
        now: float,
    ) -> dict[str, int] | None:
        """Divide the tokens of a step that may not be enough for all: a token for every row and the
        prefill that there would be without drafts come first, drafts get the rest. So no sequence
        waits for more steps than without drafts.

        Returns how many drafts each of `sequences` may have at most, by its id; None if all may
        have theirs.
        """
        num_rows = len(sequences) + len(over_share)
        has_drafts = any([sequence.drafts.token_ids for sequence in sequences])
        if not has_drafts and num_rows <= budget - _MIN_PREFILL:  # the usual case
            return None
        rows = [sequence for sequence in (*sequences, *over_share) if sequence.can_decode]
        if self._policy.phases[0] is Phase.DECODE:
            # also with more rows than tokens, some go to prefill: in every other step of one token
            least = min(_MIN_PREFILL, budget // 2 or step_id % 2)
            most = max(budget - len(rows), least)
            draft.min_prefill = self._prefill_next_to(draft, rows, most, now)
        spare = budget - len(rows) - draft.min_prefill
        if draft.shared_limit_s is not None and not over_share:
            spare = min(spare, self._drafts_in_time(draft, rows, draft.shared_limit_s))
        wanting = [
            sequence for sequence in sequences if sequence.drafts.token_ids and sequence.can_decode
        ]
        return divide(wanting, spare, step_id)

    def _drafts_in_time(self, draft: StepDraft, rows: list[Sequence], limit_s: float) -> int:
        """How many drafts a step with these rows has time for."""
        load = draft.decode_load + _plain_load(rows)
        if draft.min_prefill:
            load += StepLoad.of_span(self._batch.prefill_start or 0, draft.min_prefill)
        most = sum(len(row.drafts.token_ids) for row in rows)

        def seconds(num_drafts: int) -> float:
            drafts = StepLoad.of_span(0, num_drafts, num_logits_rows=num_drafts)
            return self._cost_model.seconds(load + drafts)

        return bisect_right(range(1, most + 1), limit_s, key=seconds)

    def _prefill_next_to(
        self, draft: StepDraft, rows: list[Sequence], most: int, now: float
    ) -> int:
        """How many of `most` tokens prefill would take next to decode rows without drafts."""
        start, head = self._batch.prefill_start, self._waiting.head
        if start is None and head is None:  # the usual case
            return 0
        load = draft.decode_load + _plain_load(rows)
        view = replace(self._view(draft, now, start), decode=load, num_tokens_left=most)
        num_tokens = sum(sequence.num_prefill_left for sequence in self._batch.prefilling)
        if head is not None and not head.num_pending and self._policy.may_admit(view):
            num_tokens = most if self._fits(head) else num_tokens
        if not num_tokens:
            return 0
        return min(num_tokens, most, self._policy.tokens(Phase.PREFILL, view, self._cost_model))

    # -- tenants above their part of the batch ----------------------------------------------------

    def limit_over_share(
        self, draft: StepDraft, over_share: SequenceOf[Sequence], now: float
    ) -> StepLoad:
        """Limit the time of a step before rows above their tenant's part are added: by the rows
        that it has, or without any, so that it is short for a request that comes.

        Returns the prefill that the step must have time for before these: that of other tenants.
        The prefill of the same tenants takes turns with their rows, because the least chunk and
        those rows in one step would delay the rows of the others twice.
        """
        view = self._view(draft, now)
        if draft.decode_load.num_rows:
            plain = StepLoad.total(
                [StepLoad.of_span(entry.row.start, 1, num_logits_rows=1) for entry in draft.decode]
            )
            plain_s = self._cost_model.seconds(plain)
            limit_s = self._policy.step_limit_s(replace(view, decode=plain), self._cost_model)
            if self._order.is_shared(now):
                limit_s = min(limit_s, _SHARED_STRETCH * plain_s)
            # drafts delay no other row
            draft.limit_s = limit_s + self._cost_model.seconds(draft.decode_load) - plain_s
            spare_s = limit_s - plain_s
        elif draft.shared_limit_s is not None:
            spare_s = draft.shared_limit_s
        else:
            return StepLoad()
        prompts = list(self._batch.prefilling)
        if self._waiting.head is not None:
            prompts.append(self._waiting.head)
        if not prompts:
            return StepLoad()
        queue_of = self._order.queue_of
        first = queue_of(min(prompts, key=self._order.key).request)
        chunk = self._policy.least_prefill(view)
        if first not in {queue_of(sequence.request) for sequence in over_share}:
            return chunk
        if not draft.decode_load.num_rows:
            chunk = self._prompts_in_time(view, draft.shared_limit_s)
        draft.prefill_may_wait = not self._is_turn_of_prompts(draft.decode_load, chunk, spare_s)
        return StepLoad() if draft.prefill_may_wait else chunk

    def _is_turn_of_prompts(self, rows: StepLoad, chunk: StepLoad, spare_s: float) -> bool:
        """Whether a step has a chunk of prompts next to `rows`, in place of other rows that have
        `spare_s` otherwise, so that both get the same time.
        """
        chunk_s = self._cost_model.seconds(rows + chunk)
        chunk_s -= self._cost_model.seconds(rows) if rows.num_rows else 0.0
        is_turn = self._prompts_ahead_s <= 0.0
        gain_s = chunk_s - max(0.0, spare_s - chunk_s) if is_turn else -spare_s
        self._prompts_ahead_s = max(-spare_s, self._prompts_ahead_s + gain_s)
        return is_turn

    def _prompts_in_time(self, view: StepView, limit_s: float | None) -> StepLoad:
        """The prompts that run or wait, as far as a step without other rows has time for them."""
        num_tokens = sum(prompt.num_prefill_left for prompt in self._batch.prefilling)
        head = self._waiting.head
        if head is not None and not head.num_pending and self._fits(head):
            num_tokens += self._waiting.num_served * len(head.token_ids)
        if not num_tokens:
            return StepLoad()
        view = replace(view, decode=StepLoad(), limit_s=limit_s, is_crowding=True)
        most = self._policy.tokens(Phase.PREFILL, view, self._cost_model)
        return view.chunk(min(num_tokens, most))

    def has_time_for(self, draft: StepDraft, sequence: Sequence, prefill: StepLoad) -> bool:
        """Whether the step keeps its limit with a decode row of the sequence, and this prefill. Its
        first row may be longer.
        """
        limit_s = draft.shared_limit_s if draft.limit_s is None else draft.limit_s
        if limit_s is None or not sequence.can_decode or not draft.decode_load.num_rows:
            return True
        load = draft.decode_load + _plain_load([sequence]) + prefill
        return self._cost_model.seconds(load) <= limit_s

    def _view(
        self,
        draft: StepDraft,
        now: float,
        start: int | None = None,
        scored: range = _NO_POSITIONS,
        sequence: Sequence | None = None,
    ) -> StepView:
        """The policy's view, for the prompt that continues at `start`; if None, for the first
        running prompt.
        """
        head = self._waiting.head
        if start is None:
            start = self._batch.prefill_start or 0
        limit_s, is_crowding = draft.limit_s, self._is_crowding(sequence, now)
        if is_crowding and limit_s is None and (draft.decode or draft.prefill):
            if draft.crowded_limit_s is None:
                draft.crowded_limit_s = self._crowded_limit_s(draft)
            is_next_to_others = draft.crowded_limit_s < math.inf
            limit_s = draft.crowded_limit_s if is_next_to_others else draft.shared_limit_s
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
            limit_s=limit_s,
            prefill_may_wait=draft.prefill_may_wait,
            is_crowding=is_crowding,
        )


def _plain_load(sequences: Iterable[Sequence]) -> StepLoad:
    """Of a decode row for each, without drafts."""
    return StepLoad.total(
        [StepLoad.of_span(each.residency.planned, 1, num_logits_rows=1) for each in sequences]
    )


def turn_of_stage(batch: Iterable[Sequence], num_stages: int) -> tuple[list[Sequence], int]:
    """The sequences that may decode in the next step of a pipeline, and how many of them: the part
    of all that decode, as its stages compute as many steps at the same time. Those come first that
    had no row for longest. One whose last token is still being computed has to wait for it.
    """
    decoding = [sequence for sequence in batch if sequence.num_pending or sequence.can_decode]
    due = [sequence for sequence in decoding if not sequence.num_pending]
    due.sort(key=last_step_id)
    return due, -(-len(decoding) // num_stages)


def last_step_id(sequence: Sequence) -> int:
    """The number of the last step with a row of it."""
    return sequence.last_step_id
