"""Prediction layers of a model's own checkpoint: what they draft, and that they change no token."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import prediction_layers as layers
import pytest
import torch
from golden_cases import Case
from safetensors.torch import load_file
from tiny_checkpoint import VOCAB, write_tokenizer

from quickstep import LLM, SamplingParams
from quickstep.config import ProposerConfig, SpeculationConfig, SpeculationMethod
from quickstep.engine.assembly import load_weights
from quickstep.engine.llm import engine_config
from quickstep.engine.speculation import open_model_proposers
from quickstep.errors import ConfigError
from quickstep.runtime.cache.kv_cache import allocate_kv

PROMPTS = ["It is a truth universally acknowledged", "that a single man in", "possession of"]
OPTIONS: dict[str, Any] = {"max_model_len": 128, "num_blocks": 64, "num_threads": 1}
MTP = {"method": "mtp", "num_speculative_tokens": 3}

_SCRIPT = """
import json
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refusing())
from quickstep import LLM, SamplingParams

config = {"method": "mtp", "num_speculative_tokens": 3}
with LLM(sys.argv[1], speculative_config=config, num_threads=1, num_blocks=64) as llm:
    llm.generate(["abc def"], SamplingParams(max_tokens=20, ignore_eos=True))
    print(json.dumps(llm.engine.stats().scheduler.totals.num_drafts))
"""


@pytest.mark.parametrize("case", layers.ALL, ids=lambda case: case.name)
@pytest.mark.parametrize("chunks", [(11,), (4, 6, 1)], ids=str)
def test_drafts_are_those_of_transformers(
    case: Case, chunks: tuple[int, ...], tmp_path: Path
) -> None:
    layer = layers.write_with_layer(tmp_path, case)
    token_ids = tuple(range(40, 52))
    hidden = layer.hidden(token_ids[:-1])
    drafts = layers.drafted(tmp_path, token_ids, hidden, chunks)
    assert drafts == layer.drafts(token_ids, hidden, 6)


def served_case(case: Case) -> Case:
    sizes = {"vocab_size": VOCAB, "eos_token_id": 256}
    return replace(case, values=case.values | sizes)


@pytest.fixture(scope="module", params=layers.ALL, ids=lambda case: case.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param.name)
    layers.write_with_layer(path, served_case(request.param))
    write_tokenizer(path)
    return path


def outputs(path: Path, speculation: object, **options: object) -> tuple[list[Any], int, int]:
    """The tokens and logprobs of each prompt, and how many drafts were checked and accepted."""
    sampling = SamplingParams(temperature=0.8, max_tokens=24, seed=5, logprobs=1, ignore_eos=True)
    with LLM(str(path), speculative_config=speculation, **(OPTIONS | options)) as llm:
        prompts = [*PROMPTS, PROMPTS[0] + " first"]  # hits the prefix cache, if there is one
        found = llm.generate(prompts, sampling) + llm.generate(prompts, sampling)
        totals = llm.engine.stats().scheduler.totals
        tokens = [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]
        return tokens, totals.num_drafts, totals.num_accepted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"num_blocks": 9, "block_size": 8, "max_model_len": 72},
        {"enforce_eager": True},
        {"quantization": "int8"},
    ],
    ids=["plain", "chunked", "preempted", "eager", "int8"],
)
def test_tokens_and_logprobs_are_those_without_drafts(
    checkpoint: Path, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    tokens, num_drafts, _ = outputs(checkpoint, MTP, **options)
    assert tokens == outputs(checkpoint, {"method": "off"}, **options)[0]
    assert num_drafts > 0
    assert "speculation is off" not in caplog.text


def test_a_layer_drafts_for_stages_of_ranks_what_it_drafts_for_one_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers.write_with_layer(tmp_path, served_case(layers.DEEPSEEK))
    write_tokenizer(tmp_path)
    split = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    tokens, num_drafts, _ = outputs(tmp_path, MTP, **split)
    assert tokens == outputs(tmp_path, {"method": "off"})[0]
    assert num_drafts > 0
    assert "speculation is off" not in caplog.text


def test_a_layer_drafts_where_torch_is_not_installed(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) > 0


@pytest.mark.parametrize("reads", ["embedding", "hidden"])
@pytest.mark.parametrize("case", layers.ALL, ids=lambda case: case.name)
def test_all_drafts_of_a_layer_that_agrees_are_accepted(
    case: Case, reads: str, tmp_path: Path
) -> None:
    """Layers add nothing, and states are one of the basis: the token after t is the next in a
    circle. A layer that reads the embedding of the newest token passes it on; one that reads the
    hidden state before it moves that on by one token.
    """
    size, vocab_size = 96, 96
    case = replace(case, values=case.values | {"hidden_size": size, "vocab_size": vocab_size})
    layers.write_with_layer(tmp_path, case)
    write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    one, next_one = torch.eye(size), torch.eye(size).roll(1, 0)
    changes: dict[str, torch.Tensor | None] = {}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")):
            changes[name] = torch.zeros_like(tensor)
        elif name.endswith(("norm.weight", "norm_f.weight")) and tensor.shape == (size,):
            changes[name] = torch.full((size,), float(not case.family.startswith("Qwen3")))
        elif name.endswith(("fc.weight", "eh_proj.weight", "input_proj.weight")):
            parts = (one, 0 * one) if reads == "embedding" else (0 * one, next_one)
            changes[name] = torch.cat(parts[::-1] if case.name == "mimo" else parts, 1)
    embedding = next(name for name in tensors if "embed" in name)
    changes |= {embedding: one, "lm_head.weight": next_one}
    layers.change_tensors(tmp_path, changes)
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 90, 17, 30]}
    with LLM(str(tmp_path), speculative_config=MTP, **OPTIONS) as llm:
        [output] = llm.generate([prompt], sampling)
        totals = llm.engine.stats().scheduler.totals
    assert list(output.outputs[0].token_ids) == [(31 + step) % size for step in range(60)]
    assert totals.num_accepted == totals.num_drafts > 0


@pytest.mark.parametrize("case", [layers.QWEN, layers.GLM], ids=lambda case: case.name)
def test_the_memory_plan_has_what_is_allocated_for_the_layer(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers.write_with_layer(tmp_path, case)
    config = engine_config(str(tmp_path), OPTIONS | {"speculative_config": MTP})
    loaded = load_weights(config, None)
    rows = {row.label: row.num_bytes for row in loaded.plan.rows}
    stored = load_file(tmp_path / "model.safetensors")
    start = "mtp." if case is layers.QWEN else "model.layers.3."
    own = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith(start))
    assert rows["draft weights"] == own
    allocated = []

    def allocate(*arguments: Any) -> Any:
        allocated.append(allocate_kv(*arguments))
        return allocated[-1]

    monkeypatch.setattr("quickstep.runtime.cache.kv_cache.allocate_kv", allocate)
    open_model_proposers(config, loaded.model, loaded.plan, tmp_path)
    (cache,) = allocated
    assert rows["draft KV cache"] == sum(one.nbytes for one in (*cache.keys, *cache.values))


def test_auto_drafts_with_a_complete_layer_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def names() -> list[str]:
        config = engine_config(str(tmp_path), OPTIONS)
        model = load_weights(config, None).model
        return [
            proposer.name for proposer in open_model_proposers(config, model, layers.PLAN, tmp_path)
        ]

    caplog.set_level(logging.INFO)
    layers.write_with_layer(tmp_path, layers.QWEN)
    assert names() == ["mtp"]
    assert "not used" not in caplog.text
    layers.change_tensors(tmp_path, {"mtp.layers.0.mlp.up_proj.weight": None})
    assert names() == []
    assert "not used: no token depends on it" in caplog.text
    assert "lacks the prediction layer" not in caplog.text
    with pytest.raises(ConfigError, match=r"mtp\.layers\.0\.mlp\.up_proj\.weight' is missing"):
        open_model_proposers(
            engine_config(str(tmp_path), OPTIONS | {"speculative_config": MTP}),
            load_weights(engine_config(str(tmp_path), OPTIONS), None).model,
            layers.PLAN,
            tmp_path,
        )


def test_a_checkpoint_that_lost_its_layer_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers.QWEN.save(tmp_path)
    layers.change_config(tmp_path, {"mtp_num_hidden_layers": 1})
    caplog.set_level(logging.INFO)
    load_weights(engine_config(str(tmp_path), OPTIONS), None)
    assert "lacks the prediction layer of its model" in caplog.text
    with pytest.raises(ConfigError, match=r"no tensors of a prediction layer.*quantizers often"):
        load_weights(engine_config(str(tmp_path), OPTIONS | {"speculative_config": MTP}), None)


def test_a_model_of_another_kind_has_no_such_layer() -> None:
    with pytest.raises(ConfigError, match="no tensors of a prediction layer"):
        load_weights(engine_config("demo", OPTIONS | {"speculative_config": MTP}), None)
    with pytest.raises(ConfigError, match="--speculative-method mtp uses no model"):
        ProposerConfig(SpeculationMethod.MTP, "demo")


def test_the_names_of_families_in_vllm_are_the_method() -> None:
    for name in ("mtp", "qwen3_next_mtp", "deepseek_mtp"):
        fields = {"method": name, "num_speculative_tokens": 2}
        config = SpeculationConfig.of_fields(fields, "--speculative-config")
        assert config.proposers == (ProposerConfig(SpeculationMethod.MTP),)
