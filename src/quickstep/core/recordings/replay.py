"""Replay a recording (see `recording`): the same calls on a new scheduler give the same plans.

`read_recording` checks the lines, `replay` repeats their calls. The tokens of a recording without
content are made up from its hashes: blocks are equal where the recorded ones were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.recordings.recording import (
    READABLE_VERSIONS,
    EndLine,
    EngineLine,
    RecordedCall,
    RecordedRequest,
    RecordedRow,
    RecordingLine,
    RunningRequest,
    plan_digest,
)
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.types import (
    FinishReason,
    Request,
    RowFailure,
    RowOutput,
    SequenceOutput,
    StepPlan,
    StepRecord,
    StepResult,
    TokenLogprobs,
)

_FIRST_SINGLE_TOKEN = 1 << 62  # tokens of no full block
_FIRST_UNKNOWN_TOKEN = 3 << 61  # outputs of requests that had not ended, none twice
_NO_NUMBER = "no such request"


class SchedulerRecording(msgspec.Struct, frozen=True):
    """The lines of a file.

    Attributes:
        requests: By number.
        calls: With the number of each one's line.
        is_complete: It was closed; otherwise its writer was killed.
        torn_line: The last line if it was written in part only, and is left out.
        running: Numbers of requests that had not ended when the writer was killed.
    """

    engine: EngineLine
    requests: dict[int, RecordedRequest]
    calls: tuple[tuple[int, RecordedCall], ...]
    is_complete: bool
    torn_line: int | None = None
    running: frozenset[int] = frozenset()

    @property
    def is_full(self) -> bool:
        """Whether it has tokens."""
        return self.engine.engine is not None


class Replayed(msgspec.Struct, frozen=True):
    """The result: plans that were compared, and the line of the first that differs, if any; with a
    runner, tokens that were compared, and a sentence about the first that differs.

    `cut_at_line`: Where the replay ended, because the next call adds a request without a line: its
    server was killed before it had written it.
    """

    num_plans: int
    different_line: int | None = None
    num_tokens: int = 0
    different_tokens: str = ""
    cut_at_line: int | None = None


# Runs a plan and returns its result; of a real model, to compare its tokens.
Runner = Callable[[StepPlan], StepResult]
# Called with the outputs of each call, and with the record of a step that it committed.
Watcher = Callable[[Sequence[SequenceOutput], StepRecord | None], None]


def read_recording(lines: Iterable[bytes | str]) -> SchedulerRecording:
    """Decode and check a recording. A last line without its end is left out (`torn_line`).

    Raises:
        ConfigError: A line is not valid, or belongs to nothing; it has the line's number.
    """
    decoder = msgspec.json.Decoder(RecordingLine)
    engine: EngineLine | None = None
    requests: dict[int, RecordedRequest] = {}
    calls: list[tuple[int, RecordedCall]] = []
    running: set[int] = set()
    is_complete = False
    torn_line = None
    error_before: ConfigError | None = None
    for number, line in enumerate(lines, 1):
        if error_before is not None:
            raise error_before
        try:
            one = decoder.decode(line)
        except (msgspec.DecodeError, ValueError, RequestError, ConfigError) as error:
            error_before = ConfigError(f"line {number} of the recording is not valid: {error}")
            is_torn = line[-1:] not in ("\n", b"\n")
            if engine is None or is_complete or not is_torn:
                raise error_before from None
            torn_line = number
            continue
        if engine is None and not isinstance(one, EngineLine):
            raise ConfigError(f"line {number} of the recording is not valid: no engine before it")
        if isinstance(one, EngineLine):
            if one.version not in READABLE_VERSIONS:
                raise ConfigError(
                    f"line {number} of the recording is not valid: its version is {one.version}, "
                    f"this Quickstep reads {' and '.join(map(str, READABLE_VERSIONS))}"
                )
            if engine is not None:
                raise ConfigError(f"line {number} of the recording is not valid: a second engine")
            engine = one
        elif isinstance(one, RecordedRequest):
            _check_request(one, number)
            requests[one.number] = one
            running.discard(one.number)
        elif isinstance(one, RunningRequest):
            _check_request(one.request, number)
            requests[one.request.number] = one.request
            running.add(one.request.number)
        elif isinstance(one, RecordedCall):
            calls.append((number, one))
        else:
            is_complete = isinstance(one, EndLine)
    if engine is None:
        raise ConfigError("the recording is empty")
    return SchedulerRecording(
        engine, requests, tuple(calls), is_complete, torn_line, frozenset(running)
    )


def _check_request(one: RecordedRequest, number: int) -> None:
    problem = ""
    if one.block_size < 1 or min(one.input_length, one.output_length) < 0:
        problem = "a length is below 0"
    elif len(one.hash_ids) != one.input_length // one.block_size:
        problem = f"{one.input_length} tokens do not have {len(one.hash_ids)} hash_ids"
    elif len(one.sequences) != one.request.sampling.n:
        problem = f"n is {one.request.sampling.n}, it has {len(one.sequences)} sequences"
    if problem:
        raise ConfigError(f"line {number} of the recording is not valid: {problem}")


def open_replay(engine: EngineLine) -> Scheduler:
    """A scheduler as the recorded one was when it began."""
    pool = KVBlockPool(engine.num_blocks, engine.block_size, engine.prefix_caching)
    fit = engine.fit
    costs = LinearCostModel(engine.coefficients) if fit is None else LinearCostModel.of_fit(fit)
    return Scheduler(engine.scheduler, pool, make_policy(engine.scheduler), costs)


def replay(
    recording: SchedulerRecording,
    scheduler: Scheduler | None = None,
    run: Runner | None = None,
    watch: Watcher = lambda outputs, record: None,
) -> Replayed:
    """Repeat the calls; stops at the first plan that differs.

    With `run`, the plans of a full recording also run on a model, and its tokens are compared.
    `watch` gets what the scheduler put out.

    Raises:
        ConfigError: A call does not follow from those before it.
    """
    return _Replay(recording, scheduler or open_replay(recording.engine), run, watch).result()


class _Replay:
    """One replay in progress."""

    def __init__(
        self,
        recording: SchedulerRecording,
        scheduler: Scheduler,
        run: Runner | None,
        watch: Watcher,
    ) -> None:
        self._recording = recording
        self._scheduler = scheduler
        self._run = run
        self._watch = watch
        self._tokens = {} if recording.is_full else made_up_tokens(recording.requests)
        # the request and the index of each slot's sequence; those of the rows of steps in flight
        self._slots: dict[int, tuple[int, int]] = {}
        self._in_flight: deque[tuple[StepPlan, list[tuple[int, int]], StepResult | None]] = deque()
        self._num_plans = self._num_tokens = self._num_unknown = 0
        self._different_tokens = ""

    def result(self) -> Replayed:
        """Repeat all calls."""
        different = cut = None
        for line, call in self._recording.calls:
            if self._is_cut_off(call):
                cut = line
                break
            try:
                is_equal = self._repeat(call)
            except (EngineError, IndexError, KeyError) as error:
                raise ConfigError(
                    f"line {line} of the recording does not follow from those before it: {error}"
                ) from None
            if not is_equal:
                different = line
                break
        return Replayed(self._num_plans, different, self._num_tokens, self._different_tokens, cut)

    def _is_cut_off(self, call: RecordedCall) -> bool:
        is_known = call.number in self._recording.requests
        return call.name == "add" and not is_known and not self._recording.is_complete

    def _repeat(self, call: RecordedCall) -> bool:
        """Whether a call had the recorded result."""
        scheduler, now = self._scheduler, call.at_s
        outputs: Sequence[SequenceOutput] = ()
        record: StepRecord | None = None
        match call.name:
            case "add":
                return self._add(call)
            case "abort":
                reason = call.reason or FinishReason.ABORTED
                outputs = scheduler.abort(self._id(call.number), now, reason, call.index)
            case "expire":
                outputs = scheduler.expire(now)
            case "pause":
                scheduler.pause(self._id(call.number), now)
            case "resume":
                scheduler.resume(self._id(call.number), now)
            case "reset_prefix_cache":
                scheduler.reset_prefix_cache()
            case "register_adapter":
                scheduler.register_adapter(
                    call.adapter, call.num_bytes, call.is_pinned, call.is_resident
                )
            case "retire_adapter":
                scheduler.retire_adapter(call.adapter)
            case "adapter_loaded":
                scheduler.adapter_loaded(call.adapter, now)
            case "adapter_failed":
                outputs = scheduler.adapter_failed(call.adapter, "its load failed", now)
            case "plan":
                return self._plan(call)
            case "commit":
                plan, names, computed = self._in_flight.popleft()
                result = self._step_result(plan, names, computed, call)
                outcome = scheduler.commit(plan, result, now)
                outputs, record = outcome.outputs, outcome.record
            case "fail":
                outputs = scheduler.fail(self._in_flight.popleft()[0], "a step failed", now)
            case _:
                raise EngineError(f"there is no call {call.name!r}")
        if outputs or record is not None:
            self._watch(outputs, record)
        return True

    def _id(self, number: int) -> str:
        if number < 0:
            return _NO_NUMBER
        return str(number)

    def _number(self, request_id: str) -> int:
        return int(request_id)

    def _add(self, call: RecordedCall) -> bool:
        recorded = self._recording.requests.get(call.number)
        if recorded is None:
            raise EngineError(f"request {call.number} has no line")
        if recorded.refused:  # it has no other effect
            return True
        request = replace(recorded.request, request_id=str(call.number))
        if not self._recording.is_full:
            request = self._filled(recorded, request)
        try:
            self._scheduler.add(request, call.at_s)
        except RequestError:
            return False
        return True

    def _filled(self, recorded: RecordedRequest, request: Request) -> Request:
        """The request with made-up tokens; an end token is one that only ends this output."""
        tokens = self._tokens[recorded.number]
        ends: dict[FinishReason, set[int]] = {}
        for of_sequence, one in zip(tokens, recorded.sequences, strict=True):
            if one.reason is not None and one.num_tokens:
                ends.setdefault(one.reason, set()).add(of_sequence[-1])
        by_token = (FinishReason.STOP_TOKEN, FinishReason.REPETITION)  # made-up ones do not repeat
        stops = tuple(sorted({token for reason in by_token for token in ends.get(reason, ())}))
        start = recorded.input_length
        resumed = tuple(
            replace(part, token_ids=tuple(tokens[part.index][start:][: len(part.token_ids)]))
            for part in request.resumed
        )
        return replace(
            request,
            prompt_token_ids=tuple(tokens[0][: recorded.input_length]),
            eos_token_ids=frozenset(ends.get(FinishReason.EOS, ())),
            sampling=replace(request.sampling, stop_token_ids=stops),
            resumed=resumed,
        )

    def _plan(self, call: RecordedCall) -> bool:
        plan = self._scheduler.plan(call.at_s)
        self._scheduler.take_adapter_orders()  # what came of them is in the recording
        if plan_digest(plan, self._number) != call.digest:
            return False
        if plan is None:
            return True
        for admission in plan.admitted:
            name, _, index = admission.sequence_id.rpartition("#")
            self._slots[admission.slot] = int(name), int(index)
        names = [self._slots[row.slot] for row in plan.rows]
        self._num_plans += 1
        self._in_flight.append((plan, names, None if self._run is None else self._run(plan)))
        return True

    def _step_result(
        self,
        plan: StepPlan,
        names: Sequence[tuple[int, int]],
        outcome: StepResult | None,
        call: RecordedCall,
    ) -> StepResult:
        rows = call.rows or [RecordedRow(int(row.emits)) for row in plan.rows]
        if len(rows) != len(plan.rows):
            raise EngineError(f"the step has {len(plan.rows)} rows, not {len(rows)}")
        outputs = []
        for place, (row, name, recorded) in enumerate(zip(plan.rows, names, rows, strict=True)):
            known = self._outputs(*name)[row.output_position :][: recorded.num_tokens]
            first = _FIRST_UNKNOWN_TOKEN + self._num_unknown
            num_unknown = recorded.num_tokens - len(known)
            self._num_unknown += num_unknown
            token_ids = (*known, *range(first, first + num_unknown))
            score = TokenLogprobs(0, 0.0, 1)
            output = RowOutput(
                token_ids,
                prompt_logprobs=(score,) * row.num_scored,
                embedding=() if row.pools else None,
                draft_token_ids=(0,) * recorded.num_drafts,
                draft_parents=recorded.draft_parents,
                accepted_drafts=recorded.accepted_drafts,
                num_forced_drafts=recorded.num_forced_drafts,
            )
            if outcome is not None:
                output = self._compared(outcome.outputs[place], output, name, len(known))
            outputs.append(output)
        failures = tuple(
            RowFailure(place, one.failure, one.is_refused)
            for place, one in enumerate(rows)
            if one.failure
        )
        return StepResult(plan.step_id, tuple(outputs), call.seconds, failures)

    def _outputs(self, number: int, index: int) -> Sequence[int]:
        recorded = self._recording.requests[number]
        if self._recording.is_full:
            return recorded.sequences[index].token_ids
        return self._tokens[number][index][recorded.input_length :]

    def _compared(
        self, real: RowOutput, recorded: RowOutput, name: tuple[int, int], num_known: int
    ) -> RowOutput:
        """The model's own output, which is counted as equal or not."""
        self._num_tokens += num_known
        if real.token_ids[:num_known] != recorded.token_ids[:num_known]:
            self._different_tokens = self._different_tokens or (
                f"sequence {name[1]} of request {name[0]} got {real.token_ids}, "
                f"recorded are {recorded.token_ids}"
            )
            return recorded
        return real


def made_up_tokens(requests: Mapping[int, RecordedRequest]) -> dict[int, list[list[int]]]:
    """Tokens of each sequence, prompt and output, that are equal where the hashes are.

    The sequences of one request share the prompt's tokens in the block where the prompt ends, so
    there a block's first tokens may be those of another hash.
    """
    shared: dict[int, list[int]] = {}  # first tokens of a block, by its hash
    next_single = _FIRST_SINGLE_TOKEN
    found: dict[int, list[list[int]]] = {}
    for _, one in sorted(requests.items()):
        size = one.block_size
        tail = one.input_length % size
        first_ids = [sequence.hash_ids[0] for sequence in one.sequences if sequence.hash_ids]
        if tail and first_ids:
            known = max((shared.get(name, []) for name in first_ids), key=len)
            made_up = (first_ids[0] * size + place for place in range(len(known), tail))
            start = [*known, *made_up][:tail]
            for name in first_ids:
                if len(shared.get(name, ())) < tail:
                    shared[name] = start
    for number, one in sorted(requests.items()):
        size = one.block_size
        prompt = [token for name in one.hash_ids for token in _block(name, size, shared)]
        tail = one.input_length - len(prompt)
        first_ids = [sequence.hash_ids[0] for sequence in one.sequences if sequence.hash_ids]
        if tail and first_ids:
            prompt += _block(first_ids[0], size, shared)[:tail]
        else:
            prompt += range(next_single, next_single + tail)
            next_single += tail
        found[number] = []
        for sequence in one.sequences:
            blocks = [token for name in sequence.hash_ids for token in _block(name, size, shared)]
            tokens = prompt + blocks[tail:]
            missing = one.input_length + sequence.num_tokens - len(tokens)
            tokens = tokens[: one.input_length + sequence.num_tokens]
            tokens += range(next_single, next_single + max(0, missing))
            next_single += max(0, missing)
            found[number].append(tokens)
    return found


def _block(hash_id: int, size: int, shared: dict[int, list[int]]) -> list[int]:
    """The tokens of a full block."""
    first = shared.get(hash_id, [])
    return [*first, *(hash_id * size + place for place in range(len(first), size))]
