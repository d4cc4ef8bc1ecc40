"""Recorded steps have the bits of steps op by op, for all lengths, blocks, tokens and adapters."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.steps import graphs
from quickstep.runtime.steps.eager import EagerSteps
from quickstep.runtime.steps.graphs import GraphSteps, can_record, prompt_buckets, row_buckets
from quickstep.runtime.steps.inputs import InputBuffer, StepSize
from quickstep.runtime.steps.opening import open_steps
from quickstep.runtime.steps.step_model import GraphOptions, StepModel

CPU = torch.device("cpu")

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
    steps.capture_for(ROWS, FIRST)
    other_tokens = [
        replace(row, token_ids=((7 * row.token_ids[0] + 3) % VOCAB,), start=row.start - 1)
        for row in ROWS
    ]
    for rows in (ROWS, other_tokens):
        steps.check(rows, FIRST)
    assert backend.replays == 2
    if quantization is None:
        rows = [replace(row, adapter=name) for row, name in zip(ROWS, ("a", "", "a"), strict=True)]
        steps.capture_for(rows, FIRST)
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
    steps.capture_for(PROMPT_ROWS, FIRST)
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
    rows = [ROWS[0], prompt_row(1, 0, (4, 5, 6)), ROWS[2]]
    steps.capture_for(rows, FIRST)
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


def test_a_step_uses_the_smallest_captured_graph_that_holds_it(model: Decoder) -> None:
    steps, backend = open_both(model, max_width=2, max_prompt_tokens=8)
    steps.capture_for(PROMPT_ROWS, FIRST)
    drafted = [decode_row(1, 2, (5, 9)), decode_row(0, 9, (17,))]
    slots = [FIRST[1], FIRST[0]]
    steps.check(ROWS, FIRST)
    steps.check([ROWS[1]], FIRST[1:2])
    assert backend.replays == 2, "decode rows fit into a graph of prompts"
    steps.check(drafted, slots)
    assert backend.replays == 2, "a row with drafts has several tokens with logits"
    steps.capture_for([*drafted, ROWS[2]], [*slots, FIRST[2]])
    used = []
    for captured in list(steps.recorded._graphs.values()):
        replay = captured.replay

        def noted(size: StepSize = captured.inputs.size, run: Callable[[], None] = replay) -> None:
            used.append((size.num_rows, size.num_tokens))
            run()

        steps.recorded._graphs[captured.inputs.size] = replace(captured, replay=noted)
    steps.check(drafted, slots)
    steps.check([ROWS[1]], FIRST[1:2])
    prompts = [decode_row(0, 9, (17, 2)), prompt_row(1, 0, (4, 5))]
    steps.check(prompts, FIRST[:2])
    steps.check([prompt_row(2, 5, (4, 5, 8)), prompt_row(1, 0, (9,), False)], [FIRST[2], FIRST[1]])
    steps.check(PROMPT_ROWS, FIRST)
    assert used == [(3, 6), (3, 6), (3, 6), (3, 8), (3, 8)]


def test_few_rows_are_captured_first_and_what_a_step_needs_is_next(model: Decoder) -> None:
    backend = Reexecution()
    options = GraphOptions(backend, 20, 3, 100)
    steps = open_steps(model, kv_with_history(model), BLOCK_SIZE, False, graphs=options)
    assert isinstance(steps, GraphSteps)
    sizes = [(one.num_rows, one.num_tokens, one.has_prompts) for one in steps._wanted]
    decode = [(rows, rows * width, False) for rows in (1, 2, 4, 8, 20, 16) for width in (1, 3)]
    assert sizes == [*decode, (20, 100, True), (20, 64, True)]
    rows = [ROWS[0], ROWS[1], ROWS[2]]
    steps.prepare(rows, FIRST)
    assert next(iter(steps._wanted)).num_rows == 4
    assert (steps.num_missed, steps.wants_capture) == (1, True)
    assert steps.capture_next()
    assert (steps.num_missed, steps.num_captured) == (0, 1)
    steps.prepare(rows[:1], FIRST[:1])
    assert steps.num_missed == 0, "it ran as a graph of more rows"
    assert next(iter(steps._wanted)).num_rows == 1


def test_a_step_does_not_use_a_graph_of_far_more_tokens(model: Decoder) -> None:
    steps, _ = open_both(model, max_prompt_tokens=200)
    steps.capture_for([prompt_row(1, 0, tuple(range(4)))], FIRST[1:2])
    assert [one.num_tokens for one in steps.recorded._graphs] == [64]
    graph = steps.recorded._graphs.pop(StepSize(3, 64, 16, has_prompts=True))
    steps.recorded._graphs[StepSize(3, 128, 16, has_prompts=True)] = graph
    steps.recorded.prepare(ROWS, FIRST)
    assert steps.recorded._prepared is None


def test_longer_contexts_have_two_sizes_that_hold_all_rows(model: Decoder) -> None:
    long = random_model(SMALL, model.ops, RandomValues(torch.float32, CPU, 1, None), 20_000, None)
    options = GraphOptions(Reexecution(), 20)
    kv = allocate_kv(long.kv_layout, 5000, BLOCK_SIZE, CPU)
    steps = open_steps(long, kv, BLOCK_SIZE, False, graphs=options)
    assert isinstance(steps, GraphSteps)
    wide = [(one.num_rows, one.table_width) for one in steps._wanted if one.table_width > 1024]
    assert wide == [(8, 4096), (20, 4096), (8, 4999), (20, 4999)]


def test_nothing_more_is_captured_without_free_memory(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    steps, backend = open_both(model)
    assert steps.recorded.capture_next()
    backend.free = 100 << 20
    assert not steps.recorded.capture_next()
    assert "no further CUDA graphs than 1" in caplog.text
    steps.check(ROWS, FIRST)
    assert not steps.recorded.wants_capture
    steps.check([ROWS[1]], FIRST[1:2])
    assert backend.replays == 1


def test_tensors_of_every_size_begin_at_16_bytes() -> None:
    for num_slots, num_rows, num_tokens, width in ((3, 1, 1, 5), (4, 3, 7, 9), (64, 8, 8, 257)):
        size = StepSize(num_rows, num_tokens, width)
        buffer = InputBuffer(size.num_elements, num_slots, CPU)
        inputs = buffer.inputs(size)
        start = buffer.last_tokens.data_ptr()
        for name in ("token_index", "positions", "slot_mapping", "row_slots", "adapter_slots"):
            assert (getattr(inputs, name).data_ptr() - start) % 16 == 0
        for tensor in (inputs.row_offsets, inputs.block_tables):
            assert (tensor.data_ptr() - start) % 16 == 0


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
    monkeypatch.setattr(graphs, "_LOGIT_BYTES", 4 * SMALL.vocab_size)  # of one token
    steps, backend = open_both(model, max_width=3)
    steps.capture_all()
    rows = [decode_row(0, 9, (17, 2, 4)), decode_row(1, 2, (5,)), decode_row(2, 17, (30, 1))]
    steps.check(rows, FIRST)
    assert backend.replays == 0
    steps.check(ROWS, FIRST)
    assert backend.replays == 1


def test_a_capture_runs_once_before_and_neither_empties_caches_nor_collects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            calls.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    @contextmanager
    def stream(one: object) -> Iterator[None]:
        calls.append(f"on {one}")
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "a stream of its own")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    backend = graphs.CudaGraphs(torch.device("cuda", 0))
    captured = ["synchronize", "on a stream of its own", "begin pool thread_local"]

    backend.capture(lambda: calls.append(f"run, collects: {gc.isenabled()}"))()
    first, second = (f"run, collects: {one}" for one in (True, False))
    assert calls == [first, *captured, second, "end", "replay"]
    assert gc.isenabled()

    calls.clear()

    def failing() -> None:
        calls.append("run")
        if calls.count("run") == 2:
            raise RuntimeError("not permitted while a stream is captured")

    with pytest.raises(RuntimeError, match="not permitted"):
        backend.capture(failing)
    assert calls == ["run", *captured, "run", "end"]
    assert gc.isenabled()
