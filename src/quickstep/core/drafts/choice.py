"""Which of several proposers drafts for which sequences: the most tokens per predicted second.

Used by `runtime.speculation.combined`, with measured seconds, and by the simulator, with those of a
cost model. Proposers without a model run every time, they take microseconds. Those with a model run
for the sequences for which they are predicted to gain more tokens than the others, if that is worth
their seconds:

    n drafts that are accepted with p each after those before it     p + p^2 + ... + p^n tokens
    tokens per second                 (sequences + gained tokens) / (seconds of a step + of calls)

Models are chosen one after the other, as long as a further one makes the tokens per second rise.
p is an exponential average for each sequence and proposer. A model that was not called for some
time is called once in addition, more and more rarely.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

_GAIN = 0.15  # of a sequence's rate, per draft
_SHARED_GAIN = 0.02  # of the rate with which new sequences begin
_FIRST_RATE = 0.6
_MOST_RATE = 0.98
_AVERAGE_GAIN = 0.1
_LONGEST_GAP = 4.0  # times the seconds of a step: after a longer one, the engine was idle
_RETRY_AFTER = 48  # proposals without a model
_MOST_RETRY_AFTER = 768
# A call that computes more tokens than so many of a sequence is one of those that are rare.
_MOST_UNSEEN = 32


class WantedDrafts(msgspec.Struct, frozen=True):
    """A sequence for which drafts are wanted.

    Attributes:
        num_drafts: At most so many, at least 1.
        num_new: Tokens since the last call of `seen` or `choose`.
        depths: By the names of proposers, how many of the drafts that they have for it can be
            accepted.
        has_hidden: Whether there is the hidden state that some models need.
    """

    slot: int
    num_drafts: int
    num_new: int
    depths: Mapping[str, int]
    has_hidden: bool = True


class _Source(msgspec.Struct):
    """What is known of a proposer.

    Attributes:
        first_rate: The rate of new sequences.
        depth_ratio: How many drafts can be accepted, per draft that was wanted.
        seconds: Of a call, by the bit length of the number of its sequences.
        num_without: Proposals since its last call.
        retry_after: Proposals without a call, after which it is called in any case.
    """

    name: str
    first_rate: float = _FIRST_RATE
    depth_ratio: float = 1.0
    seconds: dict[int, float] = msgspec.field(default_factory=dict)
    num_without: int = 0
    retry_after: int = _RETRY_AFTER

    def seconds_of(self, num_sequences: int) -> float:
        """Of a call, as of those for about as many sequences; 0 before the first one."""
        if not self.seconds:
            return 0.0
        size = num_sequences.bit_length()
        return self.seconds[min(self.seconds, key=lambda known: abs(known - size))]


class _Unused(msgspec.Struct):
    """What a sequence had without a model: proposals, and tokens."""

    num_proposals: int = 0
    num_tokens: int = 0


class _Sequence(msgspec.Struct):
    """By the names of proposers: what it had without each model, and the rates of drafts."""

    unused: dict[str, _Unused]
    rates: dict[str, float] = msgspec.field(default_factory=dict)

    def rate(self, source: _Source) -> float:
        """With which the drafts of a proposer are accepted."""
        return self.rates.get(source.name, source.first_rate)


class DraftChoice:
    """The choice among proposers, `free` ones and `models`, by their names.

    `with_hidden`: The models that draft only for sequences with a hidden state.
    """

    def __init__(
        self, free: Sequence[str], models: Sequence[str], with_hidden: Collection[str] = ()
    ) -> None:
        self._models = {name: _Source(name) for name in models}
        self._sources = {name: _Source(name) for name in free} | self._models
        self._with_hidden = frozenset(with_hidden)
        self._sequences: dict[int, _Sequence] = {}
        self._step_s = 0.0

    def drop(self, name: str) -> None:
        """A proposer is not there any more."""
        del self._sources[name]
        self._models.pop(name, None)

    def admit(self, slot: int, num_tokens: int) -> None:
        """A sequence of so many tokens is new in a slot."""
        unused = {name: _Unused(num_tokens=num_tokens) for name in self._models}
        self._sequences[slot] = _Sequence(unused)

    def release(self, slot: int) -> None:
        """The sequence has left its slot. Idempotent."""
        self._sequences.pop(slot, None)

    def seen(self, slot: int, num_tokens: int) -> None:
        """So many tokens are new for which no drafts were wanted."""
        for unused in self._sequences[slot].unused.values():
            unused.num_tokens += num_tokens

    def compared(self, slot: int, name: str, num_right: int, is_wrong: bool) -> None:
        """Learn from drafts of a proposer, whether they were chosen or not: how many were the
        tokens that followed, and whether the next one was not.
        """
        sequence, source = self._sequences[slot], self._sources[name]
        rate = sequence.rate(source)
        for outcome in (*[1.0] * num_right, *[0.0] * is_wrong):
            rate += _GAIN * (outcome - rate)
            source.first_rate += _SHARED_GAIN * (outcome - source.first_rate)
        sequence.rates[name] = rate

    def stepped(self, seconds: float) -> None:
        """A step took so long, without calls of models."""
        if self._step_s > 0.0:
            seconds = min(seconds, _LONGEST_GAP * self._step_s)
        self._step_s = _average(self._step_s, seconds)

    def called(
        self, name: str, seconds: float, wanted: Sequence[WantedDrafts], depths: Sequence[int]
    ) -> None:
        """Learn from a call of a model for these sequences: its time, and how many of each one's
        drafts can be accepted. Call it before the next `choose`.
        """
        source = self._models[name]
        most_unseen = 0
        for sequence in wanted:
            unused = self._sequences[sequence.slot].unused
            most_unseen = max(most_unseen, unused[name].num_tokens)
            unused[name] = _Unused()
        if most_unseen > _MOST_UNSEEN:
            return
        size = len(wanted).bit_length()
        source.seconds[size] = _average(source.seconds.get(size, 0.0), seconds)
        for one, depth in zip(wanted, depths, strict=True):
            ratio = depth / one.num_drafts
            source.depth_ratio += _AVERAGE_GAIN * (ratio - source.depth_ratio)

    def best(self, slot: int, depths: Mapping[str, int]) -> tuple[str | None, float]:
        """The proposer whose drafts have the largest expected number of accepted tokens, and that
        number.
        """
        sequence = self._sequences[slot]
        best, best_gain = None, 0.0
        for name, source in self._sources.items():
            gain = _expected(sequence.rate(source), depths.get(name, 0))
            if gain > best_gain:
                best, best_gain = name, gain
        return best, best_gain

    def choose(self, wanted: Sequence[WantedDrafts]) -> dict[str, list[int]]:
        """For each model, the places in `wanted` for which it is to be called now: those for which
        it was chosen, and from time to time others.
        """
        chosen = self._chosen(wanted)
        calls = {name: self._with_trials(name, wanted, chosen) for name in self._models}
        for place, one in enumerate(wanted):
            unused = self._sequences[one.slot].unused
            for name, places in calls.items():
                unused[name].num_tokens += one.num_new
                unused[name].num_proposals += place not in places
        return {name: sorted(places) for name, places in calls.items()}

    def _chosen(self, wanted: Sequence[WantedDrafts]) -> list[str | None]:
        """The model that drafts for each; None where the drafts that there are are as good."""
        chosen: list[str | None] = [None] * len(wanted)
        gains = [self.best(sequence.slot, sequence.depths)[1] for sequence in wanted]
        left = list(self._models)
        best_value = (len(wanted) + sum(gains)) / self._cost(chosen)
        while left:
            found = [self._with_model(name, wanted, chosen, gains) for name in left]
            values = [
                (len(wanted) + sum(new_gains)) / self._cost(new_chosen)
                for new_chosen, new_gains in found
            ]
            best = max(range(len(left)), key=values.__getitem__)
            if values[best] <= best_value:
                break
            best_value = values[best]
            chosen, gains = found[best]
            del left[best]
        return chosen

    def _with_model(
        self,
        name: str,
        wanted: Sequence[WantedDrafts],
        others: Sequence[str | None],
        gains: Sequence[float],
    ) -> tuple[list[str | None], list[float]]:
        """What drafts for each, and how many tokens that gains, if this model can, too."""
        source = self._models[name]
        chosen: list[str | None] = []
        new_gains: list[float] = []
        for one, other, gain in zip(wanted, others, gains, strict=True):
            expected = 0.0
            if one.has_hidden or name not in self._with_hidden:
                rate = self._sequences[one.slot].rate(source)
                expected = _expected(rate, source.depth_ratio * one.num_drafts)
            chosen.append(name if expected > gain else other)
            new_gains.append(max(expected, gain))
        return chosen, new_gains

    def _cost(self, chosen: Sequence[str | None]) -> float:
        """Seconds of a step and of the calls of its models, in those of a step."""
        if self._step_s <= 0.0:
            return 1.0
        counts = [(source, chosen.count(name)) for name, source in self._models.items()]
        call_s = sum(source.seconds_of(count) for source, count in counts if count)
        return 1.0 + call_s / self._step_s

    def _with_trials(
        self, name: str, wanted: Sequence[WantedDrafts], chosen: Sequence[str | None]
    ) -> set[int]:
        source = self._models[name]
        places = {place for place, one in enumerate(chosen) if one == name}
        if places:
            source.retry_after = _RETRY_AFTER
            for place, one in enumerate(wanted):
                if self._sequences[one.slot].unused[name].num_proposals >= _RETRY_AFTER:
                    places.add(place)
        elif source.num_without >= source.retry_after:
            source.retry_after = min(2 * source.retry_after, _MOST_RETRY_AFTER)
            places = set(range(len(wanted)))
        source.num_without = 0 if places else source.num_without + 1
        return places


def _average(average: float, value: float) -> float:
    """The exponential average with a further value; 0 before the first one."""
    return value if average == 0.0 else average + _AVERAGE_GAIN * (value - average)


def _expected(rate: float, num_drafts: float) -> float:
    """How many of the drafts are accepted, on average."""
    rate = min(rate, _MOST_RATE)
    return rate * (1.0 - math.pow(rate, num_drafts)) / (1.0 - rate)
