"""One sequence of a request, from arrival to its end: tokens, residency, drafts, charges, timings.

Owned by `core.scheduler`; only it changes a sequence. A *residency* is one stay in the batch, from
admission to end or preemption; a preempted sequence keeps its tokens and starts a new residency
later. A *paused* sequence gets no rows and ranks after all others in its queue.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import Protocol

import msgspec
from msgspec.structs import replace

from quickstep.core.repetition import RepetitionDetector
from quickstep.core.resources.block_pool import NO_HITS, BlockKey, ChainRoot
from quickstep.errors import ResumedAfterEnd
from quickstep.types import (
    Activity,
    Admission,
    CacheMiss,
    FinishReason,
    Phase,
    PromptProgress,
    Request,
    Resumed,
    RowOutput,
    RowState,
    SequenceOutput,
    SequenceTimings,
    StepRow,
    TokenLogprobs,
)

# Whether it is paused, whether its deadline is lost, the rank of the policy's order, its number.
Rank = tuple[bool, bool, float, int]

# What sequences are charged is counted in whole numbers of 2 ** -80 s: sums do not round, so their
# order does not matter.
TICKS_PER_S = 2.0**80

_MAX_ACTIVITIES = 64  # changes that are recorded per sequence
_NO_SECONDS = MappingProxyType(dict.fromkeys(Activity, 0.0))
_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sequence_seed(seed: int, index: int) -> int:
    """The noise seed of sequence `index` of a request: the request's seed for 0.

    The others are outputs of SplitMix64 (Steele, Lea, Flood 2014) started at `seed`.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _GOLDEN) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)


class SequenceState(enum.Enum):
    """The state of a sequence; `WAITING` and `PREEMPTED` ones are in the waiting queue."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RowStates(Protocol):
    """What the rows of a residency do with its state."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that it holds."""

    @property
    def slot(self) -> int:
        """The one that its rows move on."""

    def advance(self, start: int, end: int, num_drafts: int) -> RowState:
        """What the row from position `start` to `end` does, the last of whose tokens are drafts."""

    def registered(self, keys: SequenceOf[BlockKey]) -> None:
        """The residency's leading blocks have these keys by now."""

    def depends_on(self) -> Residency | None:
        """Who computes, in a step in flight, the state that it began with."""


class Residency(msgspec.Struct, eq=False):
    """One stay in the batch. Positions count tokens of the sequence.

    Attributes:
        blocks: The block table; it does not change when the residency ends.
        prefill_end: Tokens known at admission: rows below it are prefill.
        planned: Positions whose KV is computed or in flight.
        recompute_end: Positions below it were computed in an earlier residency.
        pending: Tokens that rows in flight will emit.
        keys: Keys of the leading full blocks, hits included, as far as they are registered.
        invalidated: It read KV of a failed step: the results of its rows in flight are discarded.
        awaits_drafts: Its row in flight has drafts or asks for some: how the sequence continues is
            not known before that row is committed.
        drafted_end: The highest `end` of its rows with drafts. Blocks of drafts that were rejected
            are kept, because the next tokens need them.
        capacity: Positions that its blocks hold.
        registers_at: The number of planned positions at which its next block can be registered.
        state: Of a model whose layers keep a state of it (`core.resources.state_slots`).
    """

    prefill_end: int
    slot: int = 0
    blocks: list[int] = msgspec.field(default_factory=list)
    planned: int = 0
    keys: list[BlockKey] = msgspec.field(default_factory=list)
    pending: int = 0
    invalidated: bool = False
    recompute_end: int = 0
    awaits_drafts: bool = False
    drafted_end: int = 0
    capacity: int = 0
    registers_at: int = 0
    state: RowStates | None = None

    def restart(self, num_tokens: int) -> None:
        """Compute all tokens again, up to the `num_tokens` that are known by now."""
        self.planned = 0
        self.prefill_end = num_tokens


class ServicePrediction(msgspec.Struct, frozen=True):
    """What a sequence was predicted to take when it arrived, in seconds.

    Attributes:
        service_s: By itself, from the first token of its prompt to its end.
        prompt_s: The part of that until its first token.
        first_token_s: From its admission to its first token, next to others.
        charge_s: What it is charged, in a batch with those that are there.
        num_outputs: How many tokens it is expected to generate.
    """

    service_s: float = 0.0
    prompt_s: float = 0.0
    first_token_s: float = 0.0
    charge_s: float = 0.0
    num_outputs: int = 0


class Acceptance(msgspec.Struct):
    """The drafts of one sequence. `num_compared` were compared with the next token, and
    `num_right` of these were it, in a tree one of those after the same token; older ones count less
    in both. `in_trees`: the last drafts were a tree.
    """

    num_drafts: int = 0
    num_accepted: int = 0
    num_compared: float = 0.0
    num_right: float = 0.0
    in_trees: bool = False


class SequenceDrafts(msgspec.Struct):
    """The newest drafts of a sequence, and how earlier ones fared.

    Attributes:
        token_ids: Proposed to follow the known tokens; () once a row has them.
        parents: Of the newest drafts, as in `StepRow`.
        num_forced: How many of the newest drafts must follow, also in flight.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    num_forced: int = 0
    acceptance: Acceptance = msgspec.field(default_factory=Acceptance)


class Charges(msgspec.Struct):
    """The three parts of what a sequence is charged, in `TICKS_PER_S`."""

    device_ticks: int = 0
    recomputed_ticks: int = 0
    rejected_ticks: int = 0


_NO_PREDICTION = ServicePrediction()


class _Clock:
    """Adds wall time to activities; the parts add up to the total. Records when they change."""

    def __init__(self, activity: Activity, now: float) -> None:
        self.activity = activity  # also during a pause, which may outlast several
        self.since_s = now
        self.is_paused = False
        self.seconds = _NO_SECONDS.copy()
        self.changes = [(activity, now)]

    def enter(self, activity: Activity, now: float) -> None:
        if activity is not self.activity:
            self.add_elapsed(now)
            self.activity = activity
            self._note_change(now)

    def pause(self, is_paused: bool, now: float) -> None:
        self.add_elapsed(now)
        self.is_paused = is_paused
        self._note_change(now)

    def add_elapsed(self, now: float) -> None:
        self.seconds[self._current] += now - self.since_s
        self.since_s = now

    @property
    def _current(self) -> Activity:
        return Activity.PAUSED if self.is_paused else self.activity

    def _note_change(self, now: float) -> None:
        is_new = self._current is not self.changes[-1][0]
        if is_new and len(self.changes) < _MAX_ACTIVITIES:
            self.changes.append((self._current, now))


class Sequence:
    """Mutable state of one sequence. `rank` orders service, waiting and running: lower first.

    `rank_s` is the policy's part of it (`core.service_order`), `output_limit` how many output
    tokens it may have, and `context_limit` how many fit into the context. `resumed` is what its
    client has of it: it waits as any other one, with these outputs as if it had been preempted.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        arrival: int,
        now: float,
        rank_s: float,
        prediction: ServicePrediction = _NO_PREDICTION,
        output_limit: int = sys.maxsize,
        context_limit: int = sys.maxsize,
        resumed: Resumed | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.sequence_id = f"{request.request_id}#{index}"
        self.seed = sequence_seed(request.seed, index)
        self.output_limit = output_limit
        self.context_limit = context_limit
        self._decode_limit = output_limit  # how many are computed here
        self.is_prompt_only = request.prompt_only
        self.token_ids = list(request.prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.state = SequenceState.WAITING
        # where it waits
        self.arrival = arrival
        self.arrival_s = now
        self.prediction = prediction
        self.rank: Rank = (False, False, rank_s, arrival)
        self.is_paused = False
        self.parked_key = ""  # of what it waits for apart from others; "" for nothing
        self.parked_since_s = now
        # what it has in the batch, and in the prefix cache
        self.residency = Residency(prefill_end=0)  # the latest; an empty one before the first
        self.last_step_id = -1  # the last step with a row of it
        self.root = ChainRoot(request.adapter_id, request.cache_salt)
        self.digests: list[bytes] = []  # of leading full blocks, computed when first needed
        self.known_hits = NO_HITS  # of the last lookup while it waited
        self.num_cached_tokens: int | None = None  # None until first admitted
        self.cache_miss: CacheMiss | None = None
        self.num_restored_tokens = 0  # that a tier gave back to the prefix cache for it
        self._num_computed = 0  # positions that an earlier residency computed
        # prompt tokens that are scored and delivered: by the first sequence of a request only
        scores = index == 0 and request.sampling.prompt_logprobs is not None
        self._num_scored_tokens = 0 if scores else self.prompt_len
        detection = request.sampling.repetition_detection
        is_detected = detection is not None and detection.max_pattern_size
        self._repetition = RepetitionDetector(detection) if detection and is_detected else None
        self.num_resumed = 0  # outputs that came with the request
        self.charges = Charges()
        self._cached_elsewhere: int | None = None  # of its prompt, where it began
        if resumed is not None:
            self._resume(resumed)
        if request.handover is not None:
            self._decode_limit = min(output_limit, self.num_resumed + 1)
        self.drafts = SequenceDrafts()
        # for its timings
        self.first_scheduled_s: float | None = None  # its first admission
        self._first_token_s: float | None = None
        self._num_preemptions = 0
        self._max_blocks = 0
        self._clock = _Clock(Activity.QUEUE, now)

    def _resume(self, resumed: Resumed) -> None:
        """Append the outputs that the client has.

        Raises:
            ResumedAfterEnd: It has ended with one of them.
        """
        for token_id in resumed.token_ids:
            self.token_ids.append(token_id)
            reason = self._end_reason()
            if reason is not None:
                num_tokens = len(resumed.token_ids)
                raise ResumedAfterEnd(self.index, num_tokens, self.num_outputs, reason.value)
        self.num_resumed = self.num_outputs
        self.charges.device_ticks = round(resumed.device_s * TICKS_PER_S)
        self._cached_elsewhere = resumed.num_cached_tokens
        num_scored = self.prompt_len if self.num_resumed else resumed.num_prompt_logprobs
        self._num_scored_tokens = max(self._num_scored_tokens, min(num_scored, self.prompt_len))

    @property
    def deadline_s(self) -> float | None:
        """When it has to end."""
        timeout_s = self.request.timeout_s
        return None if timeout_s is None else self.arrival_s + timeout_s

    @property
    def shed_at_s(self) -> float | None:
        """The latest time to begin, for a first token in time; None if that does not matter."""
        ttft_s = self.request.ttft_deadline_s
        if ttft_s is None or self.num_resumed:
            return None
        return self.arrival_s + ttft_s - self.prediction.first_token_s

    @property
    def relegate_at_s(self) -> float | None:
        """The latest time to begin or to continue, for the end in time: one that waits has to
        compute its prompt, and the outputs that it lacks.
        """
        deadline_s, prediction = self.deadline_s, self.prediction
        if deadline_s is None:
            return None
        num_expected = max(1, prediction.num_outputs)
        part_left = max(0.0, 1.0 - self.num_outputs / num_expected)
        decode_s = prediction.service_s - prediction.prompt_s
        return deadline_s - prediction.prompt_s - part_left * decode_s

    @property
    def num_outputs(self) -> int:
        """How many output tokens are known."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_reusable(self) -> int:
        """How many leading tokens may come from the prefix cache, which has no hidden states."""
        pooling = self.request.pooling
        if pooling is not None and pooling.needs_all:
            return 0
        if self._num_scored_tokens < self.prompt_len:
            return max(0, self._num_scored_tokens - 1)
        # At least one token has to be computed: its logits give the next one.
        return len(self.token_ids) - 1

    @property
    def scored_positions(self) -> range:
        """Positions whose logits score the prompt tokens that are not delivered yet.

        The logits of the prompt's last token belong to the output.
        """
        return range(max(0, self._num_scored_tokens - 1), self.prompt_len - 1)

    @property
    def num_pending(self) -> int:
        """How many tokens the rows in flight will add."""
        return self.residency.pending

    @property
    def can_decode(self) -> bool:
        """Whether its next row may be planned, which decodes; only a running one can."""
        residency = self.residency
        num_outputs = len(self.token_ids) - self.prompt_len
        return (
            self.state is SequenceState.RUNNING
            and not self.is_paused
            and residency.planned >= residency.prefill_end
            and not residency.awaits_drafts
            and num_outputs + residency.pending < self._decode_limit
        )

    @property
    def num_prefill_left(self) -> int:
        """How many tokens known at admission are still to be computed."""
        residency = self.residency
        return max(0, residency.prefill_end - residency.planned)

    def admit(self, residency: Residency, now: float) -> None:
        """Enter the batch."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(residency.planned, self.prompt_len)
            self.first_scheduled_s = now
        residency.recompute_end = self._num_computed
        self.residency = residency
        self.state = SequenceState.RUNNING
        self._max_blocks = max(self._max_blocks, len(residency.blocks))
        self._clock.enter(Activity.PREFILL, now)

    def admission(self) -> Admission:
        """The data from which the executor sets up its slot."""
        return Admission(
            slot=self.residency.slot,
            sequence_id=self.sequence_id,
            token_ids=tuple(self.token_ids),
            prompt_len=self.prompt_len,
            sampling=self.request.sampling,
            seed=self.seed,
            eos_token_ids=self.request.eos_token_ids,
            adapter=self.request.adapter_id,
            pooling=self.request.pooling,
            tenant=self.request.tenant,
            cache_salt=self.request.cache_salt,
        )

    def row(
        self,
        num_tokens: int,
        new_block_ids: tuple[int, ...],
        drafts: tuple[int, ...] = (),
        num_next_drafts: int = 0,
        num_next_forced: int = 0,
    ) -> StepRow:
        """The row that computes the next `num_tokens` tokens, and `drafts` after the last one."""
        residency, request = self.residency, self.request
        start = residency.planned
        end = start + num_tokens
        ends = end == len(self.token_ids) + residency.pending
        emits = ends and not self.is_prompt_only
        row = StepRow(
            residency.slot,
            start,
            num_tokens + len(drafts),
            (*self.token_ids[start:end], *drafts),
            new_block_ids,
            Phase.PREFILL if start < residency.prefill_end else Phase.DECODE,
            emits,
            output_position=end - self.prompt_len if emits else 0,
            num_drafts=len(drafts),
            parents=self.drafts.parents[: len(drafts)],
            num_next_drafts=num_next_drafts if emits else 0,
            num_next_forced=num_next_forced if emits else 0,
            adapter=request.adapter_id,
            state=None
            if residency.state is None
            else residency.state.advance(start, end + len(drafts), len(drafts)),
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
        """Leave the batch; tokens that are still in flight will be appended."""
        self._max_blocks = max(self._max_blocks, len(self.residency.blocks))
        self._num_preemptions += 1
        self._count_computed(self.residency)
        self.state = SequenceState.PREEMPTED
        self._clock.enter(Activity.PREEMPTED, now)

    def _count_computed(self, residency: Residency) -> None:
        """Positions that this residency computed; drafts only once they are accepted."""
        known = len(self.token_ids) + max(0, residency.pending - 1)
        self._num_computed = max(self._num_computed, min(residency.planned, known))

    def park(self, key: str, activity: Activity, now: float) -> None:
        """Wait until what has this key is ready, which counts as `activity`; with "" for a place in
        the batch, as others do.
        """
        if key and not self.parked_key:
            self.parked_since_s = now
        if key:
            self._clock.enter(activity, now)
        elif self.parked_key:
            was_admitted = self.state is SequenceState.PREEMPTED
            self._clock.enter(Activity.PREEMPTED if was_admitted else Activity.QUEUE, now)
        self.parked_key = key

    def relegate(self) -> None:
        """Rank after all others that are not paused: it cannot end in time any more."""
        self.rank = (self.is_paused, True, *self.rank[2:])

    def set_paused(self, is_paused: bool, now: float) -> None:
        """Pause or resume; this changes its rank."""
        self.is_paused = is_paused
        self.rank = (is_paused, *self.rank[1:])
        self._clock.pause(is_paused, now)

    def receive(
        self, row: StepRow, output: RowOutput, now: float
    ) -> tuple[SequenceOutput, FinishReason | None]:
        """Append the output of a row, up to a token that ends the sequence.

        Returns what is to be delivered, and why the sequence ends, if it does.
        """
        num_new, reason = 0, None
        if row.emits:
            if self._first_token_s is None:
                self._first_token_s = now
            clock = self._clock
            if clock.activity is not Activity.DECODE and self.state is SequenceState.RUNNING:
                clock.enter(Activity.DECODE, now)
            for token_id in output.token_ids:
                self.token_ids.append(token_id)
                num_new += 1
                reason = self._end_reason()
                if reason is not None:
                    break
            self.drafts.token_ids = output.draft_token_ids
            self.drafts.num_forced = output.num_forced_drafts
            self.drafts.parents = output.draft_parents
            if self.state is SequenceState.PREEMPTED:
                self._count_computed(self.residency)
        elif self.is_prompt_only and row.end == self.prompt_len:
            reason = FinishReason.POOLED if row.pools else FinishReason.MAX_TOKENS
        new = SequenceOutput(
            self.request.request_id,
            self.index,
            output.token_ids[:num_new],
            output.logprobs[:num_new],
        )
        if row.start < self.prompt_len:
            embedding = output.embedding if row.pools else None
            new = replace(
                new,
                prompt_logprobs=self._new_prompt_logprobs(row, output),
                embedding=embedding,
                progress=self._progress(row, now),
            )
        return new, reason

    def _progress(self, row: StepRow, now: float) -> PromptProgress | None:
        """How far the prompt is after a row of it; None if nothing is to be reported, or if the
        row computes it once more after a preemption.
        """
        is_first = self.num_outputs <= row.emits
        if not self.request.reports_progress or self.index or not is_first:
            return None
        seconds = 0.0 if self.first_scheduled_s is None else now - self.first_scheduled_s
        return PromptProgress(
            self.num_cached_tokens or 0, min(row.end, self.prompt_len), max(0.0, seconds)
        )

    def _new_prompt_logprobs(
        self, row: StepRow, output: RowOutput
    ) -> tuple[TokenLogprobs | None, ...]:
        """The prompt logprobs that have not been delivered yet: a row may repeat those of a row
        that was in flight when the sequence was preempted.
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
    def length_reason(self) -> FinishReason:
        """Why it ends with the last token that it may have."""
        max_tokens = self.request.sampling.max_tokens
        is_last = max_tokens is not None and self.num_outputs >= max_tokens
        return FinishReason.MAX_TOKENS if is_last else FinishReason.CONTEXT_LIMIT

    def _end_reason(self) -> FinishReason | None:
        sampling = self.request.sampling
        token_id = self.token_ids[-1]
        num_outputs = len(self.token_ids) - self.prompt_len
        is_long_enough = num_outputs >= sampling.min_tokens
        repeats = self._repetition is not None and self._repetition.record(token_id)
        # A grammar allows an end token too early only where nothing else may follow.
        may_end = (is_long_enough or sampling.grammar is not None) and not sampling.ignore_eos
        if may_end and token_id in self.request.eos_token_ids:
            return FinishReason.EOS
        if is_long_enough and token_id in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if sampling.max_tokens is not None and num_outputs >= sampling.max_tokens:
            return FinishReason.MAX_TOKENS
        if num_outputs >= self.context_limit:
            return FinishReason.CONTEXT_LIMIT
        return FinishReason.REPETITION if repeats and is_long_enough else None

    def finish(self, now: float) -> SequenceTimings:
        """End the sequence; returns its timings."""
        if self.state is SequenceState.RUNNING:
            self._max_blocks = max(self._max_blocks, len(self.residency.blocks))
        self.state = SequenceState.FINISHED
        return self.timings(now)

    def timings(self, now: float) -> SequenceTimings:
        """The timings of a sequence that ends now."""
        self._clock.add_elapsed(now)
        seconds = self._clock.seconds
        return SequenceTimings(
            arrival_s=self.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self._first_token_s,
            finished_s=now,
            queue_s=seconds[Activity.QUEUE],
            prefill_s=seconds[Activity.PREFILL],
            decode_s=seconds[Activity.DECODE],
            preempted_s=seconds[Activity.PREEMPTED],
            paused_s=seconds[Activity.PAUSED],
            adapter_s=seconds[Activity.ADAPTER],
            restore_s=seconds[Activity.RESTORE],
            adapter_id=self.request.adapter_id,
            device_s=self.charges.device_ticks / TICKS_PER_S,
            recomputed_s=self.charges.recomputed_ticks / TICKS_PER_S,
            activities=tuple(self._clock.changes),
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self.prompt_len,
            num_cached_tokens=self.num_cached_tokens or 0
            if self._cached_elsewhere is None
            else self._cached_elsewhere,
            cache_miss=self.cache_miss,
            num_output_tokens=self.num_outputs,
            num_blocks=self._max_blocks,
            rejected_s=self.charges.rejected_ticks / TICKS_PER_S,
            num_drafts=self.drafts.acceptance.num_drafts,
            num_accepted=self.drafts.acceptance.num_accepted,
            num_resumed_tokens=self.num_resumed,
            num_restored_tokens=self.num_restored_tokens,
        )
