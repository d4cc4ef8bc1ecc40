"""A recording of a scheduler's calls: `RecordingScheduler` writes it, `replay` reads it.

JSON lines of five kinds, in the order in which things happened:

    engine     once, first: the sizes and the cost model that the scheduler began with
    running    when a request has arrived, and when a part of its sequences has ended: what its
               line has until then, for `replay` if the writer is killed
    request    when a request has ended (or was refused): Mooncake's fields, and what
               scheduling needs
    call       each call of the scheduler with its time and, for `plan`, a digest of the plan
    end        once, last: requests that had not ended are written before it

Without `is_full` there is no text and no token: a prompt and its outputs are a hash for each full
KV block, with a key that is not stored; names of tenants, adapters and salts are numbered. With
it, a request line also holds the request, its tokens and the prompt's text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from quickstep.config import EngineConfig, SchedulerConfig
from quickstep.core.cost_model import Coefficients, CostFit, LinearCostModel
from quickstep.core.policies import Policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.errors import RequestError
from quickstep.json_line import json_line
from quickstep.types import (
    FinishReason,
    Grammar,
    KVTarget,
    Request,
    SamplingParams,
    SequenceOutput,
    StepOutcome,
    StepPlan,
    StepResult,
)

RECORDING_VERSION = 3
READABLE_VERSIONS = (2, 3)  # before 3 no request was resumed
_HASH_BITS = 48
_DIGEST_BYTES = 8


class EngineLine(msgspec.Struct, frozen=True, tag_field="kind", tag="engine"):
    """What the scheduler began with.

    Attributes:
        version: RECORDING_VERSION of the writer.
        fit: What the cost model had learnt; None if it began at `coefficients`.
        engine: The complete configuration, only in a full recording.
        fingerprint: Of the model; "" if there is none.
    """

    version: int
    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int
    prefix_caching: bool
    coefficients: Coefficients
    fit: CostFit | None = None
    engine: EngineConfig | None = None
    fingerprint: str = ""


class RecordedSequence(msgspec.Struct, frozen=True):
    """One sequence of a request.

    Attributes:
        num_tokens: Output tokens, those included that it was resumed with.
        hash_ids: Of its full blocks from the one that holds the prompt's end on.
        reason: How it ended; None if it had not ended.
        token_ids: The output, only in a full recording.
    """

    num_tokens: int
    hash_ids: tuple[int, ...] = ()
    reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()


class RecordedRequest(msgspec.Struct, frozen=True, tag_field="kind", tag="request"):
    """A request; the first four fields are Mooncake's.

    Attributes:
        timestamp: Milliseconds from the first call to its arrival.
        input_length: Prompt tokens.
        output_length: Output tokens of its longest sequence.
        hash_ids: One for each full block of `block_size` tokens of the prompt; equal where prompts
            share a prefix.
        number: Names the request in calls and plans.
        request: What the scheduler needs of it; complete only in a full recording.
        cancelled_s: Seconds after arrival at which it was aborted by its client.
        refused: The scheduler did not take it.
        text: The prompt, only in a full recording.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_size: int
    number: int
    sequences: tuple[RecordedSequence, ...]
    request: Request
    cancelled_s: float | None = None
    refused: bool = False
    text: str = ""


class RunningRequest(msgspec.Struct, frozen=True, tag_field="kind", tag="running"):
    """A request that has not ended. Its tokens and the hashes of its outputs are not known, except
    those of sequences that have ended.
    """

    request: RecordedRequest


class RecordedRow(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The output of a row: tokens, drafts for the next row, whether it failed and was refused by
    its own constraints, and of trees and forced drafts what `RowOutput` says.
    """

    num_tokens: int = 0
    num_drafts: int = 0
    failure: str = ""
    is_refused: bool = False
    draft_parents: tuple[int, ...] = ()
    accepted_drafts: tuple[int, ...] = ()
    num_forced_drafts: int = 0


class RecordedCall(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="call"):
    """A call of the scheduler.

    Attributes:
        name: Of the method.
        at_s: The argument `now`; 0 for `reset_prefix_cache`.
        number: Of the request.
        index: Of `abort`.
        reason: Of `abort`.
        digest: Of `plan`'s result, "" for None.
        seconds: Of the step.
        rows: Outputs of the step's rows; empty if each that emits has one token and no drafts.
        adapter: Of calls about an adapter, its content id.
        num_bytes: Of `register_adapter`.
        is_pinned: Of `register_adapter`.
        is_resident: Of `register_adapter`.
    """

    name: str
    at_s: float
    number: int = -1
    index: int | None = None
    reason: FinishReason | None = None
    digest: str = ""
    seconds: float = 0.0
    rows: tuple[RecordedRow, ...] = ()
    adapter: str = ""
    num_bytes: int = 0
    is_pinned: bool = False
    is_resident: bool = False


class EndLine(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """The recording was closed."""

    num_calls: int


RecordingLine = EngineLine | RunningRequest | RecordedRequest | RecordedCall | EndLine


def plan_digest(plan: StepPlan | None, number_of: Callable[[str], int]) -> str:
    """What a plan decides, without tokens and names; "" for None. `number_of` a request's id."""
    if plan is None:
        return ""
    admitted = [
        (
            admission.slot,
            number_of(name),
            int(index),
            admission.prompt_len,
            len(admission.token_ids),
        )
        for admission in plan.admitted
        for name, _, index in (admission.sequence_id.rpartition("#"),)
    ]
    rows = [replace(row, token_ids=(0,) * len(row.token_ids), adapter="") for row in plan.rows]
    content = msgspec.msgpack.encode((plan.step_id, rows, admitted, plan.released))
    return blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


class _Live(msgspec.Struct):
    """A request that has not ended: its number, arrival, and what its sequences have generated."""

    number: int
    at_s: float
    request: Request
    outputs: list[list[int]]
    reasons: list[FinishReason | None]
    cancelled_s: float | None = None
    prompt_chain: list[bytes] | None = None  # the hashes of the prompt's full blocks


def _hash_id(digest: bytes) -> int:
    return int.from_bytes(digest, "little") >> (128 - _HASH_BITS)


class Recorder:
    """Turns calls into lines for `write`. Owned by one `RecordingScheduler`.

    `key` separates the hashes of this recording from those of others. `text_of` decodes a prompt
    for a full recording; None writes no text and no tokens.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        block_size: int,
        key: bytes,
        text_of: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._write = write
        self._encoder = msgspec.json.Encoder(enc_hook=dict)  # read-only mappings
        self._block_size = block_size
        self._key = key
        self._text_of = text_of
        self._live: dict[str, _Live] = {}
        self._names: dict[str, dict[str, str]] = {}
        self._num_requests = 0
        self._num_calls = 0
        self._start_s: float | None = None

    def begin(self, line: EngineLine) -> None:
        """Write the first line."""
        self._put(line)

    def close(self) -> None:
        """Write the requests that have not ended, and the last line."""
        for name in tuple(self._live):
            self._finish(name)
        self._put(EndLine(self._num_calls))

    def added(self, request: Request, now: float, is_refused: bool) -> None:
        """The scheduler was given a request."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if self._start_s is None:
            self._start_s = now
        n = request.sampling.n
        live = _Live(number, now, request, [[] for _ in range(n)], [None] * n)
        if not is_refused:  # else it may name sequences that it does not have
            for resumed in request.resumed:
                live.outputs[resumed.index] += resumed.token_ids
        self.call(RecordedCall("add", now, number))
        if is_refused:
            self._put(self._line(live, is_refused=True))
        else:
            self._live[request.request_id] = live
            self._put(RunningRequest(self._line(live)))

    def call(self, call: RecordedCall) -> None:
        """Write a call."""
        self._num_calls += 1
        self._put(call)

    def number(self, request_id: str) -> int:
        """The number of a live request; -1 for another id."""
        live = self._live.get(request_id)
        return -1 if live is None else live.number

    def adapter_call(self, name: str, adapter_id: str, now: float = 0.0, **values: Any) -> None:
        """Write a call about an adapter."""
        known = adapter_id if self._text_of else self._numbered("adapter_id", adapter_id)
        self.call(RecordedCall(name, now, adapter=known, **values))

    def aborted(self, request_id: str, reason: FinishReason, now: float) -> None:
        """A request is about to be ended from outside."""
        live = self._live.get(request_id)
        if live is not None and reason is FinishReason.ABORTED:
            live.cancelled_s = now - live.at_s

    def received(self, outputs: Sequence[SequenceOutput]) -> None:
        """Sequences got tokens, or ended."""
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            live.outputs[output.index] += output.token_ids
            if output.finish_reason is not None:
                live.reasons[output.index] = output.finish_reason
                if all(live.reasons[index] is not None for index in live.request.indices):
                    self._finish(output.request_id)
                else:
                    self._put(RunningRequest(self._line(live)))

    def _finish(self, request_id: str) -> None:
        self._put(self._line(self._live.pop(request_id)))

    def _line(self, live: _Live, is_refused: bool = False) -> RecordedRequest:
        request, is_full = live.request, self._text_of is not None
        prompt = request.prompt_token_ids
        if live.prompt_chain is None:  # once: there may be many sequences and lines of a request
            live.prompt_chain = self._hashes(prompt, b"")
        chain = live.prompt_chain
        rest = prompt[len(chain) * self._block_size :]
        parent = chain[-1] if chain else b""
        sequences = tuple(
            RecordedSequence(
                len(outputs),
                tuple(map(_hash_id, self._hashes((*rest, *outputs), parent))),
                reason,
                tuple(outputs) if is_full else (),
            )
            for outputs, reason in zip(live.outputs, live.reasons, strict=True)
        )
        assert self._start_s is not None, "a request was added"
        return RecordedRequest(
            timestamp=1e3 * (live.at_s - self._start_s),
            input_length=len(prompt),
            output_length=max(map(len, live.outputs)),
            hash_ids=tuple(map(_hash_id, chain)),
            block_size=self._block_size,
            number=live.number,
            sequences=sequences,
            request=request if is_full else self._without_text(request, live.number),
            cancelled_s=live.cancelled_s,
            refused=is_refused,
            text="" if self._text_of is None else self._text_of(prompt),
        )

    def _hashes(self, token_ids: Sequence[int], parent: bytes) -> list[bytes]:
        """A hash for each full block, of it and of all before it, whose hash is `parent`."""
        size, found = self._block_size, []
        for start in range(0, len(token_ids) - size + 1, size):
            content = parent + array("q", token_ids[start : start + size]).tobytes()
            parent = blake2b(content, digest_size=16, key=self._key).digest()
            found.append(parent)
        return found

    def _without_text(self, request: Request, number: int) -> Request:
        """The request without its content, and with all else: what a plan depends on may be any of
        that.
        """
        return replace(
            request,
            request_id=str(number),
            prompt_token_ids=(),
            sampling=_without_content(request.sampling),
            seed=0,
            eos_token_ids=frozenset(),
            tenant="/".join(self._numbered("tenant", part) for part in request.tenant.split("/")),
            adapter=self._numbered("adapter", request.adapter),
            adapter_id=self._numbered("adapter_id", request.adapter_id),
            cache_salt=self._numbered("salt", request.cache_salt),
            resumed=tuple(
                replace(part, token_ids=(0,) * len(part.token_ids)) for part in request.resumed
            ),
            handover=None if request.handover is None else KVTarget("", 0, ""),
        )

    def _numbered(self, kind: str, name: str) -> str:
        if not name:
            return ""
        names = self._names.setdefault(kind, {})
        return names.setdefault(name, f"{kind}-{len(names) + 1}")

    def _put(self, line: Any) -> None:
        self._write(json_line(line, self._encoder.encode) + b"\n")


class RecordingScheduler(Scheduler):
    """A scheduler that records its calls and their results.

    A subclass, because drivers need a `Scheduler`. `close` ends the recording.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVBlockPool,
        policy: Policy,
        cost_model: LinearCostModel,
        recorder: Recorder,
        engine: EngineConfig | None = None,
        fingerprint: str = "",
    ) -> None:
        super().__init__(config, pool, policy, cost_model)
        self._recorder = recorder
        recorder.begin(
            EngineLine(
                RECORDING_VERSION,
                config,
                pool.num_blocks,
                pool.block_size,
                pool.prefix_caching,
                cost_model.coefficients,
                cost_model.fit(),
                engine,
                fingerprint,
            )
        )

    def close(self) -> None:
        """Write what has not ended; no call may follow."""
        self._recorder.close()

    def add(self, request: Request, now: float) -> None:
        """See `Scheduler.add`."""
        try:
            super().add(request, now)
        except RequestError:
            self._recorder.added(request, now, is_refused=True)
            raise
        self._recorder.added(request, now, is_refused=False)

    def abort(
        self,
        request_id: str,
        now: float,
        reason: FinishReason = FinishReason.ABORTED,
        index: int | None = None,
    ) -> tuple[SequenceOutput, ...]:
        """See `Scheduler.abort`."""
        recorder = self._recorder
        number = recorder.number(request_id)
        recorder.call(RecordedCall("abort", now, number, index, reason))
        recorder.aborted(request_id, reason, now)
        outputs = super().abort(request_id, now, reason, index)
        recorder.received(outputs)
        return outputs

    def expire(self, now: float) -> tuple[SequenceOutput, ...]:
        """See `Scheduler.expire`."""
        self._recorder.call(RecordedCall("expire", now))
        outputs = super().expire(now)
        self._recorder.received(outputs)
        return outputs

    def pause(self, request_id: str, now: float) -> None:
        """See `Scheduler.pause`."""
        self._recorder.call(RecordedCall("pause", now, self._recorder.number(request_id)))
        super().pause(request_id, now)

    def resume(self, request_id: str, now: float) -> None:
        """See `Scheduler.resume`."""
        self._recorder.call(RecordedCall("resume", now, self._recorder.number(request_id)))
        super().resume(request_id, now)

    def reset_prefix_cache(self) -> int:
        """See `Scheduler.reset_prefix_cache`."""
        self._recorder.call(RecordedCall("reset_prefix_cache", 0.0))
        return super().reset_prefix_cache()

    def register_adapter(
        self, adapter_id: str, num_bytes: int, is_pinned: bool = False, is_resident: bool = False
    ) -> None:
        """See `Scheduler.register_adapter`."""
        self._recorder.adapter_call(
            "register_adapter",
            adapter_id,
            num_bytes=num_bytes,
            is_pinned=is_pinned,
            is_resident=is_resident,
        )
        super().register_adapter(adapter_id, num_bytes, is_pinned, is_resident)

    def retire_adapter(self, adapter_id: str) -> bool:
        """See `Scheduler.retire_adapter`."""
        self._recorder.adapter_call("retire_adapter", adapter_id)
        return super().retire_adapter(adapter_id)

    def adapter_loaded(self, adapter_id: str, now: float) -> bool:
        """See `Scheduler.adapter_loaded`."""
        self._recorder.adapter_call("adapter_loaded", adapter_id, now)
        return super().adapter_loaded(adapter_id, now)

    def adapter_failed(
        self, adapter_id: str, reason: str, now: float
    ) -> tuple[SequenceOutput, ...]:
        """See `Scheduler.adapter_failed`."""
        self._recorder.adapter_call("adapter_failed", adapter_id, now)
        outputs = super().adapter_failed(adapter_id, reason, now)
        self._recorder.received(outputs)
        return outputs

    def plan(self, now: float) -> StepPlan | None:
        """See `Scheduler.plan`."""
        plan = super().plan(now)
        digest = plan_digest(plan, self._recorder.number)
        self._recorder.call(RecordedCall("plan", now, digest=digest))
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepOutcome:
        """See `Scheduler.commit`."""
        rows = _recorded_rows(plan, result)
        self._recorder.call(RecordedCall("commit", now, seconds=result.seconds, rows=rows))
        outcome = super().commit(plan, result, now)
        self._recorder.received(outcome.outputs)
        return outcome

    def fail(self, plan: StepPlan, reason: str, now: float) -> tuple[SequenceOutput, ...]:
        """See `Scheduler.fail`."""
        self._recorder.call(RecordedCall("fail", now))
        outputs = super().fail(plan, reason, now)
        self._recorder.received(outputs)
        return outputs


def _without_content(sampling: SamplingParams) -> SamplingParams:
    """The sampling with all its numbers, and nothing that names tokens or text."""
    numbers: dict[str, Any] = {
        name: value
        for name, value in asdict(sampling).items()
        if isinstance(value, bool | int | float)
    }
    grammar = None if sampling.grammar is None else Grammar.of_json_object()
    return replace(SamplingParams(), **{**numbers, "seed": None, "grammar": grammar})


def _recorded_rows(plan: StepPlan, result: StepResult) -> tuple[RecordedRow, ...]:
    """The outputs of a step's rows; () if all are the usual ones."""
    failures = {failure.row: failure for failure in result.failures}
    rows = []
    for place, output in enumerate(result.outputs):
        failure = failures.get(place)
        rows.append(
            RecordedRow(
                len(output.token_ids),
                len(output.draft_token_ids),
                "" if failure is None else failure.reason or "failed",
                failure is not None and failure.is_refused,
                output.draft_parents,
                output.accepted_drafts,
                output.num_forced_drafts,
            )
        )
    usual = [RecordedRow(int(row.emits)) for row in plan.rows]
    return () if rows == usual else tuple(rows)
