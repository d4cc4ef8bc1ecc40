"""Rows, sequences and parameters that every sampler is compared on."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from op_checks.logit_rows import logit_rows
from quickstep.runtime.sampling.logit_changes import bits_of_bytes
from quickstep.runtime.sampling.state import SamplingState
from quickstep.sampling_params import ReasoningTokens, TokenForms
from quickstep.types import Admission, SamplingParams


def state_of(sampling, vocab, seed=0, outputs=()):
    prompt = tuple(i % vocab for i in (0, 5, 17))
    tokens = prompt + tuple(i % vocab for i in outputs)
    admission = Admission(0, "r#0", tokens, len(prompt), sampling, seed, frozenset({0}))
    return SamplingState(admission, vocab)


def rows_of(kind, num_rows, vocab, seed, scale):
    rng = np.random.default_rng(seed)
    rows = logit_rows(rng, kind, num_rows, vocab, scale)
    if kind == "broken":
        rows[0, rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        rows[-1] = -np.inf
    return torch.from_numpy(rows)


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
    typical_p=st.sampled_from([1.0, 1.0, 0.05, 0.6, 0.97]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.02, 0.2, 0.5]),
)


EVERY_FILTER = [
    SamplingParams(temperature=0.0, logprobs=20),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.95, logprobs=3),
    SamplingParams(temperature=1.2, top_k=50, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(typical_p=0.9),
    SamplingParams(top_k=5000, typical_p=0.5, top_p=0.9, min_p=0.01),
    SamplingParams(typical_p=0.2, xtc_probability=1.0, xtc_threshold=0.001),
    SamplingParams(top_p=0.9, xtc_probability=1.0, xtc_threshold=0.0001),
    SamplingParams(frequency_penalty=1.0, logit_bias={5: 3.0}, min_tokens=3),
]

_FORMS = TokenForms(
    bad_words=((7,), (3, 9), (17, 11, 12)),
    dry_breakers=((2,),),
    reasoning=ReasoningTokens(b"<", b"/>", (4, 5), {1: b"<", 4: b"/", 5: b">"}, starts_open=True),
)
_WORDS = {"bad_words": ("x",), "in_tokens": _FORMS}
EVERY_CHANGE = [
    SamplingParams(presence_penalty=0.7, repetition_penalty=0.8, frequency_penalty=-0.3),
    SamplingParams(dry_multiplier=2.0, dry_allowed_length=1, in_tokens=_FORMS),
    SamplingParams(
        dry_multiplier=2.0,
        dry_allowed_length=1,
        in_tokens=_FORMS,
        repetition_penalty=1.4,
        logit_bias={3: -2.0, 9: 4.0},
    ),
    SamplingParams(allowed_token_ids=(3, 7, 11), **_WORDS),
    SamplingParams(allowed_token_ids=(7,), temperature=0.0, **_WORDS),
    SamplingParams(allowed_token_ids=(0,), min_tokens=15),
    SamplingParams(allowed_token_ids=(0, 8), min_tokens=15, logprobs=3),
    SamplingParams(thinking_budget=3, in_tokens=_FORMS, allowed_token_ids=(8,)),
    SamplingParams(repetition_penalty=1e308, temperature=0.0),
]


class FixedMask:
    """A grammar whose mask is given; shorter or longer than the vocabulary. With `forced` it takes
    no other token, as at the end of its limit.
    """

    failure = ""

    def __init__(self, mask, vocab, forced=None):
        self._mask, self._vocab, self._forced = mask, vocab, forced

    def allowed_bits(self):
        return bits_of_bytes(self._mask, self._vocab)

    def allows(self, token_id):
        place = token_id // 8
        return place < len(self._mask) and bool(self._mask[place] >> (token_id % 8) & 1)

    def forced_token(self, token_id):
        return token_id if self._forced is None else self._forced
