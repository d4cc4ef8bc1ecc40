"""Runs one step: plan -> slots -> batch -> model -> sampler -> drafts -> result.

Owns the KV tensors and the slots. Called by an executor, by one thread at a time, strictly in plan
order; a plan may be queued before the result of the previous one was read, because the runner keeps
the last token of every slot. Slots follow the plans in any case: a plan that fails has released and
set up its slots, but its rows have not run, and their sequences must be admitted again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from quickstep.errors import EngineError
from quickstep.model.interface import Classifier, Model
from quickstep.ops.table import KVCache, LoRAAdapter, Ranks
from quickstep.ops.tensors import AnyTensor, use_device
from quickstep.runtime.sampling.grammar import NewMatcher
from quickstep.runtime.sampling.native_sampler import open_device_sampler, open_sampler
from quickstep.runtime.sampling.prompt_scores import PromptScorer
from quickstep.runtime.sampling.sampler import Sample, SampleFailure, failure_of
from quickstep.runtime.slots import Slot, SlotTable
from quickstep.runtime.speculation.drafting import Drafting, NextDrafts
from quickstep.runtime.speculation.proposer import Proposer
from quickstep.runtime.speculation.verification import EmittingRow, sample_rows
from quickstep.runtime.steps.opening import open_steps
from quickstep.runtime.steps.pipeline import PipelinedSteps, StageLinks, with_stages
from quickstep.runtime.steps.ranked import with_ranks
from quickstep.runtime.steps.stage_frames import StageFrame
from quickstep.runtime.steps.step_model import EmittingToken, GraphOptions, StepModel
from quickstep.types import (
    Pooling,
    RowFailure,
    RowOutput,
    StepPlan,
    StepResult,
    StepRow,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from quickstep.runtime.sampling.device_sampler import SamplesInFlight
    from quickstep.runtime.steps.graphs import GraphSteps


class LaunchedStep(msgspec.Struct):
    """A step that runs on the device: its sampled tokens are on their way to the host. A step
    without any is waited for as well. `started_s` becomes when the device was free for it.
    """

    plan: StepPlan
    slots: list[Slot]
    emitting: list[EmittingRow]
    samples: SamplesInFlight
    started_s: float


class HeldStep(msgspec.Struct):
    """A step whose slots are set up; its rows need the results of all steps before it."""

    plan: StepPlan
    slots: list[Slot]
    started_s: float


class PreparedRows(msgspec.Struct):
    """What a step's rows need of the model: logits of `tokens`, for the rows that emit.

    Attributes:
        is_read: Prompts are scored or embedded.
        every_token: The hidden states of all tokens are needed.
    """

    emitting: list[EmittingRow]
    tokens: list[EmittingToken]
    is_read: bool
    every_token: bool


class PostedStep(msgspec.Struct):
    """A step that earlier stages of a pipeline compute."""

    plan: StepPlan
    slots: list[Slot]
    prepared: PreparedRows
    frame: StageFrame
    started_s: float


class ComputedRows(msgspec.Struct):
    """What the last stage of a pipeline has computed, and the seconds of every stage."""

    hidden: AnyTensor
    logits: AnyTensor
    stage_s: tuple[float, ...]


Awaited = Sequence[Sample | SampleFailure] | ComputedRows


class ModelRunner:
    """One model on one device. `clock` gives seconds and is read at a step's start and end.

    `new_matcher` compiles the grammars of requests; None where no request has one. `proposer`
    drafts tokens for rows that ask for them. `adapters` are those that rows may name, and may
    change between steps; None where no row has one. `by_rejection`: accept drafts by rejection
    sampling, so that tokens depend on them. `graphs`: steps are recorded; `kv` then has a block
    more than the pool. `links`: to the other stages of a pipeline, whose last one this is.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        block_size: int,
        num_slots: int,
        clock: Callable[[], float],
        new_matcher: NewMatcher | None = None,
        enforce_eager: bool = False,
        proposer: Proposer | None = None,
        adapters: Mapping[str, LoRAAdapter] | None = None,
        by_rejection: bool = False,
        graphs: GraphOptions | None = None,
        links: StageLinks | None = None,
    ) -> None:
        self._drafting = Drafting(proposer)
        aux_layers = self._drafting.aux_layers
        steps = open_steps(
            model, kv, block_size, enforce_eager, adapters, aux_layers, graphs=graphs
        )
        self._steps: StepModel = with_ranks(steps, model)
        self._pipeline: PipelinedSteps | None = None
        if links is not None:
            self._steps = self._pipeline = with_stages(self._steps, model, links, clock)
        self._graph_steps = _graph_steps(self._steps) if graphs is not None else None
        self._device_sampler = open_device_sampler(model)
        sampler = self._device_sampler
        self._sample = open_sampler(model) if sampler is None else sampler.sample
        self._scorer = PromptScorer(self._steps, model)
        self._classifier = model if isinstance(model, Classifier) else None
        # the blocks of an encoder hold nothing: any id is as good
        self._num_blocks = kv.keys[0].shape[0] - (graphs is not None) if kv.keys else sys.maxsize
        self._block_size = block_size
        self._ranks, self._waited_s = model.ops.ranks, 0.0
        self._slots = SlotTable(num_slots, model.vocab_size, new_matcher)
        self._by_rejection = by_rejection
        self._device = model.device
        self._clock = clock

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. Raises EngineError when the plan does not fit, and what the model raises.

        Rows that cannot continue (NaN logits, a token id in `logit_bias` that the model lacks) are
        failures in the result.
        """
        return self.resume(self._start(plan))

    def launch(self, plan: StepPlan) -> LaunchedStep | PostedStep | HeldStep:
        """Begin a step without waiting for the device or for other stages; steps before it may
        still run there.

        Where the device cannot sample its tokens before the host knows those of the steps before
        it, it is held: `resume` runs it once these are finished. Raises as `run`.
        """
        held = self._start(plan)
        if self._pipeline is not None:
            return self._post(held, self._pipeline) if plan.rows else held
        steps, sampler, slots = self._graph_steps, self._device_sampler, held.slots
        if steps is None or sampler is None or not self._can_defer(plan.rows, slots):
            return held
        try:
            steps.prepare(plan.rows, slots)
            emitting, places = _emitting(plan.rows, slots)
            _, logits = steps.run(places, False)
            emitting_slots = [row.slot for row in emitting]
            if all([slot.is_plain_argmax for slot in emitting_slots]):
                samples = sampler.of_argmax(steps.argmax(places))
            elif (token_ids := steps.sample(places, emitting_slots)) is not None:
                samples = sampler.of_recorded(token_ids, logits, [row.state for row in emitting])
            else:
                samples = sampler.launch(logits, [row.slot.state_ahead for row in emitting])
                steps.keep_tokens(places, samples.token_ids)
        except BaseException:
            self._slots.fail(plan.rows, f"step {plan.step_id} failed")
            raise
        for row in emitting:
            row.slot.num_pending += 1
        return LaunchedStep(plan, slots, emitting, samples, held.started_s)

    def _post(self, held: HeldStep, pipeline: PipelinedSteps) -> PostedStep:
        rows, slots = held.plan.rows, held.slots
        try:
            prepared = self._prepare(rows, slots)
            frame = pipeline.post(prepared.tokens, prepared.every_token)
        except BaseException:
            self._slots.fail(rows, f"step {held.plan.step_id} failed")
            raise
        return PostedStep(held.plan, slots, prepared, frame, held.started_s)

    def send(self, step: PostedStep) -> None:
        """Send a posted step to the first stage, in the order of `launch`. Another thread may
        finish steps meanwhile, without which this may wait. Raises EngineError.
        """
        assert self._pipeline is not None
        self._pipeline.send(step.frame)

    def wait(self, step: LaunchedStep | PostedStep) -> Awaited:
        """Wait for a step, the oldest that was launched: its samples, or what it computed. Other
        steps may be launched meanwhile. Raises what computing it has raised.
        """
        if isinstance(step, LaunchedStep):
            return step.samples.wait()
        assert self._pipeline is not None
        hidden, logits = self._pipeline.run(step.prepared.tokens, step.prepared.every_token)
        return ComputedRows(hidden, logits, self._pipeline.stage_s)

    def resume(self, held: HeldStep) -> StepResult:
        """Run a held step; every step before it is finished."""
        plan, slots = held.plan, held.slots
        outputs: tuple[RowOutput, ...] = ()
        failures: tuple[RowFailure, ...] = ()
        try:
            if rows := plan.rows:
                prepared = self._prepare(rows, slots)
                hidden, logits = self._steps.run(prepared.tokens, prepared.every_token)
                outputs, failures = self._read(rows, slots, prepared, hidden, logits)
        except BaseException:
            self._slots.fail(plan.rows, f"step {plan.step_id} failed")
            raise
        seconds = self._clock() - held.started_s
        waited_s = 0.0 if self._ranks is None else self._newly_waited_s(self._ranks)
        failed = self._drafting.num_failures
        return StepResult(plan.step_id, outputs, seconds, failures, failed, waited_s)

    def _newly_waited_s(self, ranks: Ranks) -> float:
        """Seconds that rank 0 has waited for others, since the last call."""
        before_s, self._waited_s = self._waited_s, ranks.waited_s
        return self._waited_s - before_s

    def finish(self, step: LaunchedStep | PostedStep, awaited: Awaited) -> StepResult:
        """Record the results of a step that ran, which `wait` has returned."""
        if isinstance(step, PostedStep):
            assert isinstance(awaited, ComputedRows)
            return self._finish_posted(step, awaited)
        assert not isinstance(awaited, ComputedRows)
        return self._finish_launched(step, awaited)

    def _finish_posted(self, step: PostedStep, computed: ComputedRows) -> StepResult:
        plan, started_s = step.plan, self._clock()
        *first, last = computed.stage_s
        outputs, failures = self._read(
            plan.rows, step.slots, step.prepared, computed.hidden, computed.logits
        )
        stage_s = *first, last + self._clock() - started_s
        waited_s = 0.0 if self._ranks is None else self._newly_waited_s(self._ranks)
        seconds, failed = sum(stage_s) / len(stage_s), self._drafting.num_failures
        return StepResult(plan.step_id, outputs, seconds, failures, failed, waited_s, stage_s)

    def _finish_launched(
        self, launched: LaunchedStep, samples: Sequence[Sample | SampleFailure]
    ) -> StepResult:
        outputs = [_NO_OUTPUT] * len(launched.slots)
        rows = launched.plan.rows
        for one, sampled in zip(launched.emitting, samples, strict=True):
            one.slot.num_pending -= 1
            if not one.slot.failure:
                one.accept(sampled)
        drafts = self._drafting.propose(rows, self._resident(rows, launched.emitting))
        for row in launched.emitting:
            outputs[row.index] = _output_with_tokens(row, _NO_OUTPUT, drafts)
        seconds = self._clock() - launched.started_s
        step_id = launched.plan.step_id
        return StepResult(step_id, tuple(outputs), seconds, _failures(launched.slots))

    def _resident(
        self, rows: Sequence[StepRow], emitting: Sequence[EmittingRow]
    ) -> list[EmittingRow]:
        """Those of a step's rows whose slots no later plan has given to another sequence; the
        blocks of the others may have other owners by now, too.
        """
        return [row for row in emitting if self._slots.holds(rows[row.index], row.slot)]

    def drop(self, held: HeldStep) -> None:
        """A held step does not run: one before it failed."""
        self._slots.fail(held.plan.rows, f"step {held.plan.step_id} was skipped")

    def abandon(self, step: LaunchedStep | PostedStep) -> None:
        """A launched step failed: its sequences must be admitted again."""
        if isinstance(step, LaunchedStep):
            for row in step.emitting:
                row.slot.num_pending -= 1
        for slot in step.slots:
            slot.failure = slot.failure or f"step {step.plan.step_id} failed"

    def compile_kernels(self) -> None:
        """Compile what only the first request would that samples its tokens."""
        if self._device_sampler is not None:
            self._device_sampler.compile_kernels()

    def capture_next(self) -> bool:
        """Record one more step, if one is wanted; called while nothing runs."""
        return self._graph_steps is not None and self._graph_steps.capture_next()

    def record_sampling(self) -> None:
        """Record the sampling of steps that are launched, too."""
        if self._graph_steps is not None and self._device_sampler is not None:
            self._graph_steps.record_sampling(self._device_sampler)

    @property
    def wants_capture(self) -> bool:
        """Whether `capture_next` has something to record."""
        return self._graph_steps is not None and self._graph_steps.wants_capture

    @property
    def num_captured(self) -> int:
        """Steps that are recorded."""
        return 0 if self._graph_steps is None else self._graph_steps.num_captured

    @property
    def num_missed(self) -> int:
        """Steps that ran op by op for want of a recorded one, since the last `capture_next`."""
        return 0 if self._graph_steps is None else self._graph_steps.num_missed

    def stop_capturing(self) -> None:
        """Record nothing more, after a failure."""
        if self._graph_steps is not None:
            self._graph_steps.stop_capturing()

    @property
    def has_stages(self) -> bool:
        """Whether other stages begin a step: it is launched, sent, awaited and finished."""
        return self._pipeline is not None

    @property
    def is_on_host(self) -> bool:
        """Whether any thread may run steps: a GPU is the current one of some threads only."""
        return self._device.type == "cpu"

    def use_device(self) -> None:
        """Make the model's device the current one of this thread."""
        use_device(self._device)

    def now(self) -> float:
        """The clock of steps."""
        return self._clock()

    def skip(self, plan: StepPlan) -> None:
        """Apply a plan that follows a failed one: its slots change, its rows do not run."""
        self._move(plan)
        self._slots.fail(plan.rows, f"step {plan.step_id} was skipped")

    def _move(self, plan: StepPlan) -> None:
        self._slots.move(plan.released, plan.admitted)
        self._drafting.move(plan.released, plan.admitted, self._slots)

    def _start(self, plan: StepPlan) -> HeldStep:
        """Change the slots as a plan says."""
        started_s = self._clock()
        if plan.released or plan.admitted:
            self._move(plan)
        try:
            slots = self._slots.of_rows(plan.rows)
            for row, slot in zip(plan.rows, slots, strict=True):
                self._check(row, slot)
                if row.new_block_ids:
                    slot.append_blocks(row.new_block_ids)
        except BaseException:
            self._slots.fail(plan.rows, f"step {plan.step_id} failed")
            raise
        return HeldStep(plan, slots, started_s)

    def _can_defer(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> bool:
        """Whether the device can sample the tokens of these rows before the host knows the ones
        before them.
        """
        if self._drafting.reads_hidden or not rows:
            return False
        return all(
            [
                slot.pool is None
                and not row.num_scored
                and not row.num_drafts
                and (not row.emits or bool(slot.failure) or slot.can_sample_ahead)
                for row, slot in zip(rows, slots, strict=True)
            ]
        )

    def _check(self, row: StepRow, slot: Slot) -> None:
        if row.num_drafts and not (row.emits and row.num_drafts < len(row.token_ids)):
            raise EngineError(f"a row of {slot.sequence_id} has nothing before its drafts")
        if row.num_tokens < 1:
            raise EngineError(f"a row of {slot.sequence_id} has no tokens")
        if row.parents:
            self._check_tree(row, slot)
        blocks = row.new_block_ids
        if blocks and not all(0 <= block_id < self._num_blocks for block_id in blocks):
            raise EngineError(
                f"{slot.sequence_id} got a block id outside the {self._num_blocks} blocks"
            )
        state = slot.state
        num_outputs = 0 if state is None else state.num_outputs + slot.num_pending
        if row.emits and state and not slot.failure and row.output_position != num_outputs:
            raise EngineError(
                f"{slot.sequence_id} has {num_outputs} outputs, "
                f"the plan emits output {row.output_position}"
            )

    def _check_tree(self, row: StepRow, slot: Slot) -> None:
        is_tree = all([0 <= parent <= node for node, parent in enumerate(row.parents)])
        if len(row.parents) != row.num_drafts or not is_tree:
            raise EngineError(f"a row of {slot.sequence_id} has drafts that are no tree")

    def _prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> PreparedRows:
        self._steps.prepare(rows, slots)
        emitting, tokens = _emitting(rows, slots)
        is_read = False
        for row, slot in zip(rows, slots, strict=True):
            is_read = is_read or bool(row.num_scored or slot.pool)
        every_token = is_read
        if not is_read and self._drafting.reader is not None:
            every_token = self._drafting.needs_every_token(rows)
        return PreparedRows(emitting, tokens, is_read, every_token)

    def _read(
        self,
        rows: Sequence[StepRow],
        slots: Sequence[Slot],
        prepared: PreparedRows,
        hidden: AnyTensor,
        logits: AnyTensor,
    ) -> tuple[tuple[RowOutput, ...], tuple[RowFailure, ...]]:
        """Sample, score and draft from what the model computed."""
        emitting, tokens, every_token = prepared.emitting, prepared.tokens, prepared.every_token
        outputs = [_NO_OUTPUT] * len(rows)
        resident, gone = emitting, []
        if self._pipeline is not None:
            holds = map(self._slots.holds, rows, slots)
            gone = [index for index, is_held in enumerate(holds) if not is_held]
            resident = self._resident(rows, emitting)
        if prepared.is_read:
            self._read_prompts(rows, slots, hidden, outputs)
        if emitting:
            at_once = self._device_sampler is not None
            sample_rows(self._sample, logits, emitting, self._by_rejection, at_once)
            if len(tokens) > len(emitting):
                self._move_accepted(rows, resident)
        if self._drafting.reader is not None:
            aux_hidden = self._steps.aux_hidden_states()
            self._drafting.compute(rows, slots, emitting, hidden, every_token, aux_hidden, gone)
        if emitting:
            drafts = self._drafting.propose(rows, resident, hidden, every_token)
            for row in emitting:
                outputs[row.index] = _output_with_tokens(row, outputs[row.index], drafts)
        return tuple(outputs), _failures(slots) if any([slot.failure for slot in slots]) else ()

    def _move_accepted(self, rows: Sequence[StepRow], emitting: Sequence[EmittingRow]) -> None:
        """Move the KV of drafts that a tree had elsewhere to the slots of their positions."""
        moves: list[tuple[int, int]] = []
        for row in emitting:
            if not row.parents:
                continue
            root = rows[row.index].root
            for depth, node in enumerate(row.computed):
                if node != depth:
                    source = row.slot.flat_index(root + node, self._block_size)
                    moves.append((source, row.slot.flat_index(root + depth, self._block_size)))
        if moves:
            self._steps.move_kv(moves)

    def _read_prompts(
        self,
        rows: Sequence[StepRow],
        slots: Sequence[Slot],
        hidden: AnyTensor,
        outputs: list[RowOutput],
    ) -> None:
        """Fill in prompt logprobs and embeddings; `hidden` [T, H] is of all rows."""
        start = 0
        for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            end = start + row.num_tokens
            if (row.num_scored or slot.pool is not None) and not slot.failure:
                try:
                    outputs[index] = self._prompt_output(row, slot, hidden[start:end])
                except BaseException as error:  # ends this row's sequence, not the step
                    slot.failure = failure_of(error, "the prompt could not be read").reason
            start = end

    def _prompt_output(self, row: StepRow, slot: Slot, hidden: AnyTensor) -> RowOutput:
        """The row's prompt logprobs and embedding, from its hidden states [T, H]."""
        scores = self._scorer.score(hidden, row, slot) if row.num_scored else ()
        if slot.pool is None:
            return RowOutput(prompt_logprobs=scores)
        if slot.pool.pooling.needs_all and slot.pool.num_tokens != row.start:
            raise EngineError(f"{slot.sequence_id} pools its prompt, a row begins at {row.start}")
        if slot.pool.pooling is Pooling.CLASSES:
            assert self._classifier is not None, "requests for classes are checked"
            return RowOutput(embedding=self._classifier.class_logits(hidden))
        slot.pool.add(hidden)
        embedding = slot.pool.embedding() if row.pools else None
        if row.pools and embedding is None:
            slot.failure = "the hidden states hold NaN or infinity"
        return RowOutput(prompt_logprobs=scores, embedding=embedding)


_NO_OUTPUT = RowOutput()
_NO_DRAFTS = NextDrafts()


def _failures(slots: Sequence[Slot]) -> tuple[RowFailure, ...]:
    failures: list[RowFailure] = []
    for index, slot in enumerate(slots):
        if slot.failure:
            failures.append(RowFailure(index, slot.failure, slot.is_refused))
    return tuple(failures)


def _graph_steps(steps: StepModel) -> GraphSteps | None:
    # Imported here: it computes with torch.
    from quickstep.runtime.steps.graphs import GraphSteps

    return steps if isinstance(steps, GraphSteps) else None


def _emitting(
    rows: Sequence[StepRow], slots: Sequence[Slot]
) -> tuple[list[EmittingRow], list[EmittingToken]]:
    """The rows that emit, and all tokens of them that need logits."""
    emitting: list[EmittingRow] = []
    tokens: list[EmittingToken] = []
    for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        if row.emits and not slot.failure:
            drafts = row.token_ids[row.num_tokens - row.num_drafts :] if row.num_drafts else ()
            assert slot.state is not None, "a slot without sampling state emits nothing"
            first = len(tokens)
            emitting.append(
                EmittingRow(index, slot, slot.state, first, drafts, row.parents, [], [0])
            )
            for num_after in range(row.num_drafts, -1, -1):
                tokens.append((index, num_after))
    return emitting, tokens


def _output_with_tokens(
    emitted: EmittingRow, output: RowOutput, drafts: Mapping[int, NextDrafts]
) -> RowOutput:
    """The row's output with the tokens that it emitted, and the drafts to follow them."""
    if emitted.slot.failure:
        return _NO_OUTPUT
    samples = emitted.samples
    if len(samples) == 1:
        token_ids: tuple[int, ...] = (samples[0].token_id,)
    else:
        token_ids = tuple([sample.token_id for sample in samples])
    logprobs: tuple[TokenLogprobs, ...] = ()
    if samples and samples[0].logprobs is not None:
        logprobs = tuple([sample.logprobs for sample in samples if sample.logprobs])
    next_drafts = drafts.get(emitted.index, _NO_DRAFTS)
    return RowOutput(
        token_ids,
        logprobs,
        output.prompt_logprobs,
        output.embedding,
        next_drafts.token_ids,
        next_drafts.num_forced,
        next_drafts.parents,
        tuple(emitted.computed[1:]) if emitted.parents else (),
    )
