"""EAGLE layers in the published layouts: what they draft, and that they change no token."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from quickstep import LLM, SamplingParams
from quickstep.config import (
    EngineConfig,
    LoadConfig,
    ProposerConfig,
    SpeculationConfig,
    SpeculationMethod,
)
from quickstep.engine.assembly import load_weights
from quickstep.engine.speculation import open_eagle
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.eagle import load_eagle, read_eagle_spec
from quickstep.ops.tensors import BFLOAT16, HostTensor
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.speculation.eagle import EagleProposer, num_scratch_blocks
from quickstep.runtime.speculation.proposer import ComputedRow, ComputedStep, DraftTask
from quickstep.types import Admission, Phase, StepRow

BLOCK_SIZE, NUM_BLOCKS, DRAFT_VOCABULARY = 4, 32, 1000
OPTIONS = {"max_model_len": 256, "num_blocks": 64}
PROMPTS = ["def add(first, second):\n    return", "import os\nimport sys\n\nclass Reader:"]


@pytest.fixture(scope="module")
def target():
    return load_weights(EngineConfig(load=LoadConfig("demo"), max_model_len=128), None).model


def layer_weights(fused, prefix):
    """A random layer of the demo's sizes."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        values = torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])
        return values.to(torch.bfloat16)

    inputs = 512 if fused else 256
    weights = {
        "fc.weight": random(256, 768 if fused else 512),
        f"{prefix}self_attn.q_proj.weight": random(256, inputs),
        f"{prefix}self_attn.k_proj.weight": random(128, inputs),
        f"{prefix}self_attn.v_proj.weight": random(128, inputs),
        f"{prefix}self_attn.o_proj.weight": random(256, 256),
        f"{prefix}post_attention_layernorm.weight": torch.ones(256, dtype=torch.bfloat16),
        f"{prefix}mlp.gate_proj.weight": random(704, 256),
        f"{prefix}mlp.up_proj.weight": random(704, 256),
        f"{prefix}mlp.down_proj.weight": random(256, 704),
    }
    if fused:
        ids = torch.randperm(4096, generator=generator)[:DRAFT_VOCABULARY].sort().values
        for name in (f"{prefix}hidden_norm", f"{prefix}input_layernorm", "norm"):
            weights[f"{name}.weight"] = torch.ones(256, dtype=torch.bfloat16)
        weights["lm_head.weight"] = random(DRAFT_VOCABULARY, 256)
        weights["d2t"] = ids - torch.arange(DRAFT_VOCABULARY)
        weights["t2d"] = torch.zeros(4096, dtype=torch.bool).index_fill(0, ids, True)
    return weights


def written(folder, weights, **changes):
    config = json.loads((find_checkpoint(LoadConfig("demo")).path / "config.json").read_text())
    config |= {"num_hidden_layers": 1} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def opened(path, target, fused, tree_width=1):
    spec = read_eagle_spec(path, target.spec, fused)
    model = load_eagle(path, spec, target, 128)
    kv = allocate_kv(
        model.kv_layout, NUM_BLOCKS + num_scratch_blocks(1, BLOCK_SIZE), BLOCK_SIZE, model.device
    )
    return EagleProposer(target, model, kv, NUM_BLOCKS, BLOCK_SIZE, tree_width=tree_width)


def check_drafts(drafts, weights, prefix, fused, token_ids, features, num_given=0):
    """Without a KV cache and in float32: all positions again for every draft, which has to be the
    best token but for what the kernels' bfloat16 changes; the first `num_given` may be any.
    """
    w = {name: one.float() for name, one in weights.items()}
    demo = load_file(find_checkpoint(LoadConfig("demo")).path / "model.safetensors")
    embed = demo["model.embed_tokens.weight"].float()
    features = features.float()
    if fused:
        features = features @ w["fc.weight"].T
    tokens = list(token_ids[1:])
    for draft in drafts:
        embedded = embed[tokens]
        if fused:
            residual = features
            parts = (F.rms_norm(embedded, (256,), eps=1e-5), F.rms_norm(features, (256,), eps=1e-5))
            x = torch.cat(parts, -1)
        else:
            residual = x = torch.cat((embedded, features), -1) @ w["fc.weight"].T
        q, k, v = (
            rotated(x @ w[f"{prefix}self_attn.{name}_proj.weight"].T, name) for name in "qkv"
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        mixed = mixed.transpose(0, 1).reshape(-1, 256)
        residual = residual + mixed @ w[f"{prefix}self_attn.o_proj.weight"].T
        x = F.rms_norm(residual, (256,), eps=1e-5)
        gate = F.silu(x @ w[f"{prefix}mlp.gate_proj.weight"].T)
        up = x @ w[f"{prefix}mlp.up_proj.weight"].T
        residual = residual + (gate * up) @ w[f"{prefix}mlp.down_proj.weight"].T
        last = residual[-1]
        if fused:
            logits = w["lm_head.weight"] @ F.rms_norm(last, (256,), eps=1e-5)
            token_of = weights["d2t"] + torch.arange(DRAFT_VOCABULARY)
            index = token_of.tolist().index(draft)
        else:
            logits, index = embed @ last, draft
        if len(tokens) - len(token_ids) + 1 >= num_given:
            assert logits.max() - logits[index] <= 0.05 * logits.std()
        tokens.append(draft)
        features = torch.cat((features, last[None]))


def rotated(x, name):
    x = x.view(x.shape[0], -1, 64)
    if name == "v":
        return x
    angles = torch.outer(torch.arange(x.shape[0]), 10_000.0 ** (-torch.arange(0, 64, 2) / 64))
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def read_layers(path, target, fused):
    """The target's layers whose inputs EAGLE 3 reads."""
    return read_eagle_spec(path, target.spec, fused).aux_layers


def random_features(count, layers=()):
    """Of `layers`, or final hidden states, as a tensor of torch and as they come from a step."""
    generator = torch.Generator().manual_seed(2)
    parts = {layer: torch.randn(count, 256, generator=generator) for layer in {*layers} or {None}}
    features = torch.cat([parts[layer] for layer in layers or (None,)], dim=1).to(torch.bfloat16)
    return features, features.view(torch.int16).numpy().view(np.uint16)


def computed_step(slot, start, bits, blocks, layers=()):
    """One row. Of EAGLE 1 the final hidden states, of EAGLE 3 the inputs of its layers."""
    parts = [HostTensor(bits[:, at : at + 256], BFLOAT16) for at in range(0, bits.shape[1], 256)]
    rows = (ComputedRow(slot, start, bits.shape[0], blocks),)
    if not layers:
        return ComputedStep(rows, parts[0], ())
    of_layer = dict(zip(layers, parts, strict=True))
    aux_hidden = tuple(of_layer[layer] for layer in sorted(of_layer))
    return ComputedStep(rows, None, aux_hidden)


@pytest.mark.parametrize(("fused", "prefix"), [(False, "layers.0."), (True, "midlayer.")])
@pytest.mark.parametrize("chunks", [(11,), (4, 6, 1)])
def test_drafts_are_those_of_the_layer(target, tmp_path, fused, prefix, chunks):
    weights = layer_weights(fused, prefix)
    path = written(tmp_path, weights)
    proposer = opened(path, target, fused)
    token_ids = tuple(range(40, 52))
    layers = read_layers(path, target, fused)
    features, bits = random_features(11, layers)
    proposer.admit(0, Admission(0, "r#0", token_ids[:-1], 11, SamplingParams(temperature=0.0), 3))
    start = 0
    for count in chunks:
        blocks = np.array([2, 5, 3], dtype=np.int32)
        proposer.compute(computed_step(0, start, bits[start : start + count], blocks, layers))
        start += count
    [drafts] = proposer.propose([DraftTask(0, 4, token_ids[-1:])])
    assert len(drafts) == 4
    check_drafts(drafts, weights, prefix, fused, token_ids, features)
    proposer.release(0)
    proposer.release(0)


def test_a_prefix_hit_has_the_keys_and_values_of_the_layer(target, tmp_path):
    weights = layer_weights(False, "layers.0.")
    proposer = opened(written(tmp_path, weights), target, False)
    features, bits = random_features(11)
    token_ids = tuple(range(40, 52))
    greedy = SamplingParams(temperature=0.0)
    for slot, start, last_block in ((0, 0, 3), (1, 8, 7)):
        proposer.admit(slot, Admission(slot, f"r#{slot}", token_ids[:-1], 11, greedy, 3))
        blocks = np.array([2, 5, last_block], dtype=np.int32)
        proposer.compute(computed_step(slot, start, bits[start:], blocks))
        [drafts] = proposer.propose([DraftTask(slot, 3, token_ids[-1:])])
        assert len(drafts) == 3
        check_drafts(drafts, weights, "layers.0.", False, token_ids, features)


@pytest.mark.parametrize(("fused", "prefix"), [(False, "layers.0."), (True, "midlayer.")])
def test_every_path_of_a_tree_is_a_chain_of_the_layer(target, tmp_path, fused, prefix):
    """The first draft after any path is what the layer drafts next if the path is known."""
    weights = layer_weights(fused, prefix)
    path = written(tmp_path, weights)
    layers = read_layers(path, target, fused)
    features, bits = random_features(11, layers)
    token_ids = tuple(range(40, 52))
    greedy = SamplingParams(temperature=0.0)

    def drafted(tree_width, num_drafts):
        proposer = opened(path, target, fused, tree_width)
        proposer.admit(0, Admission(0, "r#0", token_ids[:-1], 11, greedy, 3))
        blocks = np.array([2, 5, 3], dtype=np.int32)
        proposer.compute(computed_step(0, 0, bits, blocks, layers))
        [drafts] = proposer.propose([DraftTask(0, num_drafts, token_ids[-1:])])
        return drafts

    chain, tree = drafted(1, 4), drafted(3, 12)
    assert tree.parents.count(0) > 1
    node = 0
    for draft in chain:  # the first child of each draft is the best one, as in a chain
        children = [one for one, parent in enumerate(tree.parents, 1) if parent == node]
        if not children:
            break
        node = children[0]
        assert tree.token_ids[node - 1] == draft
    assert node, "the tree has the first draft of the chain at least"
    row = StepRow(0, 0, 1, (0,), (), Phase.DECODE, True, 0, parents=tree.parents)
    first_children = {tree.parents.index(parent) + 1 for parent in tree.parents}
    for child in first_children:
        drafts = [tree.token_ids[one - 1] for one in row.path(child)]
        known = (features, len(drafts) - 1)
        check_drafts(drafts, weights, prefix, fused, token_ids, *known)


def test_hidden_states_are_kept_while_no_drafts_are_wanted(target, tmp_path):
    weights = layer_weights(False, "layers.0.")
    proposer = opened(written(tmp_path, weights), target, False)
    count = 100
    features, bits = random_features(count)
    token_ids = tuple(range(40, 41 + count))
    blocks = np.arange(26, dtype=np.int32)
    proposer.admit(0, Admission(0, "r#0", token_ids[:1], 1, SamplingParams(temperature=0.0), 3))
    for start in range(count):
        proposer.compute(computed_step(0, start, bits[start : start + 1], blocks))
        if start < count - 1:
            proposer.observe(0, token_ids[start + 1 : start + 2])
    [drafts] = proposer.propose([DraftTask(0, 4, token_ids[-1:])])
    at_once = opened(tmp_path, target, False)
    at_once.admit(0, Admission(0, "r#0", token_ids[:-1], 1, SamplingParams(temperature=0.0), 3))
    at_once.compute(computed_step(0, 0, bits, blocks))
    assert [drafts] == at_once.propose([DraftTask(0, 4, token_ids[-1:])])
    assert len(drafts) == 4
    check_drafts(drafts, weights, "layers.0.", False, token_ids, features)
    assert proposer.propose([DraftTask(0, 4, drafts[:1])]) == [()]  # not computed by the target


def outputs(speculation, sampling, **options):
    """The tokens and logprobs of each prompt, and the number of drafts checked."""
    with LLM("demo", speculative_config=speculation, **(OPTIONS | options)) as llm:
        prompts = [*PROMPTS, PROMPTS[0] + " first"]  # hits the prefix cache, if there is one
        generated = llm.generate(prompts, sampling) + llm.generate(prompts, sampling)
        tokens = [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in generated]
        return tokens, llm.engine.stats().scheduler.totals.num_drafts


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"num_blocks": 9, "block_size": 8, "max_model_len": 72},
        {"enforce_eager": True},
    ],
    ids=["plain", "chunked", "preempted", "eager"],
)
def test_tokens_and_logprobs_are_those_without_drafts(tmp_path, caplog, method, options):
    fused = method == "eagle3"
    path = written(tmp_path, layer_weights(fused, "layers.0."))
    sampling = SamplingParams(temperature=0.8, max_tokens=30, seed=5, logprobs=1)
    config = {"method": method, "model": str(path), "num_speculative_tokens": 3}
    tokens, num_drafts = outputs(config, sampling, **options)
    assert tokens == outputs({"method": "off"}, sampling, **options)[0]
    assert num_drafts > 0
    assert "speculation is off" not in caplog.text


def test_a_layer_drafts_for_stages_of_ranks_what_it_drafts_for_one_process(tmp_path, caplog):
    path = written(tmp_path, layer_weights(True, "layers.0."))
    sampling = SamplingParams(max_tokens=30, seed=5, logprobs=1)
    config = {"method": "eagle3", "model": str(path), "num_speculative_tokens": 3}
    split = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    tokens, num_drafts = outputs(config, sampling, **split)
    assert tokens == outputs({"method": "off"}, sampling)[0]
    assert num_drafts > 0
    assert "speculation is off" not in caplog.text


def test_the_memory_plan_has_what_is_allocated_for_the_layer(tmp_path, monkeypatch):
    path = written(tmp_path, layer_weights(False, "layers.0."))
    speculation = SpeculationConfig((ProposerConfig(SpeculationMethod.EAGLE, str(path)),))
    config = EngineConfig(load=LoadConfig("demo"), speculation=speculation, max_model_len=256)
    loaded = load_weights(config, None)
    plan, block_size = loaded.plan, config.cache.block_size
    rows = {row.label: row.num_bytes for row in plan.rows}
    assert rows["draft weights"] == 868_608 * 2
    allocated = []

    def allocate(*arguments):
        allocated.append(allocate_kv(*arguments))
        return allocated[-1]

    monkeypatch.setattr("quickstep.runtime.cache.kv_cache.allocate_kv", allocate)
    open_eagle(LoadConfig(str(path)), loaded.model, False, plan, block_size)
    (cache,) = allocated
    assert rows["draft KV cache"] == sum(one.nbytes for one in (*cache.keys, *cache.values))
    assert rows["draft KV cache"] * 6 > rows["KV cache"]


def test_layers_in_any_order_are_read_in_ascending_order(target, tmp_path):
    path = written(
        tmp_path, layer_weights(True, "midlayer."), eagle_aux_hidden_state_layer_ids=[3, 1, 2]
    )
    assert read_layers(path, target, True) == (1, 2, 3)


def test_checkpoints_that_do_not_fit_are_refused(target, tmp_path):
    weights = layer_weights(False, "layers.0.")
    path = written(tmp_path, weights)
    with pytest.raises(ConfigError, match="no checkpoint for --speculative-method eagle3; use"):
        read_eagle_spec(path, target.spec, True)
    written(tmp_path, weights | {"fc.weight": torch.zeros(8, 8)})
    with pytest.raises(ConfigError, match=r"fc\.weight has the shape \[8, 8\]"):
        opened(path, target, False)
    written(tmp_path, weights, hidden_size=128)
    with pytest.raises(ConfigError, match="hidden size 128, the model 256"):
        read_eagle_spec(path, target.spec, False)
    written(tmp_path, {"a.weight": torch.zeros(2)})
    with pytest.raises(ConfigError, match="has no EAGLE layer"):
        read_eagle_spec(path, target.spec, False)
    fused = layer_weights(True, "layers.0.")
    written(tmp_path, fused | {"d2t": fused["d2t"] + 4096})
    with pytest.raises(ConfigError, match="d2t maps tokens"):
        opened(path, target, True)


def test_a_method_without_a_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="eagle needs --speculative-model"):
        ProposerConfig(SpeculationMethod.EAGLE)
