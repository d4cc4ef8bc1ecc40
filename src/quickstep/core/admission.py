"""Whether a request may queue, and how long it would wait: predicted from the state of the queue.

`SequenceLimits` is what is known without a queue. `AdmissionState` is a frozen copy of what decides
beyond that: made for each request with a deadline, and published by the engine with its stats, so
that a server refuses what cannot be served in time before it tokenises the prompt. Only the
scheduler, by its `AdmissionControl`, decides to accept.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec
from msgspec.structs import replace

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import CostModel, StepLoad, prompt_latency_s
from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.resources.resource import Slots
from quickstep.core.sequence import Sequence, ServicePrediction
from quickstep.core.service_order import ServiceOrder, account_of, level_of
from quickstep.core.shares import share_allows
from quickstep.errors import FirstTokenTooLate, PromptTooLong, QueueFull, RequestError
from quickstep.types import FinishReason, Request, RequestClass

LevelCounts = tuple[tuple[int, int], ...]  # a level of priority, and how many sequences have it

_MIN_ADMISSIONS = 8  # before a rate is known
_WAIT_MARGIN = 1.5  # waits vary about their mean
_GAIN = 0.1  # of running means
_DELAY_HALVES_S = 2.0
# The expected outputs of a request that may end early: a running mean, and its gain per end.
_FIRST_MEAN_OUTPUTS = 256.0
_MEAN_GAIN = 0.05
_EXPECTED_S = 1.0  # in which requests that follow an accepted one have to come
_NATURAL_ENDS = (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING)
_MAX_GONE = 4  # an account's sequences that a published state may still have
_MAX_LEVELS, _MAX_ACCOUNTS = 32, 8  # of priority and of the queue, in the published state


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

    def blocks_of_longest(self, block_size: int) -> int:
        """KV blocks of the longest sequence."""
        return -(-min(self.max_model_len, self.pool_tokens) // block_size)

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


class AdmissionState(msgspec.Struct, frozen=True):
    """What decides whether a request may queue, at one time.

    Attributes:
        num_waiting: Queued sequences.
        num_interactive: Those of them whose class is not BATCH.
        max_waiting: Queued sequences beyond which requests are refused; None for no limit.
        accounts: Those with the most of `num_interactive`, and how many.
        num_free_slots: How many more sequences may run.
        waiting: How many wait of each level of priority (`service_order.level_of`); None if the
            policy does not serve by level, so that a place in the queue is not known beforehand.
        running: How many run of each level; None likewise.
        prompt_s: Mean predicted time of a prompt.
        slot_s: Predicted time between two ends of sequences in a full batch.
        interval_s: Measured time between two admissions while others waited; None if not known.
        delay_s: How much later a first token comes after the admission than its prompt takes.
    """

    num_waiting: int = 0
    num_interactive: int = 0
    max_waiting: int | None = None
    accounts: tuple[tuple[str, int], ...] = ()
    num_free_slots: int = 1
    waiting: LevelCounts | None = None
    running: LevelCounts | None = None
    prompt_s: float = 0.0
    slot_s: float = 0.0
    interval_s: float | None = None
    delay_s: float = 0.0

    def wait_s(self, num_before: int, num_preemptible: int = 0) -> float:
        """How long a sequence waits after `num_before` others, if it may take the slots of
        `num_preemptible` running ones.

        Before the rate of admissions is known, those that get a free slot wait for the prompts
        before them; after that a sequence is admitted when one ends.
        """
        num_after = num_before + 1 - self.num_free_slots - num_preemptible
        if num_after <= 0 and not num_before:
            return 0.0
        if self.interval_s is not None:
            return _WAIT_MARGIN * (num_before + 1) * self.interval_s
        return num_before * self.prompt_s + max(0, num_after) * self.slot_s

    def wait_s_of(self, level: int, num_undecided: int) -> float:
        """How long a request of a level waits after those of its level or before, and after
        `num_undecided` sequences that the scheduler has not counted.
        """
        if self.waiting is None or self.running is None:
            return self.wait_s(self.num_waiting + num_undecided)
        num_before = sum(count for known, count in self.waiting if known <= level)
        num_preemptible = sum(count for known, count in self.running if known > level)
        return self.wait_s(num_before + num_undecided, num_preemptible)

    def check(
        self, request: Request, num_sequences: int, undecided: Mapping[int, int], waited_s: float
    ) -> None:
        """Raise QueueFull or FirstTokenTooLate for a request of so many sequences, which is not
        tokenised yet and came `waited_s` ago. `undecided` are sequences of each level that the
        scheduler has not counted.
        """
        self.check_queue(request, num_sequences)
        self._check_share(request, num_sequences)
        level = level_of(request)
        num_undecided = sum(count for one, count in undecided.items() if one <= level)
        self.check_first_token(request, num_undecided, waited_s)

    def check_queue(self, request: Request, num_sequences: int) -> None:
        """Raise QueueFull unless so many sequences of a request may wait.

        Sequences of the class BATCH do not count for an interactive request. An empty queue accepts
        any request, otherwise one with many sequences would never run.
        """
        if self.max_waiting is None:
            return
        is_batch = request.request_class is RequestClass.BATCH
        num_waiting = self.num_waiting if is_batch else self.num_interactive
        if num_waiting and num_waiting + num_sequences > self.max_waiting:
            raise QueueFull(num_waiting, num_sequences, self.max_waiting, self.wait_s(num_waiting))

    def _check_share(self, request: Request, num_sequences: int) -> None:
        """Raise QueueFull if the account of a request is one of the largest, and its share of the
        queue is used up. An account with few sequences is left to the scheduler: they may have left
        the queue since the state was published.
        """
        account = account_of(request)
        num_own = dict(self.accounts).get(account, 0)
        is_batch = request.request_class is RequestClass.BATCH
        if self.max_waiting is None or is_batch or not account or num_own <= _MAX_GONE:
            return
        most, num_held, weight = self.max_waiting, self.num_interactive, request.tenant_weight
        if not share_allows(most, num_held, num_own, num_sequences, weight):
            raise QueueFull(num_own, num_sequences, most, self.wait_s(num_own), account)

    def check_first_token(self, request: Request, num_undecided: int, waited_s: float) -> None:
        """Raise FirstTokenTooLate for a request that is not tokenised yet and would miss its
        deadline, `waited_s` after it came and with `num_undecided` other sequences before it that
        the scheduler has not counted.
        """
        deadline_s = request.ttft_deadline_s
        if deadline_s is None or self.waiting is None or self.running is None:
            return
        wait_s = self.wait_s_of(level_of(request), num_undecided)
        if waited_s + wait_s + self.delay_s > deadline_s:
            raise FirstTokenTooLate(deadline_s, wait_s, self.delay_s, waited_s)


class WaitEstimate:
    """Measures how sequences are admitted and how long their first tokens take from then on, so
    that predictions are rarely exceeded. One object belongs to one scheduler.

    The rate of the last admissions while others waited has everything in it that limits them:
    computation, slots, blocks. The time after the admission is longer than that of the prompt by
    itself: steps in flight end before, and other rows are in its step.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)
        self._prompt_s = 0.0
        self._delay_s = 0.0
        self._deviation_s = 0.0
        self._measured_s = 0.0  # when the last first token came

    def count_admission(self, now: float, any_left: bool) -> None:
        """A sequence was admitted; without others that wait, there is no queue to measure."""
        if any_left:
            self._times.append(now)
        else:
            self._times.clear()

    def count_prompt(self, prompt_s: float) -> None:
        """A prompt arrived that is predicted to take so long."""
        self._prompt_s += (_GAIN if self._prompt_s else 1.0) * (prompt_s - self._prompt_s)

    def count_first_token(self, delay_s: float, now: float) -> None:
        """A first token came `delay_s` later after the admission than its prompt takes alone."""
        error_s = delay_s - self._delay_s
        self._delay_s += _GAIN * error_s
        self._deviation_s += _GAIN * (abs(error_s) - self._deviation_s)
        self._measured_s = now

    @property
    def prompt_s(self) -> float:
        """The mean predicted time of a prompt."""
        return self._prompt_s

    def interval_s(self, now: float) -> float | None:
        """The mean time between two admissions; None until enough are known."""
        if len(self._times) < _MIN_ADMISSIONS:
            return None
        return (now - self._times[0]) / len(self._times)

    def delay_s(self, now: float) -> float:
        """How much later the first token comes than its prompt takes alone.

        Halved for every two seconds without a first token: a long delay could otherwise have every
        request refused, and then nothing would measure a shorter one.
        """
        age = max(0.0, now - self._measured_s) / _DELAY_HALVES_S
        return max(0.0, self._delay_s + 2.0 * self._deviation_s) * math.exp2(-min(64.0, age))


class ExpectedPlaces:
    """Places in the queue for requests that follow an accepted one (`Request.num_following`), until
    they come, or for a second: with several engines some come to another one.
    """

    def __init__(self) -> None:
        self._expected: deque[tuple[float, str, int]] = deque()  # until when, account, how many

    def expect(self, account: str, num_places: int, now: float) -> None:
        """So many follow."""
        self._expected.append((now + _EXPECTED_S, account, num_places))

    def arrived(self, account: str, num_places: int) -> None:
        """So many of an account have come."""
        for index, (until_s, other, num_expected) in enumerate(self._expected):
            if other == account:
                taken = min(num_places, num_expected)
                self._expected[index] = until_s, account, num_expected - taken
                num_places -= taken

    def num(self, now: float) -> int:
        """How many are still expected."""
        while self._expected and (self._expected[0][0] <= now or not self._expected[0][2]):
            self._expected.popleft()
        return sum(num_expected for _, _, num_expected in self._expected)


class AdmissionControl:
    """Decides which requests may queue, by what it predicts from the waiting and the running ones.

    One object belongs to one scheduler, which owns the queue, the batch and the slots.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limits: SequenceLimits,
        cost_model: CostModel,
        order: ServiceOrder,
        waiting: WaitingQueue,
        batch: RunningBatch,
        slots: Slots,
    ) -> None:
        self.limits = limits
        self._max_num_seqs = config.max_num_seqs
        self._num_stages = config.num_stages
        self._max_chunk = config.max_num_batched_tokens
        self._cost_model = cost_model
        self._order = order
        self._waiting = waiting
        self._batch = batch
        self._slots = slots
        self._wait_estimate = WaitEstimate()
        self._expected = ExpectedPlaces()
        self._mean_outputs = _FIRST_MEAN_OUTPUTS

    # -- an arriving request ----------------------------------------------------------------------

    def check_share(self, request: Request, now: float) -> None:
        """Raise QueueFull if the account of a request has its share of the queue."""
        account, num_more = account_of(request), request.sampling.n + request.num_following
        shares, num_all = self._waiting.shares(request), num_more + self._expected.num(now)
        if _has_place(request) or shares.allows(account, num_all, request.tenant_weight):
            return
        assert shares.capacity is not None, "without one, everything is allowed"
        num_own, state = shares.held(account), self.state_for(request, now)
        raise QueueFull(num_own, num_more, shares.capacity, state.wait_s(num_own), account)

    def sequences(self, request: Request, num_before: int, now: float) -> list[Sequence]:
        """The sequences of a request, after `num_before` others that have arrived.

        Raises:
            ResumedAfterEnd: One has ended with the tokens that its client has.
        """
        prediction = self.predict(request, now)
        arrival_s = now if request.received_s is None else min(now, request.received_s)
        # the time before a continuation was counted for the request that it continues
        waits_since_s = now if request.is_continuation else arrival_s
        rank = self._order.rank(request, arrival_s, prediction.service_s)
        output_limit = self.limits.output_limit(request)
        context_limit = self.limits.max_outputs(len(request.prompt_token_ids))
        resumed = {part.index: part for part in request.resumed}
        return [
            Sequence(
                request,
                index,
                num_before + place,
                waits_since_s,
                rank,
                prediction,
                output_limit,
                context_limit,
                resumed.get(index),
            )
            for place, index in enumerate(request.indices)
        ]

    def check_queue(self, sequence: Sequence, num_sequences: int, now: float) -> None:
        """Raise QueueFull or FirstTokenTooLate for the sequences of a request, of which the first
        is given, if the state of the queue refuses them and those that follow. What continues an
        accepted one may wait.
        """
        request, limit = sequence.request, self.limits.max_waiting
        if _was_accepted(request):
            return
        num_sequences += request.num_following + self._expected.num(now)
        is_full = limit is not None and len(self._waiting) + num_sequences > limit
        is_full = is_full and not request.has_place
        if not is_full and request.ttft_deadline_s is None:
            return
        state = self.state_for(request, now)
        if is_full:
            state.check_queue(request, num_sequences)
        self._check_first_token_in_time(sequence, state, now)

    def _check_first_token_in_time(
        self, sequence: Sequence, state: AdmissionState, now: float
    ) -> None:
        request, first_token_s = sequence.request, sequence.prediction.first_token_s
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

    def too_late(self, sequence: Sequence, now: float) -> FirstTokenTooLate:
        """The error of a waiting sequence whose first token cannot come in time any more."""
        request = sequence.request
        num_before = self._waiting.num_before(request, sequence.rank)
        return FirstTokenTooLate(
            deadline_s=request.ttft_deadline_s or 0.0,
            wait_s=self.state_for(request, now).wait_s(num_before),
            first_token_s=sequence.prediction.first_token_s,
            waited_s=now - sequence.arrival_s,
        )

    # -- predictions ------------------------------------------------------------------------------

    def predict(self, request: Request, now: float) -> ServicePrediction:
        """What each sequence of a request takes."""
        num_prompt, num_outputs = len(request.prompt_token_ids), self.expected_outputs(request)
        num_more = max(0, num_outputs - 1)
        middle = num_prompt + num_outputs // 2
        prompt_step_s = self._prompt_step_s(num_prompt)
        prompt_s = prompt_step_s if self._num_stages == 1 else self._prompt_s(num_prompt)
        decode_s = self._token_s(1, middle)
        # In a batch with those that are there, each row has its part of what a step costs once.
        num_live = len(self._batch) + len(self._waiting) + request.sampling.n
        num_rows = min(num_live, self._max_num_seqs)
        token_s = self._token_s(num_rows, middle)
        return ServicePrediction(
            service_s=prompt_s + num_more * decode_s,
            prompt_s=prompt_s,
            first_token_s=prompt_s + self._wait_estimate.delay_s(now),
            charge_s=prompt_step_s + num_more * token_s / num_rows,
            num_outputs=num_outputs,
        )

    def expected_outputs(self, request: Request) -> int:
        """How many tokens a sequence is expected to generate: its limit, or the recent mean if an
        end token may come before.
        """
        limit = self.limits.output_limit(request)
        return limit if request.sampling.ignore_eos else min(limit, round(self._mean_outputs))

    def expected_growth(self) -> int:
        """How many tokens the running sequences are expected to generate from now on. Paused ones
        make way for what waits: nothing is kept free for them.
        """
        return sum(
            max(0, self.expected_outputs(sequence.request) - sequence.num_outputs)
            for sequence in self._batch
            if not sequence.is_paused
        )

    def state_for(self, request: Request, now: float) -> AdmissionState:
        """The state for sequences of the size of a request, without the levels: the scheduler knows
        the place of a sequence in the queue.
        """
        num_prompt, num_outputs = len(request.prompt_token_ids), self.expected_outputs(request)
        return self._state(now, num_prompt, num_outputs)

    def state(self, now: float) -> AdmissionState:
        """What decides whether one more request may queue, with the levels of all sequences."""
        running = tuple(self._batch)
        num_outputs = num_prompt = 0.0
        if running:
            expected = [self.expected_outputs(sequence.request) for sequence in running]
            num_outputs = sum(expected) / len(running)
            num_prompt = sum(sequence.prompt_len for sequence in running) / len(running)
        return replace(
            self._state(now, num_prompt, num_outputs),
            waiting=self._levels(self._waiting),
            running=self._levels(running),
        )

    def _state(self, now: float, num_prompt: float, num_outputs: float) -> AdmissionState:
        is_queued = len(self._waiting) > 0
        num_rows = self._max_num_seqs
        token_s = self._token_s(num_rows, num_prompt + num_outputs / 2)
        return AdmissionState(
            num_waiting=len(self._waiting),
            num_interactive=self._waiting.num_interactive,
            max_waiting=self.limits.max_waiting,
            accounts=self._waiting.largest_accounts(_MAX_ACCOUNTS),
            num_free_slots=self._slots.num_free,
            prompt_s=self._wait_estimate.prompt_s,
            slot_s=num_outputs * token_s / num_rows,  # a full batch ends one so often
            interval_s=self._wait_estimate.interval_s(now) if is_queued else None,
            delay_s=self._wait_estimate.delay_s(now),
        )

    def _levels(self, sequences: Iterable[Sequence]) -> LevelCounts | None:
        """How many there are of each of the first levels; None if levels do not decide."""
        counts: Counter[int] = Counter()
        for sequence in sequences:
            level = self._order.level(sequence.request)
            if level is None:
                return None
            counts[level] += 1
        return tuple(sorted(counts.items())[:_MAX_LEVELS])

    def _prompt_step_s(self, num_prompt: int) -> float:
        """The step of a prompt by itself; of a pipeline, in the mean stage."""
        return self._cost_model.seconds(StepLoad.of_span(0, num_prompt, num_logits_rows=1))

    def _prompt_s(self, num_prompt: int) -> float:
        """From the begin of a prompt by itself to its first token."""
        costs, num_stages = self._cost_model, self._num_stages
        if num_stages == 1:
            return self._prompt_step_s(num_prompt)
        return prompt_latency_s(costs, 0, num_prompt, self._max_chunk, num_stages)

    def _token_s(self, num_rows: int, context: float) -> float:
        """Between two tokens of so many rows with contexts of that length. Each stage of a pipeline
        has a part of them in a step.
        """
        num_rows = -(-num_rows // self._num_stages)
        num_kv = round(num_rows * context)
        load = StepLoad(num_rows, num_rows, num_kv, num_kv, num_logits_rows=num_rows)
        return self._num_stages * self._cost_model.seconds(load)

    # -- what happens to sequences ----------------------------------------------------------------

    def accepted(self, request: Request, prediction: ServicePrediction, now: float) -> None:
        """A request was queued."""
        self._wait_estimate.count_prompt(prediction.prompt_s)
        if request.num_following and not _was_accepted(request):
            self._expected.expect(account_of(request), request.num_following, now)
        if request.has_place:
            self._expected.arrived(account_of(request), request.sampling.n)

    def admitted(self, now: float) -> None:
        """A sequence left the queue for the batch."""
        self._wait_estimate.count_admission(now, any_left=bool(self._waiting.head))

    def first_token(self, sequence: Sequence, now: float) -> None:
        """The first token of a sequence has come."""
        since_s = sequence.first_scheduled_s
        if since_s is not None:
            delay_s = now - since_s - self._prompt_s(sequence.prompt_len)
            self._wait_estimate.count_first_token(delay_s, now)

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended."""
        if reason in _NATURAL_ENDS:
            self._mean_outputs += _MEAN_GAIN * (sequence.num_outputs - self._mean_outputs)


def _has_place(request: Request) -> bool:
    """Whether the limits of the queue were passed before."""
    return request.has_place or _was_accepted(request)


def _was_accepted(request: Request) -> bool:
    """Whether it continues a request that has passed the limits of the queue."""
    return request.is_continuation or bool(request.resumed)
