"""What the set-up of a sequence costs the step that admits it, beside its tokens.

Setting up the sampling of a sequence runs on one thread while all other rows wait: a matcher for
its grammar, penalties over its prompt. One request may bring many sequences at once, and prompts in
the prefix cache need no other work, so the scheduler bounds the set-ups of a step by these prices
and admits the rest in the next steps.

The prices are microseconds per unit, measured on a slow core (2.5 GHz, Python 3.11); only their
proportions and order of magnitude matter.
"""

from __future__ import annotations

from quickstep.core.sequence import Sequence

__all__ = ["MAX_SETUP_US", "setup_us"]

# A step that has begun more than this admits no more; a single sequence may take longer.
MAX_SETUP_US = 2000.0

_GRAMMAR_US = 300.0
_TOKEN_US = 0.04
_REPETITION_TOKEN_US = 0.4
_DRY_TOKEN_US = 0.7


def setup_us(sequence: Sequence) -> float:
    """The price of admitting `sequence`; depends on its request and its length alone."""
    sampling = sequence.request.sampling
    token_us = _TOKEN_US
    if sampling.repetition_penalty != 1.0:
        token_us += _REPETITION_TOKEN_US
    if sampling.dry_multiplier != 0.0:
        token_us += _DRY_TOKEN_US
    grammar_us = 0.0 if sampling.grammar is None else _GRAMMAR_US
    return grammar_us + token_us * len(sequence.token_ids)
