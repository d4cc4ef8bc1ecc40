"""Engines that draft with a model or with Medusa heads generate what they generate without."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quickstep import LLM, SamplingParams
from quickstep.config import (
    EngineConfig,
    LoadConfig,
    ProposerConfig,
    SpeculationConfig,
    SpeculationMethod,
)
from quickstep.engine.assembly import load_weights
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.runtime.speculation.methods import method_of_tensors

PROMPTS = ["def add(first, second):\n    return", "import os\nimport sys\n\nclass Reader:"]
OPTIONS = {"max_model_len": 256, "num_blocks": 64}


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory):
    """The demo model with some noise, as its own draft model: right often, not always."""
    source = find_checkpoint(LoadConfig("demo")).path
    path = tmp_path_factory.mktemp("draft")
    for file in source.iterdir():
        if file.suffix == ".json":
            (path / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(0)
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("down_proj.weight"):
            weights[name] = weight + 0.02 * torch.randn(
                weight.shape, generator=generator, dtype=torch.float32
            ).to(weight.dtype)
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def medusa_path(tmp_path_factory):
    """Two heads that repeat what the model predicts: its projection, without a change."""
    source = find_checkpoint(LoadConfig("demo")).path
    projection = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    size = projection.shape[1]
    weights = {}
    for head in range(2):
        weights[f"{head}.0.linear.weight"] = torch.zeros(size, size, dtype=projection.dtype)
        weights[f"{head}.1.weight"] = projection.clone()
    path = tmp_path_factory.mktemp("medusa")
    save_file(weights, path / "model.safetensors")
    return path


def outputs(speculation, sampling, prompts=PROMPTS):
    """The tokens and logprobs of each prompt, and the numbers of drafts checked and accepted."""
    with LLM("demo", speculative_config=speculation, **OPTIONS) as llm:
        generated = llm.generate(prompts, sampling)
        totals = llm.engine.stats().scheduler.totals
        tokens = [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in generated]
        return tokens, totals.num_drafts, totals.num_accepted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["draft", "medusa"])
def test_tokens_and_logprobs_are_those_without_drafts(method, temperature, draft_path, medusa_path):
    sampling = SamplingParams(temperature=temperature, max_tokens=40, seed=5, logprobs=1)
    path = draft_path if method == "draft" else medusa_path
    config = {"method": method, "model": str(path), "num_speculative_tokens": 3}
    tokens, num_drafts, num_accepted = outputs(config, sampling)
    assert tokens == outputs({"method": "off"}, sampling)[0]
    assert num_drafts > num_accepted
    assert num_accepted > 0 or method == "medusa"


def test_a_draft_model_is_in_the_memory_plan(draft_path):
    proposer = ProposerConfig(model=str(draft_path), quantization="int8")
    speculation = SpeculationConfig((proposer,))
    config = EngineConfig(load=LoadConfig("demo"), speculation=speculation, max_model_len=256)
    rows = {row.label: row.num_bytes for row in load_weights(config, None).plan.rows}
    assert 0 < rows["draft weights"] < 0.7 * rows["weights"]
    assert rows["draft KV cache"] == rows["KV cache"]


def test_medusa_heads_are_in_the_memory_plan(medusa_path):
    speculation = SpeculationConfig((ProposerConfig(SpeculationMethod.MEDUSA, str(medusa_path)),))
    config = EngineConfig(load=LoadConfig("demo"), speculation=speculation, max_model_len=256)
    rows = {row.label: row.num_bytes for row in load_weights(config, None).plan.rows}
    with safe_open(medusa_path / "model.safetensors", "pt") as file:
        elements = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert rows["draft weights"] == elements * 2
    assert "draft KV cache" not in rows


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (["model.embed_tokens.weight", "lm_head.weight"], SpeculationMethod.DRAFT),
        (["0.0.linear.weight", "0.1.weight"], SpeculationMethod.MEDUSA),
        (["medusa_heads.0.0.linear.weight"], SpeculationMethod.MEDUSA),
        (["fc.weight", "layers.0.mlp.down_proj.weight"], SpeculationMethod.EAGLE),
        (["fc.weight", "midlayer.mlp.down_proj.weight", "d2t"], SpeculationMethod.EAGLE3),
    ],
)
def test_auto_finds_out_what_the_checkpoint_is(names, method):
    assert method_of_tensors(names) is method


@pytest.mark.parametrize("kind", ["draft", "medusa"])
def test_auto_combines_the_model_with_what_needs_none(kind, draft_path, medusa_path):
    sampling = SamplingParams(temperature=0.0, max_tokens=40, seed=5)
    prompts = [*PROMPTS, "numbers = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,"]
    path = draft_path if kind == "draft" else medusa_path
    config = {"method": "auto", "model": str(path), "num_speculative_tokens": 3}
    tokens, num_drafts, num_accepted = outputs(config, sampling, prompts)
    assert tokens == outputs({"method": "off"}, sampling, prompts)[0]
    assert num_drafts > num_accepted > 0


def test_a_method_and_a_model_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="draft needs --speculative-model"):
        ProposerConfig(SpeculationMethod.DRAFT)
    with pytest.raises(ConfigError, match="ngram uses no model"):
        ProposerConfig(SpeculationMethod.NGRAM, "a")
