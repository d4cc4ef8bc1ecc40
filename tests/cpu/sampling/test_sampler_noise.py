"""The noise keeps its integer definition, and looks uniform and independent."""

import math

import numpy as np

from quickstep.runtime.sampling.exact_math import exp_nonpositive, log
from quickstep.runtime.sampling.noise import gumbel, gumbel_argmax, gumbel_of_bits, noise_bits

MASK = 2**64 - 1
WEYL, MIX_A, MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x):
    x = ((x ^ (x >> 30)) * MIX_A) & MASK
    x = ((x ^ (x >> 27)) * MIX_B) & MASK
    return x ^ (x >> 31)


def bits_by_definition(seed, position, token_id):
    key_a = mix((seed + WEYL) & MASK)
    key_b = mix((key_a + (position + 1) * 0xD1342543DE82EF95) & MASK)
    key_c = mix((key_b + WEYL) & MASK)
    x = (key_b + (token_id + 1) * WEYL) & MASK
    x = ((x ^ (x >> 30)) * MIX_A) & MASK
    x = ((x ^ (x >> 27) ^ key_c) * MIX_B) & MASK
    return (x ^ (x >> 31)) >> 12


def test_bits_follow_the_definition_in_python_integers():
    ids = np.array([0, 1, 2, 7, 4095, 151_935, 262_143])
    for seed in (0, 1, -1, 2**63, 2**64 - 1, -(2**63)):
        for position in (0, 1, 1000):
            expected = [bits_by_definition(seed, position, i) for i in ids.tolist()]
            assert noise_bits(seed, position, ids).tolist() == expected


def test_bits_are_pinned():
    pinned = [4064540414137467, 1135388374922337, 2693809465057201]
    assert noise_bits(0, 0, np.arange(3)).tolist() == pinned


def test_gumbel_is_finite_at_both_ends_and_falls_with_bits():
    values = gumbel_of_bits(np.array([0, 1, 2**51, 2**52 - 1], dtype=np.uint64))
    assert np.isfinite(values).all()
    assert (np.diff(values) < 0).all()
    assert math.isclose(values[0], 53 * math.log(2), rel_tol=1e-12)
    assert math.isclose(values[3], -math.log(53 * math.log(2)), rel_tol=1e-12)


def test_a_token_has_the_same_noise_whichever_tokens_are_next_to_it():
    full = gumbel(5, 3, np.arange(1000))
    for ids in (np.arange(1000)[::7], np.array([999]), np.arange(1, 1000), np.arange(17, 34)):
        assert (gumbel(5, 3, ids) == full[ids]).all()


def uniforms(seed, position, count):
    return (noise_bits(seed, position, np.arange(count)) + 0.5) / 2.0**52


def test_noise_is_uniform_over_tokens_over_positions_and_over_seeds():
    count, bins = 20_000, 50
    over_tokens = uniforms(11, 0, count)
    over_positions = np.array([uniforms(11, p, 1)[0] for p in range(count)])
    over_seeds = np.array([uniforms(s, 0, 1)[0] for s in range(count)])
    for sample in (over_tokens, over_positions, over_seeds):
        observed = np.bincount((sample * bins).astype(int), minlength=bins)
        statistic = ((observed - count / bins) ** 2 / (count / bins)).sum()
        # exceeded with a probability of at most 1e-4 (Laurent and Massart 2000)
        assert statistic < (bins - 1) + 2 * math.sqrt((bins - 1) * 9.2) + 2 * 9.2


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated():
    count = 20_000
    base = uniforms(3, 5, count + 1) - 0.5
    others = (uniforms(4, 5, count), uniforms(3, 6, count), base[1:] + 0.5)
    for other in others:
        correlation = np.mean(base[:count] * (other - 0.5)) * 12
        assert abs(correlation) < 5 / math.sqrt(count)


def test_no_two_rows_share_a_shifted_copy_of_one_stream():
    rows = [set(noise_bits(s, p, np.arange(2000)).tolist()) for s in range(8) for p in range(8)]
    assert len(set().union(*rows)) == sum(len(row) for row in rows)


def test_the_largest_noisy_value_is_that_of_the_exact_noise():
    rng = np.random.default_rng(0)
    for seed in range(40):
        ids = np.arange(2000)
        values = np.round(rng.normal(scale=3.0, size=2000), seed % 3)
        noise = gumbel(seed, 1, ids)
        found = gumbel_argmax(values, noise_bits(seed, 1, ids))
        assert found == int(np.argmax(values + noise))


def test_the_largest_of_values_that_are_nearly_equal_is_that_of_the_exact_noise():
    for seed in range(40):
        ids = np.arange(50)
        noise = gumbel(seed, 1, ids)
        values = 1e-9 * np.random.default_rng(seed).normal(size=50) - noise
        found = gumbel_argmax(values, noise_bits(seed, 1, ids))
        assert found == int(np.argmax(values + noise))


def test_exact_functions_are_near_the_true_ones():
    x = np.concatenate((np.linspace(-700.0, 0.0, 5001), -np.logspace(-12, 0, 200), [0.0]))
    assert np.abs(exp_nonpositive(x) / np.exp(x) - 1.0).max() < 1e-12
    y = np.concatenate((np.logspace(-300, -1, 3001), 1.0 - np.logspace(-15, -1, 300)))
    assert np.abs(log(y) / np.log(y) - 1.0).max() < 1e-12
    assert log(np.ones(1)) == 0.0
