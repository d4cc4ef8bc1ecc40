"""A native draw is NumPy's to the bit: tokens, log-probabilities, ranks and failures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quickstep.ops.native import load_native, native_status
from quickstep.runtime.native_sampler import NativeSampler
from quickstep.runtime.sampler import SampleFailure, sample
from quickstep.runtime.sampling_state import SamplingState
from quickstep.types import Admission, SamplingParams

LEVELS = native_status().levels
SIZES = (1, 2, 63, 64, 65, 130, 1000, 4097)


def tables():
    found = [load_native(2, level) for level in LEVELS]
    assert found and all(table is not None and table.steps is not None for table in found)
    return [table for table in found if table is not None]


TABLES = tables()


def state_of(sampling, vocab, seed=0, outputs=()):
    prompt = tuple(i % vocab for i in (0, 5, 17))
    tokens = prompt + tuple(i % vocab for i in outputs)
    admission = Admission(0, "r#0", tokens, len(prompt), sampling, seed, frozenset({0}))
    return SamplingState(admission, vocab)


def rows_of(kind, num_rows, vocab, seed, scale):
    draws = np.random.default_rng(seed)
    rows = draws.normal(scale=scale, size=(num_rows, vocab)).astype(np.float32)
    if kind == "ties":
        rows = np.round(rows * 2) / 2
    elif kind == "flat":
        rows[:] = 1.5
    elif kind == "masked":
        rows[draws.random(rows.shape) < 0.7] = -np.inf
        rows[:, 0] = 0.25
    elif kind == "broken":
        rows[0, draws.integers(vocab)] = draws.choice([np.nan, np.inf])
        rows[-1] = -np.inf
    return torch.from_numpy(rows)


def assert_same_draws(logits, states, tables=TABLES):
    expected = sample(logits, states)
    for table in tables:
        found = NativeSampler(table.steps.draws(logits.shape[1])).sample(logits, states)
        assert found == expected, table.name


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 200, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.013, 0.5, 0.9, 0.99999]),
    min_p=st.sampled_from([0.0, 0.0, 0.011, 0.3, 1.0]),
    logprobs=st.sampled_from([None, None, 0, 1, 5, 70]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    logit_bias=st.sampled_from([{}, {}, {0: -100.0}, {0: 7.5}]),
    min_tokens=st.sampled_from([0, 0, 5]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["normal", "normal", "ties", "flat", "masked", "broken"]),
    st.sampled_from(SIZES),
    st.lists(samplings, min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.1, 2.0, 12.0]),
)
def test_native_draws_are_numpys_on_every_level(kind, vocab, samplings, seed, scale):
    logits = rows_of(kind, len(samplings), vocab, seed, scale)
    states = [
        state_of(sampling, vocab, seed + index, outputs=range(index))
        for index, sampling in enumerate(samplings)
    ]
    assert_same_draws(logits, states)


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_a_large_vocabulary_draws_as_numpy_does(scale):
    samplings = [
        SamplingParams(temperature=0.0, logprobs=20),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.95, logprobs=3),
        SamplingParams(temperature=1.2, top_k=50, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05),
    ]
    logits = rows_of("normal", len(samplings), 151_936, 1, scale)
    for as_stored in (logits, logits.bfloat16().float()):
        states = [state_of(one, 151_936, seed) for seed, one in enumerate(samplings)]
        assert_same_draws(as_stored, states)


def test_many_draws_follow_the_distribution():
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    count = 4000
    logits = torch.from_numpy(np.log(weights).astype(np.float32)).expand(count, 4).contiguous()
    states = [state_of(SamplingParams(), 4, seed) for seed in range(count)]
    drawn = NativeSampler(TABLES[0].steps.draws(4)).sample(logits, states)
    observed = np.bincount([one.token_id for one in drawn], minlength=4)
    statistic = ((observed - count * weights) ** 2 / (count * weights)).sum()
    # exceeded with a probability of at most 1e-4 (Laurent and Massart 2000)
    assert statistic < 3 + 2 * math.sqrt(3 * 9.2) + 2 * 9.2


def test_special_filters_and_steps_take_their_rows_through_numpy():
    vocab = 300
    samplings = [
        SamplingParams(typical_p=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(xtc_probability=1.0, xtc_threshold=0.05),
        SamplingParams(allowed_token_ids=(3, 9, 11), logprobs=2),
        SamplingParams(logit_bias={7: 400.0}),
    ]
    logits = rows_of("normal", len(samplings), vocab, 4, 2.0)
    assert_same_draws(logits, [state_of(one, vocab, 9) for one in samplings])


def test_a_row_without_a_maximum_fails_alone():
    logits = rows_of("normal", 3, 70, 0, 1.0)
    logits[1, 68] = torch.nan
    states = [state_of(SamplingParams(temperature=t), 70) for t in (0.0, 1.0, 1.0)]
    [first, second, third] = NativeSampler(TABLES[0].steps.draws(70)).sample(logits, states)
    assert isinstance(second, SampleFailure)
    assert not isinstance(first, SampleFailure) and not isinstance(third, SampleFailure)
