"""Which drafts are in a tree, what a step does with them, and where their KV goes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstep.config import EngineConfig, LoadConfig, ProposerConfig, SpeculationConfig
from quickstep.engine.assembly import load_weights
from quickstep.engine.speculation import open_model_proposers
from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder
from quickstep.model.interface import KVLayout
from quickstep.ops.native.backend import load_native
from quickstep.ops.reference import reference_ops
from quickstep.ops.tensors import BFLOAT16, CPU, FLOAT32, HostTensor
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.runner import ModelRunner
from quickstep.runtime.sampling.noise import gumbel
from quickstep.runtime.sampling.sampler import Sample, SampleFailure, sample
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot
from quickstep.runtime.speculation.proposer import (
    DraftTask,
    DraftTree,
    compare,
    depth_of,
    draft_tree,
)
from quickstep.runtime.speculation.trees import (
    DraftCandidate,
    TreeGrowth,
    candidates_of,
    likeliest_tree,
    tree_admission,
)
from quickstep.runtime.speculation.verification import EmittingRow, sample_rows
from quickstep.types import Admission, Phase, SamplingParams, StepPlan, StepRow

VOCAB_SIZE = 50
LEVELS = st.lists(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), min_size=1, max_size=4
).map(
    lambda levels: [
        [DraftCandidate(10 * depth + index, one / sum(level)) for index, one in enumerate(level)]
        for depth, level in enumerate(levels)
    ]
)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens up to each draft."""
    found: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*found[parent], token_id))
    return found[1:]


def probability(levels: list[list[DraftCandidate]], path: tuple[int, ...]) -> float:
    return float(np.prod([levels[depth][one % 10].probability for depth, one in enumerate(path)]))


@given(LEVELS, st.integers(1, 16))
def test_a_tree_has_the_likeliest_drafts(
    levels: list[list[DraftCandidate]], num_drafts: int
) -> None:
    tree = draft_tree(likeliest_tree(levels, num_drafts))
    found = [probability(levels, path) for path in paths(tree)]
    tokens = [[one.token_id for one in level] for level in levels]
    every = [path for depth in range(1, len(tokens) + 1) for path in product(*tokens[:depth])]
    best = sorted((probability(levels, path) for path in every), reverse=True)[:num_drafts]
    assert found == pytest.approx(best)
    assert len(set(paths(tree))) == len(found)


@given(LEVELS, st.integers(1, 16), st.integers(1, 4))
def test_a_tree_that_grows_is_the_same(
    levels: list[list[DraftCandidate]], num_drafts: int, at_once: int
) -> None:
    growth = TreeGrowth(num_drafts, max_depth=len(levels), max_expanded=99, max_at_once=at_once)
    growth.add(None, levels[0])
    while taken := growth.take_next():
        for node in taken:
            growth.add(node, levels[growth.nodes[node].depth])
    grown = paths(draft_tree(growth.drafts()))
    expected = paths(draft_tree(likeliest_tree(levels, num_drafts)))
    assert [probability(levels, path) for path in grown] == pytest.approx(
        [probability(levels, path) for path in expected]
    )


def test_a_tree_grows_within_its_limits() -> None:
    growth = TreeGrowth(12, max_depth=3, max_expanded=4, max_at_once=3)
    candidates = [DraftCandidate(1, 0.6), DraftCandidate(2, 0.4)]
    growth.add(None, candidates)
    num_expanded = 0
    while taken := growth.take_next():
        assert len(taken) <= 3
        num_expanded += len(taken)
        for node in taken:
            growth.add(node, candidates)
    assert num_expanded == 4
    assert depth_of(growth.drafts()) <= 3


def sampling_state(sampling: SamplingParams, width: int) -> SamplingState:
    return SamplingState(tree_admission(Admission(0, "r#0", (1,), 1, sampling, 8), width), 50)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_candidates_are_compared_with_the_noise_of_the_position(temperature: float) -> None:
    logits = np.random.default_rng(3).normal(size=(1, VOCAB_SIZE)).astype(np.float32)
    state = sampling_state(SamplingParams(temperature=temperature), 4)
    state.num_outputs = 6
    [sampled] = sample(HostTensor(logits, FLOAT32), [state])
    found = candidates_of(sampled, state, 4)
    ids = np.argsort(-logits[0])[:16]
    scores = logits[0, ids] + temperature * gumbel(8, 6, ids)
    assert [one.token_id for one in found] == ids[np.argsort(-scores)][:4].tolist()
    assert isinstance(sampled, Sample)
    assert found[0].token_id == sampled.token_id
    weights = np.sort(np.exp(scores) / np.exp(scores).sum())[::-1]
    assert [one.probability for one in found] == pytest.approx(weights[:4].tolist())


def test_candidates_are_those_that_the_filters_leave() -> None:
    logits = np.random.default_rng(3).normal(size=(1, VOCAB_SIZE)).astype(np.float32)
    state = sampling_state(SamplingParams(temperature=0.7, top_k=2), 4)
    [sampled] = sample(HostTensor(logits, FLOAT32), [state])
    found = {one.token_id for one in candidates_of(sampled, state, 4)}
    assert found == set(np.argsort(-logits[0])[:2].tolist())
    assert candidates_of(SampleFailure("NaN"), state, 4) == []
    assert candidates_of(Sample(7), state, 1) == [DraftCandidate(7, 1.0)]


def test_tokens_are_compared_along_a_path() -> None:
    tree = DraftTree((5, 6, 5, 7), (0, 0, 2, 3))
    assert depth_of(tree) == 3
    assert compare(tree, (6, 5, 7, 9)) == (3, False)
    assert compare(tree, (6, 5, 8)) == (2, True)
    assert compare(tree, (5, 5)) == (1, False)
    assert compare(tree, (9,)) == (0, True)
    assert compare((5, 6), (5, 7)) == (1, True)
    assert compare((), (5,)) == (0, False)


@pytest.mark.parametrize("by_rejection", [False, True])
@pytest.mark.parametrize("first", [5, 6])
def test_a_draft_is_accepted_on_the_path_of_the_text_only(first: int, by_rejection: bool) -> None:
    """The same token follows both of the first drafts, with logits of its own."""
    vocab = 10
    slot = Slot(Admission(0, "r#0", (1,), 1, SamplingParams(temperature=0.0), 3), vocab)
    row = EmittingRow(0, slot, slot.state, 0, (5, 6, 7, 7), (0, 0, 1, 2))
    logits = np.zeros((5, vocab), np.float32)
    for node, token_id in enumerate((first, 7, 7, 8, 9)):
        logits[node, token_id] = 50.0
    sample_rows(sample, HostTensor(logits, FLOAT32), [row], by_rejection)
    assert [found.token_id for found in row.samples] == [first, 7, 8 if first == 5 else 9]
    assert row.computed == ([0, 1, 3] if first == 5 else [0, 2, 4])


def test_kv_is_moved_in_all_layers_in_the_order_of_the_pairs() -> None:
    native = load_native(1)
    assert native is not None
    moves = [(9, 3), (17, 4), (3, 2)]
    shape = KVLayout.uniform(3, 2, 8, FLOAT32)
    generator = np.random.default_rng(1)
    caches = [allocate_kv(shape, 5, 4, CPU) for _ in range(2)]
    for first, second in zip(
        (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
    ):
        assert isinstance(first, HostTensor) and isinstance(second, HostTensor)
        first.numpy()[:] = second.numpy()[:] = generator.normal(size=first.shape)
        expected = first.numpy().reshape(20, -1)[[9, 17, 9]].copy()
        assert not np.array_equal(second.numpy().reshape(20, -1)[[3, 4, 2]], expected)
    for ops, kv in ((native, caches[0]), (reference_ops(), caches[1])):
        ops.move_kv(kv, moves)
    for first, second in zip(
        (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
    ):
        assert isinstance(first, HostTensor) and isinstance(second, HostTensor)
        np.testing.assert_array_equal(first.numpy(), second.numpy())
        slots = first.numpy().reshape(20, -1)
        np.testing.assert_array_equal(slots[[3, 4]], slots[[9, 17]])
        np.testing.assert_array_equal(slots[2], slots[9])
    with pytest.raises(EngineError):
        native.move_kv(caches[0], [(0, 20)])


@pytest.mark.parametrize("parents", [(0,), (1, 0), (0, 3), (0, -1)])
def test_drafts_that_are_no_tree_are_refused(parents: tuple[int, ...]) -> None:
    model = load_weights(EngineConfig(load=LoadConfig("demo"), max_model_len=64), None).model
    kv = allocate_kv(model.kv_layout, 4, 16, model.device)
    runner = ModelRunner(model, kv, 16, 1, lambda: 0.0)
    admission = Admission(0, "r#0", (300, 301), 2, SamplingParams(), 0)
    row = StepRow(
        0, 0, 4, (300, 301, 302, 303), (0,), Phase.DECODE, True, 0, num_drafts=2, parents=parents
    )
    with pytest.raises(EngineError, match="no tree"):
        runner.run(StepPlan(0, (row,), (admission,)))


@pytest.mark.parametrize("width", [1, 4])
def test_drafts_are_trees_of_the_configured_width(width: int) -> None:
    speculation = SpeculationConfig((ProposerConfig(model="demo-medusa"),), tree_width=width)
    config = EngineConfig(load=LoadConfig("demo"), max_model_len=64, speculation=speculation)
    loaded = load_weights(config, None)
    model = loaded.model
    assert isinstance(model, Decoder)
    [proposer] = open_model_proposers(config, model, loaded.plan, None)
    proposer.admit(0, Admission(0, "r#0", (300, 301), 2, SamplingParams(temperature=0.0), 0))
    bits = np.random.default_rng(0).normal(size=(1, model.spec.hidden_size)).astype(np.float32)
    hidden = HostTensor(bits, FLOAT32).to(BFLOAT16)[0]
    [drafts] = proposer.propose([DraftTask(0, 8, (302,), hidden)])
    assert isinstance(drafts, DraftTree) == (width > 1)
