"""Adapters are loaded, replaced and unloaded while streams run: no wrong answer, nothing leaks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from adapter_files import write_adapter
from benchmarks.lora_race import RaceCounts, race
from quickstep.config import LoRAConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.llm import engine_config
from quickstep.model.spec import read_spec


@pytest.mark.parametrize(("max_cpu_loras", "pinned"), [(None, ()), (4, ("first",))])
def test_a_race_of_operations_and_streams(
    tmp_path: Path, max_cpu_loras: int | None, pinned: tuple[str, ...]
) -> None:
    """1,000 loads, replacements and unloads, a tenth of them invalid, against 32 streams."""
    base = write_checkpoint(tmp_path / "base")
    spec = read_spec(base)
    folder = tmp_path / "versions"
    versions = [write_adapter(folder / f"v{seed}", spec, seed=seed) for seed in range(4)]
    config = replace(
        engine_config(str(base), {"num_threads": 1, "num_blocks": 128}),
        lora=LoRAConfig(max_loras=2, max_cpu_loras=max_cpu_loras, pinned=pinned),
    )

    async def run() -> RaceCounts:
        engine = open_engine(config)
        await engine.start()
        try:
            racing = race(engine, versions, num_operations=500, num_streams=32, seed=1)
            return await asyncio.wait_for(racing, 120.0)  # none waits for ever
        finally:
            await engine.stop()

    counts = asyncio.run(run())
    assert (counts.wrong, counts.leaked) == (0, 0)
    assert counts.answers > 30 and min(counts.operations.values()) > 1
    assert counts.operations.keys() == {"loaded", "replaced", "unloaded", "refused"}
