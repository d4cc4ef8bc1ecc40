"""Native sampling equals NumPy to the bit: tokens, log-probabilities, ranks and failures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from op_checks.sampling_cases import (
    EVERY_CHANGE,
    EVERY_FILTER,
    FixedMask,
    rows_of,
    samplings,
    state_of,
)
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.reference import reference_ops
from quickstep.runtime.sampling.native_sampler import NativeSampler, open_sampler
from quickstep.runtime.sampling.sampler import SampleFailure, sample
from quickstep.types import SamplingParams

LEVELS = native_status().levels
SIZES = (1, 2, 63, 64, 65, 130, 1000, 4097)


def tables():
    found = [load_native(2, level) for level in LEVELS]
    assert found and all(table is not None and table.steps is not None for table in found)
    return [table for table in found if table is not None]


TABLES = tables()


def assert_same_draws(logits, states, tables=TABLES):
    expected = sample(logits, states)
    for table in tables:
        found = NativeSampler(table.steps.sampler(logits.shape[1])).sample(logits, states)
        assert found == expected, table.name


@examples(100)
@given(
    st.sampled_from(["normal", "normal", "ties", "flat", "masked", "broken"]),
    st.sampled_from(SIZES),
    st.lists(samplings, min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.1, 2.0, 12.0]),
)
def test_native_samples_are_numpys_on_every_level(kind, vocab, samplings, seed, scale):
    logits = rows_of(kind, len(samplings), vocab, seed, scale)
    states = [
        state_of(sampling, vocab, seed + index, outputs=range(index))
        for index, sampling in enumerate(samplings)
    ]
    assert_same_draws(logits, states)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["normal", "ties", "masked"]),
    samplings,
    st.sampled_from([0, 1, 5]),
    st.lists(st.integers(0, 99), min_size=1, max_size=8),
    st.integers(0, 2**64 - 1),
)
def test_logprobs_of_tokens_requested_by_id_are_numpys(
    kind, sampling, num_top, requested_ids, seed
):
    sampling = replace(sampling, logprobs=num_top, logprob_token_ids=tuple(requested_ids))
    logits = rows_of(kind, 1, 100, seed, 2.0)
    assert_same_draws(logits, [state_of(sampling, 100, seed)])


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_a_large_vocabulary_is_sampled_as_numpy_does(scale):
    samplings = EVERY_FILTER
    logits = rows_of("normal", len(samplings), 151_936, 1, scale)
    for as_stored in (logits, logits.bfloat16().float()):
        states = [state_of(one, 151_936, seed) for seed, one in enumerate(samplings)]
        assert_same_draws(as_stored, states)


@pytest.mark.parametrize("top_p", [0.02, 0.25, 0.5, 0.75, 0.98])
@pytest.mark.parametrize("kind", ["flat", "ties", "normal"])
def test_top_p_is_numpys_also_where_a_share_is_exactly_it(kind, top_p):
    vocab, count = 256, 200  # flat: every boundary is a multiple of 1 / 256
    logits = rows_of(kind, 1, vocab, 3, 1.0).expand(count, vocab).contiguous()
    states = [state_of(SamplingParams(top_p=top_p), vocab, seed) for seed in range(count)]
    assert_same_draws(logits, states)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(typical_p=0.1),
        SamplingParams(typical_p=0.5, temperature=0.7),
        SamplingParams(typical_p=0.9),
        SamplingParams(xtc_probability=1.0, xtc_threshold=0.1),
        SamplingParams(xtc_probability=1.0, xtc_threshold=0.002, temperature=1.3),
        SamplingParams(top_p=0.3, frequency_penalty=0.1),
    ],
    ids=["typical", "typical-cool", "typical-most", "xtc", "xtc-warm", "penalised-nucleus"],
)
@pytest.mark.parametrize("change", ["none", "ties", "peaked", "far", "tiny"])
def test_what_rough_sums_leave_open_is_numpys_too(sampling, change):
    vocab, count = 700, 80
    row = rows_of("ties" if change == "ties" else "normal", 1, vocab, 11, 2.0)
    if change == "peaked":
        row[:, :3] += 9.0
    elif change == "far":  # neighbours in float32 are 1/128 apart
        row = row + 1e5
    elif change == "tiny":  # many logits, one value once the largest is taken off
        row = row * 1e-30
        row[:, 5] = 3.0
    logits = row.expand(count, vocab).contiguous()
    assert_same_draws(logits, [state_of(sampling, vocab, seed, range(9)) for seed in range(count)])


def test_many_samples_follow_the_distribution():
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    count = 4000
    logits = torch.from_numpy(np.log(weights).astype(np.float32)).expand(count, 4).contiguous()
    states = [state_of(SamplingParams(), 4, seed) for seed in range(count)]
    sampled = NativeSampler(TABLES[0].steps.sampler(4)).sample(logits, states)
    observed = np.bincount([one.token_id for one in sampled], minlength=4)
    statistic = ((observed - count * weights) ** 2 / (count * weights)).sum()
    # exceeded with a probability of at most 1e-4 (Laurent and Massart 2000)
    assert statistic < 3 + 2 * math.sqrt(3 * 9.2) + 2 * 9.2


def test_every_change_of_logits_is_numpys():
    vocab = 300
    samplings = EVERY_CHANGE
    logits = rows_of("normal", len(samplings), vocab, 5, 3.0)
    outputs = (3, 9, 5, 17, 3, 9, 5, 17, 11, 3)
    for num_outputs in (0, 1, 5, 10):
        states = [state_of(sampling, vocab, 7, outputs[:num_outputs]) for sampling in samplings]
        assert_same_draws(logits, states)


def test_recorded_tokens_change_the_next_sample_as_admitted_ones_do():
    vocab, outputs = 200, [i * i % 90 for i in range(150)]
    sampling = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.4, temperature=0.0, logprobs=1
    )
    logits = rows_of("normal", 1, vocab, 5, 1.0)
    recorded = state_of(sampling, vocab)
    for token_id in outputs:
        recorded.record(token_id)
    admitted = state_of(sampling, vocab, outputs=outputs)
    sampler = NativeSampler(TABLES[0].steps.sampler(vocab))
    assert sampler.sample(logits, [recorded]) == sampler.sample(logits, [admitted])
    assert_same_draws(logits, [recorded])


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=0, max_size=24), st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_a_grammars_mask_is_numpys(mask, seed, temperature):
    vocab = 130
    state = state_of(SamplingParams(temperature=temperature, min_tokens=2), vocab, seed)
    state._grammar = grammar = FixedMask(mask, vocab)
    logits = np.zeros(vocab)
    state.adjust_(logits)
    allowed = [token_id for token_id in range(vocab) if grammar.allows(token_id)]
    without_end = [token_id for token_id in allowed if token_id != 0]
    assert np.flatnonzero(np.isfinite(logits)).tolist() == (without_end or allowed)
    assert_same_draws(rows_of("normal", 1, vocab, seed, 2.0), [state])


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_token_has_its_own_logprobs(temperature, num_top):
    """Not those of the token that was sampled before the grammar replaced it."""
    vocab, forced = 130, 77
    sampling = SamplingParams(
        temperature=temperature, logprobs=num_top, logprob_token_ids=(5, forced)
    )
    state = state_of(sampling, vocab, 3)
    state._grammar = FixedMask(b"\xff" * 17, vocab, forced)
    state._always_adjusts = True
    logits = rows_of("normal", 1, vocab, 11, 2.0)
    assert_same_draws(logits, [state])
    (found,) = NativeSampler(TABLES[0].steps.sampler(vocab)).sample(logits, [state])
    row = logits[0].double()
    logprob = float(row[forced] - row.logsumexp(0))
    assert (found.token_id, found.logprobs.token_id) == (forced, forced)
    assert found.logprobs.logprob == pytest.approx(logprob, abs=1e-9)
    assert found.logprobs.rank == 1 + int((row > row[forced]).sum())
    assert dict(found.logprobs.top)[forced] == pytest.approx(logprob, abs=1e-9)


def test_the_special_filters_are_numpys_too():
    vocab = 300
    samplings = [
        SamplingParams(typical_p=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(xtc_probability=1.0, xtc_threshold=0.05),
        SamplingParams(allowed_token_ids=(3, 9, 11), logprobs=2),
        SamplingParams(logit_bias={7: 400.0}),
    ]
    logits = rows_of("normal", len(samplings), vocab, 4, 2.0)
    assert_same_draws(logits, [state_of(sampling, vocab, 9) for sampling in samplings])


def test_a_row_without_a_maximum_fails_alone():
    logits = rows_of("normal", 3, 70, 0, 1.0)
    logits[1, 68] = torch.nan
    states = [state_of(SamplingParams(temperature=t), 70) for t in (0.0, 1.0, 1.0)]
    [first, second, third] = NativeSampler(TABLES[0].steps.sampler(70)).sample(logits, states)
    assert isinstance(second, SampleFailure)
    assert not isinstance(first, SampleFailure) and not isinstance(third, SampleFailure)


class SomeModel:
    """What `open_sampler` reads of a model."""

    vocab_size = 4097

    def __init__(self, device, ops):
        self.device, self.ops = torch.device(device), ops


@pytest.mark.parametrize(
    ("device", "ops"),
    [("cpu", TABLES[0]), ("cpu", reference_ops()), ("cuda", reference_ops())],
    ids=["a fallback model with native kernels", "reference kernels", "an accelerator"],
)
def test_every_model_samples_the_same_tokens(device, ops):
    """Logits that are on the host already are a placeholder for those of an accelerator."""
    draw = open_sampler(SomeModel(device, ops))
    logits = rows_of("wide", 6, SomeModel.vocab_size, 3, 4.0)
    greedy = [state_of(SamplingParams(temperature=0.0), SomeModel.vocab_size, 1)] * 6
    mixed = [
        state_of(SamplingParams(temperature=0.1 * seed, top_p=0.9, logprobs=2), 4097, seed)
        for seed in range(6)
    ]
    for states in (greedy, mixed):
        assert draw(logits, states) == sample(logits, states)
        assert draw(logits, states[:2], [3, 0]) == sample(logits, states[:2], [3, 0])
    is_native = ops is TABLES[0] or device == "cuda"
    assert (draw is not sample) == is_native
