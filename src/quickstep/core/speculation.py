"""How many draft tokens a row gets: as many as are predicted to pay.

A proposer (`runtime.speculation`) guesses the next tokens of a sequence, one row checks them all,
and those that the sequence would have generated anyway are accepted. The i-th draft is accepted
with the probability p^i, if each one is with p after those before it. It costs some of the step's
time, in which the batch could have generated other tokens without drafts; so it pays if

    p^i > price,    price = seconds of one more token / seconds of the step * its rows

In a tree several drafts may follow a token, and those that are more likely come first: the i-th is
accepted as often as the i-th draft of other trees, and as often as the drafts of this sequence are
compared with those of others.

p is measured for each sequence, and 1 for tokens that a grammar forces; the seconds are the cost
model's. With many rows, or where the machine is limited by computation, the price approaches 1 and
nothing is drafted.

What the price leaves out (proposing, sampling a row's tokens one after the other) is measured: for
each size of the batch, most steps run in the better of two modes, with and without drafts, and a
few in the other one, to compare the tokens per second of both. The more often a comparison has had
the same result, the rarer is the next one, so that it costs nearly nothing.

Owned by `core.scheduler`. Time comes in as an argument; the tokens do not depend on any of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.types import StepRow

__all__ = ["Acceptance", "DraftControl", "DraftMode"]

# A sequence's rate is an average over its drafts, of which the rate that it began with counts as so
# many; later an exponential one.
_PRIOR_DRAFTS = 6
_GAIN = 0.08
_SHARED_GAIN = 0.02  # of the rate with which new sequences begin
_FIRST_RATE = 0.6
_LEAST_RATE, _MOST_RATE = 0.02, 0.98
# A draft has to gain this much more than it costs, because both are estimates.
_MARGIN = 1.2
# Steps before the first trial, then before others, and of a trial. The first step with drafts after
# a change is not counted: proposers learn of all that was generated without them. Where drafts take
# 1.2 times as long, a trial ends after 5 steps: 1.5 % of 69 steps, and of 517 0.2 %.
_FIRST_STEPS = 24
_USUAL_STEPS = 64
_MOST_STEPS = 512
_TRIAL_STEPS = 16
_IGNORED_STEPS = 1
_LEAST_COUNTED = 2
_CLEAR_LOSS = 0.6
_WATCHED_STEPS = 32  # after a change, before drafts can be found to have become worse
_KEPT = 0.95
_LEAST_SPEEDUP = 1.03  # drafts have to be faster by this much
_PRICED_EVERY = 8  # steps
_LEAST_S = 1e-9  # of a prediction
# A sequence without drafts tries one after so many tokens: its text may repeat itself again.
_RETRY_AFTER = 48


class Acceptance(msgspec.Struct):
    """The drafts of one sequence. `rate` is the probability p that a draft is accepted, in a tree
    that one of those after the same token is; None before its first drafts. `num_outcomes`: drafts
    that it is known from. `drafted_at`: how many outputs the sequence had when its last drafts were
    checked. `in_trees`: they were a tree.
    """

    rate: float | None = None
    num_outcomes: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    drafted_at: int = 0
    in_trees: bool = False


class DraftMode(msgspec.Struct, frozen=True):
    """How a step was planned: the class of its batch (see `_size_class`), and whether its rows
    could have drafts.
    """

    size_class: int
    uses_drafts: bool


def _size_class(num_sequences: int) -> int:
    """Batches of more than half of a power of two and up to it are alike, so that a batch of 64
    remains one while a sequence that has ended is replaced.
    """
    return max(0, num_sequences - 1).bit_length()


class _Steps(msgspec.Struct):
    """Steps in one mode: tokens per row, and relative seconds; older ones count less."""

    count: int = 0
    tokens: float = 0.0
    relative_s: float = 0.0

    def add(self, tokens_per_row: float, relative_s: float) -> None:
        self.count += 1
        self.tokens = _KEPT * self.tokens + tokens_per_row
        self.relative_s = _KEPT * self.relative_s + relative_s

    def is_faster(self, other: _Steps, ratio: float) -> bool:
        """Whether they generate more than `ratio` times as many tokens in the same time."""
        return self.tokens * other.relative_s > ratio * other.tokens * self.relative_s


class _Comparison:
    """The two modes of steps with batches of about the same size, and which one runs now."""

    def __init__(self, uses_drafts: bool) -> None:
        self.uses_drafts = uses_drafts
        self._is_trial = False
        self._usual = _Steps()  # in the better mode
        self._trial = _Steps()
        self._other = _Steps()  # the last ones that were compared with the better mode
        self._num_usual = _USUAL_STEPS  # before the next trial
        self._num_left = _FIRST_STEPS
        self._num_ignored = _IGNORED_STEPS

    def measured(self, tokens_per_row: float, relative_s: float) -> None:
        """Count a step in the current mode, and change the mode when it is time."""
        self._num_left -= 1
        if self._num_ignored:
            self._num_ignored -= 1
        else:
            (self._trial if self._is_trial else self._usual).add(tokens_per_row, relative_s)
        if self._is_trial and (self._num_left <= 0 or self._is_lost()):
            self._end_trial()
        elif not self._is_trial and (self._num_left <= 0 or self._has_become_worse()):
            self._trial = _Steps()
            self._switch(_TRIAL_STEPS)

    def _is_lost(self) -> bool:
        """Whether the trial is so slow that it can end: the more steps, the less slow that is."""
        count = self._trial.count
        if count < _LEAST_COUNTED:
            return False
        return self._usual.is_faster(self._trial, 1.0 + _CLEAR_LOSS / count)

    def _has_become_worse(self) -> bool:
        """Whether drafts, which were better, are slower than steps without drafts were."""
        is_known = self._num_usual - self._num_left >= _WATCHED_STEPS and self._other.count > 0
        return self.uses_drafts and is_known and self._other.is_faster(self._usual, 1.0)

    def _end_trial(self) -> None:
        with_drafts, without = self._trial, self._usual
        if not self.uses_drafts:
            with_drafts, without = without, with_drafts
        is_better_with = with_drafts.is_faster(without, _LEAST_SPEEDUP)
        if is_better_with is self.uses_drafts:  # the trial's mode
            self._usual, self._other = self._trial, self._usual
            self._is_trial = False
            self._num_left = self._num_usual = _USUAL_STEPS
        else:
            self._other = self._trial
            self._num_usual = min(_MOST_STEPS, 2 * self._num_usual)
            self._switch(self._num_usual)

    def _switch(self, num_steps: int) -> None:
        """So many steps in the other mode."""
        self._is_trial = not self._is_trial
        self.uses_drafts = not self.uses_drafts
        self._num_left = num_steps
        self._num_ignored = _IGNORED_STEPS


class DraftControl:
    """Decides the number of drafts of each row. `max_drafts` 0 turns speculation off."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._comparisons: dict[int, _Comparison] = {}  # by the class of the batch
        self._size_class = 0
        self._uses_drafts = max_drafts > 0
        self._used_drafts = self._uses_drafts  # in the step before
        self._num_planned = 0
        self._priced_rows = 0
        self._first_rate = _FIRST_RATE
        # of the i-th draft of a tree, how often it is accepted
        self._tree_rates = [_FIRST_RATE / (1 + index) for index in range(max_drafts)]
        self._price = 0.0  # tokens that the batch could generate in the time of one more

    @property
    def uses_drafts(self) -> bool:
        """Whether the rows of the next step may get drafts at all."""
        return self._uses_drafts

    def begin_step(self, num_sequences: int) -> None:
        """Choose the mode of the step that is planned next, with about this many sequences. In a
        batch of a new size it is the one before.
        """
        self._size_class = _size_class(num_sequences)
        comparison = self._comparisons.get(self._size_class)
        if comparison is None:
            comparison = self._comparisons[self._size_class] = _Comparison(self._uses_drafts)
        self._uses_drafts = comparison.uses_drafts

    def planned(self, decode: StepLoad, cost_model: CostModel) -> DraftMode | None:
        """A step with these decode rows has been planned: set the price of a draft for the next
        one. Returns what `measured` needs; None where the step says nothing about its mode, because
        its drafts were requested by a step in the other mode.
        """
        if not self.max_drafts:
            return None
        if self._uses_drafts and decode.num_rows:
            self._set_price(decode, cost_model)
        is_changed = self._used_drafts is not self._uses_drafts
        self._used_drafts = self._uses_drafts
        return None if is_changed else DraftMode(self._size_class, self._uses_drafts)

    def _set_price(self, decode: StepLoad, cost_model: CostModel) -> None:
        self._num_planned += 1
        if decode.num_rows == self._priced_rows and self._num_planned % _PRICED_EVERY:
            return  # the price hardly changes, and it takes two predictions
        self._priced_rows = decode.num_rows
        context = decode.num_kv_tokens // decode.num_rows
        num_rows, num_kv = decode.num_rows, decode.num_rows * context
        step_s = cost_model.seconds(
            StepLoad(num_rows, num_rows, num_kv, num_kv, num_logits_rows=num_rows)
        )
        with_draft = StepLoad(
            num_rows + 1, num_rows, num_kv + 1, num_kv + context, num_logits_rows=num_rows + 1
        )
        draft_s = cost_model.seconds(with_draft) - step_s
        self._price = draft_s * num_rows / step_s if step_s > 0.0 else 1.0

    def measured(
        self,
        mode: DraftMode,
        decode: StepLoad,
        num_accepted: int,
        seconds: float,
        cost_model: CostModel,
    ) -> None:
        """Learn from a step: how it was planned, the load of its decode rows, how many of their
        drafts were accepted, and their part of the seconds from the result of the step before to
        its own.
        """
        num_rows = decode.num_rows
        comparison = self._comparisons[mode.size_class]
        if not num_rows or comparison.uses_drafts is not mode.uses_drafts:  # has changed since
            return
        num_kv_tokens = decode.num_kv_tokens - (decode.num_tokens - num_rows)
        without_drafts = StepLoad(
            num_rows, num_rows, num_kv_tokens, num_kv_tokens, num_logits_rows=num_rows
        )
        relative_s = seconds / max(cost_model.usual_seconds(without_drafts), _LEAST_S)
        comparison.measured(1.0 + num_accepted / num_rows, relative_s)

    def num_drafts(self, acceptance: Acceptance, num_outputs: int) -> int:
        """How many drafts pay for a sequence that has so many outputs."""
        if not self._uses_drafts:
            return 0
        rate = self._first_rate if acceptance.rate is None else acceptance.rate
        threshold = _MARGIN * self._price
        if threshold <= 0.0:
            return self.max_drafts
        count = 0
        if acceptance.in_trees:
            least = threshold * self._first_rate / rate
            count = sum(1 for _ in takewhile(lambda of_draft: of_draft > least, self._tree_rates))
        elif threshold < rate:
            count = int(math.log(threshold) / math.log(rate))
        if not count and threshold < 1.0 and num_outputs - acceptance.drafted_at >= _RETRY_AFTER:
            count = 1
        return min(self.max_drafts, count)

    def num_forced(self) -> int:
        """How many drafts pay that are certain to be accepted."""
        return self.max_drafts if self._uses_drafts and _MARGIN * self._price < 1.0 else 0

    def checked(
        self,
        acceptance: Acceptance,
        num_outputs: int,
        row: StepRow,
        accepted: Sequence[int],
        num_forced: int = 0,
    ) -> None:
        """Learn from a row with drafts after `num_outputs` outputs, of which those with the numbers
        `accepted` were accepted, from 1 on. The first `num_forced` say nothing about the others.
        """
        acceptance.num_drafts += row.num_drafts
        acceptance.num_accepted += len(accepted)
        if row.num_drafts <= num_forced:
            return
        acceptance.drafted_at = num_outputs
        acceptance.in_trees = bool(row.parents)
        if row.parents:
            for index in range(num_forced, row.num_drafts):
                outcome = float(index + 1 in accepted)
                self._tree_rates[index] += _SHARED_GAIN * (outcome - self._tree_rates[index])
        last = accepted[-1] if accepted else 0
        had_more = last in row.parents if row.parents else last < row.num_drafts
        rate = self._first_rate if acceptance.rate is None else acceptance.rate
        outcomes = [1.0] * max(0, len(accepted) - num_forced) + [0.0] * had_more
        for outcome in outcomes:
            acceptance.num_outcomes += 1
            gain = max(_GAIN, 1.0 / (_PRIOR_DRAFTS + acceptance.num_outcomes))
            rate += gain * (outcome - rate)
            self._first_rate += _SHARED_GAIN * (outcome - self._first_rate)
        acceptance.rate = min(_MOST_RATE, max(_LEAST_RATE, rate))
        self._first_rate = min(_MOST_RATE, max(_LEAST_RATE, self._first_rate))
