"""Each filter against a slow reference in plain Python, ties and edges included."""

import math

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from quickstep.runtime.sampling.filters import kept_token_ids, largest
from quickstep.types import SamplingParams


def canonical(values):
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def kept_slowly(scaled, sampling):
    ids = [i for i in canonical(scaled) if scaled[i] > -math.inf]
    if sampling.top_k > 0:
        ids = ids[: sampling.top_k]
    if sampling.top_p < 1.0:
        total = math.fsum(math.exp(scaled[i]) for i in ids)
        cumulative, kept = 0.0, []
        for i in ids:
            kept.append(i)
            cumulative += math.exp(scaled[i])
            if cumulative >= sampling.top_p * total:
                break
        ids = kept
    return sorted(i for i in ids if math.exp(scaled[i]) >= sampling.min_p)


# Quarters make ties common and sums of weights rarely equal to a threshold.
rows = st.lists(st.integers(-40, 0).map(lambda i: i / 4), min_size=1, max_size=40)


def scaled_row(values):
    row = np.array(values, dtype=np.float64)
    return row - row.max()


@given(rows, st.integers(1, 45))
def test_largest_keeps_exactly_k_with_ties_to_the_lowest_ids(values, count):
    kept = largest(np.array(values), count)
    assert kept.tolist() == sorted(canonical(values)[:count])


@examples(100)
@given(
    rows,
    st.integers(-1, 45),
    st.sampled_from([0.013, 0.1, 0.31, 0.5003, 0.77, 0.9001, 0.99, 0.99999, 1.0]),
    st.sampled_from([0.0, 0.011, 0.1003, 0.5, 1.0]),
)
def test_filters_agree_with_the_slow_reference(values, top_k, top_p, min_p):
    sampling = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    scaled = scaled_row(values)
    assert kept_token_ids(scaled, sampling).tolist() == kept_slowly(scaled, sampling)


@given(rows, st.floats(1e-9, 1.0), st.floats(0.0, 1.0), st.integers(0, 40))
def test_some_token_is_always_kept(values, top_p, min_p, top_k):
    sampling = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_token_ids(scaled_row(values), sampling)
    assert kept.size >= 1
    assert int(np.argmax(values)) in kept


@given(rows, st.integers(0, 40))
def test_masked_tokens_are_never_kept(values, num_masked):
    scaled = scaled_row(values)
    best = int(np.argmax(scaled))
    masked = [i for i in range(min(num_masked, len(values))) if i != best]
    scaled[masked] = -np.inf
    for sampling in (SamplingParams(), SamplingParams(top_k=38), SamplingParams(top_p=0.9999)):
        assert not set(kept_token_ids(scaled, sampling).tolist()) & set(masked)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    scaled = scaled_row(np.log([0.5, 0.3, 0.15, 0.05]))
    for top_p, expected in ((0.49, [0]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2])):
        assert kept_token_ids(scaled, SamplingParams(top_p=top_p)).tolist() == expected


def test_top_p_counts_probabilities_of_what_top_k_left():
    scaled = scaled_row(np.log([0.4, 0.3, 0.2, 0.1]))
    # 0.4 of 0.7 is 0.57: one token reaches 0.55 of the two, it would not of all four
    assert kept_token_ids(scaled, SamplingParams(top_k=2, top_p=0.55)).tolist() == [0]
    assert kept_token_ids(scaled, SamplingParams(top_p=0.55)).tolist() == [0, 1]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 0.999999])
def test_sorting_only_the_head_changes_nothing(top_p):
    rng = np.random.default_rng(0)
    for spread in (0.1, 2.0, 8.0):
        scaled = scaled_row(rng.normal(scale=spread, size=3000))
        kept = kept_token_ids(scaled, SamplingParams(top_p=top_p))
        order = np.argsort(-scaled, kind="stable")
        weights = np.exp(scaled)
        size = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1
        assert kept.tolist() == sorted(order[:size].tolist())
