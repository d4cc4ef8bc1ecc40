"""Medusa heads: what they compute, how their drafts are sampled, and both published layouts."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quickstep.config import EngineConfig, LoadConfig
from quickstep.engine.assembly import load_weights
from quickstep.errors import ConfigError
from quickstep.ops.tensors import HostTensor, to_torch
from quickstep.runtime.sampling.noise import gumbel
from quickstep.runtime.speculation.medusa import MedusaProposer, load_medusa
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.types import Admission, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7)
NUM_HEADS = 3
BLOCKS = 2


@pytest.fixture(scope="module")
def target():
    return load_weights(EngineConfig(load=LoadConfig("demo"), max_model_len=64), None).model


@pytest.fixture(scope="module")
def weights(target):
    """In the layout of the paper's repository."""
    size, generator = target.spec.hidden_size, torch.Generator().manual_seed(0)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) * 0.1).to(torch.bfloat16)

    tensors = {}
    for head in range(NUM_HEADS):
        for block in range(BLOCKS):
            tensors[f"{head}.{block}.linear.weight"] = random(size, size)
            tensors[f"{head}.{block}.linear.bias"] = random(size)
        tensors[f"{head}.{BLOCKS}.weight"] = random(target.vocab_size, size)
    return tensors


def written(tmp_path, tensors):
    save_file(tensors, str(tmp_path / "model.safetensors"))
    return tmp_path


def hidden_of(target, seed=0):
    """A hidden state [C] in the model's dtype, without torch's class."""
    size = target.spec.hidden_size
    values = torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
    bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return HostTensor(bits, target.weights.final_norm.dtype)[0]


def expected_logits(weights, hidden, head):
    x = to_torch(hidden).float()
    for block in range(BLOCKS):
        linear = f"{head}.{block}.linear"
        product = weights[f"{linear}.weight"].float() @ x + weights[f"{linear}.bias"].float()
        x = x + torch.nn.functional.silu(product)
    return (weights[f"{head}.{BLOCKS}.weight"].float() @ x).double().numpy()


def expected_draft(weights, hidden, sampling, num_outputs, seed):
    draft = []
    for head in range(NUM_HEADS):
        logits = expected_logits(weights, hidden, head)
        if sampling.temperature:
            noise = gumbel(seed, num_outputs + head, np.arange(logits.shape[0]))
            logits = logits / sampling.temperature + noise
        draft.append(int(logits.argmax()))
    return tuple(draft)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("with_torch", [False, True])
def test_drafts_are_the_samples_of_the_heads(target, weights, tmp_path, sampling, with_torch):
    proposer = MedusaProposer(target, load_medusa(written(tmp_path, weights), target))
    hidden = [hidden_of(target, 0), hidden_of(target, 1)]
    for slot in (0, 1):
        admission = Admission(slot, "r#0", (5, 6, 7), 2, sampling, seed=slot)
        proposer.admit(slot, admission)
    proposer.observe(1, (8,))
    given = [to_torch(one) for one in hidden] if with_torch else hidden
    tasks = [DraftTask(0, 5, (9,), given[0]), DraftTask(1, 2, (9, 10), given[1])]
    assert proposer.propose(tasks) == [
        expected_draft(weights, hidden[0], sampling, 2, 0),
        expected_draft(weights, hidden[1], sampling, 4, 1)[:2],
    ]


def test_without_a_hidden_state_there_are_no_drafts(target, weights, tmp_path):
    proposer = MedusaProposer(target, load_medusa(written(tmp_path, weights), target))
    proposer.admit(0, Admission(0, "r#0", (5,), 1, GREEDY, 0))
    assert proposer.propose([DraftTask(0, 4, (1,))]) == [()]
    proposer.release(0)
    proposer.release(0)


def renamed(weights, rename):
    return {rename(*name.split(".")): tensor for name, tensor in weights.items()}


def vllm_name(head, block, *rest):
    if rest == ("weight",):
        return f"lm_heads.{head}.weight"
    return f"blocks.{head}.layers.{block}.{rest[-1]}"


@pytest.mark.parametrize("rename", [vllm_name, lambda *parts: ".".join(("medusa_head", *parts))])
def test_other_published_names_are_the_same_heads(target, weights, tmp_path, rename):
    path = written(tmp_path, renamed(weights, rename))
    proposer = MedusaProposer(target, load_medusa(path, target))
    proposer.admit(0, Admission(0, "r#0", (5,), 1, GREEDY, 0))
    hidden = hidden_of(target)
    [draft] = proposer.propose([DraftTask(0, 3, (1,), hidden)])
    assert draft == expected_draft(weights, hidden, GREEDY, 1, 0)


def test_heads_without_a_projection_use_that_of_the_model(target, weights, tmp_path):
    blocks = {name: one for name, one in weights.items() if ".linear." in name}
    [head, *_] = load_medusa(written(tmp_path, blocks), target)
    assert head.lm_head is target.weights.lm_head


def test_heads_of_another_model_are_refused(target, weights, tmp_path):
    smaller = weights | {"1.0.linear.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    with pytest.raises(ConfigError, match=r"1\.0\.linear\.weight has the shape \[8, 8\]"):
        load_medusa(written(tmp_path, smaller), target)


def test_a_checkpoint_without_heads_is_refused(target, tmp_path):
    with pytest.raises(ConfigError, match="no Medusa heads"):
        load_medusa(written(tmp_path, {"a.weight": torch.zeros(2)}), target)
