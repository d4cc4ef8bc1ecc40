"""The planner's memory of quantized files, adapters and draft models is that of the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub.constants
import msgspec
import pytest
from gguf_models import write_model
from published_formats import EXACT
from quantized_checkpoint import write_quantized

from quickstep.cli import plan
from quickstep.cli.flags.hardware import drafts_of
from quickstep.cli.flags.parsing import Parser
from quickstep.cli.main import main
from quickstep.config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    LoRAConfig,
    ProposerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from quickstep.core.cost_model import StepLoad
from quickstep.engine.assembly import load_weights
from quickstep.engine.memory_plan import expected_plan
from quickstep.errors import ModelTooLarge
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
    assert expected_plan(config) == engine.plan


@pytest.fixture(params=["gguf", "awq-g32", "w8a8", "modelopt-nvfp4"])
def quantized(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint in quantized values."""
    if request.param == "gguf":
        write_model(tmp_path / "tiny-q4_k_m.gguf")
        return tmp_path / "tiny-q4_k_m.gguf"
    write_quantized(tmp_path, *EXACT[request.param])
    return tmp_path


def test_a_quantized_checkpoint_is_planned_as_it_will_be_held(
    quantized: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = LoadConfig(str(quantized), device="cpu", dtype="bfloat16")
    config = EngineConfig(load, CacheConfig(num_blocks=32), memory_bytes=1 << 30)
    held = load_weights(config, None).plan
    assert expected_plan(config) == held
    with pytest.raises(ModelTooLarge) as too_large:
        expected_plan(msgspec.structs.replace(config, memory_bytes=1 << 17))
    assert too_large.value.needed_bytes > 1 << 17
    plan_json = ["plan", str(quantized), "--input", "20", "--output", "20", "--json"]
    main([*plan_json, "--hardware", "xeon-8480"])
    on_cpu = json.loads(capsys.readouterr().out)
    assert on_cpu["fits"] == {"stored": 1}
    rows = {row.label: row.num_bytes for row in held.rows}
    planned = {row["label"]: row["num_bytes"] for row in on_cpu["memory"]}
    # the config's dtype is float32 for some of them
    assert rows["weights"] <= planned["weights"] <= 2 * rows["weights"]
    assert main([*plan_json, "--quantization", "int8"]) == 2
    assert "is quantized already" in capsys.readouterr().err


def test_a_model_in_the_hubs_cache_is_planned_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    name = "some/tiny-GGUF:Q4_K_M"
    config = EngineConfig(LoadConfig(name, device="cpu"), memory_bytes=1 << 30)
    assert expected_plan(config) is None
    repository = tmp_path / "models--some--tiny-GGUF"
    for folder in ("refs", "snapshots/abc"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    write_model(repository / "snapshots" / "abc" / "tiny-Q4_K_M.gguf")
    plan = expected_plan(config)
    assert plan is not None and "quantized" in plan.rows[0].detail
    sizes = ["--input", "20", "--output", "20", "--hardware", "xeon-8480", "--json"]
    main(["plan", name, *sizes])
    assert json.loads(capsys.readouterr().out)["fits"] == {"stored": 1}


def test_a_device_of_a_group_holds_its_part_of_a_quantized_checkpoint() -> None:
    spec = read_spec(find_checkpoint(LoadConfig("demo")).path)
    hardware = find_hardware("l4x2", read_hardware())
    held = ElementBytes(2, 8, weights=1 << 20)
    sizes = Load(1.0, 100, 20), EngineLimits(max_num_seqs=8, max_num_batched_tokens=64)
    complete, part = (fit(spec, hardware, Split(tensor), held, *sizes) for tensor in (1, 2))
    weights = [one.memory.rows[0].num_bytes for one in (complete, part)]
    assert weights[0] == 1 << 20
    assert weights[0] / 2 <= weights[1] < 0.6 * weights[0]
    plain = fit(spec, hardware, Split(), ElementBytes(2, 8), *sizes)
    row = StepLoad(num_tokens=1, num_rows=1)
    times = [one.costs.seconds(row) for one in (complete, plain)]
    assert (times[0] < times[1]) == (weights[0] < plain.memory.rows[0].num_bytes)
