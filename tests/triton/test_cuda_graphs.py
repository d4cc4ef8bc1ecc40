"""Recorded steps have the bits of steps op by op, for all lengths, blocks, tokens and adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from graph_double import HostRead, Reexecution
from msgspec.structs import replace
from recorded_steps import (
    BLOCK_SIZE,
    FIRST,
    MIXTURE,
    NUM_SLOTS,
    OTHER_ROWS,
    OTHERS,
    PROMPT_ROWS,
    ROWS,
    SMALL,
    VOCAB,
    BothSteps,
    decode_row,
    kv_with_history,
    make_adapter,
    prompt_row,
)

from op_checks.invariance import same_bits
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import LoRAAdapter, OpTable
from quickstep.ops.tensors import to_torch
from quickstep.runtime import cuda_graphs
from quickstep.runtime.capture import GraphOptions, StepModel, open_steps
from quickstep.runtime.cuda_graphs import can_record, prompt_buckets, row_buckets
from quickstep.runtime.eager_steps import EagerSteps

pytestmark = pytest.mark.usefixtures("products_in_order")


def open_both(
    model: Decoder,
    adapters: dict[str, LoRAAdapter] | None = None,
    max_width: int = 1,
    kv_dtype: str = "auto",
    max_prompt_tokens: int = 0,
) -> tuple[BothSteps, Reexecution]:
    backend = Reexecution()
    return BothSteps(model, backend, adapters, max_width, kv_dtype, max_prompt_tokens), backend


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_one_recorded_step_fits_other_lengths_blocks_and_tokens(
    model: Decoder, kv_dtype: str
) -> None:
    steps, backend = open_both(model, kv_dtype=kv_dtype)
    steps.check(ROWS, FIRST)
    assert backend.replays == 0, "the first steps run op by op"
    steps.capture_all()
    steps.check(ROWS, FIRST)
    steps.check(OTHER_ROWS, OTHERS)
    steps.check([decode_row(0, 10, (3,)), decode_row(2, 4, (8,))], [FIRST[0], FIRST[2]])
    assert backend.replays == 3
    assert backend.captured == len(row_buckets(NUM_SLOTS))


def test_rows_of_drafts_are_packed_into_one_recorded_step(model: Decoder) -> None:
    steps, backend = open_both(model, max_width=3)
    rows = [decode_row(0, 9, (17, 2, 4)), decode_row(1, 2, (5,)), decode_row(2, 17, (30, 1))]
    steps.check(rows, FIRST)
    steps.capture_all()
    steps.check(rows, FIRST)
    steps.check(ROWS, FIRST)
    assert backend.replays == 2


def test_adapters_are_data_of_a_recorded_step(model: Decoder, ops: OpTable) -> None:
    adapters = {"a": make_adapter(ops, 4, 1), "b": make_adapter(ops, 7, 2)}
    steps, backend = open_both(model, adapters)

    def check(*names: str) -> None:
        rows = [replace(row, adapter=name) for row, name in zip(ROWS, names, strict=True)]
        steps.check(rows, FIRST)

    check("a", "", "b")
    steps.capture_all()
    captured = backend.captured
    for names in (("a", "", "b"), ("b", "b", ""), ("", "a", "a")):
        check(*names)
    adapters["a"] = make_adapter(ops, 6, 3)  # loaded again, with other values
    check("a", "b", "")
    assert (backend.captured, backend.replays) == (captured, 4)
    adapters["c"] = make_adapter(ops, 20, 4)  # of a rank that the recorded table has no room for
    check("a", "c", "")
    assert backend.replays == 4
    steps.capture_all()
    check("c", "b", "a")
    assert backend.replays == 5


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_experts_of_a_recorded_step_are_chosen_when_it_runs(
    ops: OpTable, quantization: str | None
) -> None:
    values = RandomValues(torch.float32, torch.device("cpu"), 1, quantization)
    model = random_model(MIXTURE, ops, values, 64, None)
    adapters = {"a": make_adapter(ops, 4, 1, spec=MIXTURE)}
    steps, backend = open_both(model, adapters if quantization is None else None)
    assert steps.recorded.capture_next()
    other_tokens = [
        replace(row, token_ids=((7 * row.token_ids[0] + 3) % VOCAB,), start=row.start - 1)
        for row in ROWS
    ]
    for rows in (ROWS, other_tokens):
        steps.check(rows, FIRST)
    assert backend.replays == 2
    if quantization is None:
        rows = [replace(row, adapter=name) for row, name in zip(ROWS, ("a", "", "a"), strict=True)]
        steps.check(rows, FIRST)  # wants a recorded step with adapters
        steps.capture_all()
        steps.check(rows, FIRST)
        assert backend.replays == 3


def test_experts_that_are_computed_one_by_one_are_not_recorded(ops: OpTable) -> None:
    values = RandomValues(torch.float32, torch.device("cpu"), 1, None)
    one_by_one = random_model(MIXTURE, replace(ops, pack_experts=None), values, 64, None)
    for model, is_recorded in (
        (random_model(MIXTURE, ops, values, 64, None), True),
        (one_by_one, False),
    ):
        assert can_record(model, kv_with_history(model)) is is_recorded


def test_one_recorded_step_fits_other_prompts_next_to_decode_rows(model: Decoder) -> None:
    steps, backend = open_both(model, max_prompt_tokens=8)
    assert steps.recorded.capture_next()
    for every_token in (False, True):
        steps.check(PROMPT_ROWS, FIRST, every_token)
    steps.check([prompt_row(1, 0, (9, 3))], FIRST[1:2])
    steps.check([prompt_row(2, 11, (4, 4, 8, 3, 5, 6), emits=False)], FIRST[2:])
    assert (backend.captured, backend.replays) == (1, 4)
    steps.check([prompt_row(2, 0, (1, 2, 3, 4, 5, 6, 7, 8, 9))], FIRST[2:])
    steps.check([decode_row(0, 9, (17, 2)), prompt_row(1, 0, (4, 5))], FIRST[:2])
    assert backend.replays == 4, "longer steps, and drafts next to prompts, run op by op"


def test_a_failed_row_of_a_recorded_step_with_prompts_emits_nothing(model: Decoder) -> None:
    steps, backend = open_both(model, max_prompt_tokens=8)
    assert steps.recorded.capture_next()
    rows = [ROWS[0], prompt_row(1, 0, (4, 5, 6)), ROWS[2]]
    found = []
    for one in (steps.eager, steps.recorded):
        one.prepare(rows, FIRST)
        hidden, logits = one.run([(0, 0), (2, 0)], False)
        found.append((to_torch(hidden).clone(), to_torch(logits).clone()))
    assert backend.replays == 1
    for mine, theirs in zip(*found, strict=True):
        assert same_bits(mine, theirs)
    assert steps.recorded.argmax([(0, 0), (2, 0)]).tolist() == found[0][1].argmax(1).tolist()


def test_adapters_are_data_of_a_recorded_step_with_prompts(model: Decoder, ops: OpTable) -> None:
    adapters = {"a": make_adapter(ops, 4, 1), "b": make_adapter(ops, 7, 2)}
    steps, backend = open_both(model, adapters, max_prompt_tokens=8)
    for names in (("a", "", "b"), ("b", "a", ""), ("", "b", "b")):
        rows = [replace(row, adapter=one) for row, one in zip(PROMPT_ROWS, names, strict=True)]
        steps.check(rows, FIRST)
        steps.capture_all()
    assert backend.replays == 2


def test_steps_with_prompts_run_op_by_op_where_they_are_not_wanted(model: Decoder) -> None:
    steps, backend = open_both(model)
    steps.capture_all()
    steps.check(PROMPT_ROWS, FIRST)
    assert backend.replays == 0


def test_sampled_tokens_stay_on_the_device_for_the_next_step(model: Decoder) -> None:
    steps, _ = open_both(model)
    alone, _ = open_both(model)
    steps.capture_all()
    for slot in FIRST:
        slot.num_pending = 0
    steps.recorded.prepare(ROWS, FIRST)
    emitting = [(index, 0) for index in range(len(ROWS))]
    steps.recorded.run(emitting, every_token=False)
    sampled = steps.recorded.argmax(emitting).clone()
    pending = [replace(row, start=row.start + 1, token_ids=()) for row in ROWS]
    for slot in FIRST:
        slot.num_pending = 1
    steps.recorded.prepare(pending, FIRST)
    _, logits = steps.recorded.run(emitting, every_token=False)
    for slot in FIRST:
        slot.num_pending = 0
    tokens = sampled.tolist()
    alone.recorded.prepare(ROWS, FIRST)
    _, first_logits = alone.recorded.run(emitting, every_token=False)
    assert tokens == to_torch(first_logits).argmax(1).tolist()
    known = [replace(row, token_ids=(token,)) for row, token in zip(pending, tokens, strict=True)]
    alone.recorded.prepare(known, FIRST)
    assert same_bits(to_torch(logits), to_torch(alone.recorded.run(emitting, False)[1]))


def test_a_step_op_by_op_leaves_its_tokens_on_the_device_too(model: Decoder) -> None:
    steps, _ = open_both(model)  # nothing is captured
    emitting = [(index, 0) for index in range(len(ROWS))]
    steps.recorded.prepare(ROWS, FIRST)
    _, logits = steps.recorded.run(emitting, every_token=False)
    tokens = steps.recorded.argmax(emitting).tolist()
    assert tokens == to_torch(logits).argmax(1).tolist()
    pending = [replace(row, start=row.start + 1, token_ids=()) for row in ROWS]
    for slot in FIRST:
        slot.num_pending = 1
    steps.recorded.prepare(pending, FIRST)
    _, logits = steps.recorded.run(emitting, every_token=False)
    recorded = to_torch(logits).clone()
    for slot in FIRST:
        slot.num_pending = 0
    known = [replace(row, token_ids=(token,)) for row, token in zip(pending, tokens, strict=True)]
    steps.recorded.prepare(known, FIRST)
    assert same_bits(recorded, to_torch(steps.recorded.run(emitting, every_token=False)[1]))


def test_tokens_of_logits_without_a_finite_maximum_are_reported(model: Decoder) -> None:
    steps, _ = open_both(model)
    steps.capture_all()
    for cache in steps.caches[1].values:
        to_torch(cache)[7].fill_(float("nan"))  # a block of the second row
    steps.recorded.prepare(ROWS, FIRST)
    emitting = [(index, 0) for index in range(len(ROWS))]
    steps.recorded.run(emitting, every_token=False)
    tokens = steps.recorded.argmax(emitting).tolist()
    assert tokens[1] == -1 and min(tokens[0], tokens[2]) >= 0


def test_what_reads_lengths_on_the_host_is_not_recorded(model: Decoder) -> None:
    kv = kv_with_history(model)
    assert can_record(model, kv)
    assert not can_record(model.with_ops(reference_ops()), kv)

    ones = torch.ones(2)
    reads: tuple[Callable[[], object], ...] = (
        lambda: ones[0].item(),
        ones.tolist,
        ones.cpu,
        ones.nonzero,
        lambda: ones[ones > 0],
        lambda: torch.tensor([1, 2]),
    )
    for read in reads:
        with pytest.raises(HostRead):
            Reexecution().capture(read)


def test_enforce_eager_records_nothing(model: Decoder) -> None:
    options = GraphOptions(Reexecution(), NUM_SLOTS)
    kv = kv_with_history(model)
    steps: StepModel = open_steps(model, kv, BLOCK_SIZE, enforce_eager=True, graphs=options)
    assert isinstance(steps, EagerSteps)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))],
)
def test_numbers_of_rows_end_with_the_most(most: int, expected: tuple[int, ...]) -> None:
    assert row_buckets(most) == expected


@pytest.mark.parametrize(
    ("most", "expected"), [(0, ()), (8, (8,)), (64, (64,)), (100, (64, 100)), (192, (64, 128, 192))]
)
def test_numbers_of_tokens_of_prompts_end_with_the_most(
    most: int, expected: tuple[int, ...]
) -> None:
    assert prompt_buckets(most) == expected


def test_steps_with_more_logits_than_graphs_may_keep_run_op_by_op(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_LOGIT_BYTES", 4 * SMALL.vocab_size)  # of one token
    steps, backend = open_both(model, max_width=3)
    steps.capture_all()
    rows = [decode_row(0, 9, (17, 2, 4)), decode_row(1, 2, (5,)), decode_row(2, 17, (30, 1))]
    steps.check(rows, FIRST)
    assert backend.replays == 0
    steps.check(ROWS, FIRST)
    assert backend.replays == 1
