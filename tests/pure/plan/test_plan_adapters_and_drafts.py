"""Adapters and draft models in plans: memory, step times, the simulation, the answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from quickstep.cli.main import main
from quickstep.config import LoRAConfig, SpeculationMethod
from quickstep.core.cost_model import StepLoad
from quickstep.engine.adapters import adapter_memory
from quickstep.errors import ConfigError
from quickstep.model.sizing import DraftSizes, ElementBytes, kv_bytes_per_token, weight_bytes
from quickstep.plan.candidates import (
    Candidate,
    DraftModel,
    EngineLimits,
    Load,
    LoRASizes,
    fit,
    steady_state,
)
from quickstep.plan.formulas import Split, accepted_tokens
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.sim.drafts import SimulatedDrafts, SimulatedModel
from quickstep.types import Phase, StepPlan, StepRow

SPEC, SMALL = find_model("llama-3.1-8b"), find_model("llama-3.2-1b")
BF16 = ElementBytes(2, 8)
LOAD = Load(2.0, 1000, 300)
PLAN = (
    *("plan", "llama-3.1-8b", "--hardware", "h100", "--rate", "2"),
    *("--input", "200", "--output", "40", "--json"),
)


def sized(split: Split | None = None, **extras) -> Candidate:
    hardware = find_hardware("h100x8", read_hardware())
    return fit(SPEC, hardware, split or Split(), BF16, LOAD, EngineLimits(), **extras)


def rows(candidate: Candidate) -> dict[str, int]:
    return {row.label: row.num_bytes for row in candidate.memory.rows}


def test_adapters_take_what_the_engine_reserves_for_them(tmp_path) -> None:
    planned = rows(sized(loras=LoRASizes(6)))["adapters"]
    lora = LoRAConfig(max_loras=6, allowed_dirs=(str(tmp_path),))
    assert planned == adapter_memory(lora, SPEC, BF16.dtype, ())
    some = rows(sized(loras=LoRASizes(6, targets=("q_proj", "v_proj"))))["adapters"]
    assert some == 6 * 16 * 2 * 32 * (2 * 4096 + 4096 + 1024)
    # an adapter's A is on each device where the columns are divided, and its B where the rows are
    divided = rows(sized(Split(2), loras=LoRASizes(6)))["adapters"]
    assert planned / 2 < divided < planned
    with pytest.raises(ConfigError, match="has no linear layer w1; known are down_proj"):
        LoRASizes(1, targets=("w1",)).bytes_each(SPEC, 2)


def test_rows_read_their_adapters_but_none_twice() -> None:
    costs = sized(loras=LoRASizes(4)).costs
    one, four, many = (
        costs.parts(StepLoad(n, n, n, n, num_adapter_rows=n)).weights_read_s for n in (1, 4, 64)
    )
    assert one < four == many
    without = sized().costs.parts(StepLoad(64, 64, 64, 64)).weights_read_s
    hardware = find_hardware("h100", read_hardware())
    read_s = rows(sized(loras=LoRASizes(4)))["adapters"] / hardware.bytes_per_s
    assert many - without == pytest.approx(read_s)


def draft(acceptance: float = 0.8) -> DraftModel:
    return DraftModel(SpeculationMethod.DRAFT, DraftSizes(SMALL, BF16), acceptance)


def heads(acceptance: float = 0.8, num_heads: int = 3) -> DraftModel:
    sizes = DraftSizes(None, replace(BF16, weights=300_000_000), num_heads=num_heads)
    return DraftModel(SpeculationMethod.MEDUSA, sizes, acceptance)


def test_a_draft_model_takes_its_weights_and_as_many_kv_blocks() -> None:
    with_draft = sized(drafts=[draft()])
    found = rows(with_draft)
    assert found["draft weights"] == weight_bytes(SMALL, 2)
    num_tokens = 16 * with_draft.memory.num_blocks
    assert found["draft KV cache"] == num_tokens * kv_bytes_per_token(SMALL, 2)
    assert found["KV cache"] == num_tokens * kv_bytes_per_token(SPEC, 2)
    assert sum(found.values()) == with_draft.hardware.memory_bytes
    both = rows(sized(drafts=[draft(), heads()]))
    assert both["draft weights"] == found["draft weights"] + 300_000_000


def test_the_balance_uses_drafts_where_they_pay() -> None:
    plain, good = steady_state(sized(), LOAD), steady_state(sized(drafts=[draft(0.9)]), LOAD)
    assert plain is not None and good is not None
    assert good.tokens_per_step == pytest.approx(accepted_tokens(4, 0.9)) == pytest.approx(4.0951)
    assert good.tpot_s < 0.8 * plain.tpot_s
    bad = steady_state(sized(drafts=[draft(0.05)]), LOAD)
    assert bad is not None
    assert bad.tokens_per_step == 1.0
    assert accepted_tokens(4, 1.0) == 5.0
    assert accepted_tokens(4, 0.0) == 1.0


def test_of_several_models_the_balance_uses_the_one_that_pays_most() -> None:
    good = steady_state(sized(drafts=[draft(0.9)]), LOAD)
    both = steady_state(sized(drafts=[draft(0.9), heads(0.1)]), LOAD)
    assert good is not None and both is not None
    assert both.tokens_per_step == good.tokens_per_step
    other = steady_state(sized(drafts=[draft(0.1), heads(0.9)]), LOAD)
    assert other is not None
    assert other.tokens_per_step == accepted_tokens(3, 0.9)  # as many as there are heads


def row(num_drafts: int, num_next_drafts: int) -> StepRow:
    places = {"num_drafts": num_drafts, "num_next_drafts": num_next_drafts}
    return StepRow(0, 10, 5, (0,) * 5, (), Phase.DECODE, True, 3, **places)


def simulated(*models: tuple[str, float, float]) -> SimulatedDrafts:
    """Models of a name, an acceptance, and seconds of a step."""
    return SimulatedDrafts(
        [SimulatedModel(name, rate, lambda load, s=s: s) for name, rate, s in models], Random(0)
    )


def test_simulated_drafts_are_accepted_by_chance_one_after_the_other() -> None:
    drafts = simulated(("draft", 0.5, 0.001))
    counts = []
    for step in range(4001):
        outputs, seconds = drafts.step(StepPlan(step, (row(4 if step else 0, 4),)), 0.01, 0)
        assert len(outputs[0].draft_token_ids) == 4
        assert seconds == 0.004
        counts.append(len(outputs[0].token_ids))
    assert sum(counts[1:]) / 4000 == pytest.approx(accepted_tokens(4, 0.5), rel=0.03)
    assert set(counts) == {1, 2, 3, 4, 5}


def test_the_seconds_of_simulated_drafts_are_those_of_the_models_steps() -> None:
    costs = sized().costs
    model = SimulatedModel("draft", 0.5, costs.seconds)
    _, seconds = SimulatedDrafts([model], Random(0)).step(StepPlan(0, (row(0, 4),)), 0.01, 0)
    expected = sum(costs.seconds(StepLoad.of_span(15 + place, 1)) for place in range(4))
    assert seconds == pytest.approx(expected)
    few = SimulatedModel("medusa", 0.5, costs.seconds, computes_prompts=False, most_drafts=2)
    outputs, seconds = SimulatedDrafts([few], Random(0)).step(StepPlan(0, (row(0, 4),)), 0.01, 0)
    assert len(outputs[0].draft_token_ids) == 2
    assert seconds == pytest.approx(sum(costs.seconds(StepLoad.of_span(p, 1)) for p in (15, 16)))


@pytest.mark.parametrize("good", ["draft", "medusa"])
def test_of_several_simulated_models_the_better_one_drafts(good: str) -> None:
    models = [(name, 0.9 if name == good else 0.1, 0.0005) for name in ("draft", "medusa")]
    drafts = simulated(*models)
    calls, num_tokens = 0.0, 0
    for step in range(400):
        outputs, seconds = drafts.step(StepPlan(step, (row(4 if step else 0, 4),)), 0.01, 0)
        calls, num_tokens = calls + seconds / 0.002, num_tokens + len(outputs[0].token_ids)
    assert calls < 1.1 * 400  # one of the two, and trials
    assert num_tokens / 400 == pytest.approx(accepted_tokens(4, 0.9), rel=0.1)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main((*PLAN, *argv)) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_has_adapters_and_drafts_in_memory_times_and_explanation(capsys) -> None:
    plain = answer(capsys)["options"][0]["predicted"]["tpot_s"]["p50"]
    loras = answer(capsys, "--max-loras", "8", "--lora-rank", "64", "--explain")
    assert loras["options"][0]["predicted"]["tpot_s"]["p50"] > plain
    assert "adapters" in {row["label"] for row in loras["memory"]}
    assert "adapters of a device" in {line["what"] for line in loras["explanation"]}
    flags = ("--speculative-model", "llama-3.2-1b", "--acceptance", "0.9", "--explain")
    drafted = answer(capsys, *flags)
    assert drafted["options"][0]["predicted"]["tpot_s"]["p50"] < 0.8 * plain
    assert {"draft weights", "draft KV cache"} <= {row["label"] for row in drafted["memory"]}
    lines = {line["what"]: line["result"] for line in drafted["explanation"]}
    assert "x as fast" in lines["drafts, batch 1"]


def test_a_plan_has_all_of_several_models_that_draft(capsys, tmp_path) -> None:
    parameters = _write_heads(tmp_path, num_heads=3, hidden_size=4096)
    one = ("--speculative-model", "llama-3.2-1b")
    more = (*one, "--speculative-model", str(tmp_path), "--acceptance", "0.1")
    found = answer(capsys, *more, "--acceptance", "0.9", "--explain")
    weights = {row["label"]: row["num_bytes"] for row in found["memory"]}["draft weights"]
    alone = {row["label"]: row["num_bytes"] for row in answer(capsys, *one)["memory"]}
    assert weights == alone["draft weights"] + 2 * parameters
    lines = {line["what"]: line["formula"] for line in found["explanation"]}
    assert "p = 0.1" in lines["drafts of draft, batch 1"]
    assert "+ 3 draft steps" in lines["drafts of medusa, batch 1"]
    slow = answer(capsys, *more, "--acceptance", "0.1")["options"][0]["predicted"]["tpot_s"]["p50"]
    assert found["options"][0]["predicted"]["tpot_s"]["p50"] < 0.7 * slow


def test_a_plan_has_the_prediction_layer_of_the_model(capsys, tmp_path) -> None:
    """The sizes of GLM-4.5-Air: a layer is a mixture of 128 experts, `fc` and norms come to it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_GLM))
    flags = ("--hardware", "h100x8", "--rate", "1", "--input", "200", "--output", "40", "--json")

    def planned(*more: str) -> dict[str, object]:
        assert main(("plan", str(path), *flags, *more)) == 0
        return json.loads(capsys.readouterr().out)

    plain = planned()["options"][0]["predicted"]["tpot_s"]["p50"]
    found = planned("--speculative-method", "mtp", "--acceptance", "0.8")
    labels = {row["label"]: row["num_bytes"] for row in found["memory"]}
    size, width, queries, keys = 4096, 1408, 96 * 128, 8 * 128
    attention = size * (2 * queries + 2 * keys) + queries + 2 * keys
    experts = 129 * 3 * size * width + 128 * size + 128
    assert labels["draft weights"] == 2 * (attention + experts + 2 * size * size + 5 * size)
    assert labels["draft KV cache"] > 0
    assert found["options"][0]["predicted"]["tpot_s"]["p50"] < plain
    assert main((*PLAN, "--speculative-method", "mtp")) == 2
    assert "counts no prediction layer" in capsys.readouterr().err


_GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def _write_heads(folder: Path, num_heads: int, hidden_size: int) -> int:
    """A checkpoint of Medusa heads without projections, its data a hole; how many parameters."""
    entries, size = {}, 2 * hidden_size * hidden_size
    for head in range(num_heads):
        entries[f"{head}.0.linear.weight"] = {
            "dtype": "BF16",
            "shape": [hidden_size, hidden_size],
            "data_offsets": [head * size, (head + 1) * size],
        }
    header = json.dumps(entries).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + num_heads * size)
    return num_heads * hidden_size * hidden_size


def test_bad_drafts_and_adapters_are_one_sentence(capsys) -> None:
    for flags, sentence in (
        (("--speculative-model", "lama-1b"), "model lama-1b is neither a config.json"),
        (("--acceptance", "1.5"), "--acceptance: 1.5 is above 1"),
        (
            ("--speculative-model", "llama-3.2-1b", "--acceptance", "0.5", "--acceptance", "0.6"),
            "--acceptance is given 2 times and --speculative-model 1 times",
        ),
        (
            ("--speculative-model", "llama-3.2-1b", "--speculative-model", "llama-3.2-3b"),
            "--speculative-model llama-3.2-1b and llama-3.2-3b are both of the method draft",
        ),
        (("--max-loras", "2", "--lora-targets", "w1"), "the model has no linear layer w1"),
    ):
        assert main((*PLAN, *flags)) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert len(error.splitlines()) == 1
