"""Steps that several ranks compute: rank 0 posts each one, the others do the same.

Only `StepModel` knows of ranks. Slots, sampling, grammars and drafts are rank 0's, which reads the
complete logits; a plan says nothing about ranks. A rank has the weights and the KV heads of
`model.sharding` and the block ids of all, and its recorded steps meet those of the others at every
gather. What a step needs is a few integers, which are copied through shared memory.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.ops.native.library import MessageCall
from quickstep.ops.native.ranks import NativeRanks
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import INT64, AnyTensor, Array, DType, HostTensor, host_dtype
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.captured import CapturedSteps
from quickstep.runtime.steps.step_model import EmittingToken, StepModel
from quickstep.types import StepRow


class RankWork(enum.IntEnum):
    """What rank 0 posts."""

    STEP = 1
    LOGITS = 2
    MOVE_KV = 3
    CLOSE = 4


def with_ranks(steps: StepModel, model: Model) -> StepModel:
    """Rank 0's steps, which the other ranks of the model compute as well, if it has any."""
    ranks = model.ops.ranks
    if ranks is None:
        return steps
    assert isinstance(steps, CapturedSteps), "`model.sharding.check_ranks` refuses what is eager"
    assert isinstance(ranks, NativeRanks)
    return RankedSteps(steps, ranks)


class RankedSteps:
    """`StepModel` of rank 0. Raises EngineError once a rank is lost."""

    def __init__(self, own: CapturedSteps, ranks: NativeRanks) -> None:
        self._own = own
        self._ranks = ranks

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        self._own.prepare(rows, slots)

    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """`StepModel.run`."""
        assert features is None, "drafts of EAGLE layers are refused"
        call = self._own.call_of(emitting)
        self._ranks.post(RankWork.STEP, (every_token,), call)
        sizes = self._own.num_tokens, len(emitting)
        return self._own.compute(ctypes.addressof(call), sizes, every_token)

    def aux_hidden_states(self) -> tuple[AnyTensor, ...]:
        """`StepModel.aux_hidden_states`."""
        return self._own.aux_hidden_states()

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`."""
        hidden = hidden.contiguous()
        self._ranks.post(RankWork.LOGITS, (hidden.shape[0],), data=hidden)
        return self._own.logits(hidden, adapter)

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`StepModel.move_kv`."""
        self._ranks.post(RankWork.MOVE_KV, (len(pairs),), data=HostTensor(np.array(pairs), INT64))
        self._own.move_kv(pairs)


class RankFollower:
    """Another rank: computes what rank 0 posts, until it closes or is lost."""

    def __init__(
        self, model: Decoder, steps: CapturedSteps, kv: KVCache, ranks: NativeRanks
    ) -> None:
        dtype = host_dtype(model.kv_shape.dtype)
        assert dtype is not None, "captured steps have a dtype of the kernels"
        self._model = model
        self._dtype = dtype
        self._steps = steps
        self._kv = kv
        self._ranks = ranks

    def run(self) -> None:
        """Follow rank 0. Raises EngineError when a rank is lost."""
        while True:
            message = self._ranks.take()
            if message.kind == RankWork.CLOSE:
                return
            # rank 0 meets the same failure at the same place; a lost rank ends `take`
            with suppress(EngineError):
                self._do(message)
            self._ranks.finish()

    def _do(self, message: MessageCall) -> None:
        if message.kind == RankWork.STEP:
            address = ctypes.addressof(message) + MessageCall.step.offset
            sizes = message.num_tokens, message.step.num_emitting
            self._steps.compute(address, sizes, bool(message.numbers[0]))
        elif message.kind == RankWork.LOGITS:
            hidden = _array(message, self._dtype).reshape(message.numbers[0], -1)
            self._model.logits(HostTensor(hidden, self._dtype))
        elif message.kind == RankWork.MOVE_KV:
            pairs = _array(message, INT64).reshape(-1, 2).tolist()
            self._model.ops.move_kv(self._kv, [(source, target) for source, target in pairs])


def _array(message: MessageCall, dtype: DType) -> Array:
    """The bytes of a message as numbers; a copy."""
    content = ctypes.string_at(message.data, message.num_bytes)
    return np.frombuffer(content, dtype=dtype.storage)
