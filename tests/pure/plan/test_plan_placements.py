"""Disaggregated placements in plans: their balance, and that the answer shows the best one."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from quickstep.cli.main import main
from quickstep.config import SpeculationMethod
from quickstep.core.cost_model import StepLoad
from quickstep.model.sizing import DraftSizes, ElementBytes, kv_bytes_per_token
from quickstep.plan.candidates import Candidate, DraftModel, EngineLimits, Load, fit, steady_state
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.placements import (
    Placement,
    best_placement,
    placement_capacity,
    placement_state,
)
from quickstep.sim.summary import Targets

LOAD = Load(4.0, 2000, 100)
TARGETS = Targets(ttft_s=1.0, tpot_s=0.03)


def engine(tensor: int = 1) -> Candidate:
    hardware = find_hardware("l4x8", read_hardware())
    spec = find_model("llama-3.2-3b")
    return fit(spec, hardware, Split(tensor), ElementBytes(2, 8), LOAD, EngineLimits())


def test_a_prefill_engine_delays_no_tokens_and_queues_when_it_is_busy() -> None:
    placement = Placement(engine(), 4, engine(), 4)
    state = placement_state(placement, LOAD)
    mixed = steady_state(engine(), replace(LOAD, rate=1.0))
    assert state is not None and mixed is not None
    assert state.tpot_s < mixed.tpot_s
    prompt_s = engine().costs.seconds(StepLoad.of_span(0, LOAD.num_inputs))
    assert prompt_s < state.ttft_s < 1.5 * prompt_s
    busy = placement_state(placement, replace(LOAD, rate=0.95 * 4 / prompt_s))
    assert busy is None or busy.ttft_s > 5 * prompt_s
    assert placement_state(placement, replace(LOAD, rate=1.01 * 4 / prompt_s)) is None


def test_the_best_placement_meets_the_targets_on_the_fewest_devices() -> None:
    found = best_placement([engine(), engine(2)], LOAD, TARGETS, 8)
    assert found is not None
    placement, state = found
    assert state is not None and state.meets(TARGETS)
    assert placement.num_devices <= 8
    assert placement_capacity(placement, LOAD, TARGETS) >= LOAD.rate
    for fewer in range(2, placement.num_devices):
        other = best_placement([engine(), engine(2)], LOAD, TARGETS, fewer)
        assert other is not None
        assert placement_capacity(other[0], LOAD, TARGETS) < LOAD.rate
    assert best_placement([engine()], LOAD, TARGETS, 1) is None


def test_a_pipeline_is_one_engine_that_computes_several_prompts_at_the_same_time() -> None:
    hardware, spec = find_hardware("l4x8", read_hardware()), find_model("llama-3.2-3b")
    sizes = ElementBytes(2, 8), LOAD, EngineLimits()
    pipeline = fit(spec, hardware, Split(1, 2), *sizes)
    placement = Placement(pipeline, 1, engine(), 2)
    assert placement.num_devices == 4
    assert (placement.pools.num_prefill, placement.pools.num_decode) == (1, 2)
    # two prompts are computed at a time, each in about the time that one device takes
    load = replace(LOAD, rate=1.5 / engine().costs.seconds(StepLoad.of_span(0, LOAD.num_inputs)))
    assert placement_state(Placement(engine(), 1, engine(), 4), load) is None
    state = placement_state(Placement(pipeline, 1, engine(), 4), load)
    assert state is not None
    two = placement_state(Placement(engine(), 2, engine(), 4), load)
    assert two is not None
    assert state.ttft_s == pytest.approx(two.ttft_s, rel=0.1)


def test_a_model_that_fits_on_no_tensor_parallel_group_is_placed_in_pipelines(capsys) -> None:
    # three devices hold the weights, and do not divide 8 kv heads
    flags = ("--hardware", "h200x6", "--rate", "4", "--input", "500", "--output", "20", "--json")
    assert main(("plan", "mixtral-8x22b", *flags)) in {0, 1}
    options = json.loads(capsys.readouterr().out)["options"]
    (apart,) = [option for option in options if option["prefill"]]
    assert apart["num_devices"] <= 6
    stages = apart["prefill"]["pipeline_parallel_size"]
    assert stages > 1 or apart["pipeline_parallel_size"] > 1
    assert apart["predicted"]["num_requests"] > 0
    assert apart["handover_s"] > 0.0


def test_a_plan_shows_the_best_placement_of_the_phases(capsys) -> None:
    flags = ("--hardware", "h100x2", "--rate", "10", "--input", "1000", "--output", "20")
    assert main(("plan", "llama-3.2-1b", *flags, "--json")) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    (apart,) = [option for option in options if option["prefill"]]
    assert apart["prefill"] == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "num_engines": 1,
    }
    assert apart["num_devices"] == 2
    assert 0.0 < apart["handover_s"] < 0.01
    assert options[0]["prefill"] is None  # one device is cheaper
    assert main(("plan", "llama-3.2-1b", *flags)) == 0
    text = capsys.readouterr().out
    assert (
        "1P TP 1, 1D TP 1: KV goes from engines that prefill (P) to engines that decode (D)" in text
    )
    assert main(("plan", "llama-3.2-1b", *flags[2:], "--hardware", "h100", "--json")) == 0
    assert not any(option["prefill"] for option in json.loads(capsys.readouterr().out)["options"])


@pytest.mark.parametrize("targets", [Targets(tpot_s=1e-5), Targets(ttft_s=1e-5)])
def test_without_a_placement_in_time_the_one_with_the_highest_rate_counts(targets) -> None:
    found = best_placement([engine()], LOAD, targets, 4)
    assert found is not None
    assert placement_capacity(found[0], LOAD, targets) == 0.0


def test_a_draft_model_shortens_decoding_and_lengthens_prompts_and_transfers() -> None:
    small = find_model("llama-3.2-1b")
    sizes = DraftSizes(small, ElementBytes(2, 8))
    draft = DraftModel(SpeculationMethod.DRAFT, sizes, 0.9)
    limits = EngineLimits(num_speculative_tokens=3)
    hardware = find_hardware("h100x8", read_hardware())
    spec = find_model("llama-3.1-8b")
    plain, drafting = (
        fit(spec, hardware, Split(), ElementBytes(2, 8), LOAD, limits, drafts=some)
        for some in ((), (draft,))
    )
    before = placement_state(Placement(plain, 1, plain, 1), replace(LOAD, rate=0.5))
    after = placement_state(Placement(drafting, 1, drafting, 1), replace(LOAD, rate=0.5))
    assert before is not None and after is not None
    assert after.tokens_per_step > 3 and after.tpot_s < 0.7 * before.tpot_s
    assert after.ttft_s > before.ttft_s
    both = Placement(drafting, 1, drafting, 1).pools.kv_link(drafting).kv_bytes_per_token
    assert both == kv_bytes_per_token(spec, 2, "auto") + kv_bytes_per_token(small, 2, "auto")


def test_placements_of_the_phases_are_planned_with_adapters_and_drafts(capsys) -> None:
    command = ["plan", "llama-3.2-3b", "--hardware", "l4x2", "--rate", "1", "--max-loras", "4"]
    lengths = ["--input", "400", "--output", "20", "--json"]
    drafts = ["--speculative-model", "llama-3.2-1b", "--num-speculative-tokens", "3"]
    main([*command, *lengths, *drafts, "--acceptance", "0.9"])
    options = json.loads(capsys.readouterr().out)["options"]
    (apart,) = [option for option in options if option["prefill"]]
    assert apart["predicted"]["num_incomplete"] == 0
    assert apart["predicted"]["tpot_s"]["p50"] < engine().costs.seconds(StepLoad(1, 1, 400, 400))
