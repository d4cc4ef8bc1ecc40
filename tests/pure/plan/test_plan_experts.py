"""Expert parallelism: memory of a device, what steps read and send, and impossible splits."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from quickstep.cli.main import main
from quickstep.core.cost_model import StepLoad
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_schema import layer_tensors, outer_tensors
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.sizing import ElementBytes, weight_bytes
from quickstep.plan.candidates import Candidate, EngineLimits, Load, fit, splits
from quickstep.plan.formulas import (
    Split,
    all_to_all_s,
    check_split,
    expert_splits,
    fullest_share,
    rank_spec,
    router_rest,
)
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model

MIXTRAL, QWEN = find_model("mixtral-8x7b"), find_model("qwen3-30b-a3b")
TABLE = read_hardware()
MIXTURES = ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"]


def sized(split: Split, spec: ModelSpec = MIXTRAL, link: str | None = None) -> Candidate:
    hardware = find_hardware("h100x8", TABLE, link)
    return fit(spec, hardware, split, ElementBytes(2, 8), Load(1.0, 1000, 300), EngineLimits())


def held_by_hand(spec: ModelSpec, split: Split) -> int:
    """Bytes of a device: complete experts, a part of every other matrix, all norms and routers."""
    assert spec.moe is not None
    shapes = outer_tensors(spec, "", "head")
    for index in range(spec.num_layers):
        shapes |= layer_tensors(spec, "", index)
    total = 0
    for name, shape in shapes.items():
        elements = 1
        for size in shape:
            elements *= size
        if f".{spec.naming.experts}." in name:
            elements *= (
                1
                if int(name.split(f".{spec.naming.experts}.")[1].split(".")[0])
                < (spec.moe.num_experts // split.experts)
                else 0
            )
        elif len(shape) > 1 and f"{spec.naming.router}.weight" not in name:
            elements //= split.tensor
        total += 2 * elements
    return total


@pytest.mark.parametrize("name", MIXTURES)
def test_a_device_holds_complete_experts_the_router_and_a_part_of_the_rest(name: str) -> None:
    spec = find_model(name)
    for split in (Split(1, 1, 2, 2), Split(1, 1, 8, 8)):
        rank = rank_spec(spec, split)
        held = weight_bytes(rank, 2) + 2 * router_rest(spec, split)
        assert held == held_by_hand(spec, split)
        (row,) = [one for one in sized(split, spec).memory.rows if one.label == "weights"]
        assert row.num_bytes == held
        assert "experts in each layer" in row.detail


def test_experts_of_a_tensor_group_take_as_much_memory_as_parts_of_all_experts() -> None:
    apart, in_parts = sized(Split(4, experts=4)), sized(Split(4))
    assert apart.memory.rows[0].num_bytes == pytest.approx(in_parts.memory.rows[0].num_bytes)


def test_a_size_that_no_expert_divides_by_columns_may_divide_the_experts() -> None:
    narrow = replace(QWEN, moe=replace(QWEN.moe, intermediate_size=762))
    with pytest.raises(ConfigError, match="4 does not divide the model's 762 columns of an expert"):
        check_split(narrow, Split(4))
    check_split(narrow, Split(4, experts=4))


def test_impossible_splits_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match="divides experts, and this model has none"):
        check_split(find_model("llama-3-8b"), Split(2, experts=2))
    with pytest.raises(ConfigError, match="size of 16 does not divide the model's 8 experts"):
        check_split(MIXTRAL, Split(1, 1, 16, 16))
    with pytest.raises(ConfigError, match="over the 2 devices of a tensor-parallel group, or over"):
        check_split(MIXTRAL, Split(2, 1, 4, 4))
    assert expert_splits(MIXTRAL, Split(2, 1, 2)) == [Split(2, 1, 2, 2), Split(2, 1, 2, 4)]
    assert expert_splits(MIXTRAL, Split()) == []
    assert {one.experts for one in splits(MIXTRAL, 4)} == {1, 2, 4}
    assert {one.experts for one in splits(find_model("llama-3-8b"), 4)} == {1}


def test_replicas_that_share_experts_read_fewer_and_send_tokens() -> None:
    load = StepLoad(64, 64, 64_000, 64_000)
    whole, shared = (sized(one).costs.parts(load) for one in (Split(2, 1, 4), Split(2, 1, 4, 8)))
    assert shared.weights_read_s < 0.6 * whole.weights_read_s
    assert shared.transfer_s > whole.transfer_s
    slow = sized(Split(2, 1, 4, 8), link="100gbe").costs.parts(load)
    assert slow.transfer_s > 3 * shared.transfer_s
    # 2 ways x 32 layers x 64 / 2 tokens x 2 experts x 4096 x 2 bytes x 7 / 8, and all-gathers
    alone = sized(Split(1, 1, 8, 8)).costs.parts(load).transfer_s
    link = find_hardware("h100", TABLE)
    there = all_to_all_s(64 * 2 * 4096 * 2, 8, link.link_bytes_per_s, link.link.latency_us * 1e-6)
    assert alone == pytest.approx(2 * 32 * there)


def test_a_step_waits_for_the_fullest_device() -> None:
    assert fullest_share(100, 1) == 1.0
    assert 6.0 < fullest_share(1, 8) <= 8.0 == fullest_share(0.1, 8)
    assert 1.0 < fullest_share(10_000, 8) < 1.1 < fullest_share(100, 8) < 2.0


def test_plans_list_splits_of_experts_and_explain_them(capsys) -> None:
    flags = ("--hardware", "h100x2", "--rate", "4", "--input", "200", "--output", "20", "--json")
    code = main(("plan", "mixtral-8x7b", *flags, "--enable-expert-parallel", "--explain"))
    plan = json.loads(capsys.readouterr().out)
    assert code == 0
    mixed = [option for option in plan["options"] if option["prefill"] is None]
    assert all(one["expert_parallel_size"] == 2 for one in mixed)
    explained = {line["what"]: line["result"] for line in plan["explanation"]}
    assert explained["experts of a device"] == "4 experts a layer"
    assert ("all-to-all of a token" in explained) is (mixed[0]["tensor_parallel_size"] == 1)
    assert main(("plan", "llama-3-8b", "--hardware", "h100", "--enable-expert-parallel")) == 2
    assert "llama-3-8b has none; leave --enable-expert-parallel out" in capsys.readouterr().err


def test_parallelism_of_a_mixture_is_compared_with_experts_apart(capsys) -> None:
    flags = ("--hardware", "h100x8", "--compare-parallelism", "--json")
    assert main(("plan", "mixtral-8x7b", *flags)) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["one device"]["reason"]
    assert rows["data (replicas)"]["reason"]  # complete weights do not fit
    assert not rows["data, experts apart"]["reason"]
    assert rows["tensor, experts apart"]["prefill_s"] > rows["tensor"]["prefill_s"]
