"""Steps op by op of a process that has a part of a model: `DividedSteps` by `EagerSteps`.

The rows come as integers, from this process or from another, and become rows again. Imports torch,
as `runtime.steps.eager` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quickstep.model.decoder import Decoder
from quickstep.ops.native.library import StepCall, StepRowCall
from quickstep.ops.table import KVCache, LoRAAdapter
from quickstep.ops.tensors import AnyTensor
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.divided import PreparedCall
from quickstep.runtime.steps.eager import EagerSteps
from quickstep.runtime.steps.step_model import EmittingToken
from quickstep.types import Phase, StepRow


class EagerCalls:
    """`DividedSteps` op by op."""

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        block_size: int,
        adapters: Mapping[str, LoRAAdapter] | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self._steps = EagerSteps(model, kv, block_size, None, aux_layers)
        self._rows = PreparedCall(block_size, adapters)

    @property
    def prepared(self) -> PreparedCall:
        """`DividedSteps.prepared`."""
        return self._rows

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        self._rows.prepare(rows, slots)

    def call_of(self, emitting: Sequence[EmittingToken]) -> StepCall:
        """`DividedSteps.call_of`."""
        return self._rows.call_of(emitting)

    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """`StepModel.run`."""
        call, sizes = self.call_of(emitting), (self._rows.num_tokens, len(emitting))
        return self.call(call, self._rows.of_each_row(), sizes, every_token, features)

    def call(
        self,
        call: StepCall,
        adapters: Sequence[LoRAAdapter | None],
        sizes: tuple[int, int],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """`DividedSteps.call`."""
        num_tokens, num_emitting = sizes
        token_ids = _ints(call.token_ids, num_tokens)
        emitting = _ints(call.emitting, 2 * num_emitting)
        rows, tables, named = [], [], {}
        first = 0
        for index, one in enumerate(_row_calls(call)):
            adapter = adapters[index] if adapters else None
            name = "" if adapter is None else str(id(adapter))
            if adapter is not None:
                named[name] = adapter
            of_row = tuple(token_ids[first : first + one.num_tokens])
            first += one.num_tokens
            parents = tuple(_ints(one.parents, one.num_parents))
            row = StepRow(index, one.start, one.num_tokens, of_row, (), Phase.PREFILL, True, 0)
            rows.append(replace(row, adapter=name, parents=parents))
            tables.append(_BlockTable(_block_ids(one)))
        self._steps.prepare_with(rows, tables, named)
        pairs = list(zip(emitting[::2], emitting[1::2], strict=True))
        return self._steps.run(pairs, every_token, features)

    def aux_hidden_states(self) -> tuple[AnyTensor, ...]:
        """`StepModel.aux_hidden_states`."""
        return self._steps.aux_hidden_states()

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`StepModel.move_kv`."""
        self._steps.move_kv(pairs)

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`."""
        return self.logits_with(hidden, self._rows.adapters[adapter] if adapter else None)

    def logits_with(self, hidden: AnyTensor, adapter: LoRAAdapter | None) -> AnyTensor:
        """`DividedSteps.logits_with`."""
        return self._steps.logits_with(hidden, adapter)


class _BlockTable:
    """The `RowBlocks` of a row that came as integers."""

    def __init__(self, block_ids: npt.NDArray[np.int32]) -> None:
        self.block_ids = block_ids

    def input_tokens(self, row: StepRow) -> tuple[int, ...]:
        """Those that came with the row."""
        return row.token_ids


def _row_calls(call: StepCall) -> Sequence[StepRowCall]:
    return list((StepRowCall * call.num_rows).from_address(call.rows))


def _ints(address: int | None, count: int) -> list[int]:
    """So many int64 from an address on."""
    return [] if not (address and count) else list((ctypes.c_int64 * count).from_address(address))


def _block_ids(row: StepRowCall) -> npt.NDArray[np.int32]:
    found = (ctypes.c_int32 * row.num_blocks).from_address(row.block_ids)
    return np.array(found, dtype=np.int32)
