"""Steps that pass the stages of a pipeline: the last stage sends them to the first.

    PipelinedSteps ── step ──> StageFollower 0 ── step, carried ──> StageFollower 1 ──┐
          ^───────────────────────────── step, carried ───────────────────────────────┘

Only `StepModel` knows of stages. The last one is the engine's process: slots, sampling, grammars,
drafts and logits are there, as without stages. The others have their layers' weights and KV with
the block ids of all, and compute the steps in the order in which they were posted. While a stage
computes a step, the ones before it compute those that were posted later.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.ops.table import LoRAAdapter
from quickstep.ops.tensors import AnyTensor, Array, HostTensor, host_dtype, to_numpy
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.divided import DividedSteps
from quickstep.runtime.steps.ranked import HeldAdapters, adapter_numbers
from quickstep.runtime.steps.stage_frames import StageFrame, StepArrays
from quickstep.runtime.steps.step_model import EmittingToken, StepModel
from quickstep.types import StepRow

Clock = Callable[[], float]


class StageLinks(msgspec.Struct, frozen=True):
    """A stage's neighbours: where steps come from, and where they go."""

    before: socket.socket
    after: socket.socket


class _PostedStep(msgspec.Struct):
    """A step that other stages compute; `adapters` are those of its rows, kept until it has run."""

    rows: Sequence[LoRAAdapter | None]
    adapters: dict[str, LoRAAdapter]


def with_stages(steps: StepModel, model: Model, links: StageLinks, clock: Clock) -> PipelinedSteps:
    """The steps of the last stage, which the other stages begin."""
    assert isinstance(model, Decoder) and isinstance(steps, DividedSteps)
    return PipelinedSteps(steps, model, links, clock)


class PipelinedSteps:
    """`StepModel` of the last stage: `prepare`, `post`, `send` and, in the same order, `run`.

    No two threads may call it at once, but `send` and `run`. Both raise EngineError once a stage is
    lost.
    """

    def __init__(
        self,
        own: DividedSteps,
        model: Decoder,
        links: StageLinks,
        clock: Clock,
    ) -> None:
        self._own = own
        self._stage = _OwnStage(model, own, clock)
        self._links = links
        self._size = model.stage.size
        self._prepared: tuple[Sequence[StepRow], Sequence[Slot]] = (), ()
        self._posted: deque[_PostedStep] = deque()
        self._running = _PostedStep((), {})
        self._moves: list[tuple[int, int]] = []  # which the other stages do before the next step
        self._num_posted = 0
        self.stage_s: tuple[float, ...] = ()  # of the step that ran last

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        self._own.prepare(rows, slots)
        self._prepared = rows, slots

    def post(self, emitting: Sequence[EmittingToken], every_token: bool) -> StageFrame:
        """The prepared rows for the stages before this one; `send` and `run` have to follow."""
        _, slots = self._prepared
        prepared = self._own.prepared
        named, adapters = dict(prepared.adapters), prepared.of_each_row()
        moves = np.array(self._moves, dtype=np.int64).reshape(-1)
        blocks = [slot.block_ids for slot in slots]
        of_adapters = np.array(adapter_numbers(adapters), dtype=np.int64)
        of_rows = prepared.arrays_of(emitting)
        arrays = StepArrays(*of_rows, of_adapters, moves, np.concatenate(blocks))
        frame = StageFrame(self._num_posted, every_token, arrays, [0.0] * self._size)
        self._moves.clear()
        self._num_posted += 1
        self._posted.append(_PostedStep(adapters, named))
        return frame

    def send(self, frame: StageFrame) -> None:
        """Let the stages before this one compute a step. Raises EngineError."""
        try:
            frame.send(self._links.after)
        except OSError as error:
            raise EngineError(f"a stage of the pipeline is lost: {error}") from error

    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """`StepModel.run` of the oldest step that was posted and has not run."""
        assert features is None, "features are an EAGLE layer's, which is in one process"
        posted = self._running = self._posted.popleft()
        try:
            frame = StageFrame.receive(self._links.before)
        except OSError as error:
            raise EngineError(f"a stage of the pipeline is lost: {error}") from error
        if frame is None:
            raise EngineError("a stage of the pipeline has ended")
        self.stage_s = tuple(frame.seconds)
        if frame.failure:
            raise EngineError(frame.failure)
        results = self._stage.compute(frame, posted.rows)
        self.stage_s = tuple(frame.seconds)
        return results

    def aux_hidden_states(self) -> tuple[AnyTensor, ...]:
        """`StepModel.aux_hidden_states`, also of layers of the stages before."""
        return self._own.aux_hidden_states()

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`, of the step that ran last."""
        return self._own.logits_with(hidden, self._running.adapters[adapter] if adapter else None)

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`StepModel.move_kv`: here at once, in the other stages before the next step."""
        self._own.move_kv(pairs)
        self._moves += pairs


class _OwnStage:
    """Computes the part of a step that a process has."""

    def __init__(self, model: Decoder, steps: DividedSteps, clock: Clock) -> None:
        dtype = host_dtype(model.kv_layout.dtype)
        assert dtype is not None, "a dtype of the kernels"
        self._dtype = dtype
        self._hidden_size = model.spec.hidden_size
        self._number, self._is_first = model.stage.number, model.stage.is_first
        self._is_last = model.stage.is_last
        self._steps = steps
        self._clock = clock

    def compute(
        self, frame: StageFrame, adapters: Sequence[LoRAAdapter | None]
    ) -> tuple[AnyTensor, AnyTensor]:
        """The results of a step's part, whose seconds the frame gets."""
        started_s = self._clock()
        num_tokens, num_emitting = frame.num_tokens, len(frame.arrays.emitting) // 2
        features = None
        if not self._is_first:
            (carried,) = frame.carried
            values = carried.view(self._dtype.storage).reshape(-1, self._hidden_size)
            features = HostTensor(values, self._dtype)
        every_token = frame.every_token and self._is_last
        sizes = num_tokens, num_emitting
        results = self._steps.call(frame.call(), adapters, sizes, every_token, features)
        frame.seconds[self._number] = self._clock() - started_s
        return results


class StageFollower:
    """A stage that is not the last: computes its part of every step that reaches it."""

    def __init__(
        self,
        model: Decoder,
        steps: DividedSteps,
        links: StageLinks,
        clock: Clock,
    ) -> None:
        self._model = model
        self._steps = steps
        self._stage = _OwnStage(model, steps, clock)
        self._links = links
        self.adapters = HeldAdapters(model)

    @property
    def fingerprint(self) -> str:
        """Of the complete model."""
        return self._model.fingerprint

    def run(self) -> None:
        """Compute steps until the stage before closes. Raises OSError when a neighbour is lost."""
        while (frame := StageFrame.receive(self._links.before)) is not None:
            carried: Sequence[Array] = ()
            if not frame.failure:
                try:
                    carried = self._carried(frame)
                except EngineError as error:
                    frame.failure = str(error)
            frame.carried = carried
            frame.send(self._links.after)

    def _carried(self, frame: StageFrame) -> Sequence[Array]:
        """What the step leaves to the next stage."""
        moves, numbers = frame.arrays.moves, frame.arrays.adapters.tolist()
        if len(moves):
            self._steps.move_kv(
                [(source, target) for source, target in moves.reshape(-1, 2).tolist()]
            )
        adapters = self.adapters.named(numbers)
        self._stage.compute(frame, adapters)
        return [to_numpy(result.contiguous()) for result in self._steps.aux_hidden_states()]
