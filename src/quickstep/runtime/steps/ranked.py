"""Steps that several ranks compute: rank 0 posts each one, the others do the same.

Only `StepModel` knows of ranks. Slots, sampling, grammars and drafts are rank 0's, which reads the
complete logits; a plan says nothing about ranks. A rank has the weights and the KV heads of
`model.sharding` and the block ids of all, and its recorded steps meet those of the others at every
gather. What a step needs is a few integers, which are copied through shared memory.
"""

from __future__ import annotations

import ctypes
import enum
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np

from quickstep.errors import EngineError
from quickstep.model.adapters.lora_modules import on_device
from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.ops.collective import CollectiveRanks
from quickstep.ops.native.library import MessageCall, StepCall
from quickstep.ops.native.ranks import NativeRanks
from quickstep.ops.table import LoRAAdapter, LoRAPart
from quickstep.ops.tensors import (
    INT64,
    AnyTensor,
    Array,
    DType,
    HostTensor,
    host_dtype,
    on_host,
    use_device,
)
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.divided import DividedSteps, PreparedCall
from quickstep.runtime.steps.step_model import EmittingToken, StepModel
from quickstep.types import StepRow

_Results = TypeVar("_Results")


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
    messages = ranks.messages if isinstance(ranks, CollectiveRanks) else ranks
    assert isinstance(steps, DividedSteps) and isinstance(messages, NativeRanks)
    return RankedSteps(steps, messages, ranks if isinstance(ranks, CollectiveRanks) else None)


class RankedSteps:
    """`DividedSteps` of rank 0. Raises EngineError once a rank is lost. `exchange`: of parts, where
    these do not go through shared memory.
    """

    def __init__(
        self, own: DividedSteps, ranks: NativeRanks, exchange: CollectiveRanks | None = None
    ) -> None:
        self._own = own
        self._ranks = ranks
        self._exchange = exchange
        self._adapter_numbers = array("q")  # of the prepared rows, 0 for none; () if none has one

    @property
    def prepared(self) -> PreparedCall:
        """`DividedSteps.prepared`."""
        return self._own.prepared

    def call_of(self, emitting: Sequence[EmittingToken]) -> StepCall:
        """`DividedSteps.call_of`."""
        return self._own.call_of(emitting)

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        self._own.prepare(rows, slots)
        numbers = adapter_numbers(self._own.prepared.of_each_row())
        self._adapter_numbers = array("q", numbers)

    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """`StepModel.run`."""
        call = self._own.call_of(emitting)
        self._post(call, self._adapter_numbers, every_token, features)
        if self._exchange is None:  # the library breaks the group itself
            return self._own.run(emitting, every_token, features)
        run = partial(self._own.run, emitting, every_token, features)
        return _completed(run, self._exchange)

    def call(
        self,
        call: StepCall,
        adapters: Sequence[LoRAAdapter | None],
        sizes: tuple[int, int],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """`DividedSteps.call` of every rank."""
        numbers = array("q", adapter_numbers(adapters))
        self._post(call, numbers, every_token, features)
        run = partial(self._own.call, call, adapters, sizes, every_token, features)
        return run() if self._exchange is None else _completed(run, self._exchange)

    def _post(
        self, call: StepCall, numbers: array[int], every_token: bool, features: AnyTensor | None
    ) -> None:
        adapters = numbers.buffer_info()[0] if numbers else None
        self._ranks.post(RankWork.STEP, (every_token,), call, adapters, features)

    def aux_hidden_states(self) -> tuple[AnyTensor, ...]:
        """`StepModel.aux_hidden_states`."""
        return self._own.aux_hidden_states()

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`."""
        adapters = self._own.prepared.adapters
        return self.logits_with(hidden, adapters[adapter] if adapter else None)

    def logits_with(self, hidden: AnyTensor, adapter: LoRAAdapter | None) -> AnyTensor:
        """`DividedSteps.logits_with`."""
        posted = on_host(hidden.contiguous())
        number = 0 if adapter is None else adapter.number
        self._ranks.post(RankWork.LOGITS, (hidden.shape[0], number), data=posted)
        run = partial(self._own.logits_with, hidden, adapter)
        return run() if self._exchange is None else _completed(run, self._exchange)

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`StepModel.move_kv`."""
        self._ranks.post(RankWork.MOVE_KV, (len(pairs),), data=HostTensor(np.array(pairs), INT64))
        self._own.move_kv(pairs)


def _completed(run: Callable[[], _Results], exchange: CollectiveRanks) -> _Results:
    """What `run` computes. The others wait in the middle of it when it fails here, as for want of
    memory, unless they meet the same EngineError at the same place.
    """
    try:
        results = run()
    except EngineError:
        raise
    except BaseException:
        exchange.break_()
        raise
    exchange.wait()
    return results


def adapter_numbers(adapters: Iterable[LoRAAdapter | None]) -> list[int]:
    """By which other processes know the adapters; 0 for none."""
    return [0 if adapter is None else adapter.number for adapter in adapters]


class HeldAdapters:
    """A process's parts of a model's LoRA adapters, by the numbers by which steps name them.

    `hold` and `drop` may be called by another thread than the one that computes.
    """

    def __init__(self, model: Decoder) -> None:
        self._ops = model.ops
        self._device = model.device
        self._adapters: dict[int, LoRAAdapter] = {}

    def hold(self, number: int, modules: Sequence[Sequence[LoRAPart]]) -> None:
        """Pack this process's part of an adapter."""
        use_device(self._device)  # of this thread
        self._adapters[number] = self._ops.pack_lora(on_device(modules, self._device))

    def drop(self, number: int) -> None:
        """Free an adapter that no later step names."""
        self._adapters.pop(number, None)

    def named(self, numbers: Iterable[int]) -> list[LoRAAdapter | None]:
        """The adapter of each number, None for 0."""
        return [self._adapters[number] if number else None for number in numbers]


class RankFollower:
    """Another rank: computes what rank 0 posts, until it closes or is lost."""

    def __init__(self, model: Decoder, steps: DividedSteps, ranks: NativeRanks) -> None:
        self.adapters = HeldAdapters(model)
        dtype = host_dtype(model.kv_layout.dtype)
        assert dtype is not None, "a dtype of the kernels"
        self._model = model
        self._dtype = dtype
        self._steps = steps
        self._ranks = ranks

    @property
    def fingerprint(self) -> str:
        """Of the complete model."""
        return self._model.fingerprint

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
            sizes = message.num_tokens, message.step.num_emitting
            features = None
            if message.num_bytes:
                features = HostTensor(_array(message, self._dtype), self._dtype)
            every_token = bool(message.numbers[0])
            adapters = self._named(message)
            self._steps.call(message.step, adapters, sizes, every_token, features)
        elif message.kind == RankWork.LOGITS:
            hidden = _array(message, self._dtype).reshape(message.numbers[0], -1)
            (adapter,) = self.adapters.named([message.numbers[1]])
            self._steps.logits_with(HostTensor(hidden, self._dtype), adapter)
        elif message.kind == RankWork.MOVE_KV:
            pairs = _array(message, INT64).reshape(-1, 2).tolist()
            self._steps.move_kv([(source, target) for source, target in pairs])

    def _named(self, message: MessageCall) -> list[LoRAAdapter | None]:
        """The adapter of each of a step's rows, kept while it runs; [] if none has one."""
        if not message.adapters:
            return []
        numbers = (ctypes.c_int64 * message.step.num_rows).from_address(message.adapters)
        return self.adapters.named(numbers)


def _array(message: MessageCall, dtype: DType) -> Array:
    """The bytes of a message as numbers; a copy."""
    content = bytearray(ctypes.string_at(message.data, message.num_bytes))  # torch may wrap it
    return np.frombuffer(content, dtype=dtype.storage)
