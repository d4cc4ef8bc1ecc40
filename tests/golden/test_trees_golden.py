"""A draft of a tree has the logits of the end of its path, in every architecture, to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from golden_cases import CASES, VOCAB, Case
from golden_harness import load, random_prompts

from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import to_torch
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.opening import open_steps
from quickstep.runtime.steps.step_model import StepModel
from quickstep.types import Admission, Phase, SamplingParams, StepRow

BLOCK, NUM_BLOCKS, NUM_DRAFTS = 4, 16, 12
[PROMPT] = random_prompts((29,), VOCAB)


def sequence(model: Model, kv_dtype: str, enforce_eager: bool) -> tuple[StepModel, Slot]:
    """The steps of a model with the prompt computed, but for its last token."""
    kv = allocate_kv(model.kv_layout.stored_as(kv_dtype), NUM_BLOCKS, BLOCK, model.device)
    steps = open_steps(model, kv, BLOCK, enforce_eager)
    slot = Slot(Admission(0, "r#0", tuple(PROMPT), len(PROMPT), SamplingParams(), 0), VOCAB)
    slot.append_blocks(random.Random(1).sample(range(NUM_BLOCKS), NUM_BLOCKS))
    count = len(PROMPT) - 1
    steps.prepare([StepRow(0, 0, count, tuple(PROMPT[:-1]), (), Phase.PREFILL, False, 0)], [slot])
    steps.run([], every_token=False)
    return steps, slot


def logits(
    steps: StepModel, slot: Slot, drafts: tuple[int, ...], parents: tuple[int, ...]
) -> torch.Tensor:
    """[1 + n, V], of the prompt's last token and n drafts after it."""
    tokens = (PROMPT[-1], *drafts)
    row = StepRow(
        0,
        len(PROMPT) - 1,
        len(tokens),
        tokens,
        (),
        Phase.DECODE,
        True,
        0,
        num_drafts=len(drafts),
        parents=parents,
    )
    steps.prepare([row], [slot])
    emitting = [(0, num_after) for num_after in range(len(drafts), -1, -1)]
    return to_torch(steps.run(emitting, every_token=False)[1]).clone()


def assert_paths_are_chains(model: Model, kv_dtype: str, enforce_eager: bool) -> None:
    steps, slot = sequence(model, kv_dtype, enforce_eager)
    rng = random.Random(2)
    parents = tuple(rng.choice((node, rng.randint(0, node))) for node in range(NUM_DRAFTS))
    drafts = tuple(rng.randrange(3, VOCAB) for _ in parents)
    tree = logits(steps, slot, drafts, parents)
    row = StepRow(0, 0, 1, (0,), (), Phase.DECODE, True, 0, parents=parents)
    for node in range(NUM_DRAFTS + 1):
        path = tuple(drafts[one - 1] for one in row.path(node))
        assert torch.equal(tree[node], logits(steps, slot, path, ())[-1]), (parents, node)


# a state is of one chain of tokens: such models get no trees
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.has_states], ids=lambda case: case.name
)
def test_every_path_is_a_chain(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    model = load(tmp_path, case.max_model_len)
    assert isinstance(model, Decoder)
    assert_paths_are_chains(model, "auto", enforce_eager=False)
    assert_paths_are_chains(model, "int8", enforce_eager=True)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_every_path_is_a_chain_of_the_reference(name: str, tmp_path: Path) -> None:
    [case] = [one for one in CASES if one.name == name]
    case.save(tmp_path)
    ops: OpTable = reference_ops()
    assert_paths_are_chains(load(tmp_path, case.max_model_len, ops=ops), "auto", True)
