"""Draws follow the exact distribution: chi-square over many seeds, and over positions.

The statistic over f degrees of freedom is compared with f + 2 sqrt(f x) + 2 x, which it passes
with a probability of at most exp(-x) (Laurent and Massart 2000, lemma 1); x = 9.2 makes that
1e-4. Seeds are fixed, so the outcome is too.
"""

import math

import numpy as np
import pytest
from sampled_rows import LOGITS, NUM_SAMPLES, assert_follows

from quickstep.ops.tensors import FLOAT32, HostTensor
from quickstep.runtime.sampling.sampler import Sample, sample, sample_row
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot
from quickstep.runtime.speculation.verification import EmittingRow, sample_rows
from quickstep.types import Admission, SamplingParams

CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=0.8, top_k=5),
    SamplingParams(temperature=0.8, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.3, min_p=0.2),
    SamplingParams(temperature=1.3, top_k=8, top_p=0.85, min_p=0.15),
    SamplingParams(temperature=1.0, allowed_token_ids=(1, 4, 7, 11)),
    SamplingParams(temperature=1.0, logit_bias={7: 4.0, 0: -3.0}),
]


def exact_law(sampling):
    """Probabilities by the definition, in plain Python."""
    logits = LOGITS.astype(np.float64).tolist()
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    ids = sorted(sampling.allowed_token_ids or range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp(logits[i] / sampling.temperature) for i in ids}
    if sampling.top_k > 0:
        ids = ids[: sampling.top_k]
    total, cumulative, kept = sum(weight[i] for i in ids), 0.0, []
    for i in ids:
        if cumulative < sampling.top_p * total:
            kept.append(i)
        cumulative += weight[i]
    kept = [i for i in kept if weight[i] >= sampling.min_p * weight[kept[0]]]
    total = sum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


def state_of(sampling, seed, num_outputs=0):
    admission = Admission(0, "r#0", (1,) + (0,) * num_outputs, 1, sampling, seed)
    return SamplingState(admission, len(LOGITS))


def sample_token(state):
    sampled = sample_row(LOGITS, state)
    assert isinstance(sampled, Sample)
    return sampled.token_id


@pytest.mark.parametrize("sampling", CASES, ids=range(len(CASES)))
def test_samples_over_seeds_follow_the_exact_distribution(sampling):
    tokens = [sample_token(state_of(sampling, seed)) for seed in range(NUM_SAMPLES)]
    assert_follows(exact_law(sampling), tokens)


@pytest.mark.parametrize("sampling", CASES[:8:3], ids=str)
def test_samples_over_output_positions_follow_the_exact_distribution(sampling):
    state = state_of(sampling, seed=42)
    tokens = []
    for _ in range(NUM_SAMPLES):
        tokens.append(sample_token(state))
        state.record(tokens[-1])
    assert_follows(exact_law(sampling), tokens)


def test_the_chi_square_bound_catches_a_temperature_that_is_off_by_a_tenth():
    tokens = [
        sample_token(state_of(SamplingParams(temperature=1.1), seed)) for seed in range(NUM_SAMPLES)
    ]
    with pytest.raises(AssertionError):
        assert_follows(exact_law(SamplingParams(temperature=1.0)), tokens)


DRAFT_LOGITS = LOGITS + np.array([0, 1, -1, 0.5, 0, 1, 0, 2, -2, 0, 1, -1], np.float32)


def drafts_of(sampling, seed):
    """Two, sampled from other logits with the sequence's own noise, as a draft model does."""
    samples = [sample_row(DRAFT_LOGITS, state_of(sampling, seed, position)) for position in (0, 1)]
    assert all(isinstance(draft, Sample) for draft in samples)
    return [draft.token_id for draft in samples]


def verified_tokens(sampling, seed, drafts, in_tree=False):
    """The tokens of a row with two drafts, by rejection sampling. In a tree, another token may be
    the first, and any of two may follow it.
    """
    slot = Slot(Admission(0, "r#0", (1,), 1, sampling, seed), len(LOGITS))
    drafts = list(drafts)
    parents = ()
    if in_tree:
        drafts += [(drafts[0] + 1) % 3, 0, 1]
        parents = (0, 1, 0, 3, 3)
    row = EmittingRow(0, slot, slot.state, 0, tuple(drafts), parents)
    logits = np.stack([LOGITS] * (1 + len(drafts)))
    sample_rows(sample, HostTensor(logits, FLOAT32), [row], by_rejection=True)
    accepted = [drafts[node - 1] for node in row.computed[1:]]
    assert [one.token_id for one in row.samples[:-1]] == accepted
    return [one.token_id for one in row.samples]


@pytest.fixture(scope="module", params=[CASES[0], CASES[7]], ids=["plain", "filtered"])
def drafted(request):
    """Parameters, and the drafts of each seed."""
    return request.param, [drafts_of(request.param, seed) for seed in range(6000)]


@pytest.mark.parametrize("in_tree", [False, True])
def test_rejection_sampling_has_the_law_of_sampling_without_drafts(drafted, in_tree):
    sampling, every = drafted
    tokens = [verified_tokens(sampling, seed, two, in_tree) for seed, two in enumerate(every)]
    for position in range(3):
        found = [token[position] for token in tokens if len(token) > position]
        assert len(found) > 100
        assert_follows(exact_law(sampling), found)


def test_rejection_sampling_is_the_argmax_at_temperature_0():
    for seed in range(50):
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        tokens = verified_tokens(sampling, seed, drafts_of(sampling, seed))
        assert tokens == [int(LOGITS.argmax())] * len(tokens)
