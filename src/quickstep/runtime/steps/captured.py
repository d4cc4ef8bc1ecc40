"""Captured steps: the forward pass recorded once, replayed as one native call.

The CPU's counterpart of a CUDA graph. A recording does not depend on the number of tokens. A
program is a recording bound to memory for a largest number of tokens and emitting tokens; it runs
with the step's real counts, so that no row is padded and every bit is the same as op by op. There
are two recordings: one ends with the hidden states of the emitting tokens, the other, made when a
step first needs it, with those of every token. A program is bound when a step first needs its size
(a few milliseconds); all programs use the same memory.

Opened by `runtime.steps.opening`. On a GPU, `runtime.steps.graphs` does the same. What cannot be
recorded (a fallback model, reference ops, weights without a native kernel) runs through
`EagerSteps`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quickstep.model.decoder import Decoder
from quickstep.model.interface import EmittingTokens, FeatureModel, ForwardBatch
from quickstep.model.stages import NUM_CARRIED, Stage
from quickstep.ops.native.library import StepCall
from quickstep.ops.native.lora import PackedLoRA
from quickstep.ops.native.program import Program, Recording, program_bytes
from quickstep.ops.native.recorder import NativeRecorder, NotCapturable
from quickstep.ops.native.steps import NativeSteps
from quickstep.ops.table import KVCache, LoRAAdapter, LoRAMapping
from quickstep.ops.tensors import (
    FLOAT32,
    INT64,
    UINT8,
    AnyTensor,
    HostTensor,
    host_dtype,
)
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.divided import PreparedCall
from quickstep.runtime.steps.step_model import EmittingToken
from quickstep.types import StepRow

_LEAST_TOKENS = 64
_LEAST_EMITTING = 8


def record(
    model: Decoder | FeatureModel,
    kv: KVCache,
    block_size: int,
    every_token: bool,
    with_lora: bool = False,
    aux_layers: tuple[int, ...] = (),
    num_features: int = 0,
) -> Recording | None:
    """The model's forward pass and its logits, or those of a stage that is not the last: what the
    next one needs, as `aux_hidden`. None where they are more than native calls.
    """
    recorder = NativeRecorder(block_size)
    lora, emitting_lora = recorder.lora if with_lora else (None, None)
    emitting = EmittingTokens(*recorder.emitting, emitting_lora)
    of_emitting = None if every_token else emitting
    stage, sizes = Stage(), [num_features] if num_features else []
    if isinstance(model, Decoder):
        stage = model.stage
        if not stage.is_first:
            num_passed = stage.num_passed(model.spec, aux_layers)
            sizes = [model.spec.hidden_size] * (NUM_CARRIED + num_passed)
    dtype = host_dtype(model.kv_layout.dtype)
    if dtype is None:
        return None
    features = tuple([recorder.features(size, dtype) for size in sizes])
    state_rows = recorder.state_rows if kv.states else None
    batch = ForwardBatch(
        recorder.token_ids, recorder.layout, of_emitting, lora, features, state_rows
    )
    try:
        recorded = model.with_ops(recorder.table(model.ops))
        if isinstance(recorded, Decoder):
            hidden, aux_hidden = recorded.forward_with_aux(batch, kv, aux_layers)
        else:
            hidden, aux_hidden = recorded.forward(batch, kv), ()
        if not stage.is_last:
            return recorder.finish(hidden, None, aux_hidden)
        emitted = hidden[emitting.tokens] if every_token else hidden
        logits = recorded.logits(emitted, emitting_lora)
        return recorder.finish(hidden, logits, aux_hidden)
    except NotCapturable:
        return None


class Recordings:
    """The recording of the emitting tokens; that of every token is made when first requested."""

    def __init__(self, of_emitting: Recording, of_all: Callable[[], Recording | None]) -> None:
        self._of_emitting = of_emitting
        self._record_all = of_all
        self._of_all: Recording | None = None

    def get(self, every_token: bool) -> Recording:
        """The recording that ends with the hidden states of every token or of the emitting ones."""
        if not every_token:
            return self._of_emitting
        if self._of_all is None:
            self._of_all = self._record_all()
            assert self._of_all is not None, "both have the same kinds of calls"
        return self._of_all


class CapturedSteps:
    """Programs of a model's recordings, and the buffers through which a step's rows reach them."""

    def __init__(
        self,
        model: Decoder | FeatureModel,
        steps: NativeSteps,
        recordings: Recordings,
        kv: KVCache,
        block_size: int,
        adapters: Mapping[str, LoRAAdapter] | None,
    ) -> None:
        dtype = host_dtype(model.kv_layout.dtype)
        assert dtype is not None, "a model that was captured has a dtype of the kernels"
        self._model = model
        self._steps = steps
        self._recordings = recordings
        self._dtype = dtype
        self._kv = kv
        self._block_size = block_size
        self._rows = PreparedCall(block_size, adapters)
        self._adapter_handles = array("q")
        self._memory = HostTensor.empty((0,), UINT8)
        self._programs: dict[tuple[bool, int, int], _BoundProgram] = {}
        # the program of the last step, with what was wanted of it: most steps are like the last
        self._newest: tuple[tuple[int, int, bool], _BoundProgram] | None = None
        self._aux_hidden: tuple[HostTensor, ...] = ()
        self._num_aux_tokens = 0

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        self._rows.prepare(rows, slots)
        handles = map(adapter_handle, self._rows.of_each_row()) if self._rows.adapters else ()
        self._adapter_handles = array("q", handles)

    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[HostTensor, HostTensor]:
        """`StepModel.run`. Raises EngineError for a token id that the model lacks."""
        self.call_of(emitting)
        sizes = self._rows.num_tokens, len(emitting)
        return self.compute(self._rows.call_address, sizes, every_token, features)

    def call_of(self, emitting: Sequence[EmittingToken]) -> StepCall:
        """`DividedSteps.call_of`."""
        call = self._rows.call_of(emitting)
        handles = self._adapter_handles
        call.adapters = handles.buffer_info()[0] if handles else None
        return call

    def compute(
        self,
        call_address: int,
        sizes: tuple[int, int],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[HostTensor, HostTensor]:
        """Run the step that a `StepCall` at this address describes, of `sizes` (tokens, emitting
        ones); the rest is as for `run`.
        """
        num_tokens, num_emitting = sizes
        wanted = num_tokens, num_emitting, every_token
        if self._newest is None or wanted != self._newest[0]:
            self._newest = wanted, self._bound(*wanted)
        bound = self._newest[1]
        if features is not None:
            assert isinstance(features, HostTensor)
            parts = features.numpy().reshape(-1, num_tokens, bound.features[0].shape[1])
            assert len(parts) >= len(bound.features), "the stage before passed on too few inputs"
            # the stage before may pass on inputs that this program does not read
            for target, part in zip(bound.features, parts, strict=False):
                target.numpy()[:num_tokens] = part
        bound.program.run(call_address)
        self._aux_hidden = bound.aux_hidden
        self._num_aux_tokens = num_tokens
        return bound.results(num_tokens if every_token else num_emitting, num_emitting)

    def call(
        self,
        call: StepCall,
        adapters: Sequence[LoRAAdapter | None],
        sizes: tuple[int, int],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[HostTensor, HostTensor]:
        """`DividedSteps.call`."""
        handles = array("q", map(adapter_handle, adapters))
        call.adapters = handles.buffer_info()[0] if handles else None
        return self.compute(ctypes.addressof(call), sizes, every_token, features)

    def aux_hidden_states(self) -> tuple[HostTensor, ...]:
        """`StepModel.aux_hidden_states`."""
        if not self._aux_hidden:
            return ()
        return tuple([hidden[: self._num_aux_tokens] for hidden in self._aux_hidden])

    @property
    def prepared(self) -> PreparedCall:
        """`DividedSteps.prepared`."""
        return self._rows

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`StepModel.move_kv`."""
        self._model.ops.move_kv(self._kv, pairs)

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`."""
        return self.logits_with(hidden, self._rows.adapters[adapter] if adapter else None)

    def logits_with(self, hidden: AnyTensor, adapter: LoRAAdapter | None) -> AnyTensor:
        """`DividedSteps.logits_with`."""
        lora = None
        if adapter is not None:
            tokens = HostTensor(np.arange(hidden.shape[0]), INT64)
            lora = LoRAMapping(((adapter, tokens),))
        return self._model.logits(hidden, lora)

    def _bound(self, num_tokens: int, num_emitting: int, every_token: bool) -> _BoundProgram:
        capacities = (_bucket(num_tokens, _LEAST_TOKENS), _bucket(num_emitting, _LEAST_EMITTING))
        key = (every_token, *capacities)
        bound = self._programs.get(key)
        if bound is None:
            recording = self._recordings.get(every_token)
            wanted = program_bytes(recording, capacities)
            if wanted > self._memory.nbytes:
                self._programs.clear()  # they point into the memory that is freed
                self._memory = HostTensor.empty((wanted,), UINT8)
            bound = self._programs[key] = self._bind(recording, capacities)
        return bound

    def _bind(self, recording: Recording, capacities: tuple[int, int]) -> _BoundProgram:
        program = self._steps.program(recording, capacities, self._memory, self._block_size)
        hidden = program.rows(recording.hidden, self._dtype)
        if recording.logits is None:
            logits = HostTensor.empty((capacities[1], 0), FLOAT32)
        else:
            logits = program.rows(recording.logits, FLOAT32)
        bound = _BoundProgram(program, hidden, logits)
        bound.features = tuple(program.rows(buffer, self._dtype) for buffer in recording.features)
        bound.aux_hidden = tuple(
            program.rows(buffer, self._dtype) for buffer in recording.aux_hidden
        )
        return bound


class _BoundProgram:
    """A program and its results; after a step their first rows are valid. `features` are to be
    filled in before it.
    """

    __slots__ = (
        "_hidden",
        "_logits",
        "_newest",
        "_newest_counts",
        "aux_hidden",
        "features",
        "program",
    )

    def __init__(self, program: Program, hidden: HostTensor, logits: HostTensor) -> None:
        self.program = program
        self._hidden = hidden
        self._logits = logits
        self.features: tuple[HostTensor, ...] = ()
        self.aux_hidden: tuple[HostTensor, ...] = ()
        self._newest = (hidden, logits)
        self._newest_counts = (hidden.shape[0], logits.shape[0])

    def results(self, num_hidden: int, num_logits: int) -> tuple[HostTensor, HostTensor]:
        """Hidden states [num_hidden, C] and logits [num_logits, V]; the views are kept for further
        steps of the same size.
        """
        counts = (num_hidden, num_logits)
        if counts != self._newest_counts:
            self._newest = (self._hidden[:num_hidden], self._logits[:num_logits])
            self._newest_counts = counts
        return self._newest


def adapter_handle(adapter: LoRAAdapter | None) -> int:
    """The native adapter's address; 0 is the null of the native call."""
    if adapter is None:
        return 0
    assert isinstance(adapter.data, PackedLoRA)
    return adapter.data.handle


def _bucket(count: int, least: int) -> int:
    """The next power of two."""
    return least if count <= least else 1 << (count - 1).bit_length()
