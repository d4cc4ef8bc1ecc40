"""The values that layers exchange: requests, sampling parameters, step plans and step results.

Everything here is frozen plain data over the standard library and msgspec, so that `core` (no
torch) and `runtime` (torch) meet without importing each other, and so that plans can be logged,
replayed and sent to another process. Mutable state lives with its owner: `core.Sequence` belongs to
the scheduler, the tensors of a slot to the runner.

Letters: a *slot* is the runner's index for a resident sequence (sampling state, block table);
a *row* is one sequence's share of one step; *position* counts tokens of a sequence from 0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

import msgspec

from quickstep.sampling_params import Grammar, SamplingParams

__all__ = [
    "Admission",
    "Executor",
    "FinishReason",
    "Grammar",
    "Phase",
    "Pooling",
    "Request",
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
    """What a row does: compute the prompt, or extend a computed one."""

    PREFILL = "prefill"
    DECODE = "decode"


class Pooling(enum.Enum):
    """How the final hidden states of a prompt become one embedding, of length 1."""

    MEAN = "mean"
    LAST = "last"


class FinishReason(enum.Enum):
    """Why a sequence ended. Each end has one reason of its own; `openai` folds them.

    ERROR is our fault, REFUSED the request's own: what it demands of the next token cannot be.
    """

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LIMIT = "context_limit"
    POOLED = "pooled"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    ERROR = "error"
    REFUSED = "refused"
    SHUTDOWN = "shutdown"

    @property
    def openai(self) -> str:
        """The `finish_reason` of OpenAI's API: `stop`, `length`, `abort` or `error`."""
        if self in _STOPS:
            return "stop"
        if self in (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LIMIT, FinishReason.DEADLINE):
            return "length"
        return "error" if self.is_failure else "abort"

    @property
    def is_failure(self) -> bool:
        """Whether the sequence could not continue; its last output says why in `error`."""
        return self in (FinishReason.ERROR, FinishReason.REFUSED)


_STOPS = (
    FinishReason.EOS,
    FinishReason.STOP_TOKEN,
    FinishReason.STOP_STRING,
    FinishReason.POOLED,
)


class Request(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a client requested, tokenised; `sampling.n` sequences come out of it. The same value is
    the message to the engine's process and what the scheduler gets.

    Attributes:
        request_id: "" for a request that has not been submitted: the engine gives it one.
        seed: Noise seed: `sampling.seed`, else one that the engine draws.
        eos_token_ids: The model's end tokens; `sampling.ignore_eos` disables them.
        priority: Lower is served first (vLLM's meaning); it gains with age (`core.sequence`).
        adapter: LoRA adapter name, "" for the base model. Part of the prefix-cache key.
        cache_salt: Separates tenants in the prefix cache.
        timeout_s: Seconds after its arrival at the scheduler, after which what was generated is the
            answer; None for no limit.
        pooling: The prompt's embedding is the answer, and nothing is generated.
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

    @property
    def prompt_only(self) -> bool:
        """Whether it ends with its prompt: nothing is generated."""
        return self.pooling is not None or self.sampling.max_tokens == 0


class Admission(msgspec.Struct, frozen=True):
    """A sequence becomes resident: the runner resets the slot to this before the step's rows run.

    `token_ids` are all tokens known so far (after a preemption: prompt and outputs), so that
    penalties can be rebuilt; the first `prompt_len` of them are the prompt. `seed` is the
    sequence's own (the request's for index 0, derived for the others of `n`).
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


class StepRow(msgspec.Struct, frozen=True):
    """One sequence's share of a step: compute `num_tokens` tokens from position `start`.

    Attributes:
        token_ids: The inputs, `num_tokens` of them; empty on a decode row whose input is the token
            that the slot's previous (still running) step samples: the runner has it.
        new_block_ids: Appended to the slot's block table before the step runs; on the row after an
            admission they include the prefix-cache hits.
        emits: The last position's logits are sampled and give an output token.
        output_position: Index among the sequence's output tokens of the token this row emits
            (the noise counter): 0 for the first.
        num_drafts: Trailing inputs that are speculative drafts.
        score_start: First position whose logits score the prompt token behind it.
        num_scored: How many positions from there on do, all of them in this row.
        pools: The row ends the prompt of a request with `pooling`, and gives its embedding.
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
    adapter: str = ""
    score_start: int = 0
    num_scored: int = 0
    pools: bool = False

    @property
    def end(self) -> int:
        """Tokens of the sequence computed once this row has run."""
        return self.start + self.num_tokens


class StepPlan(msgspec.Struct, frozen=True):
    """What one step computes: `released` slots are dropped, `admitted` set up, then `rows` run.

    Rows stand in order: decode rows first, then prefill rows. Within a step every row's KV is
    written before any row reads it (layer by layer), so a row may share a block that another row
    of the same step fills.
    """

    step_id: int
    rows: tuple[StepRow, ...]
    admitted: tuple[Admission, ...] = ()
    released: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens over all rows."""
        return sum(row.num_tokens for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities of one token, from the raw logits (before any sampling).

    `rank` is 1 for the most likely token; `top` holds (token id, logprob), most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RowOutput(msgspec.Struct, frozen=True):
    """What a row emitted: no token (a prompt chunk), one, or several (accepted drafts + 1).

    `prompt_logprobs` has one entry per scored position: of the prompt token behind it.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: tuple[float, ...] | None = None


class RowFailure(msgspec.Struct, frozen=True):
    """One row cannot continue; its sequence ends, the others continue.

    `is_refused`: with REFUSED, since its own request leaves it no way; else with ERROR (NaN, say).
    """

    row: int
    reason: str
    is_refused: bool = False

    @property
    def finish_reason(self) -> FinishReason:
        """How the sequence ends."""
        return FinishReason.REFUSED if self.is_refused else FinishReason.ERROR


class StepResult(msgspec.Struct, frozen=True):
    """What a step gave: one `RowOutput` per row of the plan, in its order, and its seconds."""

    step_id: int
    outputs: tuple[RowOutput, ...]
    seconds: float
    failures: tuple[RowFailure, ...] = ()


class SequenceTimings(msgspec.Struct, frozen=True):
    """The life of one sequence on the scheduler's clock, in seconds; tokens and blocks as counts.

    queue + prefill + decode + preempted + paused = finished - arrival; time in which the reader
    was behind counts as paused alone. `device_s` is the sequence's share of the measured step
    seconds; over all sequences they add up to the device's busy time.
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


class SequenceOutput(msgspec.Struct, frozen=True):
    """News of one sequence: tokens, prompt logprobs, its end. The last one carries `timings`.

    Prompt logprobs come in order and once, with index 0: one per prompt token, None for the first.
    `index` counts the sequences of a request (0 to n-1); `stop_token_id` is the token that ended
    it, for EOS and STOP_TOKEN (it is part of `token_ids`); `error` says why for ERROR and REFUSED.
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


class StepRecord(msgspec.Struct, frozen=True):
    """One line of the step log. The executor measures `seconds`; times are the scheduler's clock.

    `num_kv_tokens` is the context that attention read, summed over rows (each row's `end`);
    `num_pairs` the positions that tokens saw, summed over tokens. `num_scored` positions gave
    prompt logprobs.
    `predicted_s` is what the cost model said before the step ran.
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


class StepOutcome(msgspec.Struct, frozen=True):
    """What `Scheduler.commit` gives back: the sequences that moved, and the step's log line."""

    outputs: tuple[SequenceOutput, ...]
    record: StepRecord


class Ticket(Protocol):
    """A submitted step."""

    def done(self) -> bool:
        """Whether `result` returns at once."""

    def result(self) -> StepResult:
        """Wait for the step. Raises EngineError when the executor failed."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when done: on the executor's thread, or here if it already is."""


class Executor(Protocol):
    """Runs plans strictly in the order of `submit`: local CPU, CUDA, a process group, a clock."""

    def submit(self, plan: StepPlan) -> Ticket:
        """Queue a step; returns before it has run."""

    def reset(self) -> None:
        """Run plans again: after a failed step the ones behind it fail as well, until this. Slots
        follow failed plans too, so that they agree with the scheduler's.
        """

    def close(self) -> None:
        """Finish what was submitted, then free everything. Idempotent."""
