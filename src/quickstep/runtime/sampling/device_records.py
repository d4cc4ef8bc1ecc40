"""The `SamplingRecords` of a step from the sampling states of its rows, in one copy to the device.

Grammars, DRY, bad words and reasoning are functions of the tokens, which are on the host: what they
change goes to the device as masks and lists. Penalties read the logits, so that the device applies
them: it keeps how often each sequence has generated each token, and gets the new tokens only.

Called by `runtime.sampling.device_sampler`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quickstep.ops.triton.sampling.records import NUM_FIELDS, Edits, Field, SamplingRecords
from quickstep.runtime.sampling.logit_changes import Bans, LogitChanges
from quickstep.runtime.sampling.noise import row_keys
from quickstep.runtime.sampling.state import SamplingState
from quickstep.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NONE = -1  # no place
_LOGITS_ROW, _KEY_B, _KEY_C = int(Field.LOGITS_ROW), int(Field.KEY_B), int(Field.KEY_C)
_CHANGED, _COUNTS, _MASK = int(Field.CHANGED), int(Field.COUNTS), int(Field.MASK)
_BANNED, _FIRST_YIELDS = int(Field.BANNED), int(Field.FIRST_YIELDS)
_SECOND_YIELDS = int(Field.SECOND_YIELDS)
_FILTERED, _APPLIES_XTC = int(Field.FILTERED), int(Field.APPLIES_XTC)
_FIRST_COUNTS_ROWS = 4
_NO_IDS = np.empty(0, dtype=np.int64)


class DeviceRecords:
    """Makes records for logits [E, V] on one device; owns the counts of generated tokens there."""

    def __init__(self, vocab_size: int, device: str) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._counts = _TokenCounts(vocab_size, device)
        self._numbers: weakref.WeakKeyDictionary[SamplingState, list[int]] = (
            weakref.WeakKeyDictionary()
        )

    def build(
        self,
        states: Sequence[SamplingState],
        changes: Sequence[LogitChanges | None],
        rows: Sequence[int],
    ) -> SamplingRecords:
        """The records of E states. `rows` are the rows of the logits that they are sampled from,
        `changes` are those after penalties.
        """
        counts_rows, updates = self._counts.rows_of(states)
        lists = _Lists(self.vocab_size)
        numbers = [self.numbers_of(state) for state in states]
        num_filtered = 0
        for index, (state, change) in enumerate(zip(states, changes, strict=True)):
            row = numbers[index]
            row[_LOGITS_ROW], row[_COUNTS] = rows[index], counts_rows[index]
            keys = row_keys(state.seed, state.num_outputs)
            row[_KEY_B], row[_KEY_C] = [key - 2**64 if key >= 2**63 else key for key in keys]
            if state.sampling.temperature > 0.0 and state.applies_xtc:
                row[_APPLIES_XTC], row[_FILTERED] = 1, 0
            if row[_FILTERED] != _NONE:
                row[_FILTERED] = num_filtered
                num_filtered += 1
            lists.add(row, state, change)
        upload = _Upload()
        row_numbers = np.array(numbers, dtype=np.int64).reshape(-1, NUM_FIELDS)
        parts = [upload.add(part) for part in (row_numbers, *updates, *lists.arrays())]
        on_device = upload.copy(self._device)
        rows_there, count_places, count_amounts, *listed = (on_device(part) for part in parts)
        self._counts.add(count_places, count_amounts)
        return lists.records(
            listed,
            rows=rows_there.view(len(states), NUM_FIELDS),
            num_filtered=num_filtered,
            counts=self._counts.table if max(counts_rows, default=_NONE) != _NONE else None,
        )

    def count_(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count tokens [E] that were sampled with the newest `rows` [E, NUM_FIELDS], before the
        host knows them: `advance_counts`. Negative ones are not counted: their sequences end.
        """
        rows = rows[:, _COUNTS]
        places = rows.clamp(min=0) * self.vocab_size + token_ids.clamp(min=0)
        is_counted = (rows >= 0) & (token_ids >= 0)
        self._counts.add(places, 2 * is_counted)

    def advance_counts(self, states: Sequence[SamplingState]) -> None:
        """The counts have one more token of each of these that has penalties."""
        self._counts.advance(states)

    @property
    def counts_table(self) -> Tensor:
        """`SamplingRecords.counts`; another one when it had to grow."""
        return self._counts.table

    def reserve_counts(self, num_rows: int) -> Tensor:
        """Make the table large enough for so many sequences."""
        self._counts.reserve(num_rows)
        return self._counts.table

    def counted_rows(self, states: Sequence[SamplingState]) -> list[int]:
        """The rows of these states in the table, which then has all their tokens."""
        rows, (places, amounts) = self._counts.rows_of(states)
        if places.size:
            on_device = (copy_to_device(array, self._device) for array in (places, amounts))
            self._counts.add(*on_device)
        return rows

    def numbers_of_padding(self) -> list[int]:
        """A row that is sampled without effect."""
        numbers = _numbers(SamplingParams(temperature=0.0), self.vocab_size)
        numbers[_LOGITS_ROW] = 0
        return numbers

    def of_everything(self) -> SamplingRecords:
        """The records of a row that needs every kernel, of logits [1, V]."""
        sampling = SamplingParams(temperature=1.0, top_k=1, top_p=0.5, presence_penalty=1.0)
        numbers = _numbers(sampling, self.vocab_size)
        for field in (Field.LOGITS_ROW, Field.CHANGED, Field.COUNTS, Field.FILTERED):
            numbers[field] = 0
        rows = copy_to_device(np.array([numbers], dtype=np.int64), self._device)
        counts = torch.zeros(1, self.vocab_size, dtype=torch.int32, device=self._device)
        return SamplingRecords(rows=rows, num_changed=1, num_filtered=1, counts=counts)

    def numbers_of(self, state: SamplingState) -> list[int]:
        """A row with the numbers of the request; the others are those of a row without changes."""
        state = state.recorded_state
        known = self._numbers.get(state)
        if known is None:
            known = self._numbers[state] = _numbers(state.sampling, self.vocab_size)
        return known.copy()


def _numbers(sampling: SamplingParams, vocab_size: int) -> list[int]:
    samples = sampling.temperature > 0.0
    top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
    has_filter = samples and (top_k > 0 or sampling.typical_p < 1.0 or sampling.top_p < 1.0)
    numbers = {field: _NONE for field in Field}
    numbers |= {Field.FIRST_YIELDS: 0, Field.SECOND_YIELDS: 0, Field.TOP_K: top_k}
    numbers[Field.FILTERED] = 0 if has_filter else _NONE
    numbers[Field.APPLIES_XTC] = 0
    floats = {
        Field.TEMPERATURE: sampling.temperature,
        Field.REPETITION: sampling.repetition_penalty,
        Field.PRESENCE: sampling.presence_penalty,
        Field.FREQUENCY: sampling.frequency_penalty,
        Field.TYPICAL_P: sampling.typical_p,
        Field.TOP_P: sampling.top_p,
        Field.LOG_MIN_P: math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
        Field.XTC_THRESHOLD: sampling.xtc_threshold,
    }
    bits = np.array(list(floats.values()), dtype=np.float64).view(np.int64).tolist()
    numbers |= dict(zip(floats, bits, strict=True))
    return [numbers[field] for field in Field]


class _Lists:
    """The changes of logits of all rows, in lists."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_changed = self._num_banned = 0
        self._masks: list[Ids] = []
        self._ban_places: list[Ids] = []
        self._ban_lists: list[npt.NDArray[np.int8]] = []
        # replaced logits, then the first and further amounts that are added to one
        self._edits: list[list[tuple[Ids, Floats]]] = [[], [], []]

    def add(self, numbers: list[int], state: SamplingState, changes: LogitChanges | None) -> None:
        """Append the changes of a row, and set its places in `numbers`."""
        has_edits = changes is not None and changes.edit_ids.size > 0
        if has_edits or state.penalties is not None:
            numbers[_CHANGED] = self._num_changed
            self._num_changed += 1
        if changes is None:
            return
        if has_edits:
            self._add_edits(changes, numbers[_CHANGED] * self._vocab_size)
        if changes.allowed is not None:
            numbers[_MASK] = len(self._masks)
            self._masks.append(changes.allowed.view(np.int64))
        first, second = changes.bans
        if first.token_ids.size or second.token_ids.size:
            numbers[_BANNED] = self._num_banned
            numbers[_FIRST_YIELDS] = int(first.yields)
            numbers[_SECOND_YIELDS] = int(second.yields)
            self._add_bans((first, second))
            self._num_banned += 1

    def _add_edits(self, changes: LogitChanges, start: int) -> None:
        num_set = changes.num_set
        ids, values = changes.edit_ids, changes.edit_values
        self._edits[0].append((ids[:num_set] + start, values[:num_set]))
        ids, values = ids[num_set:] + start, values[num_set:]
        # a token has at most one amount of DRY and one of `logit_bias`, in this order
        if len(set(ids.tolist())) == ids.size:
            self._edits[1].append((ids, values))
            return
        first = np.sort(np.unique(ids, return_index=True)[1])
        others = np.setdiff1d(np.arange(ids.size), first)
        self._edits[1].append((ids[first], values[first]))
        self._edits[2].append((ids[others], values[others]))

    def _add_bans(self, both: tuple[Bans, Bans]) -> None:
        start = self._num_banned * self._vocab_size
        for number, bans in enumerate(both, start=1):
            self._ban_places.append(bans.token_ids + start)
            self._ban_lists.append(np.full(bans.token_ids.size, number, dtype=np.int8))

    def arrays(self) -> list[npt.NDArray[np.int64 | np.float64 | np.int8]]:
        """What goes to the device; `records` gets it there, in this order."""
        joined: list[npt.NDArray[np.int64 | np.float64 | np.int8]] = [
            np.concatenate([_NO_IDS, *self._masks]),
            np.concatenate([_NO_IDS, *self._ban_places]),
            np.concatenate([np.empty(0, dtype=np.int8), *self._ban_lists]),
        ]
        for edits in self._edits:
            joined.append(np.concatenate([_NO_IDS, *[places for places, _ in edits]]))
            joined.append(np.concatenate([np.empty(0), *[values for _, values in edits]]))
        return joined

    def records(
        self, arrays: Sequence[Tensor], rows: Tensor, num_filtered: int, counts: Tensor | None
    ) -> SamplingRecords:
        """The records with the `arrays` on the device."""
        masks, ban_places, ban_lists, *edits = arrays
        sets, *added = (
            Edits(places, values) if places.numel() else None
            for places, values in zip(edits[::2], edits[1::2], strict=True)
        )
        return SamplingRecords(
            rows=rows,
            num_changed=self._num_changed,
            num_banned=self._num_banned,
            num_filtered=num_filtered,
            counts=counts,
            masks=masks if masks.numel() else None,
            ban_places=ban_places if self._num_banned else None,
            ban_lists=ban_lists if self._num_banned else None,
            set_edits=sets,
            added_edits=tuple(edit for edit in added if edit is not None),
        )


class _Part(msgspec.Struct, frozen=True):
    """Where an array is in an upload, in elements of 8 bytes, and what it holds."""

    start: int
    size: int
    dtype: torch.dtype


_DTYPES = {"int64": torch.int64, "float64": torch.float64, "int8": torch.int8}


def _padded_bytes(array: npt.NDArray[np.generic]) -> int:
    """Every array begins at 16 bytes: Triton compiles another kernel for one that does not."""
    return -(-array.nbytes // 16) * 16


class _Upload:
    """Arrays that go to the device in one copy, which waits for nothing."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.generic]] = []
        self._size = 0

    def add(self, array: npt.NDArray[np.int64 | np.float64 | np.int8]) -> _Part:
        """Append an array; where it will be."""
        part = _Part(self._size, array.size, _DTYPES[array.dtype.name])
        self._arrays.append(array)
        self._size += _padded_bytes(array) // 8
        return part

    def copy(self, device: str) -> _OnDevice:
        """Copy all arrays, from pinned memory where that is faster."""
        host = torch.empty(self._size, dtype=torch.int64, pin_memory=device == "cuda")
        data, start = host.numpy().view(np.uint8), 0
        for array in self._arrays:
            data[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            start += _padded_bytes(array)
        return _OnDevice(host.to(device, non_blocking=True))


def copy_to_device(array: Ids, device: str) -> Tensor:
    """The array on the device, which is not waited for."""
    upload = _Upload()
    part = upload.add(array)
    return upload.copy(device)(part).view(array.shape)


class _OnDevice:
    """Finds the arrays of an upload on the device."""

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __call__(self, part: _Part) -> Tensor:
        num_elements = -(-part.size * part.dtype.itemsize // 8)
        elements = self._data[part.start : part.start + num_elements]
        return elements.view(part.dtype)[: part.size]


class _Counted(msgspec.Struct):
    """What the device has of a sequence: the row of the table, and how many outputs are in it."""

    row: int
    num_outputs: int
    last_use: int


class _TokenCounts:
    """How often sequences with penalties have generated each token, on the device.

    `table` [C, V] int32 is described in `SamplingRecords.counts`. A row belongs to the state of a
    sequence until another one needs it; then it is filled again from the state. A row with tokens
    that the host does not know yet is not given away.
    """

    def __init__(self, vocab_size: int, device: str) -> None:
        self._vocab_size = vocab_size
        self.table = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        self._counted: weakref.WeakKeyDictionary[SamplingState, _Counted] = (
            weakref.WeakKeyDictionary()
        )
        self._num_uses = 0

    def rows_of(self, states: Sequence[SamplingState]) -> tuple[list[int], tuple[Ids, Ids]]:
        """The row of each state, -1 without penalties; and what `add` then adds to the table:
        places [n] in it and amounts [n].
        """
        self._num_uses += 1
        rows: list[int] = []
        places, amounts = [_NO_IDS], [_NO_IDS]
        recorded = [None if state.penalties is None else state.recorded_state for state in states]
        for state in recorded:
            if state is not None and (counted := self._counted.get(state)) is not None:
                counted.last_use = self._num_uses
        for state, later in zip(recorded, states, strict=True):
            if state is None:
                rows.append(_NONE)
                continue
            counted = self._counted.get(state)
            if counted is None:
                counted = self._counted[state] = _Counted(
                    self._take_row(), state.num_outputs, self._num_uses
                )
                self.table[counted.row].zero_()
                token_ids, codes = _codes(state)
            else:
                num_known = min(counted.num_outputs, state.num_outputs)
                token_ids = np.array(state.outputs_since(num_known), dtype=np.int64)
                codes = np.full(token_ids.size, 2, dtype=np.int64)
                counted.num_outputs += token_ids.size
            assert counted.num_outputs == later.num_outputs, "pending tokens were counted"
            rows.append(counted.row)
            places.append(token_ids + counted.row * self._vocab_size)
            amounts.append(codes)
        return rows, (np.concatenate(places), np.concatenate(amounts))

    def advance(self, states: Sequence[SamplingState]) -> None:
        """The table has one more token of each of these."""
        for state in states:
            if (counted := self._counted.get(state.recorded_state)) is not None:
                counted.num_outputs += 1

    def reserve(self, num_rows: int) -> None:
        """Grow to at least as many rows."""
        if (before := self.table.shape[0]) < num_rows:
            with torch.inference_mode(False):  # it also changes outside of that mode
                grown = self.table.new_empty((num_rows, self._vocab_size))
                grown[:before] = self.table
            self.table = grown

    def add(self, places: Tensor, amounts: Tensor) -> None:
        """Add to the table."""
        if places.numel():
            self.table.view(-1).index_add_(0, places, amounts.to(self.table.dtype))

    def _take_row(self) -> int:
        """A row that no state has, or the one that was not used for longest; the table grows if
        there is neither.
        """
        free = set(range(self.table.shape[0])) - {counted.row for counted in self._counted.values()}
        if free:
            return min(free)
        unused = [
            (counted.last_use, counted.row, state)
            for state, counted in self._counted.items()
            if counted.last_use < self._num_uses and counted.num_outputs <= state.num_outputs
        ]
        if unused:
            _, row, state = min(unused, key=lambda one: one[0])
            del self._counted[state]
            return row
        num_rows = self.table.shape[0]
        self.reserve(max(_FIRST_COUNTS_ROWS, 2 * num_rows))
        return num_rows


def _codes(state: SamplingState) -> tuple[Ids, Ids]:
    """The tokens that a state's penalties change, and their entries in the table."""
    penalties = state.penalties
    assert penalties is not None
    is_repeated = state.sampling.repetition_penalty != 1.0
    return penalties.token_ids, 2 * penalties.counts + int(is_repeated)
