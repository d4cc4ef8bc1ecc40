"""Native scores of a prompt's tokens are NumPy's to the bit, on every level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from op_checks.logit_rows import logit_rows
from quickstep.errors import EngineError
from quickstep.ops.native.backend import load_native, native_status
from quickstep.runtime.sampling.logprobs import score_tokens
from quickstep.runtime.sampling.native_sampler import NativeSampler
from quickstep.runtime.sampling.prompt_scores import NativeScorer
from quickstep.runtime.sampling.state import SamplingState
from quickstep.types import Admission, SamplingParams

TABLES = [load_native(2, level) for level in native_status().levels]


def logits_of(kind, num_rows, vocab, seed, scale):
    rng = np.random.default_rng(seed)
    rows = logit_rows(rng, kind, num_rows, vocab, scale)
    if kind == "broken":
        rows[rng.integers(num_rows), rng.integers(vocab)] = rng.choice([np.nan, np.inf])
    elif kind == "empty":
        rows[rng.integers(num_rows)] = -np.inf
    return torch.from_numpy(rows)


def assert_same_scores(logits, token_ids, num_top):
    expected = score_tokens(logits, token_ids, num_top)
    for table in TABLES:
        scorer = NativeScorer(table.steps.scores(logits.shape[1]))
        assert scorer.score(logits, token_ids, num_top) == expected, table.name
    return expected


@examples(80)
@given(
    st.sampled_from(["normal", "normal", "ties", "flat", "masked", "broken", "empty"]),
    st.sampled_from([1, 2, 63, 64, 65, 130, 1000, 4097]),
    st.integers(1, 9),
    st.sampled_from([0, 0, 1, 5, 70, 5000]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 2.0, 12.0]),
)
def test_native_scores_are_numpys_on_every_level(kind, vocab, num_rows, num_top, seed, scale):
    logits = logits_of(kind, num_rows, vocab, seed, scale)
    token_ids = np.random.default_rng(seed + 1).integers(vocab, size=num_rows).tolist()
    found = assert_same_scores(logits, token_ids, min(num_top, vocab))
    assert (found is None) == (kind in ("broken", "empty"))


def test_scores_of_a_large_vocabulary_are_numpys():
    logits = logits_of("normal", 5, 151_936, 1, 3.0)
    for num_top in (0, 1, 20, 3000):
        assert_same_scores(logits, [0, 63, 64, 77_777, 151_935], num_top)


def test_a_prompts_token_scores_as_it_did_when_it_was_sampled():
    logits = logits_of("ties", 6, 300, 5, 2.0)
    sampling = SamplingParams(logprobs=4)
    states = [
        SamplingState(Admission(0, "r#0", (1,), 1, sampling, seed, frozenset()), 300)
        for seed in range(6)
    ]
    for table in TABLES:
        samples = NativeSampler(table.steps.sampler(300)).sample(logits, states)
        scorer = NativeScorer(table.steps.scores(300))
        token_ids = [sample.token_id for sample in samples]
        assert scorer.score(logits, token_ids, 4) == [sample.logprobs for sample in samples]


def test_a_scorer_takes_more_positions_after_fewer():
    for table in TABLES:
        scorer = NativeScorer(table.steps.scores(1000))
        for num_rows in (1, 40, 3):
            logits = logits_of("normal", num_rows, 1000, num_rows, 2.0)
            token_ids = list(range(num_rows))
            assert scorer.score(logits, token_ids, 2) == score_tokens(logits, token_ids, 2)


def test_a_token_that_the_model_lacks_is_an_error():
    logits = logits_of("normal", 2, 100, 0, 1.0)
    for token_id in (-1, 100):
        with pytest.raises(EngineError, match="scoring tokens"):
            NativeScorer(TABLES[0].steps.scores(100)).score(logits, [5, token_id], 0)
