"""The memory plan of every architecture is what the loader and the KV allocator take, to the byte.

Except for what the native kernels' layout adds, which is calculated here: biases and sinks are in
float32, and a matrix has whole panels of outputs (of the cases' matrices only routers, tables
of layers' inputs and LAuReL's are padded).
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from golden_cases import CASES, Case
from golden_harness import load

from quickstep.config import CacheConfig, SchedulerConfig
from quickstep.model.checkpoint.tensor_schema import layer_tensors
from quickstep.model.decoder_spec import ModelSpec, QKNorm
from quickstep.model.sizing import ElementBytes, plan_memory
from quickstep.ops.native.experts import PackedExperts
from quickstep.ops.weights import HeadWeight, LinearWeight
from quickstep.plan.formulas import Split, rank_spec
from quickstep.runtime.cache.kv_cache import allocate_kv

PANEL = 16
CACHE = CacheConfig(num_blocks=24)


def held_bytes(value: object, seen: set[int]) -> int:
    """Bytes of every tensor and packed weight in a structure, each counted once."""
    if value is None or id(value) in seen or isinstance(value, (PackedExperts, int, float)):
        return 0  # experts point to matrices, which are counted
    seen.add(id(value))
    if isinstance(value, tuple):
        return sum(held_bytes(part, seen) for part in value)
    if isinstance(value, LinearWeight | HeadWeight) or not hasattr(value, "__struct_fields__"):
        return value.nbytes
    return sum(held_bytes(getattr(value, name), seen) for name in value.__struct_fields__)


def inputs_width(spec: ModelSpec) -> int:
    """Of a row of the inputs of all layers."""
    assert spec.layer_inputs is not None
    return spec.num_layers * spec.layer_inputs.size


def kernel_bytes(spec: ModelSpec) -> int:
    """What the layout of the kernels adds to a model in bfloat16."""
    added = 2 * spec.vocab_size * spec.head_bias
    if spec.layer_inputs is not None:
        added += 2 * (-spec.layer_inputs.vocab_size % PANEL) * inputs_width(spec)
    for index, layer in enumerate(spec.layers):
        tensors = layer_tensors(spec, "", index)
        wide = [
            name
            for name in tensors
            if name.endswith((".bias", ".sinks", "_bias", "_scale"))
            and not name.endswith(("norm.bias", "correct_output_scale"))
        ]
        added += sum(2 * tensors[name][-1] for name in wide)
        if spec.layer_scalars:
            added -= 2
        if spec.value_norm and layer.kv_from is None:
            added += 2 * spec.of_layer(index).head_size  # ones
        if spec.qk_norm is QKNorm.UNWEIGHTED and layer.rope is not None:
            added += 2 * spec.head_size
        small = [
            name
            for name in tensors
            if name.endswith(
                ("conv1d.weight", "A_log", "attn.D", "attn.norm.weight", "coefs.weight")
            )
        ]
        added += sum(2 * math.prod(tensors[name]) for name in small)
        if spec.altup is not None:  # of the router and LAuReL
            outputs = -spec.altup.num_streams % PANEL + -spec.altup.laurel_rank % PANEL
            added += outputs * 2 * spec.hidden_size
        if layer.sparse and spec.moe is not None:
            outputs = -spec.moe.num_experts % PANEL
            added += outputs * (2 * spec.hidden_size + 4 * spec.moe.biases)
            added += (PANEL - 1) * 2 * spec.hidden_size * spec.moe.shared_gate
    return added


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planned_bytes_are_allocated_bytes(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    model = load(tmp_path, case.max_model_len, dtype="bfloat16")
    scheduler = SchedulerConfig(max_model_len=64, max_num_seqs=2)
    spec = rank_spec(model.spec, Split())
    plan = plan_memory(spec, ElementBytes(2, 8), CACHE, scheduler, 2**30)
    rows = {row.label: row.num_bytes for row in plan.rows}
    held = held_bytes(model.weights, set())
    assert held == rows["weights"] + kernel_bytes(spec)
    blocks = plan.num_blocks, CACHE.block_size
    kv = allocate_kv(model.kv_layout, *blocks, model.device, plan.states)
    assert held_bytes(kv, set()) == rows["KV cache"] + rows.get("states", 0)
