"""Single rows of random logits, what is sampled from them, and a test of many samples."""

import math

import numpy as np
import torch

from quickstep.runtime.sampling.sampler import Sample, sample_row
from quickstep.runtime.sampling.state import SamplingState
from quickstep.types import Admission

VOCAB = 40


def state_of(sampling, prompt=(1, 2, 3), outputs=(), seed=7, eos=(), vocab=VOCAB):
    tokens = tuple(prompt) + tuple(outputs)
    admission = Admission(0, "r#0", tokens, len(prompt), sampling, seed, frozenset(eos))
    return SamplingState(admission, vocab)


def logits_of(seed, rows=1, vocab=VOCAB, scale=3.0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(scale=scale, size=(rows, vocab)).astype(np.float32))


def token_of(row, state):
    sampled = sample_row(row, state)
    assert isinstance(sampled, Sample)
    return sampled.token_id


LOGITS = np.array([2.0, 1.5, 1.5, 0.7, 0.0, -0.3, -1.0, -2.5, 0.2, 1.1, -0.9, 0.4], np.float32)


NUM_SAMPLES = 12_000


def assert_follows(law, tokens):
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert set(np.flatnonzero(counts).tolist()) <= set(law)
    statistic = sum((counts[i] - len(tokens) * p) ** 2 / (len(tokens) * p) for i, p in law.items())
    freedom = len(law) - 1
    assert statistic < freedom + 2 * math.sqrt(freedom * 9.2) + 2 * 9.2
