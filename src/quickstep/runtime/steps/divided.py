"""Steps of a model that several processes have: as integers, which one of them sends to the others.

`PreparedCall` packs the rows of a step as the library reads them (`qs_step`); ranks and stages copy
these integers, and each process computes its part of them by its `DividedSteps`: recorded
(`CapturedSteps`), or op by op (`EagerCalls`).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quickstep.errors import EngineError
from quickstep.ops.native.library import StepCall
from quickstep.ops.table import LoRAAdapter
from quickstep.ops.tensors import AnyTensor
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.step_model import EmittingToken, StepModel, adapters_of
from quickstep.types import StepRow

Ints = npt.NDArray[np.int64]

FIELDS_PER_ROW = 10  # of `StepRowCall`, and the place of `parents` among them
_PARENTS_FIELD = 4
_NO_STATE = -1, 0, 0, 0
_FIELDS_PER_SAVE = 3  # of `qs_state_save`


class PreparedCall:
    """The rows of a step as integers. `adapters` are those that rows may name, as they are when a
    step is prepared.
    """

    def __init__(self, block_size: int, adapters: Mapping[str, LoRAAdapter] | None) -> None:
        self._block_size = block_size
        self._known = {} if adapters is None else adapters
        self.adapters: dict[str, LoRAAdapter] = {}  # of the rows, by name, kept while they run
        self._names: Sequence[str] = ()  # of each row, if any row has one
        self.num_tokens = 0
        self._call = StepCall()
        self.call_address = ctypes.addressof(self._call)
        self._rows = array("q")
        self._token_ids = array("q")
        self._parents = array("q")
        self._emitting = array("q")
        self._saves = array("q")

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        fields: list[int] = []
        token_ids, parents = array("q"), array("q")
        saves: list[tuple[int, int, int]] = []
        for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            token_ids.extend(slot.input_tokens(row))
            num_blocks = slot.num_blocks
            if row.start + row.num_tokens > num_blocks * self._block_size:
                raise EngineError(
                    f"a row ends at token {row.end}, its {num_blocks} blocks hold "
                    f"{num_blocks * self._block_size}"
                )
            num_parents = len(row.parents)
            parents.extend(row.parents)
            fields += (row.start, row.num_tokens, slot.block_table_address, num_blocks)
            fields += (0, num_parents)
            state = row.state
            if state is None:
                fields += _NO_STATE
            else:
                fields += (state.source, state.target, state.num_replayed, row.num_drafts)
                saves += [(index, *save) for save in state.saves]
        self.adapters = adapters_of(rows, self._known)
        self._names = [row.adapter for row in rows] if self.adapters else ()
        self._rows, self._token_ids, self._parents = array("q", fields), token_ids, parents
        self._saves = array("q", chain.from_iterable(saves))
        if parents:
            self._point_to_parents(rows)
        self.num_tokens = len(token_ids)

    def _point_to_parents(self, rows: Sequence[StepRow]) -> None:
        """Fill in the addresses of the rows' parents, which are all in one array by now."""
        address, item_bytes = self._parents.buffer_info()[0], self._parents.itemsize
        for index, row in enumerate(rows):
            self._rows[index * FIELDS_PER_ROW + _PARENTS_FIELD] = address
            address += len(row.parents) * item_bytes

    def of_each_row(self) -> list[LoRAAdapter | None]:
        """The adapter of each row, None for none; [] if no row has one."""
        return [self.adapters.get(name) for name in self._names]

    def call_of(self, emitting: Sequence[EmittingToken]) -> StepCall:
        """The prepared rows as the library gets them, without adapters; valid until the next
        `prepare`.
        """
        call = self._call
        call.num_rows = len(self._rows) // FIELDS_PER_ROW
        call.num_emitting = len(emitting)
        self._emitting = array("q", chain.from_iterable(emitting))
        call.rows = self._rows.buffer_info()[0]
        call.token_ids = self._token_ids.buffer_info()[0]
        call.emitting = self._emitting.buffer_info()[0] if emitting else None
        call.saves = self._saves.buffer_info()[0] if self._saves else None
        call.num_saves = len(self._saves) // _FIELDS_PER_SAVE
        return call

    def arrays_of(self, emitting: Sequence[EmittingToken]) -> tuple[Ints, Ints, Ints, Ints]:
        """The prepared rows as arrays: rows, token ids, emitting tokens, parents."""
        rows, token_ids, parents = self._rows, self._token_ids, self._parents
        places = array("q", chain.from_iterable(emitting))
        return _ints(rows), _ints(token_ids), _ints(places), _ints(parents)


def _ints(values: array[int]) -> Ints:
    return np.array(values, dtype=np.int64)


@runtime_checkable
class DividedSteps(StepModel, Protocol):
    """`StepModel` of a process that has a part of a model, whose steps may come from another."""

    @property
    def prepared(self) -> PreparedCall:
        """The rows of the last `prepare`."""

    def call_of(self, emitting: Sequence[EmittingToken]) -> StepCall:
        """The prepared rows as the library gets them; valid until the next `prepare`."""

    def call(
        self,
        call: StepCall,
        adapters: Sequence[LoRAAdapter | None],
        sizes: tuple[int, int],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """`run` a step that another process has prepared, of `sizes` (tokens, emitting ones), with
        the adapter of each row; () if none has one. `features` are what the stage before left, one
        [T, hidden] after another.
        """

    def logits_with(self, hidden: AnyTensor, adapter: LoRAAdapter | None) -> AnyTensor:
        """`logits` of rows with this adapter."""
