"""The planner's memory of adapters and draft models is that of the engine's own plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quickstep.cli import plan
from quickstep.cli.flags.hardware import drafts_of
from quickstep.cli.flags.parsing import Parser
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
from quickstep.plan.candidates import DraftModel, EngineLimits, Load, LoRASizes, fit
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware


def by_label(memory: MemoryPlan, drafts: Sequence[DraftModel]) -> dict[str, int]:
    """Bytes of each row; those of KV caches for one block, without what a sequence has besides."""
    found = {row.label: row.num_bytes for row in memory.rows if row.label != "spare"}
    if "draft KV cache" in found:
        per_sequence = sum(draft.sizes.kv_bytes(0, 1) for draft in drafts)
        found["draft KV cache"] -= memory.max_num_seqs * per_sequence
    return {
        label: num_bytes // memory.num_blocks if "KV" in label else num_bytes
        for label, num_bytes in found.items()
    }


DRAFTS = ("demo-draft", "demo-eagle", "demo-medusa")


@pytest.mark.parametrize("names", [DRAFTS[:1], DRAFTS[1:2], DRAFTS[2:], DRAFTS])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_plan_with_adapters_and_draft_models_is_the_engines(
    quantization: str | None, names: tuple[str, ...], tmp_path: Path
) -> None:
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64)
    config = EngineConfig(
        LoadConfig("demo", quantization=quantization),
        CacheConfig(num_blocks=32),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        SpeculationConfig(tuple([ProposerConfig(model=name) for name in names])),
        memory_bytes=1 << 30,
        lora=LoRAConfig(max_loras=3, allowed_dirs=(str(tmp_path),)),
    )
    engine = load_weights(config, None)
    itemsize = 2  # of the bundled models
    spec = read_spec(find_checkpoint(LoadConfig("demo")).path)
    scratch = engine.model.ops.scratch_bytes
    parser = Parser(prog="quickstep")
    plan.add_parser(parser.add_subparsers())
    flags = [flag for name in names for flag in ("--speculative-model", name)]
    drafts = drafts_of(parser.parse_args(["plan", "demo", *flags]), spec)
    planned = fit(
        spec,
        find_hardware("l4", read_hardware()),
        Split(),
        ElementBytes(itemsize, scratch, quantization),
        Load(1.0, 100, 20),
        limits,
        LoRASizes(3),
        drafts,
    )
    assert by_label(planned.memory, drafts) == by_label(engine.plan, drafts)
    assert planned.memory.max_num_seqs == engine.plan.max_num_seqs
