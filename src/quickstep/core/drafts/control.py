"""How many draft tokens a row gets: as many as are predicted to pay.

A proposer (`runtime.speculation`) guesses the next tokens of a sequence, one row checks them all,
and those that the sequence would have generated anyway are accepted. The i-th draft is accepted
with the probability p^i, if each one is with p after those before it. It costs some of the step's
time, in which the batch could have generated other tokens without drafts; so it pays if

    p^i > price,    price = seconds of one more token / seconds of the step * its rows

where a step takes as long as it is measured to take without drafts, with all that follows it. The
engine also proposes a row's drafts, and samples its tokens one after the other. If all drafts of a
row together gain less than that costs, it gets none.

In a tree several drafts may follow a token, and those that are more likely come first: the i-th is
accepted as often as the i-th draft of other trees, and as often as the drafts of this sequence are
compared with those of others.

p is measured for each sequence, beginning with that of all, and 1 for tokens that a grammar forces;
the seconds are the cost model's. With many rows, or where the machine is limited by computation,
the price approaches 1 and nothing is drafted.

What the prices leave out is measured: for each size of the batch, most steps run in the better of
two modes, with and without drafts, and a few in the other one, to compare the tokens per second of
both. The more often a comparison has had the same result, the rarer is the next one, so that it
costs nearly nothing. Now and then every sequence tries a draft, in either mode: if drafts are
accepted much more often than when they were slower, or less than when they were faster, the next
comparison follows soon.

Owned by `core.scheduler`. Time comes in as an argument; the tokens do not depend on any of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from itertools import takewhile

import msgspec

from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.sequence import Acceptance, Residency, Sequence
from quickstep.types import RowOutput, StepRecord, StepRow

# A sequence's rate is an average of that of all, which counts as so many drafts, and of its own
# drafts, of which older ones count less.
_SHARED_DRAFTS = 6
_KEPT_DRAFTS = 0.92
_SHARED_GAIN = 0.02
_FIRST_RATE = 0.6
_LEAST_RATE, _MOST_RATE = 0.02, 0.98
# A draft has to gain this much more than it costs, because both are estimates.
_MARGIN = 1.2
# Of a row with drafts, in addition to its tokens: 20 to 35 us with batches of 4 to 64 (on a CPU).
_ROW_S = 3e-5
# Steps of a trial and of an average, by their rows: how many drafts are accepted varies.
_TRIAL_STEPS, _TRIAL_ROWS = 16, 64
_MEAN_STEPS, _MEAN_ROWS = 14, 128
# Steps before the first trial, then before others. Where drafts take 1.2 times as long, a trial of
# 16 steps ends after 5: 1.5 % of 69 steps, and of 517 0.2 %.
_FIRST_STEPS = 24
_LEAST_INTERVAL, _MOST_INTERVAL = 64, 512
# The first step with drafts after a change is not counted: proposers learn of all that was
# generated without them.
_IGNORED_STEPS = 1
_LEAST_COUNTED = 2
_CLEAR_LOSS = 0.6
# Drafts have to be so many times as fast; less is demanded of a few rows, whose steps say less, and
# whose drafts cost little.
_LEAST_SPEEDUP, _LESS_OF_ONE_ROW = 1.03, 0.08
_CHANGED = 0.2  # in the part of the drafts that are accepted, since the last comparison
_PROBED_EVERY = 64  # steps
_PRICED_EVERY = 8  # steps
_LEAST_S = 1e-9  # of a prediction


class DraftMode(msgspec.Struct, frozen=True):
    """How a step was planned: the class of its batch (see `begin_step`), and whether its rows
    could have drafts.
    """

    size_class: int
    uses_drafts: bool


class _Steps(msgspec.Struct):
    """Steps in one mode: tokens per row, and relative seconds; of older ones a part is `kept` with
    each further one.
    """

    kept: float
    count: int = 0
    tokens: float = 0.0
    relative_s: float = 0.0

    def add(self, tokens_per_row: float, relative_s: float) -> None:
        self.count += 1
        self.tokens = self.kept * self.tokens + tokens_per_row
        self.relative_s = self.kept * self.relative_s + relative_s

    def is_faster(self, other: _Steps, ratio: float) -> bool:
        """Whether they generate more than `ratio` times as many tokens in the same time."""
        return self.tokens * other.relative_s > ratio * other.tokens * self.relative_s


class _Comparison:
    """The two modes of steps with batches of about the same size, and which one runs now."""

    def __init__(self, size_class: int, uses_drafts: bool, rate: float) -> None:
        num_rows = 1 << size_class
        self.uses_drafts = uses_drafts
        self._is_trial = False
        self._trial_steps = max(_TRIAL_STEPS, _TRIAL_ROWS // num_rows)
        self._least_speedup = _LEAST_SPEEDUP - _LESS_OF_ONE_ROW / num_rows
        self._kept = 1.0 - 1.0 / max(_MEAN_STEPS, _MEAN_ROWS // num_rows)
        self._usual = self._no_steps()  # in the better mode
        self._trial = self._no_steps()
        self._other = self._no_steps()  # the last ones that were compared with the better mode
        self._interval = _LEAST_INTERVAL  # steps between two trials
        self._num_left = _FIRST_STEPS  # in this mode
        self._num_since = 0  # steps in this mode
        self._num_ignored = _IGNORED_STEPS
        # The least part of the drafts that was accepted when drafts were faster, if they were in
        # the last comparison; else the most when they were slower.
        self._rate = rate

    def _no_steps(self) -> _Steps:
        return _Steps(self._kept)

    def measured(self, tokens_per_row: float, relative_s: float, rate: float) -> None:
        """Count a step in the current mode, and change the mode when it is time. `rate`: the part
        of the drafts that is accepted at present.
        """
        if not self._is_trial:
            self._follow(rate)
        self._num_left -= 1
        self._num_since += 1
        if self._num_ignored:
            self._num_ignored -= 1
        else:
            (self._trial if self._is_trial else self._usual).add(tokens_per_row, relative_s)
        if self._is_trial and (self._num_left <= 0 or self._is_lost()):
            self._end_trial(rate)
        elif not self._is_trial and (self._num_left <= 0 or self._has_become_worse()):
            self._trial = self._no_steps()
            self._switch(self._trial_steps)

    def _follow(self, rate: float) -> None:
        """If the part of the drafts that is accepted has changed, compare the modes anew, soon."""
        change = self._rate - rate if self.uses_drafts else rate - self._rate
        if change > _CHANGED:
            self._rate = rate
            self._usual = self._no_steps()
            self._interval = _LEAST_INTERVAL
            soon = max(self._trial_steps, self._interval - self._num_since)
            self._num_left = min(self._num_left, soon)

    @property
    def relative_s(self) -> float:
        """The relative seconds of a step without drafts; 1.0 before one was measured."""
        without = self._other if self.uses_drafts is not self._is_trial else self._usual
        return without.relative_s / without.tokens if without.count else 1.0

    def _is_lost(self) -> bool:
        """Whether the trial is so slow that it can end: the more steps, the less slow that is."""
        count = self._trial.count
        if count < _LEAST_COUNTED:
            return False
        part = count * _TRIAL_STEPS / self._trial_steps
        return self._usual.is_faster(self._trial, 1.0 + _CLEAR_LOSS / part)

    def _has_become_worse(self) -> bool:
        """Whether drafts, which were better, are slower than steps without drafts were."""
        is_known = self._num_since >= self._trial_steps and self._other.count > 0
        return self.uses_drafts and is_known and self._other.is_faster(self._usual, 1.0)

    def _end_trial(self, rate: float) -> None:
        with_drafts, without = self._trial, self._usual
        if not self.uses_drafts:
            with_drafts, without = without, with_drafts
        is_better_with = with_drafts.is_faster(without, self._least_speedup)
        if is_better_with is self.uses_drafts:  # the trial's mode
            self._usual, self._other = self._trial, self._usual
            self._rate = rate
            self._is_trial = False
            self._num_left = self._interval = _LEAST_INTERVAL
            self._num_since = 0
        else:
            self._other = self._trial
            self._rate = (max if self.uses_drafts else min)(self._rate, rate)
            self._interval = min(_MOST_INTERVAL, 2 * self._interval)
            self._switch(self._interval)

    def _switch(self, num_steps: int) -> None:
        """So many steps in the other mode."""
        self._is_trial = not self._is_trial
        self.uses_drafts = not self.uses_drafts
        self._num_left = num_steps
        self._num_since = 0
        self._num_ignored = _IGNORED_STEPS


class DraftControl:
    """Decides the number of drafts of each row. `max_drafts` 0 turns speculation off."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._comparisons: dict[int, _Comparison] = {}  # by the class of the batch
        self._size_class = 0
        self.uses_drafts = max_drafts > 0  # the mode of the next step
        self._used_drafts = self.uses_drafts  # in the step before
        self._num_planned = 0
        self._priced_rows = 0
        self._is_probe = self.uses_drafts  # every row requests a draft
        self.may_request = self.uses_drafts  # the rows of the next step may request drafts at all
        self._was_probe = False  # the step before was one: this step has the drafts
        self._num_until_probe = _PROBED_EVERY
        self._shared_rate = _FIRST_RATE
        # of the i-th draft of a tree, how often it is accepted
        self._tree_rates = [_FIRST_RATE / (1 + index) for index in range(max_drafts)]
        # Tokens that the batch could generate in the time of a draft, and in `_ROW_S`.
        self._price = self._row_price = 0.0

    def begin_step(self, num_sequences: int) -> None:
        """Choose the mode of the step that is planned next, with about this many sequences. In a
        batch of a new size it is the one before.
        """
        if not self.max_drafts:
            return
        # Batches of more than half of a power of two and up to it are alike, so that a batch of 64
        # remains one while a sequence that has ended is replaced.
        self._size_class = max(0, num_sequences - 1).bit_length()
        comparison = self._comparisons.get(self._size_class)
        if comparison is None:
            comparison = _Comparison(self._size_class, self.uses_drafts, self._shared_rate)
            self._comparisons[self._size_class] = comparison
        self.uses_drafts = comparison.uses_drafts
        has_begun = self.uses_drafts and not self._used_drafts
        self._is_probe = has_begun or self._num_until_probe <= 0
        self.may_request = self.uses_drafts or self._is_probe

    def planned(self, decode: StepLoad, cost_model: CostModel) -> DraftMode | None:
        """A step with these decode rows has been planned: set the price of a draft for the next
        one. Returns what `measured` needs; None where the step says nothing about its mode: its
        drafts were requested by a step in the other mode, or only to try them.
        """
        if not self.max_drafts:
            return None
        if self.may_request and decode.num_rows:
            self._num_planned += 1
            # the price hardly changes, and it takes two predictions
            if decode.num_rows != self._priced_rows or not self._num_planned % _PRICED_EVERY:
                self._set_price(decode, cost_model)
        self._num_until_probe = _PROBED_EVERY if self._is_probe else self._num_until_probe - 1
        has_probe = self._is_probe or self._was_probe
        is_changed = self._used_drafts is not self.uses_drafts
        self._was_probe, self._used_drafts = self._is_probe, self.uses_drafts
        if is_changed or (has_probe and not self.uses_drafts):
            return None
        return DraftMode(self._size_class, self.uses_drafts)

    def _set_price(self, decode: StepLoad, cost_model: CostModel) -> None:
        self._priced_rows = decode.num_rows
        context = decode.num_kv_tokens // decode.num_rows
        num_rows, num_kv = decode.num_rows, decode.num_rows * context
        step_s = cost_model.usual_seconds(
            StepLoad(num_rows, num_rows, num_kv, num_kv, num_logits_rows=num_rows)
        )
        with_draft = StepLoad(
            num_rows + 1, num_rows, num_kv + 1, num_kv + context, num_logits_rows=num_rows + 1
        )
        draft_s = cost_model.usual_seconds(with_draft) - step_s
        step_s *= self._comparisons[self._size_class].relative_s
        tokens_per_s = num_rows / max(step_s, _LEAST_S)
        self._price = draft_s * tokens_per_s
        self._row_price = _ROW_S * tokens_per_s

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
        comparison.measured(1.0 + num_accepted / num_rows, relative_s, self._shared_rate)

    def learn(
        self,
        mode: DraftMode,
        decode: StepLoad,
        record: StepRecord,
        since_s: float,
        now: float,
        cost_model: CostModel,
    ) -> None:
        """Learn from the record of a step whose result came `now` and followed the one at
        `since_s`; `decode` is the load of its decode rows.
        """
        # With what follows a result, which drafts make longer, but without a pause.
        if record.planned_at_s - since_s > record.seconds:
            since_s = record.planned_at_s
        elapsed_s = (now - since_s) * (record.decode_s / max(record.seconds, 1e-9))
        self.measured(mode, decode, record.num_accepted, elapsed_s, cost_model)

    def num_for_row(self, sequence: Sequence, most: int) -> int:
        """How many of a sequence's drafts its next row has: those that pay, of `most` that fit."""
        num_forced = min(sequence.drafts.num_forced, self.num_forced())
        num_left = sequence.output_limit - sequence.num_outputs - 1
        return min(max(num_forced, self.num_checked(sequence.drafts.acceptance)), num_left, most)

    def num_next(self, sequence: Sequence) -> tuple[int, int]:
        """How many drafts to request for the row after the one that is placed now, and how many if
        they are forced; in steps that `may_request` some, for a request that allows them.
        """
        request = sequence.request
        num_known = sequence.num_outputs + 1  # after that row, at least
        num_left = max(0, sequence.output_limit - num_known - 1)
        num_drafts = min(self.num_requested(sequence.drafts.acceptance), num_left)
        if request.sampling.grammar is None and request.sampling.thinking_budget is None:
            return num_drafts, 0
        return num_drafts, min(self.num_forced(), num_left)

    def num_drafts(self, acceptance: Acceptance) -> int:
        """How many drafts pay for a sequence."""
        if not self.uses_drafts:
            return 0
        threshold = _MARGIN * self._price
        if threshold <= 0.0:
            return self.max_drafts
        rate = self._rate(acceptance)
        if acceptance.in_trees:
            ratio = rate / self._shared_rate
            rates = [ratio * of_draft for of_draft in self._tree_rates]
            count = sum(1 for _ in takewhile(lambda one: one > threshold, rates))
            num_gained = sum(rates[:count])
        elif threshold < rate:
            count = min(self.max_drafts, int(math.log(threshold) / math.log(rate)))
            num_gained = rate * (1.0 - rate**count) / (1.0 - rate)
        else:
            return 0
        return count if num_gained > count * threshold + self._row_price else 0

    def num_requested(self, acceptance: Acceptance) -> int:
        """How many drafts to request for a sequence: those that pay, or one to try it."""
        return self.num_drafts(acceptance) or int(self._is_probe and self._can_pay)

    def num_checked(self, acceptance: Acceptance) -> int:
        """How many of the drafts that a sequence requested to check: one at least."""
        can_pay = (self.uses_drafts or self._was_probe) and self._can_pay
        return self.num_drafts(acceptance) or int(can_pay)

    @property
    def _can_pay(self) -> bool:
        """Whether drafts pay that are certain to be accepted."""
        return _MARGIN * self._price < 1.0

    def _rate(self, acceptance: Acceptance) -> float:
        """The probability p of a sequence."""
        num_compared = acceptance.num_compared + _SHARED_DRAFTS
        return _bounded((acceptance.num_right + _SHARED_DRAFTS * self._shared_rate) / num_compared)

    def num_forced(self) -> int:
        """How many drafts pay that are certain to be accepted."""
        return self.max_drafts if self.uses_drafts and self._can_pay else 0

    def receive(
        self, sequence: Sequence, residency: Residency, row: StepRow, output: RowOutput
    ) -> None:
        """Learn from the result of a row that had drafts, or was to get some; the positions of
        rejected drafts are taken back: the next row overwrites their KV.
        """
        residency.awaits_drafts = False
        if not row.num_drafts:
            return
        num_accepted = len(output.token_ids) - 1
        residency.planned -= row.num_drafts - num_accepted
        num_forced = min(row.num_drafts, sequence.drafts.num_forced)
        accepted = output.accepted_drafts or range(1, num_accepted + 1)
        self.checked(sequence.drafts.acceptance, row, accepted, num_forced)

    def checked(
        self,
        acceptance: Acceptance,
        row: StepRow,
        accepted: SequenceOf[int],
        num_forced: int = 0,
    ) -> None:
        """Learn from a row with drafts, of which those with the numbers `accepted` were accepted,
        from 1 on. The first `num_forced` say nothing about the others.
        """
        acceptance.num_drafts += row.num_drafts
        acceptance.num_accepted += len(accepted)
        if row.num_drafts <= num_forced:
            return
        acceptance.in_trees = bool(row.parents)
        if row.parents:
            for index in range(num_forced, row.num_drafts):
                outcome = float(index + 1 in accepted)
                self._tree_rates[index] += _SHARED_GAIN * (outcome - self._tree_rates[index])
        last = accepted[-1] if accepted else 0
        had_more = last in row.parents if row.parents else last < row.num_drafts
        outcomes = [1.0] * max(0, len(accepted) - num_forced) + [0.0] * had_more
        for outcome in outcomes:
            acceptance.num_compared = _KEPT_DRAFTS * acceptance.num_compared + 1.0
            acceptance.num_right = _KEPT_DRAFTS * acceptance.num_right + outcome
            shared = self._shared_rate + _SHARED_GAIN * (outcome - self._shared_rate)
            self._shared_rate = _bounded(shared)


def divide(wanting: SequenceOf[Sequence], spare: int, turn: int) -> dict[str, int] | None:
    """Divide `spare` tokens of a step among the drafts of sequences: how many each may have at
    most, by its id; None if all may have theirs. If not, each turn begins with another sequence.
    """
    if spare >= sum([len(sequence.drafts.token_ids) for sequence in wanting]):
        return None
    first = turn % max(1, len(wanting))
    allowed = {}
    for sequence in (*wanting[first:], *wanting[:first]):
        num_drafts = max(0, min(len(sequence.drafts.token_ids), spare))
        allowed[sequence.sequence_id] = num_drafts
        spare -= num_drafts
    return allowed


def _bounded(rate: float) -> float:
    return min(_MOST_RATE, max(_LEAST_RATE, rate))
