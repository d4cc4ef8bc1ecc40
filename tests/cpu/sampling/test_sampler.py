"""One row through the whole order of effects, and many rows that must not notice each other."""

import math

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from sampled_rows import VOCAB, logits_of, state_of, token_of

from quickstep.errors import RequestError
from quickstep.runtime.sampling.noise import gumbel
from quickstep.runtime.sampling.sampler import Sample, SampleFailure, sample, sample_row
from quickstep.types import SamplingParams


def adjusted_slowly(row, sampling, prompt, outputs, eos):
    """Penalties, bias and masks by the definition."""
    logits = [float(x) for x in row]
    for i in set(prompt) | set(outputs):
        p = sampling.repetition_penalty
        logits[i] = logits[i] * p if logits[i] < 0 else logits[i] / p
    for i in set(outputs):
        logits[i] -= sampling.presence_penalty + sampling.frequency_penalty * outputs.count(i)
    for i, bias in sampling.logit_bias.items():
        logits[i] += bias
    if sampling.allowed_token_ids:
        logits = [x if i in sampling.allowed_token_ids else -math.inf for i, x in enumerate(logits)]
    if len(outputs) < sampling.min_tokens:
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
        logits = [-math.inf if i in ends else x for i, x in enumerate(logits)]
    return logits


token_lists = st.lists(st.integers(0, 9), max_size=12)


@examples(80)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    token_lists,
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-1.0, 0.0, 1.5]),
    st.sampled_from([0.0, 0.7, -2.0]),
    st.dictionaries(st.integers(0, 39), st.sampled_from([-100.0, 2.5, 6.0]), max_size=3),
)
def test_penalties_and_bias_agree_with_the_definition(
    seed, prompt, outputs, repetition, presence, frequency, bias
):
    sampling = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    row = logits_of(seed)[0].numpy()
    logits = row.astype(np.float64)
    state_of(sampling, prompt, outputs).adjust_(logits)
    assert logits.tolist() == pytest.approx(adjusted_slowly(row, sampling, prompt, outputs, ()))


@given(token_lists, st.integers(0, 12))
def test_a_state_rebuilt_after_preemption_equals_the_one_that_stayed(outputs, cut):
    sampling = SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=6
    )
    stayed = state_of(sampling, eos=(5,))
    for token_id in outputs:
        stayed.record(token_id)
    rebuilt = state_of(sampling, outputs=outputs[:cut], eos=(5,))
    for token_id in outputs[cut:]:
        rebuilt.record(token_id)
    first, second = (logits_of(3)[0].numpy().astype(np.float64) for _ in range(2))
    stayed.adjust_(first)
    rebuilt.adjust_(second)
    assert first.tobytes() == second.tobytes()
    assert stayed.num_outputs == rebuilt.num_outputs


def test_repetition_penalty_lowers_negative_scores_too():
    logits = np.array([-1.0, 2.0, 0.5, 0.0])
    state_of(SamplingParams(repetition_penalty=2.0), (0, 1), (), vocab=4).adjust_(logits)
    assert logits.tolist() == [-2.0, 1.0, 0.5, 0.0]


def test_presence_and_frequency_ignore_the_prompt():
    sampling = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    logits = np.zeros(4)
    state_of(sampling, prompt=(0, 0, 1), outputs=(1, 1, 2), vocab=4).adjust_(logits)
    assert logits.tolist() == [0.0, -2.0, -1.5, 0.0]


def test_temperature_zero_is_argmax_and_ties_go_to_the_lowest_id():
    row = np.array([0.0, 5.0, 5.0, 1.0], np.float32)
    for sampling in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, top_k=2, top_p=0.5),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=0.0, logit_bias={0: 5.0}),
    ):
        expected = 0 if sampling.logit_bias else 1
        assert token_of(row, state_of(sampling, vocab=4)) == expected


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-12, 1e-3])
def test_a_tiny_temperature_samples_the_argmax_without_overflow(temperature):
    row = logits_of(5)[0].numpy()
    state = state_of(SamplingParams(temperature=temperature, top_p=0.9, top_k=5, min_p=0.1))
    assert token_of(row, state) == int(row.argmax())


def test_ends_are_banned_until_min_tokens_outputs_exist():
    row = np.zeros(8, np.float32)
    row[3], row[4], row[5] = 9.0, 8.0, 7.0
    sampling = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(4, 99))
    state = state_of(sampling, eos=(3,), vocab=8)
    tokens = []
    for _ in range(4):
        tokens.append(token_of(row, state))
        state.record(tokens[-1])
    assert tokens == [5, 5, 3, 3]


def test_ignored_eos_is_an_ordinary_token_under_min_tokens():
    row = np.zeros(8, np.float32)
    row[3] = 9.0
    sampling = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert token_of(row, state_of(sampling, eos=(3,), vocab=8)) == 3


def test_the_allowed_mask_comes_after_the_bias():
    row = logits_of(1)[0].numpy()
    sampling = SamplingParams(logit_bias={0: 100.0}, allowed_token_ids=(4, 6), temperature=2.0)
    assert {token_of(row, state_of(sampling, seed=s)) for s in range(50)} == {4, 6}


def test_a_row_with_no_token_left_fails():
    sampling = SamplingParams(allowed_token_ids=(3,), min_tokens=1)
    sampled = sample_row(logits_of(1)[0].numpy(), state_of(sampling, eos=(3,)))
    assert isinstance(sampled, SampleFailure)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_or_infinity_fails_alone(bad, temperature):
    logits = logits_of(2, rows=3)
    expected = [int(row.argmax()) for row in logits]
    logits[1, 5] = bad
    states = [state_of(SamplingParams(temperature=0.0)) for _ in range(3)]
    states[1] = state_of(SamplingParams(temperature=temperature))
    sampled = sample(logits, states)
    assert isinstance(sampled[1], SampleFailure)
    assert [sampled[0], sampled[2]] == [Sample(expected[0]), Sample(expected[2])]


def test_ids_outside_the_vocabulary_are_the_requests_fault():
    for sampling in (SamplingParams(logit_bias={40: 1.0}), SamplingParams(allowed_token_ids=(-1,))):
        with pytest.raises(RequestError):
            state_of(sampling)


def test_an_unfiltered_sample_is_the_argmax_of_scaled_logits_plus_noise():
    row = logits_of(9)[0].numpy()
    for seed in range(100):
        scores = row.astype(np.float64) / 0.8 + gumbel(seed, 2, np.arange(VOCAB))
        state = state_of(SamplingParams(temperature=0.8), outputs=(1, 1), seed=seed)
        assert token_of(row, state) == int(scores.argmax())


mixed_params = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.8, logprobs=5),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=2),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.02),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=1),
    SamplingParams(temperature=0.0, presence_penalty=0.5),
]


# 8193 and 5003: rows at every alignment, tails of vector loops, splits between threads.
@pytest.mark.parametrize("vocab", [63, 5003, 8193])
def test_a_row_is_the_same_alone_and_in_any_batch_and_thread_count(vocab):
    logits = logits_of(4, rows=21, vocab=vocab)
    states = [
        state_of(mixed_params[i % len(mixed_params)], outputs=(i, 5), seed=i, vocab=vocab)
        for i in range(len(logits))
    ]
    alone = [sample(logits[i : i + 1].clone(), [states[i]])[0] for i in range(len(logits))]
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            order = np.random.default_rng(num_threads).permutation(len(logits)).tolist()
            sampled = sample(logits[order], [states[i] for i in order])
            assert sampled == [alone[i] for i in order]
    finally:
        torch.set_num_threads(threads)


def test_the_shared_argmax_agrees_with_the_argmax_of_each_row_at_ties():
    logits = torch.randint(0, 3, (16, 70_001), generator=torch.Generator().manual_seed(0)).float()
    plain = [state_of(SamplingParams(temperature=0.0), vocab=70_001)] * 16
    one_by_one = [sample_row(row.numpy(), state) for row, state in zip(logits, plain, strict=True)]
    assert sample(logits, plain) == one_by_one
    assert [s.token_id for s in one_by_one] == [row.tolist().index(2.0) for row in logits]


def test_logprobs_are_log_softmax_of_the_raw_logits():
    logits = logits_of(6)
    row = logits[0].numpy()
    reference = torch.log_softmax(logits[0].double(), dim=0).numpy()
    sampling = SamplingParams(temperature=0.3, top_k=3, logit_bias={1: 50.0}, logprobs=4)
    sampled = sample_row(row, state_of(sampling))
    assert isinstance(sampled, Sample) and sampled.logprobs is not None
    assert sampled.token_id == sampled.logprobs.token_id == 1
    assert sampled.logprobs.logprob == pytest.approx(reference[1], abs=1e-6)
    order = np.argsort(-reference, kind="stable").tolist()
    assert [token_id for token_id, _ in sampled.logprobs.top] == order[:4]
    assert [p for _, p in sampled.logprobs.top] == pytest.approx(reference[order[:4]], abs=1e-6)
    assert sampled.logprobs.rank == order.index(1) + 1


def test_logprobs_of_tokens_requested_by_id_come_after_the_most_likely():
    row = logits_of(6)[0].numpy()
    order = np.argsort(-row, kind="stable").tolist()
    requested_ids = (order[4], order[0], order[3], order[4])
    sampling = SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=requested_ids)
    sampled = sample_row(row, state_of(sampling))
    assert isinstance(sampled, Sample) and sampled.logprobs is not None
    shown = [order[0], order[1], order[3], order[4]]
    assert [token_id for token_id, _ in sampled.logprobs.top] == shown
    whole = sample_row(row, state_of(SamplingParams(temperature=0.0, logprobs=6)))
    assert isinstance(whole, Sample) and whole.logprobs is not None
    by_id = dict(whole.logprobs.top)
    assert [p for _, p in sampled.logprobs.top] == [by_id[token_id] for token_id in shown]


def test_ranks_of_equal_logits_follow_the_token_id():
    row = np.array([1.0, 3.0, 3.0, 3.0, 0.0], np.float32)
    sampling = SamplingParams(temperature=0.0, logprobs=2, allowed_token_ids=(2,))
    sampled = sample_row(row, state_of(sampling, vocab=5))
    assert isinstance(sampled, Sample) and sampled.logprobs is not None
    assert sampled.logprobs.rank == 2
    assert [token_id for token_id, _ in sampled.logprobs.top] == [1, 2]


def test_more_top_logprobs_than_tokens_gives_all_tokens():
    sampled = sample_row(logits_of(6)[0].numpy(), state_of(SamplingParams(logprobs=VOCAB + 9)))
    assert isinstance(sampled, Sample) and sampled.logprobs is not None
    assert len(sampled.logprobs.top) == VOCAB
