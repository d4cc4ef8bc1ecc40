"""Scheduling policies: who is served first, how a step is split between the phases, when to admit.

The scheduler asks its policy, phase by phase in the policy's order, how many tokens that phase may
still take; and again for each prompt that is scored (its tokens cost more) and for those after it.
A policy gets a frozen view of the queue and of the step so far, and changes neither. The token
limit of a step, slots and blocks belong to the scheduler.

    mixed            priorities; decode rows, then as much prefill as the target of a step allows
    prefill-first    priorities; prompts get whole steps
    decode-first     priorities; prompts get a step when no row decodes, or when one waited too long
    fcfs             arrival; priorities have no effect
    priority         priorities, within a level the shortest first
    deadline         the earliest deadline first; what has no slack left comes last
    fair             the tenant with the fewest device seconds for its weight first
    static           a batch of what waits, which runs to its end; for comparison
    dynamic          the same once the batch is full or its oldest request waited long enough
    length-grouped   the same with prompts of about the same length

To add one: an order in `service_order` or a split here, a name in `config.PolicyName`, and a case
in `make_policy`. All of them run in the simulator: the time is an argument.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.service_order import (
    DeadlineOrder,
    FairOrder,
    LengthOrder,
    PriorityOrder,
    ServiceOrder,
)
from quickstep.types import Phase

# `priority` puts a request back by so many seconds for each second that it is predicted to take.
_SHORTEST_FIRST = 5.0
_ONE_ROW = StepLoad.of_span(0, 1, num_logits_rows=1)


class StepView(msgspec.Struct, frozen=True):
    """The input of a policy.

    Attributes:
        decode: Load of the decode rows placed in this step so far.
        prefill: Load of the prefill rows placed so far.
        num_tokens_left: Tokens that the step may still take.
        prefill_start: Position where the next prefill row would start; its context so far.
        scored: Positions of its sequence whose logits score the prompt.
        num_running: Resident sequences. Paused ones do not count, here and below.
        num_waiting: Queued sequences, of the queues that are served now.
        oldest_arrival_s: When the head of the queue arrived; None for an empty queue.
        limit_s: What `step_limit_s` returned before rows above their tenant's part were placed;
            None without such rows.
        prefill_may_wait: Whether prefill gets only what is left of the limit.
        is_crowding: Whether several tenants have sent requests lately, who are served alike, and
            the next prompt is of one with many: then others should not wait for a long step.
    """

    now: float
    decode: StepLoad
    prefill: StepLoad
    num_tokens_left: int
    prefill_start: int
    num_running: int
    num_waiting: int
    oldest_arrival_s: float | None
    scored: range = range(0)
    limit_s: float | None = None
    prefill_may_wait: bool = False
    is_crowding: bool = False

    def chunk(self, num_tokens: int) -> StepLoad:
        """The load of the next prefill row with this many tokens."""
        end = self.prefill_start + num_tokens
        first = max(self.prefill_start, self.scored.start)
        num_scored = max(0, min(end, self.scored.stop) - first)
        return StepLoad.of_span(self.prefill_start, num_tokens, num_scored)


class Policy(Protocol):
    """What the scheduler asks in every step."""

    @property
    def order(self) -> ServiceOrder:
        """Which sequence is served first."""

    @property
    def phases(self) -> tuple[Phase, Phase]:
        """The order in which the phases get their tokens."""

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """How many tokens `phase` may take now; any number above `num_tokens_left` means all."""

    def step_limit_s(self, view: StepView, cost_model: CostModel) -> float:
        """How long a step with the decode rows in `view` may take; infinite for no limit."""

    def shared_limit_s(self, cost_model: CostModel) -> float:
        """How long a step of tenants with many requests may take while others may send one;
        infinite for no limit.
        """

    def least_prefill(self, view: StepView) -> StepLoad:
        """What prefill gets even in a step that is too long with it."""

    def may_admit(self, view: StepView) -> bool:
        """Whether the head of the queue may enter the batch; called before each admission."""

    def admitted(self) -> None:
        """The head of the queue entered the batch."""

    def wakeup(self, view: StepView) -> float | None:
        """When to plan again without an event; None if only events matter."""


class _Continuous:
    """What the policies have in common that admit sequences at any time."""

    def __init__(self, order: ServiceOrder) -> None:
        self.order = order

    def step_limit_s(self, view: StepView, cost_model: CostModel) -> float:
        """There is none."""
        return math.inf

    def shared_limit_s(self, cost_model: CostModel) -> float:
        """There is none."""
        return math.inf

    def least_prefill(self, view: StepView) -> StepLoad:
        """Nothing: there is no limit."""
        return StepLoad()

    def may_admit(self, view: StepView) -> bool:
        """Always."""
        return True

    def admitted(self) -> None:
        """Nothing to count."""

    def wakeup(self, view: StepView) -> float | None:
        """None: it never waits for more requests."""
        return None


class MixedPolicy(_Continuous):
    """Decode rows first, then as much prefill as the predicted step time allows.

    A step with decode rows should stay under `inter_token_target_s`. But prefill gets at least
    `min_prefill_tokens`, so that no prompt starves during a long batch, and the step may take
    `least_stretch` times as long as its decode rows by themselves: where those are near the target
    or above it, the time of a step is the fixed cost of every step (reading the weights), and
    chunks that just fit would make prefill many times slower for hardly shorter gaps between
    tokens. A step without decode rows delays no token: its prefill gets all tokens.

    While tenants share the device, rows and prompts of one that has many leave steps short for the
    request of another one that comes next: no longer than `shared_steps` steps of one row. With
    five that leaves four fifths of the throughput, since longer steps gain no more than their fixed
    cost.
    """

    phases = (Phase.DECODE, Phase.PREFILL)

    def __init__(
        self,
        order: ServiceOrder,
        inter_token_target_s: float,
        min_prefill_tokens: int = 16,
        least_stretch: float = 2.0,
        shared_steps: float = 5.0,
    ) -> None:
        super().__init__(order)
        self._inter_token_target_s = inter_token_target_s
        self._min_prefill_tokens = min_prefill_tokens
        self._least_stretch = least_stretch
        self._shared_steps = shared_steps

    def step_limit_s(self, view: StepView, cost_model: CostModel) -> float:
        """The target, or a multiple of the time of the decode rows."""
        shared_s = self.shared_limit_s(cost_model) if view.is_crowding else math.inf
        if not view.decode.num_rows:
            return shared_s
        target_s = min(self._inter_token_target_s, shared_s)
        return max(target_s, self._least_stretch * cost_model.seconds(view.decode))

    def shared_limit_s(self, cost_model: CostModel) -> float:
        """So many steps of one row."""
        return self._shared_steps * cost_model.seconds(_ONE_ROW)

    def least_prefill(self, view: StepView) -> StepLoad:
        """The least chunk of the next prompt."""
        return view.chunk(min(self._min_prefill_tokens, view.num_tokens_left))

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """All tokens for decode; the largest chunk that is predicted to fit for prefill."""
        if phase is Phase.DECODE or not (view.decode.num_rows or view.is_crowding):
            return view.num_tokens_left
        limit_s = view.limit_s
        if limit_s is None:
            limit_s = self.step_limit_s(view, cost_model)
        placed = view.decode + view.prefill
        least = max(0, self._min_prefill_tokens - view.prefill.num_tokens)
        if view.prefill_may_wait and view.decode.num_rows:  # else nothing would be in the step
            least = 0
        low, high = min(least, view.num_tokens_left), view.num_tokens_left
        if cost_model.seconds(placed + view.chunk(high)) <= limit_s:  # the usual case
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if cost_model.seconds(placed + view.chunk(middle)) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low


class PrefillFirstPolicy(_Continuous):
    """Prompts get complete steps; decode runs when no prompt can."""

    phases = (Phase.PREFILL, Phase.DECODE)

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """All tokens for prefill; none for decode in a step that has prefill."""
        return 0 if phase is Phase.DECODE and view.prefill.num_rows else view.num_tokens_left


class DecodeFirstPolicy(MixedPolicy):
    """Steps with decode rows take no prompt, until the head of the queue has waited `max_wait_s`.

    From then on a step is split as by `mixed`. Prompts that are partly computed continue: they
    hold blocks.
    """

    def __init__(self, order: ServiceOrder, inter_token_target_s: float, max_wait_s: float) -> None:
        super().__init__(order, inter_token_target_s)
        self._max_wait_s = max_wait_s

    def may_admit(self, view: StepView) -> bool:
        """If no row decodes, or the head waited long enough."""
        waited_s = view.now - (view.oldest_arrival_s or 0.0)
        return not view.decode.num_rows or waited_s >= self._max_wait_s


class BatchPolicy(PrefillFirstPolicy):
    """Batches that run to their end before the next one begins, as engines did before continuous
    batching (Orca, Yu et al. 2022). For comparison: it leaves slots empty while long outputs run.

    A batch begins when nothing runs, and `max_num_seqs` sequences wait or the oldest has waited
    for `timeout_s`.
    """

    def __init__(self, order: ServiceOrder, max_num_seqs: int, timeout_s: float) -> None:
        super().__init__(order)
        self._max_num_seqs = max_num_seqs
        self._timeout_s = timeout_s
        self._num_left = 0  # of the sequences that the batch may still admit

    def may_admit(self, view: StepView) -> bool:
        """While the batch fills."""
        if self._num_left:
            self._set_num_left(min(self._num_left, view.num_waiting))
        elif view.num_waiting and not view.num_running and self._is_due(view):
            self._set_num_left(min(view.num_waiting, self._max_num_seqs))
        return self._num_left > 0

    def admitted(self) -> None:
        """Count it."""
        self._set_num_left(self._num_left - 1)

    def _set_num_left(self, num_left: int) -> None:
        self._num_left = num_left
        if not num_left and isinstance(self.order, LengthOrder):
            self.order.group = None

    def wakeup(self, view: StepView) -> float | None:
        """When the oldest waiting request has waited long enough, if nothing runs."""
        if view.num_running or view.oldest_arrival_s is None:
            return None
        return view.oldest_arrival_s + self._timeout_s

    def _is_due(self, view: StepView) -> bool:
        oldest_s = view.now if view.oldest_arrival_s is None else view.oldest_arrival_s
        return view.num_waiting >= self._max_num_seqs or view.now >= oldest_s + self._timeout_s


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that the configuration names."""
    # a token passes all stages of a pipeline, and a step is as long as in the mean stage
    target_s = config.inter_token_target_s / config.num_stages
    aging_s = config.priority_aging_s
    match config.policy:
        case PolicyName.MIXED:
            return MixedPolicy(PriorityOrder(aging_s), target_s)
        case PolicyName.PREFILL_FIRST:
            return PrefillFirstPolicy(PriorityOrder(aging_s))
        case PolicyName.DECODE_FIRST:
            return DecodeFirstPolicy(PriorityOrder(aging_s), target_s, aging_s)
        case PolicyName.FCFS:
            return MixedPolicy(ServiceOrder(), target_s)
        case PolicyName.PRIORITY:
            return MixedPolicy(PriorityOrder(aging_s, _SHORTEST_FIRST), target_s)
        case PolicyName.DEADLINE:
            return MixedPolicy(DeadlineOrder(aging_s), target_s)
        case PolicyName.FAIR:
            return MixedPolicy(FairOrder(aging_s), target_s)
        case PolicyName.STATIC:
            return BatchPolicy(ServiceOrder(), config.max_num_seqs, timeout_s=0.0)
        case PolicyName.DYNAMIC:
            return BatchPolicy(ServiceOrder(), config.max_num_seqs, config.batch_timeout_s)
        case PolicyName.LENGTH_GROUPED:
            return BatchPolicy(LengthOrder(), config.max_num_seqs, config.batch_timeout_s)
