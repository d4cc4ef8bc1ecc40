"""The largest step of a model runs without a KV cache; its memory goes into the plan."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from adapter_files import SMALL_LLAMA
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.interface import ForwardBatch
from quickstep.model.sizing import KVBlockSize, MemoryPlan, MemoryRow, with_measured_activations
from quickstep.ops.reference import reference_ops
from quickstep.runtime.activation_probe import run_largest_step

CPU = torch.device("cpu")
PLAN = MemoryPlan(
    num_blocks=1000,
    max_model_len=8000,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    rows=(
        MemoryRow("weights", 5 << 30, ""),
        MemoryRow("KV cache", 1000 << 20, ""),
        MemoryRow("activations", 1 << 30, ""),
        MemoryRow("spare", 1 << 30, ""),
    ),
    notes=(),
)
BLOCK = KVBlockSize(16, 1 << 20)


@pytest.mark.parametrize("num_tokens", [16, 70])
def test_the_largest_step_has_all_tokens_and_the_width_of_the_longest_sequence(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(
        SMALL_LLAMA, reference_ops(), RandomValues(torch.float32, CPU, 1, None), 64, None
    )
    batches: list[ForwardBatch] = []
    forward = type(model).forward

    def noted(self: object, batch: ForwardBatch, kv: object) -> torch.Tensor:
        batches.append(batch)
        return forward(self, batch, kv)

    monkeypatch.setattr(type(model), "forward", noted)
    run_largest_step(model, model.kv_layout, 4, num_tokens, 3, 64)
    [batch] = batches
    assert batch.token_ids.shape[0] == num_tokens
    assert max(batch.layout.context_lens) <= 64
    assert batch.layout.block_tables.shape[1] == 16
    assert batch.emitting is not None and batch.emitting.tokens.shape[0] == 3


def test_measured_activations_replace_those_of_the_plan() -> None:
    plan = with_measured_activations(PLAN, 2 << 30, 20 << 30, BLOCK)
    assert plan.num_blocks == PLAN.num_blocks
    sizes = {row.label: row.num_bytes for row in plan.rows}
    assert sizes["activations"] == (2 << 30) + (1 << 30)
    assert sum(sizes.values()) == sum(row.num_bytes for row in PLAN.rows)


def test_blocks_that_would_not_fit_next_to_the_activations_are_given_up() -> None:
    free_bytes = (2 << 30) + (1 << 30) + (100 << 20)
    plan = with_measured_activations(PLAN, 2 << 30, free_bytes, BLOCK)
    assert (plan.num_blocks, plan.max_model_len, plan.max_num_seqs) == (100, 1600, 64)
    assert any("KV blocks 1000 became 100" in note for note in plan.notes)
    with_draft = replace(PLAN, rows=(*PLAN.rows, MemoryRow("draft weights", 40 << 20, "")))
    assert with_measured_activations(with_draft, 2 << 30, free_bytes, BLOCK).num_blocks == 60
