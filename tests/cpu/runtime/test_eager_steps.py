"""Rows packed into tensors, against a slow reference over single tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quickstep.errors import EngineError
from quickstep.ops.table import RowLengths
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.eager import build_batch
from quickstep.types import Admission, Phase, SamplingParams, StepRow

VOCAB = 100
CPU = torch.device("cpu")


def slot_with(block_ids=(), last_token=None):
    slot = Slot(Admission(0, "r#0", (1,), 1, SamplingParams(), 0), VOCAB)
    slot.append_blocks(block_ids)
    slot.last_token = last_token
    return slot


def row_of(start, token_ids, num_tokens=None):
    count = len(token_ids) if num_tokens is None else num_tokens
    return StepRow(0, start, count, tuple(token_ids), (), Phase.PREFILL, True, 0)


def build(rows, slots, block_size=4):
    return build_batch(rows, slots, block_size, VOCAB, CPU)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6))
def test_every_token_is_where_its_block_table_says(spans):
    block_size, next_block, rows, slots = 4, 0, [], []
    for start, count in spans:
        num_blocks = -(-(start + count) // block_size)
        slots.append(slot_with([next_block + (7 * i) % num_blocks for i in range(num_blocks)]))
        next_block += num_blocks
        rows.append(row_of(start, range(count)))
    batch = build(rows, slots, block_size)
    positions = [start + i for start, count in spans for i in range(count)]
    mapping = [
        int(slot.block_ids[p // block_size]) * block_size + p % block_size
        for (start, count), slot in zip(spans, slots, strict=True)
        for p in range(start, start + count)
    ]
    layout = batch.layout
    assert batch.token_ids.tolist() == [i for _, count in spans for i in range(count)]
    assert layout.positions.tolist() == positions
    assert layout.slot_mapping.tolist() == mapping
    assert layout.context_lens == tuple(start + count for start, count in spans)
    ends = [sum(count for _, count in spans[: i + 1]) for i in range(len(spans))]
    assert layout.row_offsets == (0, *ends)
    for table, slot, context in zip(layout.block_tables, slots, layout.context_lens, strict=True):
        num_blocks = -(-context // block_size)
        assert table[:num_blocks].tolist() == slot.block_ids[:num_blocks].tolist()
        assert not table[num_blocks:].any()


def test_types_are_those_of_the_seam():
    batch = build([row_of(0, [5])], [slot_with([3])])
    layout = batch.layout
    assert batch.token_ids.dtype == layout.positions.dtype == torch.int64
    assert layout.slot_mapping.dtype == torch.int64
    assert layout.block_tables.dtype == torch.int32
    assert all(type(x) is int for x in (*layout.row_offsets, *layout.context_lens))


def test_a_pending_token_is_the_one_its_slot_sampled_last():
    rows = [row_of(3, (), 1), row_of(0, [4, 5]), row_of(6, (), 1)]
    slots = [slot_with([0], last_token=9), slot_with([1]), slot_with([2, 3], last_token=8)]
    assert build(rows, slots).token_ids.tolist() == [9, 4, 5, 8]


def test_a_pending_token_that_was_never_sampled_fails_its_slot_only():
    slots = [slot_with([0]), slot_with([1], last_token=8)]
    assert build([row_of(1, (), 1), row_of(1, (), 1)], slots).token_ids.tolist() == [0, 8]
    assert slots[0].failure and not slots[1].failure


def test_blocks_beyond_the_first_allocation_are_kept_in_order():
    slot = slot_with()
    for block_id in range(40):
        slot.append_blocks([block_id, 100 + block_id])
    assert slot.block_ids.tolist() == [x for i in range(40) for x in (i, 100 + i)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (row_of(0, [1, VOCAB]), "token ids"),
        (row_of(0, [-1]), "token ids"),
        (row_of(0, [1, 2], num_tokens=3), "2 tokens"),
        (row_of(0, [], num_tokens=2), "no tokens"),
        (row_of(7, [1, 2]), "blocks hold"),
    ],
)
def test_a_row_that_contradicts_itself_is_an_engine_error(row, said):
    with pytest.raises(EngineError, match=said):
        build([row], [slot_with([0, 1])])


def test_inputs_for_a_gpu_are_copied_from_pinned_memory_without_waiting(monkeypatch):
    gpu = torch.device("cuda", 0)
    pinned, copied = [], []

    def pin_memory(tensor):
        pinned.append(tensor)
        return tensor

    def to(tensor, device, non_blocking=False):
        assert device == gpu and non_blocking
        copied.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(RowLengths, "of", lambda *_: None)
    build_batch([row_of(0, (5, 9))], [slot_with((3,))], 4, VOCAB, gpu)
    assert len(copied) == 4
    assert list(map(id, pinned)) == list(map(id, copied))
