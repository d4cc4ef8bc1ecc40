"""How a step's tokens are split between the phases.

The scheduler asks a policy, phase by phase in the policy's order, how many tokens that phase may
still take; and again for each prompt that is scored (its tokens cost more) and for those after it.
A policy gets a frozen view of the queue and of the step so far, and changes nothing. It cannot
break ranks, the token limit of a step, slots or blocks: these belong to the scheduler.

To add one: write a frozen struct with the three methods, name it in `config.PolicyName`,
return it from `make_policy`. Batch filling (static, dynamic) would return 0 for PREFILL until the
queue is long or old enough, and in `wakeup` the time of the next check.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.types import Phase

__all__ = ["MixedPolicy", "Policy", "PrefillFirstPolicy", "StepView", "make_policy"]


class StepView(msgspec.Struct, frozen=True):
    """The input of a policy.

    Attributes:
        decode: Load of the decode rows placed in this step so far.
        prefill: Load of the prefill rows placed so far.
        num_tokens_left: Tokens that the step may still take.
        prefill_start: Position where the next prefill row would start; its context so far.
        scored: Positions of its sequence whose logits score the prompt.
        num_running: Resident sequences. Paused ones do not count, here and below.
        num_waiting: Queued sequences.
        oldest_arrival_s: When the head of the queue arrived; None for an empty queue.
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

    def chunk(self, num_tokens: int) -> StepLoad:
        """The load of the next prefill row with this many tokens."""
        end = self.prefill_start + num_tokens
        first = max(self.prefill_start, self.scored.start)
        num_scored = max(0, min(end, self.scored.stop) - first)
        return StepLoad.of_span(self.prefill_start, num_tokens, num_scored)


class Policy(Protocol):
    """The split of a step between phases."""

    @property
    def phases(self) -> tuple[Phase, Phase]:
        """The order in which the phases get their tokens."""

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """How many tokens `phase` may take now; any number above `num_tokens_left` means all."""

    def wakeup(self, view: StepView) -> float | None:
        """When to plan again without an event; None if only events matter."""


class MixedPolicy(msgspec.Struct, frozen=True):
    """Decode rows first, then as much prefill as the predicted step time allows.

    A step with decode rows should stay under `inter_token_target_s`. But prefill gets at least
    `min_prefill_tokens`, so that no prompt starves during a long batch, and the step may take
    `least_stretch` times as long as its decode rows by themselves: where those are near the target
    or above it, the time of a step is the fixed cost of every step (reading the weights), and
    chunks that just fit would make prefill many times slower for hardly shorter gaps between
    tokens. A step without decode rows delays no token: its prefill gets all tokens.
    """

    inter_token_target_s: float
    min_prefill_tokens: int = 16
    least_stretch: float = 2.0
    phases: tuple[Phase, Phase] = (Phase.DECODE, Phase.PREFILL)

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """All tokens for decode; the largest chunk that is predicted to fit for prefill."""
        if phase is Phase.DECODE or not view.decode.num_rows:
            return view.num_tokens_left
        plain_s = cost_model.seconds(view.decode)
        target_s = max(self.inter_token_target_s, self.least_stretch * plain_s)
        placed = view.decode + view.prefill
        least = max(0, self.min_prefill_tokens - view.prefill.num_tokens)
        low, high = min(least, view.num_tokens_left), view.num_tokens_left
        while low < high:
            middle = (low + high + 1) // 2
            if cost_model.seconds(placed + view.chunk(middle)) <= target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def wakeup(self, view: StepView) -> float | None:
        """None: it never waits for more requests."""
        return None


class PrefillFirstPolicy(msgspec.Struct, frozen=True):
    """Prompts get complete steps; decode runs when no prompt can."""

    phases: tuple[Phase, Phase] = (Phase.PREFILL, Phase.DECODE)

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """All tokens for prefill; none for decode in a step that has prefill."""
        return 0 if phase is Phase.DECODE and view.prefill.num_rows else view.num_tokens_left

    def wakeup(self, view: StepView) -> float | None:
        """None: it never waits for more requests."""
        return None


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that the configuration names."""
    match config.policy:
        case PolicyName.MIXED:
            return MixedPolicy(config.inter_token_target_s)
        case PolicyName.PREFILL_FIRST:
            return PrefillFirstPolicy()
