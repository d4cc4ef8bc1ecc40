"""The values that layers exchange: requests, sampling parameters, step plans and step results.

Everything here is frozen plain data over the standard library, so that `core` (no torch) and
`runtime` (torch) meet without importing each other, and so that plans can be logged, replayed
and sent to another process. Mutable state lives with its owner: `core.Sequence` belongs to the
scheduler, the tensors of a slot to the runner.

Letters: a *slot* is the runner's index for a resident sequence (sampling state, block table);
a *row* is one sequence's share of one step; *position* counts tokens of a sequence from 0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from quickstep.errors import RequestError

__all__ = [
    "Admission",
    "Executor",
    "FinishReason",
    "Phase",
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


class FinishReason(enum.Enum):
    """Why a sequence ended. Each end has one reason of its own; `openai` folds them."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LIMIT = "context_limit"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    ERROR = "error"
    SHUTDOWN = "shutdown"

    @property
    def openai(self) -> str:
        """The `finish_reason` of OpenAI's API: `stop`, `length`, `abort` or `error`."""
        if self in (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING):
            return "stop"
        if self in (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LIMIT, FinishReason.DEADLINE):
            return "length"
        return "error" if self is FinishReason.ERROR else "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen and when a sequence ends. Names are vLLM's.

    Order of effects: penalties and bias -> allowed mask -> temperature -> top-k -> top-p -> min-p
    -> draw. Temperature 0 is argmax. Repetition penalty covers prompt and output; presence and
    frequency cover generated tokens only (OpenAI). Logprobs are of the raw logits.

    Attributes:
        n: Sequences per request, at least 1.
        seed: Noise seed; None lets the engine draw one (the response names it).
        top_k: 0 or -1 keeps all tokens.
        max_tokens: None generates up to the context limit.
        min_tokens: No EOS, stop token or stop string ends the sequence before this many tokens.
        logprobs: None for none; k >= 0 gives the chosen token's and the k most likely tokens'.
        shown_special_token_ids: What `skip_special_tokens` leaves in: markup for a parser.

    Raises:
        RequestError: A value is outside its range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    shown_special_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "shown_special_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias or {})))
        for name, (low, high) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        if self.min_p > 1.0 or not 0.0 < self.top_p <= 1.0:
            name = "min_p" if self.min_p > 1.0 else "top_p"
            raise RequestError(f"{name} is {getattr(self, name)}, it must be in (0, 1]", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}",
                param="min_tokens",
            )
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string, which would end at once", param="stop")


# Closed intervals; None where there is no bound. OpenAI's limits where OpenAI states one.
_RANGES: Mapping[str, tuple[float, float | None]] = MappingProxyType(
    {
        "n": (1, None),
        "temperature": (0.0, None),
        "top_p": (0.0, 1.0),
        "top_k": (-1, None),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "repetition_penalty": (1e-6, None),
        "seed": (-(2**63), 2**64 - 1),
        "max_tokens": (1, None),
        "min_tokens": (0, None),
        "logprobs": (0, None),
    }
)


def _check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    wrong_type = isinstance(value, bool) or not isinstance(value, (int, float))
    if wrong_type or value != value or value in (float("inf"), float("-inf")):
        raise RequestError(f"{name} is {value!r}, it must be a finite number", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise RequestError(f"{name} is {value}, it must be {limit}", param=name)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked, validated and tokenised. `n` sequences come out of one request.

    Attributes:
        priority: Lower is served first (vLLM's meaning); 0 is the default tier.
        eos_token_ids: The model's end tokens; `sampling.ignore_eos` disables them.
        adapter: LoRA adapter name, "" for the base model. Part of the prefix-cache key.
        cache_salt: Separates tenants in the prefix cache.
        deadline_s: Absolute time on the scheduler's clock at which the partial output is
            returned; None for no deadline.
        seed: Resolved noise seed; the engine draws one for unseeded requests.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Admission:
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


@dataclass(frozen=True, slots=True)
class StepRow:
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

    @property
    def end(self) -> int:
        """Tokens of the sequence computed once this row has run."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one output token, from the raw logits (before any sampling).

    `rank` is 1 for the most likely token; `top` holds (token id, logprob), most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What a row emitted: no token (a prompt chunk), one, or several (accepted drafts + 1)."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFailure:
    """One row cannot go on (NaN logits, say); its sequence ends with ERROR, the others go on."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: one `RowOutput` per row of the plan, in its order, and its seconds."""

    step_id: int
    outputs: tuple[RowOutput, ...]
    seconds: float
    failures: tuple[RowFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceTimings:
    """The life of one sequence on the scheduler's clock, in seconds; tokens and blocks as counts.

    queue + prefill + decode + preempted = finished - arrival. `device_s` is the sequence's share of
    the measured step seconds; over all sequences they add up to the device's busy time.
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


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence, or its end. The last one of a sequence carries `timings`.

    `index` counts the sequences of a request (0 to n-1); `stop_token_id` is the token that ended
    it, for EOS and STOP_TOKEN (it is part of `token_ids`); `error` says why for ERROR.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    timings: SequenceTimings | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of the step log. The executor measures `seconds`; times are the scheduler's clock.

    `num_kv_tokens` is the context that attention read, summed over rows (each row's `end`).
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
    num_free_blocks: int
    num_waiting: int
    num_running: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
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
