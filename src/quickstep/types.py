"""The values that layers exchange: requests, sampling parameters, step plans and step results.

Everything here is frozen plain data and needs only the standard library and msgspec, so that
`core` (no torch) and `runtime` (torch) do not import each other, and plans can be logged, replayed
and sent to another process. Mutable state is elsewhere: `core.Sequence` belongs to the scheduler,
the tensors of a slot to the runner.

Terms: a *slot* is the runner's index of a resident sequence (sampling state, block table); a *row*
is the part of one sequence in one step; a *position* counts the tokens of a sequence from 0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from quickstep.sampling_params import Grammar, SamplingParams

__all__ = [
    "Activity",
    "Admission",
    "CacheMiss",
    "Delta",
    "Executor",
    "FinishReason",
    "Grammar",
    "Phase",
    "Pooling",
    "PrefillCharge",
    "PromptProgress",
    "Request",
    "RequestClass",
    "Resumed",
    "RowFailure",
    "RowOutput",
    "SamplingParams",
    "SequenceOutput",
    "SequenceTimings",
    "StepOutcome",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "StepRow",
    "Ticket",
    "TokenLogprobs",
]


class Phase(enum.Enum):
    """Whether a row computes the prompt or generates after it."""

    PREFILL = "prefill"
    DECODE = "decode"


class Activity(enum.Enum):
    """What a sequence spends its wall time on; the parts of `SequenceTimings`."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    PAUSED = "paused"
    ADAPTER = "adapter"
    RESTORE = "restore"

    # its members are keys of dicts; `Enum.__hash__` is a Python function
    __hash__ = object.__hash__


class RequestClass(enum.Enum):
    """What a request is for: a client waits for it, or it may take as long as it needs."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Pooling(enum.Enum):
    """How the final hidden states of a prompt become one embedding, which has the norm 1; CLASSES
    gives the logits of an encoder's classification head in its place.
    """

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"
    CLASSES = "classes"

    @property
    def needs_all(self) -> bool:
        """Whether more than the last token's state is needed, so that every token is computed."""
        return self is not Pooling.LAST


class FinishReason(enum.Enum):
    """Why a sequence ended; `openai` maps it to the reasons of OpenAI's API.

    ERROR is a failure of the engine. REFUSED is a fault of the request: its constraints allow no
    next token. DEADLINE ends a sequence at its time limit, with the text so far; SHED ends one that
    waits and can no longer have its first token in time. REPETITION ends one that repeats itself
    (`SamplingParams.repetition_detection`).
    """

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LIMIT = "context_limit"
    REPETITION = "repetition"
    POOLED = "pooled"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    SHED = "shed"
    ERROR = "error"
    REFUSED = "refused"
    SHUTDOWN = "shutdown"

    @property
    def openai(self) -> str:
        """The `finish_reason` of OpenAI's API: `stop`, `length`, or one of those that it has no
        name for: `timeout`, `repetition` (vLLM's), `abort`, `error`.
        """
        if self in _STOPS:
            return "stop"
        if self in (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LIMIT):
            return "length"
        if self is FinishReason.DEADLINE:
            return "timeout"
        if self is FinishReason.REPETITION:
            return "repetition"
        return "error" if self.is_failure else "abort"

    @property
    def is_failure(self) -> bool:
        """Whether the sequence failed; `error` of its last output has the cause."""
        return self in (FinishReason.ERROR, FinishReason.REFUSED)


_STOPS = (
    FinishReason.EOS,
    FinishReason.STOP_TOKEN,
    FinishReason.STOP_STRING,
    FinishReason.POOLED,
)


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of a request that another engine began: what its client already has.

    Attributes:
        index: Of the sequence.
        token_ids: Its output so far, which is neither generated nor delivered again.
        is_finished: It has ended: nothing more is generated.
        num_prompt_logprobs: How many prompt logprobs its client has, if it has no token yet; with
            the first token it has all of them.
        num_cached_tokens: How many tokens of the prompt that engine had cached; None if that is not
            known.
        device_s: The part of its steps that the sequence was charged.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    num_prompt_logprobs: int = 0
    num_cached_tokens: int | None = None
    device_s: float = 0.0


class KVTarget(msgspec.Struct, frozen=True, array_like=True):
    """Where the engine listens that continues a request after its first token, for the KV blocks of
    the prompt: an address, and the token of a sender.
    """

    host: str
    port: int
    token: str


class SlotPrefix(msgspec.Struct, frozen=True):
    """What a file of a slot has: the tokens of full KV blocks, the adapter ("" for none) with which
    they were computed, and the size of the file.
    """

    adapter: str
    token_ids: tuple[int, ...]
    num_bytes: int


class Request(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A client's request, tokenized, for `sampling.n` sequences. The same value is the message to
    the engine's process and the argument of the scheduler.

    Attributes:
        request_id: "" before the request is submitted; the engine assigns one.
        seed: Seed of the sampling noise: `sampling.seed`, or a random one from the engine.
        eos_token_ids: The model's end tokens; `sampling.ignore_eos` disables them.
        priority: Lower runs first (as in vLLM); it decreases with waiting time (`core.sequence`).
        adapter: LoRA adapter name, "" for the base model.
        adapter_id: Digest of the adapter's content, which the engine sets: part of the prefix-cache
            key, and what admissions and rows name as their adapter.
        cache_salt: Separates tenants in the prefix cache.
        timeout_s: Seconds after arrival at the scheduler until generation stops; None for no limit.
        pooling: Return an embedding of the prompt and generate nothing.
        request_class: Requests of the class BATCH are served after interactive ones.
        ttft_deadline_s: Seconds after arrival until the first token is useless: a request that
            cannot have it in time ends with SHED before it starts. None for no limit.
        tenant_weight: The part of the device that the tenant gets under the policy `fair`, in
            proportion to the weights of the others.
        endpoint: The path of the API through which it came, for accounting.
        is_continuation: The prompt was charged in an earlier request, which this one continues
            with a beam; for accounting.
        is_in_search: It is a beam of a search: its adapter is kept for the next ones, even after
            the name was given to other content. They name it by `adapter_id`.
        speculation: Drafts may be proposed for it; its tokens are the same either way.
        received_s: When the server received it, by the engine's clock: its wait and its deadlines
            count from then. None for when it arrives at the scheduler.
        reports_progress: Outputs of sequence 0 say how much of the prompt is computed.
        resumed: What the client already has of a request that another engine accepted: each
            sequence continues after these tokens, with the bits that it would have had there. The
            limits of the queue were passed there; the deadline of the first token still counts for
            a sequence that has none.
        handover: Another engine continues it: no sequence gets more than one token here, and the
            prompt's KV blocks are sent there.
        retain_s: Seconds after its end in which it is expected to be continued: its KV blocks are
            evicted after others (`core.resources.kv_retention`).
        num_following: How many sequences have the requests that follow it, of the same request of a
            client: the queue takes all of them, or none.
        has_place: It is one of these, and the first one was accepted.
    """

    request_id: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None
    pooling: Pooling | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE
    ttft_deadline_s: float | None = None
    tenant_weight: float = 1.0
    endpoint: str = ""
    is_continuation: bool = False
    is_in_search: bool = False
    speculation: bool = True
    adapter_id: str = ""
    received_s: float | None = None
    reports_progress: bool = False
    resumed: tuple[Resumed, ...] = ()
    handover: KVTarget | None = None
    retain_s: float = 0.0
    num_following: int = 0
    has_place: bool = False

    @property
    def indices(self) -> Sequence[int]:
        """The indices of the sequences to generate: all but those that another engine finished."""
        indices = range(self.sampling.n)
        if not self.resumed:
            return indices
        finished = {resumed.index for resumed in self.resumed if resumed.is_finished}
        return [index for index in indices if index not in finished]

    @property
    def prompt_only(self) -> bool:
        """Whether no token is generated."""
        return self.pooling is not None or self.sampling.max_tokens == 0


class Admission(msgspec.Struct, frozen=True):
    """A sequence becomes resident: the runner sets up its slot before it runs the step's rows.

    `token_ids` are all tokens known so far (after a preemption, or if it is resumed: prompt and
    outputs), so that penalties can be restored; the first `prompt_len` of them are the prompt.
    `seed` is that of the sequence: the request's for index 0, derived from it for the others of
    `n`. `tenant` and
    `cache_salt` are the request's: what one sequence leaves behind helps only those with the same.
    """

    slot: int
    sequence_id: str
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    adapter: str = ""
    pooling: Pooling | None = None
    tenant: str = ""
    cache_salt: str = ""


class RowState(msgspec.Struct, frozen=True, gc=False):
    """What a row does with its sequence's state, in the layers that keep one (`ops.table`).

    Attributes:
        source: The slot whose state the row begins with; -1 at the beginning of the sequence.
        target: The slot that has the state after the row's tokens that are no drafts.
        num_replayed: How many tokens that were drafts in the source come before the row's first.
        saves: After how many tokens, replayed ones included, the state goes to which further slot.
    """

    source: int
    target: int
    num_replayed: int = 0
    saves: tuple[tuple[int, int], ...] = ()


class StepRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence in one step: compute `num_tokens` tokens from position `start`.

    Attributes:
        token_ids: The `num_tokens` inputs; empty for a decode row whose input is sampled by the
            slot's previous step, which is still running: the runner fills it in.
        new_block_ids: Appended to the slot's block table before the step runs; after an admission
            they include prefix-cache hits.
        emits: An output token is sampled from the logits of the last position that is no draft,
            and one more after each draft that follows it and is equal to the token sampled there.
        output_position: Index of the first of these tokens among the sequence's output tokens (the
            counter of the sampling noise).
        num_drafts: Trailing inputs that are speculative drafts.
        parents: Of each draft, the input that it follows: 0 is the one before all drafts, i the
            i-th draft, and parents come before their children. () if each follows the one before
            it. Whatever the tree, input i is written to KV slot `start` + i of the sequence; once
            tokens are sampled, the KV of accepted drafts is moved to the slots of their positions.
        num_next_drafts: How many tokens to draft at most, after this row, for the next one.
        num_next_forced: How many drafts to return at most, if a grammar or a thinking budget forces
            the next tokens.
        score_start: First position whose logits score the next prompt token.
        num_scored: Number of such positions from there on, all in this row.
        pools: The row ends the prompt of a request with `pooling`, and returns its embedding.
        state: Of the layers that keep a state; None for a model without any.
    """

    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]
    phase: Phase
    emits: bool
    output_position: int
    num_drafts: int = 0
    num_next_drafts: int = 0
    num_next_forced: int = 0
    adapter: str = ""
    score_start: int = 0
    num_scored: int = 0
    pools: bool = False
    parents: tuple[int, ...] = ()
    state: RowState | None = None

    @property
    def root(self) -> int:
        """The KV slot of the input that a tree of drafts follows; without one, the last slot."""
        return self.end - 1 - len(self.parents)

    def path(self, node: int) -> list[int]:
        """The nodes of the tree from below its root, which is node 0, to `node`."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node - 1]
        return nodes[::-1]

    @property
    def end(self) -> int:
        """Number of the sequence's tokens that are computed after this row."""
        return self.start + self.num_tokens


_NUM_TOKENS = attrgetter("num_tokens")


class StepPlan(msgspec.Struct, frozen=True):
    """What one step does: free the slots in `released`, set up `admitted`, then run `rows`.

    Decode rows come before prefill rows. In each layer, the KV of all rows is written before any
    row reads it, so a row can use a block that another row of the same step fills.

    For a driver that computes nothing, `num_grouped_rows` plain decode rows are not listed; they
    attend to `num_grouped_kv_tokens` positions together (`sim.decode_group`).
    """

    step_id: int
    rows: tuple[StepRow, ...]
    admitted: tuple[Admission, ...] = ()
    released: tuple[int, ...] = ()
    num_grouped_rows: int = 0
    num_grouped_kv_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Total tokens of all rows."""
        num_listed: int = sum(map(_NUM_TOKENS, self.rows))
        return num_listed + self.num_grouped_rows


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities of one token, from the raw logits (before any sampling).

    `rank` is 1 for the most likely token; `top` holds (token id, logprob), most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RowOutput(msgspec.Struct, frozen=True, gc=False):
    """The output of a row: no token (a prompt chunk), one, or several (accepted drafts + 1).

    `prompt_logprobs` has an entry per scored position, for the prompt token that follows it.
    `draft_token_ids` are proposed to follow the tokens, for the sequence's next row, in a tree with
    `draft_parents` as `StepRow.parents` says; the first `num_forced_drafts` of them because nothing
    else can follow. Any number of the first drafts is a tree as well. `accepted_drafts` are
    those of the row's tree that were accepted, numbered from 1 in the order of the row; () of a
    chain.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: tuple[float, ...] | None = None
    draft_token_ids: tuple[int, ...] = ()
    num_forced_drafts: int = 0
    draft_parents: tuple[int, ...] = ()
    accepted_drafts: tuple[int, ...] = ()


class RowFailure(msgspec.Struct, frozen=True):
    """A row failed; its sequence ends, the others continue.

    The sequence ends with REFUSED if `is_refused`, because the constraints of its request allow no
    token, and otherwise with ERROR, for example for NaN.
    """

    row: int
    reason: str
    is_refused: bool = False

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the sequence."""
        return FinishReason.REFUSED if self.is_refused else FinishReason.ERROR


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step: one `RowOutput` per row of the plan, in order, and its duration.

    Attributes:
        num_proposer_failures: How often a proposer of drafts has failed, since the start.
        exchange_s: The part of `seconds` in which rank 0 waited for other ranks.
        stage_s: What each stage of a pipeline computed for the step; `seconds` is their mean, as
            they compute several steps at the same time. () for one stage.
    """

    step_id: int
    outputs: tuple[RowOutput, ...]
    seconds: float
    failures: tuple[RowFailure, ...] = ()
    num_proposer_failures: int = 0
    exchange_s: float = 0.0
    stage_s: tuple[float, ...] = ()


class CacheMiss(enum.Enum):
    """Why the prefix cache gave a prompt no more tokens. A miss says nothing of other salts and
    adapters: only blocks of the request's own are looked up.
    """

    NOT_CACHED = "not_cached"  # no prompt with these tokens, lately
    EVICTED = "evicted"  # the block was cached; others needed the memory, or the cache was reset
    NO_STATE = "no_state"  # keys and values are cached, a state of the model's other layers is not
    LAST_BLOCK = "last_block"  # only full blocks are cached, and the last token is always computed
    PROMPT_LOGPROBS = "prompt_logprobs"  # the prompt's logits are not cached
    POOLING = "pooling"  # the pooled hidden states are not cached
    DISABLED = "disabled"


class SequenceTimings(msgspec.Struct, frozen=True, gc=False):
    """Times of one sequence, in seconds on the scheduler's clock, and its tokens and blocks.

    queue + adapter + restore + prefill + decode + preempted + paused = finished - arrival. While
    the client reads too slowly, only `paused_s` grows; `adapter_s` is the wait until an adapter was
    in memory, `restore_s` that for KV blocks from another engine or from `--kv-cache-dir`, which
    gave `num_restored_tokens` back to the prefix cache.
    `device_s` is the sequence's part of the measured step times without `recomputed_s`, the part
    for positions that were computed again after a preemption, and without `rejected_s`, the part
    for drafts that were rejected (`core.accounting` has the sum over all sequences). Of
    `num_drafts` draft tokens that were checked, `num_accepted` were accepted.

    `cache_miss` is the reason why no more than `num_cached_tokens` were cached when the sequence
    was first admitted; None before.

    `activities` are (activity, since when), in order: each lasts until the next one begins, the
    last until `finished_s`. Of a sequence that changes more often, the later changes are missing.
    The first `num_resumed_tokens` of the output tokens came with the request (`Request.resumed`).
    `unloaded_prefill_s` and `unloaded_decode_s` are predictions for the same tokens without any
    other request, with the same cached prefix; `is_extrapolated` if they are for steps outside of
    what was measured. `adapter_id` is that of the request, `replica` the number of the engine, if
    several serve the model. It has moved to another engine, or to a new process, `num_moves` times;
    `elsewhere_s` is the part of `queue_s` before it came to the last one.
    """

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    device_s: float
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_blocks: int
    paused_s: float = 0.0
    adapter_s: float = 0.0
    adapter_id: str = ""
    recomputed_s: float = 0.0
    unloaded_prefill_s: float = 0.0
    unloaded_decode_s: float = 0.0
    is_extrapolated: bool = False
    activities: tuple[tuple[Activity, float], ...] = ()
    cache_miss: CacheMiss | None = None
    rejected_s: float = 0.0
    num_drafts: int = 0
    num_accepted: int = 0
    num_resumed_tokens: int = 0
    replica: int = 0
    num_moves: int = 0
    elsewhere_s: float = 0.0
    restore_s: float = 0.0
    num_restored_tokens: int = 0

    @property
    def num_new_tokens(self) -> int:
        """How many output tokens this engine has generated."""
        return self.num_output_tokens - self.num_resumed_tokens

    @staticmethod
    def of_unknown(
        num_prompt_tokens: int,
        arrival_s: float,
        finished_s: float,
        num_output_tokens: int = 0,
        num_resumed_tokens: int = 0,
    ) -> SequenceTimings:
        """The timings of a sequence of which only these are known: all its time was waiting."""
        return SequenceTimings(
            arrival_s=arrival_s,
            first_scheduled_s=None,
            first_token_s=None,
            finished_s=finished_s,
            queue_s=finished_s - arrival_s,
            prefill_s=0.0,
            decode_s=0.0,
            preempted_s=0.0,
            device_s=0.0,
            num_preemptions=0,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=0,
            num_output_tokens=num_output_tokens,
            num_blocks=0,
            num_resumed_tokens=num_resumed_tokens,
        )


class PromptProgress(msgspec.Struct, frozen=True, gc=False):
    """How much of a prompt is computed: `num_processed` tokens after `seconds` of its prefill, of
    which `num_cached` were in the prefix cache.
    """

    num_cached: int
    num_processed: int
    seconds: float


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """New output of one sequence: tokens, prompt logprobs, its end. The last one has `timings`, and
    the last one of a sequence that another engine continues.

    Prompt logprobs are only in outputs with index 0, in order: one per prompt token, None for the
    first. `index` is that of the sequence in its request (0 to n-1). `stop_token_id` is the token
    that ended it, for EOS and STOP_TOKEN; `token_ids` includes it. `error` is the cause of ERROR
    and REFUSED. `progress` is only in outputs before and with the first token, of a request that
    `reports_progress`.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    timings: SequenceTimings | None = None
    error: str = ""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: tuple[float, ...] | None = None
    progress: PromptProgress | None = None


class PrefillCharge(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prefill row of a step: its request, its tokens, and the seconds that it is charged."""

    request_id: str
    num_tokens: int
    seconds: float


class StepRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="step", gc=False):
    """A record of the step log. The executor measures `seconds`; times are the scheduler's clock.

    `num_kv_tokens` is the context that attention read, summed over rows (each row's `end`);
    `num_pairs` the positions that each token attends to, summed over tokens. `num_scored` positions
    returned prompt logprobs. `predicted_s` is the cost model's prediction of `seconds`.
    `decode_s` and `prefill_s` are what the rows of the two phases are charged of `seconds`, the
    rest of which no live row is charged; `prefills` are the prefill rows one by one. Of the decode
    tokens, `num_drafts` are drafts, of which `num_accepted` were accepted. `replica` is the number
    of the engine, if several serve the model. `exchange_s` is the part of `seconds` in which rank 0
    waited for other ranks. `stage_s` is what each stage of a pipeline computed, `seconds` their
    mean; `bubble_s` the time since the last commit, with steps in flight, that stages did not
    compute (of a single step, it may be negative).
    """

    step_id: int
    planned_at_s: float
    committed_at_s: float
    seconds: float
    predicted_s: float
    num_prefill_rows: int
    num_decode_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_kv_tokens: int
    num_pairs: int
    num_scored: int
    num_free_blocks: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    decode_s: float = 0.0
    prefill_s: float = 0.0
    prefills: tuple[PrefillCharge, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0
    replica: int = 0
    exchange_s: float = 0.0
    stage_s: tuple[float, ...] = ()
    bubble_s: float = 0.0


class Delta(msgspec.Struct, frozen=True):
    """New output of one of a request's sequences.

    Attributes:
        index: Which of the n sequences.
        text: New text in complete characters; empty while a character or a stop is undecided.
        token_ids: New tokens, an end token included.
        logprobs: One per new token, if requested.
        finish_reason: Set on the last delta of a sequence, as are `stop_reason` and `timings`. An
            engine gives `timings` with the last token of a sequence that another one continues.
        stop_reason: The stop string or the stop token that ended it, `deadline` for a deadline;
            None for EOS.
        error: The reason, when the finish reason is ERROR or REFUSED.
        prompt_logprobs: One per prompt token in order, None for the first; with index 0 only.
        embedding: The prompt's, on the one delta of a request with `pooling`.
        progress: How much of the prompt is computed, before the first token and with it, if the
            request `reports_progress`; with index 0 only.
        is_lost: The engine has ended, not this sequence by itself: another engine can resume it.
        is_draft: Its token is an accepted draft: another one of the same step follows it.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    timings: SequenceTimings | None = None
    error: str = ""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: tuple[float, ...] | None = None
    progress: PromptProgress | None = None
    is_lost: bool = False
    is_draft: bool = False

    @property
    def num_bytes(self) -> int:
        """Its approximate size, to bound the unread deltas."""
        if not (self.logprobs or self.prompt_logprobs or self.embedding):
            return len(self.text) + 8 * len(self.token_ids)
        scored = [
            position for position in (*self.logprobs, *self.prompt_logprobs) if position is not None
        ]
        num_logprobs = len(scored) + sum(len(position.top) for position in scored)
        num_numbers = len(self.token_ids) + 2 * num_logprobs + len(self.embedding or ())
        return len(self.text) + 8 * num_numbers


class StepOutcome(msgspec.Struct, frozen=True):
    """The result of `Scheduler.commit`: outputs of the sequences, and the step's log record."""

    outputs: tuple[SequenceOutput, ...]
    record: StepRecord


class Ticket(Protocol):
    """A submitted step: the part of `concurrent.futures.Future` that its owner needs."""

    def done(self) -> bool:
        """Whether `result` returns without waiting."""

    def result(self) -> StepResult:
        """Wait for the step. Raises EngineError when the executor failed."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` with the ticket, on the executor's thread when it is done, or here if it
        is done already.
        """


class Executor(Protocol):
    """Runs plans strictly in the order of `submit`: on a CPU, on CUDA, or simulated."""

    def submit(self, plan: StepPlan) -> Ticket:
        """Queue a step; does not wait for it."""

    def reset(self) -> None:
        """Accept plans again: after a failed step, later plans fail too until this call. Failed
        plans still update the slots, which must agree with the scheduler's.
        """

    def wait_until_captured(self, timeout_s: float | None = None) -> bool:
        """Wait until no step is left to record ahead of its use; False after `timeout_s`. Steps
        that are submitted meanwhile come first.
        """

    def close(self) -> None:
        """Finish all submitted steps, then free everything. Idempotent."""
