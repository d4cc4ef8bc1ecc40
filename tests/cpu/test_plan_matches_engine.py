"""The planner's memory of adapters and draft models is that of the engine's own plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from quickstep.config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    LoRAConfig,
    ProposerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from quickstep.engine.assembly import load_weights
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.sizing import ElementBytes, MemoryPlan
from quickstep.model.spec import read_spec
from quickstep.plan.candidates import DraftModel, Load, LoRASizes, StepLimits, fit
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware


def by_label(plan: MemoryPlan) -> dict[str, int]:
    """Bytes of each row; those of KV caches for one block."""
    return {
        row.label: row.num_bytes // plan.num_blocks if "KV" in row.label else row.num_bytes
        for row in plan.rows
        if row.label != "spare"
    }


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_plan_with_adapters_and_a_draft_model_is_the_engines(
    quantization: str | None, tmp_path: Path
) -> None:
    limits = StepLimits(max_num_seqs=8, max_num_batched_tokens=64)
    config = EngineConfig(
        LoadConfig("demo", quantization=quantization),
        CacheConfig(num_blocks=32),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        SpeculationConfig((ProposerConfig(model="demo-draft"),)),
        memory_bytes=1 << 30,
        lora=LoRAConfig(max_loras=3, allowed_dirs=(str(tmp_path),)),
    )
    engine = load_weights(config, None)
    itemsize = 2  # of the bundled models
    spec = read_spec(find_checkpoint(LoadConfig("demo")).path)
    draft = read_spec(find_checkpoint(LoadConfig("demo-draft")).path)
    scratch = engine.model.ops.scratch_bytes
    planned = fit(
        spec,
        find_hardware("l4", read_hardware()),
        Split(),
        ElementBytes(itemsize, scratch, quantization),
        Load(1.0, 100, 20),
        limits,
        LoRASizes(3),
        DraftModel(draft, ElementBytes(itemsize, scratch), 4, 0.7),
    )
    assert by_label(planned.memory) == by_label(engine.plan)
