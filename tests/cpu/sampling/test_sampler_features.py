"""DRY, typical-p, XTC, bad words and the reasoning budget: each by its definition in plain Python,
its law over many seeds, and all of them as functions of the tokens alone.
"""

import itertools
import math

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sampled_rows import LOGITS, NUM_SAMPLES, VOCAB, assert_follows, logits_of, state_of, token_of

from quickstep.errors import RequestError
from quickstep.runtime.sampling import penalties
from quickstep.runtime.sampling.filters import kept_token_ids
from quickstep.runtime.sampling.noise import chance
from quickstep.runtime.sampling.penalties import BadWords, DryPenalty
from quickstep.runtime.sampling.reasoning import ThinkingBudget
from quickstep.runtime.sampling.sampler import Sample, sample, sample_row
from quickstep.runtime.sampling.state import SamplingState
from quickstep.sampling_params import ReasoningTokens, TokenForms
from quickstep.types import Admission, SamplingParams

letters = st.lists(st.integers(0, 2), max_size=40)


def penalised_slowly(tokens, params, breakers):
    """Each earlier place, its repetition counted token by token."""
    window = tokens[-params.dry_range :] if params.dry_range else tokens
    # what no repetition reaches into: everything up to the last breaker
    run = next(
        (
            back
            for back in range(len(tokens))
            if any(
                tuple(tokens[: len(tokens) - back][-len(ids) :]) == ids
                and len(ids) <= len(tokens) - back
                for ids in breakers
            )
        ),
        len(tokens),
    )
    longest = {}
    for end in range(1, len(window)):
        length = 0
        while length < min(end, run) and window[end - 1 - length] == window[-1 - length]:
            length += 1
        if length >= params.dry_allowed_length:
            longest[window[end]] = max(longest.get(window[end], 0), length)
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in longest.items()
    }


@examples(100)
@given(
    letters,
    letters,
    st.integers(1, 4),
    st.sampled_from([0, 0, 3, 10]),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=2),
)
def test_dry_agrees_with_the_slow_reference_however_the_tokens_came(
    first, then, allowed_length, reach, breakers
):
    params = SamplingParams(
        dry_multiplier=0.7, dry_base=1.5, dry_allowed_length=allowed_length, dry_range=reach
    )
    stayed = DryPenalty(params, breakers, first, 4)
    for token_id in then:
        stayed.record(token_id)
    rebuilt = DryPenalty(params, breakers, first + then, 4)
    expected = np.zeros(4)
    for token_id, amount in penalised_slowly(first + then, params, breakers).items():
        expected[token_id] -= amount
    for penalty in (stayed, rebuilt):
        logits = np.zeros(4)
        token_ids, amounts = penalty.penalties()
        logits[token_ids] -= amounts
        assert logits.tolist() == pytest.approx(expected.tolist())


@given(letters, letters, st.integers(1, 30))
def test_matches_with_the_end_are_the_same_however_they_are_found(first, then, times):
    tokens = (first + then) * times
    expected = penalties._prefix_matches(tokens[::-1])[:0:-1]
    assert penalties._suffix_matches(np.array(tokens, dtype=np.int64)).tolist() == expected


def test_a_text_without_long_repetitions_is_compared_without_a_loop(monkeypatch):
    monkeypatch.setattr(
        penalties, "_prefix_matches", lambda tokens: pytest.fail("it was looped over")
    )
    text = np.random.default_rng(1).integers(0, 500, 20_000)
    text[5_000:5_040] = text[-40:]
    assert penalties._suffix_matches(text)[5_039] == 40
    monkeypatch.setattr(DryPenalty, "_breaks_at", lambda *_: pytest.fail("it was looped over"))
    assert DryPenalty(SamplingParams(dry_multiplier=1.0), ((7, 501),), text.tolist(), 502)


def test_a_long_repetition_is_penalised_without_infinity():
    params = SamplingParams(dry_multiplier=1.0, dry_base=10.0)
    penalty = DryPenalty(params, (), [0, 1] * 2000, 2)
    logits = np.zeros(2)
    token_ids, amounts = penalty.penalties()
    logits[token_ids] -= amounts
    assert np.isfinite(logits).all() and logits[0] == -1e30


def typical_slowly(values, typical_p):
    total = sum(math.exp(v) for v in values)
    probabilities = [math.exp(v) / total for v in values]
    entropy = -sum(p * math.log(p) for p in probabilities)
    off = [abs(-math.log(p) - entropy) for p in probabilities]
    order = sorted(range(len(values)), key=lambda i: (off[i], i))
    kept, cumulative = [], 0.0
    for i in order:
        kept.append(i)
        cumulative += probabilities[i]
        if cumulative >= typical_p:
            break
    return sorted(kept), sorted(off)


@examples(80)
@given(
    st.lists(st.floats(-8, 0), min_size=1, max_size=30, unique=True),
    st.sampled_from([0.0531, 0.2113, 0.5003, 0.9001, 0.9903]),
)
def test_typical_p_agrees_with_the_slow_reference(values, typical_p):
    scaled = np.array(values) - max(values)
    expected, off = typical_slowly(scaled.tolist(), typical_p)
    if any(b - a < 1e-9 for a, b in itertools.pairwise(off)):
        return  # a tie by the definition, which rounding breaks either way
    assert kept_token_ids(scaled, SamplingParams(typical_p=typical_p)).tolist() == expected


def test_typical_p_leaves_out_what_is_too_likely():
    scaled = np.log([0.4, 0.15, 0.15, 0.15, 0.15])
    kept = kept_token_ids(scaled - scaled.max(), SamplingParams(typical_p=0.5))
    assert kept.tolist() == [1, 2, 3, 4]


def without_top_slowly(values, threshold):
    total = math.fsum(math.exp(v) for v in values)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    top = [i for i in order if math.exp(values[i]) >= threshold * total]
    return sorted(set(range(len(values))) - set(top[:-1]))


@examples(80)
@given(
    st.lists(st.integers(-12, 0).map(lambda i: i / 4), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.0173, 0.1003, 0.2507, 0.4999, 1.0]),
)
def test_xtc_leaves_out_all_but_the_least_of_the_top(values, threshold):
    scaled = np.array(values) - max(values)
    sampling = SamplingParams(xtc_probability=1.0, xtc_threshold=threshold)
    kept = kept_token_ids(scaled, sampling, applies_xtc=True)
    assert kept.tolist() == without_top_slowly(scaled.tolist(), threshold)
    assert kept_token_ids(scaled, sampling).tolist() == list(range(len(values)))


def test_chances_are_uniform_and_belong_to_seed_and_position():
    sampled = np.array([chance(seed, position) for seed in range(100) for position in range(100)])
    assert len(set(sampled.tolist())) == sampled.size
    counts = np.bincount((sampled * 20).astype(int), minlength=20)
    statistic = ((counts - 500) ** 2 / 500).sum()
    assert statistic < 19 + 2 * math.sqrt(19 * 9.2) + 2 * 9.2
    assert chance(7, 3) == chance(7, 3) != chance(7, 4)


def law_of(weights):
    total = sum(weights.values())
    return {i: w / total for i, w in weights.items()}


def tokens_over_seeds(sampling, outputs=()):
    sampled = []
    for seed in range(NUM_SAMPLES):
        admission = Admission(0, "r#0", (1, *outputs), 1, sampling, seed)
        row = sample_row(LOGITS, SamplingState(admission, len(LOGITS)))
        assert isinstance(row, Sample)
        sampled.append(row.token_id)
    return sampled


def all_weights():
    return {i: math.exp(x) for i, x in enumerate(LOGITS.tolist())}


def test_typical_p_follows_its_law():
    kept, _ = typical_slowly(LOGITS.tolist(), 0.6)
    weights = all_weights()
    sampled = tokens_over_seeds(SamplingParams(typical_p=0.6))
    assert_follows(law_of({i: weights[i] for i in kept}), sampled)


def test_xtc_follows_its_law():
    weights = all_weights()
    plain = law_of(weights)
    cut = law_of({i: weights[i] for i in without_top_slowly(LOGITS.tolist(), 0.1)})
    mixed = {i: 0.7 * plain[i] + 0.3 * cut.get(i, 0.0) for i in plain}
    sampled = tokens_over_seeds(SamplingParams(xtc_probability=0.3, xtc_threshold=0.1))
    assert_follows(mixed, sampled)


def test_dry_and_bad_words_follow_their_law():
    # 2 3 4 2 3: 4 would go on with a repetition of two, and "3 5" is a bad word
    sampling = SamplingParams(
        dry_multiplier=1.2,
        bad_words=("x",),
        in_tokens=TokenForms(bad_words=((3, 5), (0,), (4, 6))),
    )
    weights = all_weights()
    weights[4] *= math.exp(-1.2)
    del weights[5], weights[0]
    assert_follows(law_of(weights), tokens_over_seeds(sampling, (2, 3, 4, 2, 3)))


@given(
    letters, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=5)
)
def test_bad_words_ban_what_would_complete_one(outputs, words):
    found = BadWords(words, outputs, 5).banned().tolist()
    banned = {ids[-1] for ids in words if tuple(outputs[len(outputs) - len(ids) + 1 :]) == ids[:-1]}
    assert len(found) == len(set(found)) and set(found) == banned


def test_bad_words_give_way_where_nothing_else_may_follow():
    sampling = SamplingParams(allowed_token_ids=(4,), in_tokens=TokenForms(bad_words=((4,),)))
    assert token_of(logits_of(1)[0].numpy(), state_of(sampling)) == 4


PIECES = {10: b"<o>", 11: b"<", 12: b"o>", 2: b"\n", 20: b"</", 21: b"c>", 22: b"x</c>\n"}
TAGS = ReasoningTokens(b"<o>", b"</c>", (20, 21), PIECES)


def reasoned(budget, starts_open, preferred, num_tokens=12, message=()):
    """Greedy tokens where the model would write `preferred` in turn."""
    tags = replace(TAGS, starts_open=starts_open, message_ids=message)
    sampling = SamplingParams(
        temperature=0.0, thinking_budget=budget, in_tokens=TokenForms(reasoning=tags)
    )
    state, tokens = state_of(sampling), []
    for position in range(num_tokens):
        row = np.zeros(VOCAB, np.float32)
        row[preferred[position % len(preferred)]] = 5.0
        tokens.append(token_of(row, state))
        state.record(tokens[-1])
    return tokens


@pytest.mark.parametrize(
    ("budget", "starts_open", "preferred", "expected"),
    [
        (3, True, [1], [1, 1, 1, 20, 21, 1, 1]),
        (0, True, [1], [20, 21, 1, 1]),
        (2, False, [10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [10, 1, 1, 20, 21, 1]),
        (2, False, [2, 11, 12, 1, 1, 1, 1, 1, 1, 1, 1, 1], [2, 11, 12, 1, 1, 20, 21, 1]),
        (0, False, [10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [10, 20, 21, 1]),
        (9, True, [1, 22, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 22, 1, 1, 1, 1, 1, 1, 1, 1]),
        (2, True, [1, 20, 3, 1, 1, 1], [1, 20, 21, 1, 1, 1]),
        (1, False, [1], [1] * 12),
    ],
)
def test_the_reasoning_ends_after_its_budget(budget, starts_open, preferred, expected):
    assert reasoned(budget, starts_open, preferred)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("budget", "starts_open", "preferred", "expected"),
    [
        (3, True, [1], [1, 1, 1, 7, 8, 7, 20, 21, 1, 1]),
        (0, True, [1], [7, 8, 7, 20, 21, 1]),
        (2, False, [10] + [1] * 11, [10, 1, 1, 7, 8, 7, 20, 21, 1]),
        (0, False, [10] + [1] * 11, [10, 7, 8, 7, 20, 21, 1]),
        (2, True, [1, 20, 3, 1, 1, 1], [1, 20, 21, 1]),  # the model closes it by itself
        (2, True, [1, 20, 21, 1, 1, 1], [1, 20, 21, 1]),
        (9, True, [1, 22] + [1] * 10, [1, 22, 1, 1]),
        (1, False, [1], [1] * 12),
    ],
)
def test_a_message_comes_before_the_tag_that_the_budget_writes(
    budget, starts_open, preferred, expected
):
    found = reasoned(budget, starts_open, preferred, message=(7, 8, 7))
    assert found[: len(expected)] == expected


@pytest.mark.parametrize("place", range(10))
def test_a_message_continues_after_an_interruption(place):
    tags = replace(TAGS, starts_open=True, message_ids=(7, 20, 8, 20))
    outputs = [1, 1, 7, 20, 8, 20, 20, 21, 1]
    budget = ThinkingBudget(2, tags, outputs[:place])
    assert budget.next_tokens() == (tuple(outputs[place:8]) if place >= 2 else ())


def test_an_answer_that_speaks_of_the_tag_is_no_reasoning():
    outputs = [1] * 8 + [10] + [1] * 5
    assert ThinkingBudget(2, TAGS, outputs).forced_token is None


def test_what_was_not_turned_into_tokens_is_refused():
    for sampling in (
        SamplingParams(bad_words=("x",)),
        SamplingParams(thinking_budget=3),
        SamplingParams(dry_multiplier=1.0),
    ):
        with pytest.raises(RequestError):
            state_of(sampling)


everything = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 7]),
    top_p=st.sampled_from([1.0, 0.8]),
    typical_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.05]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_allowed_length=st.sampled_from([1, 2]),
    dry_range=st.sampled_from([0, 6]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    thinking_budget=st.sampled_from([None, 2]),
    logit_bias=st.sampled_from([{}, {5: 2.0}]),
    logprobs=st.sampled_from([None, 2]),
    in_tokens=st.just(
        TokenForms(
            bad_words=((3,), (4, 5), (6, 7, 8)),
            dry_breakers=((9,), (1, 2)),
            reasoning=replace(TAGS, starts_open=True),
        )
    ),
)


def peaky(seed, position):
    """Few likely tokens, so that repetitions and prefixes of bad words really come up."""
    row = logits_of((seed, position))[0]
    row[:9] += 4.0
    return row


@settings(max_examples=60)
@given(everything, st.integers(0, 50), st.integers(0, 24))
def test_all_of_them_continue_after_a_preemption_as_if_there_was_none(sampling, seed, cut):
    stayed = state_of(sampling, seed=seed)
    tokens = []
    for position in range(25):
        state = state_of(sampling, outputs=tokens, seed=seed) if position == cut else stayed
        sampled = sample_row(peaky(seed, position).numpy(), state)
        assert sampled == sample_row(peaky(seed, position).numpy(), stayed)
        assert isinstance(sampled, Sample)
        tokens.append(sampled.token_id)
        stayed = state
        stayed.record(sampled.token_id)


@settings(max_examples=25)
@given(st.lists(everything, min_size=2, max_size=8), st.integers(0, 50), st.randoms())
def test_all_of_them_sample_the_same_alone_and_in_any_batch(params, seed, order):
    outputs = [(4, 5, 6, 7, 4, 5)[: i + 1] for i in range(len(params))]
    states = [state_of(one, outputs=o, seed=seed) for one, o in zip(params, outputs, strict=True)]
    logits = logits_of(seed, rows=len(params))
    alone = [sample(logits[i : i + 1].clone(), [states[i]])[0] for i in range(len(params))]
    places = list(range(len(params)))
    order.shuffle(places)
    assert sample(logits[places], [states[i] for i in places]) == [alone[i] for i in places]
