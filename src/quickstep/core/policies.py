"""How a step's tokens are split between the phases.

A policy is asked, per phase and in its own order, how many tokens that phase may still take, and
again for each prompt that is scored, which a token costs more of, and those placed after it. It
sees a frozen view of the queue and of the step so far, and changes nothing. What it cannot break:
ranks, the token limit of a step, slots and blocks stay the scheduler's.

To add one: write a frozen struct with the three methods, name it in `config.PolicyName`,
return it from `make_policy`. Batch filling (static, dynamic) answers 0 for PREFILL until the queue
is long or old enough and says in `wakeup` when to ask again.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.types import Phase

__all__ = ["MixedPolicy", "Policy", "PrefillFirstPolicy", "StepView", "make_policy"]


class StepView(msgspec.Struct, frozen=True):
    """What a policy sees.

    Attributes:
        decode: Load of the decode rows placed in this step so far.
        prefill: Load of the prefill rows placed so far.
        room: Tokens that the step may still take.
        prefill_start: Position where the next prefill row would start; its context so far.
        scored: Positions of its sequence whose logits score the prompt.
        num_running: Resident sequences. Paused ones are not in sight here or below.
        num_waiting: Queued sequences.
        oldest_arrival_s: When the head of the queue arrived; None for an empty queue.
    """

    now: float
    decode: StepLoad
    prefill: StepLoad
    room: int
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
        """Which phase takes its tokens first."""

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """How many tokens `phase` may take now; more than `view.room` means all of it."""

    def wakeup(self, view: StepView) -> float | None:
        """When to plan again although nothing happens; None if only events matter."""


class MixedPolicy(msgspec.Struct, frozen=True):
    """Decode rows first, then as much prefill as the predicted step time allows.

    While something decodes, a step is meant to stay under `inter_token_target_s`, but prefill gets
    at least `min_prefill_tokens`, so that no prompt starves behind a long batch, and the step may
    take `least_stretch` times what its decode rows take alone: where that is near the target or
    beyond it, the time of a step is what every step costs (a model's weights), and chunks that just
    fit would compute a prompt many times slower for gaps hardly shorter. A step without decode rows
    makes nobody wait between tokens: it takes all the room.
    """

    inter_token_target_s: float
    min_prefill_tokens: int = 16
    least_stretch: float = 2.0
    phases: tuple[Phase, Phase] = (Phase.DECODE, Phase.PREFILL)

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """All the room for decode; the largest predicted chunk for prefill."""
        if phase is Phase.DECODE or not view.decode.num_rows:
            return view.room
        plain_s = cost_model.seconds(view.decode)
        target_s = max(self.inter_token_target_s, self.least_stretch * plain_s)
        placed = view.decode + view.prefill
        least = max(0, self.min_prefill_tokens - view.prefill.num_tokens)
        low, high = min(least, view.room), view.room
        while low < high:
            middle = (low + high + 1) // 2
            if cost_model.seconds(placed + view.chunk(middle)) <= target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def wakeup(self, view: StepView) -> float | None:
        """Never: it admits at once."""
        return None


class PrefillFirstPolicy(msgspec.Struct, frozen=True):
    """Prompts take whole steps; decode runs when no prompt can."""

    phases: tuple[Phase, Phase] = (Phase.PREFILL, Phase.DECODE)

    def tokens(self, phase: Phase, view: StepView, cost_model: CostModel) -> int:
        """All the room for prefill; nothing for decode beside it."""
        return 0 if phase is Phase.DECODE and view.prefill.num_rows else view.room

    def wakeup(self, view: StepView) -> float | None:
        """Never: it admits at once."""
        return None


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that the configuration names."""
    match config.policy:
        case PolicyName.MIXED:
            return MixedPolicy(config.inter_token_target_s)
        case PolicyName.PREFILL_FIRST:
            return PrefillFirstPolicy()
