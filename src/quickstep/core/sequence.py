"""One sequence of a request, from arrival to its end: tokens, residency, and where its time went.

Owned and changed by `core.scheduler` alone. A *residency* is one stay in the batch, from admission
to end or preemption; a preempted sequence keeps its tokens and starts a new residency later. A
*paused* one gets no rows and stands behind all others, wherever it is.
"""

from __future__ import annotations

import enum

import msgspec
from msgspec.structs import replace

from quickstep.core.block_pool import NO_HITS, BlockKey, ChainRoot
from quickstep.types import (
    Admission,
    FinishReason,
    Phase,
    Pooling,
    Request,
    RowOutput,
    SequenceOutput,
    SequenceTimings,
    StepRow,
    TokenLogprobs,
)

__all__ = ["Residency", "Sequence", "SequenceState", "sequence_seed"]

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sequence_seed(seed: int, index: int) -> int:
    """The noise seed of sequence `index` of a request: the request's own for 0.

    The others are outputs of SplitMix64 (Steele, Lea, Flood 2014) started at `seed`.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _GOLDEN) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)


class SequenceState(enum.Enum):
    """Where a sequence stands; `WAITING` and `PREEMPTED` ones are in the queue."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class _Activity(enum.Enum):
    """What a sequence's wall time is booked under; the parts of `SequenceTimings`."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    PAUSED = "paused"


class Residency(msgspec.Struct, eq=False):
    """One stay in the batch. Positions count tokens of the sequence.

    Attributes:
        blocks: The block table; kept as it was when the residency ends.
        prefill_end: Tokens known at admission: rows below it are prefill.
        planned: Positions whose KV is computed or in flight.
        pending: Tokens that rows in flight will emit.
        keys: Keys of the leading full blocks, hits included, as far as they are registered.
        invalidated: It read KV of a step that failed: what its rows in flight give is discarded.
    """

    slot: int
    blocks: list[int]
    prefill_end: int
    planned: int
    keys: list[BlockKey] = msgspec.field(default_factory=list)
    pending: int = 0
    invalidated: bool = False


class _Clock(msgspec.Struct):
    """Books wall time under activities, so that the parts add up to the whole."""

    activity: _Activity  # beneath a pause, which may outlast several
    since_s: float
    is_paused: bool = False
    seconds: dict[_Activity, float] = msgspec.field(
        default_factory=lambda: dict.fromkeys(_Activity, 0.0)
    )

    def enter(self, activity: _Activity, now: float) -> None:
        self.book(now)
        self.activity = activity

    def pause(self, is_paused: bool, now: float) -> None:
        self.book(now)
        self.is_paused = is_paused

    def book(self, now: float) -> None:
        activity = _Activity.PAUSED if self.is_paused else self.activity
        self.seconds[activity] += now - self.since_s
        self.since_s = now


class Sequence:
    """Mutable state of one sequence. `rank` orders service, waiting and running: lower first.

    A sequence gains one level of priority for every `aging_s` seconds since it arrived, so that no
    flow of higher priorities makes it wait for ever. At any moment t the order by

        priority - (t - arrival_s) / aging_s

    is the order by arrival_s + priority * aging_s: t falls out, and a rank never changes with time.
    """

    def __init__(
        self, request: Request, index: int, arrival: int, now: float, aging_s: float
    ) -> None:
        self.request = request
        self.index = index
        self.sequence_id = f"{request.request_id}#{index}"
        self.seed = sequence_seed(request.seed, index)
        self.arrival = arrival
        self.is_paused = False
        self.rank = (False, now + request.priority * aging_s, arrival)
        self.root = ChainRoot(request.adapter, request.cache_salt)
        self.token_ids = list(request.prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.digests: list[bytes] = []  # of leading full blocks, computed when first needed
        self.known_hits = NO_HITS  # of the last lookup while it waited
        self.state = SequenceState.WAITING
        self.residency: Residency | None = None  # the latest
        self.num_cached_tokens: int | None = None  # None until first admitted
        self.device_s = 0.0
        self.arrival_s = now
        timeout_s = request.timeout_s
        self.deadline_s = None if timeout_s is None else now + timeout_s
        # prompt tokens that are scored and delivered; of a request's sequences the first does it
        scores = index == 0 and request.sampling.prompt_logprobs is not None
        self._num_scored_tokens = 0 if scores else self.prompt_len
        self._first_scheduled_s: float | None = None
        self._first_token_s: float | None = None
        self._num_preemptions = 0
        self._max_blocks = 0
        self._clock = _Clock(_Activity.QUEUE, now)

    @property
    def num_outputs(self) -> int:
        """Output tokens known."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache: their hidden states do not."""
        if self.request.pooling is Pooling.MEAN:
            return 0
        if self._num_scored_tokens < self.prompt_len:
            return max(0, self._num_scored_tokens - 1)
        # At least one token is left to compute: its logits give the next one.
        return len(self.token_ids) - 1

    @property
    def scored_positions(self) -> range:
        """Positions whose logits score the prompt tokens that are not delivered yet. The logits of
        the prompt's last token belong to the output.
        """
        return range(max(0, self._num_scored_tokens - 1), self.prompt_len - 1)

    def may_take_the_place_of(self, other: Sequence) -> bool:
        """Whether `other`, which runs, may be preempted to admit this one: it is paused, or has a
        lower priority that its age does not make up for. Equal ones would only take turns.
        """
        is_lower = other.request.priority > self.request.priority
        return other.is_paused or (is_lower and other.rank > self.rank)

    @property
    def num_pending(self) -> int:
        """Tokens that rows in flight will add."""
        return self.residency.pending if self.residency else 0

    @property
    def num_prefill_left(self) -> int:
        """Tokens known at admission that a step may take now; none while it is paused."""
        residency = self.resident
        return 0 if self.is_paused else max(0, residency.prefill_end - residency.planned)

    def admit(self, residency: Residency, now: float) -> None:
        """Enter the batch."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = residency.planned
            self._first_scheduled_s = now
        self.residency = residency
        self.state = SequenceState.RUNNING
        self._max_blocks = max(self._max_blocks, len(residency.blocks))
        self._clock.enter(_Activity.PREFILL, now)

    def admission(self) -> Admission:
        """What the executor sets its slot up from."""
        return Admission(
            slot=self.resident.slot,
            sequence_id=self.sequence_id,
            token_ids=tuple(self.token_ids),
            prompt_len=self.prompt_len,
            sampling=self.request.sampling,
            seed=self.seed,
            eos_token_ids=self.request.eos_token_ids,
            adapter=self.request.adapter,
            pooling=self.request.pooling,
        )

    def row(self, num_tokens: int, new_block_ids: tuple[int, ...]) -> StepRow:
        """The row that computes the next `num_tokens` tokens."""
        residency, request = self.resident, self.request
        start = residency.planned
        end = start + num_tokens
        ends = end == len(self.token_ids) + residency.pending
        emits = ends and not request.prompt_only
        row = StepRow(
            residency.slot,
            start,
            num_tokens,
            tuple(self.token_ids[start:end]),
            new_block_ids,
            Phase.PREFILL if start < residency.prefill_end else Phase.DECODE,
            emits,
            output_position=end - self.prompt_len if emits else 0,
            adapter=request.adapter,
        )
        if start >= self.prompt_len:
            return row
        scored = self.scored_positions
        score_start = max(start, scored.start)
        num_scored = max(0, min(end, scored.stop) - score_start)
        return replace(
            row,
            score_start=score_start if num_scored else 0,
            num_scored=num_scored,
            pools=ends and request.pooling is not None,
        )

    def preempt(self, now: float) -> None:
        """Leave the batch; tokens that are still in flight will be kept."""
        self._max_blocks = max(self._max_blocks, len(self.resident.blocks))
        self._num_preemptions += 1
        self.state = SequenceState.PREEMPTED
        self._clock.enter(_Activity.PREEMPTED, now)

    def set_paused(self, is_paused: bool, now: float) -> None:
        """Pause or continue; this changes its rank."""
        self.is_paused = is_paused
        self.rank = (is_paused, *self.rank[1:])
        self._clock.pause(is_paused, now)

    def receive(
        self, row: StepRow, output: RowOutput, now: float, max_outputs: int
    ) -> tuple[SequenceOutput, FinishReason | None]:
        """Take what a row gave, up to a token that ends the sequence: what is new, and the end.

        `max_outputs` is the room that the context leaves for output tokens.
        """
        num_taken, reason = 0, None
        if row.emits:
            num_taken, reason = self._append(output.token_ids, now, max_outputs)
        elif self.request.prompt_only and row.end == self.prompt_len:
            reason = FinishReason.POOLED if row.pools else FinishReason.MAX_TOKENS
        new = SequenceOutput(
            self.request.request_id,
            self.index,
            output.token_ids[:num_taken],
            output.logprobs[:num_taken],
        )
        if row.start < self.prompt_len:
            embedding = output.embedding if row.pools else None
            new = replace(new, prompt_logprobs=self._score(row, output), embedding=embedding)
        return new, reason

    def _append(
        self, token_ids: tuple[int, ...], now: float, max_outputs: int
    ) -> tuple[int, FinishReason | None]:
        if self._first_token_s is None:
            self._first_token_s = now
        if self.state is SequenceState.RUNNING:
            self._clock.enter(_Activity.DECODE, now)
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            reason = self._end_reason(max_outputs)
            if reason is not None:
                return count, reason
        return len(token_ids), None

    def _score(self, row: StepRow, output: RowOutput) -> tuple[TokenLogprobs | None, ...]:
        """The prompt logprobs that nobody has delivered yet: a row may repeat those of a row that
        was in flight when the sequence was preempted.
        """
        num_known = self._num_scored_tokens
        if num_known == self.prompt_len:
            return ()
        first = (None,) if num_known == 0 else ()
        num_repeated = max(0, max(num_known, 1) - (row.score_start + 1))
        new = first + output.prompt_logprobs[num_repeated:]
        self._num_scored_tokens += len(new)
        return new

    @property
    def resident(self) -> Residency:
        """The residency of a sequence that has been admitted."""
        assert self.residency is not None, f"{self.sequence_id} was never admitted"
        return self.residency

    def _end_reason(self, max_outputs: int) -> FinishReason | None:
        sampling = self.request.sampling
        token_id = self.token_ids[-1]
        is_long_enough = self.num_outputs >= sampling.min_tokens
        # A grammar lets an end token come too early only where nothing else may follow.
        may_end = (is_long_enough or sampling.grammar is not None) and not sampling.ignore_eos
        if may_end and token_id in self.request.eos_token_ids:
            return FinishReason.EOS
        if is_long_enough and token_id in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if sampling.max_tokens is not None and self.num_outputs >= sampling.max_tokens:
            return FinishReason.MAX_TOKENS
        return FinishReason.CONTEXT_LIMIT if self.num_outputs >= max_outputs else None

    def finish(self, now: float) -> SequenceTimings:
        """End the sequence and account for its life."""
        if self.state is SequenceState.RUNNING:
            self._max_blocks = max(self._max_blocks, len(self.resident.blocks))
        self.state = SequenceState.FINISHED
        self._clock.book(now)
        seconds = self._clock.seconds
        return SequenceTimings(
            arrival_s=self.arrival_s,
            first_scheduled_s=self._first_scheduled_s,
            first_token_s=self._first_token_s,
            finished_s=now,
            queue_s=seconds[_Activity.QUEUE],
            prefill_s=seconds[_Activity.PREFILL],
            decode_s=seconds[_Activity.DECODE],
            preempted_s=seconds[_Activity.PREEMPTED],
            paused_s=seconds[_Activity.PAUSED],
            device_s=self.device_s,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self.prompt_len,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_output_tokens=self.num_outputs,
            num_blocks=self._max_blocks,
        )
