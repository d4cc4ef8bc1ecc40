"""Draws text under a grammar from random logits, as the sampler would: no model, no engine."""

from __future__ import annotations

import numpy as np

from quickstep.runtime.sampling.sampler import Sample, sample_row
from quickstep.runtime.sampling.state import SamplingState
from quickstep.types import Admission, SamplingParams

PROMPT = (1, 2, 3)


def state_for(compiler, tokenizer, sampling, outputs=(), seed=1, vocab_size=264):
    tokens = (*PROMPT, *outputs)
    ends = tokenizer.eos_token_ids
    if sampling.grammar is not None:
        compiler.compile(sampling.grammar)
    admission = Admission(0, "r#0", tokens, len(PROMPT), sampling, seed, ends)
    return SamplingState(admission, vocab_size, compiler.new_matcher)


def sampled_tokens(compiler, tokenizer, sampling, seed=1, outputs=(), limit=3000, vocab_size=264):
    """Output tokens up to the end token; position n gets the same logits whatever came before."""
    state = state_for(compiler, tokenizer, sampling, outputs, seed, vocab_size)
    tokens = list(outputs)
    while len(tokens) < limit:
        rng = np.random.default_rng((seed, len(tokens)))
        row = rng.normal(scale=3.0, size=vocab_size).astype(np.float32)
        sample = sample_row(row, state)
        assert isinstance(sample, Sample), sample
        tokens.append(sample.token_id)
        state.record(sample.token_id)
        if sample.token_id in tokenizer.eos_token_ids:
            return tokens
    raise AssertionError(f"no end within {limit} tokens")


def sampled_text(compiler, tokenizer, grammar, seed=1, **sampling):
    params = SamplingParams(grammar=grammar, **{"temperature": 2.0, "max_tokens": None, **sampling})
    tokens = sampled_tokens(compiler, tokenizer, params, seed)
    return b"".join(tokenizer.token_bytes(token_id) for token_id in tokens[:-1]).decode()
