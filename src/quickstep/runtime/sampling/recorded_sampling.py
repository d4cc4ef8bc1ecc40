"""Sampling of a recorded step, recorded too: one copy and one replay for all rows.

Most rows are sampled by numbers alone: temperature, top-k, typical-p, top-p, min-p, penalties. The
numbers of every slot's sequence stay on the host, so that a step only gathers those of its slots
and adds the output positions; the device makes the keys of the noise from these. Rows with lists
(`logit_bias`, masks, bans, what a grammar says) have records of any size, and are sampled by
`DeviceSampler.launch`, with the same kernels.

Owned by `runtime.steps.graphs`, which calls it after the replay of a step.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quickstep.ops.triton.sampling.records import NUM_FIELDS, Field, SamplingRecords
from quickstep.ops.triton.sampling.row_keys import row_keys_
from quickstep.ops.triton.sampling.sample import sample
from quickstep.runtime.sampling.device_records import DeviceRecords
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.inputs import NUM_HOST_BUFFERS, HostBuffer
from quickstep.runtime.steps.step_model import GraphBackend

_LOGITS_ROW, _SEED, _POSITION = int(Field.LOGITS_ROW), int(Field.KEY_B), int(Field.KEY_C)
_CHANGED, _COUNTS, _FILTERED = int(Field.CHANGED), int(Field.COUNTS), int(Field.FILTERED)
_NO_PLACE = -1
_WIDTH = NUM_FIELDS + 1  # int64 elements of a row: its numbers, and its slot
# Of the counts of penalties: where they take more, rows with penalties are not recorded.
_COUNTS_BYTES = 256 << 20


class RecordedSampling:
    """Samples up to `buckets[-1]` rows of `logits` [E, V], which every recorded step writes.

    The tokens become the `last_tokens` [slots + 1] of their slots; the last slot is that of
    padding. A group of `group_rows` rows has temporary tensors at once.
    """

    def __init__(
        self,
        records: DeviceRecords,
        group_rows: int,
        logits: Tensor,
        last_tokens: Tensor,
        buckets: Sequence[int],
        backend: GraphBackend,
    ) -> None:
        self._records = records
        self._group_rows = group_rows
        self._logits = logits
        self._last_tokens = last_tokens
        self._buckets = buckets
        self._backend = backend
        most_rows, self._num_slots = buckets[-1], last_tokens.shape[0] - 1
        self._device_buffer = torch.zeros(
            most_rows * _WIDTH, dtype=torch.int64, device=logits.device
        )
        self._hosts = [
            HostBuffer(most_rows * _WIDTH, logits.device) for _ in range(NUM_HOST_BUFFERS)
        ]
        self._newest = 0
        self._sampled = torch.zeros(most_rows, dtype=torch.int64, device=logits.device)
        # the numbers of every slot's sequence; the last row is that of padding
        self._numbers = np.tile(records.numbers_of_padding(), (self._num_slots + 1, 1))
        self._states: list[Callable[[], SamplingState | None]] = [lambda: None] * self._num_slots
        self._places = np.arange(most_rows) % group_rows
        self._counts: Tensor | None = None
        if self._num_slots * logits.shape[1] * 4 <= _COUNTS_BYTES:
            self._counts = records.reserve_counts(self._num_slots)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._retired: list[Callable[[], None]] = []  # they may still run
        self._wanted = OrderedDict.fromkeys(buckets)

    @property
    def wants_capture(self) -> bool:
        """Whether `capture_next` has something to capture."""
        return bool(self._wanted)

    def capture_next(self) -> None:
        """Capture one more number of rows."""
        self._follow_counts()
        num_rows, _ = self._wanted.popitem(last=False)
        self._filled((), (), (), num_rows)
        self._send(num_rows)
        self._graphs[num_rows] = self._backend.capture(lambda: self._run(num_rows))
        self._retired.clear()

    def stop_capturing(self) -> None:
        """Capture nothing more; what is captured stays."""
        self._wanted.clear()

    def holds(self, slots: Sequence[Slot]) -> bool:
        """Whether the next tokens of these rows can be sampled here."""
        most = self._buckets[-1]
        return len(slots) <= most and all([self._holds(slot) for slot in slots])

    def _holds(self, slot: Slot) -> bool:
        state = slot.state
        assert state is not None, "a slot without sampling state emits nothing"
        if state.penalties is not None and self._counts is None:
            return False
        return state.has_fixed_record_after(slot.num_pending)

    def sample(
        self,
        slots: Sequence[Slot],
        places: Sequence[int],
        positions: Sequence[int],
        logits_rows: Sequence[int],
    ) -> Tensor | None:
        """The tokens [E] of rows that it `holds`, which are the last ones of their slots from now
        on; None where the number of rows is not captured. Valid until the next call.

        `places` are the numbers of the slots, `positions` the places of their tokens among the
        outputs, and `logits_rows` the rows of their logits.
        """
        num_rows = next(bucket for bucket in self._buckets if bucket >= len(slots))
        if num_rows not in self._graphs:
            if num_rows in self._wanted:
                self._wanted.move_to_end(num_rows, last=False)
            return None
        penalized = [
            index
            for index, slot in enumerate(slots)
            if slot.state is not None and slot.state.penalties is not None
        ]
        states = [slots[index].state_ahead for index in penalized]
        counts_rows = self._records.counted_rows(states) if penalized else []
        if self._follow_counts():
            return None
        for place, slot in zip(places, slots, strict=True):
            if self._states[place]() is not slot.state:
                self._learn(place, slot.state)
        rows = self._filled(places, positions, logits_rows, num_rows)
        if penalized:
            rows[penalized, _COUNTS] = counts_rows
        self._send(num_rows)
        self._graphs[num_rows]()
        self._records.advance_counts(states)
        return self._sampled[: len(slots)]

    def _follow_counts(self) -> bool:
        """Whether the table of counts had to grow: what reads the old one is captured again."""
        if self._counts is None or self._counts is self._records.counts_table:
            return False
        self._counts = self._records.counts_table
        self._retired += self._graphs.values()
        self._graphs.clear()
        self._wanted.update(dict.fromkeys(self._buckets))
        return True

    def _learn(self, place: int, state: SamplingState | None) -> None:
        """A slot has another sequence."""
        assert state is not None, "a slot without sampling state emits nothing"
        numbers = self._numbers[place]
        numbers[:] = self._records.numbers_of(state)
        numbers[_SEED] = (state.seed + 2**63) % 2**64 - 2**63
        if state.penalties is not None:
            numbers[_CHANGED] = 0
        self._states[place] = weakref.ref(state)

    def _filled(
        self,
        places: Sequence[int],
        positions: Sequence[int],
        logits_rows: Sequence[int],
        num_rows: int,
    ) -> npt.NDArray[np.int64]:
        """The numbers [num_rows, NUM_FIELDS] of a step's rows, then of padding, in the next host
        buffer.
        """
        self._newest = (self._newest + 1) % NUM_HOST_BUFFERS
        host, count = self._hosts[self._newest], len(places)
        host.wait()
        of_slots = host.wide[num_rows * NUM_FIELDS : num_rows * _WIDTH]
        of_slots[:count], of_slots[count:] = places, self._num_slots
        rows = host.wide[: num_rows * NUM_FIELDS].reshape(num_rows, NUM_FIELDS)
        np.take(self._numbers, of_slots, axis=0, out=rows)
        rows[:count, _LOGITS_ROW] = logits_rows
        rows[:count, _POSITION] = positions
        for field in (_FILTERED, _CHANGED):
            column = rows[:, field]
            np.copyto(column, self._places[:num_rows], where=column != _NO_PLACE)
        return rows

    def _send(self, num_rows: int) -> None:
        """Copy what was filled last to the device, without waiting."""
        host, count = self._hosts[self._newest], num_rows * _WIDTH
        self._device_buffer[:count].copy_(host.tensor[:count], non_blocking=True)
        host.record()

    def _run(self, num_rows: int) -> None:
        """What is recorded."""
        rows = self._device_buffer[: num_rows * NUM_FIELDS].view(num_rows, NUM_FIELDS)
        slots = self._device_buffer[num_rows * NUM_FIELDS : num_rows * _WIDTH]
        row_keys_(rows)
        sampled = self._sampled[:num_rows]
        for first in range(0, num_rows, self._group_rows):
            group = rows[first : first + self._group_rows]
            count = group.shape[0]
            changed = 0 if self._counts is None else count
            records = SamplingRecords(
                rows=group, num_changed=changed, num_filtered=count, counts=self._counts
            )
            sampled[first : first + count].copy_(sample(self._logits, records))
        self._last_tokens.index_copy_(0, slots, sampled.clamp(min=0))
        if self._counts is not None:
            self._records.count_(rows, sampled)
